"""Planning under partial observability: models, beliefs, planners, and oracles for what is small.

| file | in -> out | called by |
| --- | --- | --- |
| `tabular.py` | arrays or an environment's `tabular` -> `TabularPomdp`, its environment; Bayes | all |
| `cassandra.py` | a `.POMDP` file <-> `TabularPomdp` | experiments, users |
| `pomdpx.py`, `_xml.py` | a POMDPX file <-> `TabularPomdp` | users |
| `policies.py` | a `.policy` or `.alpha` file <-> `Exact` | users |
| `bounds.py` | `TabularPomdp` -> QMDP, FIB and blind values `[A, S]` | exact solvers, planners |
| `exact.py`, `_alpha.py`, `_points.py` | `TabularPomdp` -> value, bounds, alpha vectors `[N, S]` | tests, users |
| `model.py` | an environment -> sizes, legal actions, steps and leaf values of n simulations | planners |
| `belief.py` | belief, action, observation -> belief, evidence | planners, `simulate.py` |
| `exact_belief.py` | a finite model -> its chances `[S]` as weighted states | `simulate.py`, `exact.py` |
| `tree.py` | (node, action), (edge, observation) of n simulations -> int32 ids, statistics | planners |
| `adding.py`, `_loops.py` | sums by index in no order; loops over those simulations that go on | `tree.py`, planners |
| `search.py`, `clock.py` | belief -> a grown tree `[N]` nodes, `[E]` edges; until a deadline | planners |
| `vopp.py`, `pomcp.py` | belief -> action, report | users, `simulate.py` |
| `widening.py` | the number of a visit -> a slot; particles `[m]`, observation -> particles | `pft.py`, `pomcpow.py` |
| `pft.py`, `pomcpow.py` | belief -> a tree of particle sets `[N, m]` -> action, report | users, `simulate.py` |
| `scenarios.py` | states `[K, A]`, keys `[K]` -> steps, what a default policy earns, upper bounds | `despot.py` |
| `scenario_tree.py` | K scenarios -> their tree as arrays, its report | `despot.py` |
| `despot.py` | belief -> K scenarios, a sparse tree with bounds -> action, report | users, `simulate.py` |
| `root_parallel.py` | a planner, belief -> W trees -> action, report `[A]` | users, `simulate.py` |
| `simulate.py` | planner, belief, environment -> episodes `[T]` | experiments, users |
| `check.py` | an environment or model -> a report, or what it breaks | whoever writes a model |
"""

from jaxpar.pomdp.belief import Evidence, Gaussian, KalmanBelief, ParticleBelief, Particles
from jaxpar.pomdp.bounds import blind, fib, qmdp
from jaxpar.pomdp.cassandra import load_pomdp, save_pomdp
from jaxpar.pomdp.check import check_model, check_tabular
from jaxpar.pomdp.despot import Despot
from jaxpar.pomdp.exact import Exact, iterated_values, reachable_beliefs, solve_exact
from jaxpar.pomdp.exact_belief import ExactBelief
from jaxpar.pomdp.pft import Pft
from jaxpar.pomdp.policies import load_policy, save_policy
from jaxpar.pomdp.pomcp import Pomcp
from jaxpar.pomdp.pomcpow import Pomcpow
from jaxpar.pomdp.pomdpx import load_pomdpx, save_pomdpx
from jaxpar.pomdp.root_parallel import RootParallel
from jaxpar.pomdp.scenario_tree import DespotInfo
from jaxpar.pomdp.search import PlanInfo
from jaxpar.pomdp.simulate import DishonestValues, Episode, Summary, simulate, simulate_many, summarize
from jaxpar.pomdp.tabular import TabularEnvironment, TabularPomdp, from_environment, tabular_update
from jaxpar.pomdp.tree import Dense, Hashed
from jaxpar.pomdp.vopp import FixedReference, Vopp

__all__ = [
    "Dense",
    "Despot",
    "DespotInfo",
    "DishonestValues",
    "Episode",
    "Evidence",
    "Exact",
    "ExactBelief",
    "FixedReference",
    "Gaussian",
    "Hashed",
    "KalmanBelief",
    "ParticleBelief",
    "Particles",
    "Pft",
    "PlanInfo",
    "Pomcp",
    "Pomcpow",
    "RootParallel",
    "Summary",
    "TabularEnvironment",
    "TabularPomdp",
    "Vopp",
    "blind",
    "check_model",
    "check_tabular",
    "fib",
    "from_environment",
    "iterated_values",
    "load_policy",
    "load_pomdp",
    "load_pomdpx",
    "qmdp",
    "reachable_beliefs",
    "save_policy",
    "save_pomdp",
    "save_pomdpx",
    "simulate",
    "simulate_many",
    "solve_exact",
    "summarize",
    "tabular_update",
]
