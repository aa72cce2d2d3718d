"""The two smallest models against plain twins: rewards, what can follow, and what can be seen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import envs
from jaxpar.env import reset, step
from jaxpar.pomdp import check_model


class TigerTwin:
    """Rules as ordinary code; the placing of the tiger is read from the other side."""

    def __init__(self, tiger):
        self.tiger = tiger

    def step(self, action, placed):
        if action == 0:
            assert placed == self.tiger, "a listen moves nobody"
            return -1.0
        reward = -100.0 if action - 1 == self.tiger else 10.0
        self.tiger = placed
        return reward


class BabyTwin:
    def __init__(self, hungry):
        assert hungry == 0
        self.hungry = hungry

    def step(self, action, becomes):
        reward = (-10.0 if self.hungry else 0.0) + (-5.0 if action == 1 else 0.0)
        if action == 1:
            assert becomes == 0
        elif self.hungry:
            assert becomes == 1
        self.hungry = becomes
        return reward


def walked(name, num_steps):
    """States `[T + 1]`, actions, observations and rewards `[T]` of one long episode of random actions."""
    env, params = envs.make(name)

    def one(state, key):
        action_key, step_key = jax.random.split(key)
        action = env.action_space(params).sample(action_key)
        made = step(step_key, env, state, action, params)
        return made.state, (jax.tree.leaves(made.state)[0], action, made.obs, made.reward)

    _, first = reset(jax.random.key(0), env, params)
    _, made = jax.jit(lambda keys: jax.lax.scan(one, first, keys))(
        jax.random.split(jax.random.key(1), num_steps)
    )
    states, actions, seen, rewards = (np.asarray(x) for x in made)
    return np.concatenate([[jax.tree.leaves(first)[0]], states]), actions, seen, rewards


@pytest.mark.parametrize("num_steps", [1000, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, twin", [("Tiger", TigerTwin), ("CryingBaby", BabyTwin)])
def test_equals_its_twin(name, twin, num_steps):
    states, actions, seen, rewards = walked(name, num_steps)
    other = twin(states[0])
    assert [other.step(a, s) for a, s in zip(actions, states[1:], strict=True)] == rewards.tolist()
    # What is seen: five standard errors around the stated frequencies.
    listened = actions == 0 if name == "Tiger" else states[1:] == 1
    right, p = (seen == states[1:], 0.85) if name == "Tiger" else (seen == 1, 0.8)
    for which, chance in ((listened, p), (~listened, 0.5 if name == "Tiger" else 0.1)):
        assert abs(right[which].mean() - chance) < 5 * np.sqrt(chance * (1 - chance) / which.sum())


@pytest.mark.parametrize("name", ["Tiger", "CryingBaby"])
def test_the_arrays_are_the_model(name):
    assert "tabular" in check_model(*envs.make(name)).checks


def test_pictures_tell_the_states_apart():
    for name in ("Tiger", "CryingBaby"):
        env, params = envs.make(name)
        state = env.init(jax.random.key(0), params)
        images = [
            env.render(jax.tree.map(lambda x, s=s: jnp.full_like(x, s), state), params)
            for s in (0, 1)
        ]
        assert images[0].dtype == jnp.uint8 and (images[0] != images[1]).any()
