"""MADE and PixelCNN++: normalised, causal, and sampled in fewer evaluations to the integers of the plain order."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.experimental.autoregressive import Made, PixelCnn
from jaxpar.solve.causal import check_causal
from jaxpar.solve.fixed_point import Jacobi
from jaxpar.solve.gauss_seidel import GaussSeidel
from jaxpar.solve.sequential import Sequential
from jaxpar.types import UsageError

METHODS = [Jacobi(), pytest.param(GaussSeidel(block=7), marks=pytest.mark.slow)]


def grown(params, factor):
    """Weights of a trained scale rather than of initialisation."""
    return jax.tree.map(lambda w: factor * w, params)


MADE = Made(num_dims=6, hidden=(16, 11))
SMALL = PixelCnn(height=2, width=2, levels=3, channels=4, num_blocks=1, mixtures=2)
CNN = PixelCnn(height=6, width=5, levels=16, channels=4, num_blocks=1, mixtures=2)


def everything(levels, num):
    return jnp.array(list(itertools.product(range(levels), repeat=num)), jnp.int32)


def test_made_is_a_distribution_and_samples_follow_it():
    params = grown(MADE.init(jax.random.key(0)), 2.0)
    x = everything(2, 6)
    p = jnp.exp(jax.jit(jax.vmap(lambda x: MADE.log_prob(params, x)))(x))
    assert abs(p.sum() - 1) < 1e-5
    drawn = jax.jit(lambda key: MADE.sample(key, params, 20_000))(jax.random.key(1))
    counts = np.bincount(np.asarray(drawn @ (2 ** jnp.arange(5, -1, -1))), minlength=64)
    # Chi-square of 63 degrees of freedom: 120 has a probability of 1e-5.
    assert ((counts - 20_000 * p) ** 2 / (20_000 * p)).sum() < 120


@pytest.mark.slow
def test_pixel_cnn_is_a_distribution_and_samples_follow_it():
    params = grown(jax.jit(SMALL.init)(jax.random.key(0)), 1.5)
    x = everything(3, 4).reshape(-1, 2, 2)
    p = jnp.exp(jax.jit(jax.vmap(lambda x: SMALL.log_prob(params, x)))(x))
    assert abs(p.sum() - 1) < 1e-5
    drawn = jax.jit(lambda key: SMALL.sample(key, params, 4000))(jax.random.key(1)).reshape(-1, 4)
    counts = np.bincount(np.asarray(drawn @ (3 ** jnp.arange(3, -1, -1))), minlength=81)
    common = np.asarray(4000 * p > 5)
    chi = ((counts - 4000 * p) ** 2 / (4000 * p))[common].sum()
    assert chi < 150  # 80 degrees of freedom: 1e-6


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "model",
    [Made(num_dims=40, hidden=(32,)), pytest.param(CNN, marks=pytest.mark.slow)],
    ids=["made", "pixel_cnn"],
)
def test_samples_are_those_of_the_plain_order(model, method):
    params = grown(jax.jit(model.init)(jax.random.key(2)), 1.5)
    draw = jax.jit(
        lambda key, method: model.sample(key, params, 8, method=method, with_stats=True),
        static_argnums=1,
    )
    got, stats = draw(jax.random.key(3), method)
    want, plain = draw(jax.random.key(3), Sequential())
    assert jnp.array_equal(got, want)
    assert stats.converged.all() and len(np.unique(got)) > 1
    assert (stats.iterations < plain.iterations).all()
    other = draw(jax.random.key(4), method)[0]
    assert not jnp.array_equal(got, other)


def test_the_plain_order_fills_in_one_pixel_at_a_time():
    """Ancestral sampling written out: each pixel from the network on the pixels before it."""
    params = grown(jax.jit(SMALL.init)(jax.random.key(0)), 1.5)
    key = jax.random.key(5)
    pick_key, gray_key = jax.random.split(key)
    mixture = jax.jit(lambda x: SMALL.mixture(params, x))
    gumbel = jax.random.gumbel(pick_key, (3, 2, 2, 2))
    logistic = jax.random.logistic(gray_key, (3, 2, 2))
    for index, image in enumerate(SMALL.sample(key, params, 3)):
        x = np.zeros((2, 2), np.int32)
        for row, column in itertools.product(range(2), range(2)):
            weight, mean, log_scale = np.asarray(mixture(jnp.asarray(x)))[row, column]
            k = np.argmax(weight + gumbel[index, row, column])
            gray = mean[k] + np.exp(log_scale[k]) * logistic[index, row, column]
            x[row, column] = np.clip(np.round(gray + 1), 0, 2)
        assert np.array_equal(x, image)


def test_both_are_causal():
    made = MADE.init(jax.random.key(0))
    check_causal(lambda x: MADE.logits(made, x), jnp.zeros(6))
    cnn = jax.jit(CNN.init)(jax.random.key(1))
    image = jax.random.randint(jax.random.key(2), (30,), 0, 15)

    @jax.jit
    def update(x):
        return CNN.mixture(cnn, x.reshape(6, 5)).reshape(30, 6).sum(1).astype(jnp.float32)

    check_causal(update, image.astype(jnp.float32), tol=1e-6)
    # And the last pixel hears of those to its left.
    assert jax.grad(lambda x: update(x)[29])(image.astype(jnp.float32))[26:29].all()


@pytest.mark.parametrize(
    "make", [lambda: Made(1), lambda: Made(4, ()), lambda: PixelCnn(2, 2, levels=1)]
)
def test_bad_sizes(make):
    with pytest.raises(UsageError):
        make()
