"""The kernels of grouped products equal a loop over rows: in Triton's interpreter, and as their sequential twin."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter
from fast import jit
from grouped_cases import COPIES, ROWS, SIZES, TOKENS, E, by_loop, calls, stand_in
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn.experts import Experts, by_index, grouped, grouped_matmul, transport
from jaxpar.nn.mixer import Context
from jaxpar.types import UsageError

SMALL = by_index.Cut(16, 16, 16, 4, 2)
ODD = {"odd": (19, 35), "even": (16, 48)}  # D and F: less and more than a tile, and whole ones
RNG = np.random.default_rng(0)
ORDER = RNG.permutation(ROWS).astype(np.int32)
WAYS = {  # read, write, summed
    "in order": (None, None, 1),
    "gather": (ORDER, None, 1),
    "scatter": (None, ORDER, 1),
    "scatter and add": (None, ORDER, COPIES),
    "both": (ORDER, ORDER[::-1].copy(), COPIES),
}


@pytest.fixture(params=["twin", pytest.param("triton", marks=triton_interpreter.NEEDED)])
def kernel(request, monkeypatch):
    """Something that computes what the kernels compute, by small tiles."""
    monkeypatch.setattr(by_index, "available", lambda: True)
    monkeypatch.setattr(by_index, "cut_for", lambda *_: SMALL)
    monkeypatch.setattr(by_index, "BAND", 2)
    if request.param == "twin":
        monkeypatch.setattr(by_index, "call_kernel", stand_in)
    else:
        triton_interpreter.install(monkeypatch)
    return request.param


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def outcome(impl, read, write, summed):
    @jit
    def run(x, w, sizes, g):
        call = functools.partial(grouped_matmul, read=read, write=write, summed=summed, impl=impl)
        y, pull = jax.vjp(lambda x, w: call(x, w, sizes), x, w)
        return y, *pull(g)

    return run


def check(run, way, depth, width, dtype="float32", tolerance=EXACT_MATHS["float32"]):
    read, write, summed = WAYS[way]
    copies = 1 if read is None else COPIES
    x, w = normal(ROWS // copies, depth, dtype=dtype), normal(E, depth, width, seed=1, dtype=dtype)
    g = normal(ROWS // summed, width, seed=2, dtype=dtype)
    for name, sizes in SIZES.items():
        total = sum(sizes)
        # What belongs to nobody may be anything where nobody else has it too.
        filled = [a.copy() for a in (x, g)]
        filled[0][total:] = np.nan if read is None else filled[0][total:]
        filled[1][total:] = np.nan if write is None else filled[1][total:]
        got = run(filled[0], w, np.array(sizes, np.int32), filled[1])
        wide = (np.float64(a) for a in (x, w))
        want = by_loop(*wide, sizes, read, write, copies, summed, np.float64(g))
        for mine, right in zip(got, want, strict=True):
            assert mine.dtype == dtype and mine.shape == right.shape
            assert_close(
                np.float32(mine), right.astype(np.float32), tolerance
            ) if right.any() else None
            assert not np.any(np.asarray(mine)[right == 0]), (name, "zero is zero")


@pytest.mark.parametrize("way", WAYS)
def test_it_is_a_loop_over_rows(way, kernel):
    check(outcome("kernel", *WAYS[way]), way, *ODD["odd"])


def test_whole_tiles_need_no_masks(kernel):
    check(outcome("kernel", *WAYS["both"]), "both", *ODD["even"])


@triton_interpreter.NEEDED
def test_sums_of_float16_are_float32(monkeypatch):
    monkeypatch.setattr(by_index, "available", lambda: True)
    monkeypatch.setattr(by_index, "cut_for", lambda *_: SMALL)
    triton_interpreter.install(monkeypatch)
    # Products of float16 are exact in float32; what is left is one rounding of each result, and of each that is added.
    check(outcome("kernel", *WAYS["both"]), "both", 16, 32, "float16", 1e-3)


@pytest.mark.parametrize("impl", ["tiles", "ragged"])
def test_other_forms_read_and_write_alike(impl):
    check(outcome(impl, *WAYS["both"]), "both", *ODD["odd"])


def test_vmap_is_a_loop(monkeypatch):
    monkeypatch.setattr(by_index, "available", lambda: True)
    monkeypatch.setattr(by_index, "call_kernel", stand_in)
    x, w, sizes = (
        normal(2, TOKENS, 3),
        normal(2, E, 3, 5),
        np.array([SIZES["even"], SIZES["rows beyond"]]),
    )
    call = functools.partial(grouped_matmul, read=ORDER, write=ORDER, summed=COPIES)
    got = jit(jax.vmap(functools.partial(call, impl="kernel")))(x, w, sizes)
    assert_close(
        got,
        jit(jax.vmap(functools.partial(call, impl="tiles")))(x, w, sizes),
        EXACT_MATHS["float32"],
    )


# The layer --------------------------------------------------------------------------------------------------------

B, T, D, F = 4, 4, 8, 6
LAYER = Experts(F, E, 2, capacity=0.7, balance_loss=0.0)  # of what is dropped the rows are nobody's


def mixture(layer, params, x):
    def run(params, x):
        y, _ = layer.apply(params, x, Context(jnp.zeros(x.shape[:2], jnp.int32)))
        return (y * jnp.cos(jnp.arange(y.size, dtype=x.dtype)).reshape(y.shape)).sum(), y

    return jit(jax.value_and_grad(run, (0, 1), has_aux=True))(params, x)


@pytest.fixture
def in_the_layer(monkeypatch):
    """Has the layer take what stands in the kernel's place; yields the calls that are run."""
    monkeypatch.setattr(by_index, "available", lambda: True)
    monkeypatch.setattr(by_index, "call_kernel", stand_in)
    for module in (grouped, transport):
        monkeypatch.setattr(module, "has_index_kernel", lambda *_: True)
    calls.clear()
    return calls


