"""Carries with leaves that cannot be unknowns: counters, flags, random keys, complex numbers, arrays without entries.

A solve varies its unknowns, so these must be floating. Leaves of other types are run sequentially
first, all in one loop, if their values do not depend on an unknown; what they are before each step
is then an input of it. Leaves that depend on unknowns and feed none, such as counts, are run
sequentially afterwards, and so are blind ones that feed none. Where a leaf that cannot be an
unknown depends on one and feeds one, there is nothing to solve apart from it.
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

        Cost: T steps. Split, each device runs its part as often as there are parts, from where the
        one before it ended the last time: it is right from its turn on, and the derivative is that
        of a loop.
        """

        def part(start: PyTree) -> tuple[PyTree, PyTree]:
            return jax.lax.scan(f, start, xs, self.length, self.reverse, self.unroll)

        if self.axis_name is None:
            return part(init)
        start, tree = jax.tree.flatten(init)
        structure = Structure(())  # nothing is solved for
        problem = Problem(
            lambda h, _: h, _words(start), (), self.length, structure, self.axis_name, self.reverse
        )

        def sent(send: Callable[[Leaves], Leaves], last: PyTree) -> PyTree:
            return tree.unflatten(_read(send(_words(tree.flatten_up_to(last))), start))

        last = jax.lax.fori_loop(
            0, self.parts - 1, lambda _, last: part(sent(problem.entry, last))[0], init
        )
        last, ys = part(sent(problem.entry, last))
        return sent(problem.final, last), ys


@dataclasses.dataclass(frozen=True, eq=False)
class Division:
    """The leaves of a carry: those to solve for, and those to run sequentially before and after that.

    Attributes:
      traced: The whole recurrence.
      names: Of the leaves, for messages.
      solved: Numbers of the leaves that are unknowns.
      first: Numbers of the leaves that do not depend on an unknown; they are run before the solve.
      last: Numbers of the leaves on which no unknown depends; they are run after the solve.
      reason: Why the whole has to be run sequentially; empty if it need not be.
    """

    traced: Traced
    names: Sequence[str]
    solved: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...] = ()
    reason: str = ""

    def known(self, loop: Loop) -> tuple[Leaves, Leaves]:
        """Returns the leaves of `first` after the last step, and before each step [T, ...]; one loop."""
        # Their values do not depend on the others: any will do, and none has a part in the derivative.
        others = {
            number: jax.lax.stop_gradient(self.traced.init[number])
            for number in (*self.solved, *self.last)
        }

        def step(known: Leaves, x: Leaves) -> tuple[Leaves, Leaves]:
            new = self.traced.step(self.merged(others, first=known), x)
            return tuple(new[number] for number in self.first), known

        return loop.run(step, self.of(self.first), self.traced.xs)

    def rest(self, before: Leaves) -> tuple[Callable, Leaves, tuple[Leaves, Leaves]]:
        """Returns f, init and xs of the recurrence of the unknowns, given the leaves of `first` before each step.

        Its outputs are the whole's; with leaves in `last` they are the unknowns before each step.
        """
        recurrence, consts = self.traced.recurrence, self.traced.consts
        others = {number: jax.lax.stop_gradient(self.traced.init[number]) for number in self.last}

        def f(unknown: Leaves, row: tuple[Leaves, Leaves]) -> tuple[Leaves, Leaves]:
            x, known = row
            made = recurrence.call(consts, self.merged(others, first=known, solved=unknown), x)
            new = tuple(made[number] for number in self.solved)
            if self.last:
                return new, unknown
            return new, tuple(made[recurrence.num_carry :])

        return f, self.of(self.solved), (self.traced.xs, before)

    def run_last(self, loop: Loop, known: Leaves, unknown: Leaves) -> tuple[Leaves, Leaves]:
        """Returns the leaves of `last` after the last step, and all outputs [T, ...].

        One loop over those leaves; the outputs of all steps are computed at once.

        Args:
          loop: How to run it.
          known: The leaves of `first` before each step, [T, ...].
          unknown: The leaves of `solved` before each step, [T, ...].
        """
        recurrence, consts = self.traced.recurrence, self.traced.consts

        def step(last: Leaves, row: tuple) -> tuple[Leaves, Leaves]:
            x, known, unknown = row
            new = self.traced.step(self.merged({}, first=known, solved=unknown, last=last), x)
            return tuple(new[number] for number in self.last), last

        def output(x: Leaves, known: Leaves, unknown: Leaves, last: Leaves) -> Leaves:
            before = self.merged({}, first=known, solved=unknown, last=last)
            return recurrence.output(consts, before, x)

        rows = self.traced.xs, known, unknown
        after, before = loop.run(step, self.of(self.last), rows)
        return after, jax.checkpoint(jax.vmap(output))(*rows, before)

    def merged(
        self,
        others: dict[int, Array],
        *,
        first: Leaves = (),
        solved: Leaves = (),
        last: Leaves = (),
    ) -> Leaves:
        """Returns the leaves of a state, in their order."""
        places = dict(others)
        for numbers, leaves in ((self.first, first), (self.solved, solved), (self.last, last)):
            if leaves:
                places.update(zip(numbers, leaves, strict=True))
        return tuple(places[number] for number in range(len(places)))

    def of(self, numbers: tuple[int, ...]) -> Leaves:
        """Returns leaves of the state before the first step."""
        return tuple(self.traced.init[number] for number in numbers)


