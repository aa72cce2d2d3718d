"""Which slots of a cache hold which tokens, and which of them a reader sees: a forest of segments, and views of it.

A row of the batch is one problem, with R readers that may share what they read: the samples of a prompt, the beams of a
search, the threads of a thought. Rows never share. A row has N blocks of b slots; a block belongs to one segment, and a
segment is a run of tokens that readers see a first part of. So a prompt that many readers share is stored and read
once, and a fork copies nothing.

Places are counted within a segment, positions by a reader: for reader r a token at place p of segment m stands at
position `offset[r, m] + p`. Keys lie in the cache rotated to their places, and a query is rotated to its own position
less the offset, so that one key serves readers who count differently.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxpar.types import UsageError, concrete_values

__all__ = [
    "Forest",
    "View",
    "arranged_view",
    "empty",
    "fork",
    "joined_view",
    "lineage_view",
    "release",
    "reserve",
    "spawn",
    "write",
]


@flax.struct.dataclass
class Forest:
    """M segments in N blocks of b slots, of each of B rows.

    Attributes:
      owner: int32 [B, N], the segment that a block belongs to, -1 of a free one.
      order: int32 [B, N], which of its segment's blocks it is.
      place: int32 [B, N, b], the place in its segment of the token in a slot, -1 where there is none.
      length: int32 [B, M], how many slots of a segment are taken.
      parent: int32 [B, M], the segment that a segment goes on from, -1 of a root.
      cut: int32 [B, M], after how many of the parent's tokens it does.
      live: bool [B, M], which segments are in use.
      refused: int32 [B], how many requests found no room: tokens, blocks, segments, and releases below a child. What
        was refused was not done; a caller whose sizes may not suffice must look.
    """

    owner: Array
    order: Array
    place: Array
    length: Array
    parent: Array
    cut: Array
    live: Array
    refused: Array

    @property
    def num_blocks(self) -> int:
        """N."""
        return self.owner.shape[1]

    @property
    def num_segments(self) -> int:
        """M."""
        return self.length.shape[1]

    @property
    def block(self) -> int:
        """Slots of a block, b."""
        return self.place.shape[2]


@flax.struct.dataclass
class View:
    """What R readers of each row see, and where they write.

    Attributes:
      seen: int32 [B, R, M], how many places of each segment a reader sees, from the first on.
      offset: int32 [B, R, M], position of each segment's first token, as the reader counts.
      write: int32 [B, R], the segment that a reader's tokens go to, -1 for nowhere.
      position: int32 [B, R], position of the reader's next token.
      slots: bool [B, R, N, b], which slots a reader may see at most; None for all. For readers that share the segment
        they write to, as beams do, and for caches that drop tokens.
    """

    seen: Array
    offset: Array
    write: Array
    position: Array
    slots: Array | None = None


def empty(rows: int, segments: int, blocks: int, block: int) -> Forest:
    """Returns a forest of free blocks: `blocks` of `block` slots and at most `segments` segments a row."""
    sizes = {"rows": rows, "segments": segments, "blocks": blocks, "block": block}
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name}={size} of a forest must be at least 1.")

    def full(value, *shape):
        return jnp.full((rows, *shape), value, jnp.int32)

    none = jnp.zeros((rows, segments), bool)
    slots = full(-1, blocks, block)
    return Forest(
        full(-1, blocks),
        full(0, blocks),
        slots,
        full(0, segments),
        full(-1, segments),
        full(0, segments),
        none,
        full(0),
    )


def spawn(forest: Forest, count: int = 1) -> tuple[Forest, Int[Array, "B count"]]:
    """Starts `count` new roots in each row; returns their numbers, -1 where all M segments are in use."""
    nowhere = jnp.full((forest.length.shape[0],), -1, jnp.int32)
    return _start(forest, nowhere, jnp.zeros_like(nowhere), nowhere < 0, count)


def fork(
    forest: Forest, segment: Int[Array, " B"], count: int
) -> tuple[Forest, Int[Array, "B count"]]:
    """Starts `count` children at the present end of a segment; they see it and its ancestors, and nothing is copied.

    Returns their numbers, -1 where all M segments are in use or the parent is not, or is -1, of which nothing is asked.
    A child sees what the parent holds now, none of what the parent gets at its end later.
    """
    cut = jnp.take_along_axis(_places(forest), jnp.maximum(segment, 0)[:, None], 1)[:, 0]
    return _start(forest, segment, cut, segment >= 0, count)


def _start(
    forest: Forest, parent: jax.Array, cut: jax.Array, asked: jax.Array, count: int
) -> tuple[Forest, jax.Array]:
    def one(live, known):
        first = jnp.argsort(live, stable=True)[:count].astype(jnp.int32)
        return jnp.where(~live[first] & known, first, -1)

    if not 1 <= count <= forest.num_segments:
        raise UsageError(
            f"{count} new segments of a forest of {forest.num_segments}; legal are 1 to that."
        )
    known = (parent < 0) | jnp.take_along_axis(forest.live, jnp.maximum(parent, 0)[:, None], 1)[
        :, 0
    ]
    new = jax.vmap(one)(forest.live, known & asked)
    rows, into = (
        _rows(new),
        jnp.where(new < 0, forest.num_segments, new),
    )  # what has no number is dropped

    def put(array, value):
        return array.at[rows, into].set(jnp.broadcast_to(value, new.shape), mode="drop")

    return dataclasses.replace(
        forest,
        live=put(forest.live, True),
        parent=put(forest.parent, parent[:, None]),
        cut=put(forest.cut, cut[:, None]),
        refused=forest.refused + jnp.where(asked, (new < 0).sum(1, dtype=jnp.int32), 0),
    ), new


def reserve(
    forest: Forest,
    segment: Int[Array, "B R"],
    slots: Int[Array, "B R"],
    first: Int[Array | np.ndarray, " N"] | None = None,
) -> tuple[Forest, Bool[Array, "B N"]]:
    """Gives each named segment blocks enough for `slots` slots in all; each at most once in a row, -1 for none.

    Segments are served in turn, from the free block with the lowest number on or, of all blocks, in the order `first`:
    where blocks lie on several devices it says whose are taken (`jaxpar.nn.attention.context.blocks_in_turn`).

    Returns the forest, and which blocks are newly owned: their values in the cache must be cleared
    (`jaxpar.decode.blocks.BlockCache.clear`), since a weight of zero times what was never written could be NaN.
    """
    size = forest.block
    if first is not None and (known := concrete_values(first)) is not None:
        blocks = np.asarray(known[0]).tolist()  # also of a list
        if sorted(blocks) != list(range(forest.num_blocks)):
            raise UsageError(f"first={blocks} must name each of {forest.num_blocks} blocks once.")

    def one(owner, order, segment, slots):
        owned = (owner[:, None] == segment[None]).sum(0)
        need = jnp.where(segment >= 0, jnp.maximum(-(-slots // size) - owned, 0), 0)
        end = jnp.cumsum(need)
        begin = end - need
        free = owner < 0
        rank = (
            jnp.cumsum(free if first is None else free[first]) - 1
        )  # of a free block among the free ones
        rank = (rank if first is None else jnp.zeros_like(rank).at[first].set(rank))[:, None]
        takes = (rank >= begin[None]) & (rank < end[None]) & free[:, None]
        fresh, who = takes.any(1), takes.argmax(1)
        return (
            jnp.where(fresh, segment[who], owner),
            jnp.where(fresh, owned[who] + rank[:, 0] - begin[who], order),
            fresh,
            jnp.maximum(end[-1] - free.sum(), 0),
        )

    owner, order, fresh, short = jax.vmap(one)(forest.owner, forest.order, segment, slots)
    ints = (x.astype(jnp.int32) for x in (owner, order, forest.refused + short))
    return dataclasses.replace(
        forest, **dict(zip(("owner", "order", "refused"), ints, strict=True))
    ), fresh


def release(forest: Forest, segment: Int[Array, "B R"]) -> Forest:
    """Frees segments and their blocks; -1 for none. One that a living segment goes on from stays, and is counted.

    A parent and all its children may be named together.
    """
    rows, into = _rows(segment), jnp.where(segment < 0, forest.num_segments, segment)
    asked = jnp.zeros_like(forest.live).at[rows, into].set(True, mode="drop")

    def one(asked, parent, live):
        def keep(_, going):  # what stays keeps its parent, and that one its own
            held = (
                jnp.zeros_like(live)
                .at[jnp.where(parent < 0, len(live), parent)]
                .max(live & ~going, mode="drop")
            )
            return going & ~held

        return jax.lax.fori_loop(0, len(asked), keep, asked)

    going = jax.vmap(one)(asked, forest.parent, forest.live)
    freed = (forest.owner >= 0) & jnp.take_along_axis(going, jnp.maximum(forest.owner, 0), 1)
    return dataclasses.replace(
        forest,
        live=forest.live & ~going,
        length=jnp.where(going, 0, forest.length),
        owner=jnp.where(freed, -1, forest.owner),
        place=jnp.where(freed[..., None], -1, forest.place),
        refused=forest.refused + (asked & ~going).sum(1, dtype=jnp.int32),
    )


def write(
    forest: Forest, view: View, count: Int[Array, "B R"], length: int
) -> tuple[Forest, View, Int[Array, "B R T"]]:
    """Takes slots for the first `count` of T = `length` more tokens of each reader, at the end of what it writes to.

    Readers of one segment take slots in their order, and see each other's tokens at the places that they have reached
    themselves, unless `slots` says otherwise. Returns the forest, what the readers see with their new tokens, and the
    slot of each token, n * b + place in block, N * b for what is not kept or has no room (counted in `refused`). Slots
    must have been reserved.
    """
    size, none = forest.block, forest.num_blocks * forest.block

    def one(forest: Forest, view: View, count):
        segment = view.write
        count = jnp.where(segment >= 0, jnp.minimum(count, length), 0).astype(jnp.int32)
        earlier = jnp.tri(len(segment), k=-1, dtype=bool)
        before = (earlier & (segment[:, None] == segment[None])) * count[None]
        start = forest.length[segment] + before.sum(1, dtype=jnp.int32)
        index = start[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        kept = jnp.arange(length, dtype=jnp.int32)[None] < count[:, None]
        mine = (forest.owner[None] == segment[:, None])[:, None] & (
            forest.order[None, None] == (index // size)[..., None]
        )
        found = mine.any(-1) & kept
        slot = jnp.where(found, mine.argmax(-1) * size + index % size, none).astype(jnp.int32)
        own = jnp.arange(len(segment)), segment
        begin = view.position - view.offset[own]
        places = begin[:, None] + jnp.arange(length, dtype=jnp.int32)[None]
        put = forest.place.reshape(-1).at[slot].set(places, mode="drop").reshape(forest.place.shape)
        added = found.sum(1, dtype=jnp.int32)
        seen = view.seen.at[own].max(jnp.where(added > 0, begin + added, 0))
        slots = view.slots
        if slots is not None:
            flat = slots.reshape(len(segment), -1)
            slots = (
                flat.at[jnp.arange(len(segment))[:, None], slot]
                .set(True, mode="drop")
                .reshape(slots.shape)
            )
        after = dataclasses.replace(
            forest,
            place=put,
            length=forest.length.at[segment].add(added),
            refused=forest.refused + (kept & ~found).sum(dtype=jnp.int32),
        )
        return (
            after,
            dataclasses.replace(view, seen=seen, position=view.position + added, slots=slots),
            slot,
        )

    return jax.vmap(one)(forest, view, count)


def lineage_view(forest: Forest, segment: Int[Array, "B R"]) -> View:
    """Returns the view of readers at the ends of segments: each sees its segment and what that goes on from.

    All count positions from the root's first token, so a token has one position whoever reads it.
    """

    def one(length, parent, cut, segment):
        def climb(_, carry):
            seen, at, sees = carry
            known, into = at >= 0, jnp.maximum(at, 0)
            seen = seen.at[into].max(jnp.where(known, sees, 0))
            sees = jnp.where(known, cut[into], 0)
            return seen, jnp.where(known, parent[into], -1), sees

        zero = jnp.zeros_like(length)
        seen, _, _ = jax.lax.fori_loop(0, len(length), climb, (zero, segment, length[segment]))

        def deeper(_, offset):
            return jnp.where(parent >= 0, offset[parent] + cut, 0)

        return seen, jax.lax.fori_loop(0, len(length), deeper, zero)

    each = jax.vmap(jax.vmap(one, (None, None, None, 0)))
    seen, offset = each(_places(forest), forest.parent, forest.cut, segment)
    own = jnp.maximum(segment, 0)[..., None]
    position = (jnp.take_along_axis(offset, own, 2) + jnp.take_along_axis(seen, own, 2))[..., 0]
    return View(seen, offset, segment, jnp.where(segment < 0, 0, position))


def arranged_view(forest: Forest, segments: Int[Array, "B R J"], write: Int[Array, "B R"]) -> View:
    """Returns the view of readers that see whole segments one after the other, each reader in an order of its own.

    A segment that is -1 is left out. What a reader writes to comes last: where it is among the segments it must be
    their last, and positions go on from its end; where it is not it must be empty. Learned positions do not allow it,
    unless all readers agree.

    Raises:
      UsageError: If a reader writes to what does not come last, or names a segment twice. Under jit, where values
        cannot be told, the first writes to nothing, and the other sees the segment at the later of its places.
    """
    places = _places(forest)
    _refuse_twice(segments)

    def one(places, segments, write):
        known, into = segments >= 0, jnp.maximum(segments, 0)
        sizes = jnp.where(known, places[into], 0)
        end = jnp.cumsum(sizes)
        seen = jnp.zeros_like(places).at[into].max(sizes)
        offset = jnp.zeros_like(places).at[into].max(jnp.where(known, end - sizes, 0))
        fresh = ~(known & (segments == write)).any()
        into = jnp.where(write < 0, len(offset), write)  # -1 would be the last segment
        return (
            seen,
            offset.at[into].set(jnp.where(fresh, end[-1], offset[write]), mode="drop"),
            end[-1],
        )

    seen, offset, position = jax.vmap(jax.vmap(one, (None, 0, 0)))(places, segments, write)
    return _at_the_end(View(seen, offset, write, position), places)


def joined_view(forest: Forest, segments: Int[Array, "B J"], write: Int[Array, " B"]) -> View:
    """Returns the view of one reader that sees several segments with all they go on from, after the longest of them.

    The segments keep the positions at which they were written (siblings stand at the same ones), and the reader writes
    to `write` from the largest end on: an empty root, or the longest of them (Multiverse, arXiv:2506.09991). Nothing is
    read again.

    Raises:
      UsageError: If it is another; under jit as in `arranged_view`.
    """
    each, places = lineage_view(forest, segments), _places(forest)
    position = each.position.max(1)
    seen, offset = (
        each.seen.max(1),
        each.offset[:, 0],
    )  # that of a lineage is one for all who read it
    rows = jnp.arange(len(write))
    into = jnp.where((write < 0) | (places[rows, write] > 0), forest.num_segments, write)
    offset = offset.at[rows, into].set(position, mode="drop")
    view = View(seen[:, None], offset[:, None], write[:, None], position[:, None])
    return _at_the_end(view, places)


def _at_the_end(view: View, places: jax.Array) -> View:
    """Refuses readers who do not see all that they write to, and stand at its end: a place would be taken twice."""
    own = jnp.maximum(view.write, 0)
    seen, begin = (
        jnp.take_along_axis(x, own[..., None], 2)[..., 0] for x in (view.seen, view.offset)
    )
    held = jnp.take_along_axis(places, own, 1)
    wrong = (view.write >= 0) & ((seen != held) | (begin + held != view.position))
    known = concrete_values(wrong, view.write)
    if known is not None and known[0].any():
        row, reader = np.argwhere(known[0])[0]
        raise UsageError(
            f"reader {reader} of row {row} writes to segment {known[1][row, reader]}, which holds "
            "tokens and is not the last one that it sees; name an empty one, or see it last."
        )
    return dataclasses.replace(view, write=jnp.where(wrong, -1, view.write))


def _refuse_twice(segments: jax.Array) -> None:
    if (known := concrete_values(segments)) is None:
        return
    numbers = np.asarray(known[0])
    is_same = (numbers[..., None] == numbers[..., None, :]) & (numbers >= 0)[..., None]
    twice = is_same.sum(-1) > 1
    if twice.any():
        row, reader, index = np.argwhere(twice)[0]
        segment = numbers[row, reader, index]
        where = f"reader {reader} of row {row}"
        raise UsageError(f"{where} sees segment {segment} twice; name it once.")


def _places(forest: Forest) -> jax.Array:
    """Returns of each segment one more than the last place that a token of it has, int32 [B, M]."""
    ends = forest.place.max(-1) + 1  # 0 of a free block, whichever segment that is then counted to
    return jnp.zeros_like(forest.length).at[_rows(ends), forest.owner].max(ends)


def _rows(index: jax.Array) -> jax.Array:
    return jnp.arange(index.shape[0])[:, None]
