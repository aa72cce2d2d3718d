"""Nonlinear recurrences in parallel over time: the states of all steps are the root of one system of equations.

| file | in -> out shapes | called by |
|---|---|---|
| `parallel` | f, init, xs [T, ...] -> last state, outputs [T, ...], `Stats` | users |
| `program`, `structure` | f -> its program on leaves; which entries of a state are coupled: [*batch, n] | `parallel` |
| `solution` | parameters, start, xs -> states [T, ...], with their derivatives | `parallel` |
| `newton`, `fixed_point`, `sequential` | `Problem` -> states [T, ...]: the methods | `solution` |
| `windows`, `iterate` | a method's update [W, ...] -> states [W, ...] of each window in turn | iterative methods |

A method is a frozen dataclass with `jac` and `states` (`problem.Method`); one that iterates has `update` and `held`,
and its `states` is `windows.by_windows`. Nothing else has to know of a new one.
"""

from jaxpar.solve.fixed_point import Jacobi, Picard
from jaxpar.solve.newton import Newton, Quasi
from jaxpar.solve.parallel import Stats, parallel_scan
from jaxpar.solve.sequential import ParallelBackward, Sequential
from jaxpar.solve.structure import Block, Dense, check_structure

__all__ = [
    "Block",
    "Dense",
    "Jacobi",
    "Newton",
    "ParallelBackward",
    "Picard",
    "Quasi",
    "Sequential",
    "Stats",
    "check_structure",
    "parallel_scan",
]
