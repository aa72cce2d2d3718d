"""Which experts a token goes to, and with what weights; or which tokens an expert takes.

All of it is in float32 at least, of every token alone: no mesh changes it. Ties go to the lower index.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.fields import AtLeast, OneOf, check_value
from jaxpar.nn.norm import wide_dtype
from jaxpar.types import PRNGKey, UsageError

__all__ = [
    "SCORES",
    "ExpertChoice",
    "Routing",
    "check_router",
    "expert_choice",
    "heard",
    "log_scores",
    "noisy",
    "route",
    "weights_by_expert",
]

SCORES = {"softmax": jax.nn.log_softmax, "sigmoid": jax.nn.log_sigmoid}
"""The logarithms of scores from logits."""


class Routing(NamedTuple):
    """What tokens chose.

    Attributes:
      expert: The k experts of each token, best first.
      weight: What each of them counts.
      scores: Of all experts.
    """

    expert: Int[Array, "... k"]
    weight: Float[Array, "... k"]
    scores: Float[Array, "... E"]


class ExpertChoice(NamedTuple):
    """What experts chose.

    Attributes:
      token: The C tokens of each expert, best first.
      weight: What the expert counts for each of them.
      scores: Of all experts.
    """

    token: Int[Array, "E C"]
    weight: Float[Array, "E C"]
    scores: Float[Array, "N E"]


def check_router(num_experts: int, experts_per_token: int, normalise: bool) -> None:
    """Rejects more choices than there are experts, and weights of which no router learns.

    Raises:
      UsageError: If it is so.
    """
    if experts_per_token > num_experts:
        raise UsageError(
            f"experts_per_token={experts_per_token} is over num_experts={num_experts}; "
            f"legal are 1 to {num_experts}."
        )
    if normalise and experts_per_token == 1 < num_experts:
        raise UsageError(
            "experts_per_token=1 with normalise=True makes every weight 1, of which no router "
            "learns; take normalise=False."
        )


def log_scores(logits: Float[Array, "*N E"], scores: str = "softmax") -> Float[Array, "*N E"]:
    """Returns the logarithms of the scores, float32 at least.

    Raises:
      UsageError: For unknown scores.
    """
    if scores not in SCORES:
        raise UsageError(f"scores={scores!r} is unknown; legal are {OneOf(SCORES)}.")
    return SCORES[scores](logits.astype(wide_dtype(logits)))


def route(
    logits: Float[Array, "*N E"],
    k: int,
    *,
    scores: str = "softmax",
    normalise: bool = True,
    bias: Float[Array, " E"] | None = None,
) -> Routing:
    """Chooses the k experts of the largest logits, or of the largest score + bias.

    Weights are the chosen experts' scores, or each as a share of their sum. The bias enters the choice and nothing
    else (balance without a loss: arXiv:2408.15664): it has no gradient here. Of one expert a token the normalised
    weight is 1, and the logits have no gradient.

    Args:
      logits: Of the router.
      k: Experts a token.
      scores: "softmax" over all experts (arXiv:2006.16668), or "sigmoid" of each (arXiv:2408.15664).
      normalise: Whether a token's weights sum to 1.
      bias: Added to the scores where experts are chosen.

    Cost: O(E log k) a token.

    Raises:
      UsageError: If k is not from 1 to E, or the scores are unknown.
    """
    num_experts = logits.shape[-1]
    _check_count("k", k, num_experts, "experts")
    logs = log_scores(logits, scores)
    values = jnp.exp(logs)
    # Logits differ where scores have been rounded to the same number.
    rank = (
        logits.astype(values.dtype)
        if bias is None
        else values + jnp.broadcast_to(bias, values.shape)
    )
    _, expert = jax.lax.top_k(jax.lax.stop_gradient(rank), k)
    if normalise:  # never 0 / 0, however small the scores
        weight = jax.nn.softmax(jnp.take_along_axis(logs, expert, -1))
    else:
        weight = jnp.take_along_axis(values, expert, -1)
    return Routing(expert, weight, values)


def noisy(key: PRNGKey, logits: Float[Array, "*N E"], scale: float) -> Float[Array, "*N E"]:
    """Returns logits + scale * normal noise, float32 at least, for `route` while training. Consumes `key`."""
    wide = wide_dtype(logits)
    return logits.astype(wide) + scale * jax.random.normal(key, logits.shape, wide)


def heard(
    expert: Int[Array, "*N k"], weight: Float[Array, "*N k"], answers: Bool[Array, "*N E"]
) -> tuple[Int[Array, "*N k"], Float[Array, "*N k"]]:
    """Leaves out the chosen experts that fail or are late; those that answer count as much together as all would have.

    So zero failures change no number, and gradients flow to those that answered alone (Learning@home: Ryabinin and
    Gusev 2020, arXiv:2002.04013, section 3.1).

    Args:
      expert: What tokens chose; E is nobody.
      weight: What each choice counts, not negative.
      answers: Whether an expert answers a token in time.

    Returns:
      Experts, E in the place of silent ones, and weights. All are 0 where nobody answers who counts anything.
    """
    num_experts = answers.shape[-1]
    known = jnp.take_along_axis(answers, jnp.minimum(expert, num_experts - 1), -1) & (
        expert < num_experts
    )
    left = jnp.where(known, weight, 0)
    total, rest = weight.sum(-1, keepdims=True), left.sum(-1, keepdims=True)
    return jnp.where(known, expert, num_experts), left * jnp.where(
        rest > 0, total / jnp.where(rest > 0, rest, 1), 0
    )


def expert_choice(
    logits: Float[Array, "N E"], capacity: int, *, scores: str = "softmax"
) -> ExpertChoice:
    """Lets each expert take the C tokens that score it highest (arXiv:2202.09368); some tokens get none.

    Whether a token is taken depends on all others, later ones as well: not for models that predict the next token.

    Args:
      logits: Of the router.
      capacity: C.
      scores: As of `route`.

    Raises:
      UsageError: If C is not from 1 to N.
    """
    _check_count("capacity", capacity, logits.shape[0], "tokens")
    logs = log_scores(logits, scores)
    # Softmax compares experts, so an expert's order of tokens is that of its scores, not of its logits.
    _, token = jax.lax.top_k(jax.lax.stop_gradient(logs.T), capacity)
    values = jnp.exp(logs)
    return ExpertChoice(token.astype(jnp.int32), jnp.take_along_axis(values.T, token, 1), values)


def weights_by_expert(routing: Routing) -> Float[Array, "*N E"]:
    """Returns what each expert counts for each token, 0 where it was not chosen: the weights of the dense mixture."""
    hot = jax.nn.one_hot(routing.expert, routing.scores.shape[-1], dtype=routing.weight.dtype)
    return jnp.einsum("...k,...ke->...e", routing.weight, hot)


def _check_count(name: str, count: int, most: int, of: str) -> None:
    check_value(name, count, AtLeast(1), int)
    if count > most:
        raise UsageError(
            f"{name}={count} is over the {most} {of} that there are; legal are 1 to {most}."
        )
