"""Recurrent layers as mixers: on any mesh, at attention's size, with a state that does not grow.

Time is whole on every device; rows and units are split, so a recurrence crosses no device.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxpar.mesh import in_role, is_axes, local, mesh_axes, num_shares
from jaxpar.nn.auxiliary import NOTHING, Aux, Max, Min
from jaxpar.nn.cells.aaren import Aaren
from jaxpar.nn.cells.cell import Cell
from jaxpar.nn.cells.gated import GRU, LEM, LSTM, CfC, MinGRU, MinLSTM, ParaGRU, ParaLSTM
from jaxpar.nn.cells.layer import cell_states, first_state
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.scan.varying import varying_as
from jaxpar.solve import Stats
from jaxpar.solve.problem import Chooser, Method
from jaxpar.transfers import Transfer
from jaxpar.types import Info, PyTree, UsageError, largest

__all__ = ["CELLS", "Recurrent", "cell_of", "equal_size", "mixer_leaves", "sharded_recurrence"]

CELLS = {
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


def cell_of(name: str, size: int, heads: int) -> Cell | Aaren:
    """Returns the cell that `CELLS` names, of `size` units; the dense ones and Aaren in `heads` blocks."""
    return CELLS[name](size, heads) if name in WITH_HEADS else CELLS[name](size)


def mixer_leaves(cell: Cell | Aaren, embed_dim: int, out_std: float) -> dict[str, Leaf]:
    """Declares a mixer's parameters: the cell's for inputs of `embed_dim`, and w_out [n, D] back."""
    return cell.leaves(embed_dim) | {
        "w_out": Leaf((cell.size, embed_dim), ("mlp", "embed"), out_std)
    }


def equal_size(name: str, embed_dim: int, heads: int, num_params: int) -> int:
    """Returns the size at which a mixer has nearly `num_params` parameters: a multiple of 8 and of `heads`."""
    unit = math.lcm(8, heads)

    def gap(size: int) -> int:
        leaves = mixer_leaves(cell_of(name, size, heads), embed_dim, 1.0)
        return abs(sum(math.prod(leaf.shape) for leaf in leaves.values()) - num_params)

    size = unit
    while gap(size + unit) < gap(size):
        size += unit
    return size


def _unit_axes(ndim: int) -> tuple[str | None, ...]:
    """Returns the logical axes of one array of a cell's state: rows, then units (or heads, and what each has)."""
    return ("batch", "mlp", *(None,) * (ndim - 2))


