"""Every layout over eight devices computes what one device computes, with the collectives it declares."""

import functools

import hlo
import jax
import numpy as np
import pytest
from tolerance import LAYOUT, assert_close

from jaxpar.lm import LMConfig, OptimizerConfig, Trainer, loss
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, place_rows, use_mesh

ONE = (1, 1, 1)
LAYOUTS = [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2)]  # (data, fsdp, tensor)
ROWS, LENGTH, VOCAB = 16, 16, 128

LLAMA = LMConfig(
    vocab_size=VOCAB, max_seq_len=LENGTH, num_layers=2, embed_dim=32, num_heads=16, num_kv_heads=8, head_dim=4,
    mlp_dim=64, dtype="float32", loss_chunk=24, init_std=0.1,
)  # fmt: skip
GPT2 = LMConfig(
    vocab_size=VOCAB, max_seq_len=LENGTH, num_layers=2, embed_dim=32, num_heads=8, mlp_dim=64, norm="layer",
    positions="learned", activation="gelu", bias=True, tied=True, dropout=0.2, dtype="float32", loss_chunk=24,
    init_std=0.1,
)  # fmt: skip
TRAINERS = {
    "llama-adamw": Trainer(LLAMA, OptimizerConfig(warmup_steps=2), num_steps=10),
    "gpt2-muon-accumulate": Trainer(GPT2, OptimizerConfig("muon", warmup_steps=2), num_steps=10, accumulate=2),
    "gpt2-adamw": Trainer(GPT2, OptimizerConfig(warmup_steps=2), num_steps=10),
    "llama-muon-accumulate": Trainer(LLAMA, OptimizerConfig("muon", warmup_steps=2), num_steps=10, accumulate=2),
}
# A key bias adds the same number to all scores of a query, so softmax undoes it (GPT-2 has no rotation in
# between): its gradient is zero but for rounding, which Adam scales to whole steps of the learning rate.
NOISE = ("bk",)

each_layout = pytest.mark.parametrize("sizes", LAYOUTS, ids=lambda sizes: "x".join(map(str, sizes)))


def mesh_of(sizes):
    return make_mesh(MeshSpec(*sizes), jax.devices()[: int(np.prod(sizes))])


def batch_of(step):
    rng = np.random.default_rng(step)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH + 1), dtype=np.int32)
    weights = rng.choice([0.0, 0.5, 1.0], (ROWS, LENGTH)).astype(np.float32)
    whole = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    return place_rows(lambda rows: {name: x[rows] for name, x in whole.items()}, ROWS)


@functools.cache
def program(name, sizes, dtype):
    """The compiled step, and the shardings of its state; to be called under the mesh."""
    del sizes, dtype  # they are in the key: the ambient mesh and jax.enable_x64 are in the program
    trainer = trainer_of(name)
    shardings = named_shardings(jax.eval_shape(trainer.init, jax.random.key(0)), trainer.axes())
    state = jax.jit(trainer.init, out_shardings=shardings)(jax.random.key(0))
    step = jax.jit(trainer.step, donate_argnums=1, out_shardings=(shardings, None))
    return step.lower(jax.random.key(1), state, batch_of(0)).compile(), shardings


def trainer_of(name):
    trainer = TRAINERS[name]
    if jax.config.jax_enable_x64:
        model = LMConfig(**(vars(trainer.model) | {"dtype": "float64"}))
        trainer = Trainer(model, trainer.optimizer, trainer.num_steps, trainer.accumulate)
    return trainer


@functools.cache
def outcome(name, sizes, dtype):
    """Loss, gradients and the state after three steps under a layout, on the host."""
    trainer = trainer_of(name)
    with use_mesh(mesh_of(sizes)):
        step, shardings = program(name, sizes, dtype)
        state = jax.jit(trainer.init, out_shardings=shardings)(jax.random.key(0))
        dropout_key = jax.random.key(2) if trainer.model.dropout else None
        gradient = jax.jit(jax.value_and_grad(lambda p, b: loss(p, b, trainer.model, dropout_key=dropout_key)))
        value, grads = jax.device_get(gradient(state.params, batch_of(0)))
        assert value.dtype == dtype and {x.dtype for x in jax.tree.leaves(grads)} == {np.dtype(dtype)}
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
    moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), state.params, init_on_host(name))
    assert min(jax.tree.leaves(moved)) > 1e-4, "three steps must move every leaf, or nothing is compared"


def _integers(tree):
    return [x for x in jax.tree.leaves(tree) if x.dtype.kind in "iu"]


def init_on_host(name):
    return jax.device_get(trainer_of(name).init(jax.random.key(0)).params)


@each_layout
@pytest.mark.parametrize("name", ["llama-adamw", "gpt2-muon-accumulate"])
def test_layout_equals_one_device_float32(name, sizes):
    assert_equals_one_device(name, sizes, "float32")


@pytest.mark.slow
@each_layout
@pytest.mark.parametrize("name", ["gpt2-adamw", "llama-muon-accumulate"])
def test_layout_equals_one_device_float32_more(name, sizes):
    assert_equals_one_device(name, sizes, "float32")


@each_layout
def test_layout_equals_one_device_float64_llama(x64, sizes):
    assert_equals_one_device("llama-adamw", sizes, "float64")


def test_layout_equals_one_device_float64_gpt2(x64):
    assert_equals_one_device("gpt2-muon-accumulate", (2, 2, 2), "float64")


@each_layout
@pytest.mark.parametrize("name", ["llama-adamw", "gpt2-muon-accumulate"])
def test_donation_covers_the_whole_state(name, sizes):
    with use_mesh(mesh_of(sizes)):
        compiled, shardings = program(name, sizes, "float32")
        state = jax.eval_shape(trainer_of(name).init, jax.random.key(0))
    size = sum(
        np.prod(sharding.shard_shape(leaf.shape), dtype=int) * leaf.dtype.itemsize
        for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    )
    assert compiled.memory_analysis().alias_size_in_bytes >= size
    # The state is really split: a layout that copied it would have as many bytes on each device as one device.
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert size < 1.1 * whole / (sizes[1] * sizes[2]) + 16 * 1024
