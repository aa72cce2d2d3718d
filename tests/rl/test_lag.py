"""Actors that act by older weights, and V-trace between them and the learner."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

import envs
from jaxpar.rl import A2c, Network, Ppo, vtrace
from jaxpar.rl.collect import RolloutStart, RolloutWeights, collect
from jaxpar.rl.distributions import log_prob
from jaxpar.rl.returns import next_values
from jaxpar.rollout import rollout
from jaxpar.types import UsageError

CART, CART_PARAMS = envs.make("CartPole-v1")
PARAMS = CART_PARAMS.replace(max_steps=3)
AT_ONCE = A2c(CART, Network(hidden=(4,)), num_envs=3, num_steps=5)
LATE = dataclasses.replace(AT_ONCE, lag=2)


@pytest.fixture(scope="module")
def walked():
    """States of three updates and the first, with a rate at which weights move by much."""
    state, step, states = jit(LATE.init)(jax.random.key(0), PARAMS), jit(LATE.step), []
    state = state.replace(rates=state.rates.replace(learning_rate=jnp.float32(0.3)))
    for update in range(4):
        states.append(state)
        state, info = step(jax.random.key(update + 1), state, PARAMS)
    return states, state, info


def test_weights_of_two_updates_ago_act(walked):
    states, last, info = walked
    for place, state in enumerate([*states, last]):
        for row, ago in enumerate((2, 1)):
            want = states[max(place - ago, 0)].weights
            jax.tree.map(
                lambda x, y, row=row: np.testing.assert_array_equal(x[row], y), state.older, want
            )
    act_key = jax.random.split(jax.random.key(4))[0]
    env_state, _ = rollout(
        act_key, states[3].env_state, CART, PARAMS, LATE.agent(), states[1].weights, 5
    )
    np.testing.assert_array_equal(env_state.obs, last.env_state.obs)
    assert (
        info["ratio_error"] <= 16 * EXACT_MATHS["float32"]
    )  # what is learned from is of the weights before


def test_a_batch_of_older_weights_is_v_traces_by_the_weights_that_learn(walked):
    state = walked[0][3]
    agent, older = LATE.agent(), jax.tree.map(lambda x: x[0], state.older)
    args = jax.random.key(9), RolloutStart(env_state=state.env_state), agent, PARAMS
    both = RolloutWeights(learned=state.weights, behaviour=older)
    alone = RolloutWeights(learned=older)

    @jit
    def pieces():
        after, batch, steps = collect(*args, both, state.rates, 5)
        by_older = collect(*args, alone, state.rates, 5)[1]
        out = agent.apply(state.weights, batch.obs, batch.start, batch.carry)
        led_to = agent.apply(state.weights, walked_on(steps), batch.start, batch.carry).value
        last = agent.apply(state.weights, after.obs[None], batch.start[:1], batch.carry).value[0]
        return batch, steps, by_older, out, led_to, last

    batch, steps, by_older, out, led_to, last = pieces()
    np.testing.assert_array_equal(batch.raw_action, by_older.raw_action)
    now = log_prob(agent.action_space, out.policy, batch.raw_action)
    assert_close((batch.value, batch.log_prob), (out.value, now), EXACT_MATHS["float32"])
    assert np.abs(np.asarray(now - by_older.log_prob)).max() > 0.1
    # Every episode is cut after three steps: its bootstrap is the value by the weights that learn.
    assert steps.truncated.any()
    np.testing.assert_allclose(steps.bootstrap, np.where(steps.truncated, led_to, 0), atol=1e-5)
    following = next_values(batch.value, last, steps.ended, steps.bootstrap)
    want = vtrace(
        now - by_older.log_prob, steps.reward, batch.value, following, steps.ended, 0.99, 1.0
    )
    assert_close((batch.target, batch.advantage), want, 100 * EXACT_MATHS["float32"])


def walked_on(steps):
    """What each step led to, also at an episode's end."""

    def one(obs, action):
        state = CART.init(jax.random.key(0), PARAMS)
        names = ("x", "x_dot", "theta", "theta_dot")
        state = state.replace(**dict(zip(names, obs, strict=True)))
        state = CART.transition(jax.random.key(0), state, action, PARAMS)
        return CART.observe(jax.random.key(0), state, action, PARAMS)

    return jax.vmap(jax.vmap(one))(steps.obs, steps.action)


@pytest.mark.slow  # half a minute of compiling, for both
@pytest.mark.parametrize("kind", ["a2c", "ppo"])
def test_the_first_update_of_a_lag_is_that_of_none(kind):
    ppo = Ppo(CART, Network(hidden=(4,)), num_envs=3, num_steps=4, epochs=1, minibatches=2)
    at_once = AT_ONCE if kind == "a2c" else ppo
    made = []
    for learner in (
        at_once,
        dataclasses.replace(at_once, lag=1),
        dataclasses.replace(at_once, lag=1, correct=False),
    ):
        state = jit(learner.init)(jax.random.key(0), PARAMS)
        made.append(jit(learner.step)(jax.random.key(1), state, PARAMS)[0])
    assert made[0].older is None
    plain, corrected, uncorrected = (state.replace(older=None) for state in made)
    assert_close(corrected.weights, plain.weights, 100 * EXACT_MATHS["float32"])
    jax.tree.map(np.testing.assert_array_equal, uncorrected, plain)


def test_no_lag_into_the_future():
    with pytest.raises(UsageError, match="lag=-1 must be at least 0"):
        dataclasses.replace(AT_ONCE, lag=-1)
