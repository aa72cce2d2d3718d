"""Running moments equal NumPy's of all that was seen at once; learners scale by them, save them, and freeze them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

import envs
from jaxpar.rl import A2c, Items, Network, Ppo, Sac, Td3
from jaxpar.rl.moments import (
    Returns,
    discounted,
    no_moments,
    reward_factor,
    seen_returns,
    standardised,
    with_batch,
)
from jaxpar.rl.twin_critics import standard_rows
from jaxpar.types import UsageError

LEARNERS = {
    "ppo": lambda env, **on: Ppo(env, Network(hidden=(8,)), num_envs=4, num_steps=6, epochs=1, minibatches=1, **on),
    "td3": lambda env, **on: Td3(env, Network(hidden=(8,)), num_envs=4, num_steps=6, gradient_steps=1, batch_size=8,
                                 warmup=8, **on),
}  # fmt: skip


def drawn(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape) * 3 + 5


def test_batches_merge_into_the_moments_of_all(x64):
    parts = [
        (drawn(i, 3, 2 + i, 4), np.random.default_rng(i).integers(0, 2, (3, 2 + i)) * 1.0)
        for i in range(4)
    ]

    def fold(parts):
        moments = no_moments((4,))
        for x, weight in parts:
            moments = with_batch(moments, x, weight)
        return moments

    got = jit(fold)([(jnp.asarray(x), jnp.asarray(w)) for x, w in parts])
    rows = np.concatenate([x[w > 0] for x, w in parts])
    want = {"count": float(len(rows)), "mean": rows.mean(0), "variance": rows.var(0)}
    assert_close(vars(got), want, EXACT_MATHS["float64"])
    obs = drawn(9, 5, 2, 4) * 4
    scaled = np.clip((obs - rows.mean(0)) / np.sqrt(rows.var(0) + 1e-6), -10, 10)
    assert_close(
        {"obs": standardised(got, jnp.asarray(obs))}, {"obs": scaled}, EXACT_MATHS["float64"]
    )
    assert (np.abs(scaled) == 10).any() and (np.abs(scaled) < 10).any()


def test_nothing_seen_changes_nothing_and_no_gradient_flows():
    empty = with_batch(no_moments((2,)), jnp.ones((3, 2)), jnp.zeros(3))
    assert_close(vars(empty), {"count": 0.0, "mean": np.zeros(2), "variance": np.ones(2)}, 0.0)
    seen = with_batch(no_moments((2,)), jnp.asarray(drawn(0, 8, 2), jnp.float32), jnp.ones(8))

    def total(moments, x):
        return jnp.sum(standardised(with_batch(moments, x, jnp.ones(3)), jnp.ones((3, 2))))

    for slope in jax.tree.leaves(jax.grad(total, (0, 1))(seen, jnp.ones((3, 2)))):
        assert not np.asarray(slope).any()
    assert standardised(None, empty) is empty and reward_factor(None) == 1.0


def test_returns_are_discounted_within_episodes(x64):
    reward, done = drawn(0, 7, 3), np.random.default_rng(1).random((7, 3)) < 0.4
    weight = np.where(np.arange(7)[:, None] == 5, 0.0, 1.0) * np.ones((7, 3))
    running, sums = np.array([1.0, -2.0, 0.5]), []
    for t in range(7):
        running = 0.9 * running + reward[t] * weight[t]
        sums.append(running)
        running = np.where(done[t], 0.0, running)
    start = Returns(jnp.array([1.0, -2.0, 0.5]), no_moments())
    args = jnp.asarray(reward), jnp.asarray(done)
    got = jit(lambda: seen_returns(start, args[0], args[1], jnp.asarray(weight), 0.9))()
    kept = np.array(sums)[weight > 0]
    want = {
        "running": running,
        "count": float(len(kept)),
        "mean": kept.mean(),
        "variance": kept.var(),
    }
    assert_close({"running": got.running, **vars(got.moments)}, want, EXACT_MATHS["float64"])
    assert_close(
        {"factor": reward_factor(got)},
        {"factor": 1 / np.sqrt(kept.var() + 1e-6)},
        EXACT_MATHS["float64"],
    )
    halves = discounted(
        discounted(start.running, args[0][:3], args[1][:3], 0.9)[0], args[0][3:], args[1][3:], 0.9
    )[0]
    assert_close(
        {"running": halves},
        {"running": discounted(start.running, *args, 0.9)[0]},
        EXACT_MATHS["float64"],
    )


@pytest.mark.parametrize("name", LEARNERS)
def test_a_learner_sees_every_step_once_and_scales_after(name):
    env, params = envs.make("Pendulum-v1")
    plain, learner = (
        LEARNERS[name](env),
        LEARNERS[name](env, normalize_obs=True, normalize_returns=True),
    )
    states = [jit(which.init)(jax.random.key(0), params) for which in (plain, learner)]
    assert "moments" not in states[0].weights and states[0].returns is None
    steps = [jit(which.step) for which in (plain, learner)]
    (first, _), (one, info) = (
        step(jax.random.key(1), s, params) for step, s in zip(steps, states, strict=True)
    )
    # Nothing was seen before the first update, so that it is the one without moments.
    rest = {key: part for key, part in one.weights.items() if key != "moments"}
    assert_close(rest, first.weights, 1e-6)
    count, moments = learner.num_envs * learner.num_steps, one.weights["moments"]
    assert float(moments.count) == count and float(one.returns.moments.count) == count
    two, _ = steps[1](jax.random.key(2), one, params)
    other, _ = steps[0](jax.random.key(2), first, params)
    assert float(two.weights["moments"].count) == 2 * count
    change = np.asarray(two.env_state.obs - other.env_state.obs)
    assert np.abs(change).max() > 0  # it acts on what is standardised
    assert np.isfinite(float(info["grad_norm"]))
    # Evaluation reads moments and moves none: they are part of the weights that it is given.
    agent, obs = learner.agent(greedy=True), jnp.array([0.5, 0.5, 3.0])
    act = agent(jax.random.key(0), two.weights, obs, agent.first_carry())[0]
    bare = {key: part for key, part in two.weights.items() if key != "moments"}
    by_hand = agent(
        jax.random.key(0), bare, standardised(two.weights["moments"], obs), agent.first_carry()
    )[0]
    assert_close({"action": act}, {"action": by_hand}, 1e-6)
    assert jax.tree.structure(learner.axes(), is_leaf=lambda x: isinstance(x, tuple)) is not None
    assert learner.axes().returns.running == ("envs",) and learner.axes().weights[
        "moments"
    ].mean == (None,)


def test_drawn_experience_is_scaled_by_what_was_seen_since():
    env, params = envs.make("Pendulum-v1")
    learner = LEARNERS["td3"](env, normalize_obs=True)
    state = jit(learner.init)(jax.random.key(0), params)
    state, _ = jit(learner.step)(jax.random.key(1), state, params)
    rows = state.buffer.rows
    scaled = standard_rows(state.weights, rows)
    assert_close(
        {"obs": scaled.obs}, {"obs": standardised(state.weights["moments"], rows.obs)}, 0.0
    )
    assert set(state.target_weights) == {"actor", "critics"} and set(state.opt_state) == {
        "actor",
        "critics",
    }
    assert standard_rows({}, rows).obs is rows.obs


def test_agents_that_ended_are_not_counted():
    env, params = envs.make("Spread-3")
    learner = Ppo(env, Network(hidden=(4,)), num_envs=2, num_steps=3, minibatches=1, epochs=1, normalize_obs=True,
                  normalize_returns=True)  # fmt: skip
    state = jit(learner.init)(jax.random.key(0), params)
    going = state.env_state.replace(start=jnp.zeros(2, bool))
    gone = dataclasses.replace(
        state, agent_done=state.agent_done.at[0, 0].set(True), env_state=going
    )
    state, _ = jit(learner.step)(jax.random.key(1), gone, params)
    assert (
        state.returns.running.shape == (2, 3)
        and float(state.weights["moments"].count) == 2 * 3 * 3 - 1
    )


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: A2c(envs.make("Sokoban-6x6")[0], normalize_obs=True),
            "Sokoban-6x6 .* takes a Box of floats",
        ),
        (
            lambda: Ppo(envs.make("TSP-10")[0], Items(8, 2), normalize_obs=True),
            "leave it False with Items",
        ),
        (lambda: Sac(envs.make("CartPole-v1")[0], normalize_obs=True), "bounds"),
    ],
)
def test_what_has_no_moments_is_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()
