"""Attention's kernels on a GPU; run there with `JAX_PLATFORMS=cuda python -m pytest tests/nn/test_attention_gpu.py`."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerance import assert_close

from jaxpar.nn.attention import Visibility, Visible, attention, packed, pairs
from jaxpar.nn.attention.gradient import Done
from jaxpar.nn.attention.state import attend, finish, merge

pytestmark = pytest.mark.gpu

TOLERANCE = 1e-2  # operands and partial outputs in bfloat16 or float16: 2^-8 a number, averaged over the sums


def drawn(rows, queries, keys, heads, groups, width, dtype="bfloat16"):
    draw = np.random.default_rng(queries + keys).standard_normal
    lengths = (queries, heads), (keys, groups), (keys, groups), (queries, heads)
    return [jnp.asarray(draw((rows, length, number, width)), dtype) for length, number in lengths]


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def dense(q, k, v, g, seen):
    """In float32 throughout: sums, outputs and gradients."""

    def run(q, k, v):
        state = attend(q, k, v, seen)
        return finish(state), state.log_sum

    with jax.default_matmul_precision("highest"):
        out, pull, log_sum = jax.vjp(run, *(x.astype(jnp.float32) for x in (q, k, v)), has_aux=True)
        return out, log_sum, *pull(g.astype(jnp.float32))


def test_the_first_trial_passes():
    pairs._is_right.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pairs._is_right("cudnn")


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "groups", "width", "dtype"),
    [
        (256, 256, 4, 4, 64, "bfloat16"),
        (512, 512, 8, 2, 128, "bfloat16"),
        (384, 384, 4, 1, 128, "float16"),
        (130, 130, 2, 2, 64, "bfloat16"),  # no multiple of a block
        (256, 640, 4, 2, 64, "bfloat16"),
        (640, 256, 4, 2, 64, "bfloat16"),
    ],
)
def test_a_pair_has_the_sums_and_gradients_of_dense_attention(
    queries, keys, heads, groups, width, dtype, causal
):
    if causal and queries != keys:
        pytest.skip("a causal pair is as long as it is wide")
    q, k, v, g = drawn(2, queries, keys, heads, groups, width, dtype)
    seen = (
        np.tril(np.ones((1, queries, keys), bool)) if causal else np.ones((1, queries, keys), bool)
    )
    out, log_sum, *grads = dense(q, k, v, g, seen)
    state = jax.jit(functools.partial(pairs.attend_pair, causal=causal, impl="cudnn"))(q, k, v)
    assert relative(finish(state), out) < TOLERANCE
    assert np.abs(np.asarray(state.log_sum - log_sum)).max() < 1e-2  # of numbers up to log(640)
    backward = jax.jit(functools.partial(pairs.attend_pair_gradient, causal=causal, impl="cudnn"))
    done = Done(out=finish(state).astype(q.dtype), log_sum=state.log_sum, gradient=g)
    for got, want in zip(backward(q, k, v, done), grads, strict=True):
        assert relative(got, want) < TOLERANCE


@pytest.mark.parametrize("groups", [4, 1])
def test_keys_in_two_pieces_add_up_with_the_sums_over_both(groups):
    """What a walk over devices does, by hand: the gradient of a piece starts from the log-sum-exp of both."""
    q, k, v, g = drawn(2, 512, 512, 4, groups, 64)
    _, _, *grads = dense(q, k, v, g, np.tril(np.ones((1, 512, 512), bool)))
    exact = dense(q, k, v, g, np.tril(np.ones((1, 512, 512), bool)))[0]
    low, high = np.s_[:, :256], np.s_[:, 256:]

    @jax.jit
    def run(q, k, v, g):
        pair = functools.partial(pairs.attend_pair, impl="cudnn")
        first = pair(q[low], k[low], v[low], True)
        second = merge(pair(q[high], k[low], v[low], False), pair(q[high], k[high], v[high], True))
        state = jax.tree.map(lambda *x: jnp.concatenate(x, 1), first, second)
        out, log_sum = finish(state).astype(q.dtype), state.log_sum
        sums = [jnp.zeros(x.shape, jnp.float32) for x in (q, k, v)]
        for i, j, causal in ((low, low, True), (high, low, False), (high, high, True)):
            done = Done(out=out[i], log_sum=log_sum[i], gradient=g[i])
            more = pairs.attend_pair_gradient(q[i], k[j], v[j], done, causal, "cudnn")
            sums = [x.at[at].add(new) for x, at, new in zip(sums, (i, j, j), more, strict=True)]
        return out, *sums

    for got, want in zip(run(q, k, v, g), (exact, *grads), strict=True):
        assert relative(got, want) < TOLERANCE


def rows_of_documents(length, lengths):
    """Numbers of documents, a row for each list of lengths, whose rest is one more document."""
    rows = [np.repeat(np.arange(len(row) + 1), [*row, length - sum(row)]) for row in lengths]
    return jnp.asarray(np.stack(rows), jnp.int32)


DOCUMENTS = {
    "a few": [[100, 1, 300], [511]],
    "whole rows": [[], []],
    "of one token": [[1] * 7, [3, 1, 1, 200]],
    "of two programs": [
        np.random.default_rng(0).multinomial(512, np.ones(20) / 20)[:-1].tolist(),
        [],
    ],
    "many": [
        np.random.default_rng(1).multinomial(512, np.ones(100) / 100).clip(1)[:60].tolist(),
        [1] * 120,
    ],
    "too many": [[1] * 200, []],
}


def test_the_first_trial_of_packing_passes():
    packed.packing_is_right.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert packed.packing_is_right()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("kind", DOCUMENTS)
def test_packed_documents_have_the_outputs_and_gradients_of_dense_attention(kind, groups, causal):
    q, k, v, g = drawn(2, 512, 512, 4, groups, 64)
    segments = rows_of_documents(512, DOCUMENTS[kind])
    seen = np.asarray(segments)[:, :, None] == np.asarray(segments)[:, None, :]
    seen = seen & np.tril(np.ones((512, 512), bool)) if causal else seen
    want, _, *grads = dense(q, k, v, g, seen)

    @jax.jit
    def run(q, k, v, g, segments):
        visibility = Visibility(rule=Visible(causal))
        out, pull = jax.vjp(
            lambda *x: attention(*x, segments=segments, visibility=visibility), q, k, v
        )
        return out, *pull(g)

    for got, exact in zip(run(q, k, v, g, segments), (want, *grads), strict=True):
        assert relative(got, exact) < TOLERANCE


@pytest.mark.parametrize("most", [8, 32])
def test_packed_documents_take_no_memory_of_all_pairs(most, monkeypatch):
    monkeypatch.setattr(packed, "MOST", (most,))
    q, k, v, g = drawn(1, 8192, 8192, 8, 8, 64)
    segments = rows_of_documents(8192, [[1000, 3000]])

    def run(q, k, v, g, segments):
        out, pull = jax.vjp(lambda *x: attention(*x, segments=segments), q, k, v)
        return out, *pull(g)

    program = jax.jit(run).lower(q, k, v, g, segments).compile()
    assert any(name in program.as_text().lower() for name in ("fmha", "sdpa"))
    # A quarter of the scores in float32: gradients of queries of 8 documents take 128 MiB.
    taken = program.memory_analysis().temp_size_in_bytes
    print(f"{most} documents a row: {taken / 2**20:.0f} MiB")
    assert taken < 8 * 8192**2


def test_auto_is_cudnn_and_takes_no_memory_of_scores():
    q, k, v, _ = drawn(1, 8192, 8192, 8, 8, 64)
    program = jax.jit(functools.partial(pairs.attend_pair, causal=True)).lower(q, k, v).compile()
    assert any(name in program.as_text().lower() for name in ("fmha", "sdpa"))
    assert program.memory_analysis().temp_size_in_bytes < 8 * 8192**2


def test_float32_is_dense_in_blocks():
    q, k, v, _ = drawn(1, 300, 300, 2, 1, 64, "float32")
    with jax.default_matmul_precision("highest"):
        got = finish(pairs.attend_pair(q, k, v, True))
        want = finish(attend(q, k, v, Visible()(jnp.arange(300)[None], jnp.arange(300)[None])))
    assert_close(got, want, 1e-5)
