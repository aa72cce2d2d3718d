"""Tasks as integer arrays: rules that turn things into other things, and a goal, in one grid world.

Source: Nikulin et al. 2024, "XLand-MiniGrid" (the row of rules, goals and generated trees of productions), and AdA
(Bauer et al. 2023) for trials. A ruleset is three small arrays of `envs.tiles` bytes, so a million of them are a file
and a batch of them is a `vmap`:

| array | row | meaning |
| --- | --- | --- |
| `rules` uint8 `[R, 4]` | `(kind, a, b, c)` | where `kind` holds of `a` (and `b`), `c` takes its (their) place |
| `goal` uint8 `[3]` | `(kind, a, b)` | the trial is won when `kind` holds of `a` (and `b`) |
| `objects` uint8 `[N]` | `a` | what lies on the floor at first; 0 pads |

| kind | it holds when | looked at after a legal |
| --- | --- | --- |
| 0 | never (padding) | |
| 1 | the agent holds `a` | pick |
| 2 | `a` is beside the agent | forward |
| 3, 4, 5, 6 | `a` is right of, below, left of, above the agent | forward |
| 7 | `a` is beside `b` | put of either |
| 8, 9, 10, 11 | `b` is right of, below, left of, above `a` | put of either |

Rules apply in their order, each to what those before it left; then the goal is looked at. With two things, `c` comes
where the one that was there already lay, and the one just put vanishes; the first side of (right, down, left, up)
counts. What deviates from XLand-MiniGrid: an illegal action triggers nothing, the pocket is seen, goals about the
floor or a position do not exist, and every generated ruleset can be solved.

An episode is `params.trials` trials of one task. A trial ends when the goal is reached, which earns
`1 - 0.9 time / params.trial_steps`, or after `params.trial_steps` steps, and the next begins where the first did (or
anywhere, with `shuffle`); the task stays. After the last one the episode terminates.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, Fields
from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from . import rulesets, scene, tiles
from .rulesets import Ruleset

__all__ = ["VARIANTS", "Level", "Params", "State", "XLand"]

_FLOOR = tiles.code(tiles.FLOOR)
_LATTICE = {1: (1, 1), 2: (2, 1), 4: (2, 2), 9: (3, 3)}
"""Rooms beside each other and above each other."""


@flax.struct.dataclass
class Level:
    """A task, and the scene in which each of its trials begins."""

    ruleset: Ruleset
    scene: scene.Scene


@flax.struct.dataclass
class State:
    """A level being played.

    Attributes:
        level: the task and where its trials begin.
        scene: the trial as it stands.
        time: int32, steps of this trial.
        trial: int32, trials that have ended.
        won: bool, the last step reached the goal.
        spent: int32, how long the trial took that the last step ended; 0 if it ended none.
    """

    level: Level
    scene: scene.Scene
    time: Any
    trial: Any
    won: Any
    spent: Any


@flax.struct.dataclass
class Params:
    """The tasks, of which an episode draws one, and the limits.

    Attributes:
        tasks: rulesets with a leading axis of any length (a benchmark; one task is an axis of 1).
        trials: how many trials an episode has.
        trial_steps: how long a trial may take.
    """

    tasks: Ruleset
    trials: Any
    trial_steps: Any


@dataclasses.dataclass(frozen=True)
class XLand:
    """Rooms of `size` by `size`, 1, 2, 4 or 9 of them, and a task.

    Attributes:
        size: cells a side, border included.
        rooms: 1, 2, 4 or 9, joined by closed doors of random colours.
        view: an odd number of cells; 0 for the whole map.
        see_through: whether walls hide nothing.
        shuffle: whether each trial draws new places (costs a placement every step), or begins where the first did.
        tree: which rulesets the default parameters hold.
        num_tasks: and how many.
    """

    size: int = field(9, AtLeast(5))
    rooms: int = field(1, AtLeast(1))
    view: int = field(5, Between(3, 31, also=(0,)))
    see_through: bool = True
    shuffle: bool = False
    tree: rulesets.Tree = rulesets.Tree()
    num_tasks: int = field(64, AtLeast(1))

    def __post_init__(self):
        check_fields(self)
        if self.rooms not in _LATTICE:
            raise UsageError(f"there are layouts of 1, 2, 4 and 9 rooms, not of {self.rooms}")
        smallest = 4 * _LATTICE[self.rooms][0] + 1
        if self.size < smallest:
            raise UsageError(
                f"{self.rooms} rooms need a size of at least {smallest}, not {self.size}"
            )
        if self.view and self.view % 2 == 0:
            raise UsageError(
                f"a view is an odd number of cells from 3 to 31, or 0 for the whole map, not {self.view}"
            )

    @property
    def name(self) -> str:
        """Rooms and size, as XLand-MiniGrid writes them."""
        return f"XLand-R{self.rooms}-{self.size}x{self.size}"

    @property
    def default_params(self) -> Params:
        """`num_tasks` rulesets of `tree`, always the same; 10 trials of `3 size^2` steps."""
        tasks = rulesets.generate(jax.random.key(0), self.tree, self.num_tasks)
        return Params(tasks=tasks, trials=10, trial_steps=3 * self.size**2)

    @property
    def num_floor(self) -> int:
        """Cells of floor."""
        across, down = _LATTICE[self.rooms]
        return (self.size - 1 - across) * (self.size - 1 - down)

    def observation_space(self, params: Params) -> Fields:
        """`image`: tile and colour of every cell seen; `start`: whether a trial begins here."""
        side = self.view or self.size
        return Fields.of(image=Box(0, 15, (side, side, 2), jnp.uint8), start=Discrete(2))

    def action_space(self, params: Params) -> Discrete:
        """`envs.scene.ACTIONS`."""
        return Discrete(len(scene.ACTIONS), names=scene.ACTIONS)

    def sample_level(self, key: PRNGKey, params: Params) -> Level:
        """Draws a task of `params.tasks` and places its objects; consumes `key`."""
        task_key, place_key = jax.random.split(key)
        ruleset = rulesets.sample_ruleset(task_key, params.tasks)
        return Level(ruleset=ruleset, scene=self.place(place_key, ruleset))

    def mutate_level(self, key: PRNGKey, level: Level, params: Params) -> Level:
        """Draws new places for the same task; consumes `key`."""
        return level.replace(scene=self.place(key, level.ruleset))

    def init_level(self, key: PRNGKey, level: Level, params: Params) -> State:
        """Begins the first trial of `level`; `key` is not needed."""
        zero = jnp.zeros((), jnp.int32)
        return State(
            level=level,
            scene=level.scene,
            time=zero,
            trial=zero,
            won=jnp.zeros((), bool),
            spent=zero,
        )

    def init(self, key: PRNGKey, params: Params) -> State:
        """Begins a drawn level; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def place(self, key: PRNGKey, ruleset: Ruleset) -> scene.Scene:
        """Rooms with doors, objects and agent on different cells of bare floor; consumes `key`."""
        door_key, cell_key, direction_key = jax.random.split(key, 3)
        grid = _rooms(door_key, self.size, self.rooms)
        num, room = ruleset.objects.shape[0], self.num_floor
        if num >= room:
            raise UsageError(
                f"{self.name} has {room} cells of floor, too few for {num} objects and the agent"
            )
        cells = scene.free_cells(cell_key, grid, num + 1)
        things = jnp.where(ruleset.objects == 0, jnp.uint8(_FLOOR), ruleset.objects)
        grid = grid.reshape(-1).at[cells[:num]].set(things).reshape(grid.shape)
        direction = jax.random.randint(direction_key, (), 0, 4)
        return scene.Scene(
            grid=grid, cell=cells[num], direction=direction, pocket=jnp.zeros((), jnp.uint8)
        )

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """One action, the rules, the goal, and the next trial where one ended; consumes `key` if `shuffle`."""
        body, front, legal = scene.act(state.scene, action)
        body, won = _produce(body, front, jnp.where(legal, action, -1), state.level.ruleset)
        time = state.time + 1
        over = won | (time >= params.trial_steps)
        begin = self.place(key, state.level.ruleset) if self.shuffle else state.level.scene
        return State(
            level=state.level,
            scene=jax.tree.map(lambda new, old: jnp.where(over, new, old), begin, body),
            time=jnp.where(over, 0, time),
            trial=state.trial + over,
            won=won,
            spent=jnp.where(over, time, 0),
        )

    def observe(
        self, key: PRNGKey, state: State, action: Array | None, params: Params
    ) -> dict[str, Array]:
        """The view or the map, and whether a trial begins; `key` is not needed."""
        if self.view:
            image = scene.view(state.scene, self.view, self.see_through)
        else:
            image = scene.unpacked(scene.whole(state.scene))
        return {"image": image, "start": (state.time == 0).astype(jnp.int32)}

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """`1 - 0.9 time / trial_steps` for a trial won, else 0."""
        earned = 1 - 0.9 * next_state.spent / params.trial_steps
        return jnp.where(next_state.won, earned, 0.0).astype(jnp.float32)

    def terminal(self, state: State, params: Params) -> Array:
        """After the last trial."""
        return state.trial >= params.trials

    def trial(self, state: State, params: Params) -> Array:
        """The trials that have ended."""
        return state.trial

    def action_mask(self, state: State, params: Params) -> Array:
        """The actions that change anything, bool `[6]`."""
        return scene.legal(state.scene)

    def render(self, state: State, params: Params) -> Array:
        """The whole map, 8 pixels a cell; below it the goal and each rule as a row of tiles."""
        ruleset, width = state.level.ruleset, self.size
        rows = jnp.concatenate([jnp.pad(ruleset.goal, (0, 1))[None], ruleset.rules])
        mark = (rows[:, :1] != 0) * jnp.uint8(tiles.code(tiles.GOAL, tiles.GREY))
        mark = mark.at[0].set(tiles.code(tiles.GOAL, tiles.GREEN))
        legend = jnp.pad(jnp.concatenate([mark, rows[:, 1:]], axis=1), ((0, 0), (0, width - 4)))
        return tiles.picture(
            jnp.concatenate([scene.whole(state.scene), legend]), jnp.asarray(tiles.SPRITES)
        )


