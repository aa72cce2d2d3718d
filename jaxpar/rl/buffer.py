"""A ring of rows on the device: what came last, the oldest overwritten; pure functions of its state."""

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Buffer", "add", "empty_buffer", "sample"]


@flax.struct.dataclass
class Buffer:
    """Up to C rows.

    Attributes:
        rows: leaves `[C, ...]`.
        head: int32 [], where the next row goes.
        size: int32 [], rows held.
    """

    rows: PyTree
    head: Array
    size: Array


def empty_buffer(row: PyTree, capacity: int) -> Buffer:
    """A buffer of `capacity` rows shaped as `row` (arrays or shapes), none of them held."""
    if capacity < 1:
        raise UsageError(f"capacity={capacity} must be at least 1.")
    rows = jax.tree.map(lambda x: jnp.zeros((capacity, *x.shape), x.dtype), row)
    return Buffer(rows, jnp.int32(0), jnp.int32(0))


def add(buffer: Buffer, rows: PyTree, keep: Array) -> Buffer:
    """Appends the rows `[M, ...]` that `keep` bool `[M]` names, in order, over the oldest ones; O(M).

    Raises:
        UsageError: if M rows do not fit into the buffer at once.
    """
    capacity = len(jax.tree.leaves(buffer.rows)[0])
    if len(keep) > capacity:
        raise UsageError(
            f"{len(keep)} rows at once do not fit into a buffer of capacity={capacity}."
        )
    before = jnp.cumsum(keep, dtype=jnp.int32) - keep
    place = jnp.where(keep, (buffer.head + before) % capacity, capacity)  # beyond the end: dropped
    held = jax.tree.map(lambda held, new: held.at[place].set(new, mode="drop"), buffer.rows, rows)
    count = jnp.sum(keep, dtype=jnp.int32)
    return Buffer(
        held, (buffer.head + count) % capacity, jnp.minimum(buffer.size + count, capacity)
    )


def sample(key: PRNGKey, buffer: Buffer, num_rows: int) -> PyTree:
    """Rows `[num_rows, ...]`, each uniform among those held; zeros while none is; consumes `key`."""
    place = jax.random.randint(key, (num_rows,), 0, jnp.maximum(buffer.size, 1))
    return jax.tree.map(lambda x: x[place], buffer.rows)
