"""Planning under partial observability: models, beliefs, planners, and oracles for what is small.

| file | in -> out | called by |
| --- | --- | --- |
| `tabular.py` | arrays or an environment's `tabular` -> `TabularPomdp`, its environment; Bayes | all |
| `cassandra.py` | a `.POMDP` file <-> `TabularPomdp` | experiments, users |
| `pomdpx.py`, `_xml.py` | a POMDPX file <-> `TabularPomdp` | users |
| `policies.py` | a `.policy` or `.alpha` file <-> `Exact` | users |
| `bounds.py` | `TabularPomdp` -> QMDP, FIB and blind values `[A, S]` | exact solvers, planners |
| `exact.py`, `_alpha.py`, `_points.py` | `TabularPomdp` -> value, bounds, alpha vectors `[N, S]` | tests, users |
| `model.py` | an environment -> sizes, legal actions, steps and rollouts of n simulations | planners |
| `belief.py` | belief, action, observation -> belief, evidence; `Belief`, `BeliefUpdater` | planners, `simulate.py` |
| `exact_belief.py` | a finite model -> its chances `[S]` as weighted states | `simulate.py`, `exact.py` |
| `tree.py` | (node, action), (edge, observation) of n simulations -> int32 ids, statistics | planners |
| `adding.py`, `_loops.py` | sums by index in no order; loops over those simulations that go on | `tree.py`, planners |
| `simulations.py` | belief -> n simulations at the root; their ends -> the tree | tree searches |
| `planner.py`, `clock.py` | a planner's search -> action, `PlanInfo`; until a deadline; `Planner` | planners |
| `leaves.py` | states `[n, ...]` -> values `[n]`: the part `evaluate` | planners |
| `tree_search.py` | parts, belief -> a grown tree of `[N]` nodes, `[E]` edges | `vopp.py`, `pomcp.py` |
| `vopp.py`, `pomcp.py` | belief -> action, report | users, `simulate.py` |
| `widening.py` | the number of a visit -> a slot; particles `[m]`, observation -> particles | `pft.py`, `pomcpow.py` |
| `particle_search.py` | parts, belief -> a grown tree of particle sets `[N, m]` | `pft.py`, `pomcpow.py` |
| `pft.py`, `pomcpow.py` | belief -> action, report | users, `simulate.py` |
| `scenarios.py` | states `[K, A]`, keys `[K]` -> steps, what a default policy earns, upper bounds | `despot.py` |
| `scenario_tree.py` | K scenarios -> their tree as arrays, its report | `despot.py` |
| `despot.py` | belief -> K scenarios, a sparse tree with bounds -> action, report | users, `simulate.py` |
| `root_parallel.py` | a planner, belief -> W trees -> action, report `[A]` | users, `simulate.py` |
| `outline.py` | a grown tree -> its most visited branches, as text | users, experiments |
| `simulate.py` | planner, belief updater, environment -> episodes `[T]` | experiments, users |
| `check.py` | an environment or model -> a report, or what it breaks | whoever writes a model |

A planner is made of parts, and planners differ in these:

| planner | select | expand | evaluate | back_up | decide |
| --- | --- | --- | --- | --- | --- |
| `Pomcp` | UCB1, virtual visits | a node a key | rollout, heuristic or 0 | mean return, or best action | best mean |
| `Vopp` | softmax of Psi | as `Pomcp` | as `Pomcp` | Psi moves by Q less its soft value | best Psi |
| `FixedReference` | as `Vopp` | as `Pomcp` | as `Pomcp` | Psi is Q less log(A)/eta | best Psi |
| `Pft` | UCB1 of opened actions | a filter step fills a new node | as `Pomcp` | as `Pomcp` | best mean |
| `Pomcpow` | as `Pft` | a node keeps the weighted states that arrive | as `Pomcp` | as `Pomcp` | best mean |
| `Despot` | highest bound | all actions at a leaf | default policy, upper bound | both bounds | best lower bound |

The first five hold them in `tree_search()`, where `dataclasses.replace` exchanges one; `Despot` has them as methods. A
new part is a function of the same arguments:

Example:
    import dataclasses
    import jax
    from jaxpar import envs
    import jax.numpy as jnp
    from jaxpar.pomdp import ParticleBelief, Pomcp
    from jaxpar.pomdp.tree import EMPTY

    def least_tried(key, tree, simulations, legal):  # the new part: no bound, every action in its turn
        row = tree.edges.at[simulations.node].get(mode="clip")
        visits = jnp.where(row == EMPTY, 0, tree.edge_visits.at[row].get(mode="clip"))
        return jnp.argmin(jnp.where(legal, visits, EMPTY), axis=1)

    tiger, params = envs.make("Tiger")
    planner = dataclasses.replace(Pomcp(1, 30, max_depth=2).tree_search(), select=least_tried)
    belief = ParticleBelief(16).init(jax.random.key(0), tiger, params)
    action, info = jax.jit(lambda key: planner.plan(key, tiger, params, belief))(jax.random.key(1))
    assert info.visits.tolist() == [10, 10, 10]
"""

from jaxpar.pomdp.belief import (
    Belief,
    BeliefUpdater,
    Evidence,
    Gaussian,
    KalmanBelief,
    ParticleBelief,
    Particles,
)
from jaxpar.pomdp.bounds import blind, fib, qmdp
from jaxpar.pomdp.cassandra import load_pomdp, save_pomdp
from jaxpar.pomdp.check import check_model, check_tabular
from jaxpar.pomdp.despot import Despot
from jaxpar.pomdp.exact import Exact, iterated_values, reachable_beliefs, solve_exact
from jaxpar.pomdp.exact_belief import ExactBelief
from jaxpar.pomdp.pft import Pft
from jaxpar.pomdp.planner import AnytimePlanner, PlanInfo, Planner, SearchPlanner
from jaxpar.pomdp.policies import load_policy, save_policy
from jaxpar.pomdp.pomcp import Pomcp
from jaxpar.pomdp.pomcpow import Pomcpow
from jaxpar.pomdp.pomdpx import load_pomdpx, save_pomdpx
from jaxpar.pomdp.root_parallel import RootParallel
from jaxpar.pomdp.scenario_tree import DespotInfo
from jaxpar.pomdp.simulate import (
    DishonestValues,
    Episode,
    Summary,
    simulate,
    simulate_many,
    summarize,
)
from jaxpar.pomdp.tabular import TabularEnvironment, TabularPomdp, from_environment, tabular_update
from jaxpar.pomdp.tree import DenseChildren, HashedChildren
from jaxpar.pomdp.tree_search import TreeSearch
from jaxpar.pomdp.vopp import FixedReference, Vopp

__all__ = [
    "AnytimePlanner",
    "Belief",
    "BeliefUpdater",
    "DenseChildren",
    "Despot",
    "DespotInfo",
    "DishonestValues",
    "Episode",
    "Evidence",
    "Exact",
    "ExactBelief",
    "FixedReference",
    "Gaussian",
    "HashedChildren",
    "KalmanBelief",
    "ParticleBelief",
    "Particles",
    "Pft",
    "PlanInfo",
    "Planner",
    "Pomcp",
    "Pomcpow",
    "RootParallel",
    "SearchPlanner",
    "Summary",
    "TabularEnvironment",
    "TabularPomdp",
    "TreeSearch",
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
