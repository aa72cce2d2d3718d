"""Mixers beside attention, which has a room of its own.

| file | in -> out shapes | called by |
|---|---|---|
| `recurrent` | params, x [B, T, D], state [B, n] -> y [B, T, D], state | `stack`, `network`, `rl` |
| `hgrn` | params, x [B, T, D], state [B, n] -> y [B, T, D], state | `stack` |
"""

from jaxpar.nn.mixers.hgrn import Hgrn
from jaxpar.nn.mixers.recurrent import CELLS, Recurrent, cell_of

__all__ = ["CELLS", "Hgrn", "Recurrent", "cell_of"]
