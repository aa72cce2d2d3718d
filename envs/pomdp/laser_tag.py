"""LaserTag: Tag on a floor with obstacles, where eight noisy laser beams are all that one sees.

Robot and opponent start anywhere on a 7 x 11 floor with 8 obstacles, drawn by `layout`, and the robot does not know
where. Actions: north, east, south, west, tag; rewards and the opponent's flight are those of `envs.tag`. Eight beams,
along the compass, reach to the wall, the obstacle or the opponent that is next: d cells away, a range of d, or of
d sqrt(2) along a diagonal. A reading falls short of it by the absolute value of normal noise of standard deviation 2.5,
and is cut to whole cells, 0 at least. On the opponent's cell all beams say so instead.

Source: Somani et al. (2013), "DESPOT: online POMDP planning with regularization", with the noise of their code and of
LaserTag.jl (the paper says "rounded normal"). In the code of DESPOT the robot knows where it starts: `start` is then
the number of its cell.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Discrete, MultiDiscrete, picture
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

__all__ = ["VARIANTS", "LaserTag", "LaserTagParams", "LaserTagState"]

BEAMS = ((0, 1), (1, 0), (0, -1), (-1, 0), (1, 1), (1, -1), (-1, -1), (-1, 1))
"""Steps (x, y) along each beam; the first four are also the moves."""
TAG = 4


@flax.struct.dataclass
class LaserTagState:
    """Cells of the robot and of the opponent, int32, counted over the free ones, and whether it was tagged."""

    robot: Array
    opponent: Array
    tagged: Array


@flax.struct.dataclass
class LaserTagParams:
    """Rewards, the chance that the opponent stays, the beams' noise (cells), the discount."""

    move_reward: Any = -1.0
    tag_reward: Any = 10.0
    miss_reward: Any = -10.0
    stay: Any = 0.2
    noise: Any = 2.5
    discount: Any = 0.95


