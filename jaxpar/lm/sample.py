"""Sampling with a key-value cache or a recurrent state: prefill once, then the whole loop in one `while_loop`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.decode import Sampling, process
from jaxpar.lm.config import LMConfig
from jaxpar.lm.model import embed, logits
from jaxpar.nn.mixer import DECODING
from jaxpar.nn.stack import StackCache
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["cache_axes", "empty_cache", "extend", "generate", "prefill"]

PLAIN = Sampling()


def empty_cache(config: LMConfig, batch: int, length: int) -> StackCache:
    """Returns the cache of `batch` rows before the first token: each layer's keys and values, or state."""
    return config.stack().init_cache(batch, length)


def cache_axes(config: LMConfig) -> StackCache:
    """Returns the logical axes of a cache."""
    return config.stack().cache_axes()


def extend(
    params: PyTree,
    tokens: Int[Array, "B T"],
    cache: StackCache,
    config: LMConfig,
    valid: Int[Array, " B"] | None = None,
) -> tuple[Float[Array, "B T V"], StackCache]:
    """Runs T more tokens of each row through the model.

    Args:
      params: As from `jaxpar.lm.init`; in a loop, `config.stack().unstacked(params)`, made once before it.
      tokens: The new tokens.
      cache: From `empty_cache` or an earlier call, which should be donated: it is then written in place.
      config: The model; static.
      valid: How many tokens of each row count, where rows are padded; by default all.

    Returns:
      Logits in float32 at least, and the cache after the tokens that count.
    """
    stack = config.stack()
    params, positions = stack.hold(params), cache.seen[:, None] + jnp.arange(tokens.shape[1])[None]
    x = embed(params, tokens, positions, config, DECODING.inside)
    x, after, _ = stack.apply(params, x, positions=positions, valid=valid, cache=cache)
    assert after is not None  # a cache in, a cache out
    return logits(params, x), after


def prefill(
    params: PyTree, tokens: Int[Array, "B T"], lengths: Int[Array, " B"], config: LMConfig, slots: int
) -> tuple[Float[Array, "B V"], StackCache]:
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
    batch, length = tokens.shape
    most = min(slots, config.max_seq_len) if config.positions == "learned" else slots
    if length > most:
        raise UsageError(f"prompts of {length} tokens are over the {most} that the cache and learned positions have.")
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    x, empty = embed(params, tokens, positions, config, DECODING.inside), empty_cache(config, batch, slots)
    x, cache, _ = config.stack().apply(params, x, positions=positions, valid=lengths, cache=empty, fresh=True)
    assert cache is not None  # a cache in, a cache out
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    return logits(params, last)[:, 0], cache


def generate(
    key: PRNGKey,
    params: PyTree,
    prompt: Int[Array, "B T"],
    config: LMConfig,
    sampling: Sampling = PLAIN,
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
      UsageError: If learned positions are too few for prompt and new tokens together; if `sampling` has penalties,
        for which nothing is counted here.
    """
    batch, start = prompt.shape
    total = start + sampling.max_new_tokens
    if config.positions == "learned" and total > config.max_seq_len:
        raise UsageError(
            f"{start} prompt and {sampling.max_new_tokens} new tokens are over model.max_seq_len={config.max_seq_len}."
        )
    lengths = jnp.full((batch,), start) if prompt_lengths is None else jnp.asarray(prompt_lengths)
    rows, stops = jnp.arange(batch), jnp.asarray([sampling.stop_token, *stop_tokens], jnp.int32)
    after, cache = prefill(params, prompt, lengths, config, total)
    params = config.stack().unstacked(params)  # once, or each step would
    tokens = jnp.where(jnp.arange(total)[None, :] < lengths[:, None], jnp.pad(prompt, ((0, 0), (0, total - start))), 0)

    def draw(tokens, lengths, ended, logits):
        new = _draw(key, logits, lengths, sampling)
        tokens = tokens.at[rows, lengths].set(jnp.where(ended, tokens[rows, lengths], new), mode="drop")
        return tokens, jnp.where(ended, lengths, lengths + 1), ended | jnp.isin(new, stops), new

    def go_on(carry):
        return (carry[0] < sampling.max_new_tokens) & ~carry[3].all()

    def step(carry):
        count, tokens, lengths, ended, new, cache = carry
        after, cache = extend(params, new[:, None], cache, config)
        return (count + 1, *draw(tokens, lengths, ended, after[:, 0]), cache)

    never = jnp.zeros((batch,), bool)
    first = draw(tokens, lengths, never, after)
    _, tokens, lengths, _, _, _ = jax.lax.while_loop(go_on, step, (jnp.int32(1), *first, cache))
    return tokens, lengths


def _draw(key: PRNGKey, logits: Float[Array, "B V"], places: Int[Array, " B"], sampling: Sampling) -> jax.Array:
    """Draws one token a row."""
    logits = process(logits, sampling)
    if sampling.temperature == 0:
        return logits.argmax(-1).astype(jnp.int32)

    def one(row, place, logits):
        return jax.random.categorical(jax.random.fold_in(jax.random.fold_in(key, place), row), logits)

    return jax.vmap(one)(jnp.arange(logits.shape[0]), places, logits).astype(jnp.int32)
