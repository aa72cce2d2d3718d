"""Nonlinear recurrences in parallel over time.

| file | in -> out | called by |
|---|---|---|
| `parallel` | f, init, xs [T, ...] -> carry, ys [T, ...], `Stats`: `parallel_scan` | users |
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
