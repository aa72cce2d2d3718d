"""Split, broadcast and partial: how an array lies along each mesh axis, and what another placement of it costs.

| file | in -> out | called by |
|---|---|---|
| `placements` | two placements, a shape -> the cheapest collectives | `experiments.estimate`, users, files below |
| `convert` | an array at rest in one placement -> the same in another | users |
| `chain` | placements of x, w1, w2, ... -> the cheapest way of x @ w1 @ w2 | users |
"""

from jaxpar.parallel.placement.chain import MATMUL_PLACEMENTS, ChainPlacement, Stage, matmul_placements, place_chain
from jaxpar.parallel.placement.convert import convert, specs
from jaxpar.parallel.placement.placements import OPS, Broadcast, ConversionStep, Partial, Placement, Split, conversion

__all__ = [
    "MATMUL_PLACEMENTS",
    "OPS",
    "Broadcast",
    "ChainPlacement",
    "ConversionStep",
    "Partial",
    "Placement",
    "Split",
    "Stage",
    "conversion",
    "convert",
    "matmul_placements",
    "place_chain",
    "specs",
]
