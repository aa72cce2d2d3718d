"""Tag: a robot chases an opponent that it only sees when it stands on it.

29 cells: a corridor of 10 x 2 with a room of 3 x 3 above its columns 5 to 7. Actions: north, east, south, west, tag. A
move costs 1 and stops at walls; a tag pays 10 and ends the episode if the opponent is here, else it costs 10. The
opponent stays with probability 0.2 and otherwise moves away: 0.4 along each axis, split evenly in two where robot and
opponent are level on it; a move into a wall stays. It moves while the robot does, away from where the robot was.
Both start anywhere. The observation is the robot's cell, or 29 when the opponent is in it.

Source: Pineau, Gordon and Thrun (2003), "Point-based value iteration". SARSOP's file TagAvoid.pomdp has the same moves
in 837 of 841 states (four rows look like slips), and there the opponent stands still while a tag misses; here, as in
DESPOT's code, it runs on. The best known policy earns -5.99 from the start.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Discrete, picture
from jaxpar.types import Array, PRNGKey

__all__ = ["VARIANTS", "Tag", "TagParams", "TagState"]

CELLS = np.asarray(
    [(x, y) for y in range(2) for x in range(10)]
    + [(x, y) for y in range(2, 5) for x in range(5, 8)]
)
INDEX = {tuple(cell): i for i, cell in enumerate(CELLS.tolist())}
DIRECTIONS = ((0, 1), (1, 0), (0, -1), (-1, 0))
MOVES = np.asarray(
    [
        [INDEX.get((x + dx, y + dy), i) for dx, dy in DIRECTIONS]
        for i, (x, y) in enumerate(CELLS.tolist())
    ]
)
TAG, SEEN = 4, len(CELLS)
SEARCH = 4
"""Steps that a robot needs beyond the distance, since it has to find the opponent: 3.1 to 4.4 under the best policy."""


@flax.struct.dataclass
class TagState:
    """Cells 0 .. 28 of the robot and of the opponent, int32, and whether it was tagged."""

    robot: Array
    opponent: Array
    tagged: Array


@flax.struct.dataclass
class TagParams:
    """Rewards, the chance that the opponent stays, and the discount."""

    move_reward: Any = -1.0
    tag_reward: Any = 10.0
    miss_reward: Any = -10.0
    stay: Any = 0.2
    discount: Any = 0.95


@dataclasses.dataclass(frozen=True)
class Tag:
    """See the module; 841 states while it lasts."""

    absorbing = True

    @property
    def name(self) -> str:
        """Tag."""
        return "Tag"

    @property
    def default_params(self) -> TagParams:
        """The published ones."""
        return TagParams()

    def observation_space(self, params: TagParams) -> Discrete:
        """The robot's cell, or 29."""
        return Discrete(SEEN + 1)

    def action_space(self, params: TagParams) -> Discrete:
        """North, east, south, west, tag."""
        return Discrete(5, names=("north", "east", "south", "west", "tag"))

    def init(self, key: PRNGKey, params: TagParams) -> TagState:
        """Both anywhere."""
        robot, opponent = jax.random.randint(key, (2,), 0, SEEN)
        return TagState(robot, opponent, jnp.zeros((), bool))

    def flight(self, robot: Array, opponent: Array, params: TagParams) -> Array:
        """Probabilities that the opponent tries north, east, south, west or to stay, float32 `[5]`."""
        cells = jnp.asarray(CELLS, jnp.int32)
        dx, dy = cells[opponent] - cells[robot]
        half = (1 - params.stay) / 2
        up, right = (jnp.where(d > 0, 1.0, jnp.where(d < 0, 0.0, 0.5)) for d in (dy, dx))
        return jnp.stack(
            [half * up, half * right, half * (1 - up), half * (1 - right), jnp.asarray(params.stay)]
        )

    def transition(
        self, key: PRNGKey, state: TagState, action: Array, params: TagParams
    ) -> TagState:
        """Both move at once; a tag that hits ends it."""
        hit = state.tagged | ((action == TAG) & (state.robot == state.opponent))
        moves = jnp.asarray(MOVES, jnp.int32)
        robot = jnp.where(action == TAG, state.robot, moves[state.robot, jnp.minimum(action, 3)])
        chances = jnp.cumsum(self.flight(state.robot, state.opponent, params))
        way = jnp.sum(jax.random.uniform(key) * chances[-1] >= chances)
        opponent = jnp.where(way >= 4, state.opponent, moves[state.opponent, jnp.minimum(way, 3)])
        return TagState(
            jnp.where(hit, state.robot, robot),
            jnp.where(hit, state.opponent, opponent),
            jnp.asarray(hit, bool),
        )

    def observe(
        self, key: PRNGKey, state: TagState, action: Array | None, params: TagParams
    ) -> Array:
        """Exact."""
        return jnp.where(state.robot == state.opponent, SEEN, state.robot).astype(jnp.int32)

    def log_likelihood(
        self, obs: Array, state: TagState, action: Array, next_state: TagState, params: TagParams
    ) -> Array:
        """0 or -inf."""
        seen = jnp.where(next_state.robot == next_state.opponent, SEEN, next_state.robot)
        return jnp.where(obs == seen, 0.0, -jnp.inf)

    def reward(
        self, state: TagState, action: Array, next_state: TagState, params: TagParams
    ) -> Array:
        """See the module."""
        tag = jnp.where(state.robot == state.opponent, params.tag_reward, params.miss_reward)
        earned = jnp.where(action == TAG, tag, params.move_reward)
        return jnp.where(state.tagged, 0.0, earned).astype(jnp.float32)

    def terminal(self, state: TagState, params: TagParams) -> Array:
        """Tagged."""
        return state.tagged

    def heuristic(self, state: TagState, params: TagParams) -> Array:
        """What a robot earns that does not see the opponent: as if it stayed, but `SEARCH` steps further away."""
        return self._chase(state, params, SEARCH)

    def rollout_action(self, key: PRNGKey, state: TagState, params: TagParams) -> Array:
        """A tag where the opponent is seen, else a step to one of the neighbouring cells, whichever."""
        free = jnp.asarray(MOVES, jnp.int32)[state.robot] != state.robot
        step = jax.random.categorical(key, jnp.where(free, 0.0, -jnp.inf))
        return jnp.where(state.robot == state.opponent, TAG, step).astype(jnp.int32)

    def upper_bound(self, state: TagState, params: TagParams) -> Array:
        """The return if the opponent is seen and stays where it is: it never comes nearer.

        Of rewards with the published signs.
        """
        return self._chase(state, params, 0)

    def _chase(self, state: TagState, params: TagParams, search: int) -> Array:
        """What is earned by `search` steps, those to the opponent's cell as if there were no walls, and a tag."""
        cells = jnp.asarray(CELLS, jnp.int32)
        away = jnp.abs(cells[state.robot] - cells[state.opponent]).sum()
        steps = jnp.where(away > 0, away + search, 0).astype(jnp.float32)
        discount = jnp.asarray(params.discount, jnp.float32)
        walked = jnp.where(
            discount < 1, (1 - discount**steps) / jnp.maximum(1 - discount, 1e-6), steps
        )
        return jnp.where(
            state.tagged, 0.0, params.move_reward * walked + params.tag_reward * discount**steps
        )

    def tabular(self, params: TagParams) -> dict[str, Any]:
        """States robot * 29 + opponent, then the one of having tagged; 842 in all."""
        count = SEEN * SEEN + 1
        transition, observation = np.zeros((5, count, count)), np.zeros((5, count, SEEN + 1))
        reward, stay = np.full((5, count), float(params.move_reward)), float(params.stay)
        for s in range(count - 1):
            robot, opponent = divmod(s, SEEN)
            observation[:, s, SEEN if robot == opponent else robot] = 1
            reward[TAG, s] = float(params.tag_reward if robot == opponent else params.miss_reward)
            for action in range(5):
                if action == TAG and robot == opponent:
                    transition[action, s, -1] = 1
                    continue
                to = robot if action == TAG else MOVES[robot, action]
                away = CELLS[opponent] - CELLS[robot]
                transition[action, s, to * SEEN + opponent] += stay
                for axis, ways in ((1, (0, 2)), (0, (1, 3))):
                    for way, sign in zip(ways, (1, -1), strict=True):
                        share = 0.5 if away[axis] == 0 else float(sign * away[axis] > 0)
                        transition[action, s, to * SEEN + MOVES[opponent, way]] += (
                            (1 - stay) / 2 * share
                        )
        transition[:, -1, -1], observation[:, -1, SEEN], reward[:, -1] = 1, 1, 0
        start = np.append(np.full(count - 1, 1 / (count - 1)), 0.0)
        return {
            "transition": transition,
            "observation": observation,
            "reward": reward,
            "start": start,
            "discount": float(params.discount),
        }

    def render(self, state: TagState, params: TagParams) -> Array:
        """The cells, the opponent red and the robot blue, uint8 `[80, 160, 3]`."""
        image = picture.canvas(80, 160, picture.GRAY)
        corners = CELLS * 16
        for x, y in corners.tolist():
            image = picture.rectangle(
                image, (x + 1.0, 65.0 - y), (x + 15.0, 79.0 - y), picture.WHITE
            )
        for cell, radius, color in (
            (state.opponent, 6.0, picture.RED),
            (state.robot, 4.0, picture.BLUE),
        ):
            x, y = jnp.asarray(corners, jnp.float32)[cell]
            image = picture.disc(image, jnp.stack([x + 8, 72 - y]), radius, color)
        return picture.to_uint8(image)


VARIANTS = {"Tag": Tag}
"""Names and the environments behind them."""
