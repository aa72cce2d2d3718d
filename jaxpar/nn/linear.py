"""Every product with a weight: `contract`, and what may stand in a weight's place.

Where a parameter tree has an array, it may have another object with a `contract` of its own: `Lora` adds a low-rank
product, `Frozen` has no gradient, those of `jaxpar.nn.weights.narrow` keep few bits a number,
`Deferred` leaves the weight's gradient for later. They are pytrees whose arrays may be stacked over
layers, so no layer, loop or optimizer needs to know of them.

Example:
    import flax
    import jax
    import jax.numpy as jnp

    from jaxpar.nn.linear import contract

    weight = jax.random.normal(jax.random.key(0), (8, 2, 4))  # maps 8 features to 2 heads of 4
    x, axes = jnp.ones((1, 3, 8)), ("embed", "heads", "head_dim")

    @flax.struct.dataclass
    class Scaled:  # your own: a weight that learns the size of each head
        weight: jax.Array
        size: jax.Array

        def contract(self, equation, x, axes, **options):
            return contract(equation, x, self.weight, axes, **options) * self.size[None, None, :, None]

    y = contract("btd,dhk->bthk", x, Scaled(weight, jnp.array([1.0, 0.0])), axes)
    assert jnp.all(y[..., 1, :] == 0) and jnp.any(y[..., 0, :] != 0)
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.lax import PrecisionLike
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpar.mesh import constrain, in_role, mesh_axes, platform
from jaxpar.types import Array, PyTree, UsageError

__all__ = [
    "Deferred", "Frozen", "InBlocks", "Lora", "Transposed", "Weight", "contract", "converts_weights",
    "deferred_gradient", "fixed_product", "on_weight", "product_in_parts", "transposed_is_faster",
    "whole_weight", "wide_einsum",
]  # fmt: skip

Axes = tuple[str | None, ...]

BLOCK = 128
"""Contracted rows of a weight that are converted at once: the fastest of 32 to 512 on two cores."""
PART = 256
"""Rows of a matrix, none of them contracted, that are converted at once."""


@runtime_checkable
class Weight(Protocol):
    """What may stand in an array's place; a pytree."""

    def contract(
        self,
        equation: str,
        x: Array,
        axes: Axes,
        *,
        precision: PrecisionLike = None,
        apart: bool = False,
    ) -> Array:
        """Returns what `contract` of the module returns for this weight."""
        ...


@runtime_checkable
class SupportsOnWeight(Weight, Protocol):
    """A `Weight` that says which of its arrays is to be cast and laid out as a weight is."""

    def on_weight(self, fn: Callable[[Array], Array]) -> PyTree:
        """Returns itself with `fn` applied to that array."""
        ...


@runtime_checkable
class SupportsWhole(Weight, Protocol):
    """A `Weight` that multiplies as one array would."""

    def whole(self) -> Array:
        """Returns that array."""
        ...


def contract(
    equation: str,
    x: Array,
    w: Array | Weight,
    axes: Axes,
    *,
    bias: Array | None = None,
    precision: PrecisionLike = None,
    apart: bool = False,
) -> Array:
    """Computes `einsum(equation, x, w) + bias` in the dtype of `x`, on any mesh; named "product" for remat.

    The weight is gathered for the product and gathered again for the backward pass, so that no gathered weight is kept;
    its gradient is summed into the layout of the role "grad" (`jaxpar.mesh.in_role`).

    Args:
      equation: Of `x` and `w`, such as "btd,dhk->bthk".
      x: Activations.
      w: The weight, as a step holds it, or a `Weight`.
      axes: Logical axes of `w`.
      bias: Of the last axes of the result.
      precision: As of `jax.numpy.einsum`.
      apart: Whether neither a loop nor remat lies between forward and backward pass, where XLA would find both gathers
        the same and keep the gathered weight.

    Cost: 2 operations a pair of elements that are multiplied; twice that again for the gradients.
    """
    if isinstance(w, Weight):
        y = w.contract(equation, x, axes, precision=precision, apart=apart)
    else:
        y = _product((equation, axes, precision, apart), x, w.astype(x.dtype))
    y = checkpoint_name(y, "product")
    return (
        y
        if bias is None
        else y + bias.astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: tuple, x: Array, weight: Array) -> Array:
    equation, axes, precision, _ = how
    if (
        platform() == "gpu"
        and x.dtype.itemsize == 2
        and not any(mesh_axes(name) for name in (*axes, "batch") if name)
    ):
        filled = _with_enough_rows(equation, x, weight)
        y = jnp.einsum(equation, filled, weight, precision=precision)
        return (
            y if filled is x else y[:, : x.shape[1]]
        )  # of an equation that turns axes, the second is another
    weight = constrain(weight, *in_role(axes, "product"), name="a weight")
    return _in_columns(
        how, 2, jnp.einsum(equation, _in_columns(how, 0, x), weight, precision=precision)
    )


