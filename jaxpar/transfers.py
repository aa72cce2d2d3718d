"""Arrays between devices: what a layout declares that it sends in a step, and an array from one mesh to another."""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpar.mesh import in_role, is_axes, mesh_axes, num_shares
from jaxpar.types import Device, PyTree

__all__ = ["SMALL", "Transfer", "allowed_by_axes", "move", "sum_by_axis"]

SMALL = 64
"""Bytes of an array up to which it is not judged: counts, norms and means, alone or joined by a compiler."""


class Transfer(NamedTuple):
    """Arrays that cross devices in one step; scalars and arrays of at most `SMALL` bytes are left out.

    Attributes:
      kind: "gather" (all-gather), "sum" (all-reduce, or the reduce-scatter that a compiler makes of
        one and a slice), or "exchange" (all-to-all and permutations).
      axes: Mesh axes that it spans.
      arrays: Number of arrays; arrays of loops count each time.
      bytes: Bytes of the whole arrays on one device, together.
      why: Purpose; of found ones, the instruction.
      least: Share of the arrays and bytes that a program must have. It is 1 for a weight that a layer
        gathers whenever it is computed: a program without that gather holds the weight whole.
      sizes: Numbers of entries of its arrays; of declared ones, those that they may have, () for any.
    """

    kind: str
    axes: tuple[str, ...]
    arrays: int
    bytes: int
    why: str
    least: float = 0.0
    sizes: tuple[int, ...] = ()

    def times(self, count: int, least: float | None = None) -> "Transfer":
        """Returns the transfer of `count` microbatches; at least the share `least` must be found."""
        if least is None:
            least = self.least
        return self._replace(arrays=count * self.arrays, bytes=count * self.bytes, least=least)


def sum_by_axis(transfers: Iterable[Transfer]) -> dict[tuple[str, str], tuple[int, int]]:
    """Sums transfers by (kind, mesh axis): arrays and bytes.

    One sum over two axes counts the same as two sums after each other.
    """
    out: dict[tuple[str, str], tuple[int, int]] = collections.defaultdict(lambda: (0, 0))
    for transfer in transfers:
        for axis in transfer.axes:
            arrays, size = out[transfer.kind, axis]
            out[transfer.kind, axis] = (arrays + transfer.arrays, size + transfer.bytes)
    return dict(out)


def allowed_by_axes(params: PyTree, axes: PyTree, batch_axes: PyTree) -> list[Transfer]:
    """Returns what a model that declares nothing may send on the ambient mesh, derived from its axes.

    Each parameter is gathered at most twice a step, whole or a layer of its stack at a time, over the
    axes that split it at rest and not where it is multiplied. Activations are never gathered. Any
    number of sums is legal: gradients over the axes of the batch, and activations over axes that split
    parameters where they are multiplied. Exchanges carry at most two copies of the
    parameters that an axis splits: GSPMD puts the gradient of a look-up where it likes and sends it on.

    Args:
      params: Pytree of arrays or their shapes.
      axes: Logical axes of each.
      batch_axes: Logical axes of the arrays of a batch.
    """
    flat_axes = jax.tree.leaves(axes, is_leaf=is_axes)
    batch = _over_all(jax.tree.leaves(batch_axes, is_leaf=is_axes))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    out = []
    inside: set[str] = set()
    for (path, leaf), names in zip(leaves, flat_axes, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        at_rest = _over_all([names])
        multiplied = _over_all([in_role(names, "use")])
        inside.update(multiplied)
        # A stack of layers may be gathered a layer at a time.
        pieces = 1
        if len(leaf.shape) > 2:
            pieces = leaf.shape[0]
        size = leaf.size * leaf.dtype.itemsize // num_shares(*multiplied)
        # Vectors may be gathered wherever they are split: biases and scales cost nothing.
        kept = ()
        if len(leaf.shape) > 1:
            kept = multiplied
        gathered = tuple(axis for axis in at_rest if axis not in kept)
        entries = leaf.size // num_shares(*kept)
        if gathered:
            size = entries * leaf.dtype.itemsize
            sizes = _sizes_on_the_way(entries, gathered, pieces)
            out.append(
                Transfer("gather", gathered, 2 * pieces, 2 * size, f"{name}, twice", sizes=sizes)
            )
        for axis in at_rest:
            out.append(Transfer("exchange", (axis,), _ANY, 2 * size, f"gradient of {name}"))
    for axis in sorted(inside | set(batch)):
        out.append(Transfer("sum", (axis,), _ANY, _ANY, "gradients, and activations in parts"))
    return out


def _sizes_on_the_way(entries: int, axes: tuple[str, ...], pieces: int) -> tuple[int, ...]:
    """Entries of a parameter as it is gathered over some of the axes that split it, or over all, whole or a layer."""
    found = set()
    for count in range(len(axes)):
        for left in itertools.combinations(axes, count):
            found |= {entries // num_shares(*left), entries // num_shares(*left) // pieces}
    return tuple(sorted(found))


_ANY = 10**15


def _over_all(leaves: Sequence[tuple[str | None, ...]]) -> tuple[str, ...]:
    """Mesh axes that split any of these arrays, each once."""
    names = dict.fromkeys(name for leaf in leaves for name in leaf if name)
    return tuple(dict.fromkeys(axis for name in names for axis in mesh_axes(name)))


def move(x: jax.Array, target: Sharding) -> jax.Array:
    """Lays an array out as `target`, on whatever devices that is; returns before it has been computed.

    `jax.device_put` does that too, but waits for `x` and goes over the host unless source and target
    hold the same blocks. So blocks are copied from device to device as they are, and a compiled
    program splits them again: among the new devices if their number is that of the old ones.
    Otherwise the whole array goes to each of them.

    Args:
      x: A global `jax.Array`, or what `jax.device_put` takes from the host.
      target: A `NamedSharding`, or the sharding that `x` has.
    """
    if not isinstance(x, jax.Array) or not x.committed:
        return jax.device_put(x, target)
    source = x.sharding
    if source == target:
        return x
    if not isinstance(target, NamedSharding):
        raise ValueError(f"the target must be a NamedSharding, not {target}")
    if _devices(source) != _devices(target):
        mesh: Any = target.mesh
        if isinstance(source, NamedSharding) and source.mesh.size == mesh.size:
            there = Mesh(mesh.devices.reshape(source.mesh.axis_sizes), source.mesh.axis_names)
            x = jax.device_put(x, NamedSharding(there, source.spec))
        else:
            if isinstance(source, NamedSharding):
                x = _resharder(NamedSharding(source.mesh, PartitionSpec()))(x)
            x = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    return x if x.sharding == target else _resharder(target)(x)


def _devices(sharding: Sharding) -> tuple[Device, ...]:
    """Returns the devices in the order in which programs count them."""
    if isinstance(sharding, NamedSharding):
        return tuple(cast(Mesh, sharding.mesh).devices.flat)
    return tuple(sharding.device_set)


@functools.lru_cache(maxsize=1024)
def _resharder(target: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    program, mesh = jax.jit(_same, out_shardings=target), target.mesh
    assert isinstance(mesh, Mesh)

    def reshard(x: jax.Array) -> jax.Array:
        with jax.set_mesh(mesh):  # whatever mesh is ambient here has nothing to do with it
            return program(x)

    return reshard


def _same(x: jax.Array) -> jax.Array:
    return x
