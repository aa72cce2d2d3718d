"""Whole numbers in place of fractions: energy, lengths and signals in 1/1024, and sums that are exact.

One unit, `ONE`, is 1024: of energy, of length (the side of a cell), of a signal (a memory, a message, an action). Sums
of whole numbers depend on no order, so that a world has the same bits on any device and its book balances.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Array

__all__ = ["ONE", "Wide", "wide_sum"]

ONE = 1024
"""One unit of energy, one cell's side, one whole signal."""
_LOW = 20
_PART = 10
_SHIFTS = np.array([0, _PART, _LOW], np.int32)
_MASKS = np.array([2**_PART - 1, 2**_PART - 1, -1], np.int32)


class Wide(NamedTuple):
    """A whole number in two parts, high 2^20 + low, which an int32 need not hold.

    Attributes:
        high: int32 `[]`.
        low: int32 `[]`, from 0 to 2^20 - 1.
    """

    high: Array
    low: Array

    def plus(self, other: "Wide", sign: int = 1) -> "Wide":
        """The sum, or with sign -1 the difference."""
        low = self.low + sign * other.low
        return Wide(self.high + sign * other.high + (low >> _LOW), low & (2**_LOW - 1))

    def units(self) -> Array:
        """In units: float32, rounded."""
        return self.high.astype(jnp.float32) * (2**_LOW / ONE) + self.low.astype(jnp.float32) / ONE

    def exact(self) -> int:
        """In 1/1024 units: Python's int, outside of jit."""
        return (int(self.high) << _LOW) + int(self.low)


def wide_sum(values: Array) -> Wide:
    """The exact sum of up to 2^20 whole numbers, int32 from 0 to 2^31 - 1, in parts of ten bits."""
    parts = (values.reshape(1, -1) >> _SHIFTS[:, None]) & _MASKS[
        :, None
    ]  # one reduction, not three
    low, middle, high = jnp.sum(parts, axis=1, dtype=jnp.int32)
    middle = middle + (low >> _PART)
    return Wide(high + (middle >> _PART), ((middle & (ONE - 1)) << _PART) + (low & (ONE - 1)))


def scaled(a: Array, b: Array | int) -> Array:
    """A b / 1024, towards zero: alike for both signs. The product must fit into an int32."""
    return jax.lax.div(a * b, jnp.int32(ONE))


def whole(x: Array) -> Array:
    """Floats as signals: clipped to [-1, 1], in 1/1024, halves to even; what is no number is 0."""
    return jnp.round(jnp.clip(jnp.where(jnp.isnan(x), 0, x), -1, 1) * ONE).astype(jnp.int32)
