"""One array stacked over layers, or an array a layer: the same state under two namings."""

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

__all__ = ["LeafSource", "match_layers"]

Specs = Mapping[str, tuple[str, tuple[int, ...]]]
"""path -> (dtype, shape)."""


@dataclasses.dataclass(frozen=True)
class LeafSource:
    """Where a wanted leaf comes from.

    Attributes:
      paths: The saved leaves: one, or one a layer to be stacked.
      layer: Which layer of the one saved leaf, None for all of it.
    """

    paths: tuple[str, ...]
    layer: int | None = None


def match_layers(saved: Specs, wanted: Specs) -> dict[str, LeafSource]:
    """Returns where each wanted leaf comes from; leaves out those that come from nowhere.

    A path that both have is itself. Otherwise `a/b [L, ...]` is the stack of `a/0/b` ... `a/<L-1>/b`, each `[...]`,
    wherever the number stands in the path and in either direction. The paths of optimizer moments end in those of
    their parameters, so the rule moves them along. Shapes and dtypes must agree, and all L layers must be there.
    """
    sources = {path: LeafSource((path,)) for path in wanted if saved.get(path) == wanted[path]}
    for path, leaf in wanted.items():
        if path not in saved:
            stacks = [
                LeafSource(layers)
                for layers in _layers(path, leaf)
                if _are_layers(layers, leaf, saved)
            ]
            cuts = [
                LeafSource((stack,), layer)
                for stack, layer in _stacks(path)
                if stack in saved
                and any(path in layers and _are_layers(layers, saved[stack], wanted)
                        for layers in _layers(stack, saved[stack]))
            ]  # fmt: skip
            if len(stacks + cuts) == 1:
                sources[path] = (stacks + cuts)[0]
    return sources


def saved_form(
    saved: Specs, sources: Mapping[str, LeafSource], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the saved leaves to read, on the shardings that the wanted ones imply."""
    read = {}
    for path, source in sources.items():
        leaf = wanted[path]
        for name in source.paths:
            sharding = leaf.sharding
            if len(source.paths) > 1 or saved[name][1] != leaf.shape:
                sharding = _shift(sharding, 1 if source.layer is not None else -1)
            read[name] = jax.ShapeDtypeStruct(saved[name][1], leaf.dtype, sharding=sharding)
    return read


def assemble(
    read: dict[str, jax.Array],
    sources: Mapping[str, LeafSource],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
) -> dict[str, jax.Array]:
    """Stacks and cuts what was read; takes it out of `read`, so that each leaf is there twice only for a moment."""
    done, cuts = {}, {}
    for path, source in sources.items():
        if source.layer is not None:
            cuts.setdefault(source.paths[0], []).append((source.layer, path))
        elif read[source.paths[0]].shape == wanted[path].shape:
            done[path] = read.pop(source.paths[0])
        else:
            stack = jax.jit(lambda *layers: jnp.stack(layers), out_shardings=wanted[path].sharding)
            done[path] = stack(*(read.pop(name) for name in source.paths))
    for name, parts in cuts.items():
        cut = jax.jit(
            lambda x, parts=parts: [x[layer] for layer, _ in parts],
            out_shardings=[wanted[path].sharding for _, path in parts],
        )
        done |= dict(zip([path for _, path in parts], cut(read.pop(name)), strict=True))
    return done


def _stacks(path: str) -> Iterator[tuple[str, int]]:
    """Yields each (path, layer) whose stack could hold `path`."""
    parts = path.split("/")
    for place, part in enumerate(parts):
        if part.isdigit():
            yield "/".join(parts[:place] + parts[place + 1 :]), int(part)


def _layers(path: str, leaf: tuple[str, tuple[int, ...]]) -> Iterator[tuple[str, ...]]:
    """Yields each list of paths, one a layer, that `path` could be the stack of."""
    parts, shape = path.split("/"), leaf[1]
    for place in range(len(parts) + 1) if shape else ():
        before, after = parts[:place], parts[place:]
        yield tuple("/".join([*before, str(layer), *after]) for layer in range(shape[0]))


def _are_layers(paths: tuple[str, ...], stack: tuple[str, tuple[int, ...]], layout: Specs) -> bool:
    dtype, shape = stack
    return math.prod(shape[:1]) > 0 and all(
        layout.get(path) == (dtype, shape[1:]) for path in paths
    )


def _shift(sharding: Sharding | None, by: int) -> Sharding | None:
    """Returns the sharding of an array with one more leading axis, whole, or one fewer."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = (None, *sharding.spec) if by > 0 else sharding.spec[1:]
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)
