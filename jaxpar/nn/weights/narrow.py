"""Weights of few bits in an array's place: `Quantised`, of eight and a scale an output, and `Nf4`, of four.

Of the latter a number is one of sixteen, quantiles of a normal distribution (QLoRA: arXiv:2305.14314, appendix E),
times its block's largest magnitude. Blocks lie along the last axis, so that a mesh may split the others freely.

Example:
    import jax
    import jax.numpy as jnp

    from jaxpar.nn.linear import contract, whole_weight
    from jaxpar.nn.weights.narrow import nf4

    weight, x = jax.random.normal(jax.random.key(0), (8, 64)), jnp.ones((1, 3, 8))
    small = nf4(weight)
    assert small.values.nbytes == weight.size // 2
    y = contract("btd,df->btf", x, small, ("embed", "mlp"))
    assert jnp.allclose(y, x @ whole_weight(small), atol=1e-5)
"""

import math
from collections.abc import Callable

import flax.struct
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike

from jaxpar.nn.linear import Axes, _letters, fixed_product
from jaxpar.types import Array, UsageError, largest

__all__ = ["Nf4", "Quantised", "nf4", "quantise"]

LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
BLOCK = 64


@flax.struct.dataclass
class Quantised:
    """A weight of eight bits a number, one scale for each output: W = values * scales. Not trained.

    Attributes:
      values: int8, of the shape of W.
      scales: Of the axes of W that are not contracted.
    """

    values: Array
    scales: Array

    def contract(
        self,
        equation: str,
        x: Array,
        axes: Axes,
        *,
        precision: PrecisionLike = None,
        apart: bool = False,
    ) -> Array:
        """Multiplies by the values, and the result by the scales; reads a byte a weight."""
        _, weight, out = _letters(equation)
        kept = [c for c in weight if c in out]
        sizes = [self.scales.shape[kept.index(c)] if c in kept else 1 for c in out]
        if sorted(kept, key=out.index) != kept:
            raise UsageError(f"quantised weights keep their axes in order, not {equation!r}.")
        y = fixed_product(equation, x, self.values, axes, precision, apart)
        return y * self.scales.astype(y.dtype).reshape(sizes)

    def whole(self) -> Array:
        """Returns values * scales, in the dtype of the scales."""
        return self.values * self.scales[(None,) * (self.values.ndim - self.scales.ndim)]

    def on_weight(self, fn: Callable[[Array], Array]) -> "Quantised":
        """Stays what it is: it is as small as it gets."""
        del fn
        return self


def quantise(weight: Array, contracted: int) -> Quantised:
    """Rounds a weight to eight bits: values in [-127, 127], each output's scale its largest magnitude / 127.

    Args:
      weight: W; leading axes of stacks are not taken: `jax.vmap` over layers.
      contracted: How many of its first axes are contracted.

    Error: at most half a scale a number.
    """
    dims = tuple(range(contracted))
    scales = largest(jnp.abs(weight), dims) / 127  # whole numbers have no NaN: the scale keeps it
    values = jnp.round(weight / jnp.where(scales > 0, scales, 1)[(None,) * contracted])
    return Quantised(values.astype(jnp.int8), scales)


@flax.struct.dataclass
class Nf4:
    """A weight of four bits a number and a scale for each block of them. Not trained.

    Attributes:
      values: uint8, the shape of W with half the last axis: numbers 2 i and 2 i + 1 in the low and high bits of byte i.
      scales: The shape of W with the blocks of its last axis, float32 at least.
    """

    values: Array
    scales: Array

    def contract(
        self,
        equation: str,
        x: Array,
        axes: Axes,
        *,
        precision: PrecisionLike = None,
        apart: bool = False,
    ) -> Array:
        """Widens the weight and multiplies; forward and backward pass each widen it anew."""
        return fixed_product(equation, x, self, axes, precision, apart)

    def whole(self) -> Array:
        """Returns W as it is rounded, in the dtype of the scales."""
        codes = jnp.stack([self.values & 15, self.values >> 4], -1)
        blocks = jnp.asarray(LEVELS, self.scales.dtype)[codes.reshape(*self.scales.shape, -1)]
        return (blocks * self.scales[..., None]).reshape(*self.values.shape[:-1], -1)

    def on_weight(self, fn: Callable[[Array], Array]) -> "Nf4":
        """Stays what it is: it is as small as it gets."""
        del fn
        return self


def nf4(weight: Array) -> Nf4:
    """Rounds a weight, or a stack of them, to sixteen levels a block of its last axis.

    A block has 64 numbers, or as many as the largest power of two under that which divides the axis.

    Error: at most 0.152 of a block's largest magnitude, half the widest gap between levels.

    Raises:
      UsageError: The last axis is odd.
    """
    size = weight.shape[-1]
    block = math.gcd(BLOCK, size)
    if block == 1:
        raise UsageError(f"nf4 takes weights whose last axis is even, not of {size}; take int8.")
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    blocks = wide.reshape(*weight.shape[:-1], size // block, block)
    scales = largest(jnp.abs(blocks), -1)
    between = (np.array(LEVELS[1:]) + np.array(LEVELS[:-1])) / 2
    shares = blocks / jnp.where(scales > 0, scales, 1)[..., None]
    codes = jnp.searchsorted(jnp.asarray(between, wide.dtype), shares).astype(jnp.uint8)
    codes = codes.reshape(*weight.shape[:-1], size // 2, 2)
    return Nf4(codes[..., 0] | codes[..., 1] << 4, scales)
