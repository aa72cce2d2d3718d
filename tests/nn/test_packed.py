"""Attention within packed documents by cuDNN's interface, its kernels computed by XLA."""

import functools

import cudnn_by_xla
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention import AttentionExecution, Visibility, Visible, attention, kernels, packed
from jaxpar.types import UsageError

T, TOLERANCE = 40, 1e-2  # operands and outputs in bfloat16: 2^-8 a number, averaged over the sums


@pytest.fixture
def cudnn(monkeypatch):
    """cuDNN is there, computed by XLA, and known to be right."""
    monkeypatch.setattr(kernels, "platform", lambda: "gpu")
    monkeypatch.setattr(kernels, "packing_is_right", lambda: True)
    return cudnn_by_xla.install(monkeypatch)


def drawn(rows, groups=2):
    draw = np.random.default_rng(rows).standard_normal
    return [
        jnp.asarray(draw((rows, T, heads, 8)), jnp.bfloat16) for heads in (4, groups, groups, 4)
    ]


def numbered(*rows):
    """Numbers of documents, a row for each list of lengths, whose rest is one more document."""
    rows = [np.repeat(np.arange(len(row) + 1) + 3, [*row, T - sum(row)]) for row in rows]
    return jnp.asarray(np.stack(rows), jnp.int32)


CASES = {
    "a few": numbered([10, 1, 20], [T - 1]),
    "whole rows": numbered([], []),
    "of one token": numbered([1] * 7, [3, 1, 1, 20]),
    "of two programs": numbered([2] * 8, []),
    "as many as tokens": numbered([1] * (T - 1), [5]),
}


def with_gradients(run, q, k, v, g):
    out, pull = jax.vjp(run, q, k, v)
    return out, *pull(g)


def dense(q, k, v, g, segments, visible):
    visibility = Visibility(rule=visible)
    options = {"visibility": visibility, "execution": AttentionExecution(impl="xla")}
    return with_gradients(
        functools.partial(attention, segments=segments, **options),
        *(x.astype(jnp.float32) for x in (q, k, v, g)),
    )


@functools.cache
def dense_program(visible):
    return jit(functools.partial(dense, visible=visible))


@pytest.mark.parametrize("visible", [Visible(), Visible(causal=False)], ids=["causal", "both ways"])
def test_documents_have_the_outputs_and_gradients_of_dense_attention(visible, cudnn, monkeypatch):
    monkeypatch.setattr(
        packed, "attention_by_blocks", lambda q, k, v, **_: jnp.full_like(q, jnp.nan)
    )  # not taken
    monkeypatch.setattr(packed, "MOST", (8, 16, 64))
    q, k, v, g = drawn(2)
    run = jit(
        lambda q, k, v, g, segments: with_gradients(
            functools.partial(attention, segments=segments, visibility=Visibility(rule=visible)),
            q,
            k,
            v,
            g,
        )
    )
    for segments in CASES.values():  # one program, which counts the documents
        want = dense_program(visible)(q, k, v, g, segments)
        assert_close(run(q, k, v, g, segments), want, TOLERANCE)
    causal = {"PADDING_CAUSAL"} if visible.causal else {"PADDING"}
    assert {call["mask_type"].name for call in cudnn} == causal


def test_what_cudnn_does_not_take_is_computed_by_blocks(cudnn, monkeypatch):
    """Too many documents, and numbers that come again."""
    monkeypatch.setattr(packed, "MOST", (8, 16))
    q, k, v, g = drawn(2)
    run = jit(
        lambda q, k, v, g, segments: with_gradients(
            functools.partial(attention, segments=segments), q, k, v, g
        )
    )
    for segments in (
        CASES["as many as tokens"],
        jnp.asarray([[1] * 10 + [2] * 20 + [1] * 10] * 2, jnp.int32),
    ):
        want = dense_program(Visible())(q, k, v, g, segments)
        assert_close(run(q, k, v, g, segments), want, TOLERANCE)


def test_devices_of_a_mesh_choose_for_themselves(cudnn, monkeypatch):
    monkeypatch.setattr(packed, "MOST", (8, 16))
    q, k, v, g = drawn(4)
    segments = jnp.concatenate([CASES["as many as tokens"], CASES["a few"]])
    want = dense_program(Visible())(q, k, v, g, segments)
    with use_mesh(make_mesh(MeshSpec(data=2, tensor=2), jax.devices()[:4])):
        got = jit(
            functools.partial(with_gradients, functools.partial(attention, segments=segments))
        )(q, k, v, g)
    assert_close(got, want, TOLERANCE)


def test_heads_are_taken_in_parts_where_a_row_has_many_documents(cudnn, monkeypatch):
    """cuDNN holds gradients of queries for each document of a row: AT_ONCE of them for all heads, or one key head's."""
    assert [
        packed._pieces(groups, most)
        for groups, most in ((4, 8), (4, 9), (4, 32), (12, 32), (3, 16), (2, 32))
    ] == ([1, 2, 4, 4, 3, 2])
    right, heads = packed._cudnn.backward, []

    def backward(q, k, *args):
        heads.append((q.shape[2], k.shape[2]))
        return right(q, k, *args)

    monkeypatch.setattr(packed._cudnn, "backward", backward)
    monkeypatch.setattr(packed, "MOST", (8, 16))
    arrays = drawn(2)
    jax.eval_shape(
        lambda *x: with_gradients(functools.partial(attention, segments=CASES["a few"]), *x),
        *arrays,
    )
    groups = 2
    if jax.__version_info__ < (
        0,
        11,
        2,
    ):  # the numbers of heads of keys and queries are equal there
        groups = 4
    assert heads == [(4, groups), (2, groups // 2)]


def test_no_array_has_all_pairs_of_tokens(cudnn):
    shapes = [jax.ShapeDtypeStruct((1, 1024, heads, 8), jnp.bfloat16) for heads in (4, 2, 2, 4)]
    segments = jax.ShapeDtypeStruct((1, 1024), jnp.int32)

    def run(q, k, v, g, segments):
        return with_gradients(functools.partial(attention, segments=segments), q, k, v, g)

    assert "1024,1024" not in str(jax.make_jaxpr(run)(*shapes, segments))


def test_trial_tells_right_from_wrong(cudnn, monkeypatch):
    assert np.max(packed._errors()) < 1e-2
    right = packed._cudnn.documents
    monkeypatch.setattr(
        packed._cudnn,
        "documents",
        lambda *args: right(*args)._replace(place=0 * right(*args).place),
    )
    assert not np.max(packed._errors()) < 2e-2


def test_without_cudnn_documents_are_computed_by_blocks(monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "gpu")
    packed.packing_is_right.cache_clear()
    q, k, v, g = drawn(2)
    with pytest.warns(
        UserWarning,
        match="cuDNN's attention of packed documents is not used, a loop over blocks is",
    ):
        got = attention(q, k, v, segments=CASES["a few"])
    assert_close(got, dense_program(Visible())(q, k, v, g, CASES["a few"])[0], TOLERANCE)
    with pytest.raises(
        UsageError, match="attention=cudnn with packed documents needs a Hopper GPU"
    ):
        attention(q, k, v, segments=CASES["a few"], execution=AttentionExecution(impl="cudnn"))
    packed.packing_is_right.cache_clear()
