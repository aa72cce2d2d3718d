"""Split, broadcast and partial: how an array lies along each mesh axis, and what another placement of it costs.

| file | in -> out | called by |
|---|---|---|
| `placements` | two placements, a shape -> the cheapest collectives | `experiments.plan`, users, files below |
| `convert` | an array at rest in one placement -> the same in another | users |
| `chain` | placements of x, w1, w2, ... -> the cheapest plan of x @ w1 @ w2 | users |
"""

from jaxpar.parallel.placement.chain import MATMUL, Plan, Stage, matmul_placements, plan_chain
from jaxpar.parallel.placement.convert import convert, specs
from jaxpar.parallel.placement.placements import OPS, Broadcast, Partial, Placement, Split, Step, conversion

__all__ = [
    "MATMUL",
    "OPS",
    "Broadcast",
    "Partial",
    "Placement",
    "Plan",
    "Split",
    "Stage",
    "Step",
    "conversion",
    "convert",
    "matmul_placements",
    "plan_chain",
    "specs",
]
