"""The kernels of linear attention equal its steps: in Triton's interpreter, and as their sequential twin."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import linear_kernel_twin
import numpy as np
import pytest
import triton_interpreter
from fast import jit
from linear_cases import KINDS, inputs_of, outcome
from tolerance import assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.mixers import linear_kernels as kernels
from jaxpar.nn.mixers.exponential_gates import exponential_attention
from jaxpar.nn.mixers.linear_attention import has_linear_kernel, linear_attention
from jaxpar.nn.mixers.options import Packing, Readout, RecurrenceExecution
from jaxpar.types import UsageError

# The package has a function of this name.
module = importlib.import_module("jaxpar.nn.mixers.linear_attention")

B, T, G, H, K, V = 2, 37, 1, 2, 32, 32
STARTS = np.random.default_rng(5).random((B, T)) < 0.1
VALID = np.array([37, 29])
TOLERANCE = 1e-5  # float32, relative to the largest entry: sums of some dozen numbers of one size, in another order


@pytest.fixture(params=["twin", pytest.param("triton", marks=triton_interpreter.NEEDED)])
def kernel(request, monkeypatch):
    """Something that computes what the kernels compute, by tiles of 16 columns."""
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "cut_for", lambda *_: kernels.Cut(16, 16, 4, 1))
    if request.param == "twin":
        monkeypatch.setattr(kernels, "call_kernel", linear_kernel_twin.stand_in)
        linear_kernel_twin.calls.clear()
    else:
        triton_interpreter.install(monkeypatch)
    return request.param


def check(kind, length, chunk, starts, valid, dtype="float32", tolerance=TOLERANCE):
    arrays, cotangents = inputs_of(kind, B, length, G, H, K, V, dtype)
    got = outcome("kernel", kind, starts, valid, chunk=chunk)(arrays, cotangents)
    wide = jax.tree.map(lambda x: x.astype("float32"), arrays)
    want = jit(outcome("sequential", kind, starts, valid))(wide, cotangents)
    assert jax.tree.map(lambda x: x.dtype, got[2]) == jax.tree.map(lambda x: x.dtype, arrays)
    for mine, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(mine.astype("float32"), right, tolerance)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_its_steps(kind, kernel):
    check(kind, T, 16, STARTS, VALID)
    if kernel == "twin":  # states are made again for the gradient
        order = ["carry", "outputs", "carry", "carry", "value_gradients", "key_gradients"]
        assert linear_kernel_twin.calls == order


@pytest.mark.parametrize(("kind", "chunk"), [("heads", 64), ("rows", 32)])
def test_longer_chunks_are_their_steps(kind, chunk, kernel):
    check(kind, chunk + 6, chunk, None, None)


@triton_interpreter.NEEDED
@pytest.mark.slow  # 10 to 60 s each in the interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_bits_are_rounded_as_often_as_they_are_multiplied(kind, monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: True)
    triton_interpreter.install(monkeypatch)
    # Factors are rounded by 2^-12 at most, some twice; the interpreter multiplies bfloat16's bits as integers.
    check(kind, 70, 64, None, None, "float16", 2e-3)


def test_exponential_gates_take_it(kernel):
    rng = np.random.default_rng(2)
    q, k, v = (jnp.asarray(rng.standard_normal((B, T, H, K)), "float32") for _ in range(3))
    gates = (
        jnp.asarray(x, "float32")
        for x in (-rng.exponential(size=(B, T, H)), 9 * rng.standard_normal((B, T, H)))
    )
    arrays = (q / 6, k, v, *gates)

    def run(impl):
        def loss(*arrays):
            h, (state, _) = exponential_attention(
                *arrays,
                packing=Packing(starts=STARTS),
                execution=RecurrenceExecution(impl=impl, chunk=16),
            )
            return (h * jnp.cos(jnp.arange(h.size)).reshape(h.shape)).sum() + state.sum(), h

        return jax.value_and_grad(loss, range(5), has_aux=True)(*arrays)

    # Normalised by a sum that may be small: the rounding of its terms is a larger part of it.
    assert_close(run("kernel"), run("sequential"), 1e-4)


@pytest.mark.parametrize("kind", ["heads, floor", "rows"])
def test_the_passes_may_have_chunks_of_two_sizes(kind, kernel, monkeypatch):
    for name, chunk in (("FORWARD", 32), ("BACKWARD", 16)):
        monkeypatch.setattr(
            kernels, name, {k: x._replace(chunk=chunk) for k, x in getattr(kernels, name).items()}
        )
    check(kind, T, 64, STARTS, VALID)


def test_a_floor_has_no_gradient(kernel):
    q, k, v, decay, *_ = inputs_of("heads, floor", 1, 20, 1, 1, 16, 16)[0]
    for impl in ("kernel", "chunked", "sequential"):
        execution = RecurrenceExecution(impl=impl)

        def total(floor):
            options = {"readout": Readout(floor=floor), "execution": execution}  # noqa: B023
            return linear_attention(q, k, v, decay, **options)[0].sum()

        assert not jax.grad(total)(jnp.full((1, 20, 1), 5.0)).any()


@pytest.mark.parametrize(
    ("kind", "dtype", "length", "chunk", "sizes"),
    [
        ("heads", "bfloat16", 300, 64, (128, 64)),
        ("rows", "bfloat16", 300, 64, (32, 32)),
        ("heads", "float32", 300, 64, (64, 64)),
        ("heads", "bfloat16", 300, 20, (32, 32)),
        ("heads", "bfloat16", 40, 64, (64, 64)),
        ("none", "bfloat16", 5, 64, (16, 16)),
    ],
)
def test_chunks_are_a_pass_s_own_below_64_the_caller_s(
    kind, dtype, length, chunk, sizes, monkeypatch
):
    seen = []

    def record(*arrays, out, name, **constants):
        seen.append((name, constants["CHUNK"]))
        return [jnp.zeros(x.shape, x.dtype) for x in out]

    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "call_kernel", record)
    jax.eval_shape(
        outcome("kernel", kind, None, None, chunk=chunk),
        *inputs_of(kind, 1, length, 1, 1, 16, 16, dtype),
    )
    assert seen[:2] == [("carry", sizes[0]), ("outputs", sizes[0])]
    assert {size for _, size in seen[2:]} == {sizes[1]} and len(seen) == 6


def test_vmap_is_a_loop(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(kernels, "call_kernel", linear_kernel_twin.stand_in)
    arrays, cotangents = inputs_of("heads", B, 20, G, H, 16, 16)
    several = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), arrays)
    got = jax.vmap(outcome("kernel", "heads", None, None), (0, None))(several, cotangents)
    want = jax.vmap(outcome("sequential", "heads", None, None), (0, None))(several, cotangents)
    assert_close(got, want, TOLERANCE)


# Who takes it -----------------------------------------------------------------------------------------------------


def given(depth=32, width=48, dtype="bfloat16"):
    keys, values = jnp.zeros((2, 4, 2, depth), dtype), jnp.zeros((2, 4, 2, width), dtype)
    return keys, values, None, Readout()


def test_who_takes_the_kernel(monkeypatch):
    monkeypatch.setattr(kernels, "available", lambda: True)
    monkeypatch.setattr(module, "_is_right", lambda *_: True)
    assert not has_linear_kernel(*given())  # on a CPU
    monkeypatch.setattr(module, "platform", lambda: "gpu")
    assert has_linear_kernel(*given()) and has_linear_kernel(*given(256, 16, "float16"))
    called, (keys, values) = [], given()[:2]

    def record(*_, out, name, **__):
        return called.append(name) or [jnp.zeros(x.shape, x.dtype) for x in out]

    monkeypatch.setattr(kernels, "call_kernel", record)
    linear_attention(keys, keys, values)
    linear_attention(keys[:, :1], keys[:, :1], values[:, :1])  # a step takes none
    assert called == ["carry", "outputs"]
    no = [(32, 48, "float32"), (32, 40), (24, 48), (528, 48), (32, 1024)]
    assert not any(has_linear_kernel(*given(*each)) for each in no)
    with use_mesh(make_mesh(MeshSpec(data=8))):
        assert not has_linear_kernel(*given())  # GSPMD would gather all rows
        asks = lambda v: jnp.array([has_linear_kernel(v, v, None, Readout())])  # noqa: E731
        inside = jax.shard_map(asks, in_specs=jax.P("data"), out_specs=jax.P("data"))
        assert inside(jnp.zeros((8, 4, 2, 32), "bfloat16")).all()
    asked = []
    monkeypatch.setattr(module, "_is_right", lambda *kind: asked.append(kind))
    decays = jnp.zeros((2, 4, 2))
    assert not has_linear_kernel(*given()[:2], decays, Readout(normaliser=True))
    assert asked == [(3, False, True)]
    ones = jnp.ones((2, 4, 2))
    linear_attention(*given()[:1] * 2, given()[1], -ones, readout=Readout(floor=ones))
    assert asked[1:] == [(3, False, True)]
    monkeypatch.setattr(kernels, "available", lambda: False)
    assert not has_linear_kernel(*given()) and len(asked) == 2


@pytest.mark.parametrize("wrong", [False, True])
def test_a_trial_tells_right_from_wrong(wrong, monkeypatch, recwarn):
    """With chunks in the kernel's place, right, or with a gradient of keys that is a twentieth off."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(module, "TRIAL", (1, 20, 1, 16))

    @jax.custom_vjp
    def off(k):
        return k

    off.defvjp(lambda k: (k, None), lambda _, g: (g * 1.05,))

    def stand_in(q, k, v, log_decay, state, packing, readout, execution):
        return linear_attention(
            q,
            off(k) if wrong else k,
            v,
            log_decay,
            state=state,
            packing=packing,
            readout=readout,
            execution=dataclasses.replace(execution, impl="chunked"),
        )

    monkeypatch.setattr(module, "_by_kernel", stand_in)
    assert module._is_right.__wrapped__(3, False, True) != wrong
    told = [str(each.message) for each in recwarn.list]
    assert [text.startswith("Triton's linear attention is not used") for text in told] == [
        True
    ] * wrong


