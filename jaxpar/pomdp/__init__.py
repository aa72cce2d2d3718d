"""Planning under partial observability: models, beliefs, planners, and oracles for what is small.

| file | in -> out | called by |
| --- | --- | --- |
| `tabular.py` | arrays or an environment's `tabular` -> `TabularPomdp`, its environment; Bayes | all |
| `cassandra.py` | a `.POMDP` file <-> `TabularPomdp` | experiments, users |
| `bounds.py` | `TabularPomdp` -> QMDP, FIB and blind values `[A, S]` | exact solvers, planners |
| `exact.py`, `_alpha.py`, `_points.py` | `TabularPomdp` -> value, bounds, alpha vectors `[N, S]` | tests, users |
| `check.py` | an environment or model -> a report, or what it breaks | whoever writes a model |
"""

from jaxpar.pomdp.bounds import blind, fib, qmdp
from jaxpar.pomdp.cassandra import load_pomdp, save_pomdp
from jaxpar.pomdp.check import check_model, check_tabular
from jaxpar.pomdp.exact import Exact, iterated_values, reachable_beliefs, solve_exact
from jaxpar.pomdp.tabular import TabularEnvironment, TabularPomdp, from_environment, tabular_update

__all__ = [
    "Exact",
    "TabularEnvironment",
    "TabularPomdp",
    "blind",
    "check_model",
    "check_tabular",
    "fib",
    "from_environment",
    "iterated_values",
    "load_pomdp",
    "qmdp",
    "reachable_beliefs",
    "save_pomdp",
    "solve_exact",
    "tabular_update",
]
