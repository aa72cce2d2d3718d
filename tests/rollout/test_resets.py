"""Reset policies: exact, once a finished environment, from where they say."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from toys import Clock, Walk, linear

from jaxpar.rollout import (
    Chunked,
    GivenLevel,
    NextStep,
    NoReset,
    Pool,
    RolloutOptions,
    SameStep,
    init,
    random_policy,
    rollout,
)
from jaxpar.rollout.costs import operations
from jaxpar.rollout.env_state import vmapped_reset
from jaxpar.rollout.prng import env_keys, step_keys
from jaxpar.rollout.resets import reset_finished
from jaxpar.types import UsageError

KEY = jax.random.key(5)
WEIGHTS = {"w": jnp.array([-0.5, 0.1, 0.1]), "b": jnp.array(0.1)}
ENV = Walk()
PARAMS = ENV.default_params


@pytest.mark.parametrize(("prng", "size"), [("env", 3), ("batch", 16), ("batch", None)])
def test_chunks_give_each_finished_environment_its_own_start_and_leave_the_others(prng, size):
    base, index = step_keys(KEY, jnp.arange(1), 3, prng)[0, 2], jnp.arange(50, 90)
    finished = jax.random.bernoulli(KEY, 0.4, (40,))
    before = jax.tree.map(
        lambda x: x - 100, vmapped_reset(ENV, PARAMS, env_keys(base, index - 50), None)
    )
    go = jax.jit(
        lambda policy, flags: reset_finished(policy, ENV, PARAMS, base, index, flags, None, before)
    )
    want = go(SameStep(), finished)
    chex.assert_trees_all_equal(go(Chunked(size), finished), want)
    chex.assert_trees_all_equal(go(Chunked(size), jnp.zeros(40, bool)), before)
    chex.assert_trees_all_equal(
        go(Chunked(size), jnp.ones(40, bool)), go(SameStep(), jnp.ones(40, bool))
    )
    fresh = want[1].time == 0
    np.testing.assert_array_equal(fresh, finished)


@dataclasses.dataclass(frozen=True)
class Told(Clock):
    """A clock that tells the host whenever it is begun."""

    told: tuple = ()

    def init(self, key, params):
        jax.debug.callback(TOLD.append, jax.random.key_data(key))
        return jnp.int32(0)


TOLD = []


def test_every_finished_environment_is_reset_once_and_nothing_without_one():
    env = Told()
    params = env.default_params

    def resets(reset, num_steps):
        env_state = init(KEY, env, params, 6)
        jax.effects_barrier()
        TOLD.clear()
        options = RolloutOptions(reset=reset)
        jax.block_until_ready(
            rollout(KEY, env_state, env, params, random_policy(env), params, num_steps, options)
        )
        jax.effects_barrier()
        return len(TOLD)

    assert resets(Chunked(2), 3) == 0
    assert resets(Chunked(2), 4) == 6 == len({tuple(np.ravel(key)) for key in TOLD})
    assert resets(Chunked(4), 8) == 2 * 8  # two turns of four for six environments, twice
    assert resets(SameStep(), 4) == 4 * 6
    assert resets(NoReset(), 8) == 0


@pytest.mark.parametrize("prng", ["batch", pytest.param("env", marks=pytest.mark.slow)])
def test_levels_after_chunked_resets_have_their_frequencies(prng):
    env_state = init(KEY, ENV, PARAMS, 64, 0)
    options = RolloutOptions(reset=Chunked(3), prng=prng)
    _, steps = rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 300, options)
    began = np.asarray(steps.start)
    assert began[1:].sum() > 2000
    levels = np.asarray(steps.obs[..., 2])[began].astype(int)
    assert stats.chisquare(np.bincount(levels, minlength=5)).pvalue > 1e-3
    # A pool of a few states has not: this test can fail.
    options = RolloutOptions(reset=Pool(6), prng=prng)
    _, steps = rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 300, options)
    levels = np.asarray(steps.obs[1:, :, 2])[np.asarray(steps.start[1:])].astype(int)
    assert stats.chisquare(np.bincount(levels, minlength=5)).pvalue < 1e-3


def test_a_pool_gives_its_states_evenly():
    env_state = init(KEY, ENV, PARAMS, 32, 0)
    options = RolloutOptions(reset=Pool(4))
    _, steps = rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 200, options)
    seen = np.asarray(steps.obs[1:])[np.asarray(steps.start[1:])]
    states, counts = np.unique(seen[:, 1], return_counts=True)
    assert len(states) == 4 and stats.chisquare(counts).pvalue > 1e-3


def test_given_levels_for_all_environments_or_one_a_environment():
    each = jnp.arange(8) % 5
    for level, want in ((jnp.int32(3), jnp.full(8, 3)), (each, each)):
        env_state = init(KEY, ENV, PARAMS, 8, 0, level=level)
        for reset in (GivenLevel(level), NextStep(GivenLevel(level))):
            options = RolloutOptions(reset=reset)
            _, steps = rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 20, options)
            assert steps.start[1:].any()
            np.testing.assert_array_equal(steps.obs[..., 2], jnp.broadcast_to(want, (20, 8)))


def test_only_legal_policies():
    env_state = init(KEY, ENV, PARAMS, 4, 0)
    for make, said in (
        (lambda: Chunked(0), "Chunked.size=0 must be at least 1"),
        (lambda: Pool(-1), "Pool.size=-1 must be at least 1"),
        (
            lambda: NextStep(NoReset()),
            r"NextStep\(by=NoReset\) contradicts itself; legal are Chunked, SameStep",
        ),
        (lambda: NextStep(NextStep()), "contradicts itself"),
    ):
        with pytest.raises(UsageError, match=said):
            make()
    with pytest.raises(
        UsageError, match="reset='same' is no reset policy; legal are Chunked, GivenLevel"
    ):
        rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 3, RolloutOptions(reset="same"))
    with pytest.raises(
        UsageError, match=r"level: itself of shape \(3,\) is not a level of Walk; legal are \(\)"
    ):
        init(KEY, ENV, PARAMS, 4, level=jnp.zeros(3, jnp.int32))
    env = Clock()
    with pytest.raises(UsageError, match="Clock takes no level"):
        init(KEY, env, env.default_params, 4, level=jnp.int32(0))


def test_operations_of_a_program():
    x = jnp.ones((3, 4))
    assert operations(lambda x: x + 1, x) == 12
    assert operations(lambda x: x @ x.T, x) == 12 + 2 * 9 * 4
    assert operations(lambda x: jax.lax.fori_loop(0, 5, lambda i, x: x * 2, x), x) >= 60
    assert (
        operations(lambda x: jax.lax.cond(True, lambda x: x, lambda x: jnp.sin(x) + 1, x), x) >= 24
    )
    assert operations(lambda key: jax.random.bits(key, (7,)), KEY) == 700
