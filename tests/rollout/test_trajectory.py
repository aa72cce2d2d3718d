"""One rollout is a plain loop over environments and steps; flags, masks and memory are what the contract says."""

import functools

import chex
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from plain import column, walk
from toys import Clock, ClockParams, Gymnax, Pair, Walk, linear
from traced import equations

from jaxpar.rollout import (
    Chunked,
    NextStep,
    NoReset,
    RolloutOptions,
    SameStep,
    init,
    random_policy,
    rollout,
)
from jaxpar.rollout.policies import takes_mask
from jaxpar.types import UsageError

KEY = jax.random.key(3)
WEIGHTS = {"w": jnp.array([-0.5, 0.1, 0.1]), "b": jnp.array(0.1)}
ENV = Walk()
PARAMS = ENV.default_params


def value(params, obs, carry):
    return obs @ params["w"] + carry


def walked(
    num_envs=3,
    num_steps=12,
    env=ENV,
    params=PARAMS,
    policy=linear,
    weights=WEIGHTS,
    carry=0,
    **options,
):
    env_state = init(KEY, env, params, num_envs, carry)
    options = RolloutOptions(**options)
    return rollout(KEY, env_state, env, params, policy, weights, num_steps, options)


@pytest.mark.parametrize(
    ("when", "reset"),
    [("same", Chunked(2)), ("next", NextStep(SameStep())), ("never", NoReset())],
    ids=["chunked", "next", "never"],
)
def test_equals_a_plain_loop(when, reset):
    steps = walked(reset=reset, value=value)[1]
    rows = walk(KEY, ENV, PARAMS, linear, WEIGHTS, 3, 12, jnp.int32(0), when, value)
    assert column(rows, "ended").any() and not column(rows, "ended").all()
    for name in ("start", "terminated", "truncated", "ended", "episode_length", "valid"):
        np.testing.assert_array_equal(getattr(steps, name), column(rows, name), err_msg=name)
    valid = steps.valid
    for name in ("obs", "action", "reward", "bootstrap", "episode_return"):
        got, want = getattr(steps, name), column(rows, name)
        mask = valid if got.ndim == 2 else valid[..., None]
        np.testing.assert_allclose(
            jnp.where(mask, got, 0), jnp.where(mask, want, 0), 1e-5, 1e-6, err_msg=name
        )
    counts = [[row["extras"]["count"] for row in index] for index in rows]
    np.testing.assert_array_equal(
        jnp.where(valid, steps.extras["count"], 0), jnp.where(valid, np.array(counts).T, 0)
    )


@pytest.mark.parametrize(
    "reset", [Chunked(2), pytest.param(SameStep(), marks=pytest.mark.slow)], ids=["chunked", "same"]
)
def test_gradient_of_the_return_equals_the_plain_loops(reset):
    def by_unroll(weights):
        return walked(2, 9, weights=weights, reset=reset)[1].reward.sum()

    def by_loop(weights):
        return column(walk(KEY, ENV, PARAMS, linear, weights, 2, 9, jnp.int32(0)), "reward").sum()

    got, want = jax.jit(jax.grad(by_unroll))(WEIGHTS), jax.grad(by_loop)(WEIGHTS)
    chex.assert_trees_all_close(got, want, rtol=1e-4)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("prng", ["batch", pytest.param("env", marks=pytest.mark.slow)])
def test_two_unrolls_of_one_key_are_one_long_one(prng):
    env_state = init(KEY, ENV, PARAMS, 4, 0)
    options = RolloutOptions(prng=prng, value=value)
    _, whole = rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 10, options)
    env_state, first = rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 6, options)
    env_state, second = rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 4, options)
    chex.assert_trees_all_equal(
        jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second), whole
    )
    assert env_state.step == 10
    _, none = rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 0, options)
    assert none.reward.shape == (0, 4)


@pytest.mark.parametrize(
    ("ends", "expected"), [("terminated", 0.0), ("truncated", 4.0), ("both", 0.0)]
)
def test_truncation_bootstraps_and_termination_does_not(ends, expected):
    env = Clock(ends)
    _, steps = walked(
        2, 9, env, env.default_params, random_policy(env), env.default_params, (),
        value=lambda params, obs, carry: obs.astype(jnp.float32),
    )  # fmt: skip
    assert steps.truncated[3].all() == (ends != "terminated") and steps.terminated[3].all() == (
        ends != "truncated"
    )
    np.testing.assert_array_equal(steps.bootstrap[:, 0], [0, 0, 0, expected, 0, 0, 0, expected, 0])
    np.testing.assert_array_equal(steps.obs[:, 0], [0, 1, 2, 3, 0, 1, 2, 3, 0])


