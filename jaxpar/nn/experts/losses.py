"""What a router is told besides the loss: to use all experts, to keep its logits small, to separate what differs.

All are means over the tokens they are given. Of the tokens of all devices they are the losses that
`jaxpar.nn.auxiliary` asks for: taken of whole arrays, not of each device's own and then averaged.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

__all__ = ["balance_loss", "bias_loss", "information_gain", "load", "router_z_loss"]


def load(expert: Int[Array, "*N k"], num_experts: int, dtype=jnp.float32) -> Float[Array, " E"]:
    """Returns the share of all choices that each expert got; the sum is 1. An expert out of range is nobody's."""
    hot = jax.nn.one_hot(expert, num_experts, dtype=dtype)
    return hot.sum(tuple(range(expert.ndim))) / math.prod(expert.shape)


def balance_loss(scores: Float[Array, "*N E"], expert: Int[Array, "*N k"]) -> Float[Array, ""]:
    """Computes E sum_e load_e mean_e, of which each expert's mean share of the scores has a gradient and the load none.

    1 where all are used alike, E where one expert gets all (GShard: arXiv:2006.16668, section 2.2, with all k choices
    counted; Switch: arXiv:2101.03961, eq. 4).
    """
    num_experts = scores.shape[-1]
    shares = scores / scores.sum(-1, keepdims=True)
    mean = shares.mean(tuple(range(shares.ndim - 1)))
    return num_experts * jnp.sum(load(expert, num_experts, scores.dtype) * mean)


def router_z_loss(logits: Float[Array, "*N E"]) -> Float[Array, ""]:
    """Computes the mean square of the log normaliser of the logits (arXiv:2202.08906, eq. 5)."""
    return jnp.mean(jax.nn.logsumexp(logits, -1) ** 2)


def bias_loss(bias: Float[Array, " E"], expert: Int[Array, "*N k"]) -> Float[Array, ""]:
    """Returns 0, with the gradient sign(load_e - 1 / E) in the bias of expert e.

    So a step of gradient descent lowers the bias of experts that got too much and raises that of the others by the
    same amount (arXiv:2408.15664, algorithm 1); Adam's moves it by up to its learning rate.
    """
    toward = jnp.sign(load(expert, bias.shape[-1], bias.dtype) - 1 / bias.shape[-1])
    return jnp.sum(jax.lax.stop_gradient(toward) * (bias - jax.lax.stop_gradient(bias)))


def information_gain(
    scores: Float[Array, "*N E"], classes: Int[Array, " *N"] | None = None, num_classes: int = 0
) -> Float[Array, ""]:
    """Computes H(expert) - H(expert | class) in nats, from means of the scores over the tokens; to be made large.

    From 0, where the choice says nothing of the class, to the logarithm of E or of C (Conditional Information Gain
    Trellis: Bicici, Meral and Akarun 2024).

    Args:
      scores: Each token's, of sum 1 (`softmax`).
      classes: Of each token, in [0, C); by default each token is a class of its own.
      num_classes: C.
    """
    flat = scores.reshape(-1, scores.shape[-1])
    if classes is None:
        return _entropy(flat.mean(0)) - _entropy(flat).sum() / flat.shape[0]
    hot = jax.nn.one_hot(classes.reshape(-1), num_classes, dtype=flat.dtype)
    joint = jnp.einsum("nc,ne->ce", hot, flat) / flat.shape[0]
    return _entropy(joint.sum(0)) + _entropy(joint.sum(1)) - _entropy(joint)


def _entropy(p: jax.Array) -> jax.Array:
    """The sum of -p log p, whose gradient is 0 where p is."""
    return -jnp.sum(jnp.where(p > 0, p * jnp.log(jnp.where(p > 0, p, 1)), 0))
