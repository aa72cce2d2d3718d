"""A search tree that one can read: its most visited branches, as text or for a picture."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from jaxpar.env import Discrete, Environment, capabilities
from jaxpar.fields import AtLeast, check_value
from jaxpar.pomdp.planners.planner import SearchPlanner
from jaxpar.pomdp.planners.simulations import SearchState
from jaxpar.pomdp.planners.tree import EMPTY
from jaxpar.pomdp.planners.tree_search import children_of
from jaxpar.types import PyTree

__all__ = ["Branch", "outline"]


@dataclasses.dataclass(frozen=True)
class Branch:
    """The root belief, an action below a belief, or an observation below an action; `str` is an indented text.

    Attributes:
        name: of the action or the observation.
        visits: simulations that came here.
        value: of an action its Q, of a belief that of its best action, or of its leaf.
        below: the most visited ones, in that order.
    """

    name: str
    visits: int
    value: float
    below: tuple["Branch", ...] = ()

    def lines(self, indent: str = "") -> list[str]:
        """One line a branch."""
        own = f"{indent}{self.name}: {self.visits:,} visits, value {self.value:.3f}"
        return [own, *(line for branch in self.below for line in branch.lines(indent + "  "))]

    def __str__(self) -> str:
        return "\n".join(self.lines())


def outline(
    search: SearchState,
    planner: SearchPlanner,
    env: Environment,
    params: PyTree,
    *,
    depth: int = 2,
    width: int = 3,
    actions: Sequence[str] = (),
    observations: Sequence[str] = (),
) -> Branch:
    """The `width` most visited branches at each place of a tree, `depth` steps deep; on the host.

    Args:
        search: what a planner's `search` returned, of one belief.
        planner: that planner.
        env: its environment.
        params: the environment's parameters.
        depth: steps, each an action and an observation.
        width: branches at each place.
        actions: names of the actions, instead of those of the environment's space; without any "a3".
        observations: names of the observation keys, likewise; without any "o7".

    Raises:
        UsageError: a negative depth or width.
    """
    for name, value in (("depth", depth), ("width", width)):
        check_value(name, value, AtLeast(0), int)
    choices = env.action_space(params)
    seen = env.observation_space(params)
    actions = actions or (choices.names if isinstance(choices, Discrete) else ())
    if (
        isinstance(seen, Discrete) and capabilities(env).obs_key is None
    ):  # then the keys are the observations
        observations = observations or seen.names
    tree = jax.tree.map(np.asarray, search.tree)
    links = children_of(planner.children, env, params).links(search.tree.children)
    edge, key, node = (np.asarray(x) for x in links)
    used = node != EMPTY
    order = np.argsort(edge[used], kind="stable")
    edge = edge[used][order]
    key = key[used][order]
    node = node[used][order]

    def named(names: Sequence[str], letter: str, number: int) -> str:
        return str(names[number]) if number < len(names) else f"{letter}{number}"

    def belief(name: str, at: int, left: int) -> Branch:
        row = tree.edges[at]
        tried = np.flatnonzero(row != EMPTY)
        if tried.size:
            value = tree.value[row[tried]].max()
        else:
            value = tree.leaf_sum[at] / max(tree.leaf_visits[at], 1)
        busiest = (
            tried[np.argsort(-tree.edge_visits[row[tried]], kind="stable")][:width]
            if left
            else tried[:0]
        )
        below = tuple(action(named(actions, "a", a), row[a], left) for a in busiest.tolist())
        return Branch(name, int(tree.node_visits[at]), float(value), below)

    def action(name: str, at: int, left: int) -> Branch:
        mine = slice(*np.searchsorted(edge, [at, at + 1]))
        keys = key[mine]
        nodes = node[mine]
        busiest = np.argsort(-tree.node_visits[nodes], kind="stable")[:width]
        below = tuple(
            belief(named(observations, "o", int(keys[i])), int(nodes[i]), left - 1) for i in busiest
        )
        return Branch(name, int(tree.edge_visits[at]), float(tree.value[at]), below)

    return belief("belief", 0, depth)
