"""Penalties of tokens that a row has already: what is counted, and how logits change by it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

__all__ = ["Counts", "count_token", "count_tokens"]


class Counts(NamedTuple):
    """What penalties know of each row.

    Attributes:
      seen: Whether a token stands anywhere in the row, the prompt included: what the repetition penalty asks.
      drawn: How often a token was generated, the prompt left out: what presence and frequency penalties ask.
    """

    seen: Bool[Array, "... V"]
    drawn: Int[Array, "... V"]


def count_tokens(
    tokens: Int[Array, "B S"], starts: Int[Array, " B"], lengths: Int[Array, " B"], vocab_size: int
) -> Counts:
    """Counts whole rows; a token outside of the vocabulary counts nowhere.

    Args:
      tokens: Prompts and what was generated after them, left-aligned.
      starts: Where each row's first generated token stands: its prompt's length.
      lengths: Tokens of each row that count.
      vocab_size: V.
    """
    places = jnp.arange(tokens.shape[1])[None, :]
    inside, generated = places < lengths[:, None], places >= starts[:, None]
    # `mode="drop"` lets too large an index fall, but would count a negative one from the end.
    tokens = jnp.where(inside & (tokens >= 0), tokens, vocab_size)

    def one(tokens, generated):
        zeros = jnp.zeros((vocab_size,), jnp.int32)
        return zeros.at[tokens].add(1, mode="drop"), zeros.at[tokens].add(
            generated.astype(jnp.int32), mode="drop"
        )

    whole, drawn = jax.vmap(one)(tokens, generated)
    return Counts(whole > 0, drawn)


def count_token(
    counts: Counts, tokens: Int[Array, "*batch"], valid: Bool[Array, "*batch"] | None = None
) -> Counts:
    """Counts one more generated token of each row, but of those that are not valid. O(rows * V).

    Along the path of a draft tree every node's counts are so made from its parent's.
    """
    new = jax.nn.one_hot(tokens, counts.drawn.shape[-1], dtype=jnp.int32)
    new = new if valid is None else new * valid[..., None].astype(jnp.int32)
    return Counts(counts.seen | (new > 0), counts.drawn + new)


def penalise(
    logits: Float[Array, "*batch V"],
    counts: Counts,
    repetition: float,
    presence: float,
    frequency: float,
) -> Float[Array, "*batch V"]:
    """Returns logits made smaller for tokens that the row has.

    Args:
      logits: Of the next token.
      counts: Of the row before it.
      repetition: theta of CTRL (arXiv:1909.05858, section 4.1) as Hugging Face has it: a positive logit of a token
        seen is divided by it, a negative one multiplied. 1 changes nothing. It is no change of the law by a factor:
        adding a constant to all logits changes what it does.
      presence: OpenAI's: taken from the logit of a token that was generated at all.
      frequency: OpenAI's: taken from the logit once for each time that the token was generated.
    """
    if repetition != 1:
        logits = jnp.where(
            counts.seen, jnp.where(logits > 0, logits / repetition, logits * repetition), logits
        )
    if presence:
        logits = logits - presence * (counts.drawn > 0).astype(logits.dtype)
    if frequency:
        logits = logits - frequency * counts.drawn.astype(logits.dtype)
    return logits
