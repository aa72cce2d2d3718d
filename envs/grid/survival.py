"""Survival on a drawn island of grass, rock and water: gather, craft, eat, sleep, fight. A reset is costly.

Source: the rules follow Crafter (Hafner 2022) and Craftax-Classic (Matthews et al. 2024) in small; plants, arrows and
lava are left out, needs fall at fixed intervals, and darkness narrows the view instead of adding noise.

| action | legal awake when | what it does |
| --- | --- | --- |
| 0 nothing | always; the only one asleep | |
| 1-4 right, down, left, up | not facing there, or the way is free | faces, and walks if it is free |
| 5 use | facing what gives something, or a creature | gathers, drinks, hits |
| 6 sleep | energy is not full | sleeps until energy is full or something hurts |
| 7 place stone | facing free ground or water, with 1 stone | |
| 8 place table, 9 furnace | facing free ground, with 3 wood; with 2 stone | |
| 10-12 wooden, stone, iron pickaxe | it is not owned, a table is near, with what it costs | |
| 13-15 wooden, stone, iron sword | the same | hits with 2, 3, 5 instead of 1 |

A wooden tool costs 1 wood, a stone one 1 stone more, an iron one 1 wood, 1 coal and 1 iron, and a furnace near, too.
Free ground is grass, sand or a path without a creature; the sea at the edge of the map cannot be filled; near is one
of the eight cells around. A tree gives wood and stays; stone and coal want a wooden pickaxe, iron a stone and diamond
an iron one, and leave a path; at most 9 of each thing are held. A cow has 3 points of health and feeds with 6, a
zombie has 5; zombies come at night, chase and hit with 2 every fifth step, a sleeper with 7.

A step: action, creatures in their order, needs, clock. Each of the 17 achievements earns 1 once, a point of health
0.1. The episode terminates when health is 0 and is cut after `max_steps`. `envs.terrain` draws the island.
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
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from . import terrain, tiles
from .terrain import COAL, DIAMOND, FURNACE, GRASS, IRON, PATH, STONE, TABLE, TREE, WATER

__all__ = ["ACHIEVEMENTS", "ACTIONS", "VARIANTS", "Noise", "Params", "State", "Survival", "noise"]

ACTIONS = (
    "nothing", "right", "down", "left", "up", "use", "sleep", "place_stone", "place_table", "place_furnace",
    "wooden_pickaxe", "stone_pickaxe", "iron_pickaxe", "wooden_sword", "stone_sword", "iron_sword",
)  # fmt: skip
ACHIEVEMENTS = (
    "wood", "stone", "coal", "iron", "diamond", "drink", "eat", "kill", *ACTIONS[7:],
)  # fmt: skip
USE, SLEEP, PLACE_STONE, PLACE_TABLE, PLACE_FURNACE, FIRST_TOOL = range(5, 11)
HEALTH, FOOD, DRINK, ENERGY = range(4)
MOST = 9
NUM_COWS, NUM_ZOMBIES = 4, 4
NUM_CREATURES = NUM_COWS + NUM_ZOMBIES
GOODS = (TREE, STONE, COAL, IRON, DIAMOND)
# Wood, stone, coal and iron that the actions from PLACE_STONE on take.
_TOOLS = ((1, 0, 0, 0), (1, 1, 0, 0), (1, 0, 1, 1))
COSTS = np.array([(0, 1, 0, 0), (3, 0, 0, 0), (0, 2, 0, 0), *_TOOLS, *_TOOLS], np.int32)
PLACED = np.array([STONE, TABLE, FURNACE], np.uint8)
_IS_COW = np.arange(NUM_CREATURES) < NUM_COWS


@flax.struct.dataclass
class State:
    """An island, who lives on it, and what the agent has.

    Attributes:
        terrain: uint8 `[size, size]`, kinds of `envs.terrain`.
        cell: int32, `row * size + column`; facing: int32, 0 right, 1 down, 2 left, 3 up.
        needs: int32 `[4]`, health, food, drink, energy, at most 9.
        inventory: int32 `[11]`, wood, stone, coal, iron, diamond, then the six tools, 0 or 1.
        asleep: bool.
        creatures: int32 `[8]`, their cells, cows first; vigour: int32 `[8]`, their health, 0 for none there.
        rest: int32 `[8]`, steps until a zombie can hit again.
        achieved: bool `[17]`.
        time: int32.
    """

    terrain: Any
    cell: Any
    facing: Any
    needs: Any
    inventory: Any
    asleep: Any
    creatures: Any
    vigour: Any
    rest: Any
    achieved: Any
    time: Any


@flax.struct.dataclass
class Params:
    """Intervals in steps, rates in 1/256 a step and creature, damage in points of health."""

    max_steps: Any = 10_000
    day: Any = 300
    food_every: Any = 25
    drink_every: Any = 20
    energy_every: Any = 30
    sleep_every: Any = 4
    heal_every: Any = 10
    cow_rate: Any = 8
    zombie_rate: Any = 2
    night_rate: Any = 12
    chase: Any = 192
    wander: Any = 96
    bite: Any = 2
    night_bite: Any = 7
    health_reward: Any = 0.1


@flax.struct.dataclass
class Noise:
    """What a step draws for each creature: int32 `[8]` direction, chance below 256, and offsets from -8 to 8."""

    direction: Any
    chance: Any
    down: Any
    right: Any


def noise(key: PRNGKey) -> Noise:
    """One word a creature, cut into its parts; consumes `key`."""
    bits = jax.random.bits(key, (NUM_CREATURES,), jnp.uint32)
    direction, chance, down, right = (
        (bits >> shift & mask).astype(jnp.int32)
        for shift, mask in ((0, 3), (2, 255), (10, 1023), (20, 1023))
    )
    return Noise(direction=direction, chance=chance, down=down % 17 - 8, right=right % 17 - 8)


@dataclasses.dataclass(frozen=True)
class Survival:
    """An island of `size` by `size` cells, seen `view` by `view` around the agent."""

    size: int = field(64, AtLeast(16))
    view: int = field(9, AtLeast(5))

    def __post_init__(self):
        check_fields(self)
        if self.view % 2 == 0:
            raise UsageError(f"a view is an odd number of cells from 5, not {self.view}")

    @property
    def name(self) -> str:
        """With its size."""
        return f"Survival-{self.size}x{self.size}"

    @property
    def default_params(self) -> Params:
        """Balanced so that a careless agent starves after some 200 steps."""
        return Params()

    def observation_space(self, params: Params) -> Fields:
        """`image`: kind of ground and creature (1 cow, 2 zombie) of every cell, 0 in the dark; `status`: 18 numbers.

        These are the needs (4), the inventory (11), the direction, whether asleep, the tenth of the day.
        """
        return Fields.of(
            image=Box(0, 11, (self.view, self.view, 2), jnp.uint8),
            status=Box(0, 9, (18,), jnp.uint8),
        )

    def action_space(self, params: Params) -> Discrete:
        """`ACTIONS`."""
        return Discrete(len(ACTIONS), names=ACTIONS)

    def init(self, key: PRNGKey, params: Params) -> State:
        """Draws an island with its cows; consumes `key`. Costly."""
        terrain_key, cow_key = jax.random.split(key)
        ground, start = terrain.draw(terrain_key, self.size)
        index = jnp.arange(self.size**2, dtype=jnp.int32)
        scores = jnp.where(
            (ground.reshape(-1) == GRASS) & (index != start),
            jax.random.uniform(cow_key, index.shape),
            -1,
        )
        meadow, cells = jax.lax.top_k(scores, NUM_CREATURES)
        return State(
            terrain=ground,
            cell=start,
            facing=jnp.ones((), jnp.int32),
            needs=jnp.full(4, MOST, jnp.int32),
            inventory=jnp.zeros(11, jnp.int32),
            asleep=jnp.zeros((), bool),
            creatures=cells.astype(jnp.int32),
            vigour=jnp.where(_IS_COW & (meadow >= 0), 3, 0).astype(jnp.int32),
            rest=jnp.zeros(NUM_CREATURES, jnp.int32),
            achieved=jnp.zeros(len(ACHIEVEMENTS), bool),
            time=jnp.zeros((), jnp.int32),
        )

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Action, creatures, needs, clock; consumes `key` (see `noise`)."""
        action = jnp.where(self.action_mask(state, params)[action], action, 0)
        acted = self._act(state, action)
        lived, pain = self._creatures(acted, noise(key), params)
        return self._needs(lived, pain, params)

    def _ahead(self, state: State, direction: Array) -> Array:
        return state.cell + jax.lax.select_n(
            direction, *(jnp.int32(step) for step in (1, self.size, -1, -self.size))
        )

    def action_mask(self, state: State, params: Params) -> Array:
        """The actions that do anything, and 0, bool `[16]`."""
        flat = state.terrain.reshape(-1)
        steps = np.array([1, self.size, -1, -self.size])
        sides = flat[state.cell + steps]
        empty = ~jnp.any(_at(state, (state.cell + steps)[:, None]), axis=1)
        ground = tiles.member(sides, terrain.WALKABLE) & empty
        walks = ground | (np.arange(4) != state.facing)
        front, free = self._ahead(state, state.facing), ground[state.facing]
        faced, row, column = flat[front], front // self.size, front % self.size
        shallow = (
            (faced == WATER)
            & (jnp.minimum(row, column) > 0)
            & (jnp.maximum(row, column) < self.size - 1)
        )
        creature = ~empty[state.facing]
        goods, tools = state.inventory[:5], state.inventory[5:]
        needed = jnp.stack([jnp.ones((), bool), *(tools[np.array([0, 0, 1, 2])] > 0)])
        gathers = jnp.any((faced == np.array(GOODS, np.uint8)) & needed & (goods < MOST))
        drinks = (faced == WATER) & (state.needs[DRINK] < MOST)
        around = flat[
            state.cell
            + np.array([down * self.size + right for down in (-1, 0, 1) for right in (-1, 0, 1)])
        ]
        table, furnace = jnp.any(around == TABLE), jnp.any(around == FURNACE)
        paid = jnp.all(goods[None, :4] >= COSTS, axis=1)
        place = jnp.stack([free | (shallow & ~creature), free, free])
        make = jnp.tile(jnp.stack([table, table, table & furnace]), 2) & (tools == 0)
        awake = jnp.concatenate(
            [
                walks,
                jnp.stack([creature | gathers | drinks, state.needs[ENERGY] < MOST]),
                jnp.concatenate([place, make]) & paid,
            ]
        )
        return jnp.concatenate([jnp.ones(1, bool), awake & ~state.asleep])

    def _act(self, state: State, action: Array) -> State:
        """A legal action."""
        turned = (action >= 1) & (action <= 4)
        facing = jnp.where(turned, action - 1, state.facing)
        front = self._ahead(state, facing)
        faced = state.terrain.reshape(-1)[front]
        struck = _at(state, front) & (action == USE)
        walks = turned & tiles.member(faced, terrain.WALKABLE) & ~jnp.any(_at(state, front))
        used = (action == USE) & ~jnp.any(struck)
        gathered = used & (faced == np.array(GOODS, np.uint8))
        drunk = used & (faced == WATER)
        damage = jnp.max(jnp.where(state.inventory[8:] > 0, np.array([2, 3, 5]), 1))
        vigour = jnp.maximum(state.vigour - jnp.where(struck, damage, 0), 0)
        killed = struck & (vigour == 0)
        eaten = jnp.any(killed & _IS_COW)
        done = action == np.arange(PLACE_STONE, len(ACTIONS))
        paid = jnp.sum(jnp.where(done[:, None], COSTS, 0), axis=0)
        goods = state.inventory[:5] + gathered - jnp.pad(paid, (0, 1))
        dug = jnp.any(gathered[1:])
        placed = jnp.max(jnp.where(done[:3], PLACED, 0)).astype(jnp.uint8)
        place = jnp.arange(self.size**2, dtype=jnp.int32).reshape(self.size, self.size)
        made = jnp.where(dug, jnp.uint8(PATH), placed)
        needs = state.needs + jnp.stack(
            [jnp.int32(0), 6 * eaten, drunk.astype(jnp.int32), jnp.int32(0)]
        )
        events = jnp.concatenate(
            [gathered, jnp.stack([drunk, eaten, jnp.any(killed & ~_IS_COW)]), done]
        )
        return state.replace(
            terrain=jnp.where((place == front) & (made > 0), made, state.terrain),
            cell=jnp.where(walks, front, state.cell),
            facing=facing,
            needs=jnp.minimum(needs, MOST),
            inventory=jnp.concatenate([goods, state.inventory[5:] + done[3:]]),
            asleep=state.asleep | (action == SLEEP),
            vigour=vigour,
            achieved=state.achieved | events,
        )

    def _creatures(self, state: State, drawn: Noise, params: Params) -> tuple[State, Array]:
        """Creatures come, go, walk and bite, one after the other; also the pain of it."""
        size, flat = self.size, state.terrain.reshape(-1)
        row, column = state.cell // size, state.cell % size
        dark = self._tenth(state, params) >= 6
        cells, vigour, rest, pain = (
            state.creatures,
            state.vigour,
            jnp.maximum(state.rest - 1, 0),
            jnp.int32(0),
        )
        for index in range(NUM_CREATURES):
            cow = bool(_IS_COW[index])
            here, chance = cells[index], drawn.chance[index]
            down, right = row - here // size, column - here % size
            far = jnp.maximum(jnp.abs(down), jnp.abs(right))
            alive = (vigour[index] > 0) & (far <= 16)
            chase = jnp.where(
                jnp.abs(down) > jnp.abs(right),
                jnp.where(down > 0, 1, 3),
                jnp.where(right > 0, 0, 2),
            )
            hunts = (far <= 8) & (chance < params.chase) & (not cow)
            moves = hunts | (chance >= 256 - params.wander)
            direction = jnp.where(hunts, chase, drawn.direction[index])
            goal = here + jax.lax.select_n(
                direction, *(jnp.int32(step) for step in (1, size, -1, -size))
            )
            rate = (
                params.cow_rate if cow else jnp.where(dark, params.night_rate, params.zombie_rate)
            )
            came_row, came_column = row + drawn.down[index], column + drawn.right[index]
            distance = jnp.maximum(jnp.abs(drawn.down[index]), jnp.abs(drawn.right[index]))
            inside = (came_row >= 0) & (came_row < size) & (came_column >= 0) & (came_column < size)
            comes = ~alive & (chance < rate) & inside & (distance >= 4)
            goal = jnp.where(comes, came_row * size + came_column, goal)
            taken = jnp.any((cells == goal) & (vigour > 0)) | (goal == state.cell)
            goes = ((alive & moves) | comes) & ~taken & (flat[goal] == GRASS)
            cells = cells.at[index].set(jnp.where(goes, goal, here))
            life = jnp.where(comes & goes, 3 if cow else 5, jnp.where(alive, vigour[index], 0))
            vigour = vigour.at[index].set(life)
            if not cow:
                bites = alive & (jnp.abs(down) + jnp.abs(right) == 1) & (rest[index] == 0)
                pain = pain + jnp.where(
                    bites, jnp.where(state.asleep, params.night_bite, params.bite), 0
                )
                rest = rest.at[index].set(jnp.where(bites, 5, rest[index]))
        return state.replace(creatures=cells, vigour=vigour, rest=rest), pain

    def _needs(self, state: State, pain: Array, params: Params) -> State:
        """Hunger, thirst, tiredness, healing, waking, the clock."""
        time = state.time + 1
        asleep = state.asleep
        food = state.needs[FOOD] - (time % params.food_every == 0)
        drink = state.needs[DRINK] - (time % params.drink_every == 0)
        rested = jnp.where(asleep, time % params.sleep_every == 0, False)
        tired = jnp.where(asleep, False, time % params.energy_every == 0)
        energy = state.needs[ENERGY] + rested - tired
        food, drink, energy = (jnp.clip(need, 0, MOST) for need in (food, drink, energy))
        well = jnp.minimum(jnp.minimum(food, drink), energy) > 0
        healing = jnp.where(time % params.heal_every == 0, jnp.where(well, 1, -1), 0)
        health = jnp.clip(state.needs[HEALTH] + healing - pain, 0, MOST)
        hurt = health < state.needs[HEALTH]
        return state.replace(
            needs=jnp.stack([health, food, drink, energy]).astype(jnp.int32),
            asleep=asleep & (energy < MOST) & ~hurt,
            time=time,
        )

    def _tenth(self, state: State, params: Params) -> Array:
        """The tenth of the day, 0 to 9; it is dark from 6 on, and darkest in 7 and 8."""
        return state.time % params.day * 10 // params.day

    def observe(
        self, key: PRNGKey, state: State, action: Array | None, params: Params
    ) -> dict[str, Array]:
        """What is around and how one fares; `key` is not needed."""
        half, tenth = self.view // 2, self._tenth(state, params)
        row, column = state.cell // self.size, state.cell % self.size
        padded = jnp.pad(state.terrain, half, constant_values=WATER)
        ground = jax.lax.dynamic_slice(padded, (row, column), (self.view, self.view))
        down, right = np.mgrid[-half : half + 1, -half : half + 1].astype(np.int32)
        beings = jnp.zeros((self.view, self.view), jnp.uint8)
        for index in range(NUM_CREATURES):
            cell = state.creatures[index]
            there = (down == cell // self.size - row) & (right == cell % self.size - column)
            beings = jnp.where(
                there & (state.vigour[index] > 0), jnp.uint8(2 - _IS_COW[index]), beings
            )
        reach = half - (tenth >= 6) - ((tenth == 7) | (tenth == 8))
        seen = np.maximum(np.abs(down), np.abs(right)) <= jnp.where(state.asleep, 0, reach)
        rest = jnp.stack([state.facing, state.asleep.astype(jnp.int32), tenth])
        return {
            "image": jnp.where(seen[..., None], jnp.stack([ground, beings], axis=-1), jnp.uint8(0)),
            "status": jnp.concatenate([state.needs, state.inventory, rest]).astype(jnp.uint8),
        }

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """New achievements, and `health_reward` for each point of health gained or lost."""
        new = jnp.sum(next_state.achieved & ~state.achieved, dtype=jnp.int32)
        health = next_state.needs[HEALTH] - state.needs[HEALTH]
        return (new + params.health_reward * health).astype(jnp.float32)

    def terminal(self, state: State, params: Params) -> Array:
        """Without health."""
        return state.needs[HEALTH] <= 0

    def truncated(self, state: State, params: Params) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: State, params: Params) -> Array:
        """The whole island, 8 pixels a cell, with its creatures and the agent."""
        place = jnp.arange(self.size**2, dtype=jnp.int32).reshape(self.size, self.size)
        codes = state.terrain.astype(jnp.int32)
        for index in range(NUM_CREATURES):
            there = (place == state.creatures[index]) & (state.vigour[index] > 0)
            codes = jnp.where(there, _COW if _IS_COW[index] else _ZOMBIE, codes)
        codes = jnp.where(place == state.cell, _AGENT + state.facing, codes)
        return tiles.picture(codes, jnp.asarray(SPRITES))


