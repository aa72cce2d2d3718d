"""An environment that tells the last action and reward steps as the one inside, and learners read it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from jaxpar.env import reset, step
from jaxpar.rl import LastActionReward, returns_by_trial
from jaxpar.rl.features import feature_shape, features
from jaxpar.rollout import (
    NoReset,
    RolloutOptions,
    first_episodes,
    init,
    random_policy,
    rollout,
)


@pytest.mark.parametrize("name", ["CartPole-v1", "Spread-3", "Combat-3v3"])
def test_it_steps_as_the_one_inside_and_tells(name):
    inner, params = envs.make(name)
    env = LastActionReward(inner)
    key = jax.random.key(0)
    obs, state = reset(key, env, params)
    bare, bare_state = reset(key, inner, params)
    jax.tree.map(np.testing.assert_array_equal, obs["obs"], bare)
    assert not np.any(obs["after"]) and not np.any(obs["reward"])
    action = env.action_space(params).sample(jax.random.key(1))
    made, wanted = (
        step(key, env, state, action, params),
        step(key, inner, bare_state, action, params),
    )
    jax.tree.map(np.testing.assert_array_equal, made._replace(obs=made.obs["obs"]), wanted)
    np.testing.assert_array_equal(made.obs["action"], action)
    np.testing.assert_array_equal(made.obs["reward"], wanted.reward)
    assert np.all(made.obs["after"] == 1) and env.observation_space(params).contains(made.obs)
    assert hasattr(env, "action_mask") == hasattr(inner, "action_mask") and not hasattr(
        env, "transition"
    )
    assert env == LastActionReward(envs.make(name)[0])


def test_learners_read_it_flat():
    env, params = envs.make("CartPole-v1")
    space = LastActionReward(env).observation_space(params)
    assert feature_shape(space) == (4 + 2 + 1 + 2,)
    obs = {
        "obs": jnp.arange(4.0),
        "action": jnp.int32(1),
        "reward": jnp.float32(0.5),
        "after": jnp.int32(1),
    }
    np.testing.assert_array_equal(
        features(space, obs), [0, 1, 0, 1, 0, 1, 2, 3, 0.5]
    )  # action, after, obs, reward


def test_what_each_trial_earned():
    # Two environments: the first ends in its third step, the second goes through trials 0, 0, 2, 2 (1 earned nothing).
    reward = jnp.array([[1.0, 0.0], [0.0, 2.0], [4.0, 0.5], [0.0, 8.0]])
    trial = jnp.array([[0, 0], [1, 0], [1, 2], [2, 2]])
    np.testing.assert_array_equal(returns_by_trial(reward, trial, 3), [[1, 2], [4, 0], [0, 8.5]])
    np.testing.assert_array_equal(returns_by_trial(reward, trial, 1), [[1, 2]])


def test_trials_of_an_episode_are_counted_and_paid_as_they_were():
    inner, params = envs.make("XLand-R1-5x5-Pick", num_tasks=2)
    env, params = LastActionReward(inner), params.replace(trials=3, trial_steps=6)
    key, num_envs = jax.random.key(2), 32
    first = init(key, env, params, num_envs)
    options = RolloutOptions(reset=NoReset())
    _, steps = rollout(key, first, env, params, random_policy(env), None, 20, options)
    got = np.asarray(returns_by_trial(steps.reward, steps.info["trial"], 3))
    wanted, valid = np.zeros((3, num_envs)), np.asarray(steps.valid)
    for index in range(num_envs):  # by the flag that is seen where a trial begins
        number = -1
        for time in range(valid[:, index].sum()):
            number += int(steps.obs["obs"]["start"][time, index])
            wanted[number, index] += float(steps.reward[time, index])
    np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert (got > 0).any(1).all() and (got == 0).any(1).all()
    np.testing.assert_allclose(got.sum(0), first_episodes(steps).returns, rtol=1e-6)
