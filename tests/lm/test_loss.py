"""The chunked, split cross entropy against a log-softmax in double precision."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit, noisy_params
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_configs import lm_config, with_fields
from tolerance import EXACT_MATHS, assert_close
from traced import equations

from jaxpar.lm import apply, cross_entropy, loss
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh

B, T, D, V = 4, 9, 8, 24
gradient = jit(jax.value_and_grad(cross_entropy, argnums=(0, 1)), static_argnums=(4, 5))


def case(seed=0, shape=(B, T), vocab=V, scale=1.0):
    rng = np.random.default_rng(seed)
    return (
        scale * rng.standard_normal((*shape, D)).astype(np.float32),
        rng.standard_normal((vocab, D)).astype(np.float32),
        rng.integers(0, vocab, shape),
        rng.choice([0.0, 0.3, 1.0], shape).astype(np.float32),
    )


def naive(x, head, targets, weights):
    """Value, d/dx and d/dhead by the formula, with all logits at once, in double precision."""
    x, head, weights = (np.asarray(a, np.float64) for a in (x, head, weights))
    logits = x @ head.T
    logits -= logits.max(-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    hit = np.eye(len(head))[targets]
    dlogits = (np.exp(log_p) - hit) * weights[..., None]
    value = -(weights * (log_p * hit).sum(-1)).sum()
    return value, (dlogits @ head, np.einsum("btv,btd->vd", dlogits, x))


@pytest.mark.parametrize("chunk", [1, 5, 8, 36, 1000])
def test_equals_naive_for_any_chunk(chunk):
    args = case()
    got = gradient(*args, chunk)
    assert_close(got, naive(*args), EXACT_MATHS["float32"])
    np.testing.assert_allclose(
        cross_entropy(*args, chunk), got[0], rtol=1e-6
    )  # without gradients: another loop


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 3), length=st.integers(1, 7), vocab=st.integers(1, 9), chunk=st.integers(1, 8),
    seed=st.integers(0, 99), scale=st.sampled_from([0.1, 1.0, 30.0]),
)  # fmt: skip
def test_equals_naive_for_any_shape(rows, length, vocab, chunk, seed, scale):
    args = case(seed, (rows, length), vocab, scale)
    with jax.enable_x64(True):
        args = tuple(np.asarray(a, np.float64) if a.dtype == np.float32 else a for a in args)
        beside_one = lambda tree: jax.tree.map(lambda x: x + 1, tree)  # noqa: E731
        assert_close(
            beside_one(gradient(*args, chunk)), beside_one(naive(*args)), 1e-12
        )  # logits of hundreds cancel


def test_outer_factors_pass_through():
    args = case()
    got = jax.grad(lambda x: -3.0 * cross_entropy(x, *args[1:], 8))(args[0])
    assert_close(got, -3.0 * naive(*args)[1][0], EXACT_MATHS["float32"])


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_extreme_logits_stay_finite(size):
    """The target's logit is 1e4 over or under all others, which are equal."""
    x, head = np.zeros((B, T, D), np.float32), np.zeros((V, D), np.float32)
    x[..., 0], head[3, 0] = 100, size / 100
    targets, weights = np.full((B, T), 3), np.ones((B, T), np.float32)
    value, grads = gradient(x, head, targets, weights, 8)
    want, want_grads = naive(x, head, targets, weights)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    assert want == (0.0 if size > 0 else pytest.approx(B * T * (1e4 + math.log(V - 1))))
    assert_close(grads, want_grads, EXACT_MATHS["float32"])
    shifted = gradient(
        x, head + np.eye(1, D, dtype=np.float32) * 100, targets, weights, 8
    )  # + 1e4 for every symbol
    np.testing.assert_allclose(shifted[0], want, rtol=1e-6)


