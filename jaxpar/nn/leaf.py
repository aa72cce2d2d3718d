"""Declarations of parameters: a leaf says shape, logical axes and initialiser once, and all else follows from it."""

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.types import PRNGKey, PyTree

__all__ = ["Leaf", "draw"]


class Leaf(NamedTuple):
    """One parameter: its shape, one logical axis name a dimension, and its initialiser.

    Attributes:
      shape: Static shape.
      axes: Logical names, as in `jaxpar.mesh.RULES`, or None.
      init: "ones", "zeros", or the standard deviation of a normal distribution.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str | float


def draw(key: PRNGKey, leaves: PyTree, dtype=jnp.float32) -> PyTree:
    """Draws the parameters that a tree of `Leaf` declares, in `dtype`; the same values on any mesh.

    Each leaf's key is `key` folded with the leaf's path, so adding a parameter changes no other. Consumes `key`.
    """

    def one(path, leaf: Leaf):
        if isinstance(leaf.init, str):
            return jnp.full(leaf.shape, float(leaf.init == "ones"), dtype)
        name = jax.tree_util.keystr(path)
        return leaf.init * jax.random.normal(jax.random.fold_in(key, zlib.crc32(name.encode())), leaf.shape, dtype)

    return jax.tree_util.tree_map_with_path(one, leaves, is_leaf=lambda leaf: isinstance(leaf, Leaf))
