"""Linear attention's kernels on a GPU: `JAX_PLATFORMS=cuda python -m pytest tests/nn/test_linear_attention_gpu.py`."""

import importlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from linear_cases import KINDS, inputs_of, outcome

from jaxpar.nn.mixers.exponential_gates import exponential_attention
from jaxpar.nn.mixers.linear_attention import linear_attention
from jaxpar.nn.mixers.options import RecurrenceExecution

# The package has a function of this name.
module = importlib.import_module("jaxpar.nn.mixers.linear_attention")

pytestmark = pytest.mark.gpu

# Norm of the error by norm: in 16 bits each factor is rounded once, those with decays once more, and so are results.
TOLERANCE = {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}


def relative(got, want):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.isfinite(got).all()
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_trial_passes(kind):
    dims = 0 if kind == "none" else 3 if "heads" in kind else 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert module._is_right(dims, kind == "bonus", kind.endswith(("normaliser", "floor")))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "depth", "width", "chunk"),
    [
        ("bfloat16", 128, 256, 64),
        ("float16", 48, 80, 64),
        ("bfloat16", 64, 64, 16),
        ("float32", 32, 64, 32),
        ("bfloat16", 256, 512, 64),
    ],
)
def test_values_and_gradients_are_those_of_the_steps(kind, dtype, depth, width, chunk):
    length = 333
    arrays, cotangents = inputs_of(kind, 2, length, 2, 4, depth, width, dtype)
    starts, valid = np.random.default_rng(1).random((2, length)) < 0.02, np.array([length, 250])
    got = jax.jit(outcome("kernel", kind, starts, valid, chunk=chunk))(arrays, cotangents)
    wide = jax.tree.map(lambda x: x.astype("float32"), arrays)
    with jax.default_matmul_precision("highest"):
        want = jax.jit(outcome("sequential", kind, starts, valid))(wide, cotangents)
    assert jax.tree.map(lambda x: x.dtype, got[2]) == jax.tree.map(lambda x: x.dtype, arrays)
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(mine, right) < TOLERANCE[dtype]


def test_exponential_gates_of_any_size():
    rng = np.random.default_rng(2)
    q, k, v, g = (jnp.asarray(rng.standard_normal((2, 300, 2, 64)), "bfloat16") for _ in range(4))
    forget = jnp.asarray(-rng.exponential(size=(2, 300, 2)), "float32")
    size = np.where(rng.random((2, 300, 2)) < 0.1, rng.choice([-80.0, 80.0], (2, 300, 2)), 1)
    arrays = q / 8, k, v, forget, jnp.asarray(size * rng.standard_normal(size.shape), "float32")

    def run(impl, dtype):
        narrow = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == jnp.bfloat16 else x, arrays)
        execution = RecurrenceExecution(impl=impl)
        h, pull = jax.vjp(lambda *x: exponential_attention(*x, execution=execution)[0], *narrow)
        return h, *pull(g.astype(h.dtype))

    got, plain = (
        jax.jit(run, static_argnums=(0, 1))(impl, "bfloat16") for impl in ("kernel", "chunked")
    )
    with jax.default_matmul_precision("highest"):
        want = jax.jit(run, static_argnums=(0, 1))("sequential", "float32")
    for mine, other, right in zip(got, plain, want, strict=True):
        # Normalised by what may be small: no further off than the form in XLA, but for chance.
        assert relative(mine, right) < max(1.5 * relative(other, right), 1e-2)


def test_auto_is_the_kernel_and_keeps_no_states():
    shape = (2, 4096, 8, 128)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3 + [
        jax.ShapeDtypeStruct(shape, jnp.float32)
    ]
    program = jax.jit(lambda *x: linear_attention(*x)[0]).lower(*arrays).compile()
    assert "triton_kernel_call" in program.as_text()
    kept = jax.eval_shape(lambda *x: jax.vjp(lambda *x: linear_attention(*x)[0], *x)[1], *arrays)
    sizes = [x.size for x in jax.tree.leaves(kept)]
    assert max(sizes) == np.prod(shape)  # the inputs; states at 64 chunks would be as many again
    step = jax.jit(lambda *x: linear_attention(*x)[0]).lower(
        *[jax.ShapeDtypeStruct((2, 1, *x.shape[2:]), x.dtype) for x in arrays]
    )
    assert "triton_kernel_call" not in step.compile().as_text()