def test_next_step_gives_the_last_observation_and_then_ignores_an_action():
    env = Clock()
    _, steps = walked(
        1, 8, env, ClockParams(3), random_policy(env), env.default_params, (), reset=NextStep()
    )
    np.testing.assert_array_equal(steps.obs[:, 0], [0, 1, 2, 3, 0, 1, 2, 3])
    np.testing.assert_array_equal(steps.reward[:, 0], [1, 2, 3, 0, 1, 2, 3, 0])
    np.testing.assert_array_equal(steps.valid[:, 0], [1, 1, 1, 0, 1, 1, 1, 0])
    np.testing.assert_array_equal(steps.start[:, 0], [1, 0, 0, 0, 1, 0, 0, 0])
    np.testing.assert_array_equal(steps.episode_return[:, 0], [1, 3, 6, 6, 1, 3, 6, 6])


def test_an_episode_of_several_agents_ends_with_the_last():
    env = Pair()
    _, steps = walked(
        2,
        7,
        env,
        env.default_params,
        random_policy(env),
        env.default_params,
        (),
        value=lambda p, o, c: o * 1.0,
    )
    np.testing.assert_array_equal(steps.ended[:, 0], [0, 0, 1, 0, 0, 1, 0])
    np.testing.assert_array_equal(steps.terminated[:3, 0], [[0, 0], [1, 0], [1, 0]])
    np.testing.assert_array_equal(steps.bootstrap[:3, 0], [[0, 0], [0, 0], [0, 13]])
    np.testing.assert_array_equal(steps.episode_return[2, 0], [2, 30])
    np.testing.assert_array_equal(steps.obs[:4, 0, 1], [10, 11, 12, 10])


@pytest.mark.parametrize("prng", ["env", "batch"])
def test_random_actions_are_legal_and_even(prng):
    env = Clock()
    _, steps = walked(
        200, 60, env, env.default_params, random_policy(env), env.default_params, (), prng=prng
    )
    assert not (steps.action == steps.obs % 3).any()
    higher = (steps.action == (steps.obs + 1) % 3).mean()
    assert abs(higher - 0.5) < 4 * 0.5 / np.sqrt(12000)


def test_keep_says_what_is_stacked():
    kept = walked(keep=lambda row: (row.reward, row.valid))[1]
    steps = walked()[1]
    chex.assert_trees_all_equal(kept, (steps.reward, steps.valid))


@pytest.mark.parametrize(
    "name", ["Pendulum-v1", pytest.param("Catch-bsuite", marks=pytest.mark.slow)]
)
def test_gymnax_environments_run_and_keep_their_types(name):
    env, params = gymnax.make(name)
    env = Gymnax(env)
    env_state = init(KEY, env, params, 5)
    after, steps = rollout(
        KEY, env_state, env, params, random_policy(env), params, 40, RolloutOptions(prng="batch")
    )
    assert jax.tree.map(jax.typeof, after) == jax.tree.map(jax.typeof, env_state)
    assert jnp.isfinite(steps.reward).all() and steps.reward.shape == (40, 5)


def test_one_trace_whatever_the_numbers_and_instances():
    traced = []

    def counting(key, params, obs, carry):
        traced.append(1)
        return linear(key, params, obs, carry)

    for i in range(3):
        env_state = init(jax.random.key(i), Walk(), PARAMS, 3, 0)
        for _ in range(2):
            env_state, _ = rollout(
                jax.random.key(i), env_state, Walk(), PARAMS, counting, WEIGHTS, 4
            )
    once = len(traced)
    rollout(
        KEY,
        init(KEY, Walk(), PARAMS.replace(noise=0.1), 3, 0),
        Walk(),
        PARAMS,
        counting,
        WEIGHTS,
        4,
    )
    assert len(traced) == once <= 2


def test_parameters_can_be_mapped():
    noises = jnp.array([0.0, 0.5])

    def total(noise):
        params = PARAMS.replace(noise=noise)
        return rollout(KEY, init(KEY, ENV, params, 4, 0), ENV, params, linear, WEIGHTS, 15)[
            1
        ].reward.sum()

    alone = jnp.stack([total(noise) for noise in noises])
    np.testing.assert_allclose(jax.jit(jax.vmap(total))(noises), alone, 1e-5)


