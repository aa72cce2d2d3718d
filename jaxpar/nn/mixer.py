"""Recurrent layers in attention's place: what mixes the tokens of a block, on any mesh, at attention's size.

A block takes its own matrix products (it knows how its weights are gathered) and calls `mixed` for what lies between
them. Time is whole on every device; rows and units are split, so a recurrence crosses no device.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.mesh import in_role, local, mesh_axes
from jaxpar.nn.aaren import Aaren
from jaxpar.nn.cells import Cell
from jaxpar.nn.gated import GRU, LEM, LSTM, CfC, MinGRU, MinLSTM, ParaGRU, ParaLSTM
from jaxpar.nn.layer import first_state, unroll
from jaxpar.nn.leaf import Leaf
from jaxpar.types import Info, PyTree, UsageError

__all__ = ["MIXERS", "equal_size", "mixed", "mixer_cell", "mixer_leaves", "starts", "unit_axes"]

MIXERS = {
    "para_gru": ParaGRU,
    "para_lstm": ParaLSTM,
    "min_gru": MinGRU,
    "min_lstm": MinLSTM,
    "lem": LEM,
    "cfc": CfC,
    "gru": GRU,
    "lstm": LSTM,
    "aaren": Aaren,
}
INFO = ("iterations", "residual", "converged")
WITH_HEADS = ("gru", "lstm", "aaren")


def mixer_cell(name: str, size: int, heads: int) -> Any:
    """Returns the cell that `MIXERS` names, of `size` units; the dense ones and Aaren in `heads` blocks."""
    return MIXERS[name](size, heads) if name in WITH_HEADS else MIXERS[name](size)


def mixer_leaves(cell: Any, embed_dim: int, out_std: float) -> dict[str, Leaf]:
    """Declares a mixer's parameters: the cell's for inputs of `embed_dim`, and w_out [n, D] back."""
    return cell.leaves(embed_dim) | {"w_out": Leaf((cell.size, embed_dim), ("mlp", "embed"), out_std)}


def equal_size(name: str, embed_dim: int, heads: int, num_params: int) -> int:
    """Returns the size at which a mixer has nearly `num_params` parameters: a multiple of 8 and of `heads`."""
    unit = math.lcm(8, heads)

    def gap(size: int) -> int:
        leaves = mixer_leaves(mixer_cell(name, size, heads), embed_dim, 1.0)
        return abs(sum(math.prod(leaf.shape) for leaf in leaves.values()) - num_params)

    size = unit
    while gap(size + unit) < gap(size):
        size += unit
    return size


def unit_axes(ndim: int) -> tuple[str | None, ...]:
    """Returns the logical axes of one array of a cell's state: rows, then units (or heads, and what each has)."""
    return ("batch", "mlp", *(None,) * (ndim - 2))


def starts(segments: Int[Array, "B T"]) -> Bool[Array, "T B"]:
    """Returns True where another document begins than the one before, time first."""
    fresh = segments[:, 1:] != segments[:, :-1]
    return jnp.pad(fresh, ((0, 0), (1, 0))).T


def mixed(
    cell: Cell | Aaren,
    params: dict[str, jax.Array],
    drive: dict[str, Float[Array, "T B n"]],
    h0: PyTree | None = None,
    *,
    resets: Bool[Array, "T B"] | None = None,
    ends: Int[Array, " B"] | None = None,
    method: Any = None,
    with_info: bool = False,
) -> Any:
    """Runs a cell's recurrence on each device's own rows and units, given its products with the input.

    Args:
      cell: What is run.
      params: The cell's; those of the products are not read.
      drive: As from `cell.drive`, time first.
      h0: State before the first step.
      resets: True where the state starts anew.
      ends: Step of each row whose state is returned, by default the last; the rows of a padded prompt differ in it.
      method: One of `jaxpar.solve`; None for the cell's own.
      with_info: Whether to return how the worst of all devices fared, which costs them a collective of a few numbers.

    Returns:
      Outputs [T, B, n] in the dtype of the drive, and the state after step `ends`; then, if asked for, the scalars
      iterations, residual and converged (0, 0 and 1 where nothing was iterated).

    Raises:
      UsageError: If the sequence is split over devices.
    """
    if axes := (*mesh_axes("seq_layer"),):
        raise UsageError(
            f"a recurrent mixer runs along the whole sequence, which the mesh splits over {'*'.join(axes)}; "
            "give mesh.context=1, or model.mixer=attention."
        )
    lane: Any = next(iter(drive.values()))
    h0 = first_state(cell, h0, lane.shape[1], drive)
    products = {letter + gate for gate in cell.gates for letter in "wb"}
    declared = {name: leaf for name, leaf in cell.leaves(1).items() if name not in products}
    states = jax.tree.map(lambda h: unit_axes(h.ndim), h0)
    flat, tree = jax.tree.flatten((drive, {name: params[name] for name in declared}, h0, resets, ends))
    axes = (
        dict.fromkeys(drive, (None, "batch", "mlp")),
        {name: in_role(leaf.axes, "use") for name, leaf in declared.items()},
        states,
        None if resets is None else (None, "batch"),
        None if ends is None else ("batch",),
    )
    parts = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in mesh_axes("mlp"))
    here = dataclasses.replace(cell, size=cell.size // parts, heads=-(-cell.heads // parts))

    def block(*flat):
        drive, params, h0, resets, ends = tree.unflatten(flat)
        hs, stats = unroll(here, params, drive, h0, method=method, resets=resets)
        last = jax.tree.map(lambda h: h[-1] if ends is None else h[ends, jnp.arange(h.shape[1])], hs)
        out = here.output(params, hs).astype(lane.dtype), last
        return (*out, _worst(stats)) if with_info else out

    out_axes = (None, "batch", "mlp"), states
    out_axes = (*out_axes, dict.fromkeys(INFO, ())) if with_info else out_axes
    return local(block, jax.tree.leaves(axes, is_leaf=_is_axes), out_axes)(*flat)


def _worst(stats: Any) -> Info:
    """Returns the scalars of `mixed`, the same on every device."""
    if stats is None:
        return {"iterations": jnp.float32(0), "residual": jnp.float32(0), "converged": jnp.float32(1)}
    values = stats.iterations.max(), stats.residual.max(), -1.0 * stats.converged.min()
    axes = (*mesh_axes("batch"), *mesh_axes("mlp"))
    worst = [jax.lax.pmax(jnp.float32(x), axes) if axes else jnp.float32(x) for x in values]
    return {"iterations": worst[0], "residual": worst[1], "converged": -worst[2]}


def _is_axes(value: Any) -> bool:
    return type(value) is tuple and all(axis is None or isinstance(axis, str) for axis in value)
