"""Root parallelism: independent trees on one belief, whose roots are merged.

Trees differ by their keys alone, so they need not speak while they grow: on the ambient mesh (`jaxpar.mesh.use_mesh`)
they are split over devices by the rule of "particles", and one small gather of their roots ends the plan. Within a
device they grow under `vmap`. Their sum is not one tree of as many simulations: each is as shallow as its own budget
makes it, but its errors are its own, and a mean over trees is less noisy than any of them.

Source: Chaslot, Winands and van den Herik (2008), "Parallel Monte-Carlo tree search".
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.mesh import constrain, mesh_axes, partition
from jaxpar.pomdp.clock import nothing_to_plan, refuse, repeat_until
from jaxpar.pomdp.model import legal_actions
from jaxpar.pomdp.search import PlanInfo, root_value
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

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
    action = jnp.where(jnp.any(tried & legal), jnp.argmax(jnp.where(legal, order, -jnp.inf)), jnp.argmax(legal))
    summed = ("nodes", "edges", "steps", "overflow", "invalid", "stranded")
    return action.astype(jnp.int32), PlanInfo(
        value=value,
        values=values,
        preferences=preferences,
        policy=policy,
        entropy=-jnp.sum(jnp.where(policy > 0, policy * jnp.log(jnp.where(policy > 0, policy, 1.0)), 0.0)),
        visits=total,
        depth=jnp.max(infos.depth),
        iterations=jnp.max(infos.iterations),
        ended=jnp.mean(infos.ended),
        legal=legal,
        **{name: jnp.sum(getattr(infos, name), axis=0) for name in summed},
    )


@dataclasses.dataclass(frozen=True)
class RootParallel:
    """Several trees of one planner on the same belief, merged at their roots by `merged`.

    Tree i has the i-th of `trees` children of the key, whatever the devices. Costs as many plans; the trees' memory is
    split with them.

    Attributes:
        planner: `Vopp`, `FixedReference`, `Pomcp`, `Pft` or `Pomcpow`. (`Despot` is refused: a tree with all scenarios
            bounds the value better than several with a part each.)
        trees: W; where the ambient mesh splits "particles", a multiple of its devices.
    """

    planner: Any
    trees: int = field(8, AtLeast(1))

    def __post_init__(self) -> None:
        check_fields(self)
        if not hasattr(self.planner, "ranked_by"):
            raise UsageError(f"{type(self.planner).__name__}'s roots cannot be merged; give it a larger budget instead")

    @property
    def iterations(self) -> int:
        """Batches of each tree."""
        return self.planner.iterations

    @property
    def num_simulations(self) -> int:
        """Simulations of a batch of all trees."""
        return self.trees * self.planner.num_simulations

    @property
    def discount(self) -> Any:
        """The planner's."""
        return self.planner.discount

    def plan(self, key: PRNGKey, env: Any, params: PyTree, belief: Any) -> tuple[Array, PlanInfo]:
        """An action for `belief`, int32, with its report; pure, with a fixed budget; consumes `key`."""

        def report(keys: PRNGKey, told: tuple) -> PlanInfo:
            return jax.vmap(lambda key: self.planner.plan(key, env, *told)[1])(keys)

        infos = _whole(self._split(report)(jax.random.split(key, self.trees), (params, belief)))
        return merged(infos, self.planner.ranked_by, jnp.all(infos.legal, axis=0))

    def plan_until(
        self,
        key: PRNGKey,
        env: Any,
        params: PyTree,
        belief: Any,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> tuple[Array, PlanInfo]:
        """As `plan`, with as many of the batches, of all trees at once, as end before `deadline` on `clock` (s).

        A deadline that is too short for one batch still gives a legal action, with `iterations` 0.

        Raises:
            UsageError: every state drawn from the belief has ended.
        """
        states = belief.draw(key, self.planner.num_simulations)
        refuse(nothing_to_plan(env, params, belief, states))
        keys = jax.random.split(key, self.trees)
        trees = jax.tree.map(jnp.copy, _begun(self, env, keys, params, belief))  # shared buffers cannot be donated

        def advance(trees: PyTree) -> PyTree:
            return _grown(self, env, keys, params, belief, trees)

        legal = jnp.all(legal_actions(env, params, states), axis=0)
        return _decided(self, repeat_until(advance, trees, self.iterations, deadline, clock), legal)

    def _split(self, each: Callable[..., PyTree]) -> Callable[..., PyTree]:
        """`each(keys [W], told, *rows [W, ...]) -> [W, ...]` with W split over the devices, where these are free."""
        over = mesh_axes("particles")
        if not over or set(over) & set(jax.sharding.get_abstract_mesh().manual_axes):
            return each  # inside of `simulate_many` on a mesh a device has episodes of its own
        rows, same = partition(("particles",), (self.trees,), "trees"), partition(())

        def split(keys: PRNGKey, told: tuple, *more: PyTree) -> PyTree:
            specs = (rows, same, *[rows] * len(more))
            return jax.shard_map(each, in_specs=specs, out_specs=rows, check_vma=False)(keys, told, *more)

        return split


def _whole(infos: PlanInfo) -> PlanInfo:
    """Gathered first and summed then, so that the sum does not depend on the devices."""
    if set(mesh_axes("particles")) & set(jax.sharding.get_abstract_mesh().manual_axes):
        return infos
    return jax.tree.map(lambda x: constrain(x, *[None] * x.ndim), infos)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _begun(planner: RootParallel, env: Any, keys: PRNGKey, params: PyTree, belief: Any) -> PyTree:
    def begin(keys: PRNGKey, told: tuple) -> PyTree:
        return jax.vmap(lambda key: planner.planner.begin(env, *told, planner.iterations))(keys)

    return planner._split(begin)(keys, (params, belief))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=5)
def _grown(planner: RootParallel, env: Any, keys: PRNGKey, params: PyTree, belief: Any, trees: PyTree) -> PyTree:
    def grow(keys: PRNGKey, told: tuple, trees: PyTree) -> PyTree:
        return jax.vmap(lambda key, tree: planner.planner.grow(key, env, *told, tree, 1))(keys, trees)

    return planner._split(grow)(keys, (params, belief), trees)


@functools.partial(jax.jit, static_argnums=0)
def _decided(planner: RootParallel, trees: PyTree, legal: Array) -> tuple[Array, PlanInfo]:
    infos = _whole(jax.vmap(lambda tree: planner.planner.decide(tree)[1])(trees))
    return merged(infos, planner.planner.ranked_by, legal & jnp.all(infos.legal, axis=0))
