"""Root parallelism: independent trees on one belief, whose roots are merged.

Trees differ by their keys alone, so they need not communicate while they grow: on the ambient mesh
(`jaxpar.mesh.use_mesh`) they are split over devices by the rule of "particles", and one small gather of their roots
ends the plan. Within a device they grow under `vmap`. Their sum is not one tree of as many simulations: each is as
shallow as its own budget makes it, but its errors are its own, and a mean over trees is less noisy than any of them.

Source: Chaslot, Winands and van den Herik (2008), "Parallel Monte-Carlo tree search".
"""

import dataclasses
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.env import Environment
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.mesh import constrain, mesh_axes, partition
from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.model import legal_actions
from jaxpar.pomdp.planners.clock import nothing_to_plan, refuse_empty, repeat_until
from jaxpar.pomdp.planners.planner import PlanInfo, SearchPlanner, root_value
from jaxpar.types import Array, PRNGKey, PyTree, Scalar, UsageError

__all__ = ["RootParallel", "merged"]


def merged(infos: PlanInfo, ranked_by: str, legal: Array) -> tuple[Array, PlanInfo]:
    """One action and one report from the reports of W trees on one belief.

    Visits are summed. Values and preferences of an action are means over the trees that tried it, weighted by its
    visits there, N_w(a): `Q(a) = sum_w N_w(a) Q_w(a) / sum_w N_w(a)`, the mean of all simulations that took it. The
    policy is the mean of the trees' policies. Of what is counted, `depth` is the deepest tree's, `iterations` those of
    each tree, and the rest sums.

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

    values, policy = mean(infos.values), jnp.mean(infos.policy, axis=0)
    if ranked_by == "values":
        order, value = values, jnp.max(jnp.where(legal, values, -jnp.inf))
        share = total.astype(jnp.float32) / jnp.maximum(total.sum(), 1)
        preferences, policy = jnp.where(tried, share, -jnp.inf), share
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
            refused: a tree with all scenarios bounds the value better than several with a part each.)
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

    def plan(
        self, key: PRNGKey, env: Environment, params: PyTree, belief: Belief
    ) -> tuple[Array, PlanInfo]:
        """An action for `belief`, int32, with its report; pure, with a fixed budget; consumes `key`."""

        def report(keys: PRNGKey, shared: tuple) -> PlanInfo:
            params, belief = shared
            return jax.vmap(lambda key: self.planner.plan(key, env, params, belief)[1])(keys)

        infos = _whole(self._split(report)(jax.random.split(key, self.trees), (params, belief)))
        return merged(infos, self.planner.tree_search().ranked_by, jnp.all(infos.legal, axis=0))

    def plan_until(
        self,
        key: PRNGKey,
        env: Environment,
        params: PyTree,
        belief: Belief,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[Array, PlanInfo]:
        """As `plan`, with as many of the batches, of all trees at once, as end before `deadline` on `clock` (s).

        A deadline that is too short for one batch still gives a legal action, with `iterations` 0.

        Raises:
            UsageError: every state drawn from the belief has ended.
        """
        states = belief.sample(key, self.planner.num_simulations)
        refuse_empty(nothing_to_plan(env, params, belief, states))
        keys = jax.random.split(key, self.trees)
        trees = jax.tree.map(
            jnp.copy, _begun(keys, self, env, params, belief)
        )  # shared buffers cannot be donated

        def advance(trees: PyTree) -> PyTree:
            return _grown(keys, self, env, params, belief, trees)

        legal = jnp.all(legal_actions(env, params, states), axis=0)
        return _decided(self, repeat_until(advance, trees, self.iterations, deadline, clock), legal)

    def _split(self, each: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """`each(keys [W], shared, *rows [W, ...]) -> [W, ...]` with W split over the devices, where these are free."""
        over = mesh_axes("particles")
        if not over or set(over) & set(jax.sharding.get_abstract_mesh().manual_axes):
            return each  # inside of `simulate_many` on a mesh a device has episodes of its own
        rows, same = partition(("particles",), (self.trees,), "trees"), partition(())

        def split(keys: PRNGKey, shared: tuple, *more: PyTree) -> PyTree:
            specs = (rows, same, *[rows] * len(more))
            return jax.shard_map(each, in_specs=specs, out_specs=rows, check_vma=False)(
                keys, shared, *more
            )

        return split


def _whole(infos: PlanInfo) -> PlanInfo:
    """Gathered first and summed then, so that the sum does not depend on the devices."""
    if set(mesh_axes("particles")) & set(jax.sharding.get_abstract_mesh().manual_axes):
        return infos
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), infos)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _begun(
    keys: PRNGKey, planner: RootParallel, env: Environment, params: PyTree, belief: Belief
) -> PyTree:
    searching = planner.planner.tree_search()

    def begin(keys: PRNGKey, shared: tuple) -> PyTree:
        params, belief = shared
        return jax.vmap(lambda key: searching.init_search(env, params, belief))(keys)

    return planner._split(begin)(keys, (params, belief))


@functools.partial(jax.jit, static_argnums=(1, 2), donate_argnums=5)
def _grown(
    keys: PRNGKey,
    planner: RootParallel,
    env: Environment,
    params: PyTree,
    belief: Belief,
    trees: PyTree,
) -> PyTree:
    searching = planner.planner.tree_search()

    def grow(keys: PRNGKey, shared: tuple, trees: PyTree) -> PyTree:
        params, belief = shared
        return jax.vmap(lambda key, tree: searching.grow(key, env, params, belief, tree, 1))(
            keys, trees
        )

    return planner._split(grow)(keys, (params, belief), trees)


@functools.partial(jax.jit, static_argnums=0)
def _decided(planner: RootParallel, trees: PyTree, legal: Array) -> tuple[Array, PlanInfo]:
    searching = planner.planner.tree_search()
    infos = _whole(jax.vmap(lambda tree: searching.decide(tree)[1])(trees))
    return merged(infos, searching.ranked_by, legal & jnp.all(infos.legal, axis=0))
