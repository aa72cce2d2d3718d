"""One step of gradient descent: clip, rule, decay, rate, and nothing that is not finite is kept."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jax.typing import ArrayLike

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.optim.masks import matrices
from jaxpar.types import Array, Info, PyTree, UsageError

__all__ = ["Joined", "Optimizer", "finite_or_old"]


class Joined(NamedTuple):
    """Parameters and an optimizer's state as `Optimizer.joined` gives them.

    Attributes:
      params: Float `[N]`, all of them; or as they were.
      state: The optimizer's state for these.
      part: From such parameters to those of before.
      part_state: From such a state to one of those.
    """

    params: PyTree
    state: PyTree
    part: Callable[[PyTree], PyTree]
    part_state: Callable[[PyTree], PyTree]


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An update rule with all that goes around it: `init(params)`, then `update(grads, state, params)`.

        new = params - rate * (direction + weight_decay * params),    direction = rule(clipped gradient)

    With a schedule the state is that of the optax chain clip, (rule, decay, rate), or clip, (rule, rate), decay with
    `decay_last`. Without one nothing counts the steps, and the state is that of the rule alone.

    Attributes:
      rule: From gradients to a direction, as optax's `scale_by_*`; the rate and its sign are not the rule's.
      schedule: int step [] -> rate []; None where every update is given its rate.
      clip_norm: Largest global norm of a gradient; 0 switches clipping off.
      weight_decay: Decoupled decay.
      decays: What decays: a pytree of bools, or a function of the parameters that returns one.
      scales: None, or a function of the parameters that returns, for each, what its steps are multiplied by: a number,
        or an array that broadcasts.
      decay_last: Adds -(rate * weight_decay) * params to the step instead, equal but for rounding: Muon's order.
      elementwise: Whether the rule treats every number alike, whichever leaf it is in, so that leaves may be `joined`.
    """

    rule: optax.GradientTransformation
    schedule: optax.Schedule | None = None
    clip_norm: float = field(0.0, AtLeast(0))
    weight_decay: float = field(0.0, AtLeast(0))
    decays: Any = matrices
    decay_last: bool = False
    scales: Callable[[PyTree], PyTree] | None = None
    elementwise: bool = False

    __post_init__ = check_fields

    def init(self, params: PyTree) -> PyTree:
        """Returns the first state."""
        return (
            self.rule.init(params) if self.schedule is None else self.transformation().init(params)
        )

    def joined(self, params: PyTree, state: PyTree) -> Joined:
        """Returns the parameters as one vector, and the state for it, where the rule allows: for loops over updates.

        Compilers make programs of their own of every leaf's step, a dozen each; of one vector's a dozen in all. What a
        loss reads is `part` of the vector, whose gradient is a vector, too. Steps are equal but for the rounding of the
        gradient's norm, which sums in another order. Not for parameters that are split over devices.
        """
        if not self.elementwise or self.weight_decay or self.scales is not None:
            return Joined(params, state, lambda params: params, lambda state: state)
        structure = jax.tree.structure(params)

        def is_whole(x):
            return jax.tree.structure(x) == structure

        def part_state(moved):
            return jax.tree.map(
                lambda old, new: part(new) if is_whole(old) else new, state, moved, is_leaf=is_whole
            )

        vector, part = ravel_pytree(params)
        vectors = jax.tree.map(
            lambda x: ravel_pytree(x)[0] if is_whole(x) else x, state, is_leaf=is_whole
        )
        return Joined(vector, vectors, part, part_state)

    def update(
        self,
        grads: PyTree,
        state: PyTree,
        params: PyTree,
        *,
        rate: Array | None = None,
        max_norm: Array | None = None,
        good: Array | bool = True,
    ) -> tuple[PyTree, PyTree, Info]:
        """Makes one step, whole or not at all: see `finite_or_old`. The schedule counts those that are made.

        Args:
          grads: Of the structure and dtypes of `params`.
          state: Of `init`, or of the last update.
          params: To be updated.
          rate: Float [], the learning rate instead of the schedule's; may be traced, and so swept by `vmap`.
          max_norm: Float [], the clip instead of `clip_norm`, likewise; 0 is no exception, and stops all. Gradients are
            multiplied by the one number min(1, max_norm / norm), where `clip_norm` divides, then multiplies, as optax
            does: equal but for rounding.
          good: bool [], what else the step depends on, such as whether its loss is finite.

        Returns:
          Parameters; the state; and "grad_norm" before clipping, "learning_rate", and "skipped": float32, 1 where the
          first two are the old ones.

        Raises:
          UsageError: Where there is neither a schedule nor a rate.
        """
        norm = optax.tree.norm(grads)
        if max_norm is None:
            grads, _ = self._clip().update(grads, optax.EmptyState())
        else:
            grads = jax.tree.map(
                lambda g: g * jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12)), grads
            )
        used = self._scheduled(state) if rate is None else rate
        updates, moved = self._stepped(grads, state, params, used)
        new = optax.apply_updates(params, updates), moved
        (params, state), good = finite_or_old(new, (params, state), norm, good)
        skipped = (~good).astype(jnp.float32)
        return (
            params,
            state,
            {"grad_norm": norm, "learning_rate": jnp.asarray(used), "skipped": skipped},
        )

    def transformation(self) -> optax.GradientTransformation:
        """Returns the same as one of optax, which keeps what is not finite: for what takes optax's."""
        if self.schedule is None:
            raise UsageError(
                "an optimizer without a schedule is none of optax's; make it for num_steps."
            )
        return self._chain(self.schedule, self._clip())

    def _scheduled(self, state: PyTree) -> ArrayLike:
        if self.schedule is None:
            raise UsageError(
                "this optimizer has no schedule; give rate= to every update, or make it for num_steps."
            )
        return self.schedule(state[1][-1].count)

    def _clip(self) -> optax.GradientTransformation:
        return optax.clip_by_global_norm(self.clip_norm) if self.clip_norm else optax.identity()

    def _chain(
        self, schedule: optax.Schedule, clip: optax.GradientTransformation
    ) -> optax.GradientTransformation:
        scale = optax.scale_by_learning_rate(schedule)
        if self.decay_last:
            last = optax.add_decayed_weights(
                lambda count: -self.weight_decay * schedule(count), self.decays
            )
            return self._scaled(optax.chain(clip, optax.chain(self.rule, scale), last))
        return self._scaled(
            optax.chain(
                clip,
                optax.chain(
                    self.rule, optax.add_decayed_weights(self.weight_decay, self.decays), scale
                ),
            )
        )

    def _scaled(self, chain: optax.GradientTransformation) -> optax.GradientTransformation:
        """Returns the chain with its steps multiplied by `scales`; its state is the same."""
        if (scales := self.scales) is None:
            return chain

        def update(updates, state, params=None):
            steps, state = chain.update(updates, state, params)
            return jax.tree.map(lambda x, by: (x * by).astype(x.dtype), steps, scales(steps)), state

        return optax.GradientTransformation(chain.init, update)

    def _stepped(
        self, grads: PyTree, state: PyTree, params: PyTree, rate: ArrayLike
    ) -> tuple[PyTree, PyTree]:
        """Returns what is added to the parameters, and the next state; `grads` are clipped."""

        def schedule(count):  # the rate is known, and the count only goes on
            return rate

        if self.schedule is not None:
            return self._chain(schedule, optax.identity()).update(grads, state, params)
        direction, moved = self.rule.update(grads, state, params)
        rest = dataclasses.replace(self, rule=optax.identity())._chain(schedule, optax.identity())
        return rest.update(direction, rest.init(params), params)[0], moved


def finite_or_old(
    new: tuple[PyTree, PyTree],
    old: tuple[PyTree, PyTree],
    grad_norm: Array,
    good: Array | bool = True,
) -> tuple[tuple[PyTree, PyTree], Array]:
    """Keeps a step whole or not at all: `new` if its parameters and the gradient are finite, else `old`.

    A finite loss and gradient are not enough: 0 / (sqrt(0) + eps) where eps rounds to 0, a rate times an update that
    overflows, or Newton-Schulz far from its unit norm give a NaN or an infinity that no later step can mend. Moments
    need no look of their own: they are means of gradients and of their squares, finite where the norm is, and a pass
    over them would double the cost, of one more reading of what the update reads.

    Args:
      new: Parameters and optimizer state after the step.
      old: The same before.
      grad_norm: Root of the sum of squares of the gradient that the step was made from.
      good: bool [], what else the step depends on, such as whether its loss is finite.

    Returns:
      The pair to go on with, and bool [], whether it is the new one.
    """
    good = good & jnp.isfinite(grad_norm)
    for leaf in jax.tree.leaves(new[0]):
        good = good & jnp.isfinite(leaf).all()
    return jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old), good
