"""What gymnax's own tests ask of an environment, asked of ours as gymnax's.

Of some fifty files its source distribution ships six, of which one function takes any environment;
so the calls of the whole suite that do are made here: `test_reproduction_matrix`,
`test_terminal_states`, `misc/test_misc_env`, and `wrappers/test_{purerl,gym,dm_env}`. They are
gymnax's in what is called and asked, not in their words.
"""

import dataclasses

import fast
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from gymnax.wrappers import (
    FlattenObservationWrapper,
    GymnaxToDmEnvWrapper,
    GymnaxToGymWrapper,
    GymnaxToVectorGymWrapper,
    LegacyStepAPIWrapper,
    LogWrapper,
    StickyActionWrapper,
)
from worlds import Corridor, Params

import envs
from jaxpar.env import Box, Discrete, Fields, adapt, to_gymnax
from jaxpar.types import UsageError

IN_CI = ("CartPole-v1", "Navigator")
ALONE = [name for name in envs.names() if not hasattr(envs.make(name)[0], "num_agents")]
KEYS = jax.random.split(jax.random.key(0), 4)


def theirs(name, **params):
    env, usual = envs.make(name)
    return to_gymnax(env, usual.replace(**params)), usual.replace(**params)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in IN_CI else pytest.mark.slow) for n in ALONE]
)
def test_it_resets_and_steps_inside_its_spaces(name):
    env, params = theirs(name)

    @fast.jit
    def walk():
        obs, state = env.reset(KEYS[0], params)
        inside = [
            env.state_space(params).contains(state),
            env.observation_space(params).contains(obs),
        ]
        action = env.action_space(params).sample(KEYS[1])
        inside.append(env.action_space(params).contains(action))
        made = env.step(KEYS[2], state, action, params)
        inside += [
            env.state_space(params).contains(made[1]),
            env.observation_space(params).contains(made[0]),
        ]
        return obs, made, jnp.stack([jnp.asarray(x, bool) for x in inside])

    obs, (following, _, reward, terminated, truncated, info), inside = walk()
    assert inside.all(), inside
    shapes = [jax.tree.map(jnp.shape, x) for x in (obs, following, info["final_observation"])]
    assert shapes[0] == shapes[1] == shapes[2]
    assert reward.shape == terminated.shape == truncated.shape == ()
    assert {"terminated", "truncated", "final_observation"} <= info.keys()


def test_a_space_of_states_has_their_fields_and_refuses_others():
    env, params = theirs("CartPole-v1")
    space = env.state_space()
    assert set(space.spaces) == {"x", "x_dot", "theta", "theta_dot", "time"}
    state = env.reset(KEYS[0])[1]
    assert space.contains(state) and not space.contains(state.replace(x=jnp.float32(jnp.nan)))
    assert space.spaces["time"].dtype == jnp.int32 and space.sample(KEYS[0])["x"].shape == ()
    nested = theirs("XLand-R1-5x5-Pick")[0].state_space()
    assert any(isinstance(inner, spaces.Dict) for inner in nested.spaces.values())
    bits, _ = theirs("MARS-5-4")  # a word without a sign
    assert bits.state_space().contains(bits.reset(KEYS[0])[1])
    poles, _ = theirs("DoublePole")  # a named tuple within its state
    state = poles.reset(KEYS[0])[1]
    assert poles.state_space().contains(state)
    assert not poles.state_space().contains(
        state.replace(motion=state.motion._replace(x=jnp.float32(jnp.nan)))
    )


def test_an_observation_can_be_asked_for():
    env, params = theirs("CartPole-v1")
    obs, state = env.reset(KEYS[0])
    for got in (
        env.get_obs(state),
        env.get_obs(state, params, KEYS[1]),
        env.observe(KEYS[1], state, None, params),
    ):
        np.testing.assert_array_equal(got, obs)
    noisy, noise = theirs("NoisyCartPole")
    state = noisy.reset(KEYS[0])[1]
    seen = noisy.get_obs(state, key=KEYS[1])
    np.testing.assert_array_equal(
        seen, envs.make("NoisyCartPole")[0].observe(KEYS[1], state, None, noise)
    )
    with pytest.raises(
        UsageError, match="an observation of NoisyCartPole-all is drawn: give get_obs a key"
    ):
        noisy.get_obs(state)
    twice = to_gymnax(adapt(to_gymnax(Corridor())))
    with pytest.raises(
        UsageError, match="is an adapter, of which reset and step can be asked, but no observe"
    ):
        twice.get_obs(twice.reset(KEYS[0])[1])


