"""Keys and values of what came before: a cache is an object, and its slots are not positions."""

from typing import Protocol, Self

import flax.struct
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpar.mesh import constrain

__all__ = ["CACHE_AXES", "Cache", "LinearCache"]

CACHE_AXES = ("batch", "kv_heads", "slots", "head_dim")


class Cache(Protocol):
    """The keys and values that one layer keeps; a pytree, carried by the loop that decodes and written in place.

    Tokens are counted by the place at which the cache was given them: 0, 1, 2, ... in each row.
    """

    @property
    def room(self) -> int:
        """How many tokens it holds."""
        ...

    def write(
        self,
        k: Float[Array, "B T G K"],
        v: Float[Array, "B T G K"],
        seen: Int[Array, " B"],
        valid: Int[Array, " B"] | None = None,
    ) -> Self:
        """Returns the cache with the first `valid` of T more tokens, the first of which is at place `seen`."""
        ...

    def fill(self, k: Float[Array, "B T G K"], v: Float[Array, "B T G K"]) -> Self:
        """Returns an empty cache with T <= room tokens from place 0 on; what of them does not count is never seen."""
        ...

    def read(
        self, seen: Int[Array, " B"]
    ) -> tuple[Float[Array, "B S G K"], Float[Array, "B S G K"], Int[Array, "B S"]]:
        """Returns keys, values and the place of each once `seen` tokens were given, negative where there is none."""
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
    def empty(cls, batch: int, num_heads: int, slots: int, head_dim: int, dtype: DTypeLike) -> "LinearCache":
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
        rows = jnp.arange(len(seen))[:, None]

        def put(old, new):
            return constrain(old.at[rows, :, slot].set(new.astype(old.dtype), mode="drop"), *CACHE_AXES, name="cache")

        return LinearCache(put(self.keys, k), put(self.values, v))

    def slots(self, length: int, seen: Array, valid: Array | None = None) -> Array:
        """Returns where T more tokens go, int [B, T], each slot once; S, which is none, for what is not kept."""
        count = jnp.full(seen.shape, length) if valid is None else valid
        place = jnp.arange(length)[None]
        kept = (place < count[:, None]) & (place >= count[:, None] - self.room)
        return jnp.where(kept, (seen[:, None] + place) % self.room, self.room)

    def fill(self, k: Array, v: Array) -> "LinearCache":
        """Returns an empty cache with T <= S tokens from place 0 on; what of them does not count is never seen."""

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
