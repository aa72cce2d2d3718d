"""Nonlinear recurrences in parallel over time: the states of all steps are the root of one system of equations.

| file | in -> out shapes | called by |
|---|---|---|
| `parallel` | f, init, xs [T, ...] -> last state, outputs [T, ...], `Stats` | users |
| `carries` | f, its leaves -> which to solve for, and the others before each step [T, ...] | `parallel`, `auto` |
| `program`, `structure` | f -> its program on leaves; which entries of a state are coupled: [*batch, n] | `parallel` |
| `solution` | parameters, start, xs -> states [T, ...], with their derivatives | `parallel` |
| `newton`, `fixed_point`, `sequential` | `Problem` -> states [T, ...]: the methods | `solution` |
| `elk`, `gauss_seidel` | likewise | `solution` |
| `windows`, `iterate` | a method's update [W, ...] -> states [W, ...] of each window in turn | iterative methods |
| `blindness` | program of f -> the leaves with parts that its derivative does not see | `parallel`, `default` |
| `in_blocks` | states [T, ...] -> states that f makes of each other to the bit, block by block | `windows` |
| `default` | f, init, xs -> the method to take by default, and why | users, `parallel` |
| `lyapunov`, `auto` | f, init, xs -> exponent []; the method to take as measured | users |
| `causal` | update, guess [N, ...] -> x = update(x) [N, ...] | users, `jaxpar.nn` |
| `systems` | fields, densities -> f for `parallel` | users |

A method is a frozen dataclass with `jac` and `states` (`problem.Method`); one that iterates has `update` and `held`,
and its `states` calls `windows.by_windows`. Nothing else has to know of a new one.
"""

from jaxpar._renamed import renamed
from jaxpar.solve.auto import Auto, choose
from jaxpar.solve.causal import causal_fixed_point, check_causal
from jaxpar.solve.default import explain
from jaxpar.solve.elk import Elk
from jaxpar.solve.fixed_point import Jacobi, Picard
from jaxpar.solve.fused import Fused
from jaxpar.solve.gauss_seidel import GaussSeidel
from jaxpar.solve.lyapunov import lyapunov
from jaxpar.solve.newton import Newton, Quasi
from jaxpar.solve.parallel import Stats, parallel_scan
from jaxpar.solve.sequential import ParallelBackward, Sequential
from jaxpar.solve.structure import Block, Dense, check_structure
from jaxpar.solve.systems import intervals, ode_step

__all__ = [
    "Auto",
    "Block",
    "Dense",
    "Elk",
    "Fused",
    "GaussSeidel",
    "Jacobi",
    "Newton",
    "ParallelBackward",
    "Picard",
    "Quasi",
    "Sequential",
    "Stats",
    "causal_fixed_point",
    "check_causal",
    "check_structure",
    "choose",
    "explain",
    "intervals",
    "lyapunov",
    "ode_step",
    "parallel_scan",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
