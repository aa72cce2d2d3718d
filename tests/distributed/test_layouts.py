"""Every layout over eight devices computes what one device computes, with the collectives it declares."""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from lm_configs import lm_config
from tolerance import LAYOUT, assert_close

from jaxpar.aot import hlo
from jaxpar.lm import OptimizerConfig, Trainer, loss
from jaxpar.mesh import MeshSpec, constrain, make_mesh, named_shardings, place_rows, shard, use_mesh

ONE = (1, 1, 1)
LAYOUTS = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2)]  # (data, fsdp, tensor)
ROWS, LENGTH, VOCAB = 16, 16, 128

LLAMA = lm_config(
    vocab_size=VOCAB, max_seq_len=LENGTH, num_layers=2, embed_dim=32, num_heads=16, num_kv_heads=8, head_dim=4,
    mlp_dim=64, dtype="float32", loss_chunk=24, init_std=0.1,
)  # fmt: skip
GPT2 = lm_config(
    vocab_size=VOCAB, max_seq_len=LENGTH, num_layers=2, embed_dim=32, num_heads=8, mlp_dim=64, norm="layer",
    positions="learned", activation="gelu", bias=True, tied=True, dropout=0.2, dtype="float32", loss_chunk=24,
    init_std=0.1,
)  # fmt: skip
# An entry whose gradient is zero but for rounding would move by a whole learning rate, either way, under Adam's usual
# eps of 1e-8: a hundred times the rounding error of these gradients keeps it from counting.
ADAMW, MUON = (OptimizerConfig(name, warmup_steps=2, eps=1e-6) for name in ("adamw", "muon"))
TRAINERS = {
    "llama-adamw": Trainer(LLAMA, ADAMW, num_steps=10),
    "llama-muon": Trainer(LLAMA, MUON, num_steps=10),
    "gpt2-adamw-accumulate": Trainer(GPT2, ADAMW, num_steps=10, accumulate=2),
    "gpt2-muon-accumulate": Trainer(GPT2, MUON, num_steps=10, accumulate=2),
}
# A key bias adds the same number to all scores of a query, so softmax undoes it (GPT-2 has no rotation in
# between): its whole gradient is such rounding, which the leaf's tolerance knows of and the optimizer does not.
NOISE = ("bk",)


each_layout = pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "x".join(map(str, sizes)))
each_program = pytest.mark.parametrize(
    ("name", "sizes"),
    [("llama-adamw", sizes) for sizes in LAYOUTS]
    + [("gpt2-adamw-accumulate", (2, 2, 2))]
    + [
        pytest.param("gpt2-adamw-accumulate", sizes, marks=pytest.mark.slow)
        for sizes in LAYOUTS
        if sizes != (2, 2, 2)
    ],
)


def mesh_of(sizes):
    return make_mesh(MeshSpec(*sizes), jax.devices()[: int(np.prod(sizes))])


def batch_of(step):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    weights = rng.choice([0.0, 0.5, 1.0], (ROWS, LENGTH)).astype(np.float32)
    whole = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    return place_rows(lambda rows: {name: x[rows] for name, x in whole.items()}, ROWS)


def trainer_of(name):
    trainer = TRAINERS[name]
    if jax.config.jax_enable_x64:
        trainer = dataclasses.replace(
            trainer, model=dataclasses.replace(trainer.model, dtype="float64")
        )
    return trainer


@functools.cache
def first_state(name, dtype):
    """The state before the first step, on the host."""
    assert dtype == trainer_of(name).model.dtype
    return jax.device_get(jit(trainer_of(name).init)(jax.random.key(0)))


@functools.cache
def program(name, sizes, dtype):
    """The compiled step under a layout, and its first state in place."""
    trainer = trainer_of(name)
    with use_mesh(mesh_of(sizes)):
        state = shard(first_state(name, dtype), trainer.axes())
        shardings = jax.tree.map(lambda x: x.sharding, state)
        step = jit(trainer.step, donate_argnums=1, out_shardings=(shardings, None))
        return step.lower(jax.random.key(1), state, batch_of(0)).compile(), state


