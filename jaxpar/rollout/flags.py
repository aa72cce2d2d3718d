"""Which flag is set: flags packed into words of 32 bits, where counting and searching take a few operations a word."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.types import Array

_MAX_WORDS = 8


def uniform_place(flags: Array, below: Callable[[Array], Array]) -> Array:
    """The place of a set flag of `flags [..., N]` that is drawn, int32 `[...]`; 0 where none is set.

    A running sum over the flags and a search for the first that is high enough would be two more passes over all.

    Args:
        flags: bool.
        below: draws a rank below the number of set flags, uint32 `[...]`: int32 `[...]`.
    """
    num_words = -(-flags.shape[-1] // 32)
    if num_words > _MAX_WORDS:  # the words are walked one after the other
        rank = below(jnp.sum(flags, -1, dtype=jnp.uint32))
        return jnp.argmax(jnp.cumsum(flags, -1, dtype=jnp.int32) > rank[..., None], -1).astype(
            jnp.int32
        )
    words = [_packed(flags[..., 32 * i : 32 * i + 32]) for i in range(num_words)]
    counts = [jax.lax.population_count(word) for word in words]
    count = sum(counts[1:], counts[0])
    chosen = below(count)
    word, rank, start, passed = words[0], chosen, jnp.zeros_like(chosen), counts[0]
    for i in range(1, num_words):
        ahead = passed.astype(jnp.int32)
        is_here, passed = chosen >= ahead, passed + counts[i]
        word, rank = jnp.where(is_here, words[i], word), jnp.where(is_here, chosen - ahead, rank)
        start = jnp.where(is_here, 32 * i, start)
    place = jnp.where(count > 0, start + _bit_by_rank(word, rank), 0)
    return jax.lax.optimization_barrier(
        place
    )  # or all that reads it would search anew, for each of its elements


def place_by_rank(flags: Array) -> tuple[Array, Callable[[Array], Array]]:
    """The number of set flags, and the function from ranks to their places in `flags [B]`: B or more beyond the last.

    `jnp.nonzero`, which sums and scatters over all flags, took ten times as long on CPU, more than a step of a small
    environment.
    """
    words = _packed(jnp.pad(flags, (0, -len(flags) % 32)).reshape(-1, 32))
    counts = jax.lax.population_count(words).astype(jnp.int32)
    up_to = jnp.cumsum(counts)

    def place(ranks):
        # The unrolled search: a loop of few trips over few words costs more than it does.
        at = jnp.searchsorted(up_to, ranks, side="right", method="scan_unrolled")
        word, rank = (
            jnp.take(words, at, mode="clip"),
            ranks - jnp.take(up_to - counts, at, mode="clip"),
        )
        return jnp.where(ranks < up_to[-1], at * 32 + _bit_by_rank(word, rank), len(flags))

    return up_to[-1], place


def _packed(flags: Array) -> Array:
    """Words uint32 `[...]` of flags `[..., 32]`, or fewer, the first in the lowest bit."""
    shifts = jnp.arange(flags.shape[-1], dtype=jnp.uint32).reshape((1,) * (flags.ndim - 1) + (-1,))
    return jnp.sum(flags.astype(jnp.uint32) << shifts, -1, dtype=jnp.uint32)


def _bit_by_rank(word: Array, rank: Array) -> Array:
    """The place of the bit of a word with `rank` set bits below it, by a binary search; int32, of their shape."""
    bit = jnp.zeros_like(rank)
    for half in (16, 8, 4, 2, 1):
        below = jax.lax.population_count(word & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        is_above = rank >= below
        rank, bit = jnp.where(is_above, rank - below, rank), jnp.where(is_above, bit + half, bit)
        word = jnp.where(is_above, word >> half, word)
    return bit
