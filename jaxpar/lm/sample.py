"""A language model as decoding sees it, and its continuation of prompts."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar import decode
from jaxpar.decode import Constraints, Decoding, Generated, Prompts, Sampling
from jaxpar.lm.config import LMConfig
from jaxpar.lm.model import embed, logits, placed
from jaxpar.nn.mixer import DECODING, TokenInfo
from jaxpar.nn.stack import PseudoTokens, StackCache
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["Decoder", "cache_axes", "empty_cache", "extend", "generate"]


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
    *,
    positions: Int[Array, "B T"] | None = None,
    visible: Bool[Array, "B T T"] | None = None,
    pseudo: PseudoTokens | None = None,
) -> tuple[Float[Array, "B T V"], StackCache]:
    """Runs T more tokens of each row through the model.

    Args:
      params: As from `jaxpar.lm.init`; in a loop, `config.stack().unstacked(params)`, made once before it.
      tokens: The new tokens.
      cache: From `empty_cache` or an earlier call, which should be donated: it is then written in place.
      config: The model; static.
      valid: How many tokens of each row count, where rows are padded; by default all.
      positions: Of the tokens; by default on from what the cache has seen.
      visible: Which of the T tokens each sees; by default itself and those before.
      pseudo: What the last of the T tokens are, where they are none: these are then not looked up.

    Returns:
      Logits in float32 at least, and the cache after the tokens that count.
    """
    stack = config.stack()
    params = stack.hold(params)
    if positions is None:
        positions = cache.seen[:, None] + jnp.arange(tokens.shape[1])[None]
    inside = tokens.shape[1] - (pseudo.size if pseudo else 0)
    x = embed(params, tokens[:, :inside], positions[:, :inside], config, DECODING.inside)
    x, after, _ = stack.apply(
        params,
        x,
        TokenInfo(positions=positions, valid=valid, visible=visible),
        cache=cache,
        pseudo=placed(pseudo, params, positions, config),
    )
    assert after is not None  # a cache in, a cache out
    return logits(params, x, config), after


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A language model as `jaxpar.decode` asks for it: a `jaxpar.decode.TokenModel`.

    Attributes:
      config: The model.
    """

    config: LMConfig

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int | None:
        """How many learned positions there are; any number of rotary ones or slopes."""
        return self.config.max_seq_len if self.config.positions == "learned" else None

    def held(self, params: PyTree) -> PyTree:
        """Returns the parameters with each layer's apart, laid out for decoding."""
        return self.config.stack().for_decoding(params)

    def init_cache(self, rows: int, slots: int) -> StackCache:
        """Returns an empty cache."""
        return empty_cache(self.config, rows, slots)

    def prefill(
        self,
        params: PyTree,
        tokens: Int[Array, "B T"],
        lengths: Int[Array, " B"],
        cache: StackCache | int,
    ) -> tuple[Float[Array, "B V"], StackCache]:
        """Runs whole prompts through the model, at the price of a forward pass of training.

        Attention is that of training (cuDNN on GPU, splash on TPU), and the dense form takes a
        block of queries at a time: memory grows with T, not with T^2. Only the last token of each
        row meets the head.

        Args:
          params: As from `jaxpar.lm.init`.
          tokens: Prompts, left-aligned.
          lengths: Tokens of each row that count, at least 1.
          cache: An empty one, or the number of slots of one that is made, at least T; static.

        Returns:
          Logits after each row's last token, in float32 at least, and the cache: what `extend`
          goes on from.

        Raises:
          UsageError: If T is over the slots, or over learned positions.
        """
        batch, length = tokens.shape
        limits = [cache] if isinstance(cache, int) else []
        limits += [self.config.max_seq_len] if self.config.positions == "learned" else []
        if limits and length > min(limits):
            raise UsageError(
                f"prompts of {length} tokens are over the {min(limits)} that the cache and learned positions have."
            )
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
        x = embed(params, tokens, positions, self.config, DECODING.inside)
        empty = empty_cache(self.config, batch, cache) if isinstance(cache, int) else cache
        x, after, _ = self.config.stack().apply(
            params,
            x,
            TokenInfo(positions=positions, valid=lengths),
            cache=empty,
            fresh=True,
        )
        assert after is not None  # a cache in, a cache out
        last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
        return logits(params, last, self.config)[:, 0], after

    def extend(
        self,
        params: PyTree,
        tokens: Array,
        cache: StackCache,
        *,
        positions: Array,
        visible: Array | None = None,
        valid: Array | None = None,
        pseudo: PseudoTokens | None = None,
    ) -> tuple[Array, StackCache]:
        """Reads more tokens."""
        return extend(
            params, tokens, cache, self.config, valid, positions=positions, visible=visible, pseudo=pseudo
        )  # fmt: skip


def generate(
    key: PRNGKey,
    params: PyTree,
    prompt: Int[Array, "B T"] | Prompts,
    config: LMConfig,
    sampling: Sampling = Sampling(),
    decoding: Decoding = Decoding(),
    constraints: Constraints = Constraints(),
    *,
    draft_params: PyTree = None,
    **older: Any,  # those of `jaxpar.decode.generate`, which checks them
) -> Generated:
    """Continues each prompt: `jaxpar.decode.generate` of a language model.

    Pure, so jit it with `config`, `sampling` and `decoding` static. Consumes `key`.
    """
    return decode.generate(
        key,
        params,
        prompt,
        Decoder(config),
        sampling,
        decoding,
        constraints,
        draft_params=draft_params,
        **older,
    )
