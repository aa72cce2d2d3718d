"""Judges a device's step by what its layout declares: transfers, operations, memory."""

import dataclasses
import math
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jaxpar.aot.hlo import has_entry, matmul_flops
from jaxpar.aot.verify.collectives import breaches_of, found_transfers
from jaxpar.aot.verify.layouts import Layout
from jaxpar.aot.verify.program import Compiled
from jaxpar.mesh import is_axes, partition, platform
from jaxpar.transfers import Transfer, sum_by_axis
from jaxpar.types import PyTree

__all__ = ["Limits", "LayoutReport", "bytes_on_device", "judge"]


@dataclasses.dataclass(frozen=True)
class Limits:
    """Bounds of what one device may do in a step, and must.

    Attributes:
      transfers: Collectives that it may make; `Transfer.least` says which it must.
      flops: Most operations of its matrix products; None is not judged.
      least_flops: Fewest.
      held: Bytes of its share of state and batch; None is not judged.
      room: Most further bytes, over what `estimated_temporaries` says; None is not judged.
      allow: Transfers that are not judged, such as "gather over tensor".
      unjudged: What is left out, a sentence each.
    """

    transfers: Sequence[Transfer]
    flops: float | None = None
    least_flops: float = 0.0
    held: float | None = None
    room: float | None = None
    allow: tuple[str, ...] = ()
    unjudged: tuple[str, ...] = ()


@dataclasses.dataclass
class LayoutReport:
    """Result of one layout in one dtype.

    Attributes:
      layout: The layout.
      dtype: Dtype of parameters and loss; or the topology that the program was compiled for.
      refused: Reason for which the layout is not legal for this model, in the error's words; "" if it is.
      loss: Largest relative error of a step's loss against one device.
      gradient: Error of the worst gradient leaf of the first step, by `leaf_errors`.
      worst: Path of that leaf.
      steps: Error of the worst leaf of the state after the steps.
      worst_step: Path of that leaf.
      transfers: Found collectives by (kind, mesh axis): arrays and bytes a step.
      kinds: HLO's own names by mesh axes, with arrays a step.
      flops: Operations of a device's matrix products, over the most that are declared; 0 where they are not judged.
      held: Bytes of a device's arguments.
      temporaries: All other bytes of a device.
      precision: Precision of products: "full", or "default" where no values are compared.
      breaches: What does not hold, a sentence each.
      unjudged: What was not judged, a sentence each.
    """

    layout: Layout
    dtype: str
    refused: str = ""
    loss: float = 0.0
    gradient: float = 0.0
    worst: str = ""
    steps: float = 0.0
    worst_step: str = ""
    transfers: dict[tuple[str, str], tuple[int, int]] = dataclasses.field(default_factory=dict)
    kinds: dict[tuple[str, str], int] = dataclasses.field(default_factory=dict)
    flops: float = 0.0
    held: int = 0
    temporaries: int = 0
    precision: str = "full"
    breaches: list[str] = dataclasses.field(default_factory=list)
    unjudged: list[str] = dataclasses.field(default_factory=list)


def judge(
    row: LayoutReport,
    compiled: Compiled,
    text: str,
    mesh: Mesh,
    limits: Limits,
    temporaries: float | None = None,
) -> None:
    """Fills in what a program does on one device, and what of it is over or under the limits.

    Args:
      row: Report that is filled in.
      compiled: The program.
      text: Text of it that is judged: after all passes, or as partitioned.
      mesh: Its devices.
      limits: What it may do, and must.
      temporaries: Most bytes besides state and batch; None is not judged.
    """
    if not has_entry(text):
        # A program without text would show neither a collective nor a product, and break no limit.
        row.breaches.append("the compiler gave no text of the program, so that nothing was judged")
        return
    found = found_transfers(text, mesh)
    row.transfers = sum_by_axis(found)
    for transfer in found:
        key = (transfer.why.split()[0], "+".join(transfer.axes))
        row.kinds[key] = row.kinds.get(key, 0) + transfer.arrays
    row.breaches += breaches_of(found, limits.transfers, limits.allow)
    row.unjudged += limits.unjudged
    _judge_flops(row, text, limits)
    _judge_memory(row, compiled, limits, temporaries)


def _judge_flops(row: LayoutReport, text: str, limits: Limits) -> None:
    if limits.flops is None:
        row.unjudged.append("operations of a device")
        return
    flops = matmul_flops(text)
    row.flops = flops / limits.flops
    said = f"a device's products take {flops:,.0f} operations"
    if flops > limits.flops:
        row.breaches.append(f"{said}, where at most {limits.flops:,.0f} are its share")
    if flops < limits.least_flops:
        row.breaches.append(f"{said}, where at least {limits.least_flops:,.0f} are its share")


def _judge_memory(
    row: LayoutReport, compiled: Compiled, limits: Limits, temporaries: float | None
) -> None:
    memory = compiled.memory
    if memory is None:
        row.unjudged.append("memory, of which the compiler says nothing")
        return
    row.held = memory.argument_size_in_bytes
    row.temporaries = memory.temp_size_in_bytes
    if limits.held is not None and row.held > limits.held + _rounding(compiled):
        row.breaches.append(
            f"a device holds {row.held:,} bytes of state and batch, where {limits.held:,.0f} are its share"
        )
    if temporaries is not None and row.temporaries > temporaries:
        row.breaches.append(
            f"a device needs {row.temporaries:,} bytes beside state and batch, where at most "
            f"{temporaries:,.0f} are estimated"
        )


def _rounding(compiled: Compiled) -> int:
    """Bytes by which compilers for accelerators round arguments up, together."""
    if platform() == "cpu":
        return 0
    return 256 * len(jax.tree.leaves(compiled.run.in_avals))


def bytes_on_device(tree: PyTree, params: PyTree, param_axes: PyTree) -> int:
    """Returns the bytes of a device's share of a state, on the ambient mesh, from the parameters' axes alone.

    A leaf with a path that ends in a parameter's whole path and with its shape lies as the parameter
    does; the others are whole on every device.

    Args:
      tree: The state: parameters, moments, averages, counts.
      params: Pytree of the parameters.
      param_axes: Logical axes of each.
    """
    known = {}
    axes = jax.tree.leaves(param_axes, is_leaf=is_axes)
    for (path, leaf), names in zip(jax.tree_util.tree_leaves_with_path(params), axes, strict=True):
        over = [axis for entry in partition(names) for axis in _axes_of(entry)]
        sizes = [jax.sharding.get_mesh().shape[axis] for axis in over]
        known[jax.tree_util.keystr(path)] = (leaf.shape, math.prod(sizes))
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        ends = [jax.tree_util.keystr(path[start:]) for start in range(len(path))]
        owned = [known[end][1] for end in ends if end in known and known[end][0] == leaf.shape]
        shares = 1
        if owned:
            shares = owned[0]
        total += leaf.size * leaf.dtype.itemsize // shares
    return total


def _axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Mesh axes of one entry of a `PartitionSpec`."""
    if entry is None:
        return ()
    if isinstance(entry, tuple):
        return entry
    return (entry,)
