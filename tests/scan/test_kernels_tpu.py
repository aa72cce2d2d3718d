"""The TPU's kernel equals the loop bit by bit, and is what a program compiled for a TPU runs."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import needs_libtpu, on_a_tpu
from fast import jit
from recurrences import draw

from jaxpar.scan import _kernels, _pallas, _xla, affine_scan
from jaxpar.scan._rings import LANE_RING

SHAPE = (2, 256, 256)


def plain(a, b, h0, *, axis, reverse):
    return _xla.sequential(
        LANE_RING, a, b, h0, axis=axis, reverse=reverse, carry=jnp.dtype("float32")
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of which a few hundred steps and lanes need several, the last ones not full."""
    monkeypatch.setattr(_pallas, "STEPS", 32)
    monkeypatch.setattr(_pallas, "LANES", 128)


@pytest.mark.parametrize(
    ("shape", "starts", "dtypes", "reverse"),
    [
        ((64, 128), True, ("float32", "float32"), False),
        ((2, 75, 200), False, ("float32", "float32"), False),
        ((2, 75, 200), False, ("float32", "float32"), True),
        ((2, 75, 128), True, ("bfloat16", "bfloat16"), True),
        ((1, 40, 128), False, ("float32", "bfloat16"), False),
    ],
)
def test_the_kernel_is_the_loop(shape, starts, dtypes, reverse):
    axis = len(shape) - 2
    a, b, h0 = draw(shape, axis=axis, dtype="float32")
    args = ((jnp.asarray(a, dtypes[0]),),), (jnp.asarray(b, dtypes[1]),), (h0,) if starts else None
    kernel = functools.partial(_pallas.affine, axis=axis, reverse=reverse, interpret=True)
    (got,), (want,) = (
        jit(kernel)(*args),
        jit(functools.partial(plain, axis=axis, reverse=reverse))(*args),
    )
    assert got.dtype == want.dtype
    rounding = 1e-5 if got.dtype == "float32" else 0.01  # of a product and a sum, together or apart
    np.testing.assert_allclose(
        *(x.astype("float32") for x in (got, want)), rtol=rounding, atol=1e-6
    )


def test_an_infinite_first_transition_is_not_used():
    a, b, _ = draw((64, 128), dtype="float32")
    a[0] = a[-1] = np.inf
    for reverse in (False, True):
        (out,) = _pallas.affine(((a,),), (b,), None, axis=0, reverse=reverse, interpret=True)
        assert np.isfinite(out[1:] if reverse else out[:-1]).all()


@pytest.mark.parametrize("axes", [(0, 0, None), (None, 1, 1)])
def test_a_batch_is_one_kernel(axes):
    rows = list(
        zip(
            *(draw((1, 40, 128), axis=1, seed=seed, dtype="float32") for seed in range(2)),
            strict=True,
        )
    )
    a, b, h0 = (x[0] if i is None else np.stack(x, i) for x, i in zip(rows, axes, strict=True))
    kernel = functools.partial(_pallas.affine, interpret=True)

    def run(a, b, h0):
        return _kernels.batched(kernel, 1, reverse=True)(((a,),), (b,), (h0,))[0]

    f = jax.vmap(run, axes)
    assert str(jax.make_jaxpr(f)(a, b, h0)).count("pallas_call[") == 1
    want = jax.vmap(lambda *x: affine_scan(*x, axis=1, reverse=True, impl="sequential"), axes)(
        a, b, h0
    )
    np.testing.assert_allclose(jit(f)(a, b, h0), want, rtol=1e-5, atol=1e-6)


def compiled_for_a_tpu():
    """Returns, by name, kernels and loops of programs for one chip of a v5e; runs in a process of its own."""
    from jaxpar.aot import devices, parse_topology

    sharding = jax.sharding.SingleDeviceSharding(devices(parse_topology("v5e:1x1"))[0])
    x = jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=sharding)

    def count(f):
        compiled = jax.jit(f).lower(x, x).compile()
        text, memory = compiled.as_text(), compiled.memory_analysis()
        return text.count("tpu_custom_call"), text.count(" while("), memory.temp_size_in_bytes

    f = functools.partial(affine_scan, axis=1)
    return {
        "value": count(f),
        "gradient": count(jax.grad(lambda *x: jnp.sum(jnp.sin(f(*x))), (0, 1))),
        "batch": count(jax.vmap(functools.partial(affine_scan, reverse=True))),
        "short": count(lambda a, b: f(a[:, :100], b[:, :100])),
    }


@needs_libtpu
def test_a_tpu_runs_the_kernel():
    found = on_a_tpu(__file__)
    size = 4 * np.prod(SHAPE)
    assert found["value"][:2] == [1, 0] and found["value"][2] < size / 4
    assert found["gradient"][:2] == [2, 0] and found["gradient"][2] <= 4 * size
    assert found["batch"][:2] == [1, 0]
    assert found["short"][0] == 0


if __name__ == "__main__":
    print(json.dumps(compiled_for_a_tpu()))


def test_a_reset_forgets_what_is_not_finite():
    a, b, _ = draw((64, 128), dtype="float32")
    b[3] = np.nan
    a[40] = 0
    for reverse in (False, True):
        (out,) = _pallas.affine(((a,),), (b,), None, axis=0, reverse=reverse, interpret=True)
        (want,) = plain(((a,),), (b,), None, axis=0, reverse=reverse)
        np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))
        assert np.isfinite(out[40:]).all()