@dataclasses.dataclass(frozen=True)
class LaserTag:
    """See the module.

    Attributes:
        width: of the floor, west to east.
        height: of the floor.
        num_obstacles: cells that are taken.
        layout: seed of the obstacles.
        start: the robot's first cell; None is any, unknown to it.
    """

    width: int = field(11, AtLeast(2))
    height: int = field(7, AtLeast(2))
    num_obstacles: int = field(8, AtLeast(0))
    layout: int = field(0, AtLeast(0))
    start: int | None = field(None, AtLeast(0))

    absorbing = True

    def __post_init__(self) -> None:
        check_fields(self)
        cells = self.width * self.height
        if self.num_obstacles > cells - 2:
            raise UsageError(
                f"{self.num_obstacles} obstacles leave no room on {self.width} x {self.height} cells"
            )
        if np.prod(np.asarray(self._readings(), np.int64)) >= 2**31:
            raise UsageError(
                f"a floor of {self.width} x {self.height} has too many observations to be numbered"
            )
        if self.start is not None and not self.start < cells - self.num_obstacles:
            raise UsageError(
                f"start is a cell from 0 to {cells - self.num_obstacles - 1}, not {self.start}"
            )

    @property
    def name(self) -> str:
        """LaserTag."""
        return "LaserTag"

    @property
    def default_params(self) -> LaserTagParams:
        """The published ones."""
        return LaserTagParams()

    @property
    def cells(self) -> np.ndarray:
        """The free cells' places (x, y), int `[C, 2]`, row by row from the south-west."""
        return _floor(self)[0]

    def _readings(self) -> tuple[int, ...]:
        """Values that each beam can show: 0 on the opponent's cell, else 1 + whole cells."""
        diagonal = int(np.ceil(2**0.5 * min(self.width, self.height)))
        return tuple(1 + n for n in (self.height, self.width) * 2 + (diagonal,) * 4)

    def observation_space(self, params: LaserTagParams) -> MultiDiscrete:
        """Eight readings."""
        return MultiDiscrete(self._readings())

    def action_space(self, params: LaserTagParams) -> Discrete:
        """North, east, south, west, tag."""
        return Discrete(5, names=("north", "east", "south", "west", "tag"))

    def init(self, key: PRNGKey, params: LaserTagParams) -> LaserTagState:
        """Both anywhere; the robot at `start` if there is one."""
        robot, opponent = jax.random.randint(key, (2,), 0, len(self.cells))
        robot = robot if self.start is None else jnp.asarray(self.start, jnp.int32)
        return LaserTagState(robot, opponent, jnp.zeros((), bool))

    def flight(self, robot: Array, opponent: Array, params: LaserTagParams) -> Array:
        """Probabilities that the opponent tries north, east, south, west or to stay, float32 `[5]`."""
        cells = jnp.asarray(self.cells, jnp.int32)
        away = cells[opponent] - cells[robot]
        right, up = (jnp.where(d > 0, 1.0, jnp.where(d < 0, 0.0, 0.5)) for d in away)
        half = (1 - params.stay) / 2
        return jnp.stack(
            [half * up, half * right, half * (1 - up), half * (1 - right), jnp.asarray(params.stay)]
        )

    def transition(
        self, key: PRNGKey, state: LaserTagState, action: Array, params: LaserTagParams
    ) -> LaserTagState:
        """Both move at once; a tag that hits ends it."""
        hit = state.tagged | ((action == TAG) & (state.robot == state.opponent))
        moves = jnp.asarray(_floor(self)[1], jnp.int32)
        chances = jnp.cumsum(self.flight(state.robot, state.opponent, params))
        way = jnp.sum(jax.random.uniform(key) * chances[-1] >= chances)
        robot, opponent = moves[state.robot, action], moves[state.opponent, way]
        return LaserTagState(
            jnp.where(hit, state.robot, robot), jnp.where(hit, state.opponent, opponent), hit
        )

    def _ranges(self, state: LaserTagState) -> Array:
        return jnp.asarray(_floor(self)[2])[state.robot, state.opponent]

    def observe(
        self, key: PRNGKey, state: LaserTagState, action: Array | None, params: LaserTagParams
    ) -> Array:
        """Eight readings, int32 `[8]`; after a reset, too."""
        ranges = self._ranges(state)
        short = jnp.abs(params.noise * jax.random.normal(key, (8,)))
        reading = jnp.clip(jnp.floor(ranges - short), 0, jnp.ceil(ranges) - 1)
        return jnp.where(state.robot == state.opponent, 0, 1 + reading.astype(jnp.int32))

    def log_likelihood(
        self,
        obs: Array,
        state: LaserTagState,
        action: Array,
        next_state: LaserTagState,
        params: LaserTagParams,
    ) -> Array:
        """Of eight independent readings."""
        ranges, reading = self._ranges(next_state), obs.astype(jnp.float32) - 1
        low = jnp.where(
            reading > 0, jax.scipy.stats.norm.cdf((reading - ranges) / params.noise), 0.0
        )
        high = jax.scipy.stats.norm.cdf((jnp.minimum(reading + 1, ranges) - ranges) / params.noise)
        chance = jnp.where((reading >= 0) & (reading < ranges), 2 * (high - low), 0.0)
        same = jnp.where(jnp.all(obs == 0), 0.0, -jnp.inf)
        return jnp.where(next_state.robot == next_state.opponent, same, jnp.sum(jnp.log(chance)))

    def obs_key(self, obs: Array, params: LaserTagParams) -> Array:
        """The readings as digits of one number."""
        number = jnp.zeros((), jnp.int32)
        for beam, count in enumerate(self._readings()):
            number = number * count + obs[beam]
        return number

    def reward(
        self, state: LaserTagState, action: Array, next_state: LaserTagState, params: LaserTagParams
    ) -> Array:
        """See the module."""
        tag = jnp.where(state.robot == state.opponent, params.tag_reward, params.miss_reward)
        earned = jnp.where(action == TAG, tag, params.move_reward)
        return jnp.where(state.tagged, 0.0, earned).astype(jnp.float32)

    def terminal(self, state: LaserTagState, params: LaserTagParams) -> Array:
        """Tagged."""
        return state.tagged

    def heuristic(self, state: LaserTagState, params: LaserTagParams) -> Array:
        """What a robot earns that walks around the obstacles to the opponent while it stays, and tags."""
        steps = jnp.asarray(_floor(self)[3])[state.robot, state.opponent].astype(jnp.float32)
        discount = jnp.asarray(params.discount, jnp.float32)
        walked = jnp.where(
            discount < 1, (1 - discount**steps) / jnp.maximum(1 - discount, 1e-6), steps
        )
        value = params.move_reward * walked + params.tag_reward * discount**steps
        return jnp.where(state.tagged, 0.0, value).astype(jnp.float32)

    def render(self, state: LaserTagState, params: LaserTagParams) -> Array:
        """The floor with north up, the opponent red and the robot blue, uint8 `[16 height, 16 width, 3]`."""
        image = picture.canvas(16 * self.height, 16 * self.width, picture.GRAY)
        corners = np.stack(
            [self.cells[:, 0] * 16, (self.height - 1 - self.cells[:, 1]) * 16], axis=1
        )
        for x, y in corners.tolist():
            image = picture.rectangle(
                image, (x + 1.0, y + 1.0), (x + 15.0, y + 15.0), picture.WHITE
            )
        for cell, radius, color in (
            (state.opponent, 6.0, picture.RED),
            (state.robot, 4.0, picture.BLUE),
        ):
            image = picture.disc(image, jnp.asarray(corners, jnp.float32)[cell] + 8, radius, color)
        return picture.to_uint8(image)


@functools.cache
def _floor(env: LaserTag) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Places of the C free cells, moves `[C, 5]` among them, beams' ranges `[C, C, 8]`, steps between them `[C, C]`."""
    taken = np.random.default_rng(env.layout).permutation(env.width * env.height)[
        : env.num_obstacles
    ]
    free = np.setdiff1d(np.arange(env.width * env.height), taken)
    cells = np.stack([free % env.width, free // env.width], axis=1)
    index = {tuple(cell): i for i, cell in enumerate(cells.tolist())}
    moves = np.asarray(
        [
            [index.get((x + dx, y + dy), i) for dx, dy in (*BEAMS[:4], (0, 0))]
            for (x, y), i in index.items()
        ]
    )
    ranges = np.empty((len(cells), len(cells), 8), np.float32)
    for (x, y), i in index.items():
        for beam, (dx, dy) in enumerate(BEAMS):
            cell, count = (x + dx, y + dy), 1
            passed = []
            while cell in index:
                passed.append(index[cell])
                cell, count = (cell[0] + dx, cell[1] + dy), count + 1
            ranges[i, :, beam] = count
            ranges[i, passed, beam] = 1 + np.arange(len(passed))
    ranges[:, :, 4:] *= np.float32(2**0.5)
    steps = np.where(np.eye(len(cells), dtype=bool), 0, len(cells))
    for _ in range(len(cells)):
        steps = np.minimum(steps, 1 + steps[moves].min(axis=1))
    return cells, moves, ranges, steps.astype(np.int32)


VARIANTS = {"LaserTag": LaserTag}
"""Names and the environments behind them."""
