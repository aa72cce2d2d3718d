"""One pre-norm layer: x + mixer(norm(x)), then x + mlp(norm(x))."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxpar.mesh import gather, scatter
from jaxpar.nn.auxiliary import Aux
from jaxpar.nn.mixer import Context, Mixer
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.norm import Norm
from jaxpar.types import PRNGKey, PyTree

__all__ = ["block", "dropout"]


def dropout(x: jax.Array, rate: float, key: PRNGKey | None) -> jax.Array:
    """Zeroes a share `rate` of `x` and scales the rest; the identity without a key. Consumes `key`."""
    if key is None or rate == 0.0:
        return x
    return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


def block(
    mixer: Mixer,
    mlp: Mlp,
    norm: Norm,
    layer: dict[str, PyTree],
    x: Float[Array, "B T D"],
    context: Context,
    cache: PyTree | None = None,
    *,
    rate: float = 0.0,
) -> tuple[Float[Array, "B T D"], PyTree | None, Aux]:
    """Applies one layer.

    Args:
      mixer: What mixes the tokens.
      mlp: What looks at each alone.
      norm: Before each of the two.
      layer: This layer's parameters.
      x: Residual stream.
      context: What the mixer may ask; its key is this layer's, its rules say how `x` lies.
      cache: The mixer's, of what came before.
      rate: Of dropout on both branches.

    Returns:
      The residual stream, the new cache (None without one), and what the mixer told.
    """
    rules = context.rules
    keys = (None,) * 3 if context.key is None or rate == 0.0 else tuple(jax.random.split(context.key, 3))

    # Where the two split the sequence differently: a gather into a branch, a scattered sum out of it.
    def enter(x):
        return gather(x, rules.outside, rules.inside)

    def leave(x):
        return scatter(x, rules.inside, rules.outside)

    h = enter(norm.apply(layer["attn_norm"], x))
    out, cache, aux = mixer.apply(layer, h, cache, context._replace(key=keys[0]))
    x = x + dropout(leave(out), rate, keys[1])
    out = leave(mlp.apply(layer, enter(norm.apply(layer["mlp_norm"], x)), apart=rules.apart))
    x = x + dropout(out, rate, keys[2])
    return checkpoint_name(x, "residual"), cache, aux
