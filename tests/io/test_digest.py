"""Digests: the device program against its NumPy twin on every dtype and layout, and what they see."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.io import digest
from jaxpar.io.digest import device_digests, digest_text, numpy_digest
from jaxpar.types import UsageError

DTYPES = [
    "bool",
    "int8",
    "uint16",
    "int32",
    "uint32",
    "bfloat16",
    "float16",
    "float32",
    "complex64",
    "float8_e4m3fn",
]
WIDE = ["int64", "uint64", "float64", "complex128"]


def random_bits(dtype, shape=(8, 6), seed=0):
    """Every bit pattern alike, so NaNs, infinities and denormals are among them."""
    dtype = jnp.dtype(dtype)
    data = np.random.default_rng(seed).bytes(int(np.prod(shape)) * dtype.itemsize)
    if dtype.kind == "b":
        return (np.frombuffer(data, np.uint8) % 2 == 1).reshape(shape)
    return np.frombuffer(data, np.uint8).view(dtype).reshape(shape)


@functools.partial(jax.jit)
def program(leaves):
    return device_digests(leaves)


def of(x):
    return digest_text(np.asarray(program({"x": x}))[0])


def layouts():
    line, grid = (
        Mesh(np.array(jax.devices()), ("a",)),
        Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b")),
    )
    specs = [(line, ("a",)), (grid, ("a", "b")), (grid, (None, "b")), (grid, ())]
    return [NamedSharding(mesh, PartitionSpec(*axes)) for mesh, axes in specs]


def check_on_all_layouts(dtypes):
    leaves = {dtype: random_bits(dtype, seed=i) for i, dtype in enumerate(dtypes)}
    want = [numpy_digest(leaves[dtype]) for dtype in sorted(dtypes)]
    assert len(set(want)) == len(dtypes) and all(
        re.fullmatch("[0-9a-f]{16}", text) for text in want
    )
    for sharding in [None, *layouts()]:
        lanes = program(jax.device_put(leaves, sharding))
        assert [digest_text(row) for row in np.asarray(lanes)] == want, sharding


def test_device_is_numpy_on_every_dtype_and_layout():
    check_on_all_layouts(DTYPES)


@pytest.mark.usefixtures("x64")
def test_device_is_numpy_on_eight_and_sixteen_bytes():
    check_on_all_layouts(WIDE)


@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (5,), (2, 3, 5), (1, 1)])
def test_device_is_numpy_on_every_rank(shape):
    x = random_bits("float32", shape)
    assert of(jnp.asarray(x)) == numpy_digest(x)


def test_a_typed_key_is_its_words():
    keys = jax.random.split(jax.random.key(5), 8)
    assert of(keys) == numpy_digest(np.asarray(jax.random.key_data(keys)))
    assert of(keys) == of(jax.device_put(keys, layouts()[0]))


def test_several_leaves_come_in_the_order_of_their_paths():
    leaves = {"b/x": jnp.arange(3), "a": jnp.ones((2, 2)), "b": jnp.zeros(1)}
    rows = np.asarray(program(leaves))
    assert [digest_text(row) for row in rows] == [
        numpy_digest(np.asarray(leaves[path])) for path in sorted(leaves)
    ]


def test_arrays_with_more_elements_than_a_word_counts(monkeypatch):
    """The index takes two words then; a small limit stands in for 2^32."""
    x = random_bits("float32", (4, 6, 10))
    before = numpy_digest(x)
    monkeypatch.setattr(digest, "_SPAN", 60)
    lanes = jax.jit(lambda leaves: device_digests(leaves))({"x": jnp.asarray(x)})
    assert digest_text(np.asarray(lanes)[0]) == numpy_digest(x) != before
    moved = np.concatenate([x[1:], x[:1]])  # whole blocks change places: only the second word tells
    assert numpy_digest(moved) != numpy_digest(x)


def test_numpy_goes_block_by_block(monkeypatch):
    x = random_bits("bfloat16", (7, 11))
    want = numpy_digest(x)
    monkeypatch.setattr(digest, "_BLOCK", 10)
    assert numpy_digest(x) == want


@pytest.mark.parametrize("dtype", ["bool", "bfloat16", "float32", "int8"])
def test_every_flip_of_one_bit_shows(dtype):
    x = random_bits(dtype)
    want = numpy_digest(x)
    for place in range(x.size):
        for bit in range(1 if dtype == "bool" else 8 * x.dtype.itemsize):
            words = x.copy().view(f"u{x.dtype.itemsize}")
            words.reshape(-1)[place] ^= words.dtype.type(1 << bit)
            assert numpy_digest(words.view(x.dtype)) != want


def test_swaps_shifts_truncation_and_signs_show():
    x = random_bits("float32", (40,))
    changed = [
        np.roll(x, 1),
        x[::-1],
        -x,
        np.where(np.arange(40) < 39, x, 0),
        x[:39],
        np.append(x, np.float32(0)),
    ]
    for i in range(39):
        changed.append(x.copy())
        changed[-1][[i, i + 1]] = x[[i + 1, i]]
    assert len({numpy_digest(y) for y in [x, *changed]}) == 1 + len(changed)
    zero = np.zeros(3, np.float32)
    assert numpy_digest(zero) != numpy_digest(-zero)
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert numpy_digest(nans) != numpy_digest(nans[::-1])


def test_lanes_are_spread_evenly_and_independent():
    lanes = np.array(
        [[int(d[:8], 16), int(d[8:], 16)] for d in (numpy_digest(np.int32(i)) for i in range(2000))]
    )
    bits = (lanes[:, :, None] >> np.arange(32)) & 1
    assert abs(bits.mean(0) - 0.5).max() < 5 * 0.5 / np.sqrt(2000)
    both = (bits[:, 0] ^ bits[:, 1]).mean(0)
    assert abs(both - 0.5).max() < 5 * 0.5 / np.sqrt(2000)


def test_a_sharded_digest_moves_a_few_bytes():
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32, sharding=layouts()[1])
    text = program.lower({"x": x, "y": x}).compile().as_text()
    names = "all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter"
    moved = re.findall(rf"= (.*?) ({names})(?:-start)?\(", text)
    assert moved and {kind for _, kind in moved} == {"all-reduce"}
    for shape, _ in moved:
        sizes = [
            np.prod([int(n) for n in found.split(",") if n])
            for found in re.findall(r"u32\[([\d,]*)\]", shape)
        ]
        assert sizes and sum(sizes) <= 4, shape


def test_elements_of_less_than_a_byte_are_refused():
    with pytest.raises(UsageError, match="w is of dtype int4"):
        device_digests({"w": jnp.zeros(4, jnp.int4)})
