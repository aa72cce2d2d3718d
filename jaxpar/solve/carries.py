"""Carries with leaves that cannot be unknowns: counters, flags, random keys, complex numbers, arrays without entries.

A solve varies its unknowns, so these must be floating. Leaves of other types are run sequentially first, all in one
loop, if their values do not depend on an unknown; what they are before each step is then an input of it. If they do
depend on one, there is nothing to solve apart from them.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxpar.solve._dependence import Relation, relations
from jaxpar.solve.problem import Problem
from jaxpar.solve.program import Traced, kind
from jaxpar.solve.structure import Leaves, Structure
from jaxpar.types import Array, PyTree

__all__ = ["Division", "Loop", "divided"]


@dataclasses.dataclass(frozen=True)
class Loop:
    """How `lax.scan` is to run.

    Attributes:
      length: T; with `axis_name`, of this device's part.
      reverse: Whether the first step is at the end of xs.
      unroll: As `lax.scan`'s.
      axis_name: Mesh axis that the sequence is split over; None if it is whole.
    """

    length: int
    reverse: bool
    unroll: int
    axis_name: str | None

    @property
    def parts(self) -> int:
        """Devices that the sequence is split over."""
        return 1 if self.axis_name is None else jax.lax.axis_size(self.axis_name)

    def run(self, f: Callable, init: PyTree, xs: PyTree) -> tuple[PyTree, PyTree]:
        """Returns what `lax.scan` does, also of a sequence that is split, of leaves of any type.

        Cost: T steps. Split, each device runs its part as often as there are parts, from where the one before it ended
        the last time: it is right from its turn on, and the derivative is that of a loop.
        """

        def part(start: PyTree) -> tuple[PyTree, PyTree]:
            return jax.lax.scan(f, start, xs, self.length, self.reverse, self.unroll)

        if self.axis_name is None:
            return part(init)
        start, tree = jax.tree.flatten(init)
        structure = Structure(())  # nothing is solved for
        problem = Problem(lambda h, _: h, _words(start), (), self.length, structure, self.axis_name, self.reverse)

        def sent(send: Callable[[Leaves], Leaves], last: PyTree) -> PyTree:
            return tree.unflatten(_read(send(_words(tree.flatten_up_to(last))), start))

        last = jax.lax.fori_loop(0, self.parts - 1, lambda _, last: part(sent(problem.entry, last))[0], init)
        last, ys = part(sent(problem.entry, last))
        return sent(problem.final, last), ys


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """The leaves of a carry: those to solve for, and those to run sequentially first.

    Attributes:
      traced: The whole recurrence.
      names: Of the leaves, for messages.
      solved: Numbers of the leaves that are unknowns.
      first: Numbers of the others.
      reason: Why the whole has to be run sequentially; empty if it need not be.
    """

    traced: Traced
    names: Sequence[str]
    solved: tuple[int, ...]
    first: tuple[int, ...]
    reason: str

    def known(self, loop: Loop) -> tuple[Leaves, Leaves]:
        """Returns the leaves of `first` after the last step, and before each step [T, ...]; one loop."""
        # Their values do not depend on the unknowns: any will do, and none has a part in the derivative.
        unknown = jax.lax.stop_gradient(self._of(self.solved))

        def step(known: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
            new = self.traced.step(self.merged(unknown, known), x)
            return tuple(new[number] for number in self.first), known

        return loop.run(step, self._of(self.first), self.traced.xs)

    def rest(self, before: Leaves) -> tuple[Callable, Leaves, tuple[Leaves, Leaves]]:
        """Returns f, init and xs of the recurrence of the unknowns, given the others before each step."""
        recurrence, consts = self.traced.recurrence, self.traced.consts

        def f(unknown: Leaves, row: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
            x, known = row
            made = recurrence.call(consts, self.merged(unknown, known), x)
            return tuple(made[number] for number in self.solved), tuple(made[recurrence.num_carry :])

        return f, self._of(self.solved), (self.traced.xs, before)

    def merged(self, solved: Leaves, first: Leaves) -> Leaves:
        """Returns the leaves of a state."""
        places = {**dict(zip(self.solved, solved, strict=True)), **dict(zip(self.first, first, strict=True))}
        return tuple(places[number] for number in range(len(places)))

    def _of(self, numbers: tuple[int, ...]) -> Leaves:
        return tuple(self.traced.init[number] for number in numbers)


def divided(traced: Traced, names: Sequence[str]) -> Division:
    """Returns which leaves of a carry, of these `names`, to solve for."""
    init = traced.init
    solved = tuple(n for n, leaf in enumerate(init) if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size)
    first = tuple(number for number in range(len(init)) if number not in solved)
    reason = ""
    if not solved:
        reason = "no leaf of the carry is floating and has entries"
    elif first:
        reason = _coupled(traced, solved, first, names)
    return Division(traced, names, solved, first, reason)


def _coupled(traced: Traced, solved: tuple[int, ...], first: tuple[int, ...], names: Sequence[str]) -> str:
    """Returns which leaf of `first` depends on which of `solved`; empty if none does."""
    init = traced.init
    seeds: list[Relation] = [{number: tuple(range(leaf.ndim))} for number, leaf in enumerate(init)]
    jaxpr = traced.recurrence.jaxpr
    sources = relations(jaxpr, seeds + [{} for _ in jaxpr.invars[len(seeds) :]])
    for number in first:
        driving = [other for other in solved if other in sources[number]]
        if driving and init[number].size:  # without entries there is nothing that could depend
            return f"carry leaf {names[number]}, {kind(init[number])}, depends on {names[driving[0]]}"
    return ""


def _is_key(leaf: Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _words(leaves: Sequence[Array]) -> Leaves:
    """Returns random keys as the words that they consist of: what devices can send each other."""
    return tuple(jax.random.key_data(leaf) if _is_key(leaf) else leaf for leaf in leaves)


def _read(words: Leaves, like: Sequence[Array]) -> Leaves:
    """Returns words as the random keys that they are in `like`."""
    return tuple(
        jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(key)) if _is_key(key) else leaf
        for leaf, key in zip(words, like, strict=True)
    )
