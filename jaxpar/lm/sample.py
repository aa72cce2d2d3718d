"""Sampling with a key-value cache or a recurrent state: prefill once, then the whole loop in one `while_loop`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.lm.blocks import SAMPLED, block, norm
from jaxpar.lm.config import LMConfig
from jaxpar.lm.model import embed, head, place
from jaxpar.lm.params import hold
from jaxpar.mesh import constrain
from jaxpar.nn.mixer import unit_axes
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["Sampling", "cache_axes", "empty_cache", "extend", "generate", "prefill"]

CACHE = ("layers", "batch", None, "kv_heads", "head_dim")


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is drawn.

    Attributes:
      max_new_tokens: Most tokens to add.
      temperature: Logits are divided by it; 0 takes the likeliest token.
      top_k: Only the k likeliest tokens may be drawn; 0 means all.
      top_p: Only the smallest set of likeliest tokens whose probability reaches p may be drawn.
      stop_token: A row ends when it draws this token; -1 is none. A Hugging Face folder's own ends are `generate`'s
        `stop_tokens`.
    """

    max_new_tokens: int = field(100, AtLeast(1))
    temperature: float = field(1.0, AtLeast(0))
    top_k: int = field(0, AtLeast(0))
    top_p: float = field(1.0, Between(0, 1, "(]"))
    stop_token: int = field(-1, AtLeast(-1))

    def __post_init__(self):
        """Refuses impossible numbers."""
        check_fields(self, "sampling.")


def empty_cache(config: LMConfig, batch: int, length: int) -> PyTree:
    """Returns keys and values [L, B, S, G, K] of zeros, or a recurrent mixer's initial state [L, B, ...]."""
    if config.mixer == "attention":
        shape = (config.num_layers, batch, length, config.num_kv_heads, config.head_dim)
        zeros = jnp.zeros(shape, config.dtype)
        return _split((zeros, zeros), config)
    state = config.cell().initial((batch,), jnp.promote_types(config.dtype, jnp.float32))
    return _split(jax.tree.map(lambda h: jnp.broadcast_to(h, (config.num_layers, *h.shape)), state), config)


def cache_axes(config: LMConfig, cache: PyTree) -> PyTree:
    """Returns the logical axes of a cache: layers, rows, and heads or units."""
    attends = config.mixer == "attention"
    return jax.tree.map(lambda x: CACHE if attends else ("layers", *unit_axes(x.ndim - 1)), cache)


def _split(cache: PyTree, config: LMConfig) -> PyTree:
    return jax.tree.map(lambda x, axes: constrain(x, *axes, name="cache"), cache, cache_axes(config, cache))


def extend(
    params: PyTree,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    cache: PyTree,
    config: LMConfig,
    ends: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T V"], PyTree]:
    """Runs T more tokens of each row through the model.

    Args:
      params: As from `jaxpar.lm.init`.
      tokens: The new tokens.
      positions: Their places, which are also their slots in the cache; rows may differ.
      cache: From `empty_cache` or an earlier call; slots up to each position must be filled.
      config: The model; static.
      ends: Index of each row's last token that counts, where rows are padded; recurrent mixers must know.

    Returns:
      Logits in float32 at least, and the cache with the new keys and values, or the state after `ends`.
    """
    params = hold(params, config)

    def body(x, layer_and_cache) -> Any:
        layer, cache = layer_and_cache
        return block(x, layer, config, positions, cache=cache, ends=ends)

    x, cache = jax.lax.scan(body, _enter(params, tokens, positions, config), (params["layers"], cache))
    return _logits(params, x, config), _split(cache, config)


def prefill(
    params: PyTree, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], config: LMConfig, slots: int
) -> tuple[Float[Array, "B V"], PyTree]:
    """Runs whole prompts through the model, at the price of a forward pass of training.

    Attention is that of training (cuDNN on GPU, splash on TPU), and the dense form takes a block of queries at a time:
    memory grows with T, not with T^2. Only the last token of each row meets the head.

    Args:
      params: As from `jaxpar.lm.init`.
      tokens: Prompts, left-aligned.
      lengths: Tokens of each row that count, at least 1.
      config: The model; static.
      slots: S, slots of the cache, at least T; static.

    Returns:
      Logits after each row's last token, in float32 at least, and the cache: what `extend` goes on from.

    Raises:
      UsageError: If T is over the slots, or over learned positions.
    """
    params, (batch, length) = hold(params, config), tokens.shape
    most = min(slots, config.max_seq_len) if config.positions == "learned" else slots
    if length > most:
        raise UsageError(f"prompts of {length} tokens are over the {most} that the cache and learned positions have.")
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))

    def body(x, layer) -> Any:
        empty = jax.tree.map(lambda x: x[0], empty_cache(dataclasses.replace(config, num_layers=1), batch, slots))
        return block(x, layer, config, positions, cache=empty, ends=lengths - 1, begins=True)

    x, cache = jax.lax.scan(body, _enter(params, tokens, positions, config), params["layers"])
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return _logits(params, last, config)[:, 0], _split(cache, config)


