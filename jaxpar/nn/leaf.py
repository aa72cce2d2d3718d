"""Declarations of parameters: a leaf says shape, logical axes and initialiser once, and all else follows from it."""

import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.types import PRNGKey, PyTree

__all__ = ["Leaf", "leaf_axes", "init_leaves"]

CONSTANTS = {"ones": 1.0, "zeros": 0.0}
GATES = {"keep": 1.0, "renew": -1.0}
RATES = ("rate", "log_rate", "log_count")
LASTS = (
    2.0,
    100.0,
)  # steps after which a state kept with s(b) = 1 - 1 / steps is down to about a third


class Leaf(NamedTuple):
    """One parameter: its shape, one logical axis name a dimension, and its initialiser.

    Attributes:
      shape: Static shape.
      axes: Logical names, as in `jaxpar.mesh.RULES`, or None.
      init: "ones", "zeros", the standard deviation of a normal distribution, or of gates: "keep" for the bias b of one
        that keeps a share s(b) of the state, "renew" for that of one that replaces it. The units' states then last from
        2 to 100 steps, evenly in their logarithm (chrono initialisation, arXiv:1804.11188, without its randomness). Of
      rates along the last axis: "rate", whose softplus goes from 0.001 to 0.1, and "log_rate", whose exponential goes
      from 0.002 to 1, evenly in their logarithms; "log_count", whose exponential goes from 1 to 16 (arXiv:2405.21060).
      raw: Whether anything but `jaxpar.nn.linear.contract` reads it, so that no `Weight` can stand in its place.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    init: str | float
    raw: bool = False

    @property
    def is_product(self) -> bool:
        """Whether it is a weight between the residual stream and a branch, which `contract` alone reads."""
        return "embed" in self.axes and not isinstance(self.init, str) and not self.raw


def leaf_axes(leaves: PyTree) -> PyTree:
    """Returns the logical axes of each parameter that a tree of `Leaf` declares."""
    return jax.tree.map(lambda leaf: leaf.axes, leaves, is_leaf=lambda x: isinstance(x, Leaf))


def init_leaves(key: PRNGKey, leaves: PyTree, dtype=jnp.float32) -> PyTree:
    """Draws the parameters that a tree of `Leaf` declares, in `dtype`; the same values on any mesh.

    Each leaf's key is `key` folded with the leaf's path, so adding a parameter changes no other. Consumes `key`.
    """

    def one(path, leaf: Leaf):
        if leaf.init in CONSTANTS:
            return jnp.full(leaf.shape, CONSTANTS[leaf.init], dtype)
        if leaf.init in GATES:
            keep = jnp.log(jnp.geomspace(*LASTS, leaf.shape[-1], dtype=dtype) - 1)
            return jnp.broadcast_to(GATES[leaf.init] * keep, leaf.shape)
        if leaf.init in RATES:
            return jnp.broadcast_to(_rates(leaf.init, leaf.shape[-1], dtype), leaf.shape)
        name = jax.tree_util.keystr(path)
        return leaf.init * jax.random.normal(
            jax.random.fold_in(key, zlib.crc32(name.encode())), leaf.shape, dtype
        )

    return jax.tree_util.tree_map_with_path(
        one, leaves, is_leaf=lambda leaf: isinstance(leaf, Leaf)
    )


def _rates(init: str, size: int, dtype) -> jax.Array:
    if init == "rate":
        return jnp.log(jnp.expm1(jnp.geomspace(1e-3, 0.1, size, dtype=dtype)))
    if init == "log_rate":
        return jnp.log(jnp.geomspace(2e-3, 1.0, size, dtype=dtype))
    return jnp.log(jnp.linspace(1.0, 16.0, size, dtype=dtype))
