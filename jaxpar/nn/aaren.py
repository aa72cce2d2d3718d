"""Attention as a recurrent network: each head's running softmax average over all that came before."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.nn.cells import gate_leaves, gate_products
from jaxpar.nn.leaf import Leaf, draw
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["Aaren"]

State = tuple[jax.Array, jax.Array, jax.Array]
"""Maximum and denominator [..., H], numerator [..., H, K]."""


@dataclasses.dataclass(frozen=True)
class Aaren:
    """Aaren (Feng et al. 2024, arXiv:2405.13956, section 3): attention whose one query a head is learned.

        k[t] = x[t] wk + bk    v[t] = x[t] wv + bv    s[t] = <k[t], q> / sqrt(K) in each head
        y[t] = sum_{i <= t} exp(s[i]) v[i] / sum_{i <= t} exp(s[i])

    That is masked softmax attention with the same query everywhere. As (maximum, denominator, numerator) of the two
    sums it is a recurrence with a state of constant size, and its step is associative: a whole sequence is one
    `scan_monoid`. A cell as `jaxpar.nn.cells.SequenceCell` describes.

    Attributes:
      size: n, units over all heads.
      heads: H; each has K = n / H of them.
    """

    size: int
    heads: int = 1
    gates = ("k", "v")

    def __post_init__(self):
        """Refuses heads that do not divide the units."""
        if self.heads < 1 or self.size < 1 or self.size % self.heads:
            raise UsageError(f"size={self.size} of Aaren must be a multiple of heads={self.heads}, both at least 1.")

    def leaves(self, input_dim: int) -> dict[str, Leaf]:
        """Declares wk, wv [D, n], bk, bv [n] and the queries q [n]."""
        return gate_leaves(self.gates, input_dim, self.size) | {"q": Leaf((self.size,), ("mlp",), 1.0)}

    def init(self, key: PRNGKey, input_dim: int, dtype: Any = jnp.float32) -> dict[str, jax.Array]:
        """Draws the parameters. Consumes `key`."""
        return draw(key, self.leaves(input_dim), dtype)

    def drive(self, params: PyTree, xs: Float[Array, "*L D"]) -> dict[str, jax.Array]:
        """Computes the keys and values of all inputs."""
        return gate_products(self.gates, params, xs)

    def initial(self, batch_shape: tuple[int, ...], dtype: Any = jnp.float32) -> State:
        """Returns what nothing seen leaves: a maximum [*batch_shape, H] of -inf, and sums of zero."""
        sums = (*batch_shape, self.heads)
        maximum, denominator = jnp.full(sums, -jnp.inf, dtype), jnp.zeros(sums, dtype)
        return maximum, denominator, jnp.zeros((*sums, self.size // self.heads), dtype)

    def step(self, params: PyTree, h: State, drive: dict[str, jax.Array]) -> State:
        """Adds one key and value to the sums of each head: constant time and memory, however long the past."""
        return _merge(h, self._element(params, drive, h[0].dtype))

    def output(self, params: PyTree, h: State) -> Float[Array, "*L n"]:
        """Returns numerator / denominator; 0 before anything was seen."""
        del params
        _, denominator, numerator = h
        mean = numerator / jnp.where(denominator == 0, 1, denominator)[..., None]
        return mean.reshape(*mean.shape[:-2], self.size)

    def closed_form(self, params: PyTree, drive: dict[str, jax.Array], h0: State, resets: Any = None) -> State:
        """Returns all states by one associative scan: O(T) work, O(log T) depth."""
        elements = self._element(params, drive, h0[0].dtype)
        flags = jnp.zeros(elements[0].shape[:2], bool) if resets is None else resets
        one = jnp.zeros_like(flags[:1])
        elements = jax.tree.map(lambda h, x: jnp.concatenate([h[None], x]), h0, elements)

        def combine(earlier, later):
            (f, a), (g, b) = earlier, later
            joined = _merge(a, b)
            keep = jax.tree.map(lambda x, y: jnp.where(g.reshape(g.shape + (1,) * (x.ndim - 2)), x, y), b, joined)
            return f | g, keep

        out = jax.lax.associative_scan(combine, (jnp.concatenate([one, flags]), elements))[1]
        return jax.tree.map(lambda x: x[1:], out)

    def _element(self, params: PyTree, drive: dict[str, jax.Array], dtype: Any) -> State:
        """Returns the sums over one place alone: (s, 1, v)."""
        heads = (self.heads, self.size // self.heads)
        k, v = (drive[gate].astype(dtype).reshape(*drive[gate].shape[:-1], *heads) for gate in self.gates)
        query = params["q"].astype(dtype).reshape((1,) * (k.ndim - 2) + heads)
        scores = (k * query).sum(-1) / math.sqrt(heads[1])
        return scores, jnp.ones_like(scores), v


def _merge(a: State, b: State) -> State:
    top = jax.lax.stop_gradient(jnp.maximum(a[0], b[0]))
    finite = jnp.where(jnp.isfinite(top), top, 0)
    wa, wb = jnp.exp(a[0] - finite), jnp.exp(b[0] - finite)
    return top, wa * a[1] + wb * b[1], wa[..., None] * a[2] + wb[..., None] * b[2]
