"""A trellis of blocks: hard routes are the masked dense evaluation, and its routers learn what tells classes apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from experiments import information_gain_trellis as trellis
from jaxpar.nn.experts.losses import information_gain

N, PIXELS, WIDTH, BLOCKS = 24, 6, 5, (2, 3)


def drawn(skew=0.0):
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), trellis.init(0, PIXELS, WIDTH, BLOCKS))
    params["levels"][1]["router"][:, 0] += skew
    rng = np.random.default_rng(1)
    return params, rng.standard_normal((N, PIXELS)), rng.integers(0, trellis.CLASSES, N)


@pytest.mark.parametrize("skew", [0.0, 50.0])
def test_hard_routes_are_the_masked_dense_evaluation(skew, x64):
    """Value and every gradient; with skew a block of the last level gets all, and the others' gradients are zero."""
    params, x, y = drawn(skew)

    def run(choose):
        outputs = jax.value_and_grad(functools.partial(trellis.loss, weight=0.3, choose=choose), (0, 1))
        return jit(lambda p, x: (outputs(p, x, y), trellis.forward(p, x, choose)))(params, x)

    got = run(trellis.by_rows)
    assert_close(got, run(trellis.by_mask), 1e-12)  # as many products, summed in another order
    taken = set(np.asarray(got[1][1][1]).argmax(-1).tolist())
    assert len(taken) == 1 if skew else len(taken) > 1
    assert {k for k, block in enumerate(got[0][1][0]["levels"][1]["block"]) if np.any(block != 0)} <= taken


def test_routers_learn_from_the_gain_alone(x64):
    """Which of the blocks is largest has no gradient: without a weight the routers get exactly none."""
    params, x, y = drawn()
    for weight in (0.0, 0.3):
        grads = jit(jax.grad(functools.partial(trellis.loss, weight=weight)))(params, x, y)
        assert all(np.any(level["router"] != 0) == (weight > 0) for level in grads["levels"])


def test_the_gain_is_that_of_a_loop():
    rng = np.random.default_rng(2)
    route, y = rng.dirichlet(np.ones(3), N), rng.integers(0, 4, N)
    gain = entropy(route.mean(0))
    for c in range(4):
        gain -= np.mean(y == c) * entropy(route[y == c].mean(0))
    assert abs(float(information_gain(jnp.asarray(route, jnp.float32), jnp.asarray(y), 4)) - gain) < 1e-6


def entropy(p):
    return -sum(q * np.log(q) for q in p)


def test_it_learns_to_tell_classes_apart():
    rng = np.random.default_rng(3)
    y = rng.integers(0, trellis.CLASSES, 400).astype(np.int32)
    x = (rng.standard_normal((trellis.CLASSES, PIXELS))[y] + 0.1 * rng.standard_normal((400, PIXELS))).astype(
        np.float32
    )
    params = trellis.init(0, PIXELS, 16, BLOCKS)
    _, before, _ = trellis.judge(params, x, y)
    accuracy, gains, loads = trellis.judge(trellis.train(params, x, y, steps=150, weight=0.5, seed=0), x, y)
    assert accuracy > 0.95 and all(gain > 2 * old for gain, old in zip(gains, before, strict=True))
    assert max(loads) < 1.6
