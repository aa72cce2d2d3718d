"""The keys and values of one layer in a forest's blocks: a `Cache` whose readers share what they read.

Attention to the past is a partial state of each block, and one merge of them all: each block is read once for all
readers of its row, and the blocks are parts that run side by side, which splits a long cache over a GPU (split-K).
What a pass adds is kept beside the blocks until it is known which of its tokens stay: `store` writes those alone.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxpar.decode import split_k
from jaxpar.decode.forest import Forest, View
from jaxpar.decode.policies import CachePolicy, Selection
from jaxpar.mesh import constrain
from jaxpar.nn.attention import LinearCache, PositionRule, capped, merge, merge_parts
from jaxpar.nn.attention.kernels import in_blocks
from jaxpar.nn.attention.state import slopes_bias
from jaxpar.nn.attention.visibility import Where
from jaxpar.nn.linear import wide_einsum
from jaxpar.nn.mixer import Context
from jaxpar.nn.position import Rope
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import PyTree, UsageError

__all__ = ["BLOCK_AXES", "BlockCache", "attend_blocks"]

BLOCK_AXES = ("batch", "kv_heads", "slots", None, "head_dim")


def attend_blocks(
    q: Float[Array, "N|1 B T H K"],
    k: Float[Array, "B G N b K"],
    v: Float[Array, "B G N b K"],
    seen: Bool[Array, "B G|1 N T b"],
    bias: Float[Array, "B N H T b"] | None = None,
    cap: float = 0.0,
) -> tuple[LogSumExp, Float[Array, "B G N T H/G b"]]:
    """Computes `jaxpar.nn.attention.attend` of queries to each block alone, in float32 at least.

    Rows, heads and blocks stay in the order in which they lie in memory: products then read the blocks where they are,
    which a `vmap` of `attend` over the blocks would not (it copies them all).

    Returns:
      (maximum [N, B, G, T, H/G], sum, weighted values [N, B, G, T, H/G, K]), for `merge_parts`; and the scores, -inf
      of what is not seen.
    """
    batch, length, heads, width = q.shape[1:]
    groups, blocks, size = k.shape[1:4]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    q = jnp.moveaxis(q.reshape(-1, batch, length, groups, heads // groups, width), (0, 3), (2, 1))
    q = q.reshape(batch, groups, q.shape[2], -1, width)  # [B, G, N or 1, T H/G, K]
    if q.shape[2] == 1:
        scores = wide_einsum("bgmk,bgnsk->bgnms", q[:, :, 0], k, wide)
    else:
        scores = wide_einsum("bgnmk,bgnsk->bgnms", q, k, wide)
    scores = scores.reshape(batch, groups, blocks, length, heads // groups, size)
    scores = capped(scores / math.sqrt(width), cap)
    if bias is not None:
        bias = bias.astype(wide).reshape(batch, blocks, groups, heads // groups, length, size)
        scores = scores + jnp.moveaxis(bias, (2, 3), (1, 4))
    scores = jnp.where(seen[:, :, :, :, None], scores, -jnp.inf)
    top = scores.max(-1)
    # From a finite unit, so that no difference of infinities is made where nothing is seen.
    weights = jnp.exp(scores - jnp.where(top > -jnp.inf, top, 0)[..., None])
    flat = weights.reshape(batch, groups, blocks, -1, size).astype(v.dtype)
    values = wide_einsum("bgnms,bgnsk->bgnmk", flat, v, wide)

    parts = LogSumExp(top, weights.sum(-1), values.reshape(*top.shape, width))
    # The blocks' axis comes first in name alone: a sum over it reads each block's values where they are.
    return jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), parts), scores


@flax.struct.dataclass
class BlockCache:
    """N blocks of b slots in each of B rows, read by R readers: [B R, T] tokens are given to it at once.

    Attributes:
      keys: [B, G, N, b, K], each rotated to its place in its segment; None while a prompt is read.
      values: The same.
      new: Keys and values [B R, T, G, K] of the last pass, not yet stored; None before one.
      forest: Who owns the blocks. For a pass.
      view: Who sees what. For a pass.
      policy: What a step sees of them; None for all.
      memory: What the policy remembers.
      merge: How partial states along axis 0 are added up: `merge_parts`, or what adds up over a mesh axis as well.
    """

    keys: Array | None
    values: Array | None
    new: tuple[Array, Array] | None = None
    forest: Forest | None = None
    view: View | None = None
    memory: PyTree = None
    policy: CachePolicy | None = flax.struct.field(pytree_node=False, default=None)
    merge: Callable[[LogSumExp], LogSumExp] = flax.struct.field(
        pytree_node=False, default=merge_parts
    )

    @classmethod
    def empty(
        cls, rows: int, num_heads: int, blocks: int, block: int, head_dim: int, dtype: DTypeLike
    ) -> "BlockCache":
        """Returns blocks of zeros."""
        zeros = constrain(
            jnp.zeros((rows, num_heads, blocks, block, head_dim), dtype), *BLOCK_AXES, name="cache"
        )
        return cls(zeros, zeros)

    @classmethod
    def like(cls, cache: LinearCache, blocks: int, block: int) -> "BlockCache":
        """Returns blocks of zeros for the rows, heads and dtype of another cache, which may be shapes alone."""
        rows, heads, _, width = cache.keys.shape
        return cls.empty(rows, heads, blocks, block, width, cache.keys.dtype)

    def fill(self, k: Array, v: Array, context: Context) -> "BlockCache":
        """Returns the cache with a prompt's keys and values beside it, to be stored."""
        del context
        return dataclasses.replace(self, new=(k, v))

    def attend(
        self, q: Array, k: Array, v: Array, rule: PositionRule, context: Context
    ) -> tuple[LogSumExp, "BlockCache"]:
        """Returns the sums of T more tokens of each reader over what it sees and these, which are kept beside.

        Shapes: q [B R, T, H, K], k and v [B R, T, G, K]; `context.positions` [B R, T] are the reader's, and
        `context.visible` says which of the T tokens each sees. Cost: every block is read once a row, whoever sees it,
        and 4 B R T H N b K operations.
        """
        assert (
            self.view is not None
            and self.forest is not None
            and self.keys is not None
            and self.values is not None
        )
        view, positions = self.view, context.positions
        own = jnp.take_along_axis(view.offset, jnp.maximum(view.write, 0)[..., None], 2).reshape(
            -1, 1
        )
        is_shifted = self.forest.num_segments > 1
        if is_shifted and isinstance(rule.positions, Rope) and rule.positions.depends_on_length:
            raise UsageError(
                "model.rope.scaling=dynamic: texts that share parts have no one length; expected "
                "another rule, or drafts and beams of texts of their own."
            )
        k = rule.rotate(k, positions - own)
        if self.policy is None and split_k.has_kernel(
            rule, self.keys.dtype, self.keys.shape[3], self.keys.shape[4]
        ):
            cached = split_k.Blocks(
                keys=self.keys, values=self.values, forest=self.forest, view=view
            )
            parts = split_k.attend_forest(q, k, v, rule, cached, context)
            return self._added(parts), dataclasses.replace(self, new=(k, v))
        visibility = rule.visibility(q.shape[2], context.visible)
        where = Where(positions=positions)
        now = in_blocks(rule.rotate(q, positions - own), k, v, where, where, visibility)
        past, memory = self._past(q, rule, positions, visibility.slopes)
        flat = jax.tree.map(lambda x: x.reshape(*now.max.shape, *x.shape[3:]), past)
        return merge(flat, now), dataclasses.replace(self, new=(k, v), memory=memory)

    def _added(self, parts: LogSumExp) -> LogSumExp:
        """Adds up the kernel's parts, of which the last is that of the pass itself and no other device's."""
        each = [jax.tree.map(lambda x: x[index], parts) for index in range(len(parts.max))]  # noqa: B023
        if self.merge is not merge_parts:
            return merge(self.merge(jax.tree.map(lambda x: x[:-1], parts)), each[-1])
        return functools.reduce(
            merge, each
        )  # elementwise: a GPU does it and takes the mean in one go

    def _past(
        self, q, rule: PositionRule, positions: Array, slopes: Array | None
    ) -> tuple[LogSumExp, PyTree]:
        """The sums of [B R, T] queries over the blocks, [B, R T, H, ...], and what the policy remembers then."""
        keys, values, view = self.keys, self.values, self.view
        assert keys is not None and values is not None and view is not None
        rows, readers = view.write.shape
        length, heads = q.shape[1:3]
        places, offset = self._places()
        turned, memory, chosen = self._turned(q, rule, positions, offset), self.memory, Selection()
        if self.policy is not None:
            chosen, memory = self.policy.select(
                memory, turned, places, positions.reshape(rows, readers, length)[..., 0]
            )
        if chosen.kept is not None:
            places = jnp.where(chosen.kept, places, -1)

        def of_readers(
            places,
        ):  # [B, R, n, b] -> which of them the [B R, T] queries see, [B, n, R T, b]
            flat = jnp.moveaxis(places, 2, 0).reshape(places.shape[2], rows * readers, -1)
            seen = jax.vmap(lambda places: rule.visible(positions, places))(flat)
            bias = None
            if slopes is not None:
                bias = jax.vmap(functools.partial(slopes_bias, slopes, positions))(
                    flat
                )  # [n, B R, H, T, b]
                bias = jnp.moveaxis(
                    bias.reshape(-1, rows, readers, heads, length, bias.shape[-1]), (1, 3), (0, 2)
                )
                bias = bias.reshape(rows, -1, heads, readers * length, bias.shape[-1])
            return jnp.moveaxis(
                seen.reshape(-1, rows, readers * length, seen.shape[-1]), 0, 1
            ), bias

        seen, bias = of_readers(places)
        seen = seen[:, None]
        if chosen.blocks is not None:
            if bias is not None:
                raise UsageError(
                    "blocks cannot be chosen where positions are slopes; leave the policy out."
                )
            index = chosen.blocks[..., None, None]
            keys, values = (jnp.take_along_axis(x, index, 2) for x in (keys, values))
            seen = jnp.take_along_axis(seen, index, 2)
            turned = self._of_chosen(turned, chosen.blocks)
        states, scores = attend_blocks(turned, keys, values, seen, bias, rule.cap)
        if self.policy is not None:
            memory = self.policy.attended(
                memory, scores, positions.reshape(rows, readers, length)[..., 0]
            )
        # [B, G, T, H/G, ...] -> [B, T, H, ...], after the blocks are added up
        merged = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 2), self.merge(states))
        return jax.tree.map(lambda x: x.reshape(*x.shape[:2], heads, *x.shape[4:]), merged), memory

    def _places(self) -> tuple[Array, Array]:
        """Positions of the tokens in slots, [B, R, N, b], negative where a reader sees none; blocks' offsets."""
        forest, view = self.forest, self.view
        assert forest is not None and view is not None
        owner = jnp.maximum(forest.owner, 0)

        def of_block(table):  # [B, R, M] -> [B, R, N]
            return jnp.take_along_axis(table, owner[:, None], 2)

        offset = of_block(view.offset)
        known = forest.place >= 0  # of a free block none is
        seen = known[:, None] & (forest.place[:, None] < of_block(view.seen)[..., None])
        if view.slots is not None:
            seen = seen & view.slots
        return jnp.where(seen, forest.place[:, None] + offset[..., None], -1), offset

    def _of_chosen(self, turned: Array, blocks: Array) -> Array:
        """Queries [N or 1, B, T, H, K] in the coordinates of the blocks that their key heads read, [k, ...]."""
        if len(turned) == 1:
            return turned
        heads = turned.shape[3] // blocks.shape[1]
        index = jnp.moveaxis(jnp.repeat(blocks, heads, axis=1), 2, 0)[:, :, None, :, None]
        return jnp.take_along_axis(turned, index, 0)

    def _turned(self, q: Array, rule: PositionRule, positions: Array, offset: Array) -> Array:
        """Queries [N, B, R T, H, K] in the coordinates of each block's segment; [1, ...] where all are the same.

        Positions and offsets meet as integers, so that distances keep their digits however far a reader has come.
        """
        rows, readers, _ = offset.shape
        joint = -1, rows, readers * q.shape[1], *q.shape[2:]
        assert self.forest is not None
        if not isinstance(rule.positions, Rope):
            return q.reshape(joint)
        if self.forest.num_segments == 1:
            offset = offset[:, :, :1]
        shift = jnp.moveaxis(offset, 2, 0).reshape(offset.shape[2], -1, 1)
        return jax.vmap(lambda shift: rule.rotate(q, positions - shift))(shift).reshape(joint)

    def store(self, slots: Int[Array, "B R T"]) -> "BlockCache":
        """Writes the new keys and values to their slots, as `jaxpar.decode.forest.write` gave them; in place.

        A token whose slot is N b is not kept. Of pseudo tokens, which come last, a layer before they enter has none.
        """
        keys, values = self.keys, self.values
        assert keys is not None and values is not None and self.new is not None
        rows, size = keys.shape[0], keys.shape[3]
        flat = slots[..., : self.new[0].shape[1]].reshape(rows, -1)

        def line(old, new, flat):
            return old.at[flat // size, flat % size].set(new, mode="drop")

        def put(old, new):
            # Row by row and head by head, so that no device asks another for what it writes, and a TPU leaves the cache
            # where it is. Indices go along: without such an axis heads would be one window, for which it lays it anew.
            new = jnp.moveaxis(new.reshape(rows, -1, *new.shape[2:]), 2, 1).astype(old.dtype)
            if (
                flat.size == 1
            ):  # a copy of one line to one place, at half the time of a scatter on a GPU
                at = (0, 0, flat[0, 0] // size, flat[0, 0] % size, 0)
                is_kept = flat[0, 0] < old.shape[2] * size
                new = jnp.where(
                    is_kept, new[:, :, None], jax.lax.dynamic_slice(old, at, new[:, :, None].shape)
                )
                return constrain(
                    jax.lax.dynamic_update_slice(old, new, at), *BLOCK_AXES, name="cache"
                )
            old = jax.vmap(jax.vmap(line))(old, new, jnp.broadcast_to(flat[:, None], new.shape[:3]))
            return constrain(old, *BLOCK_AXES, name="cache")

        k, v = self.new
        memory = self.memory
        if self.policy is not None:
            memory = self.policy.stored(memory, k.reshape(rows, -1, *k.shape[2:]), flat // size)
        return dataclasses.replace(
            self,
            keys=put(keys, k),
            values=put(values, v),
            memory=memory,
            new=None,
            forest=None,
            view=None,
        )

    def clear(self, fresh: Bool[Array, "B N"]) -> "BlockCache":
        """Sets the values of newly owned blocks to zero, as unseen slots of a block that is read must be finite."""
        values: Any = self.values
        return dataclasses.replace(self, values=jnp.where(fresh[:, None, :, None, None], 0, values))

    def with_policy(self, policy: CachePolicy | None, readers: int) -> "BlockCache":
        """Returns the empty cache with what a step sees of it."""
        assert self.keys is not None
        memory = None if policy is None else policy.init(self.keys, readers)
        return dataclasses.replace(self, policy=policy, memory=memory)

    def for_pass(self, forest: Forest, view: View) -> "BlockCache":
        """Returns the cache with the tables that `attend` reads."""
        return dataclasses.replace(self, forest=forest, view=view, new=None)
