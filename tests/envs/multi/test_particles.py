"""Particle tasks against loops in float64, one step at a time from the same state; play against chance and bounds."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from twin_particles import SpreadTwin, TagTwin, TalkTwin

from envs.multi.particles import SpeakerListener, Spread, Tag, scripted
from jaxpar.env.check import check_environment
from jaxpar.env.kernel import reset, step
from jaxpar.types import UsageError

NUM_ENVS = 20


def twin_of(env, state):
    """The loops' world in the state of one environment."""
    match env:
        case Spread():
            return SpreadTwin(state.position, state.velocity, state.landmarks)
        case Tag():
            return TagTwin(state.position, state.velocity, state.landmarks, env.num_chasers)
        case SpeakerListener():
            return TalkTwin(state.position, state.velocity, state.landmarks, state.goal)


def draw(key, env, state, params):
    """A uniform joint action, pulled towards the origin at times, so that agents crowd."""
    action = env.action_space(params).sample(key)
    if env.continuous:
        return action
    inward = jnp.where(jnp.abs(state.position[:, 0]) > jnp.abs(state.position[:, 1]), 1, 3)
    axis = (inward - 1) // 2
    inward = inward + (jnp.take_along_axis(state.position, axis[:, None], 1)[:, 0] < 0)
    return jnp.where(jax.random.bernoulli(key, 0.3, action.shape), inward, action).astype(jnp.int32)


def record(env, params, num_steps, num_envs=NUM_ENVS, seed=0, policy=draw):
    """States before, actions, and what every step gave, `[T, B, ...]`, episodes of 25 steps reset together."""

    def one(state, key):
        action_key, step_key, reset_key = jax.random.split(key, 3)
        action = policy(action_key, env, state, params)
        moved = step(step_key, env, state, action, params)
        done = jnp.all(moved.truncated)
        _, fresh = reset(reset_key, env, params)
        return jax.tree.map(lambda a, b: jnp.where(done, a, b), fresh, moved.state), (
            state,
            action,
            moved,
        )

    def body(states, key):
        return jax.vmap(one)(states, jax.random.split(key, num_envs))

    key, first = jax.random.split(jax.random.key(seed))
    states = jax.vmap(lambda key: reset(key, env, params)[1])(jax.random.split(first, num_envs))
    run = jax.jit(
        lambda states, key: jax.lax.scan(body, states, jax.random.split(key, num_steps))[1]
    )
    return jax.tree.map(np.asarray, run(states, key))


def compare(env, num_steps):
    """Steps both from every recorded state and returns the largest error and how many contacts there were."""
    states, actions, moved = record(env, env.default_params, num_steps)
    worst = np.zeros(3)
    for t in range(num_steps):
        for b in range(NUM_ENVS):
            state = jax.tree.map(lambda x: x[t, b], states)  # noqa: B023
            twin = twin_of(env, state)
            twin.step(actions[t, b])
            after = moved.state
            position = np.array([disc.position for disc in twin.agents])
            velocity = np.array([disc.velocity for disc in twin.agents])
            place = np.abs(position - after.position[t, b]).max()
            speed = np.abs(velocity - after.velocity[t, b]).max()
            physics = np.maximum(place, speed)
            # a touch that float32 and float64 see differently is one at its very edge
            edge = np.abs(np.array(twin.rewards()) - moved.reward[t, b]).max()
            touch = min_gap(twin) < 1e-6
            errors = (
                physics,
                0.0 if touch else edge,
                np.abs(np.array(twin.observations()) - moved.obs[t, b]).max(),
            )
            worst = np.maximum(worst, errors)
    np.testing.assert_array_less(worst, 1e-5)
    assert (moved.truncated.all(-1) == (moved.state.time == 25)).all()
    assert not moved.terminated.any()
    return worst


def min_gap(world):
    """How close any two discs are to just touching."""
    agents = world.agents
    return min(abs(a.distance(b) - a.size - b.size) for a in agents for b in agents if a is not b)


CASES = [
    Spread(),
    Spread(num_agents=2, num_landmarks=4, continuous=True),
    Tag(),
    Tag(num_chasers=3, num_prey=2, continuous=True),
    SpeakerListener(),
    SpeakerListener(continuous=True),
]


@pytest.mark.parametrize("env", CASES, ids=repr)
def test_equals_loops(env):
    compare(env, 50)


@pytest.mark.slow
@pytest.mark.parametrize("env", CASES, ids=repr)
def test_equals_loops_over_many_steps(env):
    compare(env, 5000)


def uniform(key, env, state, params):
    """Any action that the mask admits."""
    high = np.array([3, 5]) if isinstance(env, SpeakerListener) else 5
    return jax.random.randint(key, (env.num_agents,), 0, high)