@pytest.mark.parametrize("low_logits", [False, True])
def test_bfloat16_features(low_logits):
    """Logits in float32 lose nothing but the rounding of dlogits; stored in bfloat16 they lose 2^-9 each."""
    x, head, targets, weights = case()
    x, head = jnp.asarray(x, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    value, grads = gradient(x, head, targets, weights, 8, low_logits)
    want, want_grads = naive(x, head, targets, weights)
    assert value.dtype == jnp.float32 and {g.dtype for g in grads} == {jnp.dtype(jnp.bfloat16)}
    error = abs(float(value) - want) / want
    assert error < (2**-8 if low_logits else 1e-6)
    assert low_logits == (error > 1e-6), "low_logits should be what it says"
    assert_close(grads, want_grads, 2.0**-6 if low_logits else 2.0**-7)


@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, 2, 2), (4, 1, 2), (1, 4, 2)], ids=str)
def test_split_vocabulary_equals_naive_float64(x64, sizes):
    x, head, targets, weights = case()
    args = (
        *(np.asarray(a, np.float64) for a in (x, head)),
        targets,
        np.asarray(weights, np.float64),
    )
    with use_mesh(make_mesh(MeshSpec(*sizes), jax.devices())):
        got = gradient(*args, 5)
        value = jit(cross_entropy, static_argnums=4)(*args, 5)
    assert_close(got, naive(*args), EXACT_MATHS["float64"])
    np.testing.assert_allclose(value, got[0], rtol=1e-13)


# ---------------------------------------------------------------- memory: all logits never exist at once


def avals(jaxpr):
    """Every abstract value of a jaxpr and of all jaxprs inside it."""
    return [v.aval for eqn in equations(jaxpr) for v in (*eqn.invars, *eqn.outvars)]


def largest_with_vocab(jaxpr):
    sizes = [
        math.prod(a.shape)
        for a in avals(jaxpr)
        if V in getattr(a, "shape", ()) and D not in a.shape
    ]
    return max(sizes, default=0)


def test_logits_of_a_chunk_only():
    args, chunk = case(), 6
    assert B * T * V > 2 * chunk * V
    program = jax.make_jaxpr(
        jax.value_and_grad(functools.partial(cross_entropy, chunk=chunk), argnums=(0, 1))
    )
    assert largest_with_vocab(program(*args).jaxpr) == chunk * V
    # The walk sees through scans and custom gradients: one chunk of everything is found.
    whole = jax.make_jaxpr(
        jax.value_and_grad(functools.partial(cross_entropy, chunk=B * T), argnums=(0, 1))
    )
    assert largest_with_vocab(whole(*args).jaxpr) == B * T * V


def test_logits_of_a_chunk_only_in_the_model():
    config = lm_config(
        vocab_size=V,
        num_layers=1,
        embed_dim=D,
        num_heads=2,
        mlp_dim=10,
        dtype="float32",
        loss_chunk=6,
        tied=True,
    )
    params, tokens = noisy_params(config), np.zeros((B, T), int)
    batch = {"tokens": tokens, "targets": tokens}
    program = jax.make_jaxpr(jax.value_and_grad(lambda p: loss(p, batch, config)))(params)
    assert largest_with_vocab(program.jaxpr) == 6 * V
    assert (
        largest_with_vocab(jax.make_jaxpr(lambda p: apply(p, tokens, config))(params).jaxpr)
        == B * T * V
    )


# ---------------------------------------------------------------- the loss of a batch


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_is_the_weighted_mean(weighted):
    config = with_fields(tiny.LLAMA, loss_chunk=5)
    params = tiny.params_of(config)
    batch = tiny.batch_of()
    weights = np.ones(batch["tokens"].shape, np.float32)
    if weighted:
        rng = np.random.default_rng(0)
        weights = rng.choice([0.0, 0.3, 1.0], weights.shape).astype(np.float32)
        batch["weights"] = weights
    logits = np.asarray(tiny.logits(params, batch["tokens"], tiny.LLAMA), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    chosen = np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    mean = tiny.loss_of(params, batch, config)
    np.testing.assert_allclose(mean, -np.average(chosen, weights=weights), rtol=1e-6)
    half = tiny.loss_of(params, batch, config, normaliser=2.0)
    np.testing.assert_allclose(half, -(chosen * weights).sum() / 2, rtol=1e-6)


def test_the_loss_of_a_float64_model_is_exact_to_float64(x64):
    config = tiny.exact(tiny.LLAMA)
    params = tiny.params_of(config)
    batch = tiny.batch_of()
    logits = np.asarray(tiny.logits(params, batch["tokens"], config))
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = -np.take_along_axis(log_p, batch["targets"][..., None], -1).mean()
    np.testing.assert_allclose(tiny.loss_of(params, batch, config), want, rtol=1e-13)