def converts_weights(dtype: DTypeLike) -> bool:
    """Returns whether products make a float32 copy of a weight of this type, as XLA does on CPUs."""
    return platform() == "cpu" and jnp.dtype(dtype).itemsize == 2


def wide_einsum(equation: str, x: Array, y: Array, dtype: DTypeLike) -> Array:
    """Multiplies two arrays with sums and a result in `dtype`, as `jnp.einsum` does.

    XLA's CPU compiler refuses some products of 16 bits with sums in float32 when they run
    ("Unsupported element type for DotThunk"), so both are converted first there.
    """
    if converts_weights(x.dtype) or converts_weights(y.dtype):
        x = x.astype(dtype)
        y = y.astype(dtype)
    return jnp.einsum(equation, x, y, preferred_element_type=dtype)


def product_in_parts(x: Array, weight: Array, dtype: DTypeLike) -> Array:
    """Multiplies by a tall matrix, on CPUs a part at a time where all of it would be converted.

    Args:
      x: [B, T, D].
      weight: [V, D], of the type of `x`.
      dtype: Type of the result.

    Returns:
      The product with the transposed matrix, [B, T, V].
    """
    num_parts, rest = divmod(len(weight), PART)
    is_large = math.prod(x.shape[:2]) >= PART
    if is_large or not num_parts or not converts_weights(weight.dtype) or mesh_axes("vocab"):
        return wide_einsum("btd,vd->btv", x, weight, dtype)

    def product(rows: Array) -> Array:
        return wide_einsum("btd,vd->btv", x, rows, dtype)

    whole = len(weight) - rest
    parts = jax.lax.map(
        product, weight[:whole].reshape(num_parts, PART, -1)
    )  # [V / PART, B, T, PART]
    y = jnp.moveaxis(parts, 0, 2).reshape(*x.shape[:2], whole)
    if not rest:
        return y
    return jnp.concatenate([y, product(weight[whole:])], -1)


def _in_columns(how: tuple, which: int, x: Array) -> Array:
    """Splits an input (0) or a result (2) as its weight is by the layout "2d"; otherwise GSPMD gathers weights."""
    over, letters = mesh_axes("embed_product"), _letters(how[0])
    split = {
        letter for letter, name in zip(letters[1], how[1], strict=True) if name == "embed"
    } & set(letters[which])
    if not over or not split:
        return x
    return jax.lax.with_sharding_constraint(
        x, P(*(over if c in split else P.UNCONSTRAINED for c in letters[which]))
    )


