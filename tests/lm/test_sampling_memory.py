"""Sampling holds 16-bit weights once, also on CPUs, where a layer is converted at its turn."""

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
def test_sampling_needs_few_copies_of_the_weights():
    shapes = jax.eval_shape(lambda: init(jax.random.key(0), MODEL))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16), shapes)
    weights = sum(2 * x.size for x in jax.tree.leaves(params))
    run = jax.jit(functools.partial(generate, config=MODEL, sampling=Sampling(4)))
    compiled = run.lower(jax.random.key(0), params, jnp.zeros((1, 4), jnp.int32)).compile()
    needs = compiled.memory_analysis().temp_size_in_bytes
    layer = sum(4 * x.size // MODEL.num_layers for x in jax.tree.leaves(params["layers"]))
    part = 4 * linear.ROWS * MODEL.embed_dim
    # Of the head XLA holds a part and its transpose, and one that is on its way.
    assert needs < layer + 3 * part < 0.7 * weights


def test_layers_that_are_taken_in_turns_are_the_layers():
    params = tiny.params_of(HYBRID)
    tokens = tiny.tokens()
    one = jit(functools.partial(extend, config=HYBRID))
    in_turns, cache = one(params, tokens, empty_cache(HYBRID, len(tokens), 8))
    unstacked = HYBRID.stack().unstacked(params)
    assert isinstance(unstacked["layers"], tuple)
    want, known = one(unstacked, tokens, empty_cache(HYBRID, len(tokens), 8))
    # XLA leaves out other roundings to 16 bits where it fuses others.
    close = functools.partial(np.testing.assert_allclose, rtol=2**-3, atol=2**-3)
    close(in_turns, want)
    in_wide = jax.tree.map(lambda x: x.astype(jnp.float32), (cache, known))
    jax.tree.map(close, *in_wide)


@pytest.mark.parametrize("rows", [3, 7, 8])
def test_a_product_in_parts_is_the_product(rows):
    keys = jax.random.split(jax.random.key(rows), 2)
    x = jax.random.normal(keys[0], (2, 1, 4), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (7, 4), jnp.bfloat16)

    def in_parts(x, weight):
        return linear.product_in_parts(x, weight, jnp.float32, rows)

    def at_once(x, weight):
        return jnp.einsum("btd,vd->btv", x, weight, preferred_element_type=jnp.float32)

    # Sums of four products; gradients are rounded to 16 bits once more for each part.
    np.testing.assert_allclose(in_parts(x, weight), at_once(x, weight), rtol=1e-6, atol=1e-6)
    both = [
        jax.grad(lambda *at: jnp.sin(function(*at)).sum(), (0, 1))(x, weight)  # noqa: B023
        for function in (in_parts, at_once)
    ]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=2**-6, atol=2**-6
        ),
        *both,
    )
