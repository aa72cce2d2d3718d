"""Grouped products on a GPU; run there with `JAX_PLATFORMS=cuda python -m pytest tests/nn/test_grouped_gpu.py`."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import by_loop

from jaxpar.nn.experts import Experts, by_index, grouped, grouped_matmul, transport
from jaxpar.nn.experts.layer import dense_mixture
from jaxpar.nn.experts.route import route
from jaxpar.nn.mixer import Context

pytestmark = pytest.mark.gpu

# Operands are what they are in 16 bits; results are rounded once, those that are added up before the sum too.
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-6}
SIZES = {
    "even": [150] * 4,
    "uneven": [1, 380, 128, 91],
    "all in one": [0, 0, 600, 0],
    "none": [0] * 4,
    "first and last": [257, 0, 0, 343],
    "rows beyond": [0, 129, 64, 0],
}


def normal(*shape, seed=0, dtype="bfloat16"):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


def both(impl, read, write, summed):
    @jax.jit
    def run(x, w, sizes, g):
        call = functools.partial(grouped_matmul, read=read, write=write, summed=summed, impl=impl)
        y, pull = jax.vjp(lambda x, w: call(x, w, sizes), x, w)
        return y, *pull(g)

    return run


def test_the_first_trial_passes():
    grouped._is_right.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grouped._is_right()


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize(
    ("depth", "width", "dtype"),
    [
        (128, 256, "bfloat16"),
        (by_index.DEEP, 512, "bfloat16"),  # the large tile
        (128, 256, "float16"),
        (80, 144, "bfloat16"),  # tiles that are not full
        (64, 32, "float32"),
        (37, 51, "bfloat16"),  # nothing is aligned
    ],
)
def test_values_and_gradients_are_those_of_a_loop(depth, width, dtype, indexed):
    rows, k = 600, 2
    order = np.random.default_rng(3).permutation(rows).astype(np.int32)
    read, write, copies = (order, order[::-1].copy(), k) if indexed else (None, None, 1)
    run = both("kernel", read, write, copies)
    x, g = (
        normal(rows // copies, depth, dtype=dtype),
        normal(rows // copies, width, seed=2, dtype=dtype),
    )
    w = normal(4, depth, width, seed=1, dtype=dtype)
    for name, sizes in SIZES.items():
        total = sum(sizes)
        filled = [a if indexed else a.at[total:].set(jnp.nan) for a in (x, g)]
        got = run(filled[0], w, jnp.array(sizes, jnp.int32), filled[1])
        wide = (np.asarray(a, np.float64) for a in (x, w))
        want = by_loop(*wide, sizes, read, write, copies, copies, np.asarray(g, np.float64))
        for mine, right in zip(got, want, strict=True):
            assert mine.dtype == dtype
            assert relative(mine, right) < TOLERANCE[dtype], name
            assert not np.any(np.asarray(mine, np.float32)[right == 0]), name


def test_auto_is_the_kernel_and_makes_no_sorted_copy():
    tokens, depth, width, k = 4096, 1024, 256, 8
    assert grouped.has_index_kernel("bfloat16", depth, width)
    order = np.random.default_rng(0).permutation(tokens * k).astype(np.int32)
    call = functools.partial(grouped_matmul, read=order)
    shapes = (tokens, depth), (16, depth, width)
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes] + [
        jax.ShapeDtypeStruct((16,), jnp.int32)
    ]
    program = jax.jit(call).lower(*given).compile()
    assert "triton_kernel_call" in program.as_text()
    assert program.memory_analysis().temp_size_in_bytes < 2**20  # a copy would be 64 MiB


def test_the_layer_is_the_dense_mixture_and_the_layer_with_copies(monkeypatch):
    layer, tokens, depth = Experts(64, 8, 2), (2, 128), 128
    params = {
        name: 0.1 * normal(*leaf.shape, seed=seed, dtype="float32")
        for seed, (name, leaf) in enumerate(layer.leaves(depth, 1.0, 1.0).items())
    }
    params = {name: x.astype("bfloat16").astype("float32") for name, x in params.items()}
    x = normal(*tokens, depth, seed=9)
    context = Context(jnp.zeros(tokens, jnp.int32))

    def gradients(run, x):
        return jax.jit(
            jax.grad(lambda params, x: jnp.sin(run(params, x).astype(jnp.float32)).sum(), (0, 1))
        )(params, x)

    def dense(params, x):
        routing = route((x.reshape(-1, depth) @ params["w_router"]), 2)
        return dense_mixture(params, x.reshape(-1, depth), routing).reshape(x.shape)

    def ours(params, x):
        return layer.apply(params, x, context)[0]

    got = gradients(ours, x)
    for module in (grouped, transport):
        monkeypatch.setattr(module, "has_index_kernel", lambda *_: False)
    with jax.default_matmul_precision("highest"):
        want = gradients(dense, x.astype(jnp.float32))
    copied = gradients(lambda params, x: layer.apply(params, x, context)[0] * 1, x)
    for mine, plain, right in zip(*map(jax.tree.leaves, (got, copied, want)), strict=True):
        # Activations in bfloat16: no further off than the form with copies is, but for chance.
        assert relative(mine, right) < max(1.5 * relative(plain, right), 5e-3)
