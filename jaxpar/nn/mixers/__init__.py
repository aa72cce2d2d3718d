"""Mixers beside attention, which has a room of its own.

| file | in -> out shapes | called by |
|---|---|---|
| `recurrent` | params, x [B, T, D], state [B, n] -> y [B, T, D], state | `stack`, `network`, `rl` |
"""

from jaxpar.nn.mixers.recurrent import CELLS, Recurrent, cell_of

__all__ = ["CELLS", "Recurrent", "cell_of"]
