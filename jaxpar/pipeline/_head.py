"""A head whose rows are split over the stages: each stage's share of the softmax, one barrier, and each its gradient.

Logits of the rows on stage i are Y_i = X W_i^T, m_i their maximum, s_i = sum exp(Y_i - m_i), P_i = exp(Y_i-m_i) / s_i:

    m = max m_i    s = sum s_i exp(m_i - m)    f_i = s_i exp(m_i - m) / s    log Z = m + log s
    dX = sum_i w (f_i P_i W_i - W_i[target])    dW_i = (w f_i P_i - w onehot)^T X

so P_i W_i and W_i[target] are made before the barrier, and dW_i at any time after it (arXiv:2411.05288, section 4).
Of smoothed targets onehot is (1 - s) onehot + s / V, and W_i[target] is what that takes of the rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.mesh import constrain, local, mesh_axes
from jaxpar.pipeline._chunks import AXIS
from jaxpar.types import Array


class Share(NamedTuple):
    """What a stage keeps of a microbatch from S to T, [B, T] each but where it says.

    Attributes:
      soft: P_i, [B, T, rows].
      top: m_i.
      norm: s_i.
      chosen: The logit of the target, 0 where its row is on another stage.
      pulled: P_i W_i, [B, T, D].
      row: W_i[target], [B, T, D]; 0 where it is on another stage; with s / V of the sum of the rows where smoothed.
      factor: w f_i (1 + 2 z log Z); of no meaning before the barrier.
    """

    soft: Array
    top: Array
    norm: Array
    chosen: Array
    pulled: Array
    row: Array
    factor: Array


def share_of(rows: Array, x: Array, targets: Array, size: int, smoothing: float = 0.0) -> Share:
    """Returns a stage's share; `rows` [n, D] are those from n times its place on, of which those over `size` are zeros.

    Sums are float32 at least. Cost: 4 B T n D operations.
    """
    rows = constrain(rows.astype(x.dtype), "vocab", None)
    wide, first = jnp.promote_types(x.dtype, jnp.float32), jax.lax.axis_index(AXIS) * rows.shape[0]
    logits = jnp.einsum("btd,nd->btn", x, rows, preferred_element_type=wide)
    exists = first + jnp.arange(rows.shape[0]) < size
    logits = jnp.where(exists[None, None], logits, jnp.finfo(wide).min)
    top = logits.max(-1)
    soft = jnp.exp(logits - top[..., None])
    norm = soft.sum(-1)
    soft = (soft / norm[..., None]).astype(x.dtype)
    pulled = jnp.einsum("btn,nd->btd", soft, rows)
    row = _looked_up(rows, targets - first)
    if smoothing:
        row = (1 - smoothing) * row + (smoothing / size * rows.sum(0, dtype=wide)).astype(
            row.dtype
        )[None, None]
    chosen = (x.astype(wide) * row.astype(wide)).sum(-1)
    return Share(soft, top, norm, chosen, pulled, row, jnp.zeros_like(top))


def merge_shares(share: Share, weights: Array, z_loss: float) -> tuple[Array, Array, Array, Array]:
    """Returns loss, z, gradient of x and `factor`, from all stages' shares; every stage calls it at once.

    Loss and z are the same on all. Messages: three numbers a token from each stage to all, and one sum of [B, T, D].
    """
    top, norm, chosen = jax.lax.all_gather(
        jnp.stack([share.top, share.norm, share.chosen]), AXIS, axis=1
    )
    highest = top.max(0)
    shares = norm * jnp.exp(top - highest[None])
    total = shares.sum(0)
    log_norm = highest + jnp.log(total)
    weights = weights.astype(log_norm.dtype)
    z = z_loss * (weights * jnp.square(log_norm)).sum()
    own = shares[jax.lax.axis_index(AXIS)] / total
    factor = weights * own * (1 + 2 * z_loss * log_norm)
    dx = factor[..., None] * share.pulled - weights[..., None] * share.row
    value = (weights * (log_norm - chosen.sum(0))).sum() + z
    return value, z, jax.lax.psum(dx, AXIS).astype(share.soft.dtype), factor


def rows_gradient(
    share: Share, x: Array, targets: Array, weights: Array, size: int, smoothing: float = 0.0
) -> Array:
    """Returns the gradient of a stage's rows, after the barrier, [n, D], float32 at least; not of rows over `size`."""
    count = share.soft.shape[-1]
    hit = jnp.arange(count)[None, None] == (targets - jax.lax.axis_index(AXIS) * count)[..., None]
    wide = share.factor.dtype
    aims = (1 - smoothing) * hit + smoothing / size if smoothing else hit
    dlogits = share.factor[..., None] * share.soft - aims * weights.astype(wide)[..., None]
    gradient = jnp.einsum("btn,btd->nd", dlogits.astype(x.dtype), x, preferred_element_type=wide)
    return constrain(gradient, "vocab", "embed_grad")


def _looked_up(rows: Array, places: Array) -> Array:
    """The rows at these places, and 0 where there is none: on each device by itself, and then a sum over its stage.

    GSPMD's own way to look up rows that it splits ends the process, inside of a program that is manual over an axis.
    """
    parts, tokens = mesh_axes("vocab"), ("batch", "seq_layer")

    def lookup(rows, places):
        places = places - (jax.lax.axis_index(parts) * rows.shape[0] if parts else 0)
        is_here = (places >= 0) & (places < rows.shape[0])
        found = jnp.where(is_here[..., None], rows[jnp.where(is_here, places, 0)], 0)
        return jax.lax.psum(found, parts) if parts else found

    return local(lookup, [("vocab", None), tokens], (*tokens, None))(rows, places)