@functools.cache
def outcome(name, sizes, dtype):
    """Loss, gradients and the state after three steps under a layout, on the host."""
    model = trainer_of(name).model
    step, state = program(name, sizes, dtype)
    state = jax.tree.map(jnp.copy, state)
    with use_mesh(mesh_of(sizes)):
        dropout_key = jax.random.key(2) if model.dropout else None
        gradient = jax.value_and_grad(lambda p, b: loss(p, b, model, dropout_key=dropout_key))
        value, grads = jax.device_get(jit(gradient)(state.params, batch_of(0)))
        assert value.dtype == dtype and {x.dtype for x in jax.tree.leaves(grads)} == {
            np.dtype(dtype)
        }
        for number in range(3):
            state, _ = step(jax.random.fold_in(jax.random.key(3), number), state, batch_of(number))
        return jax.device_get((value, grads, state))


def assert_equals_one_device(name, sizes, dtype):
    value, grads, state = outcome(name, sizes, dtype)
    one_value, one_grads, one_state = outcome(name, ONE, dtype)
    assert_close(value, one_value, LAYOUT[dtype])
    assert_close(grads, one_grads, LAYOUT[dtype])
    assert_close(state.params, one_state.params, LAYOUT[dtype], masked=NOISE)
    assert_close(state.opt_state, one_state.opt_state, LAYOUT[dtype], masked=NOISE)
    jax.tree.map(np.testing.assert_array_equal, *(_integers(s) for s in (state, one_state)))
    moved = jax.tree.map(
        lambda new, old: np.abs(new - old).max(), state.params, first_state(name, dtype).params
    )
    moved["layers"].pop("bk", None)
    assert min(jax.tree.leaves(moved)) > 1e-4, (
        "three steps must move every leaf, or nothing is compared"
    )


def _integers(tree):
    return [x for x in jax.tree.leaves(tree) if x.dtype.kind in "iu"]


@each_program
def test_layout_equals_one_device_float32(name, sizes):
    assert_equals_one_device(name, sizes, "float32")


@pytest.mark.slow
@each_layout
@pytest.mark.parametrize("name", ["llama-muon", "gpt2-muon-accumulate"])
def test_layout_equals_one_device_float32_muon(name, sizes):
    assert_equals_one_device(name, sizes, "float32")


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, marks=[] if sizes == (2, 2, 2) else [pytest.mark.slow])
        for sizes in LAYOUTS
    ],
    ids=lambda sizes: "x".join(map(str, sizes)),
)
def test_layout_equals_one_device_float64_llama(x64, sizes):
    assert_equals_one_device("llama-adamw", sizes, "float64")


@pytest.mark.slow
def test_layout_equals_one_device_float64_gpt2_muon(x64):
    assert_equals_one_device("gpt2-muon-accumulate", (2, 2, 2), "float64")


@each_program
def test_donation_covers_the_whole_state(name, sizes):
    compiled, state = program(name, sizes, "float32")
    leaves = jax.tree.leaves(state)
    size = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    # And the state is split: what is not are vectors and scalars.
    matrices = sum(x.nbytes for x in leaves if x.ndim > 2)
    assert size <= matrices / (sizes[1] * sizes[2]) + sum(x.nbytes for x in leaves if x.ndim <= 2)


# ---------------------------------------------------------------- collectives

