"""Tours: the travelling salesman (TSP), and vehicles of limited capacity that start from a depot (CVRP).

Place 0 is where a tour starts, and the depot. An action goes to a place. TSP: legal are places that were not visited;
CVRP: customers that were not visited and whose demand is on board, and, away from it, the depot, where the load is
filled up. With the last place visited the way back to place 0 is added and the episode ends. The outcome is minus the
length. An action that the mask forbids ends the episode and costs `illegal_cost` x N x the diagonal of the map: by
default as much as the longest tour at least, so that it never pays.

Instances as in Kool, van Hoof and Welling, "Attention, Learn to Solve Routing Problems!", 2019; `tsplib` reads files.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from .given import Generator, check_generator
from .items import as_items
from .rewards import REWARDS, reward_of_outcome, unless
from .tour_levels import Cities, Clustered, Customers, Demands, Uniform

__all__ = ["VARIANTS", "Cities", "Clustered", "Customers", "Demands", "Tours", "Uniform"]


@flax.struct.dataclass
class Params:
    """What an action that the mask forbids costs, in diagonals of the map a place."""

    illegal_cost: Any = 2.0


@flax.struct.dataclass
class State:
    """Where one is and how one came there.

    Attributes:
        place: float32 `[N, 2]`.
        demand: int32 `[N]`, 0 for TSP.
        capacity: int32 `[]`.
        corner: float32 `[2]`, the least x and y.
        span: float32 `[2]`, from the least to the greatest: found once an episode, since every step asks for them.
        visited: bool `[N]`, place 0 from the start.
        here: int32 `[]`.
        load: int32 `[]`, what is on board.
        length: float32 `[]`, of the way so far.
        came_from: int32 `[N]`, the place before each, -1 where there was none.
        went_back: bool `[N]`, from where one went to place 0.
        illegal: bool `[]`, whether an illegal action ended it.
    """

    place: Array
    demand: Array
    capacity: Array
    corner: Array
    span: Array
    visited: Array
    here: Array
    load: Array
    length: Array
    came_from: Array
    went_back: Array
    illegal: Array


@dataclasses.dataclass(frozen=True)
class Tours:
    """TSP where the generator draws `Cities`, CVRP where it draws `Customers`.

    Observation: float32 `[N, 5]`, a row for each place: x, y within 0 to 1; visited; here; legal. Of CVRP `[N, 7]`:
    demand and load as shares of the capacity. Action: a place, int32.

    Attributes:
        generator: `Uniform`, `Clustered`, `Demands`, what `tsplib` reads, or any that draws such a level.
        rounded: whether legs are rounded to whole numbers, as TSPLIB's EUC_2D.
        rewards: "dense", minus each leg, or "sparse", minus the length at the end.
    """

    generator: Generator = Uniform()
    rounded: bool = False
    rewards: str = field("dense", OneOf(REWARDS))
    absorbing = True  # `unless`

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no generator of places."""
        check_fields(self)
        if self.num_places < 2:
            raise UsageError(f"a tour takes 2 places or more, not {self.num_places}")

    @property
    def level(self) -> Cities:
        """Shapes of the generator's levels."""
        return check_generator(
            "Tours", self.generator, Cities, "Uniform, Clustered, Demands, tsplib(text)"
        )

    @property
    def num_places(self) -> int:
        """N, of TSP the cities, of CVRP the customers and the depot."""
        return self.level.place.shape[0]

    @property
    def vehicles(self) -> bool:
        """Whether this is CVRP."""
        return isinstance(self.level, Customers)

    @property
    def name(self) -> str:
        """`TSP-20` or `CVRP-20`, by its cities or customers."""
        return f"CVRP-{self.num_places - 1}" if self.vehicles else f"TSP-{self.num_places}"

    @property
    def default_params(self) -> Params:
        """An illegal action costs more than any tour."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Rows of features."""
        return Box(0.0, 1.0, (self.num_places, 7 if self.vehicles else 5))

    def action_space(self, params: Params) -> Discrete:
        """A place."""
        return Discrete(self.num_places)

    def sample_level(self, key: PRNGKey, params: Params) -> Cities:
        """The generator's; consumes `key`."""
        return self.generator(key)

    def init_level(self, key: PRNGKey, level: Cities, params: Params) -> State:
        """At place 0, fully loaded; deterministic."""
        place, n, zero = (
            jnp.asarray(level.place, jnp.float32),
            self.num_places,
            jnp.zeros((), jnp.int32),
        )
        demand, capacity = jnp.zeros(n, jnp.int32), zero
        if isinstance(level, Customers):
            demand, capacity = (
                jnp.asarray(level.demand, jnp.int32),
                jnp.asarray(level.capacity, jnp.int32),
            )
        none, no = jnp.full(n, -1, jnp.int32), jnp.zeros(n, bool)
        start, corner = jnp.asarray(np.arange(n) == 0), jnp.min(place, axis=0)
        return State(
            place=place, demand=demand, capacity=capacity, corner=corner, span=jnp.max(place, axis=0) - corner,
            visited=start, here=zero, load=capacity, length=jnp.zeros(()), came_from=none, went_back=no,
            illegal=jnp.zeros((), bool),
        )  # fmt: skip

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def action_mask(self, state: State, params: Params) -> Array:
        """Places that may come next, bool `[N]`."""
        if not self.vehicles:
            return ~state.visited
        return (~state.visited & (state.demand <= state.load)).at[0].set(state.here != 0)

    def leg(self, state: State, a: Array, b: Array) -> Array:
        """How far it is from places a to b."""
        way = jnp.sqrt(jnp.sum((state.place[a] - state.place[b]) ** 2, axis=-1))
        return jnp.floor(way + 0.5) if self.rounded else way

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Goes to a place, and after the last one home; or ends by an illegal action; deterministic."""
        legal, over = self.action_mask(state, params)[action], self.terminal(state, params)
        action = jnp.asarray(action, jnp.int32)
        slot, home = np.arange(self.num_places), action == 0
        visited = state.visited | (slot == action)
        done = jnp.all(visited)
        way = self.leg(state, state.here, action) + jnp.where(
            done, self.leg(state, action, jnp.zeros_like(action)), 0.0
        )
        moved = state.replace(
            visited=visited,
            here=action,
            load=jnp.where(home, state.capacity, state.load - state.demand[action]),
            length=state.length + way,
            came_from=jnp.where((slot == action) & ~home, state.here, state.came_from),
            went_back=state.went_back | ((slot == state.here) & home) | ((slot == action) & done),
        )
        return unless(over | ~legal, moved, state).replace(illegal=state.illegal | (~legal & ~over))

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """All of the state but the way, scaled."""
        x, y = ((state.place - state.corner[None]) * (1 / jnp.maximum(jnp.max(state.span), 1e-6))).T
        here = np.arange(self.num_places) == state.here
        columns = [x, y, state.visited, here, self.action_mask(state, params)]
        if self.vehicles:
            share = 1 / jnp.maximum(state.capacity, 1).astype(jnp.float32)
            columns += [state.demand * share, jnp.broadcast_to(state.load * share, here.shape)]
        return jnp.clip(as_items(*columns), 0, 1)

    reward = reward_of_outcome

    def terminal(self, state: State, params: Params) -> Array:
        """All is visited, or an illegal action ended it."""
        return state.illegal | jnp.all(state.visited)

    def outcome(self, state: State, params: Params) -> Array:
        """Minus the length, and the cost of an illegal action; float32."""
        cost = params.illegal_cost * self.num_places * jnp.sqrt(jnp.sum(state.span**2))
        return -state.length - jnp.where(state.illegal, cost, 0.0)

    def upper_bound(self, state: State, params: Params) -> Array:
        """Minus the sum of the shortest legs out of here and of every place that is left; float32 `[]`, O(N^2)."""
        index = np.arange(self.num_places)
        leaves = ~state.visited | (index == state.here)
        enters = ~state.visited | (index == 0)
        legs = self.leg(state, index[:, None], index[None])
        legs = jnp.where(enters[None] & (index[:, None] != index[None]), legs, jnp.inf)
        more = -jnp.sum(jnp.where(leaves, jnp.min(legs, axis=1), 0.0))
        paid = 0.0 if self.rewards == "dense" else self.outcome(state, params)
        return jnp.where(self.terminal(state, params), 0.0, more + paid).astype(jnp.float32)

    def heuristic(self, state: State, params: Params) -> Array:
        """The upper bound, which no tour exceeds."""
        return self.upper_bound(state, params)

    def render(self, state: State, params: Params) -> Array:
        """Ways in blue, back to place 0 in grey; places that are left red, visited green, place 0 black.

        Uint8 `[160, 160, 3]`.
        """
        side = jnp.maximum(jnp.max(state.span), 1e-6)
        place = picture.to_pixels(
            (state.place - state.corner[None]) / side, (-0.06, -0.06), (1.06, 1.06), 160, 160
        )
        n = self.num_places
        gray, blue = (
            jnp.broadcast_to(jnp.array(color), (n, 3)) for color in (picture.GRAY, picture.BLUE)
        )
        starts, colors = jnp.tile(place, (2, 1)), jnp.concatenate([gray, blue])
        ends = jnp.concatenate(
            [jnp.broadcast_to(place[:1], (n, 2)), place[jnp.maximum(state.came_from, 0)]]
        )
        there = jnp.concatenate([state.went_back, state.came_from >= 0])

        def draw(image: Array, way: tuple[Array, Array, Array, Array]) -> tuple[Array, None]:
            start, end, color, visible = way
            return picture.line(image, start, end, 2.0, color, visible=visible), None

        image, _ = jax.lax.scan(draw, picture.canvas(160, 160), (starts, ends, colors, there))
        marks = jnp.where(
            state.visited[:, None], jnp.array([picture.GREEN]), jnp.array([picture.RED])
        )
        marks = jnp.where((np.arange(n) == 0)[:, None], jnp.array([picture.BLACK]), marks)

        def dot(image: Array, mark: tuple[Array, Array]) -> tuple[Array, None]:
            return picture.disc(image, mark[0], 3.0, mark[1]), None

        image, _ = jax.lax.scan(dot, image, (place, marks))
        return picture.to_uint8(picture.disc(image, place[state.here], 1.5, picture.WHITE))


VARIANTS = {
    "TSP-10": lambda: Tours(Uniform(10)),
    "TSP-20": Tours,
    "TSP-50": lambda: Tours(Uniform(50)),
    "TSP-20-Clustered": lambda: Tours(Clustered()),
    "CVRP-10": lambda: Tours(Demands(Uniform(11), 20)),
    "CVRP-20": lambda: Tours(Demands(Uniform(21))),
    "CVRP-50": lambda: Tours(Demands(Uniform(51), 40)),
}
