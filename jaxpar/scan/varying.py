"""Types of arrays inside `jax.shard_map`: over which mesh axes their values vary."""

from typing import Any

import jax

__all__ = ["varying_as", "varying_axes", "varying_over"]


def varying_as(tree: Any, like: Any) -> Any:
    """Returns `tree`, typed inside `jax.shard_map` as varying over every mesh axis that anything in `like` varies over.

    What a loop carries must enter it with the type with which it leaves.
    """
    return varying_over(tree, frozenset().union(*map(varying_axes, jax.tree.leaves(like))))


def varying_over(tree: Any, axes: frozenset[str]) -> Any:
    """Returns `tree`, typed as varying over `axes` at least."""

    def cast(leaf):
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def varying_axes(leaf: Any) -> frozenset[str]:
    """Returns the mesh axes that an array varies over by its type."""
    return jax.typeof(leaf).manual_axis_type.varying
