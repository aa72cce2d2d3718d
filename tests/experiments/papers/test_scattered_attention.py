"""Linear attention in windows of any sizes: it is its sums over pairs, and multiplies for no empty slot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import slopes
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from experiments.papers import scattered_attention as scattered
from jaxpar.lower.flops import count_flops

N, H, K, V, WINDOWS = 11, 2, 3, 2, 5
WINDOW = np.array([3, 0, 3, 4, 0, 3, 1, 3, 3, 0, 3])  # in no order, one alone, none in window 2


def drawn():
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal((N, H, width)) for width in (K, K, V))


def pairs(q, k, v):
    """Every token over all tokens of its window."""
    phi = lambda x: np.where(x.real > 0, 1 + x, np.exp(np.where(x.real > 0, 0, x)))  # noqa: E731
    out = np.zeros(v.shape, np.result_type(q, k, v))
    for i in range(N):
        for h in range(H):
            weights = [
                (phi(q[i, h]) @ phi(k[j, h]), v[j, h]) for j in range(N) if WINDOW[j] == WINDOW[i]
            ]
            out[i, h] = sum(w * v for w, v in weights) / sum(w for w, _ in weights)
    return out


@pytest.mark.parametrize("chunk", [4, 16])
def test_it_is_its_sums_over_pairs_in_value_and_gradient(chunk, x64):
    mix = np.sin(np.arange(N * H * V)).reshape(N, H, V)

    def value(arrays):
        y = scattered.attend(*arrays, jnp.asarray(WINDOW), WINDOWS, chunk)
        return (y * mix).sum(), y

    (_, got), grads = jit(jax.value_and_grad(value, has_aux=True))(drawn())
    assert_close(got, pairs(*drawn()), EXACT_MATHS["float64"])
    assert_close(
        grads, slopes(lambda arrays: (pairs(*arrays) * mix).sum(), drawn()), EXACT_MATHS["float64"]
    )


def test_padded_windows_are_the_same_and_cost_the_longest():
    found = scattered.compare(300, 3, heads=2, depth=4)
    assert found["error"] < 1e-5
    assert found["padded operations"] == 4 * 9 * found["longest"] * 2 * 4 * 5


def test_its_cost_is_that_of_its_tokens_alone():
    q = jnp.ones((512, H, K))

    def cost(window, windows):
        return count_flops(lambda q: scattered.attend(q, q, q, window, windows, 64), q).total

    even, skewed = jnp.arange(512) % 8, jnp.where(jnp.arange(512) < 500, 0, jnp.arange(512) % 50)
    assert cost(even, 8) == cost(skewed, 50) == 4 * 512 * H * K * (K + 1)