def _at(state: State, cell: Array) -> Array:
    """Which creatures are at `cell` (broadcast), bool `[..., 8]`."""
    creatures = jnp.broadcast_to(
        state.creatures, jnp.broadcast_shapes(cell.shape, state.creatures.shape)
    )
    return (creatures == cell) & jnp.broadcast_to(state.vigour > 0, creatures.shape)


_COW, _ZOMBIE, _AGENT = 12, 13, 14
_GROUND = (
    "000000", "4f9a3c", "d9c88a", "2f6fd0", "8c8c8c", "3f8030", "b8a98a", "8c8c8c", "8c8c8c", "8c8c8c", "4f9a3c",
    "8c8c8c",
)  # fmt: skip
_MARKS = {
    TREE: ("124d14", "..####.. .######. ######## ######## .######. ...##... ...##... ........"),
    STONE: ("6a6a6a", "........ .##..... ........ .....##. ........ ..##.... ........ ......#."),
    COAL: ("1c1c1c", "........ .##..... .##..##. .....##. ..##.... ..##..#. .....##. ........"),
    IRON: ("e0a070", "........ .##..... .##..##. .....##. ..##.... ..##..#. .....##. ........"),
    DIAMOND: ("e8ffff", "........ ...##... ..####.. .######. .######. ..####.. ...##... ........"),
    TABLE: ("7a4a1c", "........ ######## ######## .#....#. .#....#. .#....#. .#....#. ........"),
    FURNACE: ("303030", "######## #......# #.####.# #.#..#.# #.#..#.# #.####.# #......# ########"),
    _COW: (
        "5a3018",
        "........ ##...... ##.####. ######## ..###### ..#..#.. ..#..#.. ........",
    ),
    _ZOMBIE: ("1e5a3c", "..####.. ..####.. ...##... .######. .#.##.#. ...##... ..#..#.. ..#..#.."),
    _AGENT: ("f4e0c0", "........ .##..... .####... .######. .######. .####... .##..... ........"),
}


def _sprites() -> np.ndarray:
    """`[18, 8, 8, 3]`: the kinds of ground, a cow and a zombie on grass, the agent in four directions."""
    table = np.zeros((_AGENT + 4, 8, 8, 3), np.uint8)
    for code in range(len(table)):
        table[code] = tuple(bytes.fromhex(_GROUND[code] if code < _COW else _GROUND[GRASS]))
    for code, (colour, shape) in _MARKS.items():
        table[code][tiles.bitmap(shape)] = tuple(bytes.fromhex(colour))
    table[_AGENT:] = tuple(bytes.fromhex("a02020"))
    for direction in range(4):
        arrow = np.rot90(tiles.bitmap(_MARKS[_AGENT][1]), -direction)
        table[_AGENT + direction][arrow] = tuple(bytes.fromhex(_MARKS[_AGENT][0]))
    return table


SPRITES = _sprites()

VARIANTS: dict[str, Callable[..., Survival]] = {
    "Survival": Survival,
    "Survival-32x32": functools.partial(Survival, size=32),
}