def _with_enough_rows(equation: str, x: Array, weight: Array) -> Array:
    """Fills the second axis of `x` up, so that there are 16 rows in all, where a product is small.

    XLA:GPU takes products of fewer than 10^7 multiplications apart: it multiplies number by number, rounds each to 16
    bits, writes them all down and adds them up. Of one row and [2048, 2048] that is 16 us on an H200, and reading is 2.
    """
    letters, of_weight, out = _letters(equation)
    rows = math.prod(x.shape[:2])
    has_rows = out[:2] == letters[:2] and not set(letters[:2]) & set(of_weight)
    if not has_rows or rows >= 16 or weight.size * rows >= 10**7:
        return x
    return jnp.pad(x, [(0, 0), (0, -(-16 // x.shape[0]) - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])


def _product_backward(how: tuple, kept: tuple, g: Array) -> tuple[Array, Array]:
    x, weight = kept
    if how[3] and mesh_axes("embed_weight"):
        weight, g = jax.lax.optimization_barrier((weight, g))
    return _input_gradient(how, weight, x, g), _weight_gradient(how, weight, x, g)


def _input_gradient(how: tuple, weight: Array, x: Array | jax.ShapeDtypeStruct, g: Array) -> Array:
    # Of `x` only the type is read, and over which manual axes it varies.
    equation, axes, precision, *_ = how
    weight = constrain(weight, *in_role(axes, "product"), name="a weight")
    product = functools.partial(jnp.einsum, equation, precision=precision)
    (dx,) = jax.linear_transpose(lambda x: product(x, weight), x)(_in_columns(how, 2, g))
    return _in_columns(how, 0, dx)


def _weight_gradient(how: tuple, weight: Array, x: Array, g: Array) -> Array:
    equation, axes, precision, _ = how
    product = functools.partial(jnp.einsum, equation, precision=precision)
    x, g = _in_columns(how, 0, x), _in_columns(how, 2, g)
    (dweight,) = jax.linear_transpose(lambda weight: product(x, weight), weight)(g)
    return constrain(dweight, *in_role(axes, "grad"), name="gradient of a weight")


_product.defvjp(lambda how, x, weight: (_product(how, x, weight), (x, weight)), _product_backward)


def _letters(equation: str) -> tuple[str, str, str]:
    """Letters of x, weight and result."""
    inputs, out = equation.replace(" ", "").split("->")
    x, weight = inputs.split(",")
    return x, weight, out


def whole_weight(w: PyTree) -> Array:
    """Returns the array that a weight multiplies as: itself, or what a `Weight` says; float32 at least of a narrow one.

    Leading axes of stacks are not taken: `jax.vmap` over layers.

    Raises:
      UsageError: The weight rounds what it multiplies, and so is no array.
    """
    if isinstance(w, jax.Array):
        return w
    if not isinstance(w, SupportsWhole):
        raise UsageError(f"a weight of kind {type(w).__name__} multiplies as no array would.")
    return w.whole()


def fixed_product(
    equation: str,
    x: Array,
    w: Array | Weight,
    axes: Axes,
    precision: PrecisionLike = None,
    apart: bool = False,
) -> Array:
    """Multiplies by `whole_weight(w)`, without a gradient: the backward pass keeps `w` as it is stored, and not `x`."""
    like = jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
    return _fixed((equation, axes, precision, apart, like), x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fixed(how: tuple, x: Array, w: PyTree) -> Array:
    return _product(how[:4], x, whole_weight(w).astype(x.dtype))


def _fixed_backward(how: tuple, w: PyTree, g: Array) -> tuple[Array, PyTree]:
    *_, apart, like = how
    if apart:  # else the weight would be found to be that of the forward pass, and kept wide
        w, g = jax.lax.optimization_barrier((w, g))
    return _input_gradient(how, whole_weight(w).astype(g.dtype), like, g), jax.tree.map(
        _no_gradient, w
    )


def _no_gradient(x: Array) -> Array | np.ndarray:
    return (
        jnp.zeros_like(x)
        if jnp.issubdtype(x.dtype, jnp.inexact)
        else np.zeros(x.shape, jax.dtypes.float0)
    )


_fixed.defvjp(lambda how, x, w: (_fixed(how, x, w), w), _fixed_backward)


@flax.struct.dataclass
class Frozen:
    """A weight without a gradient: neither that nor the product's input is kept for the backward pass.

    Attributes:
      weight: W.
    """

    weight: Array

    def contract(
        self,
        equation: str,
        x: Array,
        axes: Axes,
        *,
        precision: PrecisionLike = None,
        apart: bool = False,
    ) -> Array:
        """Multiplies as an array would."""
        return fixed_product(equation, x, self.weight, axes, precision, apart)

    def whole(self) -> Array:
        """Returns W."""
        return self.weight

    def on_weight(self, fn: Callable[[Array], Array]) -> "Frozen":
        """Applies `fn` to W."""
        return self.replace(weight=fn(self.weight))  # type: ignore[attr-defined]


@flax.struct.dataclass
class Lora:
    """A weight and a low-rank change of it: x W + scale (x A) B (LoRA: arXiv:2106.09685, eq. 3).

    With a magnitude m it is x (W + scale A B) m / norm(W + scale A B), of each output (DoRA: arXiv:2402.09353,
    eq. 5). The norm counts as a constant in gradients (section 4.3 there).

    Attributes:
      weight: W, an array or a `Weight`; `Frozen` or narrower where the change alone is trained.
      down: A, the contracted axes of W and then the rank.
      up: B, the rank and then the other axes of W.
      magnitude: m, of the axes of W that are not contracted; None for LoRA.
      key: Draws which numbers of x the change does not see; None outside of training.
      scale: Of the change; alpha / rank in the paper, alpha / sqrt(rank) in rsLoRA (arXiv:2312.03732).
      rate: Of that dropout.
    """

    weight: Any
    down: Array
    up: Array
    magnitude: Array | None = None
    key: Array | None = None
    scale: float = flax.struct.field(pytree_node=False, default=1.0)
    rate: float = flax.struct.field(pytree_node=False, default=0.0)

    def contract(
        self,
        equation: str,
        x: Array,
        axes: Axes,
        *,
        precision: PrecisionLike = None,
        apart: bool = False,
    ) -> Array:
        """Returns the sum of both products; that of A is as small as the rank."""
        letters, weight, out = _letters(equation)
        shared = [c for c in weight if c not in out]
        kept = [c for c in weight if c in out]
        if weight != "".join(shared + kept) or "z" in letters + out:
            raise UsageError(
                f"adapters take weights whose contracted axes come first, and no axis z, not {equation!r}."
            )
        middle = "".join(c for c in letters if c not in shared) + "z"
        product = functools.partial(contract, precision=precision, apart=apart)
        into, outof = f"{letters},{''.join(shared)}z->{middle}", f"{middle},z{''.join(kept)}->{out}"
        narrow = product(into, self._dropped(x), self.down, (*axes[: len(shared)], None))
        change = product(outof, narrow, self.up, (None, *axes[len(shared) :]))
        y = product(equation, x, self.weight, axes) + self.scale * change
        if self.magnitude is None:
            return y
        ratio = self.magnitude / jax.lax.stop_gradient(self.norm())
        return y * ratio.astype(y.dtype).reshape(
            [ratio.shape[kept.index(c)] if c in kept else 1 for c in out]
        )

    def _dropped(self, x: Array) -> Array:
        if self.key is None or not self.rate:
            return x
        seen = jax.random.bernoulli(self.key, 1 - self.rate, x.shape)
        return jnp.where(seen, x / (1 - self.rate), 0).astype(x.dtype)

    def _sum(self) -> Array:
        weight = whole_weight(self.weight)
        wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
        return wide + self.scale * jnp.tensordot(self.down, self.up, 1, precision="highest").astype(
            wide.dtype
        )

    def norm(self) -> Array:
        """Returns the norm of W + scale A B of each output, float32 at least; leading axes of stacks are not taken."""
        summed = self._sum()
        norm = jnp.sqrt(jnp.sum(summed * summed, tuple(range(self.down.ndim - 1))))
        return jnp.maximum(norm, jnp.finfo(norm.dtype).tiny)  # outputs of zeros stay zero

    def whole(self) -> Array:
        """Returns the one array that multiplies so, float32 at least: the adapter merged into its weight."""
        summed = self._sum()
        if self.magnitude is None:
            return summed
        return summed * (self.magnitude / self.norm())[(None,) * (self.down.ndim - 1)]

    @classmethod
    def of(
        cls, key: Array, weight: Array, contracted: int, rank: int, scale: float = 1.0
    ) -> "Lora":
        """Returns `weight` with an adapter that changes nothing yet; consumes `key`.

        Args:
          key: Of the normal draw of A, of variance 1 / its rows.
          weight: W; leading axes of stacks are not taken: `jax.vmap` over layers and their keys.
          contracted: How many of its first axes are contracted.
          rank: r.
          scale: Of the change.
        """
        rows = weight.shape[:contracted]
        down = jax.random.normal(key, (*rows, rank), weight.dtype) / jnp.sqrt(
            jnp.asarray(rows).prod()
        ).astype(weight.dtype)
        return cls(
            weight, down, jnp.zeros((rank, *weight.shape[contracted:]), weight.dtype), scale=scale
        )

    def on_weight(self, fn: Callable[[Array], Array]) -> "Lora":
        """Applies `fn` to W alone."""
        return self.replace(weight=on_weight(fn, self.weight))  # type: ignore[attr-defined]


@flax.struct.dataclass
class Transposed:
    """A weight that lies with its contracted axes last: each number of a product is then one sum along memory.

    One row of activations on a GPU is multiplied so, in one kernel that reads the weight at the speed of memory, where
    XLA would make a product of 16 rows of it. More rows are a product as any other.

    Attributes:
      weight: The axes of W that are kept, then those that are contracted.
    """

    weight: Array

    @classmethod
    def of(cls, weight: Array, contracted: int) -> "Transposed":
        """Returns W, of whose axes the first `contracted` are contracted."""
        axes = tuple(range(weight.ndim))
        return cls(weight.transpose(axes[contracted:] + axes[:contracted]))

    def contract(
        self,
        equation: str,
        x: Array,
        axes: Axes,
        *,
        precision: PrecisionLike = None,
        apart: bool = False,
    ) -> Array:
        """Multiplies as W would; sums are float32 at least."""
        letters, of_weight, out = _letters(equation)
        shared, kept = (
            [c for c in of_weight if (c in out) == is_kept] for is_kept in (False, True)
        )
        if (
            of_weight != "".join(shared + kept)
            or letters[2:] != "".join(shared)
            or out[2:] != "".join(kept)
        ):
            raise UsageError(
                f"transposed weights take rows of two axes and contract all others, not {equation!r}."
            )
        if math.prod(x.shape[:2]) > 1 or platform() != "gpu":
            axes, equation = (
                (*axes[len(shared) :], *axes[: len(shared)]),
                f"{letters},{''.join(kept + shared)}->{out}",
            )
            return _product((equation, axes, precision, apart), x, self.weight.astype(x.dtype))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        each = self.weight.astype(wide) * x.reshape((1,) * len(kept) + x.shape[2:]).astype(wide)
        y = each.sum(tuple(range(len(kept), each.ndim)))
        return y.reshape(1, 1, *y.shape).astype(x.dtype)


@flax.struct.dataclass
class InBlocks:
    """One layer's weight of a stack, which a CPU multiplies a block at a time.

    A block of 16-bit numbers is converted to float32 and multiplied while it is in the processor's
    cache. The weight is read once, and no copy of it is made: on two cores this takes a third of
    the time of a product with a converted weight.

    Attributes:
      stack: W of all layers, [L, ...].
      layer: The layer's index in it.
    """

    stack: Array
    layer: int | Array

    def contract(
        self,
        equation: str,
        x: Array,
        axes: Axes,
        *,
        precision: PrecisionLike = None,
        apart: bool = False,
    ) -> Array:
        """Multiplies as an array would; sums are float32 at least."""
        letters, of_weight, out = _letters(equation)
        shared = "".join(c for c in of_weight if c not in out)
        kept = "".join(c for c in of_weight if c in out)
        is_plain = of_weight == shared + kept and letters[2:] == shared and out[2:] == kept
        is_turned = out[:2] == letters[1::-1]
        is_plain = is_plain and (is_turned or out[:2] == letters[:2])
        if not is_plain or any(mesh_axes(name) for name in axes if name):
            return _product((equation, axes, precision, apart), x, self.whole().astype(x.dtype))
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        sizes = self.stack.shape[1 + len(shared) :]
        rows = x.reshape(x.shape[0] * x.shape[1], -1)
        depth = rows.shape[1]
        stack = self.stack.reshape(len(self.stack), depth, -1)

        def product(begin: Array | int, size: int) -> Array:
            part = jax.lax.dynamic_slice_in_dim(rows, begin, size, axis=1)
            start = (self.layer, begin, 0)
            block = jax.lax.dynamic_slice(stack, start, (1, size, stack.shape[2]))[0]
            return part.astype(dtype) @ block.astype(dtype)

        def add(block: Array, y: Array) -> Array:
            return y + product(block * BLOCK, BLOCK)

        num_blocks, rest = divmod(depth, BLOCK)
        y = jnp.zeros((len(rows), stack.shape[2]), dtype)
        if num_blocks:
            y = jax.lax.fori_loop(0, num_blocks, add, y)
        if rest:
            y = y + product(depth - rest, rest)
        y = y.reshape(*x.shape[:2], *sizes).astype(x.dtype)
        if is_turned:
            return jnp.swapaxes(y, 0, 1)
        return y

    def whole(self) -> Array:
        """Returns the layer's W."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)


def transposed_is_faster(*weights: PyTree) -> bool:
    """Whether decoding reads these weights faster transposed: arrays of 16 bits, on a GPU."""
    is_small = all(isinstance(w, jax.Array) and w.dtype.itemsize == 2 for w in weights)
    return is_small and platform() == "gpu"


@flax.struct.dataclass
class Deferred:
    """A weight whose gradient is not computed where its input's is, but later, from what is kept of it.

    The backward pass returns zeros for `weight` and, as the gradient of `slot`, the pair that `deferred_gradient` makes
    the weight's gradient of. So a schedule can pass gradients down a pipeline first and sum weights' gradients into its
    gaps (zero-bubble schedules: arXiv:2401.10241, section 2).

    Attributes:
      weight: W.
      slot: Zeros like the input and like the result of the product.
    """

    weight: Array
    slot: tuple[Array, Array]

    def contract(
        self,
        equation: str,
        x: Array,
        axes: Axes,
        *,
        precision: PrecisionLike = None,
        apart: bool = False,
    ) -> Array:
        """Multiplies as an array would."""
        return _deferring(
            (equation, axes, precision, apart), x, self.weight.astype(x.dtype), self.slot
        )

    def on_weight(self, fn: Callable[[Array], Array]) -> "Deferred":
        """Applies `fn` to W alone."""
        return self.replace(weight=fn(self.weight))  # type: ignore[attr-defined]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _deferring(how: tuple, x: Array, weight: Array, slot: tuple[Array, Array]) -> Array:
    del slot
    return _product(how, x, weight)


def _deferring_forward(how: tuple, x: Array, weight: Array, slot: tuple) -> tuple[Array, tuple]:
    del slot
    return _product(how, x, weight), (x, weight)


def _deferring_backward(how: tuple, kept: tuple, g: Array) -> tuple:
    x, weight = kept
    dx = _input_gradient(how, weight, x, g)
    return dx, jnp.zeros_like(weight), (x, g)


_deferring.defvjp(_deferring_forward, _deferring_backward)


def deferred_gradient(
    equation: str,
    slot: tuple[Array, Array],
    weight: Array,
    axes: Axes,
    precision: PrecisionLike = None,
) -> Array:
    """Returns the gradient of a `Deferred` weight from the gradient of its slot, in the dtype of the weight."""
    x, g = slot
    return _weight_gradient(
        (equation, axes, precision, False), weight.astype(x.dtype), x, g
    ).astype(weight.dtype)


def on_weight(fn: Callable[[Array], Array], w: PyTree) -> PyTree:
    """Applies `fn` to the array of a weight: to itself, or to what a `Weight` says is its weight."""
    return w.on_weight(fn) if isinstance(w, SupportsOnWeight) else fn(w)
