"""Cooperative foraging: agents of levels 1, 2, ... gather food that only enough of them together can lift.

Rules, sizes and the vector of observations are those of Level-Based Foraging (`Foraging-8x8-2p-2f-v3` and its family;
Christianos, Schaefer, Albrecht, "Shared Experience Actor-Critic", 2020; Papoudakis et al., "Benchmarking Multi-Agent
Deep Reinforcement Learning Algorithms in Cooperative Tasks", 2021): move or load, all at once; who wants a cell that
another also wants stays; food is lifted where the levels of those who load beside it reach its own, and each of them
earns its share, so that a team that lifts everything earns one.

What deviates: the limit of steps truncates instead of terminating; who fails to leave a cell keeps others out of it
(the original checks once and can put two agents into one cell); agents are seen as far as food is, `sight` cells in
both directions (the original sees further near the upper and left walls); actions that the mask forbids are rests, as
there.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import distinct, picture
from jaxpar.env.spaces import Box, Discrete
from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

__all__ = ["VARIANTS", "Foraging", "scripted"]

MOVES = np.array(
    [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1], [0, 0]], np.int32
)  # rest, up, down, left, right, load
LOAD = 5


@flax.struct.dataclass
class Level:
    """What an episode starts from.

    Attributes:
        position: int32 `[N, 2]`, row and column of the agents.
        strength: int32 `[N]`, their levels.
        food: int32 `[F, 2]`, row and column of the food.
        weight: int32 `[F]`, its levels; 0 where no place was left for it.
    """

    position: Array
    strength: Array
    food: Array
    weight: Array


@flax.struct.dataclass
class State(Level):
    """A `Level` with `left` bool `[F]`, the food not yet lifted, and `time` int32, steps since `init`."""

    left: Array
    time: Array


@flax.struct.dataclass
class Params:
    """`penalty` is what agents lose that load together and fail."""

    max_steps: int = 50
    penalty: float = 0.0


@dataclasses.dataclass(frozen=True)
class Foraging:
    """A square grid with agents and food.

    `view="vector"` sees, as float32 `[3 F + 3 N]`, row, column and level of every food in sight in reading order, then
    of oneself, then of the others in sight, counted from the corner of the window of sight; -1, -1, 0 where there is
    nothing more. `view="grid"` sees int32 `[3, 2 sight + 1, 2 sight + 1]` centred on oneself: levels of agents, levels
    of food, and ones where one could stand.

    Attributes:
        size: cells of a side.
        num_agents: N.
        num_food: F.
        sight: how many cells away things are seen; 0 means all of the grid.
        max_strength: greatest level of an agent.
        together: whether every food needs as many as are allowed to be needed (the `-coop` tasks of the original).
        view: `"vector"` or `"grid"`.
    """

    size: int = field(8, AtLeast(3))
    num_agents: int = field(2, AtLeast(1))
    num_food: int = field(2, AtLeast(1))
    sight: int = field(0, AtLeast(0))
    max_strength: int = field(2, AtLeast(1))
    together: bool = False
    view: str = field("vector", OneOf(("vector", "grid")))
    absorbing = True  # nothing can be earned where nothing is left

    def __post_init__(self) -> None:
        """Refuses what cannot be built."""
        check_fields(self)
        if self.num_agents > self.size**2 - 1:
            raise UsageError(
                f"{self.num_agents} agents and food need more cells than the {self.size**2} of this grid."
            )

    @property
    def name(self) -> str:
        """`Foraging-8x8-2p-2f`, with `-coop` and `-2s` as the original has them."""
        coop, sight = "-coop" if self.together else "", f"-{self.sight}s" if self.sight else ""
        return f"Foraging-{self.size}x{self.size}-{self.num_agents}p-{self.num_food}f{coop}{sight}"

    @property
    def default_params(self) -> Params:
        """Those of the original."""
        return Params()

    @property
    def reach(self) -> int:
        """How far things are seen."""
        return self.sight or self.size

    def observation_space(self, params: Params) -> Box:
        """Of all agents, `[N, ...]`."""
        top = max(self.size - 1, self.max_strength * min(self.num_agents, 3))
        if self.view == "grid":
            return Box(
                0, top, (self.num_agents, 3, 2 * self.reach + 1, 2 * self.reach + 1), jnp.int32
            )
        return Box(-1.0, float(top), (self.num_agents, 3 * (self.num_food + self.num_agents)))

    def action_space(self, params: Params) -> Discrete:
        """Of all agents, `[N]`: rest, up, down, left, right, load."""
        return Discrete(
            len(MOVES), (self.num_agents,), names=("rest", "up", "down", "left", "right", "load")
        )

    def sample_level(self, key: PRNGKey, params: Params) -> Level:
        """Agents anywhere, then food off the walls and well apart, each uniform over what is left; consumes `key`.

        Food has no other food among its eight neighbours, nor two cells away in its row or column, so no cell is
        beside two. Its level is uniform up to the sum of the three lowest strengths, or that sum if `together`.
        """
        place_key, strength_key, food_key, weight_key = jax.random.split(key, 4)
        cells = distinct(place_key, self.size**2, self.num_agents)
        position = jnp.stack([cells // self.size, cells % self.size], axis=1)
        strength = jax.random.randint(strength_key, (self.num_agents,), 1, self.max_strength + 1)
        row, column = np.mgrid[: self.size, : self.size].astype(np.int32)
        inner = (np.minimum(row, column) > 0) & (np.maximum(row, column) < self.size - 1)
        free = inner & ~jnp.any(offsets(position, row, column) == 0, axis=0)
        food, room = [], []
        for place in jax.random.split(food_key, self.num_food):
            cell = jax.random.categorical(place, jnp.where(free, 0.0, -jnp.inf).reshape(-1)).astype(
                jnp.int32
            )
            food.append(jnp.stack([cell // self.size, cell % self.size]))
            room.append(jnp.any(free))
            free &= offsets(food[-1][None], row, column)[0] > 2
        most = jnp.sum(jnp.sort(strength)[:3])
        weight = jax.random.randint(
            weight_key, (self.num_food,), jnp.where(self.together, most, 1), most + 1
        )
        return Level(position, strength, jnp.stack(food), jnp.where(jnp.stack(room), weight, 0))

    def init_level(self, key: PRNGKey, level: Level, params: Params) -> State:
        """The first state of a level; deterministic."""
        fields = {field.name: getattr(level, field.name) for field in dataclasses.fields(level)}
        return State(**fields, left=level.weight > 0, time=jnp.zeros((), jnp.int32))

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def action_mask(self, state: State, params: Params) -> Array:
        """Bool `[N, 6]`: cells within the grid and without food (agents do not count), and food to load beside one."""
        target = state.position[:, None] + MOVES[None]
        inside = jnp.all((target >= 0) & (target < self.size), axis=-1)
        food = jnp.any(
            jnp.all(target[:, :, None] == state.food[None, None], axis=-1) & state.left[None, None],
            axis=-1,
        )
        return (inside & ~food).at[:, LOAD].set(jnp.any(beside_food(state), axis=1))

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Deterministic; `key` is not used."""
        action = self.legal(state, action, params)
        target = state.position + jnp.asarray(MOVES)[action]
        for _ in range(
            self.num_agents - 1
        ):  # who has to stay may keep another out, at most N - 1 times in a row
            same = jnp.all(target[:, None] == target[None], axis=-1) & ~np.eye(
                self.num_agents, dtype=bool
            )
            target = jnp.where(jnp.any(same, axis=1, keepdims=True), state.position, target)
        lifted, _ = lift(state, action)
        return state.replace(position=target, left=state.left & ~lifted, time=state.time + 1)

    def legal(self, state: State, action: Array, params: Params) -> Array:
        """Actions int32 `[N]`, those that the mask forbids turned into rests."""
        allowed = jnp.take_along_axis(self.action_mask(state, params), action[:, None], axis=1)[
            :, 0
        ]
        return jnp.where(allowed, action, 0)

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """Deterministic; `key` is not used."""
        return self._grid(state) if self.view == "grid" else self._vector(state)

    def _vector(self, state: State) -> Array:
        count = self.num_agents
        corner = jnp.maximum(state.position - self.reach, 0)

        def rows(place: Array, number: Array, rank: Array) -> Array:
            near = jnp.max(jnp.abs(place[None] - state.position[:, None]), axis=-1) <= self.reach
            seen = near & (number > 0)[None]
            order = jnp.argsort(jnp.where(seen, rank, self.size**2 + count), axis=1)
            number = jnp.broadcast_to(number[None, :, None], (*near.shape, 1))
            values = jnp.concatenate([place[None] - corner[:, None], number], axis=-1)
            values = jnp.where(seen[..., None], values, np.array([[[-1, -1, 0]]], np.int32))
            return jnp.take_along_axis(values, order[..., None], axis=1).reshape(count, -1)

        reading = (state.food[:, 0] * self.size + state.food[:, 1])[None]
        first = np.where(np.eye(count, dtype=bool), -1, np.arange(count)[None])
        food = rows(state.food, jnp.where(state.left, state.weight, 0), reading)
        return jnp.concatenate([food, rows(state.position, state.strength, first)], axis=1).astype(
            jnp.float32
        )

    def _grid(self, state: State) -> Array:
        span = np.arange(-self.reach, self.reach + 1, dtype=np.int32)
        row, column = np.meshgrid(span, span, indexing="ij")

        def layer(centre: Array, place: Array, number: Array) -> Array:
            here = offsets(place - centre[None], row, column) == 0
            return jnp.sum(jnp.where(here, number[:, None, None], 0), axis=0)

        def layers(centre: Array) -> Array:
            agents = layer(centre, state.position, state.strength)
            food = layer(centre, state.food, jnp.where(state.left, state.weight, 0))
            rows, columns = row + centre[0], column + centre[1]
            inside = (jnp.minimum(rows, columns) >= 0) & (jnp.maximum(rows, columns) < self.size)
            return jnp.stack(
                [agents, food, (inside & (agents == 0) & (food == 0)).astype(jnp.int32)]
            )

        return jax.vmap(layers)(state.position)

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """Shares of what was lifted, by strength and by weight, minus the penalty of agents that failed to load."""
        action = self.legal(state, action, params)
        lifted, share = lift(state, action)
        earned = jnp.sum(jnp.where(lifted, state.weight, 0)[None] * share, axis=1) / jnp.maximum(
            jnp.sum(state.weight), 1
        )
        vain = (action == LOAD) & ~jnp.any(beside_food(state) & lifted[None], axis=1)
        return earned - params.penalty * vain

    def terminal(self, state: State, params: Params) -> Array:
        """Nothing is left, for all at once."""
        return jnp.full(self.num_agents, ~jnp.any(state.left))

    def truncated(self, state: State, params: Params) -> Array:
        """After `params.max_steps`."""
        return jnp.full(self.num_agents, state.time >= params.max_steps)

    def render(self, state: State, params: Params) -> Array:
        """Agents are blue squares, food is red, levels are dots, uint8 `[16 size, 16 size, 3]`."""
        grid = jnp.zeros((self.size, self.size), jnp.int32)
        grid = grid.at[state.food[:, 0], state.food[:, 1]].add(
            jnp.where(state.left, jnp.minimum(state.weight, 9), 0)
        )
        grid = grid.at[state.position[:, 0], state.position[:, 1]].set(
            9 + jnp.minimum(state.strength, 9)
        )
        return picture.tiles(grid, sprites())


