"""How a device attends to a piece of the keys that came to it: by the places of tokens, or by a table of pairs.

Both add to the sums of the forward pass and to gradients; a turn says how many devices of the ring the queries' device
lies after the keys'.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jaxpar.nn.attention import Visibility, Visible, merge
from jaxpar.nn.attention.context.token_orders import Order
from jaxpar.nn.attention.gradient import Done, attend_gradient
from jaxpar.nn.attention.kernels import in_blocks
from jaxpar.nn.attention.pairs import attend_pair, attend_pair_gradient
from jaxpar.nn.attention.visibility import Where
from jaxpar.scan.monoid import LogSumExp

Turn = int | Array
Sums = tuple[Array, Array]


class QueryPiece(NamedTuple):
    """A piece of the queries, and where its tokens are.

    Attributes:
      q: Queries.
      where: Positions and documents of their tokens.
    """

    q: Float[Array, "B T H K"]
    where: Where


class KeyPiece(NamedTuple):
    """A piece of the keys and values, and where its tokens are.

    Attributes:
      k: Keys.
      v: Values.
      where: Positions and documents of their tokens.
    """

    k: Float[Array, "B S G K"]
    v: Float[Array, "B S G K"]
    where: Where


class ByPlaces(NamedTuple):
    """Every pair of pieces is computed, and masked by the positions and documents that travel with them."""

    visible: Visible
    parts: int = 1

    def attend(
        self,
        state: LogSumExp | None,
        queries: QueryPiece,
        keys: KeyPiece,
        turn: Turn,
        device,
    ) -> LogSumExp:
        """Returns the sums of the queries with a piece of the keys."""
        del turn, device  # the positions say it
        visibility = Visibility(rule=self.visible)
        more = in_blocks(queries.q, keys.k, keys.v, queries.where, keys.where, visibility)
        return more if state is None else merge(state, more)

    def gradient(
        self,
        dq,
        sums: Sums | None,
        queries: QueryPiece,
        keys: KeyPiece,
        turn: Turn,
        device,
        done: Done,
    ):
        """Returns the gradients by the queries and by this piece of the keys, with what was there before."""
        del turn, device
        known = done.output_gradient()
        arrays = (queries.q, keys.k, keys.v, queries.where, keys.where)
        more, dk, dv = attend_gradient(*arrays, known, self.visible)
        if sums is not None:
            dk = sums[0] + dk
            dv = sums[1] + dv
        if dq is not None:
            more = dq + more
        return more, (dk, dv)


class ByTable(NamedTuple):
    """The pairs of parts of which something is seen are computed, without a mask, by a kernel where there is one.

    Within documents, whose numbers travel with the keys, those that have none in common are left out too.

    Attributes:
      order: Who holds what.
      shares: N, devices of the ring.
      causal: Whether later keys are unseen; if not, every pair is full.
    """

    order: str
    shares: int
    causal: bool

    @property
    def parts(self) -> int:
        """Into how many parts a device's tokens fall."""
        return Order(self.order).parts if self.causal else 1

    def attend(
        self,
        state: LogSumExp | None,
        queries: QueryPiece,
        keys: KeyPiece,
        turn: Turn,
        device,
    ) -> LogSumExp:
        """Returns the sums of the queries with a piece of the keys."""
        if state is None:
            wide = jnp.promote_types(queries.q.dtype, jnp.float32)
            none = jnp.full(queries.q.shape[:3], -jnp.inf, wide)
            state = LogSumExp(
                max=none,
                denominator=jnp.zeros_like(none),
                numerator=jnp.zeros(queries.q.shape, wide),
            )
        for own, other, is_used, causal in self._pairs(turn, device):
            documents = self._of_parts(queries.where, keys.where, own, other, is_used)
            more = attend_pair(
                self._part(queries.q, own),
                self._part(keys.k, other),
                self._part(keys.v, other),
                causal,
                segments=documents,
            )
            state = self._merge_part(state, more, own, is_used)
        return state

    def _merge_part(self, state: LogSumExp, more: LogSumExp, number, is_used) -> LogSumExp:
        """Adds the sums of one part of the queries to the state, where they are used."""
        before = jax.tree.map(lambda x: self._part(x, number), state)

        def update(whole: Array, old: Array, new: Array) -> Array:
            return self._put(whole, number, jnp.where(is_used, new, old))

        return jax.tree.map(update, state, before, merge(before, more))

    def gradient(
        self,
        dq,
        sums: Sums | None,
        queries: QueryPiece,
        keys: KeyPiece,
        turn: Turn,
        device,
        done: Done,
    ):
        """Returns the gradients by the queries and by this piece of the keys, with what was there before."""
        q = queries.q
        k = keys.k
        v = keys.v
        wide = jnp.promote_types(q.dtype, jnp.float32)
        dq = jnp.zeros(q.shape, wide) if dq is None else dq
        dk, dv = (jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)) if sums is None else sums
        for own, other, is_used, causal in self._pairs(turn, device):
            arrays = self._part(q, own), self._part(k, other), self._part(v, other)
            part_done = jax.tree.map(functools.partial(self._part, number=own), done)
            documents = self._of_parts(queries.where, keys.where, own, other, is_used)
            more = attend_pair_gradient(*arrays, part_done, causal, segments=documents)
            # What is not seen has weights over 1, up to infinity: left out, not multiplied by 0.
            more = (jnp.where(is_used, x, 0) for x in more)
            places = (dq, own), (dk, other), (dv, other)
            dq, dk, dv = (
                self._put(x, at, self._part(x, at) + new)
                for (x, at), new in zip(places, more, strict=True)
            )
        return dq, (dk, dv)

    def _pairs(self, turn: Turn, device):
        """(Part of the queries, of the keys, whether they are seen, whether causal) of this device."""
        if isinstance(turn, int) and turn == 0:
            return [(own, other, True, causal) for own, other, causal in _pairs(*self, 0, 0)]
        row = jnp.asarray(_table(*self))[turn % self.shares, device]
        return [(row[i, 0], row[i, 1], row[i, 2] > 0, False) for i in range(row.shape[0])]

    def _of_parts(
        self, queries: Where, keys: Where, own, other, is_used
    ) -> tuple[Array, Array] | None:
        """Documents of a pair; of one that is not used none in common, so that a kernel passes it over."""
        if (both := _documents(queries, keys)) is None:
            return None
        mine = jnp.where(is_used, self._part(both[0], own), np.iinfo(both[0].dtype).max)
        return mine, self._part(both[1], other)

    def _part(self, x: Array, number) -> Array:
        size = x.shape[1] // self.parts
        return x if self.parts == 1 else lax.dynamic_slice_in_dim(x, number * size, size, 1)

    def _put(self, x: Array, number, part: Array) -> Array:
        size = x.shape[1] // self.parts
        return (
            part if self.parts == 1 else lax.dynamic_update_slice_in_dim(x, part, number * size, 1)
        )


def _documents(queries: Where, keys: Where) -> tuple[Array, Array] | None:
    if queries.segments is None or keys.segments is None:
        return None
    return queries.segments, keys.segments


def _pairs(
    order: str, shares: int, causal: bool, device: int, other: int
) -> list[tuple[int, int, bool]]:
    return Order(order).pairs(shares, device, other) if causal else [(0, 0, False)]


@functools.cache
def _table(order: str, shares: int, causal: bool) -> np.ndarray:
    """Pairs of full parts by turn and device, int [N, N, P, (queries' part, keys' part, whether seen)].

    A device with fewer pairs than another computes the first one and drops it: devices run one program.
    """
    rows = {
        (turn, device): _pairs(order, shares, causal, device, (device - turn) % shares)
        for turn in range(1, shares)
        for device in range(shares)
    }
    out = np.zeros((shares, shares, max(map(len, rows.values())), 3), np.int32)
    for place, pairs in rows.items():
        for i, (own, part, _) in enumerate(pairs):
            out[*place, i] = own, part, 1
    return out
