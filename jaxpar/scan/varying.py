"""What arrays are to a transformation: over which mesh axes they vary inside `jax.shard_map`, and which move."""

from typing import TypeVar

import jax
import jax.numpy as jnp

from jaxpar.types import PyTree

Tree = TypeVar("Tree")

__all__ = ["moving_with", "varying_as", "varying_axes", "varying_over"]


def varying_as(tree: Tree, like: PyTree) -> Tree:
    """Returns `tree`, typed inside `jax.shard_map` as varying over every mesh axis that anything in `like` varies over.

    What a loop carries must enter it with the type with which it leaves.
    """
    return varying_over(tree, frozenset().union(*map(varying_axes, jax.tree.leaves(like))))


def varying_over(tree: Tree, axes: frozenset[str]) -> Tree:
    """Returns `tree`, typed as varying over `axes` at least."""

    def cast(leaf):
        missing = tuple(sorted(axes - varying_axes(leaf)))
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


def varying_axes(leaf: jax.Array) -> frozenset[str]:
    """Returns the mesh axes that an array varies over by its type."""
    return jax.typeof(leaf).manual_axis_type.varying


def moving_with(tree, others):
    """Returns `tree` with a tangent wherever `others` have one: `custom_linear_solve` transposes all sides or none."""
    for x in (leaf for leaf in jax.tree.leaves(others) if leaf.size):
        tree = jax.tree.map(
            lambda y, x=x: jnp.where(True, y, x.reshape(-1)[0].astype(y.dtype)), tree
        )
    return tree
