"""Pairs of pieces by kernels: sums that others can be added to, and gradients from the log-sum-exp over all keys."""

import functools
import warnings

import cudnn_by_xla
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.nn.attention import finish, merge, pairs
from jaxpar.nn.attention.gradient import Done
from jaxpar.nn.attention.pairs import attend_pair, attend_pair_gradient
from jaxpar.nn.attention.state import attend


def drawn(rows, queries, keys, heads, groups, width, dtype):
    draw = np.random.default_rng(queries + keys).standard_normal
    lengths = (queries, heads), (keys, groups), (keys, groups), (queries, heads)
    return [jnp.asarray(draw((rows, length, number, width)), dtype) for length, number in lengths]


def in_two(q, k, v, g, causal, impl):
    """Outputs and gradients, the keys in two pieces of which the second begins where the queries' second half does."""
    low, high = np.s_[:, : q.shape[1] // 2], np.s_[:, q.shape[1] // 2 :]
    cuts = [(low, low, causal), (high, low, False), (high, high, causal)] + [(low, high, False)] * (
        not causal
    )
    states = [attend_pair(q[i], k[j], v[j], diagonal, impl) for i, j, diagonal in cuts]
    first = states[0] if causal else merge(states[0], states[3])
    state = jax.tree.map(lambda *x: jnp.concatenate(x, 1), first, merge(states[1], states[2]))
    out, total = finish(state).astype(q.dtype), state.log_sum
    sums = [jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)) for x in (q, k, v)]
    for i, j, diagonal in cuts:
        done = Done(out=out[i], log_sum=total[i], gradient=g[i])
        grads = attend_pair_gradient(q[i], k[j], v[j], done, diagonal, impl)
        sums = [x.at[at].add(grad) for x, at, grad in zip(sums, (i, j, j), grads, strict=True)]
    return out, *sums


def dense(q, k, v, g, causal):
    wide = jnp.promote_types(q.dtype, jnp.float32)
    seen = (
        np.tril(np.ones((1, q.shape[1], k.shape[1]), bool)) if causal else np.ones((1, 1, 1), bool)
    )
    out, pull = jax.vjp(lambda *x: finish(attend(*x, seen)), *(x.astype(wide) for x in (q, k, v)))
    return out, *pull(g.astype(wide))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_pieces_add_up_to_dense_attention(causal, dtype, x64):
    arrays = drawn(2, 14, 14, 4, 2, 8, dtype)
    got = jit(functools.partial(in_two, causal=causal, impl="xla"))(*arrays)
    assert_close(got, jit(functools.partial(dense, causal=causal))(*arrays), EXACT_MATHS[dtype])


def test_queries_and_keys_of_a_full_pair_may_differ_in_number(x64):
    q, k, v, g = drawn(1, 5, 9, 4, 1, 8, "float64")
    want = dense(q, k, v, g, False)
    state = attend_pair(q, k, v, False)
    done = Done(out=finish(state), log_sum=state.log_sum, gradient=g)
    grads = attend_pair_gradient(q, k, v, done, False)
    assert_close((finish(state), *grads), want, 1e-13)


@pytest.mark.parametrize("causal", [True, False])
def test_splash_gives_the_sums_and_the_gradients(causal, monkeypatch):
    """The kernels themselves, interpreted."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    monkeypatch.setattr(
        splash, "make_splash_mha", functools.partial(splash.make_splash_mha, interpret=True)
    )
    arrays = drawn(1, 256, 256, 2, 1, 64, "float32")
    # The kernel asks for the products of a TPU's own precision; 1e-5 of products in float32 on a CPU.
    assert_close(in_two(*arrays, causal, "splash"), dense(*arrays, causal), 1e-5)


# ---------------------------------------------------------------- cuDNN's interface, its kernels computed by XLA


@pytest.fixture
def cudnn(monkeypatch):
    return cudnn_by_xla.install(monkeypatch)


@pytest.mark.parametrize("causal", [True, False])
def test_cudnn_is_asked_for_the_sums_and_the_gradients(causal, cudnn):
    arrays = drawn(2, 24, 24, 4, 2, 16, "bfloat16")
    # Operands and partial outputs in bfloat16, 2^-8 a number, averaged over the sums.
    assert_close(in_two(*arrays, causal, "cudnn"), dense(*arrays, causal), 1e-2)
    assert cudnn and {call["scale"] for call in cudnn} == {1 / 4}


# ---------------------------------------------------------------- before the first use


@pytest.fixture
def unknown(monkeypatch):
    """Nothing was tried yet, and the platform is one with a kernel."""
    pairs._is_right.cache_clear()
    monkeypatch.setattr(pairs, "platform", lambda: "gpu")
    yield
    pairs._is_right.cache_clear()


def test_without_the_kernel_one_warning_tells_of_the_dense_form(unknown):
    q, k, v, _ = drawn(1, 6, 6, 2, 1, 8, "bfloat16")
    with pytest.warns(
        UserWarning,
        match="cudnn's attention with a log-sum-exp is not used, the dense form is: Runtime",
    ):
        got = jit(functools.partial(attend_pair, causal=True))(q, k, v)
    assert_close(finish(got), finish(attend_pair(q, k, v, True, "xla")), 1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend_pair(q, k, v, True)


def test_a_kernel_that_is_there_is_taken(unknown, cudnn):
    q, k, v, _ = drawn(1, 6, 6, 2, 1, 8, "bfloat16")
    attend_pair(q, k, v, True)
    assert cudnn


@pytest.mark.parametrize("factor", [1.1, float("nan")])
def test_a_kernel_whose_numbers_are_wrong_is_not_taken(factor, cudnn, monkeypatch):
    def wrong(*args):
        dq, dk, dv = pairs._cudnn.backward(*args)
        return dq, dk * factor, dv

    errors = functools.partial(pairs._errors, "cudnn")
    found = []

    @jax.jit  # as it is asked first: what is tried is computed all the same
    def traced(x):
        found.append(pairs.tried("a kernel", "another", errors, "cpu"))
        return x

    traced(1)
    assert found == [True]
    monkeypatch.setitem(pairs.BACKWARD, "cudnn", wrong)
    with pytest.warns(UserWarning, match="a kernel is not used, another is: its error is"):
        assert not pairs.tried("a kernel", "another", errors, "cpu")
