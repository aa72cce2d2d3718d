"""An environment that tells the last action and reward steps as the one inside, and learners read it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from jaxpar.env import reset, step
from jaxpar.rl import Recalling
from jaxpar.rl.features import feature_shape, features


@pytest.mark.parametrize("name", ["CartPole-v1", "Spread-3", "Combat-3v3"])
def test_it_steps_as_the_one_inside_and_tells(name):
    inner, params = envs.make(name)
    env = Recalling(inner)
    key = jax.random.key(0)
    obs, state = reset(key, env, params)
    bare, bare_state = reset(key, inner, params)
    jax.tree.map(np.testing.assert_array_equal, obs["obs"], bare)
    assert not np.any(obs["after"]) and not np.any(obs["reward"])
    action = env.action_space(params).sample(jax.random.key(1))
    made, wanted = step(key, env, state, action, params), step(key, inner, bare_state, action, params)
    jax.tree.map(np.testing.assert_array_equal, made._replace(obs=made.obs["obs"]), wanted)
    np.testing.assert_array_equal(made.obs["action"], action)
    np.testing.assert_array_equal(made.obs["reward"], wanted.reward)
    assert np.all(made.obs["after"] == 1) and env.observation_space(params).contains(made.obs)
    assert hasattr(env, "action_mask") == hasattr(inner, "action_mask") and not hasattr(env, "transition")
    assert env == Recalling(envs.make(name)[0])


def test_learners_read_it_flat():
    env, params = envs.make("CartPole-v1")
    space = Recalling(env).observation_space(params)
    assert feature_shape(space) == (4 + 2 + 1 + 2,)
    obs = {"obs": jnp.arange(4.0), "action": jnp.int32(1), "reward": jnp.float32(0.5), "after": jnp.int32(1)}
    np.testing.assert_array_equal(features(space, obs), [0, 1, 0, 1, 0, 1, 2, 3, 0.5])  # action, after, obs, reward
