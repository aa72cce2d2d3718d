"""Experts of volunteers: the best of a grid, masks of those that fail, and weights that are as old as they are late."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from experiments.papers import volunteer_experts as volunteers

N, PIXELS, D, G, K = 12, 5, 2, 3, 3


def drawn(dtype=np.float64):
    params = jax.tree.map(lambda w: np.asarray(w, dtype), volunteers.init(0, PIXELS, D, G))
    rng = np.random.default_rng(1)
    return (
        params,
        rng.standard_normal((N, PIXELS)).astype(dtype),
        rng.integers(0, volunteers.CLASSES, N),
    )


def dense_logits(params, x, answers, k):
    """Every expert on every digit, weighted by a softmax over the best of all sums, of those that answer."""
    h = jax.nn.relu(x @ params["root"])
    sums = jnp.einsum("nd,dig->nig", h, params["router"])
    sums = (sums[:, 0, :, None] + sums[:, 1, None, :]).reshape(len(x), -1)
    chosen = sums >= jnp.sort(sums, -1)[:, -k, None]
    weight = jnp.where(chosen & answers, jnp.exp(sums), 0)
    weight = weight / jnp.maximum(weight.sum(-1, keepdims=True), 1e-300)
    inside = jax.nn.gelu(jnp.einsum("nd,edf->nef", h, params["experts"]["w_up"]))
    out = jnp.einsum("nef,efd->ned", inside, params["experts"]["w_down"])
    return (h + jnp.einsum("ne,ned->nd", weight, out)) @ params["head"]


def test_a_beam_finds_the_best_of_all_sums():
    logits = np.random.default_rng(0).standard_normal((40, 3, G)).astype(np.float32)
    expert, weight = jit(functools.partial(volunteers.best_of_grid, k=5))(logits)
    for row, e, w in zip(logits, expert, weight, strict=True):
        sums = np.array(
            [
                sum(row[i, g] for i, g in enumerate(place))
                for place in itertools.product(range(G), repeat=3)
            ]
        )
        best = np.argsort(-sums)[:5]
        np.testing.assert_array_equal(e, best)
        np.testing.assert_allclose(w, np.exp(sums[best]) / np.exp(sums[best]).sum(), rtol=1e-5)
    assert volunteers.best_of_grid(logits[:, :1], 5)[0].shape == (40, 3)


def test_under_any_mask_it_is_the_dense_mixture(x64):
    """Value and every gradient; a digit whom nobody answers goes past, and a silent expert has no gradient."""
    params, x, _ = drawn()
    answers = np.random.default_rng(2).random((N, G**D)) < 0.5
    answers[0], answers[:, 4] = False, False

    def run(form):
        def value(params, x):
            return jnp.sin(form(params, x, answers, K)).sum()

        return jit(jax.value_and_grad(value, (0, 1)))(params, x)

    got = run(volunteers.logits)
    assert_close(got, run(dense_logits), EXACT_MATHS["float64"])
    assert not np.any(got[1][0]["experts"]["w_up"][4])


def test_training_is_that_of_a_loop_that_keeps_all_old_weights():
    params, x, y = drawn(np.float32)
    failures, most = 0.4, 2
    got = volunteers.train(params, x, y, steps=5, k=K, failures=failures, most=most, seed=3)
    optimizer, rng, history, now = (
        optax.adam(2e-3),
        np.random.default_rng(3),
        [params["experts"]],
        params,
    )
    state, grad = optimizer.init(params), jit(jax.grad(volunteers.loss), static_argnums=4)
    for _ in range(5):
        rows, delay = rng.integers(0, N, 128), rng.integers(0, most + 1, G**D)
        answers = np.repeat(rng.random((16, G**D)) >= failures, 8, axis=0)
        old = [history[max(0, len(history) - 1 - late)] for late in delay]
        used = {name: jnp.stack([w[name][e] for e, w in enumerate(old)]) for name in history[0]}
        updates, state = optimizer.update(
            grad(now | {"experts": used}, x[rows], y[rows], answers, K), state
        )
        now = optax.apply_updates(now, updates)
        history.append(now["experts"])
    assert_close(
        got, now, 1e-5
    )  # Adam divides gradients by their own size: their rounding is seen again