def _enter(params: PyTree, tokens: jax.Array, positions: jax.Array, config: LMConfig) -> jax.Array:
    """Tokens [B, T] -> residual stream [B, T, D]."""
    x = embed(params["embedding"], tokens, SAMPLED)
    if config.positions == "learned":
        x = x + place(params["positions"], positions)
    return constrain(x.astype(config.dtype), *SAMPLED)


def _logits(params: PyTree, x: jax.Array, config: LMConfig) -> jax.Array:
    """Residual stream [B, T, D] -> logits [B, T, V]."""
    x = norm(x, params["final_norm"], config)
    weight = constrain(head(params).astype(x.dtype), "vocab", None)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("btd,vd->btv", x, weight, preferred_element_type=wide)


def generate(
    key: PRNGKey,
    params: PyTree,
    prompt: Int[Array, "B T"],
    config: LMConfig,
    sampling: Sampling = Sampling(),
    *,
    prompt_lengths: Int[Array, " B"] | None = None,
    stop_tokens: Sequence[int] = (),
) -> tuple[Int[Array, "B S"], Int[Array, " B"]]:
    """Continues each prompt; pure, so jit it with `config` and `sampling` static.

    Row b's token at position t is drawn with `fold_in(fold_in(key, t), b)`: what a row draws depends on no other row's
    length. The prompts are read by `prefill`; every step after it reads all weights once and the cache once.

    Args:
      key: Consumed.
      params: As from `jaxpar.lm.init`.
      prompt: Symbols, left-aligned; what lies beyond a row's length is ignored.
      config: The model.
      sampling: How tokens are drawn.
      prompt_lengths: At least 1 each; by default T.
      stop_tokens: Tokens that end a row as `sampling.stop_token` does, such as the `ends` of a tokenizer.

    Returns:
      Tokens [B, T + max_new_tokens] (prompt, then what was drawn, then zeros) and the length of each row, the
      stop token counted in.

    Raises:
      UsageError: If learned positions are too few for prompt and new tokens together.
    """
    batch, start = prompt.shape
    total = start + sampling.max_new_tokens
    if config.positions == "learned" and total > config.max_seq_len:
        raise UsageError(
            f"{start} prompt and {sampling.max_new_tokens} new tokens are over model.max_seq_len={config.max_seq_len}."
        )
    lengths = jnp.full((batch,), start) if prompt_lengths is None else jnp.asarray(prompt_lengths)
    rows, stops = jnp.arange(batch), jnp.asarray([sampling.stop_token, *stop_tokens], jnp.int32)
    logits, cache = prefill(params, prompt, lengths, config, total)
    tokens = jnp.where(jnp.arange(total)[None, :] < lengths[:, None], jnp.pad(prompt, ((0, 0), (0, total - start))), 0)

    def draw(tokens, lengths, ended, logits):
        new = _draw(key, logits, lengths, sampling)
        tokens = tokens.at[rows, lengths].set(jnp.where(ended, tokens[rows, lengths], new), mode="drop")
        return tokens, jnp.where(ended, lengths, lengths + 1), ended | jnp.isin(new, stops), new

    def go_on(carry):
        return (carry[0] < sampling.max_new_tokens) & ~carry[3].all()

    def step(carry):
        count, tokens, lengths, ended, new, cache = carry
        logits, cache = extend(params, new[:, None], lengths[:, None] - 1, cache, config)
        return (count + 1, *draw(tokens, lengths, ended, logits[:, 0]), cache)

    never = jnp.zeros((batch,), bool)
    first = draw(tokens, lengths, never, logits)
    _, tokens, lengths, _, _, _ = jax.lax.while_loop(go_on, step, (jnp.int32(1), *first, cache))
    return tokens, lengths


def _draw(key: PRNGKey, logits: Float[Array, "B V"], places: Int[Array, " B"], sampling: Sampling) -> jax.Array:
    """Draws one token a row."""
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)
    logits = logits / sampling.temperature
    if sampling.top_k and sampling.top_k < logits.shape[-1]:
        floor = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < floor, -jnp.inf, logits)
    if sampling.top_p < 1:
        ranked = jnp.sort(logits, axis=-1, descending=True)
        mass = jnp.cumsum(jax.nn.softmax(ranked), axis=-1)
        # The first token whose cumulative mass reaches p is the last that may be drawn; rounding may never reach p.
        last = jnp.minimum((mass < sampling.top_p).sum(-1), mass.shape[-1] - 1)
        floor = jnp.take_along_axis(ranked, last[:, None], axis=-1)
        logits = jnp.where(logits < floor, -jnp.inf, logits)

    def one(row, place, logits):
        return jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, place), row), logits)

    return jax.vmap(one)(jnp.arange(logits.shape[0]), places, logits).astype(jnp.int32)
