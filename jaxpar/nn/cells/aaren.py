"""Attention as a recurrent network: each head's running softmax average over all that came before."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.nn.cells.cell import gate_leaves, gate_products
from jaxpar.nn.leaf import Leaf, init_leaves
from jaxpar.scan.monoid import LOGSUMEXP, LogSumExp, Monoid, scan_monoid
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["Aaren"]


@dataclasses.dataclass(frozen=True)
class Aaren:
    """Aaren (Feng et al. 2024, arXiv:2405.13956, section 3): attention whose one query a head is learned.

        k[t] = x[t] wk + bk    v[t] = x[t] wv + bv    s[t] = <k[t], q> / sqrt(K) in each head
        y[t] = sum_{i <= t} exp(s[i]) v[i] / sum_{i <= t} exp(s[i])

    That is masked softmax attention with the same query everywhere. As (maximum, denominator, numerator) of the two
    sums it is a recurrence with a state of constant size, and its step is associative: a whole sequence is one
    `scan_monoid`. A cell as `jaxpar.nn.cells.cell.SequenceCell` describes.

    Attributes:
      size: n, units over all heads.
      heads: H; each has K = n / H of them.
    """

    size: int = field(legal=AtLeast(1))
    heads: int = field(1, AtLeast(1))
    gates = ("k", "v")
    jacobian, lanes = "auto", 1

    def __post_init__(self):
        """Refuses heads that do not divide the units."""
        check_fields(self)
        if self.size % self.heads:
            raise UsageError(f"size={self.size} of Aaren must be a multiple of heads={self.heads}.")

    def leaves(self, input_dim: int) -> dict[str, Leaf]:
        """Declares wk, wv [D, n], bk, bv [n] and the queries q [n]."""
        return gate_leaves(self.gates, input_dim, self.size) | {
            "q": Leaf((self.size,), ("mlp",), 1.0)
        }

    def init(
        self, key: PRNGKey, input_dim: int, dtype: DTypeLike = jnp.float32
    ) -> dict[str, jax.Array]:
        """Draws the parameters. Consumes `key`."""
        return init_leaves(key, self.leaves(input_dim), dtype)

    def input_projections(self, params: PyTree, xs: Float[Array, "*L D"]) -> dict[str, jax.Array]:
        """Computes the keys and values of all inputs."""
        return gate_products(self.gates, params, xs)

    def initial(self, batch_shape: tuple[int, ...], dtype: DTypeLike = jnp.float32) -> LogSumExp:
        """Returns what nothing seen leaves: a maximum `[*batch_shape, H]` of -inf, and sums of zero."""
        sums = (*batch_shape, self.heads)
        maximum, denominator = jnp.full(sums, -jnp.inf, dtype), jnp.zeros(sums, dtype)
        return LogSumExp(maximum, denominator, jnp.zeros((*sums, self.size // self.heads), dtype))

    def step(self, params: PyTree, h: LogSumExp, projections: dict[str, jax.Array]) -> LogSumExp:
        """Adds one key and value to the sums of each head: constant time and memory, however long the past."""
        return LOGSUMEXP.combine(h, self._element(params, projections, h.numerator.dtype))

    def output(self, params: PyTree, h: LogSumExp) -> Float[Array, "*L n"]:
        """Returns the weighted means of all heads; 0 before anything was seen."""
        del params
        return h.mean.reshape(*h.mean.shape[:-2], self.size)

    def closed_form(
        self,
        params: PyTree,
        projections: dict[str, jax.Array],
        h0: LogSumExp,
        resets: Bool[Array, "T B"] | None = None,
    ) -> LogSumExp:
        """Returns all states by one scan: O(T) work, O(log T) depth. With resets through a tree, at more memory."""
        elements = self._element(params, projections, h0.numerator.dtype)
        front = jax.tree.map(lambda h: h[None], h0)
        if resets is None:
            return LOGSUMEXP.combine(front, scan_monoid(LOGSUMEXP, elements))
        whole = jax.tree.map(lambda h, x: jnp.concatenate([h, x]), front, elements)
        flags = jnp.pad(resets, ((1, 0), (0, 0)))
        states = scan_monoid(
            SEGMENTED, (jnp.broadcast_to(flags[..., None], whole.max.shape), whole)
        )[1]
        return jax.tree.map(lambda x: x[1:], states)

    def _element(
        self, params: PyTree, projections: dict[str, jax.Array], dtype: DTypeLike
    ) -> LogSumExp:
        """Returns the sums over one place alone: (s, 1, v)."""
        heads = (self.heads, self.size // self.heads)
        k, v = (
            projections[gate].astype(dtype).reshape(*projections[gate].shape[:-1], *heads)
            for gate in self.gates
        )
        query = params["q"].astype(dtype).reshape((1,) * (k.ndim - 2) + heads)
        scores = (k * query).sum(-1) / math.sqrt(heads[1])
        return LogSumExp(scores, jnp.ones_like(scores), v)


def _since_start(earlier: tuple, later: tuple) -> tuple:
    """Combines (whether a sequence starts within, sums since the last start)."""
    began, a = earlier
    begins, b = later
    flags = LogSumExp(begins, begins, begins[..., None])
    # Before they are combined: a NaN behind a start would come back in the derivative, as 0 NaN.
    a = jax.tree.map(jnp.where, flags, LOGSUMEXP.identity(a), a)
    return began | begins, LOGSUMEXP.combine(a, b)


SEGMENTED = Monoid(
    _since_start, lambda element: (jnp.zeros_like(element[0]), LOGSUMEXP.identity(element[1]))
)
