"""Names that every pillar shares: array and key aliases, the `Algorithm` protocol, the user's error."""

from collections.abc import Callable
from typing import Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Key, PyTree

__all__ = [
    "Algorithm",
    "Array",
    "BatchFn",
    "Device",
    "Info",
    "PRNGKey",
    "PyTree",
    "Scalar",
    "SupportsAxes",
    "SupportsDone",
    "SupportsOlderStates",
    "UsageError",
    "causes_of",
    "concrete_values",
    "largest",
]

PRNGKey = Key[Array, ""]
"""One typed key, from `jax.random.key`; raw `uint32` keys are refused by the type."""

Scalar = float | jax.Array
"""A number of a configuration, as a rate or a discount: a float, or an array, traced or of many, where it is swept."""

State = TypeVar("State")
Info = dict[str, jax.Array]
"""Diagnostics of one step: scalars by name, never needed to go on."""


class UsageError(ValueError):
    """A user's mistake, told in one sentence that names what is wrong and what is legal.

    The experiment runner prints the sentence alone and exits with code 2; everywhere else it is an
    ordinary `ValueError`.
    """


def causes_of(error: BaseException) -> list[BaseException]:
    """Returns an error, its cause, the cause of that and so on.

    Under a debugger OmegaConf makes an error a cause of its own cause; each is returned once.
    """
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and all(link is not earlier for earlier in chain):
        chain.append(link)
        link = link.__cause__ or link.__context__
    return chain


def concrete_values(*trees: PyTree) -> tuple[PyTree, ...] | None:
    """Returns trees with their values as NumPy arrays, or None if one of them is not known here.

    For checks of values on the host. An array that a jitted closure captures has a value, but what
    `jax.numpy` computes from it is traced, so that NumPy must compute what a check decides by.

        known = concrete_values(times)
        if known is not None and not np.isfinite(known[0]).all():
            raise UsageError(...)

    Not known are tracers, `jax.ShapeDtypeStruct`, and arrays that this process holds in part. A
    typed key becomes its words, uint32. Narrow types, such as bfloat16, stay as they are; NumPy
    computes in them, too.

    Cost: each device array is awaited and copied to the host, whatever its size. JAX keeps the
    copy, so that a second call is free. Give only what the check reads.
    """
    leaves, structure = jax.tree.flatten(trees)
    if not all(map(_is_known, leaves)):
        return None
    return jax.tree.unflatten(structure, [_to_numpy(leaf) for leaf in leaves])


def largest(x: Array, axis: int | tuple[int, ...] | None = None) -> Array:
    """Returns the maximum along some axes, infinity where an entry is NaN.

    For checks and metrics. XLA for CPUs leaves NaN out of `jnp.max` and `jnp.min` where it vectorises
    them, in arrays of 4096 numbers or rows of 64, and always out of `jax.lax.pmax`. An error of NaN
    then passes as a small one (openxla/xla#21461). Infinity stays, also in a later maximum.
    The minimum is `-largest(-x)`.

    Args:
      x: Array of any shape and dtype; one of integers is reduced as it is.
      axis: Axes to reduce; None for all.
    """
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = jnp.where(jnp.isnan(x), jnp.inf, x)
    return x.max(axis)


def _is_known(leaf: object) -> bool:
    if isinstance(leaf, Tracer | jax.ShapeDtypeStruct):
        return False
    if isinstance(leaf, jax.Array):
        return leaf.is_fully_addressable or leaf.is_fully_replicated
    return True


def _to_numpy(leaf: object) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        # The words are an operation of JAX, which a trace around this would record.
        with jax.ensure_compile_time_eval():
            leaf = jax.random.key_data(leaf)
    return np.asarray(cast(np.ndarray, leaf))


class Algorithm(Protocol[State]):
    """What iterates and is driven by `jaxpar.loop`: trainers, learners, a NEAT generation, a solver.

    The object itself is the configuration: a frozen, hashable dataclass without arrays, so that it can
    be a static argument. `State` and `Info` are pytrees of arrays whose shapes and dtypes no step
    changes. An algorithm may add `done` (`SupportsDone`) and `axes` (`SupportsAxes`).
    """

    def init(self, key: PRNGKey, inputs: PyTree) -> State:
        """Makes the first state; `inputs` is one example of what `step` gets (it may be abstract)."""
        ...

    def step(self, key: PRNGKey, state: State, inputs: PyTree) -> tuple[State, Info]:
        """Makes one step; consumes `key`."""
        ...


class SupportsDone(Algorithm[State], Protocol[State]):
    """An algorithm that says when it has ended: `jaxpar.loop.run_until`, and `fit` with `until_done`, read it."""

    def done(self, state: State) -> Bool[Array, ""]:
        """Returns whether there is nothing left to do."""
        ...


@runtime_checkable
class SupportsOlderStates(Protocol):
    """An algorithm with leaves in its state that checkpoints of earlier versions lack."""

    @property
    def later_leaves(self) -> tuple[str, ...]:
        """Paths of these leaves, such as "health/empty"; where one is absent it is zeros."""
        ...


@runtime_checkable
class SupportsAxes(Protocol):
    """What says how its state lies on a mesh: `jaxpar.loop.fit` reads it where `Hooks.axes` is not given."""

    def axes(self) -> PyTree:
        """Returns the logical axes of every leaf of the state, as in `jaxpar.mesh.RULES`."""
        ...


class Device(Protocol):
    """A device as `jax.devices()` lists them, or a compile-only one of a topology that is not here."""

    id: int
    platform: str
    device_kind: str
    process_index: int

    def memory_stats(self) -> dict[str, int] | None:
        """Returns bytes in use, their peak and their limit, by JAX's names; None where they are not known."""
        ...


BatchFn = Callable[[int], PyTree]
"""`step -> inputs`: a pure function of the step number, so that a resumed run needs no saved iterator."""