def _rooms(key: PRNGKey, size: int, rooms: int) -> Array:
    """Walls in a lattice, and in each stretch of wall one closed door; consumes `key`."""
    across, down = _LATTICE[rooms]
    columns, lines = (np.linspace(0, size - 1, n + 1).round().astype(int) for n in (across, down))
    grid = scene.room(size, size)
    grid[lines] = grid[:, columns] = tiles.code(tiles.WALL, tiles.GREY)
    first, last = [], []
    for line in range(down):  # doors in the walls between two columns of rooms
        for column in columns[1:-1]:
            first.append((lines[line] + 1) * size + column)
            last.append((lines[line + 1] - 1) * size + column)
    for column in range(across):
        for line in lines[1:-1]:
            first.append(line * size + columns[column] + 1)
            last.append(line * size + columns[column + 1] - 1)
    if not first:
        return jnp.asarray(grid)
    begins, ends = np.array(first), np.array(last)
    step = np.where(ends - begins >= size, size, 1)
    place_key, colour_key = jax.random.split(key)
    places = jax.random.randint(place_key, begins.shape, 0, (ends - begins) // step + 1)
    colours = jax.random.randint(colour_key, begins.shape, 1, tiles.NUM_COLOURS)
    doors = (16 * tiles.CLOSED + colours).astype(jnp.uint8)
    return jnp.asarray(grid).reshape(-1).at[begins + step * places].set(doors).reshape(size, size)


def _produce(
    body: scene.Scene, front: Array, action: Array, ruleset: Ruleset
) -> tuple[scene.Scene, Array]:
    """Applies the rules after `action` (-1 if it was illegal), and says whether the goal is reached.

    All that a rule can see is the pocket, a focus (the thing just put, else the agent's cell) and the focus' four
    sides. These six bytes are read once, go through the rules, and are written once.
    """
    width = body.grid.shape[1]
    focus = jnp.where(action == scene.PUT, front, body.cell)
    flat = body.grid.reshape(-1)
    seen = [body.pocket, flat[focus]] + [flat[focus + side] for side in scene.neighbours(width)]
    before = list(seen)
    for index in range(ruleset.rules.shape[0]):
        kind, a, b, c = (ruleset.rules[index, column] for column in range(4))
        held, sides, first, second = _holds(kind, a, b, seen, action)
        met = [mine | other for mine, other in zip(first, second, strict=True)]
        put = functools.reduce(jnp.logical_or, met)
        seen[0] = jnp.where(held, c, seen[0])
        seen[1] = jnp.where(put, jnp.uint8(_FLOOR), seen[1])
        for side in range(4):
            earlier = functools.reduce(jnp.logical_or, met[:side], jnp.zeros((), bool))
            seen[2 + side] = jnp.where(sides[side] | (met[side] & ~earlier), c, seen[2 + side])
    kind, a, b = (ruleset.goal[column] for column in range(3))
    held, sides, first, second = _holds(kind, a, b, seen, action)
    won = functools.reduce(jnp.logical_or, (held, *sides, *first, *second))
    place = jnp.arange(body.grid.size, dtype=jnp.int32).reshape(body.grid.shape)
    grid = body.grid
    for side, step in enumerate((0, *scene.neighbours(width)), start=1):
        grid = jnp.where((place == focus + step) & (seen[side] != before[side]), seen[side], grid)
    return body.replace(grid=grid, pocket=seen[0]), won


def _holds(
    kind: Array, a: Array, b: Array, seen: list[Array], action: Array
) -> tuple[Array, list, list, list]:
    """Whether `kind` holds: in the pocket; of `a` on each side; of the focus as `a`, or as `b`, with each side."""
    pocket, focus, *around = seen
    held = (kind == 1) & (pocket == a) & (action == scene.PICK)
    moved = (action == scene.FORWARD) & (kind >= 2) & (kind <= 6)
    put = (action == scene.PUT) & (kind >= 7)
    sides = [moved & ((kind == 2) | (kind == 3 + side)) & (around[side] == a) for side in range(4)]
    is_a, is_b = put & (focus == a), put & (focus == b)
    first = [is_a & ((kind == 7) | (kind == 8 + side)) & (around[side] == b) for side in range(4)]
    second = [
        is_b & ((kind == 7) | (kind == 8 + (side + 2) % 4)) & (around[side] == a)
        for side in range(4)
    ]
    return held, sides, first, second


def _variants() -> dict[str, Callable[..., XLand]]:
    rooms = ((1, 9), (1, 13), (2, 9), (4, 9), (4, 13), (9, 16))
    trees = {
        "": rulesets.Tree(),
        "-Small": rulesets.Tree.small(),
        "-Medium": rulesets.Tree.medium(),
    }
    made = {
        f"XLand-R{num}-{size}x{size}{word}": functools.partial(
            XLand, size=size, rooms=num, tree=tree
        )
        for num, size in rooms
        for word, tree in trees.items()
    }
    return made | {"XLand-R1-5x5-Pick": functools.partial(XLand, size=5, tree=rulesets.Tree.pick())}


VARIANTS: dict[str, Callable[..., XLand]] = _variants()