# Arrays, scalars left out, that cross devices in one step of the Llama-like model: by kind and mesh axes. A layer is
# counted once: the layers run in a loop.
LAYER = 7  # wq wk wv wo w_gate w_up w_down
WEIGHTS = (
    2 * LAYER + 2
)  # gathered over fsdp forward and backward; the embedding and the head, once each
REST = 2 + 3  # gradients of the embedding, the head and the norms: two a layer, one at the end
# Forward: the embedding, after attention, after the mlp, and for the loss a maximum and a sum. Backward: into the
# three projections, into gate and up, and into the loss's features.
TENSOR = (1 + 1 + 1 + 2) + (3 + 2 + 1)
DECLARED = {
    (8, 1, 1): {("all-reduce", ("data",)): LAYER + REST},
    (1, 8, 1): {("all-gather", ("fsdp",)): WEIGHTS, ("all-reduce", ("fsdp",)): LAYER + REST},
    (1, 1, 8): {("all-reduce", ("tensor",)): TENSOR},
    (2, 2, 2): {
        ("all-gather", ("fsdp",)): WEIGHTS,
        # A layer's gradients first over fsdp, into shares, then the shares over data.
        ("all-reduce", ("fsdp",)): LAYER,
        ("all-reduce", ("data",)): LAYER,
        ("all-reduce", ("data", "fsdp")): REST,
        ("all-reduce", ("tensor",)): TENSOR,
    },
    (4, 1, 2): {("all-reduce", ("data",)): LAYER + REST, ("all-reduce", ("tensor",)): TENSOR},
}


def collectives_of(name, sizes):
    return hlo.collectives(program(name, sizes, "float32")[0].as_text(), mesh_of(sizes))


@each_layout
def test_collectives_are_the_declared_ones(sizes):
    found = collectives_of("llama-adamw", sizes)
    counts = collections.Counter((c.kind, c.axes) for c in found for shape in c.shapes if shape)
    assert counts == DECLARED[sizes], [c for c in found if (c.kind, c.axes) not in DECLARED[sizes]]
    # Scalars are the loss and the gradient's norm.
    used = {axis for axis, size in zip(("data", "fsdp", "tensor"), sizes, strict=True) if size > 1}
    scalars = {(c.kind, axis) for c in found for axis in c.axes if () in c.shapes}
    assert scalars <= {("all-reduce", axis) for axis in used}


@each_program
def test_no_logits_nor_shuffles_cross_devices(name, sizes):
    for c in collectives_of(name, sizes):
        assert c.kind in ("all-reduce", "all-gather", "reduce-scatter"), c
        for shape in c.shapes:
            # Activations are [rows, T, D] and [tokens of a chunk]; weights have no more than V D entries.
            assert math.prod(shape) <= max(
                ROWS * LENGTH * LLAMA.embed_dim, VOCAB * LLAMA.embed_dim
            ), c
            assert not (VOCAB in shape and (LENGTH in shape or ROWS * LENGTH in shape)), c


@pytest.mark.slow
def test_muon_trades_whole_matrices_and_shuffles_nothing():
    kinds = {c.kind for c in collectives_of("gpt2-muon-accumulate", (4, 1, 2))}
    assert kinds <= {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}


def test_an_added_collective_is_noticed():
    """The parser sees what GSPMD adds where a constraint is wrong."""
    mesh = mesh_of((2, 2, 2))
    with use_mesh(mesh):
        x = jax.device_put(
            jnp.zeros((8, 8)), jax.sharding.NamedSharding(mesh, jax.P("data", "tensor"))
        )
        text = jit(lambda x: constrain(x @ x.T, None, None)).lower(x).compile().as_text()
    kinds = {(c.kind, c.axes) for c in hlo.collectives(text, mesh)}
    assert ("all-reduce", ("tensor",)) in kinds and any(kind == "all-gather" for kind, _ in kinds)


def test_init_is_the_same_on_any_mesh():
    trainer = TRAINERS["llama-adamw"]
    with use_mesh(mesh_of((2, 2, 2))):
        shardings = named_shardings(jax.eval_shape(trainer.init, jax.random.key(0)), trainer.axes())
        state = jit(trainer.init, out_shardings=shardings)(jax.random.key(0))
    assert state.params["layers"]["wq"].sharding.spec == jax.P(None, "fsdp", "tensor", None)
    # The bits of the keys are equal; the normal distribution's polynomial is rounded as it is compiled.
    assert_close(state.params, first_state("llama-adamw", "float32").params, 1e-6)
