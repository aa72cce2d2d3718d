"""Exact digests of arrays that do not depend on how the arrays are laid out."""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import UsageError

__all__ = ["device_digests", "digest_text", "numpy_digest"]

Words = jax.Array | np.ndarray
"""Arrays of uint32."""

_SEEDS = (0x9E3779B9, 0x7F4A7C15)  # one a lane
_SPAN = 2**32  # elements that one word of index can tell apart
_BLOCK = 2**20  # elements that NumPy hashes at a time


def device_digests(leaves: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the digest of every leaf in the order of their sorted paths, uint32 [leaf, lane]; to be traced.

    A digest is, in each of two lanes, the sum modulo 2^32 over all elements of h(bits of the element, its global
    index). A sum has no order, so neither the mesh nor the sharding matters, and GSPMD adds only all-reduces of a few
    bytes. For a fixed index h is a bijection of a 32-bit element, so one changed element always shows; swapped,
    missing or otherwise changed elements escape with probability 2^-64. NaNs are told apart by their bits.

    Cost: a read of the leaves for each lane, about forty integer operations an element.

    Args:
      leaves: Arrays of booleans, integers, floats of 8 to 64 bits, complex numbers, or typed keys.
    """
    return jnp.stack([_digest(path, leaves[path]) for path in sorted(leaves)])


def digest_text(lanes: Iterable[int]) -> str:
    """Returns the two lanes of a digest as 16 hexadecimal digits."""
    first, second = (int(lane) for lane in lanes)
    return f"{first:08x}{second:08x}"


def numpy_digest(x: np.ndarray) -> str:
    """Returns the same digest of a NumPy array, typed keys as their words: the sequential form, on the host."""
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    if not x.size:
        return digest_text((0, 0))
    unit = x.dtype.itemsize // (2 if x.dtype.kind == "c" else 1)
    words = np.ascontiguousarray(x).reshape(-1).view(f"u{min(unit, 4)}").reshape(x.size, -1)
    span = math.prod(x.shape[_split(x.shape) :])
    lanes = [0, 0]
    for start in range(0, x.size, _BLOCK):
        block = words[start : start + _BLOCK].astype(np.uint32)
        index = np.arange(start, start + len(block), dtype=np.uint64)
        parts = [(index % span).astype(np.uint32)] + (
            [(index // span).astype(np.uint32)] if span < x.size else []
        )
        for lane, seed in enumerate(_SEEDS):
            h = _hash([*parts, *block.T], np.uint32(seed))
            lanes[lane] += int(h.sum(dtype=np.uint64))
    return digest_text(lane % 2**32 for lane in lanes)


def _digest(path: str, x: jax.Array) -> jax.Array:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype != np.bool_ and not jnp.iscomplexobj(x) and _bits(x) < 8:
        raise UsageError(
            f"{path} is of dtype {x.dtype}, which no checkpoint holds; legal are elements of whole bytes."
        )
    return _lanes(x, _split(x.shape))


@functools.partial(jax.jit, static_argnums=1)  # so that leaves of one shape are traced once
def _lanes(x: jax.Array, split: int) -> jax.Array:
    words = _words(x)
    parts = [_position(x.shape, range(split, x.ndim))]
    if split:
        parts.append(_position(x.shape, range(split)))
    # Both lanes by one reduction, which XLA compiles in half the time of two.
    seeds = np.array(_SEEDS, np.uint32).reshape(-1, *[1] * x.ndim)
    h = _hash([word[None] for word in [*parts, *words]], seeds)
    return jnp.sum(h, tuple(range(1, h.ndim)), np.uint32)


def _bits(x: jax.Array) -> int:
    return (jnp.finfo if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo)(x.dtype).bits


def _words(x: jax.Array) -> list[jax.Array]:
    """Returns the bits of each element as uint32 arrays, the low word first."""
    if jnp.iscomplexobj(x):
        return _words(x.real) + _words(x.imag)
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    bits = _bits(x)
    x = jax.lax.bitcast_convert_type(x, np.dtype(f"u{min(bits // 8, 4)}")).astype(np.uint32)
    return [x[..., 0], x[..., 1]] if bits == 64 else [x]


def _split(shape: tuple[int, ...]) -> int:
    """Returns the first of the trailing dimensions whose elements one word of index tells apart."""
    split = len(shape)
    while split and math.prod(shape[split - 1 :]) <= _SPAN:
        split -= 1
    return split


def _position(shape: tuple[int, ...], dimensions: range) -> jax.Array:
    """Returns each element's row-major index over `dimensions`, uint32 of `shape`."""
    index, stride = jnp.zeros(shape, np.uint32), 1
    for dimension in reversed(dimensions):
        index += jax.lax.broadcasted_iota(np.uint32, shape, dimension) * np.uint32(stride % 2**32)
        stride *= shape[dimension]
    return index


def _hash(words: Sequence[Words], seed: np.uint32 | np.ndarray) -> Words:
    h: Any = seed
    for word in words:
        h = _mix(h ^ word)
    return h


def _mix(x: Words) -> Words:
    """Wellons' "lowbias32": a bijection of uint32 in which each bit flips about half of the others."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
