"""Pieces of packed rows: a document that crosses a border is a rectangle, by cuDNN's interface computed by XLA."""

import functools

import cudnn_by_xla
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from jaxpar.nn.attention import _documents, finish, pairs
from jaxpar.nn.attention.gradient import Done, OutputGradient, attend_gradient
from jaxpar.nn.attention.pairs import attend_pair, attend_pair_gradient
from jaxpar.nn.attention.state import attend
from jaxpar.nn.attention.visibility import Visible, Where

T = 12
# Numbers of rows' queries and of the keys before them: (lengths of documents, number of the first) a row.
CASES = {
    "cross the border": (([5, 4, 3], 7), ([1, 8, 3], 5), ([12], 3), ([9, 2, 1], 1)),
    "one token each": (([1, 11], 7), ([11, 1], 6), ([12], 3), ([2, 10], 2)),
    "in one row alone": (([5, 7], 7), ([6, 6], 2), ([12], 4), ([4, 8], 3)),
    "nowhere": (([5, 7], 8), ([6, 6], 2), ([12], 9), ([4, 8], 3)),
    "do not rise": (([5, 7], 7), ([6, 6], 9), ([6, 6], 3), ([4, 8], 3)),
    "come again": (([5, 7], 7), ([2, 10], 7), ([12], 3), ([4, 8], 2)),
}


def numbered(row):
    lengths, first = row
    return np.repeat(np.arange(len(lengths)) + first, lengths)


def segments_of(case):
    a, b, c, d = (numbered(row) for row in CASES[case])
    b = b[::-1] if case == "come again" else b  # 8 ten times, then 7
    return tuple(jnp.asarray(np.stack(rows), jnp.int32) for rows in ((a, c), (b, d)))


def drawn():
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(draw((2, T, heads, 8)), jnp.bfloat16) for heads in (4, 2, 2, 4)]


@pytest.fixture
def cudnn(monkeypatch):
    monkeypatch.setattr(pairs, "platform", lambda: "gpu")
    monkeypatch.setattr(pairs, "_is_right", lambda name: True)
    monkeypatch.setattr(pairs, "packing_is_right", lambda: True)
    monkeypatch.setattr(_documents, "is_right", lambda: True)
    return cudnn_by_xla.install(monkeypatch)


def dense(q, k, v, g, own, other, causal, more=0.7):
    """With a key of all queries besides, elsewhere: what it adds to the log-sum-exp is `more`."""
    q, k, v, g = (x.astype(jnp.float32) for x in (q, k, v, g))
    seen = own[:, :, None] == other[:, None]
    seen = seen & np.tril(np.ones((T, T), bool))[None] if causal else seen
    state = attend(q, k, v, seen)
    out, log_sum = finish(state).astype(jnp.bfloat16), jnp.logaddexp(state.log_sum, more)
    delta = (out.astype(jnp.float32) * g).sum(-1)
    queries = Where(positions=jnp.arange(T)[None], segments=own)
    keys = Where(positions=jnp.arange(T)[None], segments=other)
    known = OutputGradient(log_sum=log_sum, delta=delta, gradient=g)
    grads = attend_gradient(q, k, v, queries, keys, known, Visible(causal))
    return finish(state), state.log_sum, log_sum, grads


@functools.cache
def dense_program(causal):
    return jit(functools.partial(dense, causal=causal))


@pytest.mark.parametrize("causal", [False, True])
def test_pieces_have_the_sums_and_gradients_of_dense_attention(causal, cudnn, monkeypatch):
    taken = []
    by_blocks = _documents.in_blocks
    monkeypatch.setattr(
        _documents,
        "in_blocks",
        lambda *x, **y: (jax.debug.callback(lambda: taken.append(1)), by_blocks(*x, **y))[1],
    )

    @jit
    def run(q, k, v, g, own, other, log_sum):
        state = attend_pair(q, k, v, causal, segments=(own, other))
        done = Done(out=finish(state).astype(q.dtype), log_sum=log_sum, gradient=g)
        grads = attend_pair_gradient(q, k, v, done, causal, segments=(own, other))
        return finish(state), state.log_sum, grads

    arrays = drawn()
    for case in CASES:
        own, other = segments_of(case)
        other = own if causal else other
        out, own_sum, log_sum, grads = dense_program(causal)(*arrays, own, other)
        taken.clear()
        got = run(*arrays, own, other, log_sum)
        jax.effects_barrier()
        assert bool(taken) == (not causal and case in ("do not rise", "come again")), case
        np.testing.assert_array_equal(got[1] == -jnp.inf, own_sum == -jnp.inf)
        # Sums are float32's; outputs and gradients of bfloat16, 2^-9 a number.
        assert_close(jnp.exp(got[1]), jnp.exp(own_sum), 1e-5)
        assert_close((got[0], *got[2]), (out, *grads), 1e-2)
    kinds = {(call["mask_type"].name, "is_training" in call) for call in cudnn}
    assert kinds == {
        ("PADDING_CAUSAL" if causal else "PADDING", is_forward) for is_forward in (True, False)
    }


def test_trial_tells_right_from_wrong(cudnn, monkeypatch):
    assert np.max(_documents._errors()) < 1e-2
    right = _documents._common

    def one_more(own, other):
        which, seen, lengths = right(own, other)
        return which, seen, (lengths[0], lengths[1] + 1)

    monkeypatch.setattr(_documents, "_common", one_more)
    assert not np.max(_documents._errors()) < 2e-2
