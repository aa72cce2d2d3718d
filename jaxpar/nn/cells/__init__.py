"""Recurrent cells, layers of them over whole sequences, and networks of such layers.

| file | in -> out shapes | called by |
|---|---|---|
| `cell` | a step h[t] = step(params, h[t-1], projections[t]) and facts about it | all below |
| `gated`, `aaren`, `s5` | params, h [B, n], projections [B, n] -> h [B, n] | `layer` |
| `layer`, `solvers` | cell, params, xs [B, T, D], h0 -> ys [B, T, n], h; names of methods | users, `mixers` |
| `conv_embedding`, `network`, `stack_network` | params, xs [B, T, D] -> [B, T, C]; trainer | experiments |
"""

from jaxpar.nn.cells.cell import (
    Cell,
    SequenceCell,
    along,
    gate_leaves,
    gate_products,
    heads_product,
)

__all__ = ["Cell", "SequenceCell", "along", "gate_leaves", "gate_products", "heads_product"]
