"""One pre-norm layer: x + mixer(norm(x)), then x + mlp(norm(x)), if any; or a branch beside the sum before it."""

from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from jaxpar.mesh import gather, scatter
from jaxpar.nn.auxiliary import Aux, both
from jaxpar.nn.mixer import Context, FeedForward, Mixer
from jaxpar.nn.norm import Norm
from jaxpar.types import PRNGKey, PyTree

__all__ = ["Ladder", "Stream", "block", "dropout"]


class Ladder(NamedTuple):
    """A residual stream whose last term is not added yet, so that a branch need not wait for it (arXiv:2501.06589).

    Attributes:
      x: The stream before the last branch added to it, [B, T, D].
      pending: What that branch adds.
    """

    x: Float[Array, "B T D"]
    pending: Float[Array, "B T D"]

    @property
    def whole(self) -> Float[Array, "B T D"]:
        """The stream."""
        return self.x + self.pending


Stream = jax.Array | Ladder
"""A residual stream as layers carry it."""

Kind = TypeVar("Kind", bound=Stream)


def dropout(x: jax.Array, rate: float, key: PRNGKey | None) -> jax.Array:
    """Zeroes a share `rate` of `x` and scales the rest; the identity without a key. Consumes `key`."""
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(
        x.dtype
    )


def block(
    mixer: Mixer,
    mlp: FeedForward | None,
    norm: Norm,
    layer: dict[str, PyTree],
    x: Kind,
    context: Context,
    cache: PyTree | None = None,
    *,
    rate: float = 0.0,
    ahead: bool | Bool[Array, ""] = True,
) -> tuple[Kind, PyTree | None, Aux]:
    """Applies one layer.

    Args:
      mixer: What mixes the tokens.
      mlp: What looks at each alone; None for no second branch, and no norm before it.
      norm: Before each of the two, and after one where `layer` has scales for that.
      layer: This layer's parameters.
      x: Residual stream.
      context: What the mixer may ask; its key is this layer's, its rules say how `x` lies.
      cache: The mixer's, of what came before.
      rate: Of dropout on both branches.
      ahead: Of a `Ladder`: whether branches read the stream without what the branch before adds, or with it, as of an
        array.

    Returns:
      The residual stream, of the kind of `x`, the new cache (None without one), and what the branches told.
    """
    rules = context.rules
    keys = (None,) * 4 if context.key is None else tuple(jax.random.split(context.key, 4))

    # Where the two split the sequence differently: a gather into a branch, a scattered sum out of it.
    def enter(x):
        return gather(x, rules.outside, rules.inside)

    def leave(x):
        return scatter(x, rules.inside, rules.outside)

    def post(name: str, out: jax.Array) -> jax.Array:
        return norm.apply(layer[name], out) if name in layer else out

    def read(x: Stream) -> jax.Array:
        if not isinstance(x, Ladder):
            return x
        return (
            (x.x if ahead else x.whole)
            if isinstance(ahead, bool)
            else jnp.where(ahead, x.x, x.whole)
        )

    def add(x: Stream, y: jax.Array) -> Stream:
        return Ladder(x.whole, y) if isinstance(x, Ladder) else x + y

    stream: Any = x  # of its kind, which the checker cannot follow through `add`
    h = enter(norm.apply(layer["attn_norm"], read(stream)))
    out, cache, aux = mixer.apply(layer, h, cache, context._replace(key=keys[0] if rate else None))
    stream = add(stream, dropout(post("attn_post_norm", leave(out)), rate, keys[1]))
    if mlp is not None:
        h = enter(norm.apply(layer["mlp_norm"], read(stream)))
        out, told = mlp.apply(layer, h, context._replace(key=keys[3]))
        stream, aux = (
            add(stream, dropout(post("mlp_post_norm", leave(out)), rate, keys[2])),
            both(aux, told),
        )
    return checkpoint_name(stream, "residual"), cache, aux
