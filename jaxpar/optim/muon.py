"""Muon on a sharded mesh: each matrix is orthogonalised whole, on one device."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from jaxpar.mesh import local, mesh_axes
from jaxpar.types import PyTree

__all__ = ["MomentumState", "orthogonalise", "scale_by_whole_muon"]


class MomentumState(NamedTuple):
    """Steps made, and the running mean of the gradients."""

    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]  # a field: tuple.count is not used
    mean: PyTree


def scale_by_whole_muon(
    axes: PyTree, sides: PyTree, beta: float, eps: float
) -> optax.GradientTransformation:
    """Returns Muon's update (Nesterov momentum, orthogonalised) of stacks of matrices, each on one device as a whole.

    The momentum lies as its parameter does. For Newton-Schulz the devices that share a stack of matrices trade shares:
    one all-to-all a split dimension gives each some whole matrices, and one brings their updates back. GSPMD
    would split the iteration's products instead, with a collective for each. Layers that do not divide over the
    devices are filled up with zeros, which cost an idle device's time.

    Values are those of `optax.contrib.muon` (its `scale_by_muon` with default coefficients, and `consistent_rms=0.2`:
    arXiv:2502.16982, eq. 4).

    Args:
      axes: Logical axes of each parameter; the first dimension counts the matrices of a stack.
      sides: For each parameter the dimensions that are a matrix's rows and those that are its columns, in this order;
        None where another optimizer works (`optax.partition` masks those).
      beta: Decay of the momentum.
      eps: Added to a matrix's norm.
    """

    def init(params):
        return MomentumState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates, state, params=None):
        del params
        count = state.count + 1
        mean = optax.tree.update_moment(updates, state.mean, beta, 1)
        now = optax.tree.bias_correction(updates, beta, count)
        later = optax.tree.bias_correction(mean, beta, count + 1)
        ahead = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, later, now)

        def orthogonal(x, names, sides):
            if isinstance(x, optax.MaskedNode):  # Adam's
                return x
            rows, columns = (math.prod(x.shape[dim] for dim in dims) for dims in sides)

            def on_whole(x):
                return orthogonalise(x.reshape(-1, rows, columns), eps).reshape(x.shape)

            return 0.2 * math.sqrt(max(rows, columns)) * _on_whole_matrices(on_whole, x, names)

        updates = jax.tree.map(
            orthogonal, ahead, axes, sides, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
        )
        return updates, MomentumState(count, mean)

    return optax.GradientTransformation(init, update)


NEWTON_SCHULZ = (
    3.4445,
    -4.7750,
    2.0315,
)  # coefficients of Muon's author: steepest at zero, five iterations


def orthogonalise(x: Float[Array, "L m n"], eps: float) -> Float[Array, "L m n"]:
    """Brings the singular values of each matrix near 1 by five quintic Newton-Schulz iterations, from its unit norm.

    X <- a X + b (X X^T) X + c (X X^T)^2 X. Cost: 5 (4 m^2 n + 2 m^3) operations a matrix, m the smaller side.
    """
    if x.shape[1] > x.shape[2]:
        return orthogonalise(x.swapaxes(1, 2), eps).swapaxes(1, 2)
    a, b, c = NEWTON_SCHULZ
    x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + eps)
    for _ in range(5):
        square = x @ x.swapaxes(1, 2)
        x = a * x + (b * square + c * square @ square) @ x
    return x


def _on_whole_matrices(fn, x: jax.Array, axes: tuple) -> jax.Array:
    """Applies `fn` to a stack [L, ...] whose dimensions may be split: each device gets some of the L, whole.

    Where the L are split themselves, as over the stages of a pipeline, each share stays with those that have it.
    """
    split = [
        (dim, mesh_axes(name)) for dim, name in enumerate(axes) if dim and name and mesh_axes(name)
    ]
    if not split:
        return local(fn, [axes], axes, check=False)(x)
    devices = math.prod(
        jax.sharding.get_abstract_mesh().shape[axis] for _, over in split for axis in over
    )

    def on_device(x):
        layers = x.shape[0]
        x = jnp.pad(x, [(0, -layers % devices)] + [(0, 0)] * (x.ndim - 1))
        for dim, over in split:
            x = jax.lax.all_to_all(x, over, split_axis=0, concat_axis=dim, tiled=True)
        x = fn(x)
        for dim, over in reversed(split):
            x = jax.lax.all_to_all(x, over, split_axis=dim, concat_axis=0, tiled=True)
        return x[:layers]

    return local(on_device, [axes], axes, check=False)(x)
