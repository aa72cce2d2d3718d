"""Populations: whom the worst take after, by hand, and what they take."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

import envs
from jaxpar.rl import A2c, A2cRates, Network, Pbt, Seeds
from jaxpar.rl.population import taken_after
from jaxpar.types import UsageError

CART, CART_PARAMS = envs.make("CartPole-v1")
PARAMS = CART_PARAMS.replace(max_steps=3)
LEARNER = A2c(CART, Network(hidden=(3,)), A2cRates(anneal=100.0), num_envs=2, num_steps=4)
POPULATION = Pbt(
    LEARNER, 4, period=2, perturb=("learning_rate", "entropy_coef"), factor=1.5, spread=2.0
)


def test_the_worst_take_after_the_best_alone():
    score = jnp.array([5.0, jnp.nan, 1.0, 9.0, 7.0, 3.0, 2.0, 8.0])
    taken = np.stack(
        jax.vmap(lambda key: taken_after(key, score, 2))(jax.random.split(jax.random.key(0), 50))
    )
    np.testing.assert_array_equal(
        taken[:, [0, 3, 4, 5, 6, 7]], np.tile([0, 3, 4, 5, 6, 7], (50, 1))
    )
    assert set(taken[:, 1]) == set(taken[:, 2]) == {3, 7} and (taken[:, 1] != taken[:, 2]).any()
    nobody = taken_after(jax.random.key(0), jnp.array([2.0, 2.0, jnp.nan, jnp.nan]), 2)
    assert set(np.asarray(nobody[2:])) <= {0, 1}
    np.testing.assert_array_equal(
        taken_after(jax.random.key(1), jnp.full(4, jnp.nan), 2), np.arange(4)
    )
    np.testing.assert_array_equal(taken_after(jax.random.key(1), jnp.ones(4), 2), np.arange(4))


def test_every_second_update_the_worst_goes_on_from_the_best_with_other_rates():
    state = jit(POPULATION.init)(jax.random.key(0), PARAMS)
    for name in POPULATION.perturb:
        times = np.asarray(getattr(state.rates, name) / getattr(LEARNER.rates, name))
        assert (times >= 0.5).all() and (times <= 2).all() and np.ptp(times) > 0.1
    score = {"return_mean": jnp.array([2.0, 4.0, 3.0, 1.0]), "length_mean": jnp.ones(4)}
    # Who did what is set by hand: an update in which no episode ends keeps it.
    endless = PARAMS.replace(max_steps=10**6)
    state = state.replace(episode_stats=score)
    step, alone = jit(POPULATION.step), jit(Seeds(LEARNER, 4).step)
    for update in range(2):
        key = jax.random.key(update + 1)
        want, _ = alone(key, state, endless)
        state, info = step(key, state, endless)
        np.testing.assert_array_equal(state.env_state.obs, want.env_state.obs)
        np.testing.assert_array_equal(state.episode_stats["return_mean"], score["return_mean"])
        assert info["replaced"] == update and "seed_03" in info
        source = np.array([0, 1, 2, 1 if update else 3])
        for name in ("weights", "opt_state"):
            jax.tree.map(
                lambda x, y, source=source: np.testing.assert_allclose(x, y[source], rtol=1e-5, atol=1e-7),
                getattr(state, name), getattr(want, name),
            )  # fmt: skip
        for each in dataclasses.fields(LEARNER.rates):
            times = np.asarray(
                getattr(state.rates, each.name) / getattr(want.rates, each.name)[source]
            )
            np.testing.assert_allclose(times[:3], 1, rtol=1e-6)
            moved = update and each.name in POPULATION.perturb
            assert np.isclose(times[3], [1.5, 1 / 1.5] if moved else [1.0], rtol=1e-5).any()


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"num_seeds": 1}, "a population of num_seeds=1 has nobody to take after"),
        (
            {"perturb": ("discount",)},
            "perturb names 'discount'; legal are rates without a greatest value: learning_rate",
        ),
        ({"period": 0}, "period=0 must be at least 1"),
        ({"share": 0.6}, "share=0.6 must be"),
    ],
)
def test_mistakes_are_told(fields, words):
    with pytest.raises(UsageError, match=words):
        dataclasses.replace(POPULATION, **fields)