@pytest.mark.parametrize("unroll", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_steps_an_iteration_change_nothing(unroll):
    """Up to rounding: the compiler may fuse across steps; 12 steps, 3 an iteration, and more than there are."""
    for got, want in zip(
        jax.tree.leaves(walked(unroll=unroll)), jax.tree.leaves(walked(unroll=1)), strict=True
    ):
        np.testing.assert_allclose(got, want, 1e-5, 1e-6)


def wide(key, params, obs, carry):
    return jnp.zeros(2), carry


def test_mistakes_end_in_one_sentence():
    env_state = init(KEY, ENV, PARAMS, 4, 0)
    go = functools.partial(rollout, KEY, env_state, ENV)
    with pytest.raises(UsageError, match="num_envs=0 is not"):
        init(KEY, ENV, PARAMS, 0)
    with pytest.raises(
        UsageError, match="Walk takes parameters of type WalkParams .*not ClockParams"
    ):
        init(KEY, ENV, ClockParams(), 4)
    with pytest.raises(UsageError, match="Walk takes parameters of type WalkParams"):
        go(ClockParams(), linear, WEIGHTS, 3)
    with pytest.raises(UsageError, match=r"action has shape \(2,\); Walk takes \(\)"):
        go(PARAMS, wide, WEIGHTS, 3)
    with pytest.raises(UsageError, match="prng='rows' is unknown; legal are env and batch"):
        go(PARAMS, linear, WEIGHTS, 3, RolloutOptions(prng="rows"))
    with pytest.raises(UsageError, match="unroll=0 must be at least 1, or None"):
        RolloutOptions(unroll=0)
    with pytest.raises(UsageError, match=r"value gives shape \(3,\) an environment; legal is \(\)"):
        go(PARAMS, linear, WEIGHTS, 3, RolloutOptions(value=lambda params, obs, carry: obs))


def test_older_arguments_are_fields_of_the_options():
    env_state = init(KEY, ENV, PARAMS, 4, 0)
    go = functools.partial(rollout, KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 12)
    older = {
        "reset": NextStep(SameStep()),
        "prng": "batch",
        "value": value,
        "keep": lambda row: (row.obs, row.bootstrap, row.valid),
        "unroll": 2,
    }
    with pytest.warns(
        FutureWarning, match=r"rollout\(reset, prng, value, keep, unroll\)"
    ) as warned:
        got = go(**older)
    assert len(warned) == 1 and warned[0].filename == __file__
    want = go(RolloutOptions(**older))
    chex.assert_trees_all_equal(got, want)
    _, default = go(RolloutOptions(keep=older["keep"]))
    for one, other in zip(got[1], default, strict=True):
        assert not np.array_equal(one, other)
    with pytest.raises(TypeError, match="unexpected keyword argument 'resets'"):
        go(resets=NoReset())


def traced(policy=linear, num_steps=2, **options):
    """Returns the program of a rollout, which is not compiled."""
    env_state = init(KEY, ENV, PARAMS, 4, 0)
    options = RolloutOptions(**options)

    def run(env_state):
        return rollout(KEY, env_state, ENV, PARAMS, policy, WEIGHTS, num_steps, options)

    return jax.make_jaxpr(run)(env_state)


@pytest.mark.parametrize(("unroll", "steps"), [(3, 3), (None, 1)], ids=["three", "default"])
def test_an_iteration_of_the_loop_has_as_many_steps_as_its_option_says(unroll, steps):
    program = traced(num_steps=11, unroll=unroll)
    loops = [eqn for eqn in equations(program) if eqn.primitive.name == "scan"]
    assert [loop.params["unroll"] for loop in loops if loop.params["length"] == 11] == [steps]


def test_a_function_with_a_parameter_for_the_mask_gets_it():
    class Masked:
        def __call__(self, key, params, obs, carry, action_mask=None):
            return obs[0], carry

        def value(self, params, obs, carry, *, action_mask):
            return obs[0]

    masked = Masked()
    takers = (masked, masked.value, random_policy(ENV), functools.partial(masked, None))
    assert all(map(takes_mask, takers))
    assert not any(map(takes_mask, (linear, value, functools.partial(linear, KEY))))
    # Of policy and value each by its own signature: a mask that one does not take is an error.
    traced(linear, value=masked.value)
    traced(masked, value=value)
