"""Recurrent cells: one step h[t] = step(params, h[t-1], projections[t]), and all that is known of it beforehand.

A cell is its step function with a few facts: the products with the input that it needs (computed for the whole
sequence at once), its recurrent weights, and the structure of its Jacobian dh[t]/dh[t-1]. `jaxpar.nn.cells.layer` runs
any of them over a sequence, in parallel or one step at a time. Your own cell in five lines:

    def step(params, h, x):  # h [B, n], x [B, D]
        return jnp.tanh(params["a"][None] * h + x @ params["b"])

    cell = Cell(step, size=8)
    ys, last = recurrent(cell, {"a": a, "b": b}, xs)
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxpar.fields import AtLeast, OneOf, check_fields, field
from jaxpar.nn.leaf import Leaf, init_leaves
from jaxpar.scan import affine_scan
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["Cell", "SequenceCell", "along", "gate_leaves", "gate_products", "heads_product"]

JACOBIANS = ("diag", "block", "dense", "auto")


class SequenceCell(Protocol):
    """What `jaxpar.nn.cells.layer` runs: `Cell` and `jaxpar.nn.cells.aaren.Aaren` are two of them.

    Time-free: every function takes any leading axes, so that `input_projections` serves a whole sequence and `step` one
    moment.
    """

    @property
    def jacobian(self) -> str:
        """Structure of the Jacobian of one step, as in `Cell`; "auto" has the solver find out."""
        ...

    @property
    def lanes(self) -> int:
        """Arrays that a state is made of."""
        ...

    def init(self, key: PRNGKey, input_dim: int, dtype: DTypeLike = jnp.float32) -> PyTree:
        """Draws the parameters for inputs of `input_dim` features."""
        ...

    def input_projections(self, params: PyTree, xs: Float[Array, "*L D"]) -> PyTree:
        """Computes all that a step needs of its input, before anything is known of the state."""
        ...

    def initial(self, batch_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> PyTree:
        """Returns the state before the first step."""
        ...

    def step(self, params: PyTree, h: PyTree, projections: PyTree, /) -> PyTree:
        """Returns the next state."""
        ...

    def output(self, params: PyTree, h: PyTree) -> Float[Array, "*L n"]:
        """Returns what the layer above sees of a state."""
        ...

    def closed_form(
        self,
        params: PyTree,
        projections: PyTree,
        h0: PyTree,
        resets: Bool[Array, "T B"] | None = None,
    ) -> PyTree | None:
        """Returns all states [T, B, ...] by a scan that needs no iteration, or None if there is no such scan."""
        ...


@dataclasses.dataclass(frozen=True)
class Cell:
    """A recurrent cell: its step, and what is known of it; static and hashable.

    Attributes:
      step: `(params, h, projections) -> h` for one moment of a batch, rows and (but for "dense") units apart: h [B, n],
        or a tuple of such lanes; projections as from `input_projections`. A module's function, not a fresh lambda, or
        each call compiles anew.
      size: n, units.
      gates: Names g of the input products: projections[g] = x w<g> + b<g>. Without any, it is the input itself.
      weights: Declares the other parameters, given the cell.
      lanes: Lanes of the state; with one, the state is an array, else a tuple whose last lane is the output.
      jacobian: Of one step: "diag" (one lane, of which unit i depends on unit i alone), "block" (a lanes x lanes block
        a unit), "dense" (within a row), or "auto" to have the solver find out.
      affine: If the step is a h + b: `(params, projections) -> (a, b)`, which then needs no solver but one affine scan.
      heads: Blocks along the diagonal of dense recurrent weights.
    """

    step: Callable[[Any, Any, Any], Any]
    size: int = field(legal=AtLeast(1))
    gates: tuple[str, ...] = ()
    weights: Callable[["Cell"], dict[str, Leaf]] | None = None
    lanes: int = field(1, AtLeast(1))
    jacobian: str = field("auto", OneOf(JACOBIANS))
    affine: Callable[[Any, Any], tuple[jax.Array, jax.Array]] | None = None
    heads: int = field(1, AtLeast(1))

    def __post_init__(self):
        """Refuses what no cell can be."""
        name = getattr(self.step, "__name__", "step").strip(
            "_"
        )  # a `functools.partial` has no name
        check_fields(self, f"{name}.")
        if self.size % self.heads:
            legal = ", ".join(str(h) for h in range(1, self.size + 1) if self.size % h == 0)
            raise UsageError(
                f"heads={self.heads} of cell {name} do not divide size={self.size}; legal are {legal}."
            )

    def leaves(self, input_dim: int) -> dict[str, Leaf]:
        """Declares the parameters: w<g> [D, n] and b<g> [n] of each gate g, then the recurrent ones."""
        if not self.gates and self.weights is None:
            raise UsageError(
                "this cell declares no parameters; make them yourself, or give it gates and weights."
            )
        return gate_leaves(self.gates, input_dim, self.size) | (
            self.weights(self) if self.weights else {}
        )

    def init(
        self, key: PRNGKey, input_dim: int, dtype: DTypeLike = jnp.float32
    ) -> dict[str, jax.Array]:
        """Draws the declared parameters. Consumes `key`."""
        return init_leaves(key, self.leaves(input_dim), dtype)

    def input_projections(self, params: PyTree, xs: Float[Array, "*L D"]) -> PyTree:
        """Computes projections[g] = x w<g> + b<g> of each gate g; without gates, x itself."""
        return gate_products(self.gates, params, xs) if self.gates else xs

    def initial(self, batch_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> PyTree:
        """Returns zeros: `[*batch_shape, n]` a lane."""
        lane = jnp.zeros((*batch_shape, self.size), dtype)
        return lane if self.lanes == 1 else (lane,) * self.lanes

    def output(self, params: PyTree, h: PyTree) -> Float[Array, "*L n"]:
        """Returns the last lane of the state."""
        del params
        return h if self.lanes == 1 else h[-1]

    def closed_form(
        self,
        params: PyTree,
        projections: PyTree,
        h0: PyTree,
        resets: Bool[Array, "T B"] | None = None,
    ) -> PyTree | None:
        """Returns h[t] = a[t] h[t-1] + b[t] by one affine scan, in the dtype of h0; None without `affine`."""
        if self.affine is None:
            return None
        # The gates themselves in h0's dtype: a bfloat16 close to 1 forgets within a few hundred steps.
        a, b = self.affine(params, jax.tree.map(lambda x: x.astype(h0.dtype), projections))
        if resets is not None:
            a = jnp.where(resets[..., None], 0, a)
        return affine_scan(a, b, h0)


def gate_leaves(gates: tuple[str, ...], input_dim: int, size: int) -> dict[str, Leaf]:
    """Declares w<g> [D, n] and b<g> [n] of each gate g: weights of variance 1 / D, biases of zero."""
    out = {}
    for gate in gates:
        out["w" + gate] = Leaf((input_dim, size), ("embed", "mlp"), 1 / math.sqrt(input_dim))
        out["b" + gate] = Leaf((size,), ("mlp",), "zeros")
    return out


def gate_products(
    gates: tuple[str, ...], params: PyTree, xs: Float[Array, "*L D"]
) -> dict[str, jax.Array]:
    """Computes x w<g> + b<g> of each gate g: one matrix product a gate, over all leading axes."""
    return {gate: xs @ params["w" + gate] + along(params["b" + gate], xs) for gate in gates}


def along(vector: Float[Array, " n"], like: jax.Array) -> jax.Array:
    """Returns `vector` with leading axes of size 1, to be multiplied with lanes [..., n]; no implicit promotion."""
    return vector.reshape((1,) * (like.ndim - 1) + (-1,))


def heads_product(
    h: Float[Array, "*L n"], weight: Float[Array, "H K G K"]
) -> tuple[jax.Array, ...]:
    """Multiplies each head's K = n / H units by its own matrices, one a gate: G arrays `[*L, n]`.

    In the weight's dtype with sums in the state's, and without TF32: a recurrence compounds its rounding over T steps.
    Cost: 2 n K G operations a row.
    """
    heads, width, gates, _ = weight.shape
    parts = h.reshape(*h.shape[:-1], heads, width).astype(weight.dtype)
    out = jnp.einsum(
        "...hk,hkgl->...ghl",
        parts,
        weight,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=h.dtype,
    )
    out = out.reshape(*h.shape[:-1], gates, heads * width)
    return tuple(out[..., gate, :] for gate in range(gates))