@dataclasses.dataclass(frozen=True)
class Recurrent:
    """A cell of `jaxpar.nn` between products with weights, as a mixer.

    Attributes:
      cell: What is run.
      method: How the recurrence is solved, one of `jaxpar.solve`; None for the cell's own.
    """

    cell: Cell | Aaren
    method: Method | Chooser | None = None

    causal, score_size = True, 0

    @property
    def num_inputs(self) -> int:
        """A product for each gate."""
        return len(self.cell.gates)

    def leaves(self, embed_dim: int, std: float, out_std: float) -> dict[str, dict[str, Leaf]]:
        """Declares the cell's parameters and w_out [n, D], under "mixer"; the cell's own spread replaces `std`."""
        del std
        return {"mixer": mixer_leaves(self.cell, embed_dim, out_std)}

    def init_cache(self, batch: int, slots: int, width: int, dtype: DTypeLike) -> PyTree:
        """Returns the cell's initial state, in float32 at least; it has no slots."""
        del slots, width
        return self.cell.initial((batch,), jnp.promote_types(dtype, jnp.float32))

    def cache_axes(self) -> PyTree:
        """Returns the logical axes of the state."""
        state = jax.eval_shape(lambda: self.cell.initial((1,)))
        return jax.tree.map(lambda h: _unit_axes(h.ndim), state)

    def apply(
        self, params: dict, x: Float[Array, "B T D"], cache: PyTree | None, context: Context
    ) -> tuple[Float[Array, "B T D"], PyTree | None, Aux]:
        """Returns outputs, the state after the last token that counts, and how the worst solver of all devices fared.

        Raises:
          UsageError: If the context says which tokens each may see: a recurrence sees its past.
        """
        context.refuse("a recurrent mixer", "visible")
        params, apart = params["mixer"], context.rules.apart
        into = {"axes": ("embed", "mlp"), "apart": apart}
        x = jnp.swapaxes(x, 0, 1)
        projections = {
            gate: contract("tbd,dn->tbn", x, params[f"w{gate}"], bias=params[f"b{gate}"], **into)
            for gate in self.cell.gates
        }
        projections = {gate: checkpoint_name(lane, "qkv") for gate, lane in projections.items()}
        resets = None if context.starts is None else context.starts.T
        options = {"resets": resets, "valid": context.valid, "method": self.method}
        told = NOTHING
        if self.iterates:
            out, state, info = sharded_recurrence(
                self.cell, params, projections, cache, with_info=True, **options
            )
            told = Aux(
                {}, {name: Min(x) if name == "converged" else Max(x) for name, x in info.items()}
            )
        else:
            out, state = sharded_recurrence(self.cell, params, projections, cache, **options)
        out = checkpoint_name(out, "attention")
        y = contract("tbn,nd->btd", out, params["w_out"], ("mlp", "embed"), apart=apart)
        return y, None if cache is None else state, told

    @property
    def iterates(self) -> bool:
        """Whether there is a solver that could fail: the cell has no closed form, or a method was asked for."""
        return self.method is not None or (isinstance(self.cell, Cell) and self.cell.affine is None)

    def transfers(self, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares nothing: a sequence that is split is refused."""
        del sizes
        return iter(())


def sharded_recurrence(
    cell: Cell | Aaren,
    params: dict[str, jax.Array],
    projections: dict[str, Float[Array, "T B n"]],
    h0: PyTree | None = None,
    *,
    resets: Bool[Array, "T B"] | None = None,
    valid: Int[Array, " B"] | None = None,
    method: Method | Chooser | None = None,
    with_info: bool = False,
) -> Any:  # two results or three, as `with_info` says
    """Runs a cell's recurrence on each device's own rows and units, given its products with the input.

    Args:
      cell: What is run.
      params: The cell's; those of the products are not read.
      projections: As from `cell.input_projections`, time first.
      h0: State before the first step.
      resets: True where the state starts anew.
      valid: How many steps of each row count, 0 to T: the state after them is returned; by default all.
      method: One of `jaxpar.solve`; None for the cell's own.
      with_info: Whether to return how the worst of all devices fared, which costs them a collective of a few numbers.

    Returns:
      Outputs [T, B, n] in the dtype of the projections, and the state after the steps that count; then, if asked for,
      the scalars iterations, residual and converged (0, 0 and 1 where nothing was iterated).

    Raises:
      UsageError: If the sequence is split over devices.
    """
    if axes := (*mesh_axes("seq_layer"),):
        raise UsageError(
            f"a recurrent mixer runs along the whole sequence, which the mesh splits over {'*'.join(axes)}; "
            "give mesh.context=1, or model.mixer.kind=attention."
        )
    lane: Any = next(iter(projections.values()))
    h0 = first_state(cell, h0, lane.shape[1], projections)
    products = {letter + gate for gate in cell.gates for letter in "wb"}
    declared = {name: leaf for name, leaf in cell.leaves(1).items() if name not in products}
    states = jax.tree.map(lambda h: _unit_axes(h.ndim), h0)
    flat, tree = jax.tree.flatten(
        (projections, {name: params[name] for name in declared}, h0, resets, valid)
    )
    axes = (
        dict.fromkeys(projections, (None, "batch", "mlp")),
        {name: in_role(leaf.axes, "use") for name, leaf in declared.items()},
        states,
        None if resets is None else (None, "batch"),
        None if valid is None else ("batch",),
    )
    parts = num_shares(*mesh_axes("mlp"))
    here = dataclasses.replace(cell, size=cell.size // parts, heads=-(-cell.heads // parts))

    def block(*flat):
        projections, params, h0, resets, valid = tree.unflatten(flat)
        params = varying_as(
            params, projections
        )  # so that gradients are summed over devices once, not in each step
        hs, stats = cell_states(here, params, projections, h0, method=method, resets=resets)
        last = jax.tree.map(lambda h, h0: _after(h, h0, valid), hs, h0)
        out = here.output(params, hs).astype(lane.dtype), last
        return (*out, _worst(stats)) if with_info else out

    out_axes = (None, "batch", "mlp"), states
    out_axes = (*out_axes, dict.fromkeys(INFO, ())) if with_info else out_axes
    return local(block, jax.tree.leaves(axes, is_leaf=is_axes), out_axes)(*flat)


def _after(states: jax.Array, h0: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Picks from states [T, B, ...] that after the steps that count."""
    if len(states) == 0:  # no step: what counts is what was before
        return h0
    if valid is None:
        return states[-1]
    last = states[jnp.maximum(valid - 1, 0), jnp.arange(len(valid))]
    return jnp.where((valid > 0).reshape(-1, *(1,) * (h0.ndim - 1)), last, h0)


def _worst(stats: Stats | None) -> Info:
    """Returns the scalars of `sharded_recurrence`, the same on every device."""
    if stats is None:
        return {
            "iterations": jnp.float32(0),
            "residual": jnp.float32(0),
            "converged": jnp.float32(1),
        }
    values = stats.iterations.max(), largest(stats.residual), -1.0 * stats.converged.min()
    values = jax.lax.stop_gradient(values)
    axes = (*mesh_axes("batch"), *mesh_axes("mlp"))
    worst = [jax.lax.pmax(jnp.float32(x), axes) if axes else jnp.float32(x) for x in values]
    return {"iterations": worst[0], "residual": worst[1], "converged": -worst[2]}
