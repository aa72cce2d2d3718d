"""What an agent remembers: sequence layers that honour the start of episodes inside one parallel pass.

A memory maps features `[T, B, D]` and flags `start [T, B]` to `[T, B, n]`, from a carry `[B, ...]` on; a call with
T = 1 is a step of acting, and a call with a whole unroll is what is trained, solved over all steps at once. Step t of a
lane sees what came since the last start at or before t, and nothing older.
"""

import dataclasses
import inspect
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.nn import S5, SequenceCell
from jaxpar.nn.layer import first_state, unroll
from jaxpar.nn.leaf import Leaf, draw
from jaxpar.nn.mixers import CELLS, cell_of
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["MEMORIES", "Memory", "Recurrent", "WindowAttention", "memory_of"]


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

    cell: SequenceCell
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


@dataclasses.dataclass(frozen=True)
class WindowAttention:
    """Softmax attention to the last `window` steps of the episode, nearer ones favoured.

        y[t] = sum_j softmax_j(k[j] q[t] / sqrt(K) - m (t - j)) v[j] O,    t - window < j <= t,  j in t's episode

    with a slope m = 2^(-8 i / H) in head i (Press et al. 2022, arXiv:2108.12409), so that only distances matter and a
    carry of `window` keys and values is all that is remembered. O(T (T + window)) work and memory.

    Attributes:
        size: n, over all heads.
        heads: H.
        window: steps.
    """

    size: int = field(legal=AtLeast(1))
    heads: int = field(4, AtLeast(1))
    window: int = field(64, AtLeast(1))

    def __post_init__(self):
        """Refuses heads that do not divide the units, and no window."""
        check_fields(self)
        if self.size % self.heads:
            raise UsageError(f"size={self.size} of attention must be a multiple of heads={self.heads}.")

    def init(self, key: PRNGKey, input_dim: int) -> PyTree:
        """Draws the parameters for features `[D]`; consumes `key`."""
        into = Leaf((input_dim, self.size), ("embed", "heads"), 1 / math.sqrt(input_dim))
        out = Leaf((self.size, self.size), ("heads", "embed"), 1 / math.sqrt(self.size))
        return draw(key, {"q": into, "k": into, "v": into, "o": out})

    def initial(self, batch: int) -> PyTree:
        """The carry of lanes that remember nothing: keys, values `[B, W, n]`, and 1 `[B, W]` where there are any."""
        rows = jnp.zeros((batch, self.window, self.size))
        return {"k": rows, "v": rows, "there": jnp.zeros((batch, self.window))}

    def apply(self, params: PyTree, xs: Array, starts: Array, carry: PyTree) -> tuple[Array, PyTree, Array]:
        """Outputs `[T, B, n]`, the carry after the last step, and True."""
        x = jnp.swapaxes(xs, 0, 1)
        keys, values = (jnp.concatenate([carry[name], x @ params[name]], 1) for name in ("k", "v"))
        # Episodes by number; what was remembered is of number 0, or of none.
        episode = jnp.cumsum(starts.T, 1, dtype=jnp.int32)
        of = jnp.concatenate([jnp.where(carry["there"] > 0, 0, -1), episode], 1)
        now = self.window + jnp.arange(len(xs))
        distance = now[:, None] - jnp.arange(len(xs) + self.window)[None]
        near = (distance >= 0) & (distance < self.window)
        legal = near[None] & (of[:, None] == episode[:, :, None])
        split = lambda z: z.reshape(*z.shape[:2], self.heads, -1)  # noqa: E731
        slopes = 2.0 ** (-8 * (1 + jnp.arange(self.heads, dtype=x.dtype)) / self.heads)
        scores = jnp.einsum("bthk,bjhk->bhtj", split(x @ params["q"]), split(keys)) / math.sqrt(self.size // self.heads)
        scores = jnp.where(legal[:, None], scores - (slopes[:, None, None] * distance[None])[None], -jnp.inf)
        ys = jnp.einsum("bhtj,bjhk->bthk", jax.nn.softmax(scores), split(values)).reshape(*x.shape[:2], -1)
        there = (of == episode[:, -1:])[:, -self.window :].astype(x.dtype)
        last = {name: z[:, -self.window :] * there[..., None] for name, z in (("k", keys), ("v", values))}
        last["there"] = there
        return jnp.swapaxes(ys @ params["o"], 0, 1), last, jnp.ones((), bool)


MEMORIES = (*CELLS, "s5", "attention")
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
        heads = 4 if size % 4 == 0 else 1
        if memory == "attention":
            return WindowAttention(size, heads)
        cell = S5(size) if memory == "s5" else cell_of(memory, size, heads if memory == "aaren" else 1)
        return Recurrent(cell, method)
    if "starts" not in inspect.signature(getattr(memory, "apply", lambda: 0)).parameters:
        raise UsageError(
            f"{type(memory).__name__} cannot honour the start of episodes: a memory's apply takes "
            "(params, xs, starts, carry), as jaxpar.rl.Memory."
        )
    return memory
