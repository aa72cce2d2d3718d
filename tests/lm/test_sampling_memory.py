"""Sampling holds 16-bit weights once, also on CPUs, which convert a block at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import lm_config, with_fields

from jaxpar.decode import Sampling
from jaxpar.lm import init
from jaxpar.lm.sample import empty_cache, extend, generate
from jaxpar.nn import linear

MODEL = lm_config(
    vocab_size=6000,
    num_layers=8,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=2048,
    dtype="bfloat16",
)
HYBRID = with_fields(
    tiny.LLAMA, num_layers=4, mixers=("min_gru", "attention"), dtype="bfloat16", init_std=0.3
)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="16 bits are multiplied as they are")
def test_sampling_needs_no_copy_of_the_weights(monkeypatch):
    monkeypatch.setattr(linear, "BLOCK", 16)
    monkeypatch.setattr(linear, "PART", 100)
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), MODEL))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    weights = sum(2 * x.size for x in jax.tree.leaves(params))
    run = jax.jit(functools.partial(generate, config=MODEL, sampling=Sampling(4)))
    compiled = run.lower(jax.random.key(0), params, jnp.zeros((1, 4), jnp.int32)).compile()
    needs = compiled.memory_analysis().temp_size_in_bytes
    # Caches, logits, and blocks of weights; a float32 copy of the weights would be twice theirs.
    assert needs < weights / 10


def test_layers_in_blocks_are_the_layers():
    params = tiny.params_of(HYBRID)
    tokens = tiny.tokens()
    one = jit(functools.partial(extend, config=HYBRID))
    held = HYBRID.stack().for_decoding(params)
    assert isinstance(held["layers"][3]["wo"], linear.InBlocks)
    found, cache = one(held, tokens, empty_cache(HYBRID, len(tokens), 8))
    unstacked = HYBRID.stack().unstacked(params)
    want, known = one(unstacked, tokens, empty_cache(HYBRID, len(tokens), 8))
    # XLA leaves out other roundings to 16 bits where it fuses others; another layer is far off.
    for a, b in zip(jax.tree.leaves((found, cache)), jax.tree.leaves((want, known)), strict=True):
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        assert np.abs(a - b).mean() <= 0.05 * np.abs(b).mean()


def assert_same_product(product, want, x, weight):
    """Compares values and gradients of two products of 16-bit numbers."""
    np.testing.assert_allclose(product(x, weight), want(x, weight), rtol=1e-2, atol=1e-2)

    def gradients(function):
        def sums(x, weight):
            return jnp.sin(function(x, weight).astype(jnp.float32)).sum()

        found = jax.grad(sums, (0, 1))(x, weight)
        return [gradient.astype(jnp.float32) for gradient in found]

    # Sums over a hundred numbers of 8 bits each, rounded once more for each block.
    for a, b in zip(gradients(product), gradients(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0.03, atol=0.03 * np.abs(b).max())


@pytest.mark.parametrize("rows", [3, 7, 8])
def test_a_product_in_parts_is_the_product(rows, monkeypatch):
    monkeypatch.setattr(linear, "PART", rows)
    keys = jax.random.split(jax.random.key(rows), 2)
    x = jax.random.normal(keys[0], (2, 3, 4), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (7, 4), jnp.bfloat16)
    assert_same_product(
        lambda x, weight: linear.product_in_parts(x, weight, jnp.float32),
        lambda x, weight: jnp.einsum("btd,vd->btv", x, weight, preferred_element_type=jnp.float32),
        x,
        weight,
    )


@pytest.mark.parametrize("block", [2, 5, 6, 7])
@pytest.mark.parametrize(
    "equation", ["btd,dhk->bthk", "bthk,hkd->btd", "tbd,df->btf", "btd,fd->btf"]
)
def test_a_weight_in_blocks_is_its_layers_weight(equation, block, monkeypatch):
    monkeypatch.setattr(linear, "BLOCK", block)
    keys = jax.random.split(jax.random.key(block), 2)
    sizes = {"b": 2, "t": 3, "d": 6, "h": 2, "k": 3, "f": 5}
    of_x, of_weight = equation.split("->")[0].split(",")
    x = jax.random.normal(keys[0], [sizes[c] for c in of_x], jnp.bfloat16)
    stack = jax.random.normal(keys[1], [3, *(sizes[c] for c in of_weight)], jnp.bfloat16)
    axes = (None,) * len(of_weight)

    def in_blocks(x, stack):
        return linear.contract(equation, x, linear.InBlocks(stack=stack, layer=1), axes)

    assert in_blocks(x, stack).dtype == x.dtype
    assert_same_product(in_blocks, lambda x, stack: jnp.einsum(equation, x, stack[1]), x, stack)
