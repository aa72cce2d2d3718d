"""What a router is told besides the loss: to use all experts, to keep its logits small, to separate what differs.

All are means over the tokens they are given, weighted by the magnitudes of `weights`. Tokens of
weight 0 count nothing; without a token that counts each loss is 0, and so is its gradient. Over the
tokens of all devices they are the losses that `jaxpar.nn.auxiliary` sums: taken of whole arrays,
not of each device's own and then averaged.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = [
    "balance_loss",
    "bias_loss",
    "information_gain",
    "load",
    "mean_shares",
    "router_z_loss",
    "token_mean",
]


def token_mean(
    x: Float[Array, "*N_and_more"],
    weights: Float[Array, "*N"] | None = None,
    num_axes: int | None = None,
) -> Float[Array, "*more"]:
    """Returns sum_n |w_n| x_n / sum_n |w_n|, or 0 where no token has a weight.

    Magnitudes are taken, since weights of both signs could add up to nothing.

    Args:
      x: Values of tokens; the axes of tokens come first.
      weights: What each token counts; None for equal weights.
      num_axes: Number of axes of tokens where there are no weights; by default all but the last.
    """
    if weights is None:
        if num_axes is None:
            num_axes = x.ndim - 1
        return x.mean(tuple(range(num_axes)))

    weights = jnp.abs(weights).astype(x.dtype)
    axes = tuple(range(weights.ndim))
    total = weights.sum()
    widened = weights.reshape(*weights.shape, *(1,) * (x.ndim - weights.ndim))
    # Sums first, so that devices add them up together with the total.
    return _ratio((widened * x).sum(axes), total)


def load(
    expert: Int[Array, "*N k"],
    num_experts: int,
    dtype=jnp.float32,
    weights: Float[Array, "*N"] | None = None,
) -> Float[Array, " E"]:
    """Returns the share of all choices that each expert got; the sum is 1.

    An expert out of range is none.

    Args:
      expert: Experts that each token chose.
      num_experts: E.
      dtype: Data type of the result.
      weights: What each token counts; None for equal weights.
    """
    hot = jax.nn.one_hot(expert, num_experts, dtype=dtype)
    if weights is None:
        return hot.sum(tuple(range(expert.ndim))) / math.prod(expert.shape)
    return token_mean(hot.sum(-2), weights) / expert.shape[-1]


def mean_shares(
    scores: Float[Array, "*N E"],
    weights: Float[Array, "*N"] | None = None,
) -> Float[Array, " E"]:
    """Returns each expert's mean share of a token's scores; the sum is 1."""
    return token_mean(scores / scores.sum(-1, keepdims=True), weights)


def balance_loss(
    scores: Float[Array, "*N E"],
    expert: Int[Array, "*N k"],
    weights: Float[Array, "*N"] | None = None,
) -> Float[Array, ""]:
    """Computes E sum_e load_e mean_e, of which each expert's mean share of the scores has a gradient and the load none.

    1 where all are used alike, E where one expert gets all (GShard: arXiv:2006.16668, section 2.2, with all k choices
    counted; Switch: arXiv:2101.03961, eq. 4).
    """
    num_experts = scores.shape[-1]
    loads = load(expert, num_experts, scores.dtype, weights)
    return num_experts * jnp.sum(loads * mean_shares(scores, weights))


def router_z_loss(
    logits: Float[Array, "*N E"],
    weights: Float[Array, "*N"] | None = None,
) -> Float[Array, ""]:
    """Computes the mean square of the log normaliser of the logits (arXiv:2202.08906, eq. 5)."""
    squares = jax.nn.logsumexp(logits, -1) ** 2
    return token_mean(squares, weights, squares.ndim)


def bias_loss(
    bias: Float[Array, " E"],
    expert: Int[Array, "*N k"],
    weights: Float[Array, "*N"] | None = None,
) -> Float[Array, ""]:
    """Returns 0, with the gradient sign(load_e - 1 / E) in the bias of expert e.

    So a step of gradient descent lowers the bias of experts that got too much and raises that of the others by the
    same amount (arXiv:2408.15664, algorithm 1); Adam's moves it by up to its learning rate.
    Where no token counts the gradient is 0.
    """
    loads = load(expert, bias.shape[-1], bias.dtype, weights)
    toward = jnp.sign(loads - 1 / bias.shape[-1])
    if weights is not None:
        toward = jnp.where(jnp.any(weights != 0), toward, 0)
    return jnp.sum(jax.lax.stop_gradient(toward) * (bias - jax.lax.stop_gradient(bias)))


def information_gain(
    scores: Float[Array, "*N E"],
    classes: Int[Array, " *N"] | None = None,
    num_classes: int = 0,
    weights: Float[Array, "*N"] | None = None,
) -> Float[Array, ""]:
    """Computes H(expert) - H(expert | class) in nats, from means of the scores over the tokens; to be made large.

    From 0, where the choice says nothing of the class, to the logarithm of E or of C (Conditional Information Gain
    Trellis: Bicici, Meral and Akarun 2024).

    Args:
      scores: Each token's, of sum 1 (`softmax`).
      classes: Of each token, in [0, C); by default each token is a class of its own.
      num_classes: C.
      weights: What each token counts; None for equal weights.
    """
    flat = scores.reshape(-1, scores.shape[-1])
    flat_weights = None
    if weights is not None:
        flat_weights = jnp.abs(weights).reshape(-1).astype(flat.dtype)
    if classes is None:
        own = token_mean(_entropy(flat), flat_weights, 1)
        return _entropy(token_mean(flat, flat_weights)) - own

    hot = jax.nn.one_hot(classes.reshape(-1), num_classes, dtype=flat.dtype)
    if flat_weights is None:
        joint = jnp.einsum("nc,ne->ce", hot, flat) / flat.shape[0]
    else:
        weighted = flat_weights[:, None] * hot
        joint = _ratio(jnp.einsum("nc,ne->ce", weighted, flat), flat_weights.sum())
    of_pairs = _entropy(joint.reshape(-1))
    return _entropy(joint.sum(0)) + _entropy(joint.sum(1)) - of_pairs


def _ratio(sums: jax.Array, total: jax.Array) -> jax.Array:
    """Divides sums by their total weight; 0 where nothing was summed."""
    return jnp.where(total > 0, sums / jnp.where(total > 0, total, 1), 0)


def _entropy(p: jax.Array) -> jax.Array:
    """Sums -p log p along the last axis; the gradient is 0 where p is."""
    return -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0), -1)
