"""Planning under partial observability: models, beliefs, planners, and oracles for what is small.

| file | in -> out | called by |
| --- | --- | --- |
| `tabular` | arrays or an environment's `tabular` -> `TabularPomdp`, its environment; Bayes | all |
| `files` | `.POMDP`, POMDPX, `.policy` and `.alpha` files <-> `TabularPomdp`, `Exact` | users |
| `model` | environment, parameters, discount -> `Model`; steps, rollouts of n states | planners |
| `beliefs` | belief, action, observation -> belief, evidence | planners, `simulate` |
| `exact` | `TabularPomdp` -> value, bounds, alpha vectors `[N, S]` | planners, tests, users |
| `planners` | belief -> action, report | `simulate`, users |
| `simulate` | planner, belief updater, environment -> episodes `[T]` | experiments, users |
| `check` | an environment or model -> a report, or what it breaks | users |

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
    from jaxpar.pomdp.planners.tree import EMPTY

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

from jaxpar._renamed import renamed
from jaxpar.pomdp.beliefs.belief import (
    Belief,
    BeliefUpdater,
    Evidence,
    Gaussian,
    KalmanBelief,
    ParticleBelief,
    Particles,
)
from jaxpar.pomdp.beliefs.exact_belief import ExactBelief
from jaxpar.pomdp.check import check_model
from jaxpar.pomdp.exact.bounds import blind, fib, qmdp
from jaxpar.pomdp.exact.solver import Exact, Trials, solve_exact
from jaxpar.pomdp.files.cassandra import load_pomdp, save_pomdp
from jaxpar.pomdp.files.policies import load_policy, save_policy
from jaxpar.pomdp.files.pomdpx import load_pomdpx, save_pomdpx
from jaxpar.pomdp.model import discount_of
from jaxpar.pomdp.planners.despot import Despot
from jaxpar.pomdp.planners.outline import Branch, outline
from jaxpar.pomdp.planners.pft import Pft
from jaxpar.pomdp.planners.planner import AnytimePlanner, PlanInfo, Planner, SearchPlanner
from jaxpar.pomdp.planners.pomcp import Pomcp
from jaxpar.pomdp.planners.pomcpow import Pomcpow
from jaxpar.pomdp.planners.root_parallel import RootParallel
from jaxpar.pomdp.planners.tree_search import TreeSearch
from jaxpar.pomdp.planners.vopp import FixedReference, Vopp
from jaxpar.pomdp.simulate import (
    DishonestValues,
    Episode,
    Summary,
    dishonesty,
    simulate,
    simulate_many,
    summarize,
)
from jaxpar.pomdp.tabular import TabularEnvironment, TabularPomdp, from_environment, tabular_update

__all__ = [
    "AnytimePlanner",
    "Belief",
    "BeliefUpdater",
    "Branch",
    "Despot",
    "DishonestValues",
    "Episode",
    "Evidence",
    "Exact",
    "ExactBelief",
    "FixedReference",
    "Gaussian",
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
    "Trials",
    "Vopp",
    "blind",
    "check_model",
    "discount_of",
    "dishonesty",
    "fib",
    "from_environment",
    "load_policy",
    "load_pomdp",
    "load_pomdpx",
    "outline",
    "qmdp",
    "save_policy",
    "save_pomdp",
    "save_pomdpx",
    "simulate",
    "simulate_many",
    "solve_exact",
    "summarize",
    "tabular_update",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