@pytest.mark.parametrize("mesh", [None, MeshSpec(data=2, expert=2, tensor=2)])
def test_the_layer_without_copies_is_the_layer(mesh, in_the_layer, monkeypatch):
    leaves = LAYER.leaves(D, 1.0, 1.0)
    params = {
        name: normal(*leaf.shape, seed=seed) for seed, (name, leaf) in enumerate(leaves.items())
    }
    x = normal(B, T, D)
    if mesh is None:
        got = jax.block_until_ready(mixture(LAYER, params, x))
        # Three products, as many back and three gradients of weights: none of the first is made again.
        assert sorted(name for name, _ in in_the_layer) == ["product"] * 6 + ["weight_gradient"] * 3
        assert {shape for name, shape in in_the_layer} == {
            (B * T, D),
            (2 * B * T, F),
        }  # nowhere as many rows of D
    else:
        axes = {name: leaf.axes for name, leaf in leaves.items()}
        with use_mesh(make_mesh(mesh)):
            got = jax.device_get(
                mixture(LAYER, shard(params, axes), shard(x, ("batch", "seq", None)))
            )
        assert in_the_layer
    for module in (grouped, transport):
        monkeypatch.setattr(module, "has_index_kernel", lambda *_: False)
    assert_close(
        got, mixture(LAYER, params, x), 1e-5
    )  # float32: weights multiply before the last product, not after


# Who takes it -----------------------------------------------------------------------------------------------------


