"""What a value owes to what was seen before equals finite differences, and ends at an episode's start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from forks import perturbed

import envs
from envs.arcade.games import Arcade, BattleShip
from jaxpar.experimental.saliency import saliency
from jaxpar.rl import ActorCritic, Network, Ppo, Pqn
from jaxpar.rl.action_values import ActionValues
from jaxpar.types import UsageError

SMALL = Network(encoder=(6,), hidden=(), memory="min_gru", memory_size=4)


@pytest.mark.parametrize("kind", [ActionValues, pytest.param(ActorCritic, marks=pytest.mark.slow)])
def test_it_equals_finite_differences(kind, x64):
    env, steps, num_envs = Arcade(BattleShip(), "partial"), 5, 2
    agent, rng = kind(env, SMALL), np.random.default_rng(0)
    weights = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float64), perturbed(agent.init(jax.random.key(0)))
    )
    obs = rng.integers(0, 256, (steps, num_envs, 24, 24, 3)).astype(np.uint8)
    starts = np.zeros((steps, num_envs), bool)
    starts[2, 1] = True
    mask = rng.random((steps, num_envs, 36)) < 0.5
    carry = jnp.asarray(rng.normal(size=(num_envs, 4)))
    found = jit(lambda obs: saliency(agent, weights, obs, starts, carry, 3, mask))(obs)
    assert found.shape == obs.shape and found.dtype == jnp.float64

    @jit
    def value(seen):
        if kind is ActorCritic:
            return agent.apply(weights, seen, starts, carry, mask).value[3]
        return jnp.max(jnp.where(mask, agent.apply(weights, seen, starts, carry).q, -jnp.inf), -1)[
            3
        ]

    for s in range(steps):
        for index in range(num_envs):
            at = (s, index, *rng.integers(0, 24, 2), rng.integers(0, 3))
            ends = []
            for move in (1e-3, -1e-3):
                seen = obs.astype(np.float64)
                seen[at] += move
                ends.append(np.asarray(value(seen)))
            slope = (ends[0] - ends[1]) / 2e-3
            assert slope[1 - index] == 0, "environments are apart"
            np.testing.assert_allclose(found[at], slope[index], rtol=1e-6, atol=1e-12)
    size = np.abs(found).reshape(steps, num_envs, -1).max(-1)
    np.testing.assert_array_equal(size > 0, [[1, 0], [1, 0], [1, 1], [1, 1], [0, 0]])


def test_what_has_no_gradient_is_refused():
    env, _ = envs.make("RepeatFirst-Easy")
    agent = ActionValues(env, SMALL)
    with pytest.raises(UsageError, match="has no gradient: saliency takes a Box"):
        saliency(agent, {}, jnp.zeros((3, 1), jnp.int32), jnp.zeros((3, 1), bool), ())
    agent = ActionValues(Arcade(), SMALL)
    with pytest.raises(UsageError, match="time=3 is no step of 3; legal are -3 to 2"):
        saliency(agent, {}, jnp.zeros((3, 1, 32, 32, 3)), jnp.zeros((3, 1), bool), (), 3)
    team = Pqn(envs.make("Spread-3")[0], decomposition="vdn").agent()
    with pytest.raises(UsageError, match="own value: give one of decomposition='none'"):
        saliency(team, {}, jnp.zeros((3, 1, 3, 4)), jnp.zeros((3, 1), bool), ())
    with pytest.raises(UsageError, match="own value: give one of decomposition='none'"):
        saliency(
            Ppo(team.env, central=True).agent(),
            {},
            jnp.zeros((3, 1, 3, 4)),
            jnp.zeros((3, 1), bool),
            (),
        )
