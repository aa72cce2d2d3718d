"""Cross entropy over a split vocabulary, a chunk of tokens at a time; its logits never exist at once."""

import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.lm.config import LMConfig
from jaxpar.lm.model import head, hidden
from jaxpar.mesh import constrain, local, mesh_axes
from jaxpar.types import PRNGKey, PyTree

__all__ = ["cross_entropy", "loss"]


def loss(
    params: PyTree,
    batch: dict[str, jax.Array],
    config: LMConfig,
    *,
    normaliser: jax.Array | None = None,
    dropout_key: PRNGKey | None = None,
) -> Float[Array, ""]:
    """Computes the mean negative log-likelihood of the targets, in nats a token.

    Args:
      params: As from `jaxpar.lm.init`.
      batch: "tokens" and "targets" int [B, T]; optionally "weights" float [B, T], and "segments" and
        "positions" int [B, T] for packed documents.
      config: The model; static.
      normaliser: What the weighted sum is divided by; by default the sum of the weights.
      dropout_key: Switches dropout on; consumed.
    """
    x, _ = hidden(
        params,
        batch["tokens"],
        config,
        positions=batch.get("positions"),
        segments=batch.get("segments"),
        dropout_key=dropout_key,
    )
    weights = batch.get("weights")
    if weights is None:
        weights = jnp.ones(batch["targets"].shape, jnp.promote_types(x.dtype, jnp.float32))
    if normaliser is None:
        normaliser = weights.sum()
    return cross_entropy(x, head(params), batch["targets"], weights / normaliser, config.loss_chunk, config.low_logits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def cross_entropy(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    chunk: int,
    low_logits: bool = False,
) -> Float[Array, ""]:
    """Computes sum over tokens of weights * -log softmax(x head^T)[target].

    Differentiable once in `x` and `head` (reverse mode); the gradients are made in the forward pass,
    while a chunk's logits exist, so nothing is computed twice. Sums are float32 at least. The head may be
    split over "vocab", the tokens over "batch": the collectives are one max and one sum of [chunk] over the
    vocabulary's parts a chunk, one sum of dx over the same, one of dhead over the batch's.

    Cost: 2 B T V D operations for the value, 6 B T V D with gradients; memory chunk * V.

    Args:
      x: Features; the product with `head` is taken in their dtype.
      head: One row a symbol.
      targets: Symbols in [0, V).
      weights: What each token counts; not differentiated.
      chunk: Tokens a device at a time.
      low_logits: Whether a chunk's logits are stored in the dtype of `x` instead of float32 at least.
    """
    return _sharded(x, head, targets, weights, chunk, low_logits, with_grads=False)


def _forward(x, head, targets, weights, chunk, low_logits):
    value, dx, dhead = _sharded(x, head, targets, weights, chunk, low_logits, with_grads=True)
    return value, (dx, constrain(dhead, "vocab", "embed_grad").astype(head.dtype))


def _backward(chunk, low_logits, grads, g):
    del chunk, low_logits
    dx, dhead = grads
    return (g * dx).astype(dx.dtype), (g * dhead).astype(dhead.dtype), None, None


cross_entropy.defvjp(_forward, _backward)


def _sharded(x, head, targets, weights, chunk, low_logits, with_grads):
    """Runs `_on_device` on every device's tokens and symbols."""
    tokens = ("batch", "seq_layer")
    in_axes = [(*tokens, None), ("vocab", None), tokens, tokens]
    out_axes = ((), (*tokens, None), ("vocab", None)) if with_grads else ()
    weight = constrain(constrain(head.astype(x.dtype), "vocab", "embed"), "vocab", None)  # cast before the gather
    batch_axes = (*mesh_axes("batch"), *mesh_axes("seq_layer"))
    fn = functools.partial(
        _on_device,
        chunk=chunk,
        low_logits=low_logits,
        with_grads=with_grads,
        vocab_axes=mesh_axes("vocab"),
        batch_axes=batch_axes,
    )
    return local(fn, in_axes, out_axes, check=False)(x, weight, targets, weights)


def _sum(x, axes):
    return jax.lax.psum(x, axes) if axes else x


def _on_device(x, head, targets, weights, *, chunk, low_logits, with_grads, vocab_axes, batch_axes):
    """The loss of this device's tokens against this device's symbols, chunk by chunk."""
    width, total = x.shape[-1], targets.size
    count = math.ceil(total / chunk)
    size = math.ceil(total / count)
    pad = count * size - total  # padded tokens weigh nothing

    def cut(a, *trailing):
        flat = a.reshape(total, *trailing)
        return jnp.pad(flat, [(0, pad)] + [(0, 0)] * len(trailing)).reshape(count, size, *trailing)

    wide = jnp.promote_types(x.dtype, jnp.float32)
    store = x.dtype if low_logits else wide
    first = jax.lax.axis_index(vocab_axes) * head.shape[0] if vocab_axes else 0

    def forward(part):
        x, target, weight = part
        logits = jnp.einsum("nd,vd->nv", x, head, preferred_element_type=store)
        place = target - first
        mine = (place >= 0) & (place < head.shape[0])
        chosen = jnp.take_along_axis(logits, jnp.where(mine, place, 0)[:, None], axis=1)[:, 0].astype(wide)
        chosen = jnp.where(mine, chosen, 0)
        top, norm = _row_sums(logits.astype(wide))
        if vocab_axes:
            highest = jax.lax.pmax(top, vocab_axes)
            norm, chosen = jax.lax.psum(jnp.stack([norm * jnp.exp(top - highest), chosen]), vocab_axes)
            top = highest
        log_norm = top + jnp.log(norm)
        return (weight * (log_norm - chosen)).sum(), logits, log_norm, place

    def both(carry, part):
        x, _, weight = part
        value, logits, log_norm, place = forward(part)
        hit = jnp.arange(head.shape[0])[None, :] == place[:, None]
        dlogits = (jnp.exp(logits.astype(wide) - log_norm[:, None]) - hit) * weight[:, None]
        dlogits = dlogits.astype(x.dtype)
        dhead = carry[1] + jnp.einsum("nv,nd->vd", dlogits, x, preferred_element_type=wide)
        return (carry[0] + value, dhead), jnp.einsum("nv,vd->nd", dlogits, head)

    parts = (cut(x, width), cut(targets), cut(weights.astype(wide)))
    if not with_grads:
        return _sum(jax.lax.map(lambda part: forward(part)[0], parts).sum(), batch_axes)
    zero = (jnp.zeros((), wide), jnp.zeros(head.shape, wide))
    if count == 1:  # no accumulator to read and write back
        (value, dhead), dx = both(zero, jax.tree.map(lambda part: part[0], parts))
    else:
        (value, dhead), dx = jax.lax.scan(both, zero, parts)
    dx = _sum(dx.reshape(-1, width)[:total].reshape(x.shape), vocab_axes)
    return _sum(value, batch_axes), dx, _sum(dhead, batch_axes)


def _row_sums(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns each row's maximum and sum of exp(logit - maximum), in one read.

    The running pair is the log-sum-exp monoid; two separate reductions would read the logits, the
    largest array of a training step, twice.
    """

    def combine(a, b):
        gap = b[0] - a[0]
        shrink = jnp.exp(-jnp.abs(gap))
        norm = jnp.where(gap > 0, a[1] * shrink + b[1], a[1] + b[1] * shrink)
        return jnp.maximum(a[0], b[0]), norm

    zero = (jnp.array(jnp.finfo(logits.dtype).min), jnp.zeros((), logits.dtype))
    return jax.lax.reduce((logits, jnp.ones_like(logits)), zero, combine, (1,))
