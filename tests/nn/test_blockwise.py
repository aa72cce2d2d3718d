"""Layers computed by blocks of tokens: equal to the plain ones in value and gradient, with memory linear in T."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import OPTIONS, jit
from lm_configs import with_fields
from tolerance import assert_close
from traced import count_products

from jaxpar.aot.hlo import collectives
from jaxpar.lm import loss
from jaxpar.lm.params import axes as axes_of
from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.nn import mlp as mlp_module
from jaxpar.nn.attention import (
    Attention,
    AttentionExecution,
    Visibility,
    Visible,
    attention,
    blockwise,
)
from jaxpar.nn.linear import Lora
from jaxpar.nn.mlp import Mlp, mlp_by_blocks
from jaxpar.nn.stack import Stack
from jaxpar.types import UsageError

B, T, H, G, K = 2, 23, 4, 2, 4
FLOAT64, FLOAT32 = 1e-10, 1e-5  # sums are taken in another order, over some tens of blocks


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks that do not divide the lengths below, fewer of keys: several, the last of them filled up."""
    monkeypatch.setattr(blockwise, "QUERIES", 5)
    monkeypatch.setattr(blockwise, "KEYS", 8)
    monkeypatch.setattr(mlp_module, "BLOCK", 7)


def normal(*shape, seed=0, dtype=np.float64):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


# ---------------------------------------------------------------- attention

WINDOW = np.array([[0] * 11 + [1] * 12, [3] * 23])
ONE = np.zeros((B, T), int)  # document
CAUSAL = Visible()
RULES = {
    "causal": {},
    "both ways": {"visible": Visible(causal=False)},
    "documents": {"segments": np.array([[0] * 4 + [1] * 12 + [2] * 7, [0] * 23])},
    "documents in a window": {"segments": WINDOW, "visible": Visible(window=3)},
    "window": {"segments": ONE, "visible": Visible(window=7)},
    "slopes": {"slopes": np.array([0.5, 0.25, 0.125, 0.1])},
}


@functools.partial(jit, static_argnames=("by_blocks", "visible"))
def mixed(q, k, v, segments=None, slopes=None, visible=CAUSAL, by_blocks=True):
    execution = AttentionExecution(impl="xla", blockwise=by_blocks)

    def weighted(q, k, v, slopes):
        visibility = Visibility(rule=visible, slopes=slopes)
        out = attention(q, k, v, segments=segments, visibility=visibility, execution=execution)
        return (out * jnp.cos(jnp.arange(out.size, dtype=q.dtype)).reshape(out.shape)).sum(), out

    grads, out = jax.grad(weighted, (0, 1, 2, 3), has_aux=True)(q, k, v, slopes)
    return out, grads


@jit
def dense(q, k, v, seen, slopes):
    """The same of any rule, and of one group for each head."""

    def weighted(q, k, v, slopes):
        distance = jnp.arange(T)[:, None] - jnp.arange(T)[None]
        scores = jnp.einsum("bthk,bshk->bhts", q, k) / q.shape[-1] ** 0.5
        scores = scores - slopes[None, :, None, None] * jnp.abs(distance)[None, None].astype(
            q.dtype
        )
        out = jnp.einsum(
            "bhts,bshk->bthk", jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf)), v
        )
        return (out * jnp.cos(jnp.arange(out.size, dtype=q.dtype)).reshape(out.shape)).sum(), out

    grads, out = jax.grad(weighted, (0, 1, 2, 3), has_aux=True)(q, k, v, slopes)
    return out, grads


