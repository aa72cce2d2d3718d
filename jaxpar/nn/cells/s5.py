"""A diagonal state space: linear memories that ring at their own pace, over a whole sequence by one scan."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.nn.cells.cell import along
from jaxpar.nn.leaf import Leaf, init_leaves
from jaxpar.scan import affine_scan
from jaxpar.types import PRNGKey, PyTree

__all__ = ["S5"]

STEPS = (0.001, 0.1)
"""Time steps at the start, evenly in their logarithm: the slowest unit remembers some 2,000 steps, the fastest 20."""


@dataclasses.dataclass(frozen=True)
class S5:
    """A diagonal state-space layer (Smith et al. 2023, arXiv:2208.04933); resets as Lu et al. 2023, arXiv:2303.03982.

        h'[i] = exp(s[i] l[i]) h[i] + (exp(s[i] l[i]) - 1) / l[i] (x B)[i]    y = 2 Re(h C)

    with complex l[i] = -exp(d[i]) + i w[i], at the start -1/2 + i pi i (Gu et al. 2022, arXiv:2206.11893, S4D-Lin) and
    steps s. Affine in h with a diagonal transition that no input changes: one `affine_scan` over time. There is no
    direct path from x to y. A cell as `jaxpar.nn.cells.cell.SequenceCell` describes; its state is (real part, imaginary
    part), each `[B, n]`.

    Attributes:
      size: n, states and outputs.
    """

    size: int = field(legal=AtLeast(1))
    jacobian, lanes = "auto", 2

    __post_init__ = check_fields

    def leaves(self, input_dim: int) -> dict[str, Leaf]:
        """Declares br, bi [D, n], cr, ci [n, n]; the poles and steps start as `init` says."""
        vector = Leaf(shape=(self.size,), axes=("mlp",), init="zeros")
        into = Leaf(
            shape=(input_dim, self.size), axes=("embed", "mlp"), init=1 / math.sqrt(input_dim)
        )
        out = Leaf(shape=(self.size, self.size), axes=("mlp", None), init=1 / math.sqrt(self.size))
        vectors = {"decay": vector, "angle": vector, "step": vector}
        return vectors | {"br": into, "bi": into, "cr": out, "ci": out}

    def init(
        self, key: PRNGKey, input_dim: int, dtype: DTypeLike = jnp.float32
    ) -> dict[str, jax.Array]:
        """Draws the parameters, all in logarithms but the angles. Consumes `key`."""
        params = init_leaves(key, self.leaves(input_dim), dtype)
        params["decay"] = jnp.full(self.size, math.log(0.5), dtype)
        params["angle"] = jnp.pi * jnp.arange(self.size, dtype=dtype)
        params["step"] = jnp.linspace(
            math.log(STEPS[1]), math.log(STEPS[0]), self.size, dtype=dtype
        )
        return params

    def input_projections(
        self, params: PyTree, xs: Float[Array, "*L D"]
    ) -> tuple[jax.Array, jax.Array]:
        """Computes what the inputs add to the states: real and imaginary parts."""
        keep, pole = self._transition(params)
        added = jax.lax.complex(xs @ params["br"], xs @ params["bi"]) * along((keep - 1) / pole, xs)
        return added.real, added.imag

    def initial(
        self, batch_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32
    ) -> tuple[jax.Array, jax.Array]:
        """Returns zeros."""
        lane = jnp.zeros((*batch_shape, self.size), dtype)
        return lane, lane

    def step(self, params: PyTree, h: tuple, projections: tuple) -> tuple[jax.Array, jax.Array]:
        """Returns the next state."""
        new = along(self._transition(params)[0], h[0]) * jax.lax.complex(*h) + jax.lax.complex(
            *projections
        )
        return new.real, new.imag

    def output(self, params: PyTree, h: tuple) -> Float[Array, "*L n"]:
        """Returns 2 Re(h C)."""
        return 2 * (h[0] @ params["cr"] - h[1] @ params["ci"])

    def closed_form(
        self,
        params: PyTree,
        projections: tuple,
        h0: tuple,
        resets: Bool[Array, "T B"] | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns all states by one scan: O(T) work, O(log T) depth."""
        b = jax.lax.complex(*projections)
        keep = jnp.broadcast_to(along(self._transition(params)[0], b), b.shape)
        if resets is not None:
            keep = jnp.where(resets[..., None], 0, keep)
        h = affine_scan(keep, b, jax.lax.complex(*h0))
        return h.real, h.imag

    def _transition(self, params: PyTree) -> tuple[jax.Array, jax.Array]:
        """What a step keeps of each state, and its pole; complex [n]."""
        pole = jax.lax.complex(-jnp.exp(params["decay"]), params["angle"])
        return jnp.exp(pole * jnp.exp(params["step"])), pole