def test_both_ends_are_told_apart():
    env, params = theirs("CartPole-v1", max_steps=1)
    _, state = env.reset(KEYS[0])
    fallen = state.replace(theta=jnp.float32(2 * params.max_theta))
    for start, steps, want in (
        (state, 1, (False, True)),
        (fallen, 2, (True, False)),
        (fallen, 1, (True, True)),
    ):
        limit = params.replace(max_steps=steps)
        obs, following, _, terminated, truncated, info = env.step(
            KEYS[1], start, jnp.int32(0), limit
        )
        assert (
            (bool(terminated), bool(truncated))
            == want
            == (bool(info["terminated"]), bool(info["truncated"]))
        )
        assert following.time == 0 and not np.array_equal(obs, info["final_observation"])
        last, before, *_ = env.step_env(jax.random.split(KEYS[1])[0], start, jnp.int32(0), limit)
        np.testing.assert_array_equal(info["final_observation"], last)
        ends = (
            env.is_terminal(before, limit),
            env.is_truncated(before, limit),
            env.discount(before, limit),
        )
        assert ends == (want[0], want[1], 1.0 - want[0])


def test_ends_keep_their_structure_under_jit_and_vmap():
    env, params = theirs("Pendulum-v1", max_steps=1)

    def reset_and_step(key):
        reset_key, action_key, step_key = jax.random.split(key, 3)
        state = env.reset(reset_key, params)[1]
        return env.step(step_key, state, env.action_space(params).sample(action_key), params)

    _, states, _, terminated, truncated, info = fast.jit(jax.vmap(reset_and_step))(KEYS[:2])
    assert truncated.all() and not terminated.any() and (states.time == 0).all()
    assert info["final_observation"].shape == (2, 3)


def test_it_runs_in_the_wrappers_of_learners():
    env, params = theirs("Catcher")  # whose episodes have 35 steps
    log = LogWrapper(FlattenObservationWrapper(env))
    obs, state = log.reset(KEYS[0], params)
    assert obs.shape == (32 * 32 * 3,) and not state.returned_episode_valid
    walk = fast.jit(
        lambda state, keys: jax.lax.scan(
            lambda s, k: log.step(k, s, jnp.int32(1), params)[1::4], state, keys
        )
    )
    state, info = walk(state, jax.random.split(KEYS[1], 40))
    ended = np.flatnonzero(info["returned_episode"])
    assert (
        ended.tolist() == [34]
        and info["returned_episode_lengths"][-1] == 35
        and state.returned_episode_valid
    )
    assert abs(info["returned_episode_returns"][-1]) <= 1 and info["final_observation"].shape == (
        40,
        32 * 32 * 3,
    )
    sticky = StickyActionWrapper(env, sticky_action_prob=1.0)
    _, state = sticky.reset(KEYS[0], params)
    _, state, *_ = sticky.step(
        KEYS[1], state.replace(last_action=jnp.int32(2)), jnp.int32(0), params
    )
    assert state.last_action == 2 and state.env_state.player == 5
    with pytest.raises(ValueError, match="Discrete"):
        StickyActionWrapper(theirs("Pendulum-v1")[0])
    made = LegacyStepAPIWrapper(env).step(
        KEYS[1], env.reset(KEYS[0], params)[1], jnp.int32(0), params
    )
    assert len(made) == 5 and not made[3]


def test_it_runs_in_the_wrappers_of_other_tools():
    env, params = theirs("CartPole-v1")
    single = GymnaxToGymWrapper(env, params, 0)
    obs, _ = single.reset(seed=5)
    assert single.action_space.n == 2 and single.observation_space.shape == (4,)
    obs, reward, terminated, truncated, _ = single.step(single.action_space.sample())
    assert np.shape(obs) == (4,) and reward == 1 and not terminated and not truncated
    vector = GymnaxToVectorGymWrapper(env, 3, params, 0)
    assert vector.reset()[0].shape == (3, 4) and vector.step(vector.action_space.sample())[
        0
    ].shape == (3, 4)
    timed = jax.vmap(GymnaxToDmEnvWrapper(env).reset)(KEYS)
    after = jax.vmap(GymnaxToDmEnvWrapper(env).step)(KEYS, timed, jnp.ones(4, jnp.int32))
    assert after.observation.shape == (4, 4) and (after.reward == 1).all()


def test_observations_of_several_parts_are_in_their_space():
    parts = Fields.of(place=Discrete(3), image=Box(0, 9, (2, 2), jnp.uint8))

    @dataclasses.dataclass(frozen=True)
    class Parted(Corridor):
        def observation_space(self, params):
            return parts

    space, drawn = to_gymnax(Parted(), Params()).observation_space(), parts.sample(KEYS[0])
    assert (
        isinstance(space, spaces.Dict)
        and space.contains(drawn)
        and space.contains(space.sample(KEYS[1]))
    )
    assert not space.contains(drawn | {"image": drawn["image"] + 10})