def wanted(q, k, v, segments=ONE, slopes=None, visible=None):
    places = np.arange(T)[None]
    seen = np.asarray((visible or Visible())(places, places)) & (
        segments[:, :, None] == segments[:, None]
    )
    k, v = (jnp.repeat(x, H // G, 2) for x in (k, v))
    out, (dq, *both, dslopes) = dense(
        q, k, v, seen, np.zeros(H, q.dtype) if slopes is None else slopes
    )
    both = (x.reshape(B, T, G, H // G, K).sum(3) for x in both)
    return out, (dq, *both, None if slopes is None else dslopes)


# The last in CI with documents, the other one with slopes alone.
IN_FLOAT32 = [
    ("documents in a window", "float32"),
    pytest.param("slopes", "float32", marks=pytest.mark.slow),
]  # 1 s


@pytest.mark.parametrize(("rule", "dtype"), [(rule, "float64") for rule in RULES] + IN_FLOAT32)
def test_attention_by_blocks_is_attention(rule, dtype, small_blocks, x64):
    q, k, v = (normal(B, T, heads, K, seed=n, dtype=dtype) for n, heads in enumerate((H, G, G)))
    options = {name: x.astype(dtype) if name == "slopes" else x for name, x in RULES[rule].items()}
    assert_close(
        mixed(q, k, v, **options),
        wanted(q, k, v, **options),
        {"float64": FLOAT64, "float32": FLOAT32}[dtype],
    )


@pytest.mark.parametrize("length", [1, 10])  # one block, and two that nothing fills up
def test_any_length_is_cut(length, small_blocks, x64):
    q, k, v = (normal(1, length, 2, K, seed=n) for n in range(3))
    got, want = (mixed(q, k, v, by_blocks=by_blocks) for by_blocks in (True, False))
    assert_close(got, want, FLOAT64)


@pytest.mark.parametrize(
    "sizes", [(8, 3), pytest.param((6, T), marks=pytest.mark.slow)]
)  # 1 s each
def test_blocks_of_queries_and_of_keys_have_any_sizes(sizes, monkeypatch, x64):
    for name, size in zip(("QUERIES", "KEYS"), sizes, strict=True):
        monkeypatch.setattr(blockwise, name, size)
    q, k, v = (normal(B, T, heads, K, seed=n) for n, heads in enumerate((H, G, G)))
    anew = jit(
        mixed.__wrapped__, static_argnames=("by_blocks", "visible")
    )  # the sizes are no arguments
    rule = RULES["documents in a window"]
    assert_close(anew(q, k, v, **rule), wanted(q, k, v, **rule), FLOAT64)


def test_blocks_are_few_and_of_one_size():
    cuts = [blockwise._Cut.of(length, 5) for length in (1, 5, 6, 10, 11, T)]
    assert [(cut.count, cut.size) for cut in cuts] == [
        (1, 1),
        (1, 5),
        (2, 3),
        (2, 5),
        (3, 4),
        (5, 5),
    ]


@pytest.mark.parametrize("sizes", [(5, 5), (5, 8), (8, 5), (23, 4), (4, 23)])
@pytest.mark.parametrize(
    "visible", [Visible(), Visible(window=7), Visible(window=6), Visible(window=1)], ids=str
)
def test_blocks_that_the_rule_hides_are_not_visited(sizes, visible):
    pairs = blockwise._Pairs(*(blockwise._Cut.of(T, size) for size in sizes))
    seen = visible(np.arange(T)[None], np.arange(T)[None])[0]
    for i, j in itertools.product(range(pairs.queries.count), range(pairs.keys.count)):
        rows, columns = (
            slice(n * cut.size, (n + 1) * cut.size)
            for n, cut in ((i, pairs.queries), (j, pairs.keys))
        )
        assert bool(pairs.is_seen(i, j, visible)) == bool(seen[rows, columns].any()), (i, j)


# ---------------------------------------------------------------- the mlp

MLPS = {
    "swiglu": Mlp(12),
    "gelu with biases": Mlp(12, "gelu", bias=True),
}


def mlp_params(mlp, dtype):
    return {
        name: 0.3 * normal(*leaf.shape, seed=n, dtype=dtype)
        for n, (name, leaf) in enumerate(mlp.leaves(8, 1, 1).items())
    }


def run_mlp(apply, params, x):
    def weighted(params, x):
        y = apply(params, x)
        return (y * jnp.cos(jnp.arange(y.size, dtype=x.dtype)).reshape(y.shape)).sum(), y

    grads, y = jit(jax.grad(weighted, (0, 1), has_aux=True))(params, x)
    return y, grads


@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float64") for name in MLPS), ("swiglu", "float32")]
)
def test_mlp_by_blocks_is_the_mlp(name, dtype, small_blocks, x64):
    mlp, x = MLPS[name], normal(B, 11, 8, dtype=dtype)
    params = mlp_params(mlp, dtype)
    got = run_mlp(lambda p, x: mlp_by_blocks(mlp, p, x, ("batch", None, None)), params, x)
    assert_close(
        got, run_mlp(mlp.products, params, x), {"float64": FLOAT64, "float32": FLOAT32}[dtype]
    )


def test_gradients_of_weights_are_summed_wider_than_they_are(monkeypatch):
    """Of 512 blocks of one token: summed in bfloat16, what is added would be lost in what there is."""
    mlp = Mlp(4)
    x = jnp.ones((1, 512, 8), jnp.bfloat16)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), mlp_params(mlp, np.float32))
    monkeypatch.setattr(mlp_module, "BLOCK", 1)
    got = jit(
        jax.grad(lambda p: mlp_by_blocks(mlp, p, x, (None, None, None)).astype(jnp.float32).sum())
    )(params)
    one = jit(jax.grad(lambda p: mlp.products(p, x[:, :1]).astype(jnp.float32).sum()))(params)
    want = jax.tree.map(lambda g: 512 * g.astype(jnp.float32), one)
    assert_close(jax.tree.map(lambda g: g.astype(jnp.float32), got), want, 2.0**-8)


def test_other_weights_go_by_blocks_too(small_blocks, x64):
    mlp, x = Mlp(12), normal(B, 11, 8)
    params = mlp_params(mlp, np.float64)
    adapted = Lora.of(jax.random.key(0), params["w_up"], 1, 2)
    params = params | {"w_up": adapted.replace(up=adapted.up + 0.1)}
    got = run_mlp(lambda p, x: mlp_by_blocks(mlp, p, x, ("batch", None, None)), params, x)
    assert_close(got, run_mlp(mlp.products, params, x), FLOAT64)


# ---------------------------------------------------------------- models

LLAMA = tiny.exact(tiny.LLAMA)
MODELS = {
    "llama": LLAMA,
    "gpt2": dataclasses.replace(tiny.exact(tiny.GPT2), max_seq_len=32),
    "aaren": with_fields(LLAMA, mixer="aaren", dropout=0.2),
}


def batch(rows=4, length=11, packed=False):
    out = tiny.batch_of(batch=rows, length=length)
    if packed:
        segments = np.sort(np.random.default_rng(2).integers(0, 3, (rows, length)), 1)
        out["segments"] = segments
        out["positions"] = np.stack(
            [[np.sum(row[:t] == row[t]) for t in range(length)] for row in segments]
        )
    return jax.tree.map(jnp.asarray, out)


@functools.cache
def gradient_of(name, remat, scan_layers, packed, dtype="float64"):
    config = with_fields(
        MODELS[name], remat=remat, scan_layers=scan_layers, dtype=dtype, ranges=True
    )
    key = jax.random.key(3) if config.dropout else None
    run = jit(jax.value_and_grad(lambda p, data: loss(p, data, config, dropout_key=key)))
    return run(tiny.params_of(config), batch(packed=packed))


@pytest.mark.parametrize(
    ("name", "scan_layers", "packed", "dtype"),
    [
        ("llama", True, False, "float64"),
        ("llama", False, True, "float32"),
        ("gpt2", True, True, "float64"),
        pytest.param(
            "llama", False, True, "float64", marks=pytest.mark.slow
        ),  # 2 s each; pairs of those here
        pytest.param("llama", True, True, "float32", marks=pytest.mark.slow),
        ("aaren", True, False, "float64"),
    ],
)
def test_a_model_by_blocks_is_the_model(name, scan_layers, packed, dtype, small_blocks, x64):
    """Dropout of the branches included: its masks are drawn for all tokens, as without blocks."""
    got = gradient_of(name, "blockwise", scan_layers, packed, dtype)
    want = gradient_of(name, "none", True, packed, dtype)
    assert_close(got, want, {"float64": FLOAT64, "float32": FLOAT32}[dtype])


MESHES = {
    "data=2 fsdp=2 tensor=2": (MeshSpec(data=2, fsdp=2, tensor=2), "zero3"),
    "fsdp=2 context=4": (MeshSpec(fsdp=2, context=4), "zero3"),
    "fsdp=2 tensor=4 sequence": (MeshSpec(fsdp=2, tensor=4), "sequence"),
}


@functools.cache
def on_a_mesh(name, remat):
    config = with_fields(MODELS[name], remat=remat, dtype="float32", num_kv_heads=4)
    run = jax.value_and_grad(lambda p, data: loss(p, data, config))
    return config, tiny.params_of(config), batch(length=12, packed=True), run


@functools.cache
def on_one_device(name):
    _, params, data, run = on_a_mesh(name, "none")
    return jit(run)(params, data)


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        ("fsdp=2 context=4", "llama"),
        ("fsdp=2 tensor=4 sequence", "gpt2"),
        pytest.param(
            "data=2 fsdp=2 tensor=2", "llama", marks=pytest.mark.slow
        ),  # 2 s each; as sequence with fsdp
        pytest.param("data=2 fsdp=2 tensor=2", "gpt2", marks=pytest.mark.slow),
        pytest.param("fsdp=2 context=4", "gpt2", marks=pytest.mark.slow),
        pytest.param("fsdp=2 tensor=4 sequence", "llama", marks=pytest.mark.slow),
    ],
)
def test_a_mesh_changes_nothing(mesh, name, small_blocks):
    """Every device takes blocks of its own tokens and shares of the weights."""
    config, params, data, run = on_a_mesh(name, "blockwise")
    want = on_one_device(name)
    spec, layout = MESHES[mesh]
    with use_mesh(make_mesh(spec), rules_from({}, layout)):
        split = shard(params, axes_of(config))
        got = jax.device_get(
            jit(run)(split, shard(data, jax.tree.map(lambda _: ("batch", None), data)))
        )
    assert_close(got, want, FLOAT32)


