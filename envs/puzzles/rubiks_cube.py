"""Rubik's cube of 2 or 3 layers a side, turned at its six faces.

| an episode ends | outcome |
| --- | --- |
| solved: every face is of one colour | 1 |
| after `max_steps`, cut | 0 |

`rewards="sparse"` pays the outcome at the end. `"dense"` pays at every step half of what the share of right stickers
grew by, and at the end what is missing to the outcome.

Every turn is a row of a table of permutations, made by rotating points, so that a step is one look-up. Turns are those
of the faces in the order U R F D L B, each clockwise, back, and with `half_turns` twice; faces and stickers lie as in
H. Kociemba's notation. All turns are always legal.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import AtLeast, Between, OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from .given import Generator, Given, check_generator
from .rewards import REWARDS, earned, unless

__all__ = ["VARIANTS", "Cube", "RubiksCube", "Scramble", "cube_turns", "given_cubes", "misplaced"]

FACES = "URFDLB"
# Outward, along a row, and down the rows, of every face; x to the right, y up, z towards the reader.
AXES = {
    "U": ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
    "R": ((1, 0, 0), (0, 0, -1), (0, -1, 0)),
    "F": ((0, 0, 1), (1, 0, 0), (0, -1, 0)),
    "D": ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
    "L": ((-1, 0, 0), (0, 0, 1), (0, -1, 0)),
    "B": ((0, 0, -1), (-1, 0, 0), (0, -1, 0)),
}


@flax.struct.dataclass
class Cube:
    """A level: `stickers` int8 `[6, n, n]`, the number of the face in `FACES` that a sticker belongs to."""

    stickers: Array


@flax.struct.dataclass
class Params:
    """The limit of steps."""

    max_steps: Any = 100


@flax.struct.dataclass
class State:
    """`stickers` int8 `[6, n, n]`; of them `first` and now `wrong` are `misplaced`, int32; `time`, turns made."""

    stickers: Array
    first: Array
    wrong: Array
    time: Array


@functools.cache
def cube_turns(size: int, half_turns: bool = False) -> np.ndarray:
    """Permutations int8 `[12 or 18, 6 size^2]`: sticker i is after the turn what sticker `table[turn, i]` was."""
    along = range(1 - size, size, 2)
    points = []
    for face in FACES:
        out, right, down = map(np.array, AXES[face])
        points += [
            tuple((out * size + x * right + y * down).tolist()) for y in along for x in along
        ]
    place, rows = {point: i for i, point in enumerate(points)}, []
    for face in FACES:
        axis, quarter = np.array(AXES[face][0]), np.arange(len(points))
        for i, point in enumerate(points):
            if (
                np.dot(axis, point) >= size - 1
            ):  # the outer layer: its face, and the rim of the four around it
                turned = axis * np.dot(axis, point) - np.cross(axis, point)
                quarter[place[tuple(turned.tolist())]] = i
        rows += [quarter, np.argsort(quarter)] + ([quarter[quarter]] if half_turns else [])
    return np.stack(rows).astype(np.int8)


def misplaced(stickers: Array) -> Array:
    """Stickers that are not of the commonest colour of their face, int32 `[]` of int8 `[6 n^2]`; 0 is solved."""
    same = stickers.reshape(6, -1, 1) == np.arange(6, dtype=np.int8).reshape(1, 1, 6)
    # Methods of arrays, so that what is given as NumPy's stays known under jit.
    return stickers.size - same.sum(axis=1).max(axis=1).sum()


@dataclasses.dataclass(frozen=True)
class Scramble:
    """A solved cube of `size`, turned `moves` times at random, no turn undoing the last: `moves` or fewer solve it.

    With `half_turns` no turn is of the face of the last. What happens to come back solved is turned once. With `least`
    the number of turns is drawn from that to `moves`, all alike likely, for learners, who begin with the easy ones.
    """

    size: int = field(3, Between(2, 3))
    moves: int = field(6, Between(1, 1000))
    half_turns: bool = False
    least: int = field(0, AtLeast(0))

    def __post_init__(self) -> None:
        """Refuses an empty range."""
        check_fields(self)
        if self.least > self.moves:
            raise UsageError(f"least={self.least} turns must be at most moves={self.moves}")

    def __call__(self, key: PRNGKey) -> Cube:
        """Draws; consumes `key`."""
        table, per_face = (
            jnp.asarray(cube_turns(self.size, self.half_turns)),
            3 if self.half_turns else 2,
        )
        first_key, key = jax.random.split(key)
        first = jax.random.randint(first_key, (), 0, len(table))
        skipped = per_face if self.half_turns else 1
        drawn = jax.random.randint(key, (self.moves - 1,), 0, len(table) - skipped)
        solved = jnp.repeat(jnp.arange(6, dtype=jnp.int8), self.size**2)

        most = (
            jax.random.randint(jax.random.fold_in(key, 0), (), self.least, self.moves + 1)
            if self.least
            else None
        )

        def turn(
            carry: tuple[Array, Array], made: tuple[Array, Array]
        ) -> tuple[tuple[Array, Array], None]:
            (board, last), (draw, place) = carry, made
            forbidden = (
                last // per_face * per_face if self.half_turns else last ^ 1
            )  # a turn and its inverse are pairs
            move = draw + skipped * (draw >= forbidden)
            turned = board[table[move]]
            return (turned if most is None else jnp.where(place < most, turned, board), move), None

        once = solved[table[first]]
        (board, _), _ = jax.lax.scan(turn, (once, first), (drawn, jnp.arange(1, self.moves)))
        board = jnp.where(misplaced(board) == 0, once, board)
        return Cube(board.reshape(6, self.size, self.size))


def given_cubes(*scrambles: str, size: int = 3) -> Given:
    """A generator of cubes that texts like "R U R' U2" turn from the solved one.

    Raises:
        UsageError: a text has another turn than U R F D L B with nothing, ' or 2, or solves the cube.
    """
    names = [face + kind for face in FACES for kind in ("", "'", "2")]
    levels = []
    for scramble in scrambles:
        board = np.repeat(np.arange(6, dtype=np.int8), size**2)
        for name in scramble.split():
            if name not in names:
                raise UsageError(
                    f"{name!r} is no turn of a cube; turns are U R F D L B, each alone or with ' or 2"
                )
            board = board[cube_turns(size, True)[names.index(name)]]
        if misplaced(board) == 0:
            raise UsageError(
                f"the turns {scramble!r} leave the cube solved, so that there is nothing to do"
            )
        levels.append(Cube(board.reshape(6, size, size)))
    return Given.of(*levels)


@dataclasses.dataclass(frozen=True)
class RubiksCube:
    """Observation: the colours of all stickers by face and row, int8 `[6 n^2]`. Action: a row of `cube_turns`.

    Attributes:
        generator: `Scramble`, what `given_cubes` makes, or any that draws a `Cube`; n is its size.
        half_turns: whether turning a face twice is one of its turns: 18 actions, not 12.
        rewards: "dense" or "sparse".
    """

    generator: Generator = Scramble()
    half_turns: bool = False
    rewards: str = field("sparse", OneOf(REWARDS))
    absorbing = True  # `unless`

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no generator of a `Cube`."""
        check_fields(self)
        if self.size not in (2, 3):
            raise UsageError(f"RubiksCube takes cubes of 2 or 3 layers, not {self.size}")

    @property
    def size(self) -> int:
        """N."""
        return check_generator(
            "RubiksCube", self.generator, Cube, "Scramble, given_cubes(...)"
        ).stickers.shape[-1]

    @property
    def name(self) -> str:
        """With its size and turns."""
        return f"RubiksCube-{self.size}{'-half' if self.half_turns else ''}"

    @property
    def default_params(self) -> Params:
        """A hundred steps."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Colours, by face, row and column."""
        return Box(0, 5, (6 * self.size**2,), jnp.int8)

    def action_space(self, params: Params) -> Discrete:
        """12 turns, or 18."""
        ways = ("", "'", "2") if self.half_turns else ("", "'")
        return Discrete(6 * len(ways), names=tuple(face + way for face in FACES for way in ways))

    def sample_level(self, key: PRNGKey, params: Params) -> Cube:
        """The generator's; consumes `key`."""
        return self.generator(key)

    def init_level(self, key: PRNGKey, level: Cube, params: Params) -> State:
        """No move made; deterministic."""
        stickers = jnp.asarray(level.stickers, jnp.int8)
        wrong = misplaced(stickers.reshape(-1))
        return State(stickers, wrong, wrong, jnp.zeros((), jnp.int32))

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def action_mask(self, state: State, params: Params) -> Array:
        """All turns, bool `[12]` or `[18]`."""
        return jnp.ones(len(cube_turns(self.size, self.half_turns)), bool)

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Turns a face; deterministic."""
        order = jnp.asarray(cube_turns(self.size, self.half_turns))[action]
        board = state.stickers.reshape(-1)[order]
        moved = State(
            board.reshape(state.stickers.shape), state.first, misplaced(board), state.time + 1
        )
        return unless(self.terminal(state, params), moved, state)

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """Colours, by face, row and column."""
        return state.stickers.reshape(-1)

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """See the module's table."""
        ends = self.terminal(next_state, params) | self.truncated(next_state, params)
        before, after = self.outcome(state, params), self.outcome(next_state, params)
        return earned(self.rewards, before, after, self.terminal(state, params), ends)

    def terminal(self, state: State, params: Params) -> Array:
        """Solved."""
        return state.wrong == 0

    def truncated(self, state: State, params: Params) -> Array:
        """After `params.max_steps`."""
        return state.time >= params.max_steps

    def outcome(self, state: State, params: Params) -> Array:
        """What dense rewards have paid so far, float32 `[]`."""
        last = jnp.where(state.wrong == 0, 1.0, 0.0)
        ends = self.terminal(state, params) | self.truncated(state, params)
        return jnp.where(
            ends, last, (state.first - state.wrong) / (2 * state.stickers.size)
        ).astype(jnp.float32)

    def heuristic(self, state: State, params: Params) -> Array:
        """The share that is right, as a guess of the chance to solve it, less what dense rewards have already paid."""
        paid = self.outcome(state, params) if self.rewards == "dense" else 0.0
        guess = 1 - state.wrong / state.stickers.size - paid
        return jnp.where(self.terminal(state, params), 0.0, guess).astype(jnp.float32)

    def render(self, state: State, params: Params) -> Array:
        """The faces unfolded: U over F, then L F R B, then D; uint8 `[48 n, 64 n, 3]`."""
        blank = jnp.full((self.size, self.size), len(FACES), jnp.int8)
        face = dict(zip(FACES, state.stickers, strict=True))
        net = [[face.get(name, blank) for name in row] for row in (" U  ", "LFRB", " D  ")]
        return picture.tiles(jnp.block(net), SPRITES)


def _sprites() -> np.ndarray:
    colors = (
        (245, 245, 245),
        picture.RED,
        picture.GREEN,
        picture.YELLOW,
        picture.ORANGE,
        picture.BLUE,
    )
    pages = np.full((7, 16, 16, 3), 40, np.uint8)
    for page, color in zip(pages, colors, strict=False):
        page[1:15, 1:15] = color
    return pages


SPRITES = _sprites()

VARIANTS = {
    "RubiksCube-2": lambda: RubiksCube(Scramble(2)),
    "RubiksCube-3": RubiksCube,
    "RubiksCube-3-Easier": lambda: RubiksCube(Scramble(least=1)),
    "RubiksCube-3-half": lambda: RubiksCube(Scramble(half_turns=True), half_turns=True),
}
