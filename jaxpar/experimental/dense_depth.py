"""A densely connected network whose layers are evaluated at once: depth as a causal system."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.solve.causal import CausalStats, Order, causal_fixed_point
from jaxpar.solve.fixed_point import Jacobi
from jaxpar.types import PRNGKey, PyTree

__all__ = ["DenseDepth"]


@dataclasses.dataclass(frozen=True)
class DenseDepth:
    """Layers that each read the input and all layers before: h_i = tanh(V_i x + sum_{j<i} W_ij h_j + b_i).

    This is the form of a DenseNet block (Huang et al. 2017, arXiv:1608.06993), whose depth Song et al. (2021,
    arXiv:2002.03629) solve by sweeps: one sweep is one matrix product for all layers. Both evaluations give the same
    values and derivatives. A sweep does the work of all L layers, so sweeps pay where the hardware has lanes to spare
    and few sweeps do.

    Attributes:
      input_dim: Width of x.
      num_layers: Layers L.
      width: Features of each layer.
    """

    input_dim: int = field(legal=AtLeast(1))
    num_layers: int = field(legal=AtLeast(1))
    width: int = field(legal=AtLeast(1))

    __post_init__ = check_fields

    def init(self, key: PRNGKey) -> PyTree:
        """Draws the weights, of variance 1 / inputs of the layer; consumes `key`."""
        num, width = self.num_layers, self.width
        input_key, between_key = jax.random.split(key)
        fan_in = self.input_dim + width * jnp.arange(num, dtype=jnp.float32)[:, None, None]
        between = (
            jax.random.normal(between_key, (num, num, width, width)) / jnp.sqrt(fan_in)[..., None]
        )
        return {
            "input": jax.random.normal(input_key, (num, self.input_dim, width)) / jnp.sqrt(fan_in),
            "between": between * jnp.tri(num, k=-1)[:, :, None, None],
            "bias": jnp.zeros((num, width)),
        }

    def sequential(self, params: PyTree, x: Float[Array, " input_dim"]) -> Float[Array, "L width"]:
        """Evaluates layer after layer, each once; returns all of them."""

        def layer(h, inputs):
            index, w, projections, bias = inputs
            new = jnp.tanh(projections + jnp.einsum("jab,ja->b", w, h) + bias)
            return h.at[index].set(new), None

        projections = jnp.einsum("a,iab->ib", x, params["input"])
        steps = (jnp.arange(self.num_layers), self._between(params), projections, params["bias"])
        return lax.scan(layer, jnp.zeros_like(projections), steps)[0]

    def parallel(
        self,
        params: PyTree,
        x: Float[Array, " input_dim"],
        *,
        method: Order = Jacobi(),  # noqa: B008 (frozen)
        tol: float = 0.0,
        with_stats: bool = False,
    ) -> Float[Array, "L width"] | tuple[Float[Array, "L width"], CausalStats]:
        """Evaluates all layers at once in sweeps of `method`; returns what `sequential` returns.

        `tol` and `with_stats` are those of `causal_fixed_point`.
        """
        between = self._between(params)
        projections = jnp.einsum("a,iab->ib", x, params["input"]) + params["bias"]

        def update(h):
            return jnp.tanh(projections + jnp.einsum("ijab,ja->ib", between, h))

        return causal_fixed_point(
            update, jnp.zeros_like(projections), method=method, tol=tol, with_stats=with_stats
        )

    def _between(self, params: PyTree) -> Array:
        """Returns the weights [to, from, in, out] without what training may have put into links that do not exist."""
        exists = jnp.tri(self.num_layers, k=-1, dtype=params["between"].dtype)
        return params["between"] * exists[:, :, None, None]
