"""Exact values of finite models, with bounds.

| file | in -> out | called by |
|---|---|---|
| `bounds` | `TabularPomdp` -> QMDP, FIB and blind values `[A, S]` | solvers, planners |
| `_alpha`, `_points` | alpha vectors `[N, S]`, beliefs `[M, S]` -> more of them, pruned | `solver` |
| `solver` | `TabularPomdp` -> value, bounds, alpha vectors | tests, users |
"""

from jaxpar._renamed import renamed
from jaxpar.pomdp.exact.solver import Exact, solve_exact

__all__ = [
    "Exact",
    "solve_exact",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
