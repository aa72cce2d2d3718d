"""What an agent remembers: sequence layers that honour the start of episodes inside one parallel pass.

A memory maps features `[T, B, D]` and flags `start [T, B]` to `[T, B, n]`, from a carry `[B, ...]` on; a call with
T = 1 is a step of acting, and a call with a whole unroll is what is trained, solved over all steps at once. Step t of a
lane sees what came since the last start at or before t, and nothing older.
"""

import dataclasses
import functools
import inspect
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jaxpar.mesh import unsplit
from jaxpar.nn import S5, SequenceCell
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.layer import first_state, unroll
from jaxpar.nn.leaf import Leaf, draw
from jaxpar.nn.mixers import CELLS, cell_of
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Alibi, Rope
from jaxpar.nn.stack import Stack, StackCache
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["MEMORIES", "Memory", "Recurrent", "StackMemory", "memory_of"]

WINDOW = 64
"""Steps that named memories attend to."""
MANY = 2**30
"""More steps than any window: a cache has then room for just what is seen."""


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
class StackMemory:
    """A linear map and a `jaxpar.nn.stack.Stack`, whose cache is the carry: a transformer that acts.

    A step sees of its episode what the stack's mixer lets it: attention in a window, or what a recurrence kept.

    Attributes:
        stack: what is run; its mixer is causal, and its cache of one size however long the run: attention has a window.
    """

    stack: Stack

    def __post_init__(self):
        """Refuses a stack that cannot act step by step for ever."""
        if not self.stack.mixer.causal:
            raise UsageError("a memory sees no later step, but this stack's mixer is not causal; give causal=True.")
        if rate := self.stack.dropout or getattr(self.stack.mixer, "dropout", 0):
            raise UsageError(f"what acted is what is learned from, so a memory's stack has dropout=0, not {rate}.")
        small, large = (jax.eval_shape(functools.partial(self._empty, 1, slots)) for slots in (MANY, 2 * MANY))
        if jax.tree.leaves(small) != jax.tree.leaves(large):
            raise UsageError(
                "a memory keeps as much however long it runs, but this stack's attention sees all of the past; give it "
                "a window, such as Visible(window=64)."
            )

    def init(self, key: PRNGKey, input_dim: int) -> PyTree:
        """Draws the parameters for features `[D]`; consumes `key`."""
        into = Leaf((input_dim, self.stack.embed_dim), (None, "embed"), 1 / math.sqrt(input_dim))
        bias = Leaf((self.stack.embed_dim,), (None,), "zeros")
        return draw(key, {"w_in": into, "b_in": bias, **self.stack.leaves()})

    def initial(self, batch: int) -> PyTree:
        """The empty cache of lanes that remember nothing."""
        return self._empty(batch, MANY)

    def apply(self, params: PyTree, xs: Array, starts: Array, carry: PyTree) -> tuple[Array, PyTree, Array]:
        """Outputs `[T, B, n]`, the carry after the last step, and bool [] whether the mixer's solver converged."""
        return unsplit(self._apply)(params, xs, starts, carry)

    def _apply(self, params, xs, starts, carry):
        x = jnp.swapaxes(xs, 0, 1) @ params["w_in"] + params["b_in"][None, None]
        ys, carry, aux = self.stack.apply(params, x, starts=starts.T, cache=carry)
        converged = aux.metrics["converged"].value > 0 if "converged" in aux.metrics else jnp.ones((), bool)
        return jnp.swapaxes(ys, 0, 1).astype(xs.dtype), self._counted_anew(carry), converged

    def _empty(self, batch: int, slots: int) -> StackCache:
        return unsplit(lambda: self.stack.init_cache(batch, slots))()

    def _counted_anew(self, cache: Any) -> StackCache:
        """The same cache with places counted from a window or two ago, so that no number grows over an endless episode.

        By whole windows, so that each key stays in its slot. Distances stay as they are, and rotated keys turn along.
        """
        mixer = self.stack.mixer
        if not isinstance(mixer, Attention):
            return cache  # a recurrence asks for no place
        window = mixer.visible.window
        back = jnp.maximum(cache.seen // window - 1, 0) * window
        first = jnp.maximum(cache.first - back, 0)
        layers = cache.layers
        if isinstance(rope := mixer.positions, Rope):
            turn = (cache.first - first - back)[:, None]

            def turned(layer):
                return layer.replace(keys=jnp.swapaxes(rope.rotate(jnp.swapaxes(layer.keys, 1, 2), turn), 1, 2))

            layers = tuple(turned(layer) for layer in layers)
        return StackCache(layers, cache.seen - back, first)


def _attending(size: int, layers: int, hidden: int, positions: Alibi | Rope) -> StackMemory:
    """Layers of attention to the last `WINDOW` steps, and an mlp of `hidden` units each."""
    heads = 4 if size % 8 == 0 else 1  # halves of a head are rotated
    mixer = Attention(heads, heads, size // heads, positions=positions, visible=Visible(window=WINDOW))
    return StackMemory(Stack(layers, size, mixer, Mlp(hidden, "gelu"), init_std=1 / math.sqrt(size)))


STACKS = {
    "attention": lambda size: _attending(size, 1, size, Alibi()),
    "transformer": lambda size: _attending(size, 2, 4 * size, Rope()),
}
"""One light layer that favours what is near; and two that find a step by how long ago it was, which slopes do badly."""
MEMORIES = (*CELLS, "s5", *STACKS)
"""Names that `memory_of` knows, besides "none"."""


def memory_of(memory: Any, size: int, method: Any = None) -> Memory | None:
    """The memory of a name, of `size` units, of a `Stack`, or the object itself if it is a `Memory`; None for "none".

    Raises:
        UsageError: an unknown name, a stack that cannot act for ever, or an object that cannot honour starts.
    """
    if isinstance(memory, str):
        if memory == "none":
            return None
        if memory not in MEMORIES:
            raise UsageError(f"memory={memory!r} is unknown; legal are none, {', '.join(MEMORIES)}.")
        if memory in STACKS:
            return STACKS[memory](size)
        heads = 4 if size % 4 == 0 else 1
        cell = S5(size) if memory == "s5" else cell_of(memory, size, heads if memory == "aaren" else 1)
        return Recurrent(cell, method)
    if isinstance(memory, Stack):
        return StackMemory(memory)
    if "starts" not in inspect.signature(getattr(memory, "apply", lambda: 0)).parameters:
        raise UsageError(
            f"{type(memory).__name__} cannot honour the start of episodes: a memory's apply takes "
            "(params, xs, starts, carry), as jaxpar.rl.Memory."
        )
    return memory
