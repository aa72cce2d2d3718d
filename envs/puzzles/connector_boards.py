"""Boards of Connector: drawn by random walks, or given as text; and a search for paths that join all pairs.

All agents walk at random from their starts; where they stand at last are their targets, and their ways are a solution.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import distinct
from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from .given import Given
from .sokoban_levels import neighbours

__all__ = ["RandomWalks", "Wires", "claimed", "connect", "given_wires", "next_cells"]


@flax.struct.dataclass
class Wires:
    """A level: `free` bool `[n, n]`, all True (its shape is the board's); `starts` and `targets` int32 `[N]`, cells."""

    free: Array
    starts: Array
    targets: Array


def next_cells(size: int) -> np.ndarray:
    """Cells int32 `[n^2 + 1, 5]` that rest, up, right, down, left lead to; n^2 is outside."""
    return np.concatenate([np.arange(size**2 + 1)[:, None], neighbours(size, size)], axis=1).astype(
        np.int32
    )


def claimed(wanted: Array, moves: Array) -> Array:
    """Who gets the cell that he wants, bool `[N]`: no one of lower number moves to it."""
    first = np.tril(np.ones((len(wanted),) * 2, bool), -1)
    return moves & ~jnp.any((wanted[:, None] == wanted[None]) & moves[None] & first, axis=1)


@dataclasses.dataclass(frozen=True)
class RandomWalks:
    """Starts anywhere; each agent walks a drawn number of steps, `walked` at most, over free cells as long as it can.

    Drawn again until each has moved.
    """

    size: int = field(8, Between(3, 32))
    num_agents: int = field(4, AtLeast(1))
    walked: int = field(12, AtLeast(1))

    def __post_init__(self) -> None:
        """Refuses more agents than have room."""
        check_fields(self)
        if self.num_agents > self.size**2 // 4:
            raise UsageError(
                f"RandomWalks puts 1 to {self.size**2 // 4} agents on a board of size {self.size}, "
                f"not {self.num_agents}"
            )

    def __call__(self, key: PRNGKey) -> Wires:
        """Draws; consumes `key`."""

        def again(carry: tuple[PRNGKey, Wires]) -> tuple[PRNGKey, Wires]:
            next_key, key = jax.random.split(carry[0])
            return next_key, self.attempt(key)[0]

        nothing = jnp.zeros(self.num_agents, jnp.int32)
        first = key, Wires(jnp.ones((self.size, self.size), bool), nothing, nothing)
        return jax.lax.while_loop(
            lambda carry: jnp.any(carry[1].starts == carry[1].targets), again, first
        )[1]

    def attempt(self, key: PRNGKey) -> tuple[Wires, Array]:
        """One board, on which agents may be there from the start, and actions int32 `[walked, N]` that solve it."""
        place_key, length_key, walk_key = jax.random.split(key, 3)
        table, cells = jnp.asarray(next_cells(self.size)), np.arange(self.size**2, dtype=np.int32)
        starts = distinct(place_key, self.size**2, self.num_agents)
        lengths = jax.random.randint(length_key, (self.num_agents,), 1, self.walked + 1)
        free = jnp.append(~jnp.any(cells[:, None] == starts[None], axis=1), False)

        def walk(
            carry: tuple[Array, Array], drawn: tuple[Array, Array]
        ) -> tuple[tuple[Array, Array], Array]:
            (heads, free), (time, chance) = carry, drawn
            around = table[heads]
            open_ways = free[around].at[:, 0].set(False) & (time < lengths)[:, None]
            way = jnp.argmax(jnp.where(open_ways, chance, -1.0), axis=1).astype(jnp.int32)
            wanted = jnp.take_along_axis(around, way[:, None], axis=1)[:, 0]
            moves = claimed(wanted, jnp.any(open_ways, axis=1))
            heads = jnp.where(moves, wanted, heads)
            free &= ~jnp.any(np.arange(self.size**2 + 1)[:, None] == heads[None], axis=1)
            return (heads, free), jnp.where(moves, way, 0)

        times = (
            np.arange(self.walked),
            jax.random.uniform(walk_key, (self.walked, self.num_agents, 5)),
        )
        (heads, _), actions = jax.lax.scan(walk, (starts, free), times)
        return Wires(jnp.ones((self.size, self.size), bool), starts, heads), actions


def given_wires(*texts: str, searched: int = 200_000) -> Given:
    """A generator of given square boards: a, b, ... are starts, A, B, ... their targets, dots are free.

    Raises:
        UsageError: a board is not square, a letter lacks its other, or a search of at most `searched` steps shows that
            the pairs cannot all be joined.
    """
    levels = []
    for text in texts:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        signs, size = "".join(lines), len(lines)
        lower = sorted(sign for sign in signs if sign.islower())
        if {len(line) for line in lines} != {size} or not 2 <= size <= 32:
            raise UsageError(f"Connector takes square boards of 2 to 32 lines, not {lines}")
        if (
            not lower
            or len(set(lower)) < len(lower)
            or sorted(signs.replace(".", ""))
            != sorted("".join(lower + [sign.upper() for sign in lower]))
        ):
            raise UsageError(
                f"a board of Connector has dots, and every letter once small and once capital, not {lines}"
            )
        starts, targets = (
            [signs.index(x) for x in each] for each in (lower, [sign.upper() for sign in lower])
        )
        if searched and connect(size, starts, targets, searched) == []:
            raise UsageError(f"no paths that do not cross join all pairs of {lines}")
        levels.append(
            Wires(
                np.ones((size, size), bool),
                np.asarray(starts, np.int32),
                np.asarray(targets, np.int32),
            )
        )
    return Given.of(*levels)


def connect(
    size: int, starts: list[int], targets: list[int], searched: int = 200_000
) -> list[list[int]] | None:
    """Disjoint paths found by depth-first search on the host; [] if there are none, None if the search is too long."""
    table, paths, steps = neighbours(size, size).tolist(), [[start] for start in starts], 0
    taken = {*starts, *targets, size**2}

    def extend(agent: int) -> bool | None:
        nonlocal steps
        if agent == len(paths):
            return True
        if paths[agent][-1] == targets[agent]:
            return extend(agent + 1)
        if (steps := steps + 1) > searched:
            return None
        for cell in table[paths[agent][-1]]:
            if cell == targets[agent] or cell not in taken:
                taken.add(cell)
                paths[agent].append(cell)
                if (found := extend(agent)) is not False:
                    return found
                paths[agent].pop()
                if cell != targets[agent]:
                    taken.remove(cell)
        return False

    found = extend(0)
    return paths if found else [] if found is False else None
