"""Memories of agents: sequence layers that honour the start of episodes inside one parallel pass.

A memory maps features `[T, B, D]` and flags `start [T, B]` to `[T, B, n]`, from a carry `[B, ...]` on; a call with
T = 1 is a step of acting, and a call with a whole rollout is what is trained, solved over all steps at once. Step t of
an environment depends on the features since the last start at or before t, and on nothing older.
"""

import dataclasses
import functools
import math
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jaxpar.mesh import unsplit
from jaxpar.nn import S5, SequenceCell
from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.cells.layer import cell_states, first_state
from jaxpar.nn.leaf import Leaf, init_leaves
from jaxpar.nn.mixer import TokenInfo
from jaxpar.nn.mixers import CELLS, cell_of
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Alibi, Rope
from jaxpar.nn.stack import Stack, StackCache
from jaxpar.solve.problem import Method
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["MEMORIES", "CellMemory", "Memory", "StackMemory", "memory_of"]

WINDOW = 64
"""Steps that named memories attend to."""
MANY = 2**30
"""More steps than any window: with so many slots asked for, a cache allocates those of the window alone."""


@runtime_checkable
class Memory(Protocol):
    """A sequence layer with starts; hashable, since it is static."""

    def init(self, key: PRNGKey, input_dim: int) -> PyTree:
        """Draws the parameters for features `[D]`; consumes `key`."""
        ...

    def initial(self, batch: int) -> PyTree:
        """The carry `[B, ...]` before a first step."""
        ...

    def apply(
        self, params: PyTree, xs: Array, starts: Array, carry: PyTree
    ) -> tuple[Array, PyTree, Array]:
        """Outputs `[T, B, n]`, the carry after the last step, and bool [] whether a solver converged."""
        ...


@dataclasses.dataclass(frozen=True)
class CellMemory:
    """A cell of `jaxpar.nn`, over a whole rollout in parallel.

    Attributes:
        cell: what is run.
        method: how the recurrence is solved (`jaxpar.solve`); None takes the cell's closed form or what suits the
            device. `Sequential()` is the step-by-step twin.
    """

    cell: SequenceCell
    method: Method | None = None

    def init(self, key: PRNGKey, input_dim: int) -> PyTree:
        """Draws the parameters for features `[D]`; consumes `key`."""
        return self.cell.init(key, input_dim)

    def initial(self, batch: int) -> PyTree:
        """The carry before a first step."""
        return self.cell.initial((batch,))

    def apply(
        self, params: PyTree, xs: Array, starts: Array, carry: PyTree
    ) -> tuple[Array, PyTree, Array]:
        """Outputs `[T, B, n]`, the carry after the last step, and bool [] whether the solver converged."""
        projections = self.cell.input_projections(params, xs)
        h0 = first_state(self.cell, carry, xs.shape[1], projections)
        states, stats = cell_states(
            self.cell, params, projections, h0, method=self.method, resets=starts
        )
        last = jax.tree.map(lambda h: h[-1], states)
        converged = jnp.ones((), bool) if stats is None else jnp.all(stats.converged)
        return self.cell.output(params, states).astype(xs.dtype), last, converged


