"""Weights of -1, 0 and 1 in an array's place: `Ternary` to train them and `PackedTernary`, two bits each, to decode.

A product with one is W~ x~ of MatMul-free language models (arXiv:2406.02528, section 3.1; after arXiv:2402.17764):

    w~ = round(clip(w / mean|w|, -1, 1)) mean|w|        x~ = round(127 n / max|n|) max|n| / 127,  n = x / rms(x)

each token normalised along the axes that are contracted, without a weight of its own. The sums are of integers, so they
are exact; what is rounded is the product of each sum with its scales. Gradients pass straight through both roundings.

Example:
    import jax
    import jax.numpy as jnp

    from jaxpar.nn.linear import contract
    from jaxpar.nn.weights.ternary import pack, ternary

    weight, x = jax.random.normal(jax.random.key(0), (8, 4)), jax.random.normal(jax.random.key(1), (1, 3, 8))
    small = ternary(weight)
    y = contract("btd,df->btf", x, small, ("embed", "mlp"))
    assert jnp.array_equal(contract("btd,df->btf", x, pack(small, 1), ("embed", "mlp")), y)
"""

import functools
import math
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from jax.lax import PrecisionLike

from jaxpar.mesh import constrain, in_role, mesh_axes, platform
from jaxpar.nn.linear import Axes, _letters, _product_backward
from jaxpar.nn.norm import wide_dtype
from jaxpar.types import Array, UsageError

__all__ = ["PackedTernary", "Ternary", "for_decoding", "int8_rows", "pack", "ternary"]

EPS = 1e-8
"""Added to a token's mean square, as the authors' layers do."""
LEAST = 1e-30
"""Of a token's largest magnitude: its reciprocal is finite, and a token of zeros stays zero."""


@flax.struct.dataclass
class Ternary:
    """A weight W~ = values * scale that trains as W does; made by `ternary`.

    Attributes:
      values: -1, 0 and 1, of the shape of W. Their gradient is that of W~, and so, straight through, of W.
      scale: mean|W|, float32 at least. Has no gradient.
    """

    values: Array
    scale: Array

    def contract(
        self,
        equation: str,
        x: Array,
        axes: Axes,
        *,
        precision: PrecisionLike = None,
        apart: bool = False,
    ) -> Array:
        """Returns the product with W~ of x, normalised and rounded to eight bits, in the dtype of x.

        Of the forward pass x is kept alone. Sums over devices are of float32 at least, where integers are exact.
        """
        return _product(
            (equation, axes, precision, apart), x, self.values.astype(x.dtype), self.scale
        )

    def on_weight(self, fn: Callable[[Array], Array]) -> "Ternary":
        """Stays what it is."""
        del fn
        return self


@jax.custom_vjp
def ternary(weight: Array) -> Ternary:
    """Returns round(clip(W / mean|W|, -1, 1)) and mean|W|, in W's dtype and float32 at least.

    Leading axes of stacks are not taken: `jax.vmap` over layers. Gradients pass as if W~ were W.
    """
    wide = weight.astype(wide_dtype(weight))
    scale = jnp.abs(wide).mean()
    values = jnp.round(jnp.clip(wide / jnp.maximum(scale, LEAST), -1, 1))
    return Ternary(values.astype(weight.dtype), scale)


ternary.defvjp(lambda weight: (ternary(weight), None), lambda _, g: (g.values,))


