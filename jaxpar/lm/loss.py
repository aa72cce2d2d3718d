"""Cross entropy over a split vocabulary, a chunk of tokens at a time; its logits never exist at once."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.lm.config import LMConfig
from jaxpar.lm.model import head, hidden
from jaxpar.lm.text.batches import normaliser_of, token_info, valid_batch
from jaxpar.mesh import constrain, local, mesh_axes
from jaxpar.nn.attention import capped
from jaxpar.nn.auxiliary import NOTHING, Aux, Sum, both
from jaxpar.nn.linear import wide_einsum
from jaxpar.types import PRNGKey, PyTree

__all__ = [
    "CrossEntropyOptions",
    "cross_entropy",
    "cross_entropy_and_z",
    "last",
    "loss",
    "losses",
]


class CrossEntropyOptions(NamedTuple):
    """Options of a cross entropy; static and hashable.

    Attributes:
      chunk: Number of tokens a device at a time.
      low_logits: Whether a chunk's logits are stored in the dtype of features instead of float32
        at least.
      z_loss: Factor of the mean square of the log normaliser, which keeps that near 1, so that
        logits do not drift away (arXiv:2204.02311, section 5).
      logit_cap: Cap c of logits, c tanh(x head^T / c); 0 for none.
      smoothing: Share s of a target that is spread evenly over all V symbols: the probability is
        s / V of every symbol, and 1 - s more of the target.
    """

    chunk: int
    low_logits: bool = False
    z_loss: float = 0.0
    logit_cap: float = 0.0
    smoothing: float = 0.0


class _SumAxes(NamedTuple):
    """Mesh axes over which devices add up their parts; empty where nothing is split.

    Attributes:
      vocab: Axes that split the symbols.
      tokens: Axes that split the tokens.
    """

    vocab: tuple[str, ...]
    tokens: tuple[str, ...]


def loss(
    params: PyTree,
    batch: dict[str, jax.Array],
    config: LMConfig,
    *,
    normaliser: jax.Array | None = None,
    dropout_key: PRNGKey | None = None,
) -> Float[Array, ""]:
    """Computes the mean negative log-likelihood of the targets, in nats a token, with all that is added to it.

    Takes the arguments of `losses`, and returns the first of what it does.
    """
    return losses(params, batch, config, normaliser=normaliser, dropout_key=dropout_key)[0]


def losses(
    params: PyTree,
    batch: dict[str, jax.Array],
    config: LMConfig,
    *,
    normaliser: jax.Array | None = None,
    share: float = 1.0,
    dropout_key: PRNGKey | None = None,
    smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Aux]:
    """Computes what training makes smaller, and all that was told on the way.

    Args:
      params: As from `jaxpar.lm.init`.
      batch: "tokens" and "targets" int [B, T]; optionally "weights" float [B, T], and "segments" and
        "positions" int [B, T] for packed documents, and "places" int [B, T] of tokens in another order.
      config: The model; static.
      normaliser: Divisor of the weighted sum; by default the sum of the weights, or 1 where that is
        of nothing. Ids outside of [0, V) weigh nothing: see `jaxpar.lm.text.batches.valid_batch`.
      share: Of the losses that layers tell: 1 / M for one of M microbatches, whose losses are averaged.
      dropout_key: Switches dropout on; consumed.
      smoothing: Share of a target that is spread over all V symbols alike (arXiv:1512.00567, section 7).

    Returns:
      The negative log-likelihood a token, `config.z_loss` times the mean square of the log normaliser, and the losses
      that layers told, together; and what was told.
    """
    batch = valid_batch(batch, config)
    x, aux = hidden(
        params,
        batch["tokens"],
        config,
        token_info(batch),
        dropout_key=dropout_key,
    )
    value, told = last(x, head(params), batch, config, normaliser, smoothing)
    extra = sum(aux.losses.values(), jnp.zeros((), value.dtype))
    return (value + share * extra if aux.losses else value), both(aux, told)


def last(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    batch: dict[str, jax.Array],
    config: LMConfig,
    normaliser: jax.Array | None = None,
    smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Aux]:
    """Computes the loss of the last residual stream, after its norm; the arguments are those of `losses`."""
    if normaliser is None:
        normaliser = normaliser_of(batch, config)
    valid = valid_batch(batch, config)
    weights = valid["weights"] / normaliser
    options = CrossEntropyOptions(
        chunk=config.execution.loss_chunk,
        low_logits=config.losses.low_logits,
        z_loss=config.losses.z_loss,
        logit_cap=config.embedding.logit_cap,
        smoothing=smoothing,
    )
    parts: Any = cross_entropy_and_z(x, head, valid["targets"], weights, options)
    value, z = parts
    return value, told_of(z, config)


def told_of(z: Float[Array, ""], config: LMConfig) -> Aux:
    """Returns what is told of the square of the log normaliser."""
    return Aux({}, {"z_loss": Sum(z)}) if config.losses.z_loss else NOTHING


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
    options = CrossEntropyOptions(chunk=chunk, low_logits=low_logits)
    parts: Any = cross_entropy_and_z(x, head, targets, weights, options)
    return parts[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy_and_z(
    x: Float[Array, "B T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "B T"],
    weights: Float[Array, "B T"],
    options: CrossEntropyOptions,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Computes `cross_entropy` plus z = z_loss * sum over tokens of weights * (log sum exp(x head^T))^2, and z alone.

    Only the sum is differentiated: z is for a report. Arguments and cost are as in `cross_entropy`;
    `options` are static.
    """
    return _told(_sharded(x, head, targets, weights, options, with_grads=False))