def divided(traced: Traced, names: Sequence[str], axis_name: str | None = None) -> Division:
    """Returns which leaves of a carry, of these `names`, to solve for."""
    init = traced.init
    solved = tuple(
        n for n, leaf in enumerate(init) if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.size
    )
    others = tuple(number for number in range(len(init)) if number not in solved)
    if not solved:
        return Division(
            traced, names, solved, others, reason="no leaf of the carry is floating and has entries"
        )
    if not others:
        return Division(traced, names, solved, others)
    sources = _sources(traced)
    driven = tuple(n for n in others if init[n].size and sources[n].intersection(solved))
    first = tuple(number for number in others if number not in driven)
    fed = [number for number in driven if any(number in sources[other] for other in solved)]
    if axis_name is not None:
        fed = list(driven)  # over devices nothing is run afterwards
    if not fed:
        return Division(traced, names, solved, first, last=driven)
    number = fed[0]
    driving = min(sources[number].intersection(solved))
    reason = f"carry leaf {names[number]}, {kind(init[number])}, depends on {names[driving]}"
    return Division(traced, names, solved, others, reason=reason)


def without_blind(parts: Division, is_blind: Sequence[bool]) -> Division:
    """Returns a division that runs blind unknowns after the solve, if no other unknown depends on them."""
    if not any(is_blind):
        return parts
    sources = _sources(parts.traced)
    seeing = {number for number in parts.solved if not is_blind[number]}
    kept = set(seeing)
    for number in seeing:
        kept |= sources[number].intersection(parts.solved)
    if not seeing or kept == set(parts.solved):
        return parts
    moved = set(parts.solved) - kept
    return dataclasses.replace(
        parts,
        solved=tuple(sorted(kept)),
        last=tuple(sorted(moved.union(parts.last))),
    )


def _sources(traced: Traced) -> list[set[int]]:
    """Returns the leaves on which each leaf depends by value, in any number of steps."""
    init = traced.init
    seeds: list[Relation] = [{number: tuple(range(leaf.ndim))} for number, leaf in enumerate(init)]
    jaxpr = traced.recurrence.jaxpr
    direct = relations(jaxpr, seeds + [{} for _ in jaxpr.invars[len(seeds) :]])
    found = [set(relation) for relation in direct[: len(init)]]
    # Warshall's closure: a path through leaf k joins what k depends on.
    for k in range(len(found)):
        for row in found:
            if k in row:
                row |= found[k]
    return found


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
