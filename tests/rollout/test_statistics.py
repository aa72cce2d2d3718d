"""Statistics count each episode once, and nothing that is masked."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain import column, walk
from toys import Clock, ClockParams, Pair, Walk, linear

from jaxpar.rollout import (
    EvaluateOptions,
    NextStep,
    NoReset,
    RolloutOptions,
    check_trajectory,
    episode_stats,
    evaluate,
    first_episodes,
    init,
    random_policy,
    rollout,
)
from jaxpar.types import UsageError

KEY = jax.random.key(8)
WEIGHTS = {"w": jnp.array([-0.5, 0.1, 0.1]), "b": jnp.array(0.1)}
ENV = Walk()
PARAMS = ENV.default_params.replace(noise=0.6)


@pytest.fixture(scope="module")
def steps():
    env_state = init(KEY, ENV, PARAMS, 20, 0)
    options = RolloutOptions(reset=NextStep())
    return rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 30, options)[1]


def test_summary_is_that_of_the_episodes_one_by_one(steps):
    returns, lengths, cut, total = [], [], 0, 0.0
    for index in range(20):
        sums = count = 0
        for t in range(30):
            if not steps.valid[t, index]:
                continue
            sums, count, total = (
                sums + float(steps.reward[t, index]),
                count + 1,
                total + float(steps.reward[t, index]),
            )
            if steps.terminated[t, index] or steps.truncated[t, index]:
                returns.append(sums), lengths.append(count)
                cut += bool(steps.truncated[t, index]) and not bool(steps.terminated[t, index])
                sums = count = 0
    found = {name: float(x) for name, x in episode_stats(steps).items()}
    want = {
        "num_episodes": len(returns),
        "num_steps": int(steps.valid.sum()),
        "truncated": cut / len(returns),
    }
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
    got, want = ({k: float(v) for k, v in episode_stats(x).items()} for x in (poisoned, steps))
    assert got == want


@pytest.mark.parametrize("shape", [(500, 20), (100, 64)])
def test_a_return_that_is_nan_is_reported(steps, shape):
    """XLA for CPUs leaves NaN out of maxima of thousands."""
    many = jax.tree.map(lambda x: jnp.zeros((*shape, *x.shape[2:]), x.dtype), steps)
    returns = jnp.ones(shape).at[7, 3].set(jnp.nan)
    found = episode_stats(many.replace(ended=jnp.ones(shape, bool), episode_return=returns))
    assert not any(np.isfinite(found[f"return_{name}"]) for name in ("mean", "std", "min", "max"))


def test_no_episode_gives_no_mean():
    env = Clock()
    params = ClockParams(length=100)
    steps = rollout(KEY, init(KEY, env, params, 3), env, params, random_policy(env), params, 5)[1]
    found = episode_stats(steps)
    assert (
        found["num_episodes"] == 0
        and jnp.isnan(found["return_mean"])
        and jnp.isnan(found["length_max"])
    )
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
    alone = evaluate(KEY, ENV, PARAMS, linear, WEIGHTS, 20, 8, EvaluateOptions(carry=0))
    for got, want in zip(alone, first, strict=True):
        np.testing.assert_allclose(got, want, 1e-5)


def test_keys_of_evaluate_are_those_of_the_rollout():
    env_state = init(KEY, ENV, PARAMS, 20, 0, prng="batch")
    options = RolloutOptions(reset=NoReset(), prng="batch")
    _, steps = rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 8, options)
    want = first_episodes(steps)
    options = EvaluateOptions(carry=0, prng="batch")
    got = evaluate(KEY, ENV, PARAMS, linear, WEIGHTS, 20, 8, options)
    np.testing.assert_allclose(got.returns, want.returns, 1e-5)
    np.testing.assert_array_equal(got.lengths, want.lengths)


def test_older_arguments_of_evaluate_are_fields_of_its_options():
    """A carry that is no zero, so that an option which is lost changes what is played."""

    def policy(key, weights, obs, carry):
        return jnp.int32(carry > 1), carry

    go = functools.partial(evaluate, KEY, ENV, PARAMS, policy, WEIGHTS, 20, 8)
    with pytest.warns(FutureWarning, match=r"evaluate\(carry, prng\) is now") as warned:
        got = go(carry=2, prng="batch")
    assert len(warned) == 1 and warned[0].filename == __file__
    want = go(EvaluateOptions(carry=2, prng="batch"))
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)
    for options in (EvaluateOptions(carry=0, prng="batch"), EvaluateOptions(carry=2)):
        assert not np.array_equal(go(options).returns, want.returns)
    with pytest.raises(TypeError, match="unexpected keyword argument 'reset'"):
        go(reset=NextStep())


def test_returns_of_several_agents():
    env = Pair()
    params = env.default_params
    steps = rollout(KEY, init(KEY, env, params, 4), env, params, random_policy(env), params, 6)[1]
    np.testing.assert_array_equal(first_episodes(steps).returns, np.tile([2.0, 30.0], (4, 1)))
    assert episode_stats(steps)["return_mean"] == 16 and episode_stats(steps)["truncated"] == 1


def test_faults_are_named_by_step_and_environment(steps):
    check_trajectory(steps)
    with pytest.raises(
        UsageError,
        match=r"at step 2 of environment 7 \(the first of 2 such steps\) the reward is nan",
    ):
        check_trajectory(
            steps.replace(reward=steps.reward.at[2, 7].set(jnp.nan).at[5, 1].set(jnp.inf))
        )
    with pytest.raises(UsageError, match="at step 33 of environment 7"):
        check_trajectory(steps.replace(reward=steps.reward.at[3, 7].set(jnp.nan)), first_step=30)
    env = Clock()
    params = env.default_params
    clock = rollout(KEY, init(KEY, env, params, 3), env, params, random_policy(env), params, 4)[1]
    check_trajectory(clock, env, params)
    with pytest.raises(
        UsageError, match=r"at step 31 of environment 2 .* the action 3 is not in Discrete\(n=3"
    ):
        wrong = clock.replace(action=clock.action.at[1, 2].set(3))
        check_trajectory(wrong, env, params, first_step=30)
