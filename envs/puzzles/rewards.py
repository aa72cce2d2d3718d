"""Two ways to pay for the same episode."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpar.types import Array, PyTree

__all__ = ["REWARDS", "earned", "reward_of_outcome", "unless"]

REWARDS = ("dense", "sparse")
"""At every step what the outcome grew by, or at the end all of it: returns are equal."""


def earned(rewards: str, before: Array, after: Array, over: Array, ends: Array) -> Array:
    """The reward of a step, float32 `[]`.

    Args:
        rewards: of `REWARDS`.
        before: the outcome that the state before has reached; 0 at the start.
        after: the outcome of the state after.
        over: whether the state before was terminal: nothing is earned there.
        ends: whether the state after is.
    """
    pays = ~over if rewards == "dense" else ends & ~over
    return jnp.where(pays, after - before if rewards == "dense" else after, 0.0).astype(jnp.float32)


def reward_of_outcome(
    self: Any, state: PyTree, action: Array, next_state: PyTree, params: PyTree
) -> Array:
    """Returns by how much a step changed the puzzle's outcome, or all of it at the end.

    A method of puzzles that have `rewards`, `outcome` and `terminal`.
    """
    return earned(
        self.rewards,
        self.outcome(state, params),
        self.outcome(next_state, params),
        self.terminal(state, params),
        self.terminal(next_state, params),
    )


def unless(stay: ArrayLike, moved: PyTree, state: PyTree) -> PyTree:
    """`moved`, or `state` where it shall stay: an episode that is over changes no more."""
    return jax.tree.map(lambda new, old: jnp.where(stay, old, new), moved, state)
