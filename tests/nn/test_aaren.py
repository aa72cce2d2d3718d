"""Aaren is masked softmax attention with one query, in value and in gradient, and streams."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.nn import Aaren, recurrent
from jaxpar.solve import Newton

B, T, D, N, H = 2, 9, 5, 6, 3
CELL = Aaren(N, H)


whole = jit(functools.partial(recurrent, CELL))


def noisy(std=1.0):
    rng = np.random.default_rng(0)
    return {name: std * rng.standard_normal(leaf.shape) for name, leaf in CELL.leaves(D).items()}


def inputs():
    return np.random.default_rng(1).standard_normal((B, T, D))


def attention(params, xs, segments=None):
    """Dense attention with a mask, all heads with the same query at every place."""
    k, v = (xs @ params[f"w{g}"] + params[f"b{g}"][None, None] for g in "kv")
    k, v, q = (x.reshape(*x.shape[:-1], H, N // H) for x in (k, v, params["q"]))
    scores = jnp.einsum("bshk,hk->bhs", k, q) / np.sqrt(N // H)
    seen = np.tril(np.ones((T, T), bool))[None]
    seen = seen if segments is None else seen & (segments[:, :, None] == segments[:, None, :])
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores[:, :, None, :], -jnp.inf), -1)
    return jnp.einsum("bhts,bshk->bthk", weights, v).reshape(B, T, N)


def test_it_equals_masked_softmax_attention(x64):
    params, xs = noisy(), inputs()

    def value(run):
        return jit(jax.value_and_grad(lambda params, xs: (run(params, xs) ** 2).sum(), (0, 1)))(
            params, xs
        )

    assert_close(whole(params, xs)[0], attention(params, xs), EXACT_MATHS["float64"])
    assert_close(
        value(lambda p, x: recurrent(CELL, p, x)[0]), value(attention), 10 * EXACT_MATHS["float64"]
    )


def test_documents_do_not_see_each_other(x64):
    params, xs = noisy(), inputs()
    segments = np.array([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0] * 8 + [1]])
    resets = np.diff(segments, axis=1, prepend=0) != 0

    def value(run):
        return jit(jax.value_and_grad(lambda params: (run(params) ** 2).sum()))(params)

    assert_close(
        value(lambda p: recurrent(CELL, p, xs, resets=resets)[0]),
        value(lambda p: attention(p, xs, segments)),
        10 * EXACT_MATHS["float64"],
    )


def test_scores_of_any_size_neither_overflow_nor_vanish():
    params = {name: np.float32(x) for name, x in noisy(std=30.0).items()}
    xs = np.float32(inputs())
    ys, last = whole(params, xs)
    assert np.isfinite(ys).all() and np.abs(np.asarray(last.max)).max() > 1000
    grads = jit(jax.grad(lambda p: recurrent(CELL, p, xs)[0].sum()))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(grads))
    assert_close(ys, attention(params, xs), 10 * EXACT_MATHS["float32"])


def test_its_state_does_not_grow():
    state, params = CELL.initial((B,)), {name: np.float32(x) for name, x in noisy().items()}
    for t in range(3):
        _, new = whole(params, np.float32(inputs()[:, t : t + 1]), state)
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
        state = new


def test_a_solver_may_run_it_too(x64):
    params, xs = noisy(), inputs()
    newton = jit(lambda p, x: recurrent(CELL, p, x, method=Newton())[0])(params, xs)
    assert_close(newton, whole(params, xs)[0], 1e-10)


def test_a_nan_reaches_what_sees_it_and_no_other_document(x64):
    params = noisy(0.5)
    xs = inputs()
    bad = xs.copy()
    bad[0, 2] = np.nan
    resets = np.zeros((B, T), bool)
    resets[:, 5] = True
    later = (np.arange(T) >= 5)[None, :, None]

    def out(xs, resets):
        return recurrent(CELL, params, xs, resets=resets)[0]

    def loss(xs):
        return jnp.sum(jnp.where(later, jnp.sin(out(xs, resets)), 0))

    wanted = np.array(jit(out)(xs, resets))
    wanted[0, 2:5] = np.nan
    np.testing.assert_allclose(jit(out)(bad, resets), wanted, rtol=1e-12)
    assert np.isnan(np.asarray(jit(lambda xs: out(xs, None))(bad))[0, 2:]).all()
    got = jit(jax.grad(loss))(bad)
    want = jit(jax.grad(loss))(xs)
    np.testing.assert_allclose(got[:, 5:], want[:, 5:], rtol=1e-10)