def offsets(place: Array, row: np.ndarray, column: np.ndarray) -> Array:
    """Distances `[M, H, W]` along the grid from places `[M, 2]` to cells."""
    return jnp.abs(place[:, :1, None] - row[None]) + jnp.abs(place[:, 1:, None] - column[None])


def beside_food(state: State) -> Array:
    """Whether an agent stands beside a food that is left, bool `[N, F]`."""
    return (
        jnp.sum(jnp.abs(state.position[:, None] - state.food[None]), axis=-1) == 1
    ) & state.left[None]


def lift(state: State, action: Array) -> tuple[Array, Array]:
    """What is lifted, bool `[F]`, and each agent's share of the strength that loads beside it, float32 `[N, F]`."""
    force = jnp.where(beside_food(state) & (action == LOAD)[:, None], state.strength[:, None], 0)
    total = jnp.sum(force, axis=0)
    return state.left & (total >= state.weight) & (total > 0), force / jnp.maximum(total, 1)[None]


def sprites() -> np.ndarray:
    """Uint8 `[19, 16, 16, 3]`: an empty cell, food of levels 1 to 9, agents of levels 1 to 9."""
    table = np.full((19, 16, 16, 3), 245, np.uint8)
    y, x = np.mgrid[:16, :16] - 7.5
    table[1:10, x**2 + y**2 < 46] = picture.RED
    table[10:, np.maximum(abs(x), abs(y)) < 6] = picture.BLUE
    for level in range(1, 10):
        for dot in range(level):
            top, left = 4 + 3 * (dot // 3), 4 + 3 * (dot % 3)
            table[[level, level + 9], top : top + 2, left : left + 2] = 255
    table[:, 0], table[:, :, 0] = 215, 215
    return table


def scripted(env: Foraging, state: State, params: Params) -> Array:
    """Joint actions int32 `[N]` that know the whole state: all go to the food with the least total distance and load.

    Each walks a shortest way around food and the others (those before it already moved). Mean team return, uniform play
    in brackets: Foraging-8x8-2p-2f 1.00 (0.20), its coop task 1.00 (0.01), Foraging-10x10-3p-3f 1.00 (0.10),
    Foraging-15x15-4p-5f 1.00 (0.07).
    """
    row, column = np.mgrid[: env.size, : env.size].astype(np.int32)
    apart = jnp.sum(jnp.abs(state.position[:, None] - state.food[None]), axis=-1)
    goal = jnp.argmin(jnp.where(state.left, jnp.sum(apart, axis=0), jnp.iinfo(jnp.int32).max))
    food_here = jnp.any((offsets(state.food, row, column) == 0) & state.left[:, None, None], axis=0)
    goal_here = offsets(state.food[goal][None], row, column)[0] == 0
    far = env.size**2

    def ways(blocked: Array) -> Array:
        def closer(_: int, way: Array) -> Array:
            edge = jnp.pad(way, 1, constant_values=far)
            around = jnp.stack([edge[:-2, 1:-1], edge[2:, 1:-1], edge[1:-1, :-2], edge[1:-1, 2:]])
            return jnp.where(
                blocked & ~goal_here, far, jnp.minimum(way, jnp.min(around, axis=0) + 1)
            )

        return jax.lax.fori_loop(0, 3 * env.size, closer, jnp.where(goal_here, 0, far))

    mask, places, actions = env.action_mask(state, params), state.position, []
    for i in range(env.num_agents):
        others = jnp.delete(places, i, axis=0, assume_unique_indices=True)
        way = ways(food_here | jnp.any(offsets(others, row, column) == 0, axis=0))
        target = state.position[i][None] + MOVES[:LOAD]
        target = jnp.where(mask[i, :LOAD, None], target, state.position[i][None])
        length = way[target[:, 0], target[:, 1]]
        action = jnp.where(
            apart[i, goal] == 1, LOAD, jnp.argmin(jnp.where(mask[i, :LOAD], length, far + 1))
        )
        actions.append(action.astype(jnp.int32))
        places = places.at[i].add(jnp.asarray(MOVES)[action])
    return jnp.stack(actions)


VARIANTS = {
    "Foraging-8x8-2p-2f": Foraging,
    "Foraging-8x8-2p-2f-coop": lambda: Foraging(together=True),
    "Foraging-8x8-2p-2f-2s": lambda: Foraging(sight=2),
    "Foraging-10x10-3p-3f": lambda: Foraging(size=10, num_agents=3, num_food=3),
    "Foraging-15x15-4p-5f": lambda: Foraging(size=15, num_agents=4, num_food=5),
}
