"""The optimizers of learners, with a traced learning rate."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.fields import OneOf, Positive, check_fields, field
from jaxpar.optim import finite_or_old
from jaxpar.types import Array, Info, PyTree

__all__ = ["Optimizer"]

SCALES = {"adam": optax.scale_by_adam, "radam": optax.scale_by_radam, "rmsprop": optax.scale_by_rms}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """One of optax's, whose rate and clip are arguments of the update, so that they can be swept.

    Attributes:
        name: "adam", "radam" or "rmsprop".
        eps: added to the root of the mean square; for rmsprop, which forgets by 0.9, to the mean square under the root.
    """

    name: str = field(legal=OneOf(SCALES))
    eps: float = field(legal=Positive())

    def __post_init__(self):
        """Refuses unknown optimizers."""
        check_fields(self, "optimizer.")

    def init(self, weights: PyTree) -> PyTree:
        """The first state."""
        return self._scale().init(weights)

    def update(
        self, weights: PyTree, state: PyTree, grads: PyTree, rate: Array, max_norm: Array
    ) -> tuple[PyTree, PyTree, Info]:
        """Makes a step at `rate`, with gradients shortened to `max_norm`.

        Returns:
            Weights; the state; "grad_norm" before, and "skipped": 1 where they would not be finite, and are the old.
        """
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, max_norm / jnp.maximum(norm, 1e-12)), grads)
        updates, moved = self._scale().update(grads, state, weights)
        new = jax.tree.map(lambda w, u: w - rate * u, weights, updates), moved
        (weights, state), good = finite_or_old(new, (weights, state), norm)
        return weights, state, {"grad_norm": norm, "skipped": (~good).astype(jnp.float32)}

    def annealed(self, rates: Any, updates: Array) -> Array:
        """The learning rate after so many updates: falling in a line to 0 over `rates.anneal` of them, if not 0."""
        left = jnp.maximum(1 - updates / jnp.maximum(rates.anneal, 1), 0)
        return rates.learning_rate * jnp.where(rates.anneal > 0, left, 1.0)

    def _scale(self) -> optax.GradientTransformation:
        return SCALES[self.name](eps=self.eps)
