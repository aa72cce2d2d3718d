"""What episodes say of themselves: promises, cuts, broken likelihoods; and the optimal policy, played."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from models import maze1d, tiger
from pomdp_worlds import Bayes, Tiger

import envs
from jaxpar.pomdp import (
    DishonestValues,
    ExactBelief,
    ParticleBelief,
    from_environment,
    simulate_many,
    solve_exact,
    summarize,
    tabular_update,
)
from jaxpar.types import UsageError

PARAMS = Tiger().default_params
EXACT = functools.cache(lambda: solve_exact(tiger()))


@dataclasses.dataclass(frozen=True)
class Listening:
    """Listens for ever, which is worth -20, and promises something."""

    promise: float
    discount = None

    def plan(self, key, env, params, belief):
        info = EXACT().plan(key, env, params, jnp.full(2, 0.5))[1]
        return jnp.zeros((), jnp.int32), info.replace(value=jnp.asarray(self.promise, jnp.float32))


def listened(promise, env=None, belief=None):
    EXACT()  # solved outside of the trace
    run = jit(
        lambda key: simulate_many(
            key, env or Tiger(), PARAMS, Listening(promise), belief or Bayes(), 5, 3
        )
    )
    return run(jax.random.key(0))


def test_an_honest_promise_is_no_optimism_though_the_episode_is_cut():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = summarize(listened(-20.0))
    np.testing.assert_allclose(got.mean, -(1 - 0.95**5) / 0.05, rtol=1e-5)
    np.testing.assert_allclose([got.promised, got.optimism], [-20, 0], atol=1e-4)


def test_a_promise_far_above_what_is_earned_is_told():
    told = r"promised -10 at the start, 1.85 ± 0 \(standard error\) more than was earned"
    with pytest.warns(DishonestValues, match=told):
        got = summarize(listened(-10.0))
    np.testing.assert_allclose(got.optimism, 10 * (1 - 0.95**4), rtol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(summarize(listened(-30.0)).optimism) < 0
        assert float(jax.jit(summarize)(listened(-10.0)).optimism) > 1


class Nan(Tiger):
    def log_likelihood(self, obs, state, action, next_state, params):
        return jnp.where(
            next_state == 0, jnp.nan, super().log_likelihood(obs, state, action, next_state, params)
        )


def test_likelihoods_that_are_no_numbers_are_summed():
    got = summarize(listened(-20.0, Nan(), ParticleBelief(8, 0.0)))
    assert int(got.unweighed) > 0 and float(got.depleted) < 1


def test_the_optimal_policy_of_tiger_is_played():
    """It opens where two answers point more often one way than the other, and listens else."""
    model, policy = tiger(), EXACT()
    run = jit(
        lambda key: simulate_many(key, model.environment, model, policy, ExactBelief(), 20, 6)
    )
    played = run(jax.random.key(0))
    opened = 0
    for actions, answers in zip(np.asarray(played.action), np.asarray(played.obs), strict=True):
        apart = 0
        for action, answer in zip(actions, answers, strict=True):
            assert action == (0 if abs(apart) < 2 else 2 if apart < 0 else 1), (apart, action)
            opened += action != 0
            apart = apart + (1 if answer == 1 else -1) if action == 0 else 0
    assert opened > 6
    np.testing.assert_allclose(played.value[:, 0], 19.371368, atol=2e-3)


def test_exact_beliefs_are_bayes_and_forget_what_ended():
    model, belief = maze1d(), ExactBelief()
    first = belief.init(jax.random.key(0), model.environment, model)
    after, told = belief.update(
        jax.random.key(0), first, jnp.asarray(1), jnp.asarray(0), model.environment, model
    )
    want, chance = tabular_update(model, model.start, 1, 0)
    np.testing.assert_allclose(np.exp(after.log_weights), want, atol=1e-6)
    np.testing.assert_allclose(told.log_evidence, np.log(chance), rtol=1e-5)
    assert not bool(told.depleted) and after.sample(jax.random.key(0), 4).dtype == jnp.int32
    corner = first.replace(log_weights=jnp.log(jnp.asarray([1.0, 0, 0, 0])))
    lost, told = belief.update(
        jax.random.key(0), corner, jnp.asarray(0), jnp.asarray(1), model.environment, model
    )
    assert bool(told.depleted) and np.exp(lost.log_weights).tolist() == [1, 0, 0, 0]
    # A quarter of the mass ends at each step, and an episode that goes on is not there.
    ending = dataclasses.replace(
        model, transition=jnp.asarray([[[0.75, 0, 0, 0.25]] * 3 + [[0, 0, 0, 1]]] * 2)
    )
    ending = ending.replace(
        terminal=jnp.asarray([False, False, False, True]), observation=jnp.full((2, 4, 2), 0.5)
    )
    after, told = belief.update(
        jax.random.key(0), first, jnp.asarray(0), jnp.asarray(1), ending.environment, ending
    )
    np.testing.assert_allclose(np.exp(after.log_weights), [1, 0, 0, 0], atol=1e-6)


def test_environments_with_arrays_are_played_and_others_refused():
    env, params = envs.make("Tiger")
    belief = ExactBelief().init(jax.random.key(0), env, params)
    assert jax.tree.structure(belief.states) == jax.tree.structure(
        env.init(jax.random.key(0), params)
    )
    action, info = EXACT().plan(jax.random.key(0), env, params, belief)
    assert (
        int(action) == 0
        and info.values.shape == (3,)
        and float(info.values[0]) == float(info.value)
    )
    rocks, numbers = envs.make("RockSample-2-2")
    with pytest.raises(UsageError, match="states that are one integer"):
        ExactBelief().init(jax.random.key(0), rocks, numbers)
    with pytest.raises(UsageError, match="made outside of jit"):
        jax.eval_shape(lambda p: ExactBelief().init(jax.random.key(0), env, p), params)
    with pytest.raises(UsageError, match="chances or weighted particles"):
        EXACT().plan(jax.random.key(0), env, params, jnp.ones(3))
    assert from_environment(env, params).environment.name == "Tabular-2-3-2"
