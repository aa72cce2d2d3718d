"""Tokens -> residual stream -> logits."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar._older_fields import newer_arguments
from jaxpar.lm.config import LMConfig
from jaxpar.mesh import constrain, gather, local, mesh_axes
from jaxpar.nn.attention import capped
from jaxpar.nn.auxiliary import Aux
from jaxpar.nn.block import dropout
from jaxpar.nn.linear import product_in_parts
from jaxpar.nn.mixer import TRAINING, TokenInfo
from jaxpar.nn.stack import PseudoTokens
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = [
    "apply",
    "embed",
    "embed_for_training",
    "embed_positions",
    "embed_tokens",
    "head",
    "hidden",
    "logits",
    "placed",
]

OLDER = {name: f"info.{name}" for name in ("positions", "segments", "places", "weights", "visible")}
"""Arguments of `apply` that are fields of another argument today."""


def head(params: PyTree) -> Float[Array, "V D"]:
    """Returns the output head, which is the embedding itself when tied."""
    return params.get("head", params["embedding"])


def embed_tokens(
    table: Float[Array, "V D"], tokens: Int[Array, "B T"], axes: tuple = TRAINING.inside
) -> Float[Array, "B T D"]:
    """Looks tokens up in a table split over the vocabulary; one sum over its parts, no gather of the table.

    `axes` are those of the result.
    """
    parts = mesh_axes("vocab")

    def lookup(table, tokens):
        if not parts:
            return table[tokens]
        index = tokens - jax.lax.axis_index(parts) * table.shape[0]
        mine = (index >= 0) & (index < table.shape[0])
        rows = table[jnp.where(mine, index, 0)]
        return jax.lax.psum(jnp.where(mine[..., None], rows, 0), parts)

    table = gather(
        table, ("vocab", "embed"), ("vocab", None), ("vocab", "embed_grad"), "the embedding"
    )
    return local(lookup, [("vocab", None), axes[:2]], axes)(table, tokens)


def embed_positions(
    table: Float[Array, "S D"], positions: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """Looks learned positions up, in a table that is gathered whole, as is its gradient: it is small."""
    return constrain(table, None, None)[positions]


def hidden(
    params: PyTree,
    tokens: Int[Array, "B T"],
    config: LMConfig,
    info: TokenInfo = TokenInfo(),
    *,
    dropout_key: PRNGKey | None = None,
    pseudo: PseudoTokens | None = None,
) -> tuple[Float[Array, "B T D"], Aux]:
    """Computes the last residual stream after the final norm, in `config.dtype`, and what the layers told.

    Args:
      params: As from `jaxpar.lm.init`.
      tokens: Symbols in [0, V).
      config: The model; static.
      info: Data of the tokens besides their ids; positions are by default places, or 0..T-1.
      dropout_key: Switches dropout on; consumed.
      pseudo: More tokens, of which positions and visible tell, too: see `jaxpar.nn.stack.PseudoTokens`.

    Raises:
      UsageError: If T is over the learned positions.
    """
    positions = info.places if info.positions is None else info.positions
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = embed_for_training(params, tokens, positions[:, : tokens.shape[1]], config, dropout_key)
    x, _, aux = config.stack().apply(
        params,
        x,
        info._replace(positions=positions),
        key=dropout_key,
        pseudo=placed(pseudo, params, positions, config),
    )
    return x, aux


def placed(
    pseudo: PseudoTokens | None, params: PyTree, positions: Int[Array, "B T"], config: LMConfig
) -> PseudoTokens | None:
    """Returns pseudo tokens with learned positions, which they get as tokens do: before the first layer."""
    if pseudo is None or pseudo.layer != 0 or config.positions != "learned":
        return pseudo
    places = embed_positions(params["positions"], positions[:, -pseudo.size :])
    return pseudo._replace(states=lambda x: pseudo.states(x) + places)


def embed_for_training(
    params: PyTree,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"] | None,
    config: LMConfig,
    dropout_key: PRNGKey | None = None,
) -> Float[Array, "B T D"]:
    """Computes what enters the first layer in training, in `config.dtype`; the arguments are those of `hidden`."""
    length = tokens.shape[1]
    if config.positions == "learned" and length > config.max_seq_len:
        raise UsageError(
            f"sequences of {length} tokens are over model.max_seq_len={config.max_seq_len}."
        )
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    x = embed(params, tokens, positions, config)
    # Folded by number, so that layer l drops the same things scanned and unrolled.
    if dropout_key is not None:
        x = dropout(x, config.dropout, jax.random.fold_in(dropout_key, config.num_layers))
    return constrain(x.astype(config.dtype), *TRAINING.outside)


def embed(
    params: PyTree,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    config: LMConfig,
    axes: tuple = TRAINING.inside,
) -> Float[Array, "B T D"]:
    """Looks tokens and learned positions up: what enters the first layer. `axes` are those of the result."""
    x = embed_tokens(params["embedding"], tokens, axes)
    if config.embedding.scale:  # rounded to the dtype of activations first, as Gemma was trained
        x = x * jnp.asarray(math.sqrt(config.embed_dim), config.dtype).astype(x.dtype)
    return (
        x + embed_positions(params["positions"], positions) if config.positions == "learned" else x
    )


def logits(params: PyTree, x: Float[Array, "B T D"], config: LMConfig) -> Float[Array, "B T V"]:
    """Multiplies the last residual stream by the head, in float32 at least, and caps what it makes."""
    weight = constrain(head(params).astype(x.dtype), "vocab", None)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return capped(product_in_parts(x, weight, wide), config.embedding.logit_cap)


def apply(
    params: PyTree,
    tokens: Int[Array, "B T"],
    config: LMConfig,
    info: TokenInfo = TokenInfo(),
    *,
    dropout_key: PRNGKey | None = None,
    pseudo: PseudoTokens | None = None,
    **older: Any,  # values of fields that were arguments, by `OLDER`
) -> Float[Array, "B T V"]:
    """Computes all logits, in float32 at least; for training take `jaxpar.lm.loss`, which never holds them.

    Memory: B T V float32.

    Args:
      params: As from `jaxpar.lm.init`.
      tokens: Symbols in [0, V).
      config: The model; static.
      info: Data of the tokens besides their ids; positions are by default places, or 0..T-1.
      dropout_key: Switches dropout on; consumed.
      pseudo: More tokens, for which `info` has positions and visible, too: see
        `jaxpar.nn.stack.PseudoTokens`.
      **older: Fields of `info`, by their names, which works until the first release.

    Raises:
      UsageError: If T is over the learned positions.
      TypeError: If a keyword is unknown.
    """
    info = newer_arguments("apply", OLDER, {"info": info}, older)["info"]
    x, _ = hidden(params, tokens, config, info, dropout_key=dropout_key, pseudo=pseudo)
    return logits(params, x, config)
