"""What bringing a state from one layout into another sends, by `jaxpar.aot.placement`."""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from jaxpar import aot
from jaxpar.aot.placement import Split, conversion
from jaxpar.types import UsageError
from jaxpar.verify import Layout


def moves(job: aot.Job, source: Layout, rules: Mapping[str, tuple[str, ...]]) -> dict[str, float]:
    """Returns what brings a job's state from another layout of its devices with the fewest bytes, leaf by leaf.

    The state is parameters and optimizer; devices are numbered alike in both meshes.

    Args:
      job: The step, in its own layout.
      source: Where the state comes from.
      rules: Of the source.

    Returns:
      Kind of collective -> bytes that each device sends; without local steps.

    Raises:
      UsageError: The meshes need different devices, or cut them so that neither's axes are made of the other's.
    """
    shape = source.mesh.sizes(job.mesh.size)
    mesh = Mesh(job.mesh.devices.reshape(tuple(shape.values())), tuple(shape))
    before = dataclasses.replace(job, mesh=mesh, rules=rules)
    sizes, parts = _common_axes(before.mesh.shape, job.mesh.shape)
    sent: collections.Counter[str] = collections.Counter()
    known = {}
    rows = zip(aot.placements(before), aot.placements(job), jax.tree.leaves(job.args), strict=True)
    for old, new, leaf in rows:
        if new.group == "other":
            continue
        key = (old.spec, new.spec, leaf.shape, leaf.dtype)
        if key not in known:
            start, end = (
                _placement(row.spec, where) for row, where in zip((old, new), parts, strict=True)
            )
            known[key] = conversion(start, end, leaf.shape, leaf.dtype, sizes)
        for step in known[key]:
            sent[step.kind] += step.bytes
    return {kind: size for kind, size in sent.most_common() if size}


def _placement(spec: tuple, parts: Mapping[str, tuple[str, ...]]) -> dict[str, Split]:
    """The placement over common axes of an array whose dimensions lie over the mesh axes of `spec`."""
    found = {}
    for dim, entry in enumerate(spec):
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            found |= {part: Split(dim) for part in parts[axis]}
    return found


def _common_axes(
    *meshes: Mapping[str, int],
) -> tuple[dict[str, int], list[dict[str, tuple[str, ...]]]]:
    """Cuts the axes of meshes over the same devices at each other's ends.

    Returns the sizes of the pieces, the outermost first, and for each mesh the pieces of its axes.
    """
    ends = [[1, *itertools.accumulate(mesh.values(), operator.mul)] for mesh in meshes]
    pieces = {}
    for start, stop in itertools.pairwise(sorted(set(itertools.chain(*ends)))):
        if stop % start:
            texts = (
                " ".join(f"{axis}={size}" for axis, size in mesh.items() if size > 1)
                for mesh in meshes
            )
            raise UsageError(
                f"meshes {' and '.join(texts)} have no common axes; legal are sizes that divide each other, in order."
            )
        pieces[f"{start} to {stop}"] = start, stop
    sizes = {name: stop // start for name, (start, stop) in pieces.items()}
    return sizes, [
        {
            axis: tuple(
                name for name, (start, stop) in pieces.items() if first <= start and stop <= last
            )
            for axis, (first, last) in zip(mesh, itertools.pairwise(end), strict=True)
        }
        for mesh, end in zip(meshes, ends, strict=True)
    ]
