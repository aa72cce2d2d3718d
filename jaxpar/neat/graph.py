"""Reachability and depth of many small graphs at once, on sets of nodes that are bits of words.

A set of nodes of one genome is W = ceil(N / 32) words. To follow every edge of every genome once is one pass over the
connections, `[G, C, W]`, and one reduction by `or`: no N x N matrix, no scatter.
"""

import jax
import jax.numpy as jnp

from jaxpar.types import Array

__all__ = ["has_cycle", "pack_set", "reachable", "singleton", "sweeps", "unpack_set"]


def singleton(slot: Array, num_nodes: int) -> Array:
    """The set of one node: uint32 `[..., W]` from int32 `[...]`."""
    word = jnp.arange((num_nodes + 31) // 32, dtype=jnp.int32)
    bit = jnp.uint32(1) << (slot % 32).astype(jnp.uint32)
    own = jnp.expand_dims(slot // 32, -1) == word.reshape((1,) * slot.ndim + (-1,))
    return jnp.where(own, bit[..., None], jnp.uint32(0))


def pack_set(mask: Array) -> Array:
    """The set as uint32 `[G, W]` from bool `[G, N]`."""
    count = mask.shape[1]
    each = singleton(jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), mask.shape), count)
    return _union(jnp.where(mask[..., None], each, jnp.uint32(0)))


def unpack_set(words: Array, num_nodes: int) -> Array:
    """The set as bool `[G, N]`."""
    slot = jnp.arange(num_nodes)
    return (words[:, slot // 32] >> (slot % 32).astype(jnp.uint32)[None] & 1) == 1


def reachable(start: Array, source: Array, target: Array, on: Array, num_nodes: int) -> Array:
    """The nodes of a path that begins in `start`, those included: uint32 `[G, W]`.

    Args:
        start: uint32 `[G, W]`.
        source: int32 `[G, C]`.
        target: int32 `[G, C]`.
        on: bool `[G, C]`, the edges to follow.
        num_nodes: N.
    """
    follow = _follower(source, target, on, num_nodes)

    def grow(carry):
        found, more = carry[0], carry[0]
        for _ in range(_passes()):
            more = more | follow(more)[0]
        return more, jnp.any(more != found)

    return jax.lax.while_loop(lambda carry: carry[1], grow, (start, jnp.any(on)))[0]


def sweeps(source: Array, target: Array, on: Array, num_nodes: int, num_inputs: int) -> Array:
    """How often all nodes must be computed from all others until nothing changes: int32 `[]`, over all G graphs.

    That is the most nodes other than inputs on any path, so at least 1; a graph with a cycle gives N.
    """
    follow = _follower(source, target, on, num_nodes)
    computed = jnp.broadcast_to(jnp.arange(num_nodes) >= num_inputs, (len(on), num_nodes))

    def go_on(carry):
        _, moves, count = carry
        return jnp.any(moves) & (count < num_nodes)

    def body(carry):
        late, _, count = carry  # ends of paths of `count` computed nodes before them
        return *follow(late), count + 1

    begin = pack_set(computed), jnp.ones(len(on), bool), jnp.int32(0)
    return jax.lax.while_loop(go_on, body, begin)[2]


def has_cycle(source: Array, target: Array, on: Array, num_nodes: int) -> Array:
    """Which graphs have a cycle: bool `[G]`. Edges as in `reachable`; costs a pass an edge of the longest path."""
    follow = _follower(source, target, on, num_nodes)

    def body(carry):
        late, after = (
            carry[0],
            carry[0],
        )  # ends of paths of k edges: fewer and fewer, down to what follows a cycle
        for _ in range(_passes()):
            after = follow(after)[0]
        return after, jnp.any(after != late)

    everywhere = pack_set(jnp.ones((len(on), num_nodes), bool))
    late, _ = jax.lax.while_loop(lambda carry: carry[1], body, (everywhere, jnp.any(on)))
    return jnp.any(late != 0, 1) & jnp.any(on)


def _passes() -> int:
    """Passes between two looks at whether anything changed: a look makes a GPU wait for its host."""
    return 4 if jax.default_backend() == "gpu" else 1


def _follower(source: Array, target: Array, on: Array, num_nodes: int):
    """A function from sets `[G, W]` to the sets of the targets of the edges that leave them, and if there are any."""
    no = jnp.uint32(0)
    sources = jnp.where(on[..., None], singleton(source, num_nodes), no)
    targets = singleton(target, num_nodes)

    def either(one, two):
        return one[0] | two[0], one[1] | two[1]

    def follow(words: Array) -> tuple[Array, Array]:
        leaves = jnp.any((sources & words[:, None]) != 0, -1, keepdims=True)
        both = jnp.where(leaves, targets, no), jnp.broadcast_to(leaves, targets.shape)
        after, moves = jax.lax.reduce(both, (no, False), either, (1,))
        return after, moves[:, 0]

    return follow


def _union(sets: Array) -> Array:
    return jax.lax.reduce(sets, jnp.uint32(0), jax.lax.bitwise_or, (1,))
