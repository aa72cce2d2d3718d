"""Beam search: the W likeliest continuations so far, moved on together.

The beams of a row write to one segment, and each sees of it the slots of its own tokens alone. So when beams die and
fork, masks are re-ordered and nothing of the cache is copied.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.decode import forest as tables
from jaxpar.decode._prompts import check_prompt
from jaxpar.decode.blocks import BlockCache
from jaxpar.decode.model import TokenModel
from jaxpar.decode.reader import BLOCK, Reading, ReadingOptions, begin, keep, look
from jaxpar.decode.trees import chain
from jaxpar.fields import AtLeast, Finite, check_fields, field
from jaxpar.types import PyTree, UsageError, concrete_values

__all__ = ["Beams", "Found", "beam_search"]

MOST_DIVISOR = 69.0
"""Logarithm of what scores are divided by, at most: float32 holds 1e30 with room for the rest."""


@dataclasses.dataclass(frozen=True)
class Beams:
    """What is searched for; static under jit.

    Attributes:
      width: Continuations that are kept, W.
      max_new_tokens: Most tokens to add.
      length_penalty: Exponent of the rank of continuations that ended, log-probability over
        (new tokens)^penalty, a stop token counted in; 0 ranks by log-probability alone, and more
        favours longer ones.
    """

    width: int = field(4, AtLeast(1))
    max_new_tokens: int = field(100, AtLeast(1))
    length_penalty: float = field(1.0, Finite())

    def __post_init__(self):
        """Rejects values out of range, and a penalty by which scores leave float32."""
        check_fields(self)
        if abs(self.length_penalty) * math.log(self.max_new_tokens) > MOST_DIVISOR:
            raise UsageError(
                f"length_penalty={self.length_penalty:g}: {self.max_new_tokens} new tokens to this "
                "power leave float32; expected one nearer to 0."
            )


class Found(NamedTuple):
    """The W best continuations of each prompt, the best first.

    Attributes:
      tokens: int32 [B, W, T + max_new_tokens]: prompt, continuation, zeros.
      lengths: int32 [B, W], a stop token counted in.
      log_probs: float32 [B, W], of the continuation.
      scores: float32 [B, W], what they are ranked by; -inf where fewer were found.
    """

    tokens: Int[Array, "B W S"]
    lengths: Int[Array, "B W"]
    log_probs: Float[Array, "B W"]
    scores: Float[Array, "B W"]


@flax.struct.dataclass
class _State:
    """What the loop carries: beams that go on, and the best that ended."""

    count: Array  # [] tokens that were added
    text: Array  # [B, W, S]
    log_probs: Array  # [B, W]
    ended: Found
    reading: Reading


def beam_search(
    params: PyTree,
    prompt: Int[Array, "B T"],
    model: TokenModel,
    beams: Beams = Beams(),
    *,
    prompt_lengths: Int[Array, " B"] | None = None,
    stop_tokens: Sequence[int] = (),
    block: int = BLOCK,
) -> Found:
    """Returns the W best continuations of each prompt; pure, so jit it with `model`, `beams` and `block` static.

    Each step keeps, of all beams and all tokens after them, the W (1 + S) most probable, S being the
    number of stop tokens. So W are left even where every beam would stop by each of them. Those
    that end compete by score with the W best that ended before, and of the others the W most
    probable go on (Wu et al. 2016, arXiv:1609.08144, section 7). A row's search ends when no beam
    could still enter the W best at any length up to the most, were its remaining tokens certain.

    Scores equal those of transformers' `generate(num_beams=W, length_penalty=...)` since 4.39;
    earlier versions counted the prompt in. Two things differ there. A text that ends counts only
    among the W most probable candidates of its step. With the default `early_stopping=False` the
    search ends by the length so far, so that a positive penalty may miss longer texts with better
    scores; `early_stopping="never"` has the bound of this search where the penalty is positive.

    Args:
      params: The model's.
      prompt: Tokens, left-aligned.
      model: What is asked.
      beams: Width, length and penalty.
      prompt_lengths: At least 1 each; by default T.
      stop_tokens: Tokens that end a continuation.
      block: Slots of a block of the cache.

    Raises:
      UsageError: If the prompt has no tokens or is too long for the model's positions, or lengths,
        tokens (where values are known) or stop tokens are outside what there is.
    """
    rows, start = prompt.shape
    width, room = beams.width, beams.max_new_tokens
    if start < 1:
        raise UsageError("the prompt has no tokens; give at least one.")
    if model.max_positions is not None and start + room > model.max_positions:
        raise UsageError(
            f"{start} prompt and {room} new tokens are over the model's {model.max_positions} positions."
        )
    check_prompt(prompt, prompt_lengths, model.vocab_size)
    stops = _stops(stop_tokens, model.vocab_size)
    lengths = (
        jnp.full((rows,), start, jnp.int32)
        if prompt_lengths is None
        else jnp.asarray(prompt_lengths, jnp.int32)
    )
    prompt = jnp.where(
        jnp.arange(start)[None] < lengths[:, None], jnp.asarray(prompt, jnp.int32), 0
    )
    # The beams fork from one reader, who has read the prompt, so that it has room for all of them.
    options = ReadingOptions(room=width * room, block=block)
    logits, reading = begin(model, params, prompt, lengths, options)
    params, reading = model.held(params), _shared(reading, width)
    text = jnp.repeat(jnp.pad(prompt, ((0, 0), (0, room)))[:, None], width, axis=1)
    none = jnp.full((rows, width), -jnp.inf, jnp.float32)
    ended = Found(text, jnp.repeat(lengths[:, None], width, axis=1), none, none)
    # All beams are the prompt: but one, they are impossible, so that the first step finds W different ones.
    state = _State(jnp.int32(0), text, none.at[:, 0].set(0.0), ended, reading)

    def select(state: _State, logits) -> _State:
        return _select(state, logits.reshape(rows, width, -1), lengths, beams, stops)

    def step(state: _State) -> _State:
        last = (lengths + state.count - 1)[:, None, None]
        tokens = jnp.take_along_axis(state.text, last, 2).reshape(-1, 1)
        logits, reading = look(model, params, state.reading, tokens, chain(0))
        reading = keep(
            model,
            params,
            reading,
            tokens,
            jnp.zeros_like(tokens),
            jnp.ones((rows * width,), jnp.int32),
        )
        return select(dataclasses.replace(state, reading=reading), logits)

    def goes_on(state: _State):
        best = state.log_probs.max(
            1
        )  # the best that could come of it: nothing more is lost, at the kinder length
        kindest = jnp.maximum(
            best / (state.count + 1.0) ** beams.length_penalty,
            best / float(room) ** beams.length_penalty,
        )
        return (state.count < room) & (kindest > state.ended.scores.min(1)).any()

    state = select(state, jnp.repeat(logits, width, axis=0))
    state = jax.lax.while_loop(goes_on, step, state)
    # What reached the end of its room competes with what ended.
    count = jnp.full((rows, width), state.count)
    scores = jnp.where(
        state.count >= room, state.log_probs / float(room) ** beams.length_penalty, -jnp.inf
    )
    whole = Found(state.text, lengths[:, None] + count, state.log_probs, scores)
    return _best(state.ended, whole, width)


def _stops(stop_tokens: Sequence[int], vocab_size: int) -> Array:
    """Returns tokens that end a text, int32 [S]. Rejects all but symbols and -1 for none."""
    known = concrete_values(stop_tokens)
    if known is None:
        return jnp.asarray(stop_tokens, jnp.int32)
    tokens = {int(token) for values in known for token in np.ravel(values)}
    for token in sorted(tokens):
        if not -1 <= token < vocab_size:
            raise UsageError(
                f"stop token {token}; legal are 0 to {vocab_size - 1}, and -1 for none."
            )
    return jnp.asarray(sorted(tokens - {-1}), jnp.int32)


def _select(state: _State, logits: Array, lengths: Array, beams: Beams, stops: Array) -> _State:
    """Moves each row on to the W likeliest beams, and takes in what ended."""
    rows, width, vocab = logits.shape
    law = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    joint = (state.log_probs[..., None] + law).reshape(rows, -1)
    likely, index = jax.lax.top_k(joint, min(width * (1 + len(stops)), joint.shape[1]))
    parent, token = index // vocab, (index % vocab).astype(jnp.int32)
    text = jnp.take_along_axis(state.text, parent[..., None], 1)
    place = (lengths + state.count)[:, None]
    text = text.at[jnp.arange(rows)[:, None], jnp.arange(text.shape[1])[None], place].set(token)
    stopped, count = jnp.isin(token, stops), state.count + 1
    scores = jnp.where(
        stopped, likely / count.astype(likely.dtype) ** beams.length_penalty, -jnp.inf
    )
    new = Found(
        text,
        jnp.broadcast_to(place + 1, scores.shape),
        likely.astype(jnp.float32),
        scores.astype(jnp.float32),
    )
    log_probs, alive = jax.lax.top_k(jnp.where(stopped, -jnp.inf, likely), width)
    parent = jnp.take_along_axis(parent, alive, 1)
    return _State(
        count,
        jnp.take_along_axis(text, alive[..., None], 1),
        log_probs.astype(jnp.float32),
        _best(state.ended, new, width),
        _reordered(state.reading, parent),
    )


def _best(one: Found, other: Found, width: int) -> Found:
    """The W best of both; of equal ones those of the first."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), one, other)
    scores, index = jax.lax.top_k(both.scores, width)

    def picked(x):
        return jnp.take_along_axis(x, index[(...,) + (None,) * (x.ndim - 2)], 1)

    return Found(picked(both.tokens), picked(both.lengths), picked(both.log_probs), scores)


def _shared(reading: Reading, width: int) -> Reading:
    """The reading of one reader as that of W readers, who see what is there and go on in the same segment."""
    view, forest = reading.view, reading.forest

    def each(x):
        return jnp.repeat(x, width, axis=1)

    view = tables.View(each(view.seen), each(view.offset), each(view.write), each(view.position))
    slots = jnp.repeat((forest.place >= 0)[:, None], width, axis=1)
    layers = tuple(
        layer
        if isinstance(layer, BlockCache)
        else jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), layer)
        for layer in reading.layers
    )
    return Reading(forest, dataclasses.replace(view, slots=slots), layers)


def _reordered(reading: Reading, parent: Array) -> Reading:
    """The reading of beams that go on from these."""
    rows, width = parent.shape
    assert reading.view.slots is not None
    slots = jnp.take_along_axis(reading.view.slots, parent[..., None, None], 1)
    flat = (jnp.arange(rows)[:, None] * width + parent).reshape(-1)
    layers = tuple(
        layer if isinstance(layer, BlockCache) else jax.tree.map(lambda x: x[flat], layer)
        for layer in reading.layers
    )
    return Reading(reading.forest, dataclasses.replace(reading.view, slots=slots), layers)
