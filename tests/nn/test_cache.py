"""What is written to a cache goes to the slots of its places, from device to itself, and moves nothing else."""

import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import copies, needs_libtpu, on_a_tpu
from fast import jit

from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.nn.attention import Attention, LinearCache
from jaxpar.nn.attention.cache import CACHE_AXES
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Rope
from jaxpar.nn.stack import Stack

ROWS, GROUPS, SLOTS, WIDTH = 4, 2, 8, 4
SEEN, VALID = np.array([0, 3, 7, 30]), {1: [1, 0, 1, 1], 3: [3, 0, 2, 3], 20: [20, 1, 9, 11]}


def arrays(length):
    """A cache that is full of something, and more tokens."""
    rng = np.random.default_rng(length)
    kept = rng.standard_normal((2, ROWS, GROUPS, SLOTS, WIDTH)).astype(np.float32)
    return kept, rng.standard_normal((2, ROWS, length, GROUPS, WIDTH)).astype(np.float32)


def token_by_token(kept, new, valid):
    """The slots after one write at a time."""
    kept = kept.copy()
    for row in range(ROWS):
        for t in range(valid[row]):
            kept[:, row, :, (SEEN[row] + t) % SLOTS] = new[:, row, t]
    return kept


def written(kept, k, v, valid):
    after = LinearCache(*kept).write(k, v, jnp.asarray(SEEN), valid)
    return after.keys, after.values


@pytest.mark.parametrize("length", VALID)
def test_each_token_goes_to_the_slot_of_its_place(length):
    """Of more tokens than slots the last ones stay, of none that does not count anything."""
    kept, (k, v) = arrays(length)
    got = jit(written)(tuple(kept), k, v, jnp.asarray(VALID[length]))
    np.testing.assert_array_equal(got, token_by_token(kept, np.stack([k, v]), VALID[length]))


@pytest.mark.parametrize("length", [1, 20])
@pytest.mark.parametrize(
    "rules", [{"slots": "context"}, {"slots": "data+context", "batch": "none"}], ids=str
)
def test_no_device_asks_another_for_what_it_writes(rules, length):
    """Rows, heads and slots split over eight devices: each writes what is its own, and nothing crosses."""
    kept, (k, v) = arrays(length)
    with use_mesh(make_mesh(MeshSpec(data=2, context=2, tensor=2)), rules_from(rules)):
        token = ("batch", None, "kv_heads", None)
        args = (
            *shard((tuple(kept), k, v), ((CACHE_AXES,) * 2, token, token)),
            jnp.asarray(VALID[length]),
        )
        program = jit(written).lower(*args).compile()
        got = program(*args)
        whole = jit(written)(
            tuple(kept), k, v, args[3]
        )  # what lay nowhere in particular lies so afterwards
        for keys, _ in (got, whole):
            assert keys.sharding.shard_shape(keys.shape)[2] == SLOTS // (
                4 if "batch" in rules else 2
            )
    crossing = re.findall(
        r"= \S+ (?:all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", program.as_text()
    )
    assert not crossing, crossing
    np.testing.assert_array_equal(
        jax.device_get(got), token_by_token(kept, np.stack([k, v]), VALID[length])
    )


# ---------------------------------------------------------------- where it lies on a TPU

CASES = {"step": (1, 2), "several tokens, a key head for each head": (5, 4)}


def judged(length, groups):
    """Temporary and aliased bytes of a loop of steps over those of the cache, and its copies of keys or values.

    The cache is larger than the memory on the chip (128 MiB); nothing is allocated.
    """
    from jaxpar.aot import devices, parse_topology

    mixer = Attention(4, groups, 128, positions=Rope())
    stack = Stack(1, 16, mixer, Mlp(16), dtype="bfloat16")

    def loop(params, x, cache):
        def step(_, carry):
            y, cache, _ = stack.apply(params, carry[0], cache=carry[1])
            return y, cache

        return jax.lax.fori_loop(0, 9, step, (x, cache))

    sharding = jax.sharding.SingleDeviceSharding(devices(parse_topology("v5e:1x1"))[0])
    params = jax.eval_shape(lambda: stack.unstacked(stack.init(jax.random.key(0))))
    cache = jax.eval_shape(lambda: stack.init_cache(4, 65536))
    args = params, jax.ShapeDtypeStruct((4, length, 16), jnp.bfloat16), cache
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    program = jax.jit(loop, donate_argnums=2).lower(*args).compile()
    shape, memory = cache.layers[0].keys.shape, program.memory_analysis()
    size = 2 * 2 * math.prod(shape)
    return (
        memory.temp_size_in_bytes / size,
        memory.alias_size_in_bytes / size,
        copies(program.as_text(), shape),
    )


@needs_libtpu
def test_a_loop_of_steps_leaves_the_cache_where_it_is_on_a_tpu():
    for name, (temporary, aliased, copied) in on_a_tpu(__file__).items():
        assert temporary < 0.5 and aliased >= 1 and not copied, (name, temporary, aliased, copied)


if __name__ == "__main__":
    print(json.dumps({name: judged(*case) for name, case in CASES.items()}))