def returns(env, seats, num_envs=300, seed=3):
    """Mean returns per agent `[K, N]` over an episode where `seats` `[K, N]` play the script, the rest uniformly."""

    def policy(key, env, state, params):
        play_key, team_key = jax.random.split(key)
        # the same team for the whole episode: an environment is known by its landmarks, which never move
        team = jnp.asarray(seats)[jnp.int32(jnp.abs(state.landmarks[0, 0]) * 1e4) % len(seats)]
        return jnp.where(team, scripted(env, state, params), uniform(play_key, env, state, params))

    states, _, moved = record(env, env.default_params, 25, num_envs * len(seats), seed, policy)
    team = (np.abs(states.landmarks[0, :, 0, 0]) * np.float32(1e4)).astype(np.int32) % len(seats)
    total = moved.reward.sum(0)
    return np.stack([total[team == k].mean(0) for k in range(len(seats))])


def test_random_spread_earns_what_others_measured():
    """-26.6 +- 0.12 per agent over 25 steps, measured on another implementation; five standard errors of both."""
    _, _, moved = record(Spread(), Spread().default_params, 25, 2000, policy=uniform)
    total = moved.reward.sum(0).mean(-1)
    assert abs(total.mean() + 26.6) < 5 * np.hypot(0.12, total.std() / 2000**0.5)


@pytest.mark.slow
def test_script_beats_chance():
    chance, script = returns(Spread(), np.array([[False] * 3, [True] * 3])).mean(-1)
    assert script > -10.5 and chance < -24
    chance, script = returns(SpeakerListener(), np.array([[False] * 2, [True] * 2])).mean(-1)
    assert script > -10 and chance < -30
    chance, chase, flee = returns(
        Tag(), np.array([[False] * 4, [True, True, True, False], [False] * 3 + [True]])
    )
    assert chase[0] > 35 and chance[0] < 10 and flee[3] > chance[3] + 4


def test_script_with_strengths_comes_to_rest_on_its_landmarks():
    env = Spread(continuous=True)
    states, _, _ = record(
        env, env.default_params, 25, 50, policy=lambda key, *args: scripted(*args)
    )
    gap = np.linalg.norm(
        states.position[-1][:, None] - states.landmarks[-1][:, :, None], axis=-1
    ).min(-1)
    assert np.quantile(gap, 0.5) < 0.02  # some landmarks lie nearer to each other than agents can


def test_words_alone_are_legal_for_the_speaker():
    env = SpeakerListener()
    _, state = reset(jax.random.key(0), env, env.default_params)
    mask = env.action_mask(state, env.default_params)
    assert not hasattr(SpeakerListener(continuous=True), "action_mask")
    assert mask.tolist() == [[True, True, True, False, False], [True] * 5]
    for word in range(5):
        said = env.transition(
            jax.random.key(1), state, jnp.array([word, 0]), env.default_params
        ).message
        assert said.sum() == (1 if mask[0, word] else 0)


def test_contact_in_one_place_is_finite_and_differentiable():
    env = Spread(num_agents=2)
    params = env.default_params
    state = jax.jit(env.init)(jax.random.key(0), params)

    def total(position):
        moved = env.transition(
            jax.random.key(1), state.replace(position=position), jnp.zeros(2, jnp.int32), params
        )
        return jnp.sum(moved.position * moved.velocity)

    assert np.isfinite(jax.jit(jax.grad(total))(jnp.zeros((2, 2)))).all()


def test_physics_vmaps_and_renders():
    """Two worlds that differ in a number alone: the slow chasers stay below their speed and elsewhere."""
    env = Tag()
    params = dataclasses.replace(env.default_params, chaser_speed=jnp.array([0.1, 2.0]))
    axes = jax.tree.map(lambda x: 0 if jnp.ndim(x) else None, params)

    def run(params):
        def body(state, _):
            return env.transition(jax.random.key(1), state, jnp.full(4, 2), params), ()

        state, _ = jax.lax.scan(body, env.init(jax.random.key(0), params), length=4)
        return state, env.render(state, params)

    moved, pictures = jax.jit(jax.vmap(run, in_axes=(axes,)))(params)
    speed = np.linalg.norm(moved.velocity[:, :3], axis=-1)
    assert (speed[0] <= 0.1 + 1e-6).all() and (speed[1] > 0.5).all()
    assert pictures.shape == (2, 112, 112, 3) and pictures.dtype == jnp.uint8
    assert (pictures[0] != pictures[1]).any()


@pytest.mark.slow
@pytest.mark.parametrize("env", [Tag(continuous=True), SpeakerListener(continuous=True)], ids=repr)
def test_promises_of_strengths_are_kept(env):
    assert "walk" in check_environment(env, num_envs=2, num_steps=30).checks


def test_bad_counts_are_refused():
    with pytest.raises(UsageError, match="num_agents=0 must be at least 1"):
        Spread(num_agents=0)
    with pytest.raises(UsageError, match="as many landmarks"):
        env = Spread(num_landmarks=1)
        scripted(env, env.init(jax.random.key(0), env.default_params), env.default_params)
