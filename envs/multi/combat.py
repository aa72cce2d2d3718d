"""A small grid combat of two teams with three kinds of units.

In the manner of the StarCraft Multi-Agent Challenge (Samvelyan et al., 2019) and of its JAX relative SMAX (Rutherford
et al., "JaxMARL", 2023), with rules of its own on a grid of integers, so that everything is exact:

- A unit rests, moves to one of four neighbouring cells, or acts on one target: melee and ranged units hit an opponent,
  healers mend a hurt fellow. An act needs its target within reach (king's moves) and is followed by a pause in which
  the unit may move but not act.
- All happens at once, judged by the state before: hits and healing add up, then health is cut to 0 and the full; a
  cell that was free may be entered, unless two units choose it, who then both stay. The dead leave their cell.
- A team wins when the other is dead and it is not. Rewards are the change of (own health - opponents' health), as
  fractions of the full, plus 1 for a win and -1 for a loss: zero-sum between the teams, at most 2 an episode, and not
  to be farmed by healing. The dead have ended and earn nothing.

Nothing is random but the start: each team in the two columns of its side.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import distinct, picture
from jaxpar.env.spaces import Box, Discrete
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

__all__ = ["KINDS", "VARIANTS", "Combat", "scripted"]

KINDS = ("melee", "ranged", "healer")
MOVES = np.array(
    [[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], np.int32
)  # rest, up, down, left, right; then the targets
FAR = 1 << 20


@flax.struct.dataclass
class State:
    """Units of the first team, then those of the second, U in all.

    Attributes:
        position: int32 `[U, 2]`, row and column; the dead keep theirs but are nowhere.
        health: int32 `[U]`, 0 for the dead.
        pause: int32 `[U]`, steps until a unit may act again.
        time: int32, steps since `init`.
    """

    position: Array
    health: Array
    pause: Array
    time: Array


@flax.struct.dataclass
class Params:
    """Numbers of the three kinds in the order of `KINDS`.

    Attributes:
        health: when full.
        power: health that an act takes or gives.
        reach: how far an act reaches.
        pause: steps after an act without another.
        sight: how far a unit sees; less than `reach` lets it act on what it does not see.
        max_steps: of an episode.
    """

    health: tuple = (12, 8, 8)
    power: tuple = (3, 2, 2)
    reach: tuple = (1, 4, 3)
    pause: tuple = (1, 2, 1)
    sight: tuple = (4, 6, 5)
    max_steps: int = 60


@dataclasses.dataclass(frozen=True)
class Combat:
    """Two teams on a square grid; the agents are the first team, or both.

    A unit sees, as float32 `[7 + 8 (2 K - 1)]` with K the size of the larger team: its row, column, health and pause as
    fractions and its kind (one of three); then its fellows in order, then its opponents in order, each as 1, row and
    column from itself, health, pause, kind, or zeros where it is dead or out of sight. The dead see zeros. Actions are
    `5 + K`: rest, four moves, and the K first opponents, or fellows for a healer; what the mask forbids is a rest.

    Attributes:
        first: kinds of the first team.
        second: kinds of the second team.
        size: cells of a side.
        both: whether the second team is controlled too, or plays `scripted`.
    """

    first: tuple[str, ...] = ("melee", "ranged", "healer")
    second: tuple[str, ...] = ("melee", "ranged", "healer")
    size: int = field(8, AtLeast(4))
    both: bool = False
    absorbing = True  # rewards are 0 once a team is dead

    def __post_init__(self) -> None:
        """Refuses what cannot be built."""
        check_fields(self)
        for kind in self.first + self.second:
            if kind not in KINDS:
                raise UsageError(f"Combat has units of the kinds {', '.join(KINDS)}, not {kind!r}.")
        if not self.first or not self.second:
            raise UsageError("Combat needs at least one unit in each team.")
        if max(len(self.first), len(self.second)) > 2 * self.size:
            raise UsageError(
                f"Combat needs room in two columns a team, which a size of {self.size} has not."
            )

    @property
    def num_agents(self) -> int:
        """Units that are controlled."""
        return len(self.first) + (len(self.second) if self.both else 0)

    @property
    def width(self) -> int:
        """K, the size of the larger team."""
        return max(len(self.first), len(self.second))

    @property
    def name(self) -> str:
        """`Combat-3v3`, with `-both` where both teams are controlled."""
        return f"Combat-{len(self.first)}v{len(self.second)}{'-both' if self.both else ''}"

    @property
    def default_params(self) -> Params:
        """A balanced set."""
        return Params()

    @property
    def kind(self) -> np.ndarray:
        """The kind of every unit as an index into `KINDS`, int32 `[U]`."""
        return np.array([KINDS.index(kind) for kind in self.first + self.second], np.int32)

    @property
    def team(self) -> np.ndarray:
        """0 or 1, int32 `[U]`."""
        return np.array([0] * len(self.first) + [1] * len(self.second), np.int32)

    def members(self, unit: int, own: bool) -> list[int]:
        """The units of one's own or of the other team."""
        return [i for i, team in enumerate(self.team) if (team == self.team[unit]) == own]

    @property
    def targets(self) -> np.ndarray:
        """The unit that each of K choices means, int32 `[U, K]`, -1 where there is none."""
        rows = [
            self.members(unit, own=kind == KINDS.index("healer"))
            for unit, kind in enumerate(self.kind)
        ]
        return np.array([row + [-1] * (self.width - len(row)) for row in rows], np.int32)

    @property
    def seen(self) -> np.ndarray:
        """The unit that each of 2 K - 1 places of an observation shows, int32 `[U, 2 K - 1]`, -1 where none."""
        rows = []
        for unit in range(len(self.team)):
            fellows = [i for i in self.members(unit, own=True) if i != unit]
            opponents = self.members(unit, own=False)
            fellows += [-1] * (self.width - 1 - len(fellows))
            rows.append(fellows + opponents + [-1] * (self.width - len(opponents)))
        return np.array(rows, np.int32)

    def by_unit(self, values: tuple) -> Array:
        """One number a kind as int32 `[U]`."""
        return jnp.stack([jnp.asarray(values[kind], jnp.int32) for kind in self.kind])

    def observation_space(self, params: Params) -> Box:
        """Of all agents, `[N, ...]`."""
        return Box(
            -float(self.size), float(self.size), (self.num_agents, 7 + 8 * (2 * self.width - 1))
        )

    def action_space(self, params: Params) -> Discrete:
        """Of all agents, `[N]`."""
        names = ("rest", "up", "down", "left", "right", *(f"target {i}" for i in range(self.width)))
        return Discrete(len(names), (self.num_agents,), names=names)

    def init(self, key: PRNGKey, params: Params) -> State:
        """Both teams whole, each unit anywhere in the two columns of its side; consumes `key`."""
        places = []
        for side, place_key in enumerate(jax.random.split(key)):
            count = int(np.sum(self.team == side))
            cells = distinct(place_key, 2 * self.size, count)
            places.append(jnp.stack([cells // 2, cells % 2 + side * (self.size - 2)], axis=1))
        health = self.by_unit(params.health)
        return State(
            jnp.concatenate(places), health, jnp.zeros_like(health), jnp.zeros((), jnp.int32)
        )

    def unit_mask(self, state: State, params: Params) -> Array:
        """The legal actions of all units, bool `[U, 5 + K]`; the dead rest."""
        alive, targets = state.health > 0, self.targets
        cells = state.position[:, None] + MOVES[None]
        inside = jnp.all((cells >= 0) & (cells < self.size), axis=-1)
        taken = jnp.any(
            jnp.all(cells[:, :, None] == state.position[None, None], axis=-1) & alive[None, None],
            axis=-1,
        )
        moves = (inside & ~taken & alive[:, None]).at[:, 0].set(True)
        distance = jnp.max(jnp.abs(state.position[:, None] - state.position[targets]), axis=-1)
        ready = alive & (state.pause == 0)
        hurt = state.health < self.by_unit(params.health)
        healer = (self.kind == KINDS.index("healer"))[:, None]
        wanted = ~healer | (hurt[targets] & (targets != rank(targets)))
        able = (targets >= 0) & alive[targets] & (distance <= self.by_unit(params.reach)[:, None])
        return jnp.concatenate([moves, able & wanted & ready[:, None]], axis=1)

    def action_mask(self, state: State, params: Params) -> Array:
        """The legal actions of the agents, bool `[N, 5 + K]`."""
        return self.unit_mask(state, params)[: self.num_agents]

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Deterministic; `key` is not used."""
        if not self.both:
            action = jnp.concatenate([action, scripted(self, state, params)[self.num_agents :]])
        allowed = jnp.take_along_axis(self.unit_mask(state, params), action[:, None], axis=1)[:, 0]
        action = jnp.where(allowed, action, 0)
        acts, units = action >= len(MOVES), len(self.team)
        choice = jnp.maximum(action - len(MOVES), 0)
        target = jnp.take_along_axis(jnp.asarray(self.targets), choice[:, None], axis=1)
        strength = self.by_unit(params.power) * np.where(
            self.kind == KINDS.index("healer"), 1, -1
        ).astype(np.int32)
        change = jnp.where(acts[:, None] & (target == np.arange(units)[None]), strength[:, None], 0)
        health = jnp.clip(state.health + jnp.sum(change, axis=0), 0, self.by_unit(params.health))
        cell = state.position + jnp.asarray(MOVES)[jnp.where(acts, 0, action)]
        moves = jnp.any(cell != state.position, axis=1)
        same = (
            jnp.all(cell[:, None] == cell[None], axis=-1) & ~np.eye(units, dtype=bool) & moves[None]
        )
        position = jnp.where(jnp.any(same, axis=1, keepdims=True), state.position, cell)
        pause = jnp.where(acts, self.by_unit(params.pause), jnp.maximum(state.pause - 1, 0))
        return State(position, health, pause, state.time + 1)

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """Deterministic; `key` is not used."""
        alive, seen, count = state.health > 0, self.seen, self.num_agents
        health = state.health / self.by_unit(params.health)
        pause = state.pause / jnp.maximum(self.by_unit(params.pause), 1)
        kind = np.eye(len(KINDS), dtype=np.float32)[self.kind]
        own = jnp.concatenate(
            [state.position / (self.size - 1), jnp.stack([health, pause], axis=1), kind], axis=1
        )
        offset = state.position[seen] - state.position[:, None]
        sight = self.by_unit(params.sight)[:, None]
        visible = (seen >= 0) & alive[seen] & (jnp.max(jnp.abs(offset), axis=-1) <= sight)
        numbers = jnp.stack([jnp.ones_like(health)[seen], health[seen], pause[seen]], axis=-1)
        others = jnp.concatenate(
            [numbers[..., :1], offset / sight[..., None], numbers[..., 1:], kind[seen]], axis=-1
        )
        others = jnp.where(visible[..., None], others, 0.0).reshape(len(self.team), -1)
        return jnp.where(alive[:, None], jnp.concatenate([own, others], axis=1), 0.0)[:count]

    def outcome(self, state: State) -> tuple[Array, Array]:
        """Whether it is over, and 1, 0 or -1 for the first team's win, anything else, or loss."""
        living = [jnp.any((state.health > 0) & (self.team == side)) for side in (0, 1)]
        return ~(living[0] & living[1]), living[0].astype(jnp.int32) - living[1].astype(jnp.int32)

    def team_reward(self, state: State, next_state: State, params: Params) -> Array:
        """What the first team earns in a step, float32; the second earns its negative."""
        full = self.by_unit(params.health)
        lead = jnp.zeros(())
        for side, sign in ((0, 1), (1, -1)):
            mine = self.team == side
            gain = jnp.sum(jnp.where(mine, next_state.health - state.health, 0))
            lead = lead + sign * gain / jnp.sum(jnp.where(mine, full, 0))
        (before, _), (after, result) = self.outcome(state), self.outcome(next_state)
        return jnp.where(before, 0.0, lead + jnp.where(after, result, 0))

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """The team's, for those who lived before the step."""
        sign = np.where(self.team == 0, 1.0, -1.0).astype(np.float32)
        return jnp.where(state.health > 0, sign * self.team_reward(state, next_state, params), 0.0)[
            : self.num_agents
        ]

    def terminal(self, state: State, params: Params) -> Array:
        """The dead have ended, and all have when one team is dead."""
        return ((state.health <= 0) | self.outcome(state)[0])[: self.num_agents]

    def truncated(self, state: State, params: Params) -> Array:
        """After `params.max_steps`."""
        return jnp.full(self.num_agents, state.time >= params.max_steps)

    def render(self, state: State, params: Params) -> Array:
        """The first team blue, the second red; squares, triangles, crosses; health below; `[16 size, 16 size, 3]`."""
        eighths = -(-8 * state.health // self.by_unit(params.health))
        index = jnp.where(state.health > 0, 1 + (3 * self.team + self.kind) * 9 + eighths, 0)
        grid = jnp.zeros((self.size, self.size), jnp.int32)
        return picture.tiles(
            grid.at[state.position[:, 0], state.position[:, 1]].max(index), sprites()
        )


def rank(table: np.ndarray) -> np.ndarray:
    """The number of its row at every place of a table."""
    return np.broadcast_to(np.arange(len(table))[:, None], table.shape)


def sprites() -> np.ndarray:
    """Uint8 `[55, 16, 16, 3]`: an empty cell, then for two teams, three kinds, and health of 0 to 8 eighths."""
    table = np.full((55, 16, 16, 3), 245, np.uint8)
    y, x = np.mgrid[:16, :16] - np.array([6.5, 7.5]).reshape(2, 1, 1)
    shapes = (
        np.maximum(abs(x), abs(y)) < 5,
        (y < 5) & (abs(x) * 1.6 < y + 6),
        (np.minimum(abs(x), abs(y)) < 2) & (np.maximum(abs(x), abs(y)) < 5),
    )
    for team, color in enumerate((picture.BLUE, picture.RED)):
        for kind, shape in enumerate(shapes):
            for eighths in range(9):
                tile = table[1 + (3 * team + kind) * 9 + eighths]
                tile[shape] = color
                tile[13:15, 1:] = 200
                tile[13:15, 1 : 1 + round(eighths * 15 / 8)] = picture.GREEN
    table[:, 0], table[:, :, 0] = 215, 215
    return table


def scripted(env: Combat, state: State, params: Params) -> Array:
    """Actions int32 `[U]` of both teams, which know the whole state.

    A unit acts on the weakest target that it may act on. Else it goes where the distance to its goal is nearest to its
    reach, so that ranged units keep away: the goal is the nearest opponent, or for a healer the weakest hurt fellow and
    else the nearest. Of two fellows who choose one cell the later rests. Ties: the first.

    Mean return of the first team and share of its wins where both play so: Combat-3v3 0.0 and 0.34 (as much for the
    second, the rest are draws at the limit, mostly of healers), Combat-5v5 0.0 and 0.44, Combat-5v6 -1.4 and 0.02.
    Uniform legal play of the first team: -1.9 and 0 in each. The script against it: 1.9 and 1.
    """
    mask, targets, alive = env.unit_mask(state, params), env.targets, state.health > 0
    able = mask[:, len(MOVES) :]
    weakest = jnp.argmin(jnp.where(able, state.health[targets], FAR), axis=1)
    apart = jnp.sum(jnp.abs(state.position[:, None] - state.position[targets]), axis=-1)
    healer = (env.kind == KINDS.index("healer"))[:, None]
    hurt = healer & (state.health < env.by_unit(params.health))[targets]
    goal = jnp.where(hurt, state.health[targets] - FAR, apart)
    possible = (targets >= 0) & alive[targets] & (targets != rank(targets))
    goal = jnp.argmin(jnp.where(possible, goal, FAR), axis=1)
    goal = jnp.take_along_axis(jnp.asarray(targets), goal[:, None], axis=1)[:, 0]
    cells = state.position[:, None] + MOVES[None]
    offset = jnp.abs(cells - state.position[goal][:, None])
    wrong = jnp.abs(jnp.max(offset, axis=-1) - env.by_unit(params.reach)[:, None])
    cost = jnp.where(mask[:, : len(MOVES)], wrong * 4 * env.size + jnp.sum(offset, axis=-1), FAR)
    move = jnp.where(jnp.any(possible, axis=1), jnp.argmin(cost, axis=1), 0)
    cell = state.position + jnp.asarray(MOVES)[move]
    fellow = (env.team[:, None] == env.team[None]) & np.tri(len(env.team), k=-1, dtype=bool)
    busy = jnp.any(able, axis=1)
    clash = jnp.all(cell[:, None] == cell[None], axis=-1) & fellow & ((move > 0) & ~busy)[None]
    move = jnp.where(jnp.any(clash, axis=1), 0, move)
    return jnp.where(busy, len(MOVES) + weakest, move).astype(jnp.int32)


VARIANTS = {
    "Combat-3v3": Combat,
    "Combat-5v5": lambda: Combat(*[("melee", "melee", "ranged", "ranged", "healer")] * 2),
    "Combat-5v6": lambda: Combat(
        ("melee", "melee", "ranged", "ranged", "healer"),
        ("melee", "melee", "melee", "ranged", "ranged", "ranged"),
    ),
    "Combat-3v3-both": lambda: Combat(both=True),
}