def int8_rows(x: Array, contracted: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Normalises and rounds along some axes: integers in [-127, 127], their scales, and 1 / rms(x).

    The integers are round(127 x / max|x|), in the dtype of x; x / rms(x) is nearly integers * scales.

    Args:
      x: Activations.
      contracted: Its axes along which a row lies.

    Returns:
      Integers of the shape of x; scales and 1 / rms, float32 at least, with size 1 along `contracted`.
    """
    wide = x.astype(wide_dtype(x))
    top = jnp.maximum(jnp.abs(wide).max(contracted, keepdims=True), LEAST)
    inverse = jax.lax.rsqrt(jnp.square(wide).mean(contracted, keepdims=True) + EPS)
    return jnp.round(wide * (127 / top)).astype(x.dtype), top * inverse / 127, inverse


def _contracted(equation: str) -> tuple[int, ...]:
    letters, weight, out = _letters(equation)
    return tuple(i for i, c in enumerate(letters) if c in weight and c not in out)


def _scaled(equation: str, sums: Array, scales: Array, scale: Array, dtype) -> Array:
    """Multiplies the sums by the scale of each row, of the shape of x but for size 1, and of the weight."""
    letters, _, out = _letters(equation)
    rows = [c for c in letters if c in out]
    scales = scales.reshape([n for c, n in zip(letters, scales.shape, strict=True) if c in rows])
    scales = jnp.einsum(f"{''.join(rows)}->{''.join(c for c in out if c in rows)}", scales)
    scales = jnp.expand_dims(scales, [i for i, c in enumerate(out) if c not in rows])
    return (sums.astype(scales.dtype) * (scales * scale)).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: tuple, x: Array, values: Array, scale: Array) -> Array:
    equation, axes, precision, _ = how
    integers, scales, _ = int8_rows(x, _contracted(equation))
    values = constrain(values, *in_role(axes, "use"), name="a weight")
    if (
        platform() == "cpu"
    ):  # which has no product of every shape from 16 bits into 32, and makes it in 32 anyhow
        integers, values = integers.astype(scales.dtype), values.astype(scales.dtype)
    sums = jnp.einsum(
        equation, integers, values, precision=precision, preferred_element_type=scales.dtype
    )
    return _scaled(equation, sums, scales, scale, x.dtype)


def _backward(how: tuple, kept: tuple, g: Array) -> tuple[Array, Array, Array]:
    x, values, scale = kept
    if how[
        3
    ]:  # else the integers would be found to be those of the forward pass, and kept beside x
        x, g = jax.lax.optimization_barrier((x, g))
    contracted = _contracted(how[0])
    integers, scales, inverse = int8_rows(x, contracted)
    rounded = (integers.astype(scales.dtype) * scales).astype(x.dtype)
    dnormed, dweight = _product_backward(how, (rounded, values), g)
    dnormed = dnormed.astype(scales.dtype) * scale
    normed = x.astype(scales.dtype) * inverse
    dx = inverse * (dnormed - normed * (dnormed * normed).mean(contracted, keepdims=True))
    return dx.astype(x.dtype), dweight, jnp.zeros_like(scale)


_product.defvjp(
    lambda how, x, values, scale: (_product(how, x, values, scale), (x, values, scale)), _backward
)


@flax.struct.dataclass
class PackedTernary:
    """A ternary weight of two bits a number, for decoding: an eighth of bfloat16's bytes. Not trained.

    Attributes:
      values: uint8 [the axes of W that are kept, R / 4], R the product of those that are contracted, rounded up: two
        bits of byte j are 1 + the numbers j, j + R / 4, j + 2 R / 4 and j + 3 R / 4 of a column.
      scale: mean|W|.
    """

    values: Array
    scale: Array

    def contract(
        self,
        equation: str,
        x: Array,
        axes: Axes,
        *,
        precision: PrecisionLike = None,
        apart: bool = False,
    ) -> Array:
        """Returns what `Ternary.contract` would, by sums in int32.

        One row is summed up as the bytes are read. Of more rows a product of int8 is made, and the weight unpacked.
        """
        del axes, precision, apart
        letters, of_weight, out = _letters(equation)
        shared = [c for c in of_weight if c not in out]
        kept = [c for c in of_weight if c in out]
        if (
            of_weight != "".join(shared + kept)
            or [c for c in letters if c in shared] != shared
            or set(kept) & set(letters)
        ):
            raise UsageError(
                f"packed weights take rows and contract their first axes in order, not {equation!r}."
            )
        integers, scales, _ = int8_rows(x, _contracted(equation))
        integers = integers.astype(jnp.int8)
        length = math.prod(x.shape[i] for i in _contracted(equation))
        if integers.size == length:
            sums = self._of_one_row(integers.reshape(-1))
            sizes = dict(zip(kept, sums.shape, strict=True))
            sums = sums.reshape([sizes.get(c, 1) for c in out])
        else:
            weight = self.unpacked(length)
            weight = weight.reshape(
                *weight.shape[:-1], *(x.shape[i] for i in _contracted(equation))
            )
            sums = jnp.einsum(
                f"{letters},{''.join(kept + shared)}->{out}",
                integers,
                weight,
                preferred_element_type=jnp.int32,
            )
        return _scaled(equation, sums, scales, self.scale, x.dtype)

    def _of_one_row(self, integers: Array) -> Array:
        """Adds up four planes of products; 1 was added to each number of the weight, so the row's sum is taken away."""
        quarter, ndim = self.values.shape[-1], self.values.ndim
        planes = jnp.pad(integers, (0, 4 * quarter - integers.size)).astype(jnp.int32)
        planes = planes.reshape(4, *(1,) * (ndim - 1), quarter)
        each = sum((self.values >> (2 * i) & 3).astype(jnp.int32) * planes[i] for i in range(4))
        return jnp.sum(each, -1) - planes.sum()

    def unpacked(self, length: int) -> Array:
        """Returns the weight as int8 [the axes that are kept, R]."""
        planes = jnp.concatenate([self.values >> (2 * i) & 3 for i in range(4)], -1)
        return planes[..., :length].astype(jnp.int8) - 1

    def on_weight(self, fn: Callable[[Array], Array]) -> "PackedTernary":
        """Stays what it is."""
        del fn
        return self


def pack(weight: Ternary, contracted: int) -> PackedTernary:
    """Packs a ternary weight, of whose axes the first `contracted` are contracted; its values are not checked."""
    sizes = weight.values.shape
    length = math.prod(sizes[:contracted])
    quarter = -(-length // 4)
    codes = (
        weight.values.reshape(length, -1).T.reshape(*sizes[contracted:], length).astype(jnp.int8)
        + 1
    )
    codes = jnp.pad(
        codes, [(0, 0)] * (codes.ndim - 1) + [(0, 4 * quarter - length)], constant_values=1
    )
    planes = codes.astype(jnp.uint8).reshape(*codes.shape[:-1], 4, quarter)
    return PackedTernary(
        functools.reduce(jnp.bitwise_or, (planes[..., i, :] << (2 * i) for i in range(4))),
        weight.scale,
    )


def for_decoding(weight: Ternary, axes: Axes) -> PackedTernary | Ternary:
    """Returns a weight that maps "embed" to all its other axes, or those to it, as decoding reads it.

    PackedTernary where no mesh splits it; else of eight bits a number, each device its own share.
    """
    if any(mesh_axes(name) for name in in_role(axes, "weight") if name):
        return Ternary(weight.values.astype(jnp.int8), weight.scale)
    return pack(weight, 1 if axes[0] == "embed" else len(axes) - 1)
