"""Sums by index that are the same bits on every device.

A GPU adds the values that share an index in whatever order its threads come, and floats then round differently from run
to run. So there, few values are compared pair by pair and summed in their order; many are written as whole numbers,
whose sums depend on no order.
"""

import jax
import jax.numpy as jnp

from jaxpar.types import Array

FEW = 256
"""Values up to which all pairs are compared."""

BITS = 26
"""Of the whole numbers, at least: more than a float32 has."""


def add_at(table: Array, ids: Array, values: Array) -> Array:
    """`table.at[ids].add(values, mode="drop")`, in an order that does not depend on the device.

    On a GPU, values are rounded to 2^-26 or less of the largest of them if there are more than 256, which is less than
    float32 rounds their sum.

    Args:
        table: float32 `[M, ...]`.
        ids: int32 `[n]`, repeated or beyond M.
        values: float32 `[n, ...]`; finite, or minus infinity.
    """
    if jax.default_backend() != "gpu":  # one core adds in order
        return table.at[ids].add(values, mode="drop")
    if len(ids) <= FEW:
        same = (ids[:, None] == ids[None]).reshape(len(ids), len(ids), *(1,) * (values.ndim - 1))
        totals = jnp.sum(jnp.where(same, values[None], 0), 1)
    else:
        totals = _whole_totals(table.shape[0], ids, values)
    return table.at[ids].set(table.at[ids].get(mode="clip") + totals, mode="drop")


def _whole_totals(size: int, ids: Array, values: Array) -> Array:
    """The sum of the values at each value's own index, by whole numbers in parts that cannot overflow."""
    width = 30 - (len(ids) - 1).bit_length()  # n numbers of so many bits stay below 2^30
    parts = -(-BITS // width)
    lowest = jnp.isneginf(values)
    rest = jnp.where(lowest, 0, values)
    # The power of two above the largest, by its exponent's bits; of zeros, 1.
    largest = jnp.max(jnp.abs(rest))
    exponent = jax.lax.bitcast_convert_type(largest, jnp.int32) >> 23  # biased by 127
    exponent = jnp.clip(jnp.where(largest > 0, exponent + 1, 127), 30, 253)
    above, below = (_power(e) for e in (exponent, 254 - exponent))
    rest = rest * below
    digits = [lowest.astype(jnp.int32)]
    for part in range(parts):
        rest = rest * 2**width
        whole = jnp.floor(rest) if part < parts - 1 else jnp.round(rest)
        digits.append(whole.astype(jnp.int32))
        rest = rest - whole
    columns = jnp.stack(digits, -1)
    sums = (
        jnp.zeros((size, *columns.shape[1:]), jnp.int32)
        .at[ids]
        .add(columns, mode="drop")
        .at[ids]
        .get(mode="clip")
    )
    total = jnp.zeros(values.shape, jnp.float32)
    unit = 1.0
    for k in range(1, parts + 1):
        unit = unit * 2.0**-width
        total = total + sums[..., k].astype(jnp.float32) * unit
    return jnp.where(sums[..., 0] > 0, -jnp.inf, total * above)


def _power(biased: Array) -> Array:
    """2^(biased - 127), exactly."""
    return jax.lax.bitcast_convert_type(biased.astype(jnp.int32) << 23, jnp.float32)
