"""A step reads and writes the cache where it lies, on CPU and TPU, whoever reads and however many tokens at once."""

import json
import math

import jax
import jax.numpy as jnp
import pytest
from compiled import copies, needs_libtpu, on_a_tpu
from fast import jit
from lm_configs import lm_config

from jaxpar.decode import Tree, chain
from jaxpar.decode import forest as tables
from jaxpar.decode.blocks import BlockCache
from jaxpar.decode.reader import Reading, keep, look
from jaxpar.lm import Decoder, init

ROWS, READERS, GROUPS = 2, 2, 2
SIZES = {
    "cpu": (16, 64, 64),
    "tpu": (128, 64, 128),
}  # blocks, slots and width; of those for a TPU nothing is allocated


def compiled(where, tree, is_loop, put=lambda tree: tree):
    """A step or a loop of steps, the reading donated; and the shape of a layer's keys."""
    blocks, block, width = SIZES[where]
    model = Decoder(
        lm_config(
            vocab_size=16, num_layers=1, embed_dim=16, mlp_dim=16, num_heads=4, num_kv_heads=GROUPS, head_dim=width,
            dtype="bfloat16" if where == "tpu" else "float32",
        )
    )  # fmt: skip

    def start():
        """Readers of a prompt that they share."""
        forest, root = tables.spawn(tables.empty(ROWS, 1 + READERS, blocks, block))
        forest, children = tables.fork(forest, root[:, 0], READERS)
        cache = BlockCache.empty(ROWS, GROUPS, blocks, block, width, model.config.dtype)
        return Reading(forest, tables.lineage_view(forest, children), (cache,))

    def step(params, reading, tokens):
        logits, reading = look(model, params, reading, tokens, tree)
        path = jnp.broadcast_to(
            jnp.asarray(tree.paths[-1], jnp.int32)[None], (len(tokens), tree.max_depth + 1)
        )
        path = jnp.pad(path, ((0, 0), (0, tree.size - path.shape[1])), constant_values=-1)
        reading = keep(
            model, params, reading, tokens, path, jnp.full((len(tokens),), tree.max_depth + 1)
        )
        return reading, logits.argmax(-1).astype(jnp.int32)

    def loop(params, reading, tokens):
        def body(carry):
            return carry[0] + 1, *step(params, *carry[1:])

        return jax.lax.while_loop(lambda carry: carry[0] < 9, body, (0, reading, tokens))[1:]

    params = jax.eval_shape(lambda: model.held(init(jax.random.key(0), model.config)))
    args = (
        params,
        jax.eval_shape(start),
        jax.ShapeDtypeStruct((ROWS * READERS, tree.size), jnp.int32),
    )
    program = jit(loop if is_loop else step, donate_argnums=1).lower(*map(put, args)).compile()
    return program, (ROWS, GROUPS, blocks, block, width)


def judged(where, *args):
    """Temporary and aliased bytes of a program over those of the cache, and its copies of keys or values."""
    program, shape = compiled(where, *args)
    size, memory = 2 * math.prod(shape) * (2 if where == "tpu" else 4), program.memory_analysis()
    return (
        memory.temp_size_in_bytes / size,
        memory.alias_size_in_bytes / size,
        copies(program.as_text(), shape),
    )


def assert_in_place(temporary, aliased, copied):
    assert temporary < 0.5 and aliased >= 1 and not copied, (temporary, aliased, copied)


@pytest.mark.parametrize(
    ("tree", "is_loop"), [(Tree((-1, 0, 0)), False), (chain(0), True)], ids=["step", "loop"]
)
def test_the_cache_is_not_copied(tree, is_loop):
    assert_in_place(*judged("cpu", tree, is_loop))


def for_a_tpu():
    from jaxpar.aot import devices, parse_topology

    sharding = jax.sharding.SingleDeviceSharding(devices(parse_topology("v5e:1x1"))[0])

    def put(tree):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    return judged("tpu", chain(0), True, put)


@needs_libtpu
def test_the_cache_is_not_copied_on_a_tpu():
    assert_in_place(*on_a_tpu(__file__))


if __name__ == "__main__":
    print(json.dumps(for_a_tpu()))
