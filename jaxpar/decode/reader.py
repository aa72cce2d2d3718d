"""A model's reading of texts: its cache and who sees what of it, moved on by passes whose tokens may be taken back."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.decode import forest as tables
from jaxpar.decode.blocks import BlockCache
from jaxpar.decode.forest import Forest, View
from jaxpar.decode.model import TokenModel
from jaxpar.decode.policies import CachePolicy
from jaxpar.decode.trees import Tree
from jaxpar.mesh import mesh_axes, num_shares
from jaxpar.nn.attention import LinearCache, merge_parts
from jaxpar.nn.stack import PseudoTokens, StackCache
from jaxpar.scan.monoid import LogSumExp
from jaxpar.types import PyTree

__all__ = ["BLOCK", "Reading", "ReadingOptions", "begin", "keep", "look"]

BLOCK = 64
"""Slots of a block: few enough that little of the last one is empty, enough for products of matrices."""


@flax.struct.dataclass
class Reading:
    """What a model has read for B rows of R readers.

    Attributes:
      forest: Which slots hold which tokens.
      view: What each reader sees, and its next position.
      layers: Of each layer a `BlockCache`, or the state [B R, ...] of a recurrence.
    """

    forest: Forest
    view: View
    layers: tuple[PyTree, ...]


class ReadingOptions(NamedTuple):
    """Readers of a prompt, and the cache of attention that they share.

    Attributes:
      room: Number of tokens that each reader can add.
      readers: R. Where there is one, it continues the prompt's own segment; several fork from it.
      block: Slots of a block.
      policy: Policy of what attention sees of the cache; None for all.
      merge: Function that adds up partial states of blocks. Where mesh axes split "slots", each
        device holds a part of the blocks, dealt out one after the other, so that all hold as much
        of a row however long it is.
    """

    room: int
    readers: int = 1
    block: int = BLOCK
    policy: CachePolicy | None = None
    merge: Callable[[LogSumExp], LogSumExp] = merge_parts


def begin(
    model: TokenModel,
    params: PyTree,
    prompt: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    options: ReadingOptions,
) -> tuple[Float[Array, "B V"], Reading]:
    """Reads prompts, each once, for R readers that go on from it.

    Args:
      model: What reads; static.
      params: Its parameters.
      prompt: Tokens, left-aligned.
      lengths: How many of each row count, at least 1.
      options: Readers, their room, and the cache; static.

    Returns:
      Logits after each prompt, and the reading.
    """
    rows, length = prompt.shape
    room = options.room
    readers = options.readers
    block = options.block
    alone = readers == 1
    needs = [length + room if alone else length, *[room] * (0 if alone else readers)]
    shares = num_shares(*mesh_axes("slots"))
    blocks = -(-sum(-(-need // block) for need in needs) // shares) * shares
    dealt = np.arange(blocks).reshape(shares, -1).T.reshape(-1) if shares > 1 else None
    forest = tables.empty(rows, len(needs), blocks, block)
    forest, root = tables.spawn(forest)
    forest, _ = tables.reserve(forest, root, jnp.full((rows, 1), needs[0], jnp.int32), dealt)
    shapes = jax.eval_shape(lambda: model.init_cache(rows, shares)).layers
    start = model.init_cache(rows, shares)  # only what is no attention's is used
    hollow = tuple(
        BlockCache(None, None) if isinstance(shape, LinearCache) else state
        for shape, state in zip(shapes, start.layers, strict=True)
    )
    logits, cache = model.prefill(
        params, prompt, lengths, dataclasses.replace(start, layers=hollow)
    )
    forest, view, slots = tables.write(
        forest, tables.lineage_view(forest, root), lengths[:, None], length
    )

    def settled(shape, layer):
        if not isinstance(layer, BlockCache):
            return jax.tree.map(lambda x: jnp.repeat(x, readers, axis=0), layer)
        empty = BlockCache.like(shape, blocks, block).with_policy(options.policy, readers)
        return dataclasses.replace(empty, new=layer.new, merge=options.merge).store(slots)

    layers = tuple(settled(*each) for each in zip(shapes, cache.layers, strict=True))
    if not alone:
        forest, children = tables.fork(forest, root[:, 0], readers)
        forest, _ = tables.reserve(
            forest, children, jnp.full((rows, readers), room, jnp.int32), dealt
        )
        view = tables.lineage_view(forest, children)
    return logits, Reading(forest, view, layers)


def look(
    model: TokenModel,
    params: PyTree,
    reading: Reading,
    tokens: Int[Array, "B*R T"],
    tree: Tree,
    pseudo: PseudoTokens | None = None,
) -> tuple[Float[Array, "B*R T V"], Reading]:
    """Runs a window of tokens, none of which is kept yet; its last ones may be pseudo tokens of the draft's.

    Returns the logits at each node, and the reading with what the pass made beside it: for `keep`.
    """
    start = reading.view.position.reshape(-1, 1)
    positions = start + jnp.asarray(tree.depth, jnp.int32)[None]
    is_chain = tree.size == tree.max_depth + 1
    visible = (
        None
        if is_chain
        else jnp.broadcast_to(tree.ancestors[None], (len(tokens), tree.size, tree.size))
    )
    layers = tuple(
        layer.for_pass(reading.forest, reading.view) if isinstance(layer, BlockCache) else layer
        for layer in reading.layers
    )
    cache = StackCache(layers, start[:, 0], jnp.zeros_like(start[:, 0]))
    logits, cache = model.extend(
        params, tokens, cache, positions=positions, visible=visible, pseudo=pseudo
    )
    # The state of a recurrence after all T tokens is that after those which are kept only where there is one.
    layers = tuple(
        new if isinstance(new, BlockCache) or tree.size == 1 else old
        for new, old in zip(cache.layers, reading.layers, strict=True)
    )
    logits, layers = _writes_after_reads(logits, layers)
    return logits, dataclasses.replace(reading, layers=layers)


def _writes_after_reads(logits: Array, layers: tuple[PyTree, ...]) -> tuple[Array, tuple]:
    """Makes new keys and values wait for the logits, and the write into the cache for them.

    Without that order, which a draft's own steps do not imply, XLA would copy the cache.
    """
    new = [layer.new for layer in layers if isinstance(layer, BlockCache)]
    if jax.__version_info__ >= (0, 11):
        logits, new = jax.lax.optimization_barrier((logits, new))
    else:
        # XLA drops barriers there before it looks for copies, but cannot know that an index is never
        # negative.
        never = jnp.argmax(logits) < 0
        new = jax.tree.map(lambda x: jnp.where(never, 0, x), new)

    waiting = iter(new)
    ordered = []
    for layer in layers:
        if isinstance(layer, BlockCache):
            layer = dataclasses.replace(layer, new=next(waiting))
        ordered.append(layer)
    return logits, tuple(ordered)


def keep(
    model: TokenModel,
    params: PyTree,
    reading: Reading,
    tokens: Int[Array, "B*R T"],
    path: Int[Array, "B*R T"],
    count: Int[Array, " B*R"],
) -> Reading:
    """Keeps `count` tokens of the window that `look` ran: the nodes on `path`, in order.

    Attention's keys and values are written where they belong, and no others. A recurrence runs the window once more,
    with `valid` as many tokens as are kept (its trees are chains).
    """
    shape, length = reading.view.write.shape, tokens.shape[1]
    forest, view, ranked = tables.write(reading.forest, reading.view, count.reshape(shape), length)
    none = forest.num_blocks * forest.block
    ranked, node = ranked.reshape(-1, length), jnp.where(path < 0, length, path)
    slots = (
        jnp.full(ranked.shape, none)
        .at[jnp.arange(len(path))[:, None], node]
        .set(ranked, mode="drop")
    )
    slots = slots.reshape(*shape, length)
    layers = reading.layers
    if length > 1 and not all(isinstance(layer, BlockCache) for layer in layers):
        layers = _again(model, params, reading, tokens, count)
    layers = tuple(
        layer.store(slots) if isinstance(layer, BlockCache) else layer for layer in layers
    )
    return Reading(forest, view, layers)


def _again(
    model: TokenModel, params: PyTree, reading: Reading, tokens: Array, count: Array
) -> tuple[PyTree, ...]:
    """The layers after the first `count` tokens of the window."""
    start = reading.view.position.reshape(-1, 1)
    positions = start + jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    layers = tuple(
        layer.for_pass(reading.forest, reading.view) if isinstance(layer, BlockCache) else layer
        for layer in reading.layers
    )
    cache = StackCache(layers, start[:, 0], jnp.zeros_like(start[:, 0]))
    return model.extend(params, tokens, cache, positions=positions, valid=count)[1].layers