def test_devices_add_gradients_up_once_and_not_in_each_block(small_blocks):
    """As many sums and gathers as with "full", none of them in a loop."""
    found = {}
    for remat in ("blockwise", "full"):
        config = with_fields(
            MODELS["llama"], remat=remat, dtype="float32", scan_layers=False, num_layers=1
        )
        with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))) as mesh:
            params, data = shard(tiny.params_of(config), axes_of(config)), batch(rows=8, length=12)
            data = shard(data, jax.tree.map(lambda _: ("batch", None), data))
            run = jit(jax.grad(lambda p, data, config=config: loss(p, data, config)))
            sums = [one for one in collectives(run.lower(params, data).compile().as_text(), mesh)]
        assert {one.trips for one in sums} == {1}
        found[remat] = sum(
            len(one.shapes) for one in sums if one.kind == "all-reduce" and "tensor" in one.axes
        )
    assert found["blockwise"] <= found["full"]


def test_recomputation_is_of_one_forward_pass():
    """As many products as with "full", whose second pass of the mlp is that of the blocks; and each block's scores."""

    def count(remat):
        config = with_fields(MODELS["llama"], dtype="float32", remat=remat, mixer="min_gru")
        params = tiny.params_of(config)
        return count_products(
            jax.make_jaxpr(jax.grad(lambda p: loss(p, batch(), config)))(params).jaxpr
        )

    assert count("blockwise") == count("full")


