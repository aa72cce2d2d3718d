"""Default mesh of a language model: sizes that divide its weights."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax

from jaxpar.lm import Leaf, LMConfig, leaves
from jaxpar.mesh import RULES, MeshSpec, mesh_axes
from jaxpar.types import UsageError

SMALLER = (
    MeshSpec(data=2, fsdp=4),
    MeshSpec(data=4, fsdp=2),
    MeshSpec(data=8),
    MeshSpec(data=2, fsdp=2),
    MeshSpec(data=4),
    MeshSpec(fsdp=2),
    MeshSpec(data=2),
)
"""Meshes that are tried after the usual one; none splits heads."""


def fitting_mesh(
    usual: MeshSpec, model: LMConfig, rules: Mapping[str, tuple[str, ...]], rows: int
) -> MeshSpec:
    """Returns the usual mesh where it divides all of a model's weights, else the first that does.

    Args:
      usual: Mesh that is taken first; rows that it does not divide are refused later, by their
        flag.
      model: The transformer.
      rules: Logical axis -> mesh axes.
      rows: Rows of a batch, which another mesh than the usual one divides too.
    """
    if next(_undivided(model, rules, _sizes(usual)), None) is None:
        return usual
    for spec in SMALLER:
        sizes = _sizes(spec)
        shares = math.prod(sizes[axis] for axis in rules["batch"])
        if rows % shares == 0 and next(_undivided(model, rules, sizes), None) is None:
            return spec
    return MeshSpec()


def check_divides(model: LMConfig) -> None:
    """Refuses a mesh that does not divide a model's weights, by the flag that gave its size.

    Raises:
      UsageError: An axis of the ambient mesh does not divide a weight.
    """
    sizes = dict(jax.sharding.get_abstract_mesh().shape)
    rules = {name: mesh_axes(name) for name in RULES}
    for name, axis, size, over in _undivided(model, rules, sizes):
        shares = math.prod(sizes[part] for part in over)
        flags = {"inner": "fsdp"}
        names = dict.fromkeys(flags.get(part, part) for part in over)
        whole = {part: sizes[part] for part in names}
        if "fsdp" in whole:
            whole["fsdp"] *= sizes["inner"]
        given = " ".join(f"mesh.{part}={count}" for part, count in whole.items())
        legal = ", ".join(str(n) for n in range(1, shares) if size % n == 0)
        raise UsageError(
            f"{given}: {axis} of size {size} of {name} does not divide over {shares} devices; "
            f"expected {' x '.join(f'mesh.{part}' for part in names)} of {legal}."
        )


def _sizes(spec: MeshSpec) -> dict[str, int]:
    return spec.sizes(math.prod(dataclasses.astuple(spec)))


def _undivided(
    model: LMConfig, rules: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int]
) -> Iterator[tuple[str, str, int, tuple[str, ...]]]:
    """Yields name, logical axis, size and mesh axes of what does not divide; by numbers alone.

    No device is touched, since their number may still be open.
    """
    flat = jax.tree_util.tree_leaves_with_path(
        leaves(model), is_leaf=lambda leaf: isinstance(leaf, Leaf)
    )
    for path, leaf in flat:
        for axis, size in zip(leaf.axes, leaf.shape, strict=True):
            if axis is None:
                continue
            over = tuple(part for part in rules[axis] if sizes[part] > 1)
            if size % math.prod(sizes[part] for part in over):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                yield name, str(axis), size, over
