"""Statistics count each episode once, and nothing that is masked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain import column, walk
from toys import Clock, ClockParams, Pair, Walk, linear

from jaxpar.rollout import NextStep, begin, check_steps, evaluate, first_episodes, random_policy, summary, unroll
from jaxpar.types import UsageError

KEY = jax.random.key(8)
WEIGHTS = {"w": jnp.array([-0.5, 0.1, 0.1]), "b": jnp.array(0.1)}
ENV = Walk()
PARAMS = ENV.default_params.replace(noise=0.6)


@pytest.fixture(scope="module")
def steps():
    return unroll(KEY, begin(KEY, ENV, PARAMS, 20, 0), ENV, PARAMS, linear, WEIGHTS, 30, reset=NextStep())[1]


def test_summary_is_that_of_the_episodes_one_by_one(steps):
    returns, lengths, cut, total = [], [], 0, 0.0
    for lane in range(20):
        sums = count = 0
        for t in range(30):
            if not steps.valid[t, lane]:
                continue
            sums, count, total = sums + float(steps.reward[t, lane]), count + 1, total + float(steps.reward[t, lane])
            if steps.terminated[t, lane] or steps.truncated[t, lane]:
                returns.append(sums), lengths.append(count)
                cut += bool(steps.truncated[t, lane]) and not bool(steps.terminated[t, lane])
                sums = count = 0
    found = {name: float(x) for name, x in summary(steps).items()}
    want = {"num_episodes": len(returns), "num_steps": int(steps.valid.sum()), "truncated": cut / len(returns)}
    want |= {"reward": total / int(steps.valid.sum())}
    for name, x in (("return", returns), ("length", lengths)):
        for of in ("mean", "std", "min", "max"):
            want[f"{name}_{of}"] = getattr(np, of)(x)
    assert found.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(found[name], want[name], 1e-4, err_msg=name)


def test_what_is_masked_never_enters(steps):
    poisoned = steps.replace(
        reward=jnp.where(steps.valid, steps.reward, jnp.nan),
        episode_return=jnp.where(steps.ended, steps.episode_return, jnp.nan),
    )
    assert {k: float(v) for k, v in summary(poisoned).items()} == {k: float(v) for k, v in summary(steps).items()}


def test_no_episode_gives_no_mean():
    env = Clock()
    params = ClockParams(length=100)
    steps = unroll(KEY, begin(KEY, env, params, 3), env, params, random_policy(env), params, 5)[1]
    found = summary(steps)
    assert found["num_episodes"] == 0 and jnp.isnan(found["return_mean"]) and jnp.isnan(found["length_max"])
    assert not first_episodes(steps).finished.any()


def test_first_episodes_have_no_bias_to_short_ones(steps):
    rows = walk(KEY, ENV, PARAMS, linear, WEIGHTS, 20, 8, jnp.int32(0), "never")
    ended = np.asarray(column(rows, "ended"))
    last = ended.argmax(0)
    want = np.asarray(column(rows, "episode_return"))[last, np.arange(20)]
    first = first_episodes(steps)
    assert first.finished.all()
    np.testing.assert_allclose(first.returns, want, 1e-5)
    np.testing.assert_array_equal(first.lengths, last + 1)
    alone = evaluate(KEY, ENV, PARAMS, linear, WEIGHTS, 20, 8, carry=0)
    for got, want in zip(alone, first, strict=True):
        np.testing.assert_allclose(got, want, 1e-5)


def test_returns_of_several_agents():
    env = Pair()
    params = env.default_params
    steps = unroll(KEY, begin(KEY, env, params, 4), env, params, random_policy(env), params, 6)[1]
    np.testing.assert_array_equal(first_episodes(steps).returns, np.tile([2.0, 30.0], (4, 1)))
    assert summary(steps)["return_mean"] == 16 and summary(steps)["truncated"] == 1


def test_faults_are_told_with_step_and_lane(steps):
    check_steps(steps)
    with pytest.raises(UsageError, match=r"at step 2 of lane 7 \(the first of 2 such steps\) the reward is nan"):
        check_steps(steps.replace(reward=steps.reward.at[2, 7].set(jnp.nan).at[5, 1].set(jnp.inf)))
    with pytest.raises(UsageError, match="at step 33 of lane 7"):
        check_steps(steps.replace(reward=steps.reward.at[3, 7].set(jnp.nan)), first_step=30)
    env = Clock()
    params = env.default_params
    clock = unroll(KEY, begin(KEY, env, params, 3), env, params, random_policy(env), params, 4)[1]
    check_steps(clock, env, params)
    with pytest.raises(UsageError, match=r"at step 1 of lane 2 .* the action 3 is not in Discrete\(n=3"):
        check_steps(clock.replace(action=clock.action.at[1, 2].set(3)), env, params)
