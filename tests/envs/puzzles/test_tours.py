"""TSP and CVRP against plain sums; shortest tours by Held and Karp, and by a table over subsets."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from best import best_routes, best_tour
from fast import jit
from following import follow, replay

from envs.puzzles.given import Given
from envs.puzzles.tour_levels import Cities, Clustered, Customers, Demands, Uniform, tsplib
from envs.puzzles.tours import Tours
from jaxpar.types import UsageError


class Twin:
    def __init__(self, state, vehicles):
        self.place, self.demand = state.place.astype(float).tolist(), state.demand.tolist()
        self.capacity, self.vehicles = int(state.capacity), vehicles
        self.left, self.here, self.load = set(range(1, len(self.place))), 0, int(state.capacity)
        self.legs = []

    def legal(self):
        mask = [i in self.left and self.demand[i] <= self.load for i in range(len(self.place))]
        return [self.vehicles and self.here != 0, *mask[1:]]

    def step(self, action):
        if not self.legal()[action]:
            xs, ys = zip(*self.place, strict=True)
            return -2 * len(self.place) * math.hypot(max(xs) - min(xs), max(ys) - min(ys)), True
        way = math.dist(self.place[self.here], self.place[action])
        self.legs.append((self.here, action))
        self.left.discard(action)
        self.here, self.load = action, self.load - self.demand[action] if action else self.capacity
        if not self.left:
            way += math.dist(self.place[action], self.place[0])
            self.legs.append((action, 0))
        return -way, not self.left

    def same(self, state):
        drawn = {(int(a), b) for b, a in enumerate(state.came_from) if a >= 0}
        drawn |= {(a, 0) for a in np.flatnonzero(state.went_back)}
        visited = set(np.flatnonzero(~state.visited)) == self.left
        return (
            visited
            and int(state.here) == self.here
            and int(state.load) == self.load
            and drawn == set(self.legs)
        )


def distances(place):
    return np.sqrt(((place[:, None] - place[None]).astype(np.float64) ** 2).sum(-1)).tolist()


def levels_of(generator, count):
    drawn = jit(jax.vmap(generator))(jax.random.split(jax.random.key(3), count))
    return [jax.tree.map(lambda leaf, i=i: np.asarray(leaf)[i], drawn) for i in range(count)]


def test_tsp_equals_sums_and_no_tour_is_shorter_than_held_and_karps():
    levels = levels_of(Uniform(6), 3)
    env = Tours(Given.of(*levels))
    best = {}
    for level in levels:
        length, cities = best_tour(distances(level.place))
        best[level.place.tobytes()] = length
        total, state = replay(env, cities, level)
        np.testing.assert_allclose([-total, state.length], length, rtol=1e-5)
        bound = env.upper_bound(
            env.init_level(jax.random.key(0), level, env.default_params), env.default_params
        )
        assert -4 < float(bound) < 0 and float(bound) >= -length
    outcomes = follow(env, lambda state: Twin(state, False))
    for total, illegal, twin in outcomes:
        place = np.array(twin.place, np.float32).tobytes()
        assert total <= -best[place] + 1e-5 and (not illegal or total < -2 * best[place])


def test_cvrp_equals_sums_and_no_routes_are_shorter_than_the_tables():
    levels = levels_of(Demands(Uniform(6), 12), 3)
    env = Tours(Given.of(*levels))
    best = {}
    for level in levels:
        length, stops = best_routes(distances(level.place), level.demand.tolist(), 12)
        best[level.place.tobytes()] = length
        stops = list(stops[:-1] if stops[-1] == 0 else stops)
        total, _ = replay(env, stops, level)
        np.testing.assert_allclose(-total, length, rtol=1e-5)
    outcomes = follow(env, lambda state: Twin(state, True))
    assert all(
        total <= -best[np.array(twin.place, np.float32).tobytes()] + 1e-5
        for total, _, twin in outcomes
    )
    assert sum((0, 0) != leg and leg[1] == 0 for *_, twin in outcomes for leg in twin.legs) > len(
        outcomes
    )


def test_cvrp_with_room_for_all_demand_is_tsp():
    (level,) = levels_of(Uniform(6), 1)
    demand = np.array([0, 1, 2, 3, 4, 5], np.int32)
    customers = Customers(level.place, demand, np.int32(15))
    length, cities = best_tour(distances(level.place))
    assert math.isclose(best_routes(distances(level.place), demand.tolist(), 15)[0], length)
    one, _ = replay(Tours(Given.of(level)), cities)
    other, _ = replay(Tours(Given.of(customers)), cities)
    assert one == other


@pytest.mark.slow  # 10 s
def test_held_and_karp_by_all_orders_and_many_tours():
    import itertools

    for level in levels_of(Uniform(7), 3):
        far = distances(level.place)
        orders = itertools.permutations(range(1, 7))
        shortest = min(
            sum(far[a][b] for a, b in itertools.pairwise((0, *order, 0))) for order in orders
        )
        assert math.isclose(best_tour(far)[0], shortest)
    for level in levels_of(Clustered(12), 3):
        length, cities = best_tour(distances(level.place))
        total, _ = replay(Tours(Given.of(level)), cities)
        np.testing.assert_allclose(-total, length, rtol=1e-5)


def test_observations_are_within_the_map():
    level = Customers(np.float32([[3, -2], [7, 1], [5, 4]]), np.int32([0, 4, 6]), np.int32(8))
    env = Tours(Given.of(level))
    state = env.init(jax.random.key(0), env.default_params)
    state = env.transition(jax.random.key(0), state, jnp.int32(2), env.default_params)
    x, y, visited, here = [0, 4 / 6, 2 / 6], [0, 3 / 6, 1], [1, 0, 1], [0, 0, 1]
    want = [
        x,
        y,
        visited,
        here,
        [1, 0, 0],
        [0, 0.5, 0.75],
        [0.25] * 3,
    ]  # what is left on board takes neither
    got = env.observe(jax.random.key(0), state, None, env.default_params)
    np.testing.assert_allclose(got, np.transpose(want), rtol=1e-6)


def test_masks_of_ten_thousand_states():
    env = Tours(Demands(Uniform(8), 12))

    def one(key):
        state = env.init(key, env.default_params)
        visited = jax.random.bernoulli(key, 0.5, (8,)).at[0].set(True)
        here, load = jax.random.randint(key, (2,), 0, 8)
        state = state.replace(visited=visited, here=here, load=load)
        return state, env.action_mask(state, env.default_params)

    states, masks = jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 10_000))
    parts = (states.visited, states.here, states.load, states.demand, masks)
    for visited, here, load, demand, mask in zip(
        *(np.asarray(part).tolist() for part in parts), strict=True
    ):
        assert mask == [
            here != 0,
            *(not v and d <= load for v, d in zip(visited[1:], demand[1:], strict=True)),
        ]


TSP = """NAME : square
TYPE : TSP
DIMENSION : 4
EDGE_WEIGHT_TYPE : EUC_2D
NODE_COORD_SECTION
1 0 0
2 0 10.4
3 1.0e1 10
4 10 0
EOF
"""
CVRP = TSP.replace("TSP", "CVRP").replace(
    "EOF", "DEMAND_SECTION\n1 3\n2 4\n3 0\n4 5\nDEPOT_SECTION\n3\n-1\nEOF"
)
CVRP = CVRP.replace("DIMENSION", "CAPACITY : 9\nDIMENSION")


def test_texts_of_tsplib():
    env = Tours(tsplib(TSP), rounded=True)
    assert env.name == "TSP-4" and env == Tours(tsplib(TSP), rounded=True)
    total, _ = replay(env, [1, 2, 3])
    assert total == -(10 + 10 + 10 + 10)
    env = Tours(tsplib(CVRP))
    (level,) = env.generator.levels()
    assert (
        env.name == "CVRP-3" and level.demand.tolist() == [0, 3, 4, 5] and int(level.capacity) == 9
    )
    np.testing.assert_array_equal(level.place, np.float32([[10, 10], [0, 0], [0, 10.4], [10, 0]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: tsplib(TSP.replace("EUC_2D", "GEO")),
            "only EDGE_WEIGHT_TYPE EUC_2D is read, not GEO",
        ),
        (lambda: tsplib(TSP.replace(": 4", ": 5")), "must have DIMENSION = 5 rows .* it has 4"),
        (lambda: tsplib(TSP.replace("10.4", "ten")), "hold numbers, not '2 0 ten'"),
        (
            lambda: tsplib(CVRP.replace("DEPOT_SECTION\n3", "DEPOT_SECTION\n7")),
            "one depot among them",
        ),
        (lambda: tsplib(CVRP.replace("4 5", "4 10")), "from 0 to the capacity, 9"),
        (lambda: Demands(Uniform(3), 5), "capacity=5 cannot carry a demand of most=9"),
        (lambda: Tours(Given.of(Cities(np.zeros((1, 2), np.float32)))), "2 places or more, not 1"),
        (lambda: Tours("clustered"), "takes a generator"),
        (lambda: Tours(rewards="none"), "rewards='none' is unknown"),
    ],
)
def test_bad_input_ends_in_a_sentence(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_clusters_are_narrower_than_chance():
    def spread(generator):
        level = jit(jax.vmap(generator))(jax.random.split(jax.random.key(0), 200))
        apart = (
            jnp.linalg.norm(level.place[:, :, None] - level.place[:, None], axis=-1)
            + 9 * jnp.eye(20)[None]
        )
        return float(jnp.min(apart, axis=1).mean())

    assert spread(Clustered()) < 0.6 * spread(Uniform())
