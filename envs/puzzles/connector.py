"""Connector: several agents on one board each lay a path from their start to their target; paths never cross.

As in C. Bonnet et al., "Jumanji", 2023. Actions of every agent are rest, up, right, down, left. Free is what no path
covers and what is no other's target; who has arrived rests. All move at once: a cell that several want goes to the
first of them, by number, and the others stay.

| an episode ends, for all at once | outcome of an agent of N |
| --- | --- |
| when all have arrived, or nobody can move | 1 / N if it has arrived, else 0 |
| after `max_steps`, cut | the same |
| by actions that the mask forbids | `-illegal_cost` for who took one, the same for the others |

`rewards="dense"` pays when an agent arrives, `"sparse"` the outcome at the end.
Boards, drawn or given, are in `connector_boards.py`.
"""

import dataclasses
from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey

from .connector_boards import RandomWalks, Wires, claimed, next_cells
from .given import Generator, check_generator
from .rewards import REWARDS, earned, unless

__all__ = ["VARIANTS", "Connector"]


@flax.struct.dataclass
class Params:
    """The limit of steps, and what an action that the mask forbids costs who takes it."""

    max_steps: Any = 50
    illegal_cost: Any = 1.0


@flax.struct.dataclass
class State:
    """`owner` int8 `[n, n]`, 0 where no path is and i + 1 on that of agent i; `heads` and `targets` int32 `[N]`, cells.

    `illegal` bool `[N]` says who has ended the episode by an action that the mask forbids; `time` is steps, int32.
    """

    owner: Array
    heads: Array
    targets: Array
    illegal: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class Connector:
    """Observation of each agent: int8 `[n, n, 6]`, its path, head and target, and those of others, 0 or 1.

    Attributes:
        generator: `RandomWalks`, what `given_wires` makes, or any that draws `Wires`; n and N are its.
        rewards: "dense" or "sparse".
    """

    generator: Generator = RandomWalks()
    rewards: str = field("dense", OneOf(REWARDS))
    absorbing = True  # `unless`

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no generator of `Wires`."""
        check_fields(self)
        check_generator("Connector", self.generator, Wires, "RandomWalks, given_wires(...)")

    @property
    def size(self) -> int:
        """N."""
        return check_generator(
            "Connector", self.generator, Wires, "RandomWalks, given_wires(...)"
        ).free.shape[0]

    @property
    def num_agents(self) -> int:
        """N."""
        return check_generator(
            "Connector", self.generator, Wires, "RandomWalks, given_wires(...)"
        ).starts.shape[0]

    @property
    def name(self) -> str:
        """With its size and agents."""
        return f"Connector-{self.size}x{self.size}-{self.num_agents}p"

    @property
    def default_params(self) -> Params:
        """Fifty steps; an illegal action costs 1."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Of all agents, `[N, n, n, 6]`."""
        return Box(0, 1, (self.num_agents, self.size, self.size, 6), jnp.int8)

    def action_space(self, params: Params) -> Discrete:
        """Of all agents, `[N]`: rest, up, right, down, left."""
        return Discrete(5, (self.num_agents,), names=("rest", "up", "right", "down", "left"))

    def sample_level(self, key: PRNGKey, params: Params) -> Wires:
        """The generator's; consumes `key`."""
        return self.generator(key)

    def init_level(self, key: PRNGKey, level: Wires, params: Params) -> State:
        """Paths of one cell; deterministic."""
        starts, targets = (
            jnp.asarray(level.starts, jnp.int32),
            jnp.asarray(level.targets, jnp.int32),
        )
        owner = self._drawn(jnp.zeros((self.size, self.size), jnp.int8), starts)
        return State(
            owner, starts, targets, jnp.zeros(self.num_agents, bool), jnp.zeros((), jnp.int32)
        )

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def _drawn(self, owner: Array, cells: Array) -> Array:
        """The board with one cell a path marked."""
        here = self._places(cells)
        number = np.arange(1, self.num_agents + 1, dtype=np.int8).reshape(-1, 1, 1)
        return jnp.where(jnp.any(here, axis=0), jnp.max(jnp.where(here, number, 0), axis=0), owner)

    def _places(self, cells: Array) -> Array:
        """Where cells `[N]` are, bool `[N, n, n]`."""
        return np.arange(self.size**2).reshape(1, self.size, self.size) == cells.reshape(-1, 1, 1)

    def action_mask(self, state: State, params: Params) -> Array:
        """Resting, and steps onto what is free, bool `[N, 5]`."""
        around = jnp.asarray(next_cells(self.size))[state.heads]
        free = jnp.append((state.owner == 0).reshape(-1), False)[around]
        others = (around[:, :, None] == state.targets.reshape(1, 1, -1)) & ~np.eye(
            self.num_agents, dtype=bool
        )[:, None]
        walks = (state.heads != state.targets)[:, None] & ~jnp.any(others, axis=-1)
        return (free & walks).at[:, 0].set(True)

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """All step at once; deterministic."""
        take = jnp.asarray(action)[:, None]
        legal = jnp.take_along_axis(self.action_mask(state, params), take, axis=1)[:, 0]
        wanted = jnp.take_along_axis(jnp.asarray(next_cells(self.size))[state.heads], take, axis=1)[
            :, 0
        ]
        over = self.terminal(state, params)[0]
        heads = jnp.where(claimed(wanted, legal & (action > 0)), wanted, state.heads)
        moved = state.replace(
            owner=self._drawn(state.owner, heads), heads=heads, time=state.time + 1
        )
        return unless(over | ~jnp.all(legal), moved, state).replace(
            illegal=state.illegal | (~legal & ~over)
        )

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """All of the board, as each agent sees it."""
        number = np.arange(1, self.num_agents + 1, dtype=np.int8).reshape(-1, 1, 1)
        own = jnp.stack(
            [state.owner[None] == number, self._places(state.heads), self._places(state.targets)],
            axis=-1,
        )
        return jnp.concatenate([own, jnp.any(own, axis=0, keepdims=True) & ~own], axis=-1).astype(
            jnp.int8
        )

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """See the module's table, float32 `[N]`."""
        ends = self.terminal(next_state, params) | self.truncated(next_state, params)
        before, after = self.outcome(state, params), self.outcome(next_state, params)
        return earned(self.rewards, before, after, self.terminal(state, params), ends)

    def terminal(self, state: State, params: Params) -> Array:
        """Nobody can move, as when all have arrived, or someone has taken an illegal action; the same for all."""
        stuck = ~jnp.any(self.action_mask(state, params)[:, 1:])
        return jnp.full(self.num_agents, stuck | jnp.any(state.illegal))

    def truncated(self, state: State, params: Params) -> Array:
        """After `params.max_steps`."""
        return jnp.full(self.num_agents, state.time >= params.max_steps)

    def outcome(self, state: State, params: Params) -> Array:
        """See the module's table, float32 `[N]`; before the end what dense rewards have paid so far."""
        arrived = (state.heads == state.targets) / self.num_agents
        return jnp.where(state.illegal, -params.illegal_cost, arrived).astype(jnp.float32)

    def heuristic(self, state: State, params: Params) -> Array:
        """What the team can still earn: the share of agents that have not arrived and are not shut in, float32 `[]`."""
        can = jnp.any(self.action_mask(state, params)[:, 1:], axis=1)
        paid = 0.0 if self.rewards == "dense" else jnp.sum(self.outcome(state, params))
        return jnp.where(self.terminal(state, params)[0], 0.0, jnp.mean(can) + paid).astype(
            jnp.float32
        )

    def render(self, state: State, params: Params) -> Array:
        """Paths in the colours of their agents, heads as discs, targets as rings; uint8 `[16 n, 16 n, 3]`."""
        number = np.arange(self.num_agents).reshape(-1, 1, 1) % len(COLORS)
        head, target = self._places(state.heads), self._places(state.targets)
        kind = jnp.where(head, 3 + 3 * number, jnp.where(target, 2 + 3 * number, 0))
        path = jnp.where(
            state.owner > 0, 1 + 3 * ((state.owner.astype(jnp.int32) - 1) % len(COLORS)), 0
        )
        marks = jnp.max(kind, axis=0)
        return picture.tiles(jnp.where(marks > 0, marks, path), SPRITES)


COLORS = (
    picture.RED,
    picture.BLUE,
    picture.GREEN,
    picture.ORANGE,
    picture.PURPLE,
    picture.BROWN,
    (40, 170, 170),
)


def _sprites() -> np.ndarray:
    y, x = np.mgrid[:16, :16] - 7.5
    pages = np.full((1 + 3 * len(COLORS), 16, 16, 3), 245, np.uint8)
    for i, color in enumerate(COLORS):
        pages[1 + 3 * i, np.maximum(abs(x), abs(y)) < 4] = color
        pages[2 + 3 * i, (x**2 + y**2 < 40) & (x**2 + y**2 > 16)] = color
        pages[3 + 3 * i, x**2 + y**2 < 46] = color
    pages[:, 0], pages[:, :, 0] = 215, 215
    return pages


SPRITES = _sprites()

VARIANTS = {
    "Connector-8x8-4p": Connector,
    "Connector-6x6-2p": lambda: Connector(RandomWalks(6, 2, 10)),
    "Connector-10x10-8p": lambda: Connector(RandomWalks(10, 8, 14)),
}