def test_who_takes_the_kernel(monkeypatch):
    grouped._is_right.cache_clear()
    monkeypatch.setattr(by_index, "available", lambda: True)
    monkeypatch.setattr(grouped, "_is_right", lambda: True)
    assert not grouped.has_index_kernel("bfloat16", 64, 64)  # on a CPU
    monkeypatch.setattr(grouped, "platform", lambda: "gpu")
    assert all(grouped.has_index_kernel(dtype, 64, 16) for dtype in ("bfloat16", jnp.float16))
    no = [("float32", 64, 64), ("float64", 64, 64), ("bfloat16", 8, 64), ("bfloat16", 64, 24)]
    assert not any(grouped.has_index_kernel(*each) for each in no)
    monkeypatch.setattr(grouped, "_is_right", lambda: False)
    assert not grouped.has_index_kernel("bfloat16", 64, 64)
    monkeypatch.setattr(by_index, "available", lambda: False)
    monkeypatch.setattr(grouped, "_is_right", lambda: pytest.fail("there is nothing to try"))
    assert not grouped.has_index_kernel("bfloat16", 64, 64)


@pytest.mark.parametrize("wrong", [False, True])
def test_a_trial_tells_right_from_wrong(wrong, monkeypatch):
    """With the loop over tiles in the kernel's place, and a gradient of a weight that is a twentieth off, or right."""
    grouped._is_right.cache_clear()
    monkeypatch.setattr(by_index, "available", lambda: True)
    monkeypatch.setattr(by_index, "DEEP", 8)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")

    def product(x, w, sizes, read, write, transposed):
        order = dict(read=read.of, write=write, impl="tiles")
        return grouped_matmul(x, w.swapaxes(1, 2) if transposed else w, sizes, **order)

    def gradient(x, g, sizes, read, write):
        x, g = (grouped._rows(a, *index) for a, index in ((x, read), (g, write)))
        dw = grouped._weight_gradient_by_tiles(x, g, sizes)
        return dw * 1.05 if wrong else dw

    monkeypatch.setattr(by_index, "product", product)
    monkeypatch.setattr(by_index, "weight_gradient", gradient)
    if wrong:
        with pytest.warns(
            UserWarning,
            match="Triton's grouped product is not used, the loop over tiles is: its error is",
        ):
            assert not grouped._is_right()
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert grouped._is_right()
    grouped._is_right.cache_clear()


def test_tiles_of_the_work():
    """Large ones for long sums alone; all within the shared memory of a Hopper GPU, and its registers."""
    for rows, columns, terms in (
        (4096, 8192, 2048),
        (2048, 1024, 2048),
        (2048, 512, 1024),
        (1, 128, 64),
        (500, 16, 16),
    ):
        tile = by_index.cut_for(rows, columns, terms, "bfloat16")
        assert (tile.columns == 256) == (rows > 64 and columns >= 256 and terms >= by_index.DEEP)
        assert tile.rows == (128 if rows > 64 else 64) and tile.columns <= max(64, 2 * columns)
        one_more = tile.stages + 1
        assert (tile.rows + tile.columns) * tile.terms * 2 * one_more <= 227 * 1024
        assert tile.rows * tile.columns / (32 * tile.warps) <= 128  # sums a thread holds
    assert by_index.cut_for(4096, 8192, 8192, "float32").columns == 64


@pytest.mark.parametrize(
    "how, message",
    [
        (
            dict(read=np.zeros(5, int)),
            r"read \(5,\) and write None do not fit x \(4, 3\); legal are \[M\] of both",
        ),
        (
            dict(read=np.zeros(8, int), write=np.zeros(4, int)),
            r"read \(8,\) and write \(4,\) do not fit",
        ),
        (dict(summed=2), "summed=2 is not a divisor of the 4 rows that `write` places"),
        (dict(write=np.arange(4), summed=3), "summed=3 is not a divisor of the 4 rows"),
        (
            dict(impl="kernel"),
            "impl='kernel' needs a CUDA GPU with jax_triton, and bfloat16, float16 or float32",
        ),
    ],
)
def test_mistakes_are_told(how, message, monkeypatch):
    monkeypatch.setattr(by_index, "available", lambda: False)
    with pytest.raises(UsageError, match=message):
        grouped_matmul(np.ones((4, 3), np.float32), np.ones((2, 3, 5)), np.ones(2, int), **how)
