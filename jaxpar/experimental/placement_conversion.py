"""Carries a conversion between placements out, by collectives inside `jax.shard_map`.

At rest a partial value has one leading dimension per partial axis, in the mapping's order and of the axis's size,
split over that axis; its dense value is the reduction over those dimensions.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpar.aot.placement import Broadcast, ConversionStep, Partial, Placement, Split, conversion
from jaxpar.types import UsageError

__all__ = ["convert", "specs"]


def specs(placement: Placement, rank: int, sizes: Mapping[str, int]) -> P:
    """Returns the `PartitionSpec` of an array at rest: partial axes in front, then `rank` dimensions."""
    front = [
        axis if sizes[axis] > 1 else None
        for axis, where in placement.items()
        if isinstance(where, Partial)
    ]
    nests: list[tuple[str, ...]] = [()] * rank
    for axis, where in placement.items():
        if isinstance(where, Split) and sizes[axis] > 1:
            nests[where.dim] += (axis,)
    return P(*front, *(nest[0] if len(nest) == 1 else nest or None for nest in nests))


def convert(x: jax.Array, source: Placement, target: Placement) -> jax.Array:
    """Returns the same value placed as `target`, by the collectives of `conversion` on the ambient mesh, and no other.

    Differentiable where only sums are partial; the gradient is that of the map between arrays at rest.

    Args:
      x: `[*partial axes of source, *shape]`, laid out by `specs`.
      source: Its placement; an array that lies otherwise is first brought there by JAX.
      target: The placement of the result, `[*partial axes of target, *shape]`.

    Raises:
      UsageError: Without a mesh, for leading dimensions that are not the partial axes' sizes, and as `conversion`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise UsageError("convert needs an ambient mesh; put it under jaxpar.mesh.use_mesh(mesh).")
    sizes = dict(mesh.shape)
    front = [axis for axis, where in source.items() if isinstance(where, Partial)]
    lead, shape = x.shape[: len(front)], x.shape[len(front) :]
    steps = conversion(source, target, shape, x.dtype, sizes)
    if lead != tuple(sizes[axis] for axis in front):
        wanted = ", ".join(f"{axis}={sizes[axis]}" for axis in front)
        raise UsageError(
            f"a value that is partial over {wanted} has these sizes in front; its shape is {x.shape}."
        )
    # A permute may leave copies that are equal without JAX's types knowing it.
    typed = all(step.kind != "collective-permute" for step in steps)
    num_front = sum(isinstance(where, Partial) for where in target.values())

    def body(block):
        block, here = block.reshape(block.shape[len(front) :]), source
        for step in steps:
            block, here = _carry_out(step, here, block, sizes, typed), step.after
        return block.reshape((1,) * num_front + block.shape)

    placed = (specs(placement, len(shape), sizes) for placement in (source, target))
    return jax.shard_map(body, in_specs=next(placed), out_specs=next(placed), check_vma=typed)(x)


def _carry_out(
    step: ConversionStep, here: Placement, x: jax.Array, sizes: Mapping[str, int], typed: bool
) -> jax.Array:
    """One step on a device's block."""
    axes, axis = step.axes, step.axes[0]
    before, after = here.get(axis, Broadcast()), step.after.get(axis, Broadcast())
    match step.kind, before, after:
        case "slice", _, Split(dim):
            size = x.shape[dim] // sizes[axis]
            return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)
        case "mask", _, Partial(op):
            return jnp.where(lax.axis_index(axis) == 0, x, jnp.full_like(x, _identity(op, x.dtype)))
        case "pad", Split(dim), Partial(op):
            whole = [size * (sizes[axis] if i == dim else 1) for i, size in enumerate(x.shape)]
            rest = jnp.full(whole, _identity(op, x.dtype), x.dtype)
            return lax.dynamic_update_slice_in_dim(
                rest, x, lax.axis_index(axis) * x.shape[dim], dim
            )
        case "all-gather", Split(dim), _:
            return lax.all_gather(
                x, axes, axis=dim, tiled=True, to="invarying" if typed else "varying"
            )
        case "all-to-all", Split(dim), Split(onto):
            return lax.all_to_all(x, axes, split_axis=onto, concat_axis=dim, tiled=True)
        case "all-to-all", Partial(op), Split(dim):
            parts = lax.all_to_all(x, axes, split_axis=dim, concat_axis=dim, tiled=True)
            count = math.prod(sizes[name] for name in axes)
            parts = parts.reshape(*x.shape[:dim], count, x.shape[dim] // count, *x.shape[dim + 1 :])
            return parts.max(dim) if op == "max" else parts.min(dim)
        case "reduce-scatter", _, Split(dim):
            return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
        case "all-reduce", Partial(op), _:
            return {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[op](x, axes)
        case _:  # the one kind left: "collective-permute"
            return lax.ppermute(x, axes, _pairs(here, step.after, axes, sizes))


def _identity(op: str, dtype: DTypeLike) -> float:
    """The value that `op` ignores."""
    if op == "sum":
        return 0
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min if op == "max" else jnp.iinfo(dtype).max
    return -jnp.inf if op == "max" else jnp.inf


def _pairs(
    before: Placement, after: Placement, axes: tuple[str, ...], sizes: Mapping[str, int]
) -> list:
    """(sender, receiver), numbered row-major over `axes`, so that each device gets its block; some keep theirs."""

    def blocks(placement: Placement) -> list[tuple[int, ...]]:
        """For each device the number of its block along each dimension."""
        nests: dict[int, list[str]] = {}
        for axis, where in placement.items():
            if isinstance(where, Split) and sizes[axis] > 1:
                nests.setdefault(where.dim, []).append(axis)
        out = []
        for place in itertools.product(*(range(sizes[axis]) for axis in axes)):
            at = dict(zip(axes, place, strict=True))
            out.append(
                tuple(_number([(at[a], sizes[a]) for a in nests[dim]]) for dim in sorted(nests))
            )
        return out

    have, want = blocks(before), blocks(after)
    keep = {i for i, (old, new) in enumerate(zip(have, want, strict=True)) if old == new}
    senders: dict[tuple, list[int]] = {}
    for i, block in enumerate(have):
        if i not in keep:
            senders.setdefault(block, []).append(i)
    return [(i if i in keep else senders[block].pop(), i) for i, block in enumerate(want)]


def _number(digits: Sequence[tuple[int, int]]) -> int:
    """The number of these (digit, base), the most significant first."""
    value = 0
    for digit, base in digits:
        value = value * base + digit
    return value
