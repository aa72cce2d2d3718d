"""Arrays from one mesh to another, without waiting for their content and without the host's memory."""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxpar.types import Device

__all__ = ["move"]


def move(x: jax.Array, target: Sharding) -> jax.Array:
    """Lays an array out as `target`, on whatever devices that is; returns before it has been computed.

    `jax.device_put` does that too, but waits for `x` and goes over the host unless source and target hold the same
    blocks. So blocks are copied from device to device as they are, and cut anew by a compiled program: among the new
    devices if they are as many as the old ones; else the whole array goes to each of them.

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
