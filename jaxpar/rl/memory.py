"""What an agent remembers: sequence layers that honour the start of episodes inside one parallel pass.

A memory maps features `[T, B, D]` and flags `start [T, B]` to `[T, B, n]`, from a carry `[B, ...]` on; a call with
T = 1 is a step of acting, and a call with a whole unroll is what is trained, solved over all steps at once. Step t of a
lane sees what came since the last start at or before t, and nothing older.
"""

import dataclasses
import inspect
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxpar.nn import Aaren, Cell
from jaxpar.nn.layer import first_state, unroll
from jaxpar.nn.mixer import MIXERS, mixer_cell
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["MEMORIES", "Memory", "Recurrent", "memory_of"]


class Memory(Protocol):
    """A sequence layer with starts; hashable, since it is static."""

    def init(self, key: PRNGKey, input_dim: int) -> PyTree:
        """Draws the parameters for features `[D]`; consumes `key`."""
        ...

    def initial(self, batch: int) -> PyTree:
        """The carry `[B, ...]` of lanes that remember nothing."""
        ...

    def apply(self, params: PyTree, xs: Array, starts: Array, carry: PyTree) -> tuple[Array, PyTree, Array]:
        """Outputs `[T, B, n]`, the carry after the last step, and bool [] whether a solver converged."""
        ...


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """A cell of `jaxpar.nn`, over a whole unroll in parallel.

    Attributes:
        cell: what is run.
        method: how the recurrence is solved (`jaxpar.solve`); None takes the cell's closed form or what suits the
            device. `Sequential()` is the step-by-step twin.
    """

    cell: Cell | Aaren
    method: Any = None

    def init(self, key: PRNGKey, input_dim: int) -> PyTree:
        """Draws the parameters for features `[D]`; consumes `key`."""
        return self.cell.init(key, input_dim)

    def initial(self, batch: int) -> PyTree:
        """The carry of lanes that remember nothing."""
        return self.cell.initial((batch,))

    def apply(self, params: PyTree, xs: Array, starts: Array, carry: PyTree) -> tuple[Array, PyTree, Array]:
        """Outputs `[T, B, n]`, the carry after the last step, and bool [] whether the solver converged."""
        drive = self.cell.drive(params, xs)
        h0 = first_state(self.cell, carry, xs.shape[1], drive)
        states, stats = unroll(self.cell, params, drive, h0, method=self.method, resets=starts)
        last = jax.tree.map(lambda h: h[-1], states)
        converged = jnp.ones((), bool) if stats is None else jnp.all(stats.converged)
        return self.cell.output(params, states).astype(xs.dtype), last, converged


MEMORIES = tuple(MIXERS)
"""Names that `memory_of` knows, besides "none"."""


def memory_of(memory: Any, size: int, method: Any = None) -> Memory | None:
    """The memory of a name, of `size` units, or the object itself if it is a `Memory`; None for "none".

    Raises:
        UsageError: an unknown name, or an object that cannot honour starts.
    """
    if isinstance(memory, str):
        if memory == "none":
            return None
        if memory not in MEMORIES:
            raise UsageError(f"memory={memory!r} is unknown; legal are none, {', '.join(MEMORIES)}.")
        heads = 4 if memory == "aaren" and size % 4 == 0 else 1
        return Recurrent(mixer_cell(memory, size, heads), method)
    if "starts" not in inspect.signature(getattr(memory, "apply", lambda: 0)).parameters:
        raise UsageError(
            f"{type(memory).__name__} cannot honour the start of episodes: a memory's apply takes "
            "(params, xs, starts, carry), as jaxpar.rl.Memory."
        )
    return memory
