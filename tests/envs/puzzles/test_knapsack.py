"""Knapsack against plain sums; the best value by all subsets and by a table."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from best import best_packing, packing_table
from fast import jit
from following import follow, replay

import envs
from envs.puzzles.knapsack import Integer, Items, Knapsack, Level, given
from jaxpar.types import UsageError


class Twin:
    def __init__(self, state):
        self.weights, self.values = state.level.weight, state.level.value
        self.capacity, self.room, self.packed = state.level.capacity, state.level.capacity, set()
        self.illegal = False

    def legal(self):
        return [i not in self.packed and w <= self.room for i, w in enumerate(self.weights)]

    def step(self, action):
        if not self.legal()[action]:
            self.illegal = True
            return -1.0, True
        self.packed.add(action)
        self.room = self.room - self.weights[action]  # rounded as the environment rounds
        return self.values[action], not any(self.legal())

    def same(self, state):
        return set(np.flatnonzero(state.packed)) == self.packed and state.room == self.room


def test_equals_sums_step_by_step():
    assert len(follow(Knapsack(Items(6)), Twin)) > 50


PROBLEMS = (
    ((3, 5, 7, 9, 4, 2, 6, 8), (4, 6, 9, 12, 4, 1, 7, 13), 21),
    ((1, 2, 3, 4, 5, 6, 7, 8), (8, 7, 6, 5, 4, 3, 2, 1), 13),
    ((5, 5, 5, 5, 5, 5, 5, 5), (1, 9, 2, 8, 3, 7, 4, 6), 17),
    ((11, 12, 13, 14, 15, 16, 17, 18), (11, 12, 13, 14, 15, 16, 17, 18), 50),
)


def test_the_best_subset_is_never_exceeded_and_replays():
    env = Knapsack(given(*PROBLEMS))
    params, best = env.default_params, {}
    bound = jit(
        lambda level: env.upper_bound(env.init_level(jax.random.key(0), level, params), params)
    )
    for problem, level in zip(PROBLEMS, env.generator.levels(), strict=True):
        best[problem[2]], items = best_packing(*problem)
        assert (
            best[problem[2]]
            == packing_table(*problem)
            <= float(bound(level))
            < best[problem[2]] + 10
        )
        assert level.weight.dtype == np.int32
        total, _ = replay(env, items, level)
        assert total == best[problem[2]]
    outcomes = follow(env, Twin, 60, 20)
    assert all(total <= best[int(twin.capacity)] for total, _, twin in outcomes)
    assert {int(twin.capacity) for *_, twin in outcomes} == set(best)


def test_observations_are_shares_of_the_greatest():
    env = Knapsack(given(((2, 4, 5), (3, 1, 6), 7)))
    state = env.init(jax.random.key(0), env.default_params)
    state = env.transition(jax.random.key(0), state, jnp.int32(2), env.default_params)
    want = [[0.4, 0.8, 1], [0.5, 1 / 6, 1], [1, 2, 2], [0, 0, 1], [1, 0, 0]]  # room for 2 is left
    got = env.observe(jax.random.key(0), state, None, env.default_params)
    np.testing.assert_allclose(got, np.transpose(want), rtol=1e-6)


def test_masks_of_ten_thousand_states():
    env = Knapsack(Items(12))
    keys = jax.random.split(jax.random.key(0), 10_000)

    def one(key):
        state = env.init(key, env.default_params)
        packed = jax.random.bernoulli(key, 0.4, (12,))
        state = state.replace(packed=packed, room=jax.random.uniform(key))
        return state, env.action_mask(state, env.default_params)

    states, masks = jax.tree.map(np.asarray, jit(jax.vmap(one))(keys))
    rows = zip(
        states.level.weight.tolist(),
        states.packed.tolist(),
        states.room.tolist(),
        masks.tolist(),
        strict=True,
    )
    for weights, packed, room, mask in rows:
        assert mask == [not p and w <= room for w, p in zip(weights, packed, strict=True)]


def test_generators():
    level = jit(jax.vmap(Items(50, kind="correlated")))(jax.random.split(jax.random.key(0), 200))
    assert np.corrcoef(np.ravel(level.weight), np.ravel(level.value))[0, 1] > 0.9
    assert (
        np.allclose(level.capacity, 12.5) and (level.weight > 0).all() and (level.value > 0).all()
    )
    level = jit(jax.vmap(Integer(5, 9, 0.01)))(jax.random.split(jax.random.key(0), 200))
    np.testing.assert_array_equal(level.capacity, level.weight.max(axis=1))
    assert np.unique(level.weight).tolist() == list(range(1, 10))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Items(2), "may take no item"),
        (lambda: Items(50, kind="hard"), "kind='hard' is unknown"),
        (lambda: Integer(2**13, 2**13), "must be at most 2\\^24"),
        (lambda: given(((1, 2), (1,), 3)), "as many weights as values"),
        (lambda: given(((0, 2), (1, 1), 3)), "all over 0"),
        (lambda: given(((4, 5), (1, 1), 3)), "no item fits"),
        (lambda: Knapsack(len), "takes a generator"),
        (lambda: envs.make("Knapsack-50", rewards="late"), "rewards='late' is unknown"),
    ],
)
def test_bad_input_ends_in_a_sentence(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_the_picture_shows_the_sack_filling():
    env = Knapsack(given(((1.0, 2.0), (1.0, 1.0), 3.0)))
    state = env.init(jax.random.key(0), env.default_params)
    frames = [state, env.transition(jax.random.key(0), state, jnp.int32(1), env.default_params)]
    empty, filled = (np.asarray(env.render(state, env.default_params)) for state in frames)
    assert empty.shape == (16, 168, 3) and empty.dtype == np.uint8
    assert (empty[:, -1] == 225).all() and (filled[:, -1] != 225).any(
        axis=-1
    ).sum() == 10  # two thirds of 16 rows
    assert isinstance(state.level, Level)
