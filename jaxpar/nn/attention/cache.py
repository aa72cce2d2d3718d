"""Keys and values of what came before: a cache is an object that is attended to, and its slots are not positions."""

import dataclasses
from typing import Any, NamedTuple, Protocol, Self

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxpar.mesh import constrain
from jaxpar.nn.attention.kernels import in_blocks
from jaxpar.nn.attention.state import merge
from jaxpar.nn.attention.visibility import Visibility, Visible, Where
from jaxpar.nn.mixer import Context
from jaxpar.nn.position import Alibi, Rope
from jaxpar.scan.monoid import LogSumExp

__all__ = ["CACHE_AXES", "Cache", "LinearCache", "PositionRule"]

CACHE_AXES = ("batch", "kv_heads", "slots", "head_dim")


class PositionRule(NamedTuple):
    """What attention does with places: who sees whom, and how a score depends on where the two are.

    Attributes:
      visible: Who sees whom.
      positions: Rotary ones, slopes over the distance, or None.
      cap: Of the scores, as of `jaxpar.nn.attention.state.attend`.
    """

    visible: Visible = Visible()
    positions: Rope | Alibi | None = None
    cap: float = 0.0

    def rotate(
        self, x: Float[Array, "B T H K"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T H K"]:
        """Rotates queries or keys to their positions, where positions are rotary."""
        return self.positions.rotate(x, positions) if isinstance(self.positions, Rope) else x

    def slopes(self, num_heads: int) -> Float[Array, " H"] | None:
        """Returns what a score falls by for each step of distance, where positions are slopes."""
        return self.positions.slopes(num_heads) if isinstance(self.positions, Alibi) else None

    def visibility(self, num_heads: int, among: Bool[Array, "B T S"] | None = None) -> Visibility:
        """Returns the keys in a mask that these heads' queries see, and how scores change."""
        slopes = self.slopes(num_heads)
        return Visibility(rule=self.visible, among=among, slopes=slopes, cap=self.cap)


class Cache(Protocol):
    """The keys and values that one layer keeps; a pytree, carried by the loop that decodes and written in place.

    Queries and keys come as they left their products: each cache rotates them, since it knows in which coordinates its
    keys lie.
    """

    def fill(
        self, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"], context: Context
    ) -> Self:
        """Returns the empty cache with a prompt's tokens, their keys rotated; what of them does not count is unseen."""
        ...

    def attend(
        self,
        q: Float[Array, "B T H K"],
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G K"],
        rule: PositionRule,
        context: Context,
    ) -> tuple[LogSumExp, Self]:
        """Returns the sums of T more tokens' queries over what is kept and these tokens, and the cache with them."""
        ...


@flax.struct.dataclass
class LinearCache:
    """S slots a row, filled in turn: the token at place p lies in slot p mod S, so the last S are kept.

    Attributes:
      keys: [B, G, S, K], the order in which a step multiplies them.
      values: The same.
    """

    keys: Array
    values: Array

    @classmethod
    def empty(
        cls, batch: int, num_heads: int, slots: int, head_dim: int, dtype: DTypeLike
    ) -> "LinearCache":
        """Returns a cache of zeros."""
        zeros = jnp.zeros((batch, num_heads, slots, head_dim), dtype)
        return cls(zeros, zeros)

    @property
    def room(self) -> int:
        """S."""
        return self.keys.shape[2]

    def write(self, k: Array, v: Array, seen: Array, valid: Array | None = None) -> "LinearCache":
        """Returns the cache with more tokens; of more than S, with the last S. Cost: what it writes, where donated."""
        slot = self.slots(k.shape[1], seen, valid)

        def line(old, new, slot):
            return old.at[slot].set(new, mode="drop")

        def put(old, new):
            # Row by row and head by head, indices along: with heads in its window a TPU lays the cache anew for it.
            new = jnp.swapaxes(new, 1, 2).astype(old.dtype)
            old = jax.vmap(jax.vmap(line))(old, new, jnp.broadcast_to(slot[:, None], new.shape[:3]))
            return constrain(old, *CACHE_AXES, name="cache")

        return LinearCache(put(self.keys, k), put(self.values, v))

    def slots(self, length: int, seen: Array, valid: Array | None = None) -> Array:
        """Returns where T more tokens go, int [B, T], each slot once; S, which is none, for what is not kept."""
        count = jnp.full(seen.shape, length) if valid is None else valid
        place = jnp.arange(length)[None]
        kept = (place < count[:, None]) & (place >= count[:, None] - self.room)
        return jnp.where(kept, (seen[:, None] + place) % self.room, self.room)

    def attend(
        self, q: Array, k: Array, v: Array, rule: PositionRule, context: Context
    ) -> tuple[LogSumExp, "LinearCache"]:
        """Returns the sums of T more tokens' queries, and the cache with those of them that count."""
        q, k = (rule.rotate(x, context.positions) for x in (q, k))
        seen: Any = context.seen
        new = seen[:, None] + jnp.arange(q.shape[1])[None]
        queries = Where(positions=new, first=context.first)
        visibility = rule.visibility(q.shape[2])
        # Written first, a step reads one array; but what a window still sees must not be overwritten before it is read.
        window = rule.visible.window
        if context.visible is None and (not window or window + q.shape[1] - 1 <= self.room):
            after = self.write(k, v, seen, context.valid)
            end = seen + (q.shape[1] if context.valid is None else context.valid)
            keys, values, places = after.read(end)
            return in_blocks(q, keys, values, queries, Where(positions=places), visibility), after
        keys, values, places = self.read(seen)
        past = in_blocks(q, keys, values, queries, Where(positions=places), visibility)
        among_new = dataclasses.replace(visibility, among=context.visible)
        now = in_blocks(q, k, v, queries, Where(positions=new), among_new)
        return merge(past, now), self.write(k, v, seen, context.valid)

    def fill(self, k: Array, v: Array, context: Context) -> "LinearCache":
        """Returns an empty cache with T tokens from place 0 on, of more than S with the last S that count."""
        if k.shape[1] > self.room:
            seen: Any = context.seen
            return self.write(k, v, seen, context.valid)

        def put(old, new):
            new = jnp.swapaxes(new, 1, 2).astype(old.dtype)
            new = jnp.pad(new, ((0, 0), (0, 0), (0, self.room - new.shape[2]), (0, 0)))
            return constrain(new, *CACHE_AXES, name="cache")

        return LinearCache(put(self.keys, k), put(self.values, v))

    def read(self, seen: Array) -> tuple[Array, Array, Array]:
        """Returns all slots, and the place that each holds."""
        last = seen[:, None] - 1
        places = last - (last - jnp.arange(self.room)[None]) % self.room
        return jnp.swapaxes(self.keys, 1, 2), jnp.swapaxes(self.values, 1, 2), places
