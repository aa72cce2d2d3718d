"""Mixers beside attention, which has a room of its own.

| file | in -> out shapes | called by |
|---|---|---|
| `recurrent` | params, x [B, T, D], state [B, n] -> y [B, T, D], state | `stack`, `network`, `rl` |
| `legendre` | u [B, T, H], memory [B, H, d] -> memories [B, T, H, d]: scan, transform, chunks | `lmu` |
| `spikes` | currents [B, T, ...], potentials [B, ...] -> spikes and potentials [B, T, ...] | `lmu` |
| `lmu` | params, x [B, T, D], memory [B, H, d] -> y [B, T, D], memory | `stack`, `lm.config` |
| `in_windows` | q, k, v [B, T, H, K], two windows of them -> [B, T, H, K] | `block_recurrent`, `tcnca` |
| `block_recurrent` | params, x [B, T, D], two windows and states [B, S, D] -> the same | `stack`, `lm.config` |
| `tcnca` | params, x [B, T, D], last inputs and a chunk -> the same | `stack`, `lm.config` |
"""

from jaxpar.nn.mixers.block_recurrent import BlockRecurrent
from jaxpar.nn.mixers.lmu import Lmu
from jaxpar.nn.mixers.recurrent import CELLS, Recurrent, cell_of
from jaxpar.nn.mixers.tcnca import Tcnca

__all__ = ["CELLS", "BlockRecurrent", "Lmu", "Recurrent", "Tcnca", "cell_of"]
