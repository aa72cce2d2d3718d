"""What is estimated: a step, its abstract arguments and their logical axes, on a mesh whose devices may not exist."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh

from jaxpar.mesh import RULES, named_shardings, use_mesh
from jaxpar.types import PyTree

__all__ = ["Job", "Placement", "group_of", "placements"]


def group_of(path: str) -> str:
    """Returns the part of the memory account that an argument belongs to, by its dotted path."""
    if "opt_state" in path:
        return "optimizer"
    return "parameters" if {"params", "base", "adapters"} & set(path.split(".")) else "other"


@dataclasses.dataclass(frozen=True)
class Job:
    """Any step function, and all that estimating it needs.

    Attributes:
      step: Pure; traced, never run.
      args: Its arguments, abstract or real.
      axes: Their logical axes: the same structure with a tuple of names a leaf.
      mesh: Of devices that exist, or of compile-only ones (`jaxpar.aot.devices`).
      out_axes: Logical axes of its results; None (of all, or of a part) leaves the layout to the compiler.
      rules: The table; by default `jaxpar.mesh.RULES`.
      donate: Numbers of the arguments whose memory the results take over.
      loss: Function of parameters that the step differentiates, if the bytes saved for its backward pass are wanted.
      params: Its abstract arguments.
      model_flops: Operations that the model needs a step, for model FLOP utilisation; 0 takes the counted ones.
      options: The compiler's, as the run will set them.
      group: Dotted path of an argument -> "parameters", "optimizer" or "other".
    """

    step: Callable
    args: tuple
    axes: tuple
    mesh: Mesh
    out_axes: PyTree = None
    rules: Mapping[str, tuple[str, ...]] | None = None
    donate: tuple[int, ...] = ()
    loss: Callable | None = None
    params: PyTree = None
    model_flops: float = 0.0
    options: Mapping[str, Any] | None = None
    group: Callable[[str], str] = group_of

    def ambient(self):
        """Returns the context in which the step is traced and laid out."""
        return use_mesh(self.mesh, self.rules)

    def shardings(self) -> tuple:
        """Returns the sharding of every argument; raises `UsageError` where one cannot be laid out."""
        with self.ambient():
            return named_shardings(self.args, self.axes)

    def trace(self) -> Jaxpr:
        """Returns the step's jaxpr."""
        with self.ambient():
            return jax.make_jaxpr(self.step)(*self.args).jaxpr


class Placement(NamedTuple):
    """How one argument lies: a row of `show`.

    Attributes:
      path: Dotted.
      group: "parameters", "optimizer" or "other".
      shape: Of the whole array.
      spec: Mesh axes a dimension.
      bytes: On one device.
      rule: The logical axes that are split, with the row of the table that splits each.
    """

    path: str
    group: str
    shape: tuple[int, ...]
    spec: tuple
    bytes: int
    rule: str


def placements(job: Job) -> list[Placement]:
    """Returns how every argument lies, and why."""
    rows = []
    table = RULES if job.rules is None else job.rules
    flat_axes = jax.tree.structure(job.args).flatten_up_to(job.axes)
    shardings = jax.tree.leaves(job.shardings())
    leaves = jax.tree_util.tree_leaves_with_path(job.args)
    for (path, leaf), axes, sharding in zip(leaves, flat_axes, shardings, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        held = math.prod(sharding.shard_shape(leaf.shape)) * _itemsize(leaf)
        spec = (*sharding.spec, *(None,) * (len(leaf.shape) - len(sharding.spec)))
        used = {
            logical: entry for logical, entry in zip(axes, spec, strict=True) if entry is not None
        }
        rule = (
            "; ".join(f"{logical} -> {'+'.join(table[logical])}" for logical in used)
            or "no rule splits it"
        )
        rows.append(Placement(name, job.group(name), tuple(leaf.shape), spec, held, rule))
    return rows


def _itemsize(leaf: jax.Array | jax.ShapeDtypeStruct) -> int:
    """Bytes of an entry; of a typed key those of its words."""
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 8
    return leaf.dtype.itemsize