@dataclasses.dataclass(frozen=True)
class StackMemory:
    """A linear map and a `jaxpar.nn.stack.Stack`, whose cache is the carry: a transformer that acts.

    Of its episode a step has what the stack's mixer keeps: a window of attention, or the state of a recurrence.

    Attributes:
        stack: what is run; its mixer is causal, and its cache of one size however long the run: attention has a window.
    """

    stack: Stack

    def __post_init__(self):
        """Refuses a stack that cannot act step by step without end."""
        if self.stack.period > 1:  # each window would count steps from a place of its own
            raise UsageError(
                "a memory's layers have one mixer, not several in turn; give the stack one."
            )
        if not self.stack.mixers[0].causal:
            raise UsageError(
                "a memory sees no later step, but this stack's mixer is not causal; give causal=True."
            )
        if rate := self.stack.dropout or (
            self.stack.mixer.dropout if isinstance(self.stack.mixer, Attention) else 0
        ):
            raise UsageError(
                f"what acted is what is learned from, so a memory's stack has dropout=0, not {rate}."
            )
        small, large = (
            jax.eval_shape(functools.partial(self._empty, 1, slots)) for slots in (MANY, 2 * MANY)
        )
        if jax.tree.leaves(small) != jax.tree.leaves(large):
            raise UsageError(
                "a memory keeps as much however long it runs, but this stack's attention sees all of the past; give it "
                "a window, such as Visible(window=64)."
            )

    def init(self, key: PRNGKey, input_dim: int) -> PyTree:
        """Draws the parameters for features `[D]`; consumes `key`."""
        into = Leaf((input_dim, self.stack.embed_dim), (None, "embed"), 1 / math.sqrt(input_dim))
        bias = Leaf((self.stack.embed_dim,), (None,), "zeros")
        return init_leaves(key, {"w_in": into, "b_in": bias, **self.stack.leaves()})

    def initial(self, batch: int) -> PyTree:
        """The empty cache before a first step."""
        return self._empty(batch, MANY)

    def apply(
        self, params: PyTree, xs: Array, starts: Array, carry: PyTree
    ) -> tuple[Array, PyTree, Array]:
        """Outputs `[T, B, n]`, the carry after the last step, and bool [] whether the mixer's solver converged."""
        return unsplit(self._apply)(params, xs, starts, carry)

    def _apply(self, params, xs, starts, carry):
        x = jnp.swapaxes(xs, 0, 1) @ params["w_in"] + params["b_in"][None, None]
        info = TokenInfo(starts=starts.T)
        ys, cache, aux = self.stack.apply(params, x, info, cache=carry)
        assert cache is not None  # one was given
        converged = (
            aux.metrics["converged"].value > 0 if "converged" in aux.metrics else jnp.ones((), bool)
        )
        return jnp.swapaxes(ys, 0, 1).astype(xs.dtype), self._rebased(cache), converged

    def _empty(self, batch: int, slots: int) -> StackCache:
        return unsplit(lambda: self.stack.init_cache(batch, slots))()

    def _rebased(self, cache: StackCache) -> StackCache:
        """The same cache with positions counted from a window or two ago, so no counter grows in an endless episode.

        The shift is by whole windows, so each key stays in its slot. Distances stay the same, so it changes no output;
        keys that are rotated by their positions are rotated back by as much.
        """
        mixer = self.stack.mixer
        if not isinstance(mixer, Attention):
            return cache  # a recurrence has no positions
        window = mixer.visible.window
        back = jnp.maximum(cache.seen // window - 1, 0) * window
        first = jnp.maximum(cache.first - back, 0)
        layers = cache.layers
        if isinstance(rope := mixer.positions, Rope):
            shift = (cache.first - first - back)[:, None]

            def rotated(layer):
                return layer.replace(
                    keys=jnp.swapaxes(rope.shift(jnp.swapaxes(layer.keys, 1, 2), shift), 1, 2)
                )

            layers = tuple(rotated(layer) for layer in layers)
        return StackCache(layers, cache.seen - back, first)


def _attention_stack(size: int, layers: int, hidden: int, positions: Alibi | Rope) -> StackMemory:
    """Layers of attention to the last `WINDOW` steps, and an mlp of `hidden` units each."""
    heads = 4 if size % 8 == 0 else 1  # a head's size must be even: rotation pairs its halves
    mixer = Attention(
        heads, heads, size // heads, positions=positions, visible=Visible(window=WINDOW)
    )
    return StackMemory(
        Stack(layers, size, mixer, Mlp(hidden, "gelu"), init_std=1 / math.sqrt(size))
    )


STACKS = {
    "attention": lambda size: _attention_stack(size, 1, size, Alibi()),
    "transformer": lambda size: _attention_stack(size, 2, 4 * size, Rope()),
}
"""One layer with ALiBi, which favours recent steps; two with rotary positions, which find a step by its distance."""
MEMORIES = (*CELLS, "s5", *STACKS)
"""Names that `memory_of` knows, besides "none"."""


def memory_of(
    memory: str | Memory | Stack, size: int, method: Method | None = None
) -> Memory | None:
    """The memory of a name, of `size` units, of a `Stack`, or the object itself if it is a `Memory`; None for "none".

    Raises:
        UsageError: an unknown name, a stack that cannot act without end, or an object that cannot honour starts.
    """
    if isinstance(memory, str):
        if memory == "none":
            return None
        if memory not in MEMORIES:
            raise UsageError(
                f"memory={memory!r} is unknown; legal are none, {', '.join(MEMORIES)}."
            )
        if memory in STACKS:
            return STACKS[memory](size)
        heads = 4 if size % 4 == 0 else 1
        cell = (
            S5(size) if memory == "s5" else cell_of(memory, size, heads if memory == "aaren" else 1)
        )
        return CellMemory(cell, method)
    if isinstance(memory, Stack):
        return StackMemory(memory)
    if not isinstance(memory, Memory):
        raise UsageError(
            f"{type(memory).__name__} cannot honour the start of episodes: a memory has init, initial and "
            "apply(params, xs, starts, carry), as jaxpar.rl.Memory."
        )
    return memory