def _told(value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns (sum, z) of a pair of both, or of a sum without z."""
    return (value[0], value[1]) if value.ndim else (value, jnp.zeros_like(value))


def _forward(x, head, targets, weights, options):
    value, dx, dhead = _sharded(x, head, targets, weights, options, with_grads=True)
    return _told(value), (dx, constrain(dhead, "vocab", "embed_grad").astype(head.dtype))


def _backward(options, residuals, g):
    del options
    dx, dhead = residuals
    return (g[0] * dx).astype(dx.dtype), (g[0] * dhead).astype(dhead.dtype), None, None


cross_entropy_and_z.defvjp(_forward, _backward)


def _sharded(x, head, targets, weights, options, with_grads):
    """Runs `_on_device` on every device's tokens and symbols."""
    value_axes = (None,) if options.z_loss else ()
    tokens = ("batch", "seq_layer")
    in_axes = [(*tokens, None), ("vocab", None), tokens, tokens]
    out_axes = (value_axes, (*tokens, None), ("vocab", None)) if with_grads else value_axes
    weight = constrain(
        constrain(head.astype(x.dtype), "vocab", "embed"), "vocab", None
    )  # cast before the gather
    axes = _SumAxes(
        vocab=mesh_axes("vocab"),
        tokens=(*mesh_axes("batch"), *mesh_axes("seq_layer")),
    )
    fn = functools.partial(
        _on_device,
        options=options,
        spread=options.smoothing / head.shape[0],
        with_grads=with_grads,
        axes=axes,
    )
    return local(fn, in_axes, out_axes, check=False)(x, weight, targets, weights)


def _sum(x, axes):
    return jax.lax.psum(x, axes) if axes else x


def _on_device(x, head, targets, weights, *, options, spread, with_grads, axes):
    """The loss of a device's tokens against its symbols, chunk by chunk; all get `spread` of a target."""
    z_loss = options.z_loss
    logit_cap = options.logit_cap
    kept = 1 - options.smoothing
    width, total = x.shape[-1], targets.size
    count = math.ceil(total / options.chunk)
    size = math.ceil(total / count)
    pad = count * size - total  # padded tokens weigh nothing

    def cut(a, *trailing):
        flat = a.reshape(total, *trailing)
        return jnp.pad(flat, [(0, pad)] + [(0, 0)] * len(trailing)).reshape(count, size, *trailing)

    wide = jnp.promote_types(x.dtype, jnp.float32)
    store = x.dtype if options.low_logits else wide
    first = jax.lax.axis_index(axes.vocab) * head.shape[0] if axes.vocab else 0

    def forward(part):
        x, target, weight = part
        logits = capped(wide_einsum("nd,vd->nv", x, head, store), logit_cap)
        place = target - first
        mine = (place >= 0) & (place < head.shape[0])
        chosen = jnp.take_along_axis(logits, jnp.where(mine, place, 0)[:, None], axis=1)[
            :, 0
        ].astype(wide)
        chosen = jnp.where(mine, chosen, 0)
        if spread:
            chosen = kept * chosen + spread * logits.astype(wide).sum(-1)
        top, norm = _row_sums(logits.astype(wide))
        if axes.vocab:
            highest = jax.lax.pmax(top, axes.vocab)
            norm, chosen = jax.lax.psum(
                jnp.stack([norm * jnp.exp(top - highest), chosen]), axes.vocab
            )
            top = highest
        log_norm = top + jnp.log(norm)
        value = (weight * (log_norm - chosen)).sum()
        if z_loss:
            z = z_loss * (weight * log_norm**2).sum()
            value = jnp.stack([value + z, z])
        return value, logits, log_norm, place

    def grow(carry, part):
        x, _, weight = part
        value, logits, log_norm, place = forward(part)
        hit = jnp.arange(head.shape[0])[None, :] == place[:, None]
        share = jnp.exp(logits.astype(wide) - log_norm[:, None])
        if z_loss:
            share = share * (1 + 2 * z_loss * log_norm)[:, None]
        dlogits = (share - (kept * hit + spread if spread else hit)) * weight[:, None]
        if logit_cap:  # of c tanh(z / c), told from its value
            dlogits = dlogits * (1 - jnp.square(logits.astype(wide) / logit_cap))
        dlogits = dlogits.astype(x.dtype)
        dhead = carry[1] + wide_einsum("nv,nd->vd", dlogits, x, wide)
        return (carry[0] + value, dhead), jnp.einsum("nv,vd->nd", dlogits, head)

    parts = (cut(x, width), cut(targets), cut(weights.astype(wide)))
    if not with_grads:
        return _sum(jax.lax.map(lambda part: forward(part)[0], parts).sum(0), axes.tokens)
    zero = (jnp.zeros((2,) if z_loss else (), wide), jnp.zeros(head.shape, wide))
    if count == 1:  # no accumulator to read and write back
        (value, dhead), dx = grow(zero, jax.tree.map(lambda part: part[0], parts))
    else:
        (value, dhead), dx = jax.lax.scan(grow, zero, parts)
    dx = _sum(dx.reshape(-1, width)[:total].reshape(x.shape), axes.vocab)
    return _sum(value, axes.tokens), dx, _sum(dhead, axes.tokens)


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
