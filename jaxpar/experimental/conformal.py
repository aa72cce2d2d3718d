"""What of a stream of scores to reject, so that a chosen share is, whatever their law: conformal p-values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxpar.types import PRNGKey, UsageError

__all__ = ["Calibration", "conformal_p", "conformal_rejects", "empty_calibration"]


class Calibration(NamedTuple):
    """The newest scores that were seen, and how many there have been: score i is in place i modulo N.

    Attributes:
      scores: float32 [N], of which the first min(N, seen) count.
      seen: int32 [].
    """

    scores: Float[Array, " N"]
    seen: Int[Array, ""]


def empty_calibration(size: int) -> Calibration:
    """Returns a calibration that remembers `size` scores."""
    if size < 1:
        raise UsageError(f"size={size} scores must be at least 1.")
    return Calibration(jnp.zeros(size, jnp.float32), jnp.zeros((), jnp.int32))


def conformal_p(
    calibration: Calibration, score: Float[Array, ""], uniform: Float[Array, ""]
) -> Float[Array, ""]:
    """Returns (number of lower scores + uniform (1 + number of equal ones)) / (1 + number of scores), O(N).

    Of exchangeable scores, ties among them or not, it is uniform on [0, 1); and as long as none is forgotten, one
    score's is independent of those before it (Vovk 2002, "On-line confidence machines are well-calibrated").

    Args:
      calibration: The scores before it.
      score: Low where one had better reject.
      uniform: Drawn on [0, 1), for this score alone.
    """
    known = jnp.arange(len(calibration.scores)) < calibration.seen
    lower, equal = known & (calibration.scores < score), known & (calibration.scores == score)
    return (lower.sum() + uniform * (1 + equal.sum())) / (1 + known.sum())


def conformal_rejects(
    key: PRNGKey,
    calibration: Calibration,
    scores: Float[Array, " M"],
    alpha: Float[Array, ""] | float,
    valid: Bool[Array, " M"] | None = None,
) -> tuple[Bool[Array, " M"], Calibration]:
    """Rejects a score whose `conformal_p` among those before it is under alpha, one after the other; O(M N).

    The threshold is a running quantile: exchangeable scores are rejected independently with probability alpha each,
    whatever their law, from the first one on. Where the law drifts, the N newest decide. Consumes `key`.

    Args:
      key: For ties with oneself: the first score has no other.
      calibration: The scores before these.
      scores: Low where one had better reject.
      alpha: Share to be rejected; 0 rejects none, 1 all.
      valid: Which are scores; others are neither rejected nor remembered.

    Returns:
      What is rejected, and the calibration after the last one.
    """
    valid = jnp.ones(len(scores), bool) if valid is None else valid

    def one(before: Calibration, x: tuple[Array, Array, Array]) -> tuple[Calibration, Array]:
        score, uniform, is_score = x
        place = jnp.where(is_score, before.seen % len(before.scores), len(before.scores))
        after = Calibration(before.scores.at[place].set(score, mode="drop"), before.seen + is_score)
        return after, is_score & (conformal_p(before, score, uniform) < alpha)

    uniforms = jax.random.uniform(key, (len(scores),))
    after, rejected = jax.lax.scan(
        one, calibration, (jnp.asarray(scores, jnp.float32), uniforms, valid)
    )
    return rejected, after
