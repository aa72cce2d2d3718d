"""A trellis of blocks: hard routes are the masked dense evaluation, and its routers learn what tells classes apart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from experiments.papers import information_gain_trellis as trellis
from jaxpar.nn.experts.losses import information_gain

N, PIXELS, WIDTH, BLOCKS = 24, 16, 5, (2, 3)


def drawn(skew=0.0):
    params = jax.tree.map(
        lambda x: np.asarray(x, np.float64), trellis.init(0, PIXELS, WIDTH, BLOCKS)
    )
    params["levels"][1]["router"][:, 0] += skew
    rng = np.random.default_rng(1)
    return params, rng.standard_normal((N, PIXELS)), rng.integers(0, trellis.CLASSES, N)


@pytest.mark.parametrize("skew", [0.0, 50.0])
def test_hard_routes_are_the_masked_dense_evaluation(skew, x64):
    """Value and every gradient; with skew a block of the last level gets all, and the others' gradients are zero."""
    params, x, y = drawn(skew)

    def run(choose):
        outputs = jax.value_and_grad(
            functools.partial(trellis.loss, weight=0.3, choose=choose), (0, 1)
        )
        return jit(lambda p, x: (outputs(p, x, y), trellis.forward(p, x, choose)))(params, x)

    got = run(trellis.by_rows)
    assert_close(got, run(trellis.by_mask), 1e-12)  # as many products, summed in another order
    taken = set(np.asarray(got[1][1][1]).argmax(-1).tolist())
    assert len(taken) == 1 if skew else len(taken) > 1
    assert {
        k for k, block in enumerate(got[0][1][0]["levels"][1]["block"]) if np.any(block != 0)
    } <= taken


def test_a_digit_costs_its_path():
    """By a loop over digits and places, which counts what it multiplies."""
    params, x, _ = drawn()
    want, counts = [], []
    for digit in x:
        h, count = conv(digit.reshape(4, 4, 1), params["root"])
        for level in params["levels"]:
            logits = h.reshape(2, 2, 2, 2, WIDTH).mean((1, 3)).reshape(-1) @ level["router"]
            block = level["block"][logits.argmax()]
            more, times = conv(h, block)
            h, count = h + more, count + times + level["router"].size
        seen = h.reshape(2, 2, 2, 2, WIDTH).mean((1, 3)).reshape(-1)
        want.append(seen @ params["head"])
        counts.append(count + params["head"].size)
    got = trellis.forward(jax.tree.map(jnp.float32, params), jnp.float32(x))[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    path, every = trellis.multiplications(params, PIXELS)
    assert set(counts) == {path} and every - path == PIXELS * 9 * WIDTH**2 * (
        sum(BLOCKS) - len(BLOCKS)
    )


def conv(h, weight):
    """A convolution of 3 x 3, place by place, and how many numbers it multiplied; the rest is added."""
    side, count, out = len(h), 0, np.zeros((*h.shape[:2], weight.shape[1]))
    padded = np.pad(h, ((1, 1), (1, 1), (0, 0)))
    for i, j in np.ndindex(side, side):
        out[i, j] = padded[i : i + 3, j : j + 3].reshape(-1) @ weight
        count += weight.size
    return np.maximum(out, 0), count


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
    assert (
        abs(float(information_gain(jnp.asarray(route, jnp.float32), jnp.asarray(y), 4)) - gain)
        < 1e-6
    )


def entropy(p):
    return -sum(q * np.log(q) for q in p)


def test_it_learns_to_tell_classes_apart(optimised):
    rng = np.random.default_rng(3)
    y = rng.integers(0, trellis.CLASSES, 400).astype(np.int32)
    x = (
        rng.standard_normal((trellis.CLASSES, PIXELS))[y] + 0.1 * rng.standard_normal((400, PIXELS))
    ).astype(np.float32)
    params = trellis.init(0, PIXELS, 16, BLOCKS)
    _, before, _ = trellis.judge(params, x, y)
    accuracy, gains, loads = trellis.judge(
        trellis.train(params, x, y, steps=150, weight=0.5, seed=0), x, y
    )
    assert accuracy > 0.95 and all(gain > 2 * old for gain, old in zip(gains, before, strict=True))
    assert all(
        load < k - 0.5 for load, k in zip(loads, BLOCKS, strict=True)
    )  # k where one block gets all
