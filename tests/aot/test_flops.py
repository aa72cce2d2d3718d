"""Counted operations against hand formulas, and against the model's own count."""

import jax
import jax.numpy as jnp
import pytest
from lm_configs import lm_config

from jaxpar.aot import count_flops
from jaxpar.lm import OptimizerConfig, Trainer, flops_per_token, loss
from jaxpar.lm.params import abstract
from jaxpar.mesh import MeshSpec, local, make_mesh, use_mesh

A, B = jax.ShapeDtypeStruct((3, 4, 5), jnp.float32), jax.ShapeDtypeStruct((3, 5, 7), jnp.float32)
SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)
ONE = 2 * 8**3  # of a product of two squares


def test_products_and_convolutions():
    count = count_flops(lambda a, b: a @ b, A, B)
    assert count.total == 2 * 3 * 4 * 5 * 7 and count.matmul_bytes == 4 * 3 * (
        4 * 5 + 5 * 7 + 4 * 7
    )
    image, kernel = (
        jax.ShapeDtypeStruct((2, 3, 10), jnp.float32),
        jax.ShapeDtypeStruct((6, 3, 4), jnp.float32),
    )
    count = count_flops(
        lambda x, w: jax.lax.conv_general_dilated(x, w, (1,), "VALID"), image, kernel
    )
    assert count.total == 2 * (2 * 6 * 7) * (3 * 4)


def five(fn, x):
    return jax.lax.scan(lambda c, _: (fn(c), None), x, None, 5)[0]


@pytest.mark.parametrize(
    ("fn", "times"),
    [
        (lambda x: five(lambda c: jax.lax.fori_loop(0, 3, lambda _, d: d @ d, c), x), 15),
        (lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x), 2),
        (lambda x: jax.jit(jax.checkpoint(lambda x: x @ x))(x), 1),
        (lambda x: jax.grad(lambda x: (jnp.sin(x) @ x).sum())(x), 3),
        (lambda x: jax.vmap(lambda s: (s * x) @ x)(jnp.ones(4)), 4),
        (lambda x: jax.lax.fori_loop(0, 6, lambda _, c: c @ c, x), 6),
    ],
    ids=["nested scans", "dearest branch", "jit and checkpoint", "gradient", "vmap", "fori"],
)  # fmt: skip
def test_structure(fn, times):
    assert count_flops(fn, SQUARE)[::2] == (times * ONE, 0)


def test_a_loop_of_unknown_length_counts_once_and_is_told():
    count = count_flops(
        lambda x: jax.lax.while_loop(lambda x: x.sum() < 1, lambda x: x @ x, x), SQUARE
    )
    assert (count.total, count.unknown_loops) == (ONE, 1)


def test_a_block_counts_on_each_device():
    with use_mesh(make_mesh(MeshSpec(data=8), jax.devices())):
        split = local(lambda x: x @ x.T, [("batch", None)], ("batch", None))
        assert count_flops(split, SQUARE).total == 8 * 2 * 1 * 8 * 1  # each its own row
        whole = local(lambda x: x @ x, [(None, None)], (None, None))
        assert count_flops(whole, SQUARE).total == 8 * ONE  # repeated by all


def step_flops(**changes):
    config = lm_config(
        num_layers=3, embed_dim=128, num_heads=2, head_dim=64, mlp_dim=256, **changes
    )
    trainer = Trainer(config, OptimizerConfig(warmup_steps=1))
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(trainer.init, key)
    batch = {name: jax.ShapeDtypeStruct((2, 256), jnp.int32) for name in ("tokens", "targets")}
    forward = count_flops(lambda p, b: loss(p, b, config), abstract(config), batch).total
    return config, count_flops(trainer.step, key, state, batch).total, forward


@pytest.mark.parametrize(
    "changes", [{}, {"scan_layers": False}, {"num_kv_heads": 1, "tied": True}], ids=str
)
def test_a_train_step_counts_what_the_model_says(changes):
    config, total, forward = step_flops(attention="xla", **changes)
    assert total == 2 * 256 * flops_per_token(config, 256) == 3 * forward


def test_full_recomputation_is_a_fourth_forward():
    config, total, forward = step_flops(attention="xla", remat="full")
    head = 2 * 2 * 256 * config.embed_dim * config.vocab_size  # the loss recomputes nothing
    last = (
        2 * 2 * 256 * config.mlp.dim * config.embed_dim * config.num_layers
    )  # no gradient needs its result
    assert total == 4 * (forward - head) + 3 * head - last


def test_the_kernel_for_tpus_counts_as_dense_attention_does():
    """Its backward pass makes the scores and their gradient in both of its kernels: 9 products for 6."""
    config, dense, _ = step_flops(attention="xla")
    _, kernel, _ = step_flops(attention="splash")
    one = (
        2 * config.num_layers * 2 * 2 * 256 * 256 * 64
    )  # a product of scores' size in all layers and rows
    assert (kernel - dense) / one == pytest.approx(3, rel=0.01)