# ---------------------------------------------------------------- memory


def temporaries(remat, length, mlp_dim=32, scan_layers=True):
    stack = Stack(
        2,
        16,
        Attention(2, 1, 8, impl="xla"),
        Mlp(mlp_dim),
        remat=remat,
        dtype="float32",
        scan_layers=scan_layers,
    )
    params = jax.eval_shape(lambda: stack.init(jax.random.key(0)))
    x = jax.ShapeDtypeStruct((1, length, 16), jnp.float32)
    run = jax.jit(
        jax.grad(lambda p, x: jnp.square(stack.apply(p, x)[0]).sum(), (0, 1)),
        compiler_options=OPTIONS,
    )
    return run.lower(params, x).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("scan_layers", [True, pytest.param(False, marks=pytest.mark.slow)])  # 5 s
def test_memory_grows_with_the_length_and_not_with_its_square(scan_layers, monkeypatch):
    for name in ("QUERIES", "KEYS"):
        monkeypatch.setattr(blockwise, name, 128)
    monkeypatch.setattr(mlp_module, "BLOCK", 128)
    sizes = [
        temporaries("blockwise", length, scan_layers=scan_layers) for length in (2048, 4096, 8192)
    ]
    assert all(twice <= 2.1 * once for once, twice in itertools.pairwise(sizes)), sizes
    if not scan_layers:
        dense = [temporaries("full", length) for length in (2048, 4096)]
        assert dense[1] >= 3.5 * dense[0], dense


def test_no_memory_is_of_all_tokens_by_the_width_of_the_mlp(monkeypatch):
    """Four times the width of the mlp costs what the weights and one block need."""
    for name in ("QUERIES", "KEYS"):
        monkeypatch.setattr(blockwise, name, 128)
    monkeypatch.setattr(mlp_module, "BLOCK", 64)
    narrow, wide = (temporaries("blockwise", 1024, width) for width in (256, 1024))
    assert wide - narrow < 4 * 1024 * 768, (narrow, wide)


@pytest.mark.slow  # 3 s
def test_without_blocks_memory_is_of_all_tokens_by_the_width_of_the_mlp():
    narrow, wide = (temporaries("full", 1024, width) for width in (256, 1024))
    assert wide - narrow > 2 * 4 * 1024 * 768, (narrow, wide)


# ---------------------------------------------------------------- mistakes


def test_what_has_no_blocks_is_refused():
    config = with_fields(MODELS["llama"], dtype="float32", remat="blockwise", dropout=0.1)
    with pytest.raises(
        UsageError, match="remat=blockwise needs dropout 0 in attention.*or remat=full"
    ):
        loss(tiny.params_of(config), batch(), config, dropout_key=jax.random.key(0))
