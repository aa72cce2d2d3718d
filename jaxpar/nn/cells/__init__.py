"""Recurrent cells, layers of them over whole sequences, and networks of such layers.

| file | in -> out shapes | called by |
|---|---|---|
| `cell` | a step h[t] = step(params, h[t-1], projections[t]) and facts about it | all below |
| `gated`, `aaren`, `s5` | params, h [B, n], projections [B, n] -> h [B, n] | `layer` |
| `layer`, `solvers` | cell, params, xs [B, T, D], h0 -> ys [B, T, n], h; names of methods | users, `mixers` |
| `conv_embedding`, `network`, `stack_network` | params, xs [B, T, D] -> [B, T, C]; trainer | experiments |
"""

from jaxpar._renamed import renamed
from jaxpar.nn.cells.cell import Cell, SequenceCell, along
from jaxpar.nn.cells.conv_embedding import ConvEmbedding
from jaxpar.nn.cells.solvers import METHODS, name_taken, solver
from jaxpar.nn.cells.stack_network import StackNetwork

__all__ = [
    "METHODS",
    "Cell",
    "ConvEmbedding",
    "SequenceCell",
    "StackNetwork",
    "along",
    "name_taken",
    "solver",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
