"""A split sequence on GPUs; run there with `JAX_PLATFORMS=cuda python -m pytest tests/context/test_context_gpu.py`."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.attention import AttentionExecution, _documents, attend, attention, finish
from jaxpar.nn.attention.context import MOVES, Order, attend_split_cache, context_attention
from jaxpar.nn.attention.context import shares_kernel as kernel
from jaxpar.nn.attention.context._partial import ByTable, KeyPiece, QueryPiece
from jaxpar.nn.attention.gradient import Done
from jaxpar.nn.attention.visibility import Where

pytestmark = pytest.mark.gpu
TWO = jax.device_count() < 2


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def drawn(length, heads, groups, width):
    draw = np.random.default_rng(0).standard_normal
    return [
        jnp.asarray(draw((2, length, number, width)), jnp.bfloat16)
        for number in (heads, groups, groups, heads)
    ]


def exact(q, k, v, g, segments=None):
    with jax.default_matmul_precision("highest"):
        arrays = (x.astype(jnp.float32) for x in (q, k, v))
        execution = AttentionExecution(impl="xla")
        out, pull = jax.vjp(
            lambda *x: attention(*x, segments=segments, execution=execution), *arrays
        )
        return out, *pull(g.astype(jnp.float32))


def documents(length, *rows):
    """Numbers of documents, a row for each list of lengths, whose rest is one more."""
    rows = [np.repeat(np.arange(len(row) + 1), [*row, length - sum(row)]) for row in rows]
    return jnp.asarray(np.stack(rows), jnp.int32)


PACKED = {
    "none": None,
    "over borders": documents(1024, [100, 1, 300, 200], [1000]),
    "within parts": documents(1024, [256] * 3, [128] * 7),
    "not rising": documents(1024, [500], [300]).at[1, 600:].set(0),
}


@pytest.mark.parametrize("packed", PACKED)
@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
def test_the_walk_of_four_devices_on_one_gpu(order, packed):
    """Each device's turns one after the other, by the table and the kernels that a mesh takes, without a mesh."""
    shares, order, segments = 4, Order(order), PACKED[packed]
    arrays = drawn(1024, 4, 2, 64)
    split = [jnp.split(order.split(x, shares), shares, 1) for x in arrays]
    rule = ByTable(order.name, shares, True)
    where = [Where()] * shares
    if segments is not None:
        where = [Where(segments=x) for x in jnp.split(order.split(segments, shares), shares, 1)]

    @jax.jit
    def run(qs, ks, vs, gs, where):
        outs, dqs = [], []
        sums = [None] * shares
        queries = [QueryPiece(q=q, where=at) for q, at in zip(qs, where, strict=True)]
        keys = [KeyPiece(k=k, v=v, where=at) for k, v, at in zip(ks, vs, where, strict=True)]
        for device in range(shares):
            state = None
            for turn in range(shares):
                key = (device - turn) % shares
                which = jnp.int32(turn) if turn else 0
                state = rule.attend(state, queries[device], keys[key], which, device)
            out = state.mean.astype(jnp.bfloat16)
            done = Done(out=out, log_sum=state.log_sum, gradient=gs[device])
            dq = None
            for turn in range(shares):
                key = (device - turn) % shares
                which = jnp.int32(turn) if turn else 0
                dq, sums[key] = rule.gradient(
                    dq, sums[key], queries[device], keys[key], which, device, done
                )
            outs.append(done.out)
            dqs.append(dq)
        return outs, dqs, [each[0] for each in sums], [each[1] for each in sums]

    for got, want in zip(run(*split, where), exact(*arrays, segments), strict=True):
        assert (
            relative(order.join(jnp.concatenate(got, 1), shares), want) < 1e-2
        )  # as in test_attention_gpu.py


def test_the_first_trial_of_pieces_of_documents_passes():
    _documents.is_right.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _documents.is_right()


@pytest.mark.skipif(TWO, reason="needs two GPUs")
@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("order", [None, "zigzag", "contiguous"])
@pytest.mark.parametrize("move", MOVES)
def test_every_move_on_the_gpus_there_are(move, order, has_documents):
    shares = jax.device_count()
    segments = documents(shares * 256, [100, 1, 200], [20, 250]) if has_documents else None
    arrays = drawn(shares * 256, 2 * shares, shares, 64)
    want = exact(*arrays, segments)
    lies = Order(order or "zigzag")
    positions = jnp.broadcast_to(jnp.arange(shares * 256, dtype=jnp.int32), (2, shares * 256))
    with use_mesh(make_mesh(MeshSpec(context=shares))):

        @jax.jit
        def run(q, k, v, g, positions, segments):
            call = lambda *x: context_attention(*x, positions, segments, move=move, order=order)  # noqa: E731
            out, pull = jax.vjp(call, q, k, v)
            return out, *pull(g)

        split = [x if x is None else lies.split(x, shares) for x in (*arrays, positions, segments)]
        program = run.lower(*split).compile()
        got = program(*split)
    for ours, theirs in zip(got, want, strict=True):
        assert relative(lies.join(ours, shares), theirs) < 1e-2
    assert not order or any(name in program.as_text().lower() for name in ("fmha", "sdpa"))


def test_the_first_trial_of_a_split_caches_kernel_passes():
    kernel._is_right.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(kernel._is_right(dtype) for dtype in ("bfloat16", "float16", "float32"))


@pytest.mark.parametrize(
    "devices", [1, pytest.param(2, marks=pytest.mark.skipif(TWO, reason="needs two GPUs"))]
)
def test_a_split_cache_by_its_kernel(devices):
    """In bfloat16, NaN where nothing is filled, of one share nothing is; gradients are those of the dense form."""
    q, keys, values, g = drawn(4096, 32, 8, 128)
    q, g, filled = q[:, :1], g[:, :1], np.array([[1000, 2048], [0, 77]], np.int32)
    seen = (np.arange(2048) < filled[..., None]).reshape(2, -1)
    with jax.default_matmul_precision("highest"):
        wide = (x.astype(jnp.float32) for x in (q, keys, values))
        out, pull = jax.vjp(lambda *x: finish(attend(*x, jnp.asarray(seen)[:, None])), *wide)
        want = out, *pull(g.astype(jnp.float32))
    poisoned = [jnp.where(seen[..., None, None], x, jnp.nan) for x in (keys, values)]

    def run(q, keys, values, filled, g):
        out, pull = jax.vjp(lambda *x: attend_split_cache(*x, filled), q, keys, values)
        return out, *pull(g)

    with use_mesh(make_mesh(MeshSpec(context=devices), jax.devices()[:devices])):
        arrays = q, *poisoned, jnp.asarray(filled), g
        program = jax.jit(run).lower(*arrays).compile()
        assert "triton" in program.as_text()
        for got, exact in zip(program(*arrays), want, strict=True):
            assert got.dtype == jnp.bfloat16 and relative(got, exact) < 1e-2