def test_tiles_divide_and_fit():
    for kind in (*kernels.FORWARD.values(), *kernels.BACKWARD.values()):
        for cut in kind.cuts.values():
            for depth, width in ((16, 256), (48, 80), (128, 128), (240, 64)):
                mine = kernels.cut_for(cut, depth, width, "bfloat16")
                assert (
                    depth % mine.deep == 0 == width % mine.wide and min(mine.deep, mine.wide) >= 16
                )
                assert mine.deep <= cut.deep and mine.wide <= cut.wide


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(depth=40), "keys have 40"),
        (dict(width=24), "values 24 of bfloat16"),
        (dict(axis_name="context"), "axis_name is context"),
        (dict(dtype="float64"), "of float64"),
        (dict(available=False), "needs a CUDA GPU with jax_triton"),
    ],
)
def test_mistakes_are_told(options, message, monkeypatch, x64):
    monkeypatch.setattr(kernels, "available", lambda: options.get("available", True))
    shape = {name: x for name, x in options.items() if name in ("depth", "width", "dtype")}
    keys, values, *_ = given(**shape)
    with pytest.raises(UsageError, match=message):
        execution = RecurrenceExecution(impl="kernel", axis_name=options.get("axis_name"))
        linear_attention(keys, keys, values, execution=execution)
