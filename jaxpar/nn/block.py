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

__all__ = ["Ladder", "ResidualBlock", "Stream", "dropout"]


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


class ResidualBlock(NamedTuple):
    """Two branches of a layer and the norm before each; static and hashable.

    Attributes:
      mixer: Branch that mixes the tokens.
      mlp: Branch that reads each token alone; None for no second branch, and no norm before it.
      norm: Norm before each branch, and after one where the parameters have scales for that.
      dropout: Rate on both branches, while training.
    """

    mixer: Mixer
    mlp: FeedForward | None
    norm: Norm
    dropout: float = 0.0

    def apply(
        self,
        params: dict[str, PyTree],
        x: Kind,
        context: Context,
        cache: PyTree | None = None,
        *,
        ahead: bool | Bool[Array, ""] = True,
    ) -> tuple[Kind, PyTree | None, Aux]:
        """Applies one layer.

        Args:
          params: Parameters of this layer.
          x: Residual stream.
          context: What the mixer may ask; its key is this layer's, its rules say how `x` lies.
          cache: Cache of the mixer, of the tokens before.
          ahead: Whether branches read a `Ladder` without what the branch before adds; otherwise
            with it. An array where the program decides.

        Returns:
          The residual stream, of the kind of `x`, the new cache (None without one), and what the
          branches told.
        """
        rules = context.rules
        rate = self.dropout
        keys = (None,) * 4 if context.key is None else tuple(jax.random.split(context.key, 4))

        # Where the two split the sequence differently: a gather into a branch, and a scattered sum
        # out of it.
        def enter(x):
            return gather(x, rules.outside, rules.inside)

        def leave(x):
            return scatter(x, rules.inside, rules.outside)

        def post(name: str, out: jax.Array) -> jax.Array:
            return self.norm.apply(params[name], out) if name in params else out

        def read(x: Stream) -> jax.Array:
            if not isinstance(x, Ladder):
                return x
            if isinstance(ahead, bool):
                return x.x if ahead else x.whole
            return jnp.where(ahead, x.x, x.whole)

        def add(x: Stream, y: jax.Array) -> Stream:
            return Ladder(x.whole, y) if isinstance(x, Ladder) else x + y

        stream: Any = x  # of its kind, which the checker cannot follow through `add`
        h = enter(self.norm.apply(params["attn_norm"], read(stream)))
        mixer_key = keys[0] if rate else None
        out, cache, aux = self.mixer.apply(params, h, cache, context._replace(key=mixer_key))
        stream = add(stream, dropout(post("attn_post_norm", leave(out)), rate, keys[1]))
        if self.mlp is not None:
            h = enter(self.norm.apply(params["mlp_norm"], read(stream)))
            out, told = self.mlp.apply(params, h, context._replace(key=keys[3]))
            stream = add(stream, dropout(post("mlp_post_norm", leave(out)), rate, keys[2]))
            aux = both(aux, told)
        return checkpoint_name(stream, "residual"), cache, aux
