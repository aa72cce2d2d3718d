"""What goes with the residual stream through a stack: the caches of all layers, and tokens that enter on the way."""

from collections.abc import Callable
from typing import NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxpar.nn.block import Kind, Ladder
from jaxpar.nn.mixer import Context
from jaxpar.types import PyTree

__all__ = ["PseudoTokens", "StackCache", "began", "moved_on"]


@flax.struct.dataclass
class StackCache:
    """What a stack keeps of the tokens before: carried by the loop that decodes, donated, and written in place.

    Attributes:
      layers: Each layer's own, of its mixer: apart, so that a step copies none of them.
      seen: int32 [B], tokens that the cache was given. To take tokens back, lower it.
      first: int32 [B], of these, how many before the current document began.
    """

    layers: tuple[PyTree, ...]
    seen: Array
    first: Array


class PseudoTokens(NamedTuple):
    """Tokens that are not in the text: M states that enter at some layer, behind those of the N tokens that are.

    They stand for tokens to come, whose laws are then read off them, as prompt tokens (arXiv:2405.18628) and pseudo
    hidden states (arXiv:2404.12022) do. No cache keeps them.

    Attributes:
      layer: The first layer that they pass; None for none, so that they enter after the last norm.
      size: M.
      states: Of the N tokens' states at that place, [B, N, D], makes theirs, [B, M, D].
    """

    layer: int | None
    size: int
    states: Callable[[Float[Array, "B N D"]], Float[Array, "B M D"]]

    def after(self, x: Kind) -> Kind:
        """Returns the tokens' states with these behind them; nothing is to be added to these yet."""
        whole = x.whole if isinstance(x, Ladder) else x
        new = self.states(whole).astype(whole.dtype)
        news = Ladder(new, jnp.zeros_like(new)) if isinstance(x, Ladder) else new
        return jax.tree.map(lambda *pair: jnp.concatenate(pair, 1), x, news)


def began(places: jax.Array, starts: jax.Array | None, before: jax.Array) -> jax.Array:
    """Returns of each token the place where its document began, that of the row's first being `before`."""
    if starts is None:
        return jnp.broadcast_to(before[:, None], places.shape)
    last = jax.lax.cummax(jnp.where(starts, places, -1), axis=1)
    return jnp.where(last >= 0, last, before[:, None])


def moved_on(cache: StackCache, layers: tuple[PyTree, ...], context: Context) -> StackCache:
    """Returns the cache after the tokens that count."""
    assert context.first is not None  # `Stack.context` fills it in
    length = context.first.shape[1]
    count = jnp.int32(length) if context.valid is None else context.valid
    states = jnp.concatenate([cache.first[:, None], context.first], 1)
    return StackCache(layers, cache.seen + count, context.last(states))
