"""Names that every pillar shares: array and key aliases, the `Algorithm` protocol, the user's error."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import jax
from jaxtyping import Array, Float, Int, Key, PyTree

__all__ = ["Algorithm", "Array", "Float", "Info", "Int", "Key", "PRNGKey", "PyTree", "State", "UsageError"]

PRNGKey = Key[Array, ""]
"""One typed key, from `jax.random.key`; raw `uint32` keys are refused by the type."""

State = TypeVar("State")
Info = dict[str, jax.Array]
"""Diagnostics of one step: scalars by name, never needed to go on."""


class UsageError(ValueError):
    """A user's mistake, told in one sentence that names what is wrong and what is legal.

    The experiment runner prints the sentence alone and exits with code 2; everywhere else it is an
    ordinary `ValueError`.
    """


class Algorithm(Protocol[State]):
    """What iterates and is driven by `jaxpar.loop`: trainers, learners, a NEAT generation, a solver.

    The object itself is the configuration: a frozen, hashable dataclass without arrays, so that it can
    be a static argument. `State` and `Info` are pytrees of arrays whose shapes and dtypes no step
    changes. An algorithm may add `done(state) -> bool array`, which `run_until` reads.
    """

    def init(self, key: PRNGKey, inputs: PyTree) -> State:
        """Makes the first state; `inputs` is one example of what `step` gets (it may be abstract)."""
        ...

    def step(self, key: PRNGKey, state: State, inputs: PyTree) -> tuple[State, Info]:
        """Makes one step; consumes `key`."""
        ...


BatchFn = Callable[[int], Any]
"""`step -> inputs`: a pure function of the step number, so that a resumed run needs no saved iterator."""
