"""Foraging against plain loops over whole episodes; levels by enumeration; play against chance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from journey import record
from twin_foraging import ForagingTwin

from envs.multi.foraging import Foraging, Level, scripted
from jaxpar.types import UsageError

CASES = [
    Foraging(),
    Foraging(size=5, num_agents=5, num_food=2, together=True),
    Foraging(size=6, num_agents=3, num_food=3, sight=2, max_strength=3, view="grid"),
    Foraging(size=7, num_agents=3, num_food=2, sight=1),
]


def draw(key, env, state, params):
    """Legal actions mostly, loading more often than chance."""
    load_key, any_key, legal_key = jax.random.split(key, 3)
    mask = env.action_mask(state, params)
    action = jax.random.categorical(legal_key, jnp.where(mask, 0.0, -jnp.inf), axis=-1)
    action = jnp.where(jax.random.bernoulli(load_key, 0.5, action.shape) & mask[:, 5], 5, action)
    wild = jax.random.randint(any_key, action.shape, 0, 6)
    return jnp.where(jax.random.bernoulli(any_key, 0.1, action.shape), wild, action).astype(
        jnp.int32
    )


def compare(env, num_steps, num_envs=20):
    """Walks the loops beside the record, episode after episode."""
    params = env.default_params.replace(penalty=0.25)
    obs, states, masks, actions, moved = record(env, params, num_steps, num_envs, policy=draw)
    lifted = 0
    for b in range(num_envs):
        twin = None
        for t in range(num_steps):
            if states.time[t, b] == 0:
                fields = (
                    getattr(states, name)[t, b]
                    for name in ("position", "strength", "food", "weight")
                )
                twin = ForagingTwin(env.size, env.sight, *fields, params.penalty)
            agents = range(env.num_agents)
            assert [set(np.flatnonzero(masks[t, b, i])) for i in agents] == [
                set(twin.legal(i)) for i in agents
            ]
            see = twin.grid if env.view == "grid" else twin.vector
            assert (np.array([see(i) for i in agents]) == obs[t, b]).all()
            before = len(twin.food)
            rewards = twin.step(actions[t, b])
            lifted += before - len(twin.food)
            np.testing.assert_allclose(moved.reward[t, b], rewards, atol=1e-6)
            assert [tuple(place) for place in moved.state.position[t, b]] == twin.players
            assert len(set(twin.players)) == env.num_agents
            assert (moved.terminated[t, b] == (not twin.food)).all()
            assert (moved.truncated[t, b] == (states.time[t, b] + 1 >= params.max_steps)).all()
            assert (np.array([see(i) for i in agents]) == moved.obs[t, b]).all()
    assert lifted > num_steps * num_envs / 500


@pytest.mark.parametrize(
    "env", [*CASES[:3], pytest.param(CASES[3], marks=pytest.mark.slow)], ids=repr
)
def test_equals_loops(env):
    compare(env, 60)


@pytest.mark.slow
@pytest.mark.parametrize("env", CASES, ids=repr)
def test_equals_loops_over_many_steps(env):
    compare(env, 5000)


def test_levels_are_uniform_over_what_the_rules_allow():
    """One agent, two foods on 5x5: the nine inner cells, both foods enumerated as rejection sampling draws them."""
    env = Foraging(size=5, num_agents=1, num_food=2)
    draws = 20000
    level = jax.jit(jax.vmap(lambda key: env.sample_level(key, env.default_params)))(
        jax.random.split(jax.random.key(0), draws)
    )
    level = jax.tree.map(np.asarray, level)
    inner = [(r, c) for r in (1, 2, 3) for c in (1, 2, 3)]
    want = {}
    for agent in [(r, c) for r in range(5) for c in range(5)]:
        firsts = [cell for cell in inner if cell != agent]
        for first in firsts:
            seconds = [c for c in firsts if abs(c[0] - first[0]) + abs(c[1] - first[1]) > 2]
            for second in seconds or [None]:
                key = first, second
                want[key] = want.get(key, 0) + draws / 25 / len(firsts) / max(len(seconds), 1)
    got = {}
    for food, weight in zip(level.food, level.weight, strict=True):
        key = tuple(food[0]), tuple(food[1]) if weight[1] else None
        got[key] = got.get(key, 0) + 1
    assert set(got) == set(want)
    chi = sum((got[key] - count) ** 2 / count for key, count in want.items())
    freedom = len(want) - 1
    assert abs(chi - freedom) < 5 * (2 * freedom) ** 0.5
    assert np.bincount(level.strength[:, 0])[1:].min() > draws * 0.48


def test_three_in_a_row_who_push_into_one_that_stays_all_stay():
    env = Foraging(size=6, num_agents=4, num_food=1)
    level = Level(
        position=jnp.array([[0, 0], [0, 1], [0, 2], [0, 3]]),
        strength=jnp.ones(4, jnp.int32),
        food=jnp.array([[4, 4]]),
        weight=jnp.array([2]),
    )
    state = env.init_level(jax.random.key(0), level, env.default_params)
    pushed = env.transition(jax.random.key(0), state, jnp.array([4, 4, 4, 0]), env.default_params)
    assert (pushed.position == state.position).all()
    moved = env.transition(jax.random.key(0), state, jnp.array([4, 4, 4, 4]), env.default_params)
    assert (moved.position[:, 1] == state.position[:, 1] + 1).all()
    swapped = env.transition(jax.random.key(0), state, jnp.array([4, 3, 0, 0]), env.default_params)
    assert (swapped.position[:2] == state.position[1::-1]).all()


def returns(env, policy, num_envs=300):
    """Mean team return over the first episode of every environment."""
    _, states, _, _, moved = record(env, env.default_params, 50, num_envs, 5, policy)
    first = np.cumsum(states.time == 0, axis=0) == 1
    return (moved.reward.sum(-1) * first).sum(0).mean()


def uniform(key, env, state, params):
    """Any action at all."""
    return jax.random.randint(key, (env.num_agents,), 0, 6)


@pytest.mark.slow
def test_script_lifts_nearly_everything_and_chance_little():
    env = Foraging(together=True)
    assert returns(env, lambda key, *args: scripted(*args)) > 0.95
    assert returns(env, uniform) < 0.1


def test_bad_fields_are_refused():
    for fields in (
        {"size": 2},
        {"num_agents": 0},
        {"view": "pixels"},
        {"size": 3, "num_agents": 9},
    ):
        with pytest.raises(UsageError):
            Foraging(**fields)


def test_pictures_show_what_is_left():
    env = Foraging()
    state = env.init(jax.random.key(0), env.default_params)
    picture = env.render(state, env.default_params)
    eaten = env.render(state.replace(left=jnp.array([False, True])), env.default_params)
    assert picture.shape == (128, 128, 3) and picture.dtype == jnp.uint8
    changed = np.argwhere((picture != eaten).any(-1)) // 16
    assert (changed == np.asarray(state.food[0])).all() and len(changed)
