"""Root parallelism: independent trees on one belief, whose roots are merged.

Trees differ by their keys alone, so they need not communicate while they grow: on the ambient mesh
(`jaxpar.mesh.use_mesh`) they are split over devices by the rule of "particles", and one small gather of their roots
ends the plan. Within a device they grow under `vmap`. Their sum is not one tree of as many simulations: each is as
shallow as its own budget makes it, but its errors are its own, and a mean over trees is less noisy than any of them.

Source: Chaslot, Winands and van den Herik (2008), "Parallel Monte-Carlo tree search".
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.mesh import constrain, mesh_axes, partition
from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.model import Model
from jaxpar.pomdp.planners import clock
from jaxpar.pomdp.planners import planner as planning
from jaxpar.pomdp.planners.planner import PlanInfo, SearchPlanner, root_value
from jaxpar.pomdp.planners.simulations import SearchState
from jaxpar.types import Array, PRNGKey, Scalar, UsageError

__all__ = ["RootParallel", "merged"]

Rows = TypeVar("Rows")
Shared = TypeVar("Shared")
Split = TypeVar("Split")


def merged(infos: PlanInfo, ranked_by: str, legal: Array) -> tuple[Array, PlanInfo]:
    """One action and one report from the reports of W trees on one belief.

    Visits are summed. Values and preferences of an action are means over the trees that tried it, weighted by its
    visits there, N_w(a): `Q(a) = sum_w N_w(a) Q_w(a) / sum_w N_w(a)`, the mean of all simulations that took it. The
    policy is the mean of the trees' policies, or the share of the visits to legal actions. Of what is counted,
    `depth` is the deepest tree's, `iterations` those of each tree, and the rest sums.

    Args:
        infos: leaves `[W, ...]`.
        ranked_by: "values": the action is that of the highest merged value, which is the root's (`Pomcp` and its kin),
            and `preferences` are shares of the visits; "preferences": that of the highest merged preference, and the
            root's value is the trees' mean (`Vopp`: means of log-preferences are those of a product of policies).
        legal: bool `[A]`, actions that may be taken.
    """
    visits = infos.visits.astype(jnp.float32)
    total = jnp.sum(infos.visits, axis=0)
    tried = total > 0

    def mean(rows: Array) -> Array:
        # -inf of actions that were not tried, times 0 visits, would be NaN.
        rows = jnp.where(visits > 0, visits * jnp.where(visits > 0, rows, 0.0), 0.0)
        return jnp.where(tried, rows.sum(0) / jnp.maximum(total, 1), -jnp.inf)

    values = mean(infos.values)
    policy = jnp.mean(infos.policy, axis=0)
    if ranked_by == "values":
        order = values
        value = jnp.max(jnp.where(legal, values, -jnp.inf))
        share = total.astype(jnp.float32) / jnp.maximum(total.sum(), 1)
        preferences = jnp.where(tried, share, -jnp.inf)
        allowed = jnp.where(legal, total, 0).astype(jnp.float32)
        policy = allowed / jnp.maximum(allowed.sum(), 1)
    else:
        order = preferences = mean(infos.preferences)
        value = jnp.mean(infos.value)
    value = root_value(value, jnp.any(tried), jnp.all(infos.ended >= 1))
    action = jnp.where(
        jnp.any(tried & legal), jnp.argmax(jnp.where(legal, order, -jnp.inf)), jnp.argmax(legal)
    )
    return action.astype(jnp.int32), PlanInfo(
        value=value,
        values=values,
        preferences=preferences,
        policy=policy,
        entropy=-jnp.sum(
            jnp.where(policy > 0, policy * jnp.log(jnp.where(policy > 0, policy, 1.0)), 0.0)
        ),
        visits=total,
        depth=jnp.max(infos.depth),
        iterations=jnp.max(infos.iterations),
        ended=jnp.mean(infos.ended),
        legal=legal,
        nodes=jnp.sum(infos.nodes, axis=0),
        edges=jnp.sum(infos.edges, axis=0),
        steps=jnp.sum(infos.steps, axis=0),
        overflow=jnp.sum(infos.overflow, axis=0),
        invalid=jnp.sum(infos.invalid, axis=0),
        stranded=jnp.sum(infos.stranded, axis=0),
    )


@dataclasses.dataclass(frozen=True)
class RootParallel:
    """Several trees of one planner on the same belief, merged at their roots by `merged`.

    Tree i has the i-th of `trees` children of the key, whatever the devices. Costs as many plans; the trees' memory is
    split with them.

    Attributes:
        planner: `Vopp`, `FixedReference`, `Pomcp`, `Pft`, `Pomcpow`, or another with a `tree_search`. (`Despot` is
            rejected: a tree with all scenarios bounds the value better than several with a part each.)
        trees: W; where the ambient mesh splits "particles", a multiple of its devices.
    """

    planner: SearchPlanner
    trees: int = field(8, AtLeast(1))

    def __post_init__(self) -> None:
        check_fields(self)
        if not isinstance(self.planner, SearchPlanner):
            raise UsageError(
                f"{type(self.planner).__name__}'s roots cannot be merged; give it a larger budget instead"
            )

    @property
    def iterations(self) -> int:
        """Batches of each tree."""
        return self.planner.iterations

    @property
    def num_simulations(self) -> int:
        """Simulations of a batch of all trees."""
        return self.trees * self.planner.num_simulations

    @property
    def discount(self) -> Scalar | None:
        """The planner's."""
        return self.planner.discount

    # Functions that all planners share, as methods (see `planners.planner`).
    plan = planning.plan
    plan_until = clock.plan_until
    search = planning.search

    def tree_search(self) -> "RootParallel":
        """Itself, whose methods are the parts of its plan."""
        return self

    def init_search(self, key: PRNGKey, model: Model, belief: Belief) -> SearchState:
        """The roots, leaves `[W, ...]`, with room for `iterations` batches."""
        parts = self.planner.tree_search()

        def start(keys: PRNGKey, shared: tuple[Model, Belief]) -> SearchState:
            return jax.vmap(lambda key: parts.init_search(key, *shared))(keys)

        return self._split(start)(jax.random.split(key, self.trees), (model, belief))

    def inspect_root(
        self, key: PRNGKey, model: Model, belief: Belief, search: SearchState
    ) -> tuple[SearchState, Array]:
        """As `Search.inspect_root`, by one draw of states for all trees."""
        parts = self.planner.tree_search()

        def look(
            trees: SearchState, shared: tuple[PRNGKey, Model, Belief]
        ) -> tuple[SearchState, Array]:
            return jax.vmap(lambda tree: parts.inspect_root(*shared, tree))(trees)

        trees, nothing = self._split(look)(search, (key, model, belief))
        return trees, nothing[0]

    def grow(
        self, key: PRNGKey, model: Model, belief: Belief, search: SearchState, iterations: int
    ) -> SearchState:
        """`iterations` batches more of each tree."""
        parts = self.planner.tree_search()

        def advance(rows: tuple[PRNGKey, SearchState], shared: tuple[Model, Belief]) -> SearchState:
            return jax.vmap(lambda key, tree: parts.grow(key, *shared, tree, iterations))(*rows)

        keys = jax.random.split(key, self.trees)
        return self._split(advance)((keys, search), (model, belief))

    def decide(self, search: SearchState) -> tuple[Array, PlanInfo]:
        """The action, int32, and the merged report."""
        parts = self.planner.tree_search()

        def report(trees: SearchState, _: tuple[()]) -> PlanInfo:
            return jax.vmap(lambda tree: parts.decide(tree)[1])(trees)

        infos = _whole(self._split(report)(search, ()))
        return merged(infos, parts.ranked_by, jnp.all(infos.legal, axis=0))

    def _split(self, each: Callable[[Rows, Shared], Split]) -> Callable[[Rows, Shared], Split]:
        """`each(rows [W, ...], shared) -> [W, ...]` with W split over the devices, where these are free."""
        over = mesh_axes("particles")
        if not over or set(over) & set(jax.sharding.get_abstract_mesh().manual_axes):
            return each  # inside of `simulate_many` on a mesh a device has episodes of its own

        rows = partition(("particles",), (self.trees,), "trees")
        return jax.shard_map(each, in_specs=(rows, partition(())), out_specs=rows, check_vma=False)


def _whole(infos: PlanInfo) -> PlanInfo:
    """Gathered first and summed then, so that the sum does not depend on the devices."""
    if set(mesh_axes("particles")) & set(jax.sharding.get_abstract_mesh().manual_axes):
        return infos
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), infos)
