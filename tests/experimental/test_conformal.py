"""A running conformal quantile: shares are as asked for, p-values those of the definition, only ranks count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import OPTIMISED, jit

from jaxpar.experimental.conformal import (
    Calibration,
    conformal_p,
    conformal_rejects,
    empty_calibration,
)
from jaxpar.types import UsageError

SEEDS, SCORES = 20, 400
rejects = jax.jit(
    jax.vmap(conformal_rejects, in_axes=(0, None, 0, None)), compiler_options=OPTIMISED
)  # every seed has scores and a key of its own


def keys():
    return jax.random.split(jax.random.key(7), SEEDS)


@pytest.mark.parametrize("law", ["normal", "ties", "one value"])
@pytest.mark.parametrize("alpha", [0.05, 0.3])
def test_of_exchangeable_scores_the_share_is_alpha_from_the_first_on(law, alpha):
    rng = np.random.default_rng(0)
    scores = {
        "normal": rng.standard_normal((SEEDS, SCORES)),
        "ties": rng.integers(0, 3, (SEEDS, SCORES)),
        "one value": np.zeros((SEEDS, SCORES)),
    }[law]
    rejected, _ = rejects(
        keys(), empty_calibration(SCORES), jnp.asarray(scores, jnp.float32), alpha
    )
    spread = 3 * np.sqrt(alpha * (1 - alpha))
    assert (abs(np.mean(rejected, 1) - alpha) <= spread / np.sqrt(SCORES)).all(), "each of 20 seeds"


def test_each_of_the_first_scores_is_rejected_with_probability_alpha():
    streams, alpha = 4000, 0.3
    scores = np.random.default_rng(0).standard_normal((streams, 4)).astype(np.float32)
    rejected, _ = rejects(
        jax.random.split(jax.random.key(7), streams), empty_calibration(4), scores, alpha
    )
    assert (abs(np.mean(rejected, 0) - alpha) <= 3 * np.sqrt(alpha * (1 - alpha) / streams)).all()


def test_p_values_are_those_of_the_definition_and_the_oldest_are_forgotten():
    rng, size = np.random.default_rng(1), 5
    scores, uniforms = rng.integers(0, 6, 14).astype(np.float32), rng.random(14).astype(np.float32)
    valid, calibration, seen = rng.random(14) < 0.7, empty_calibration(size), []
    p = jit(conformal_p)
    for score, uniform, is_score in zip(scores, uniforms, valid, strict=True):
        before = seen[-size:]
        want = (
            sum(x < score for x in before) + uniform * (1 + sum(x == score for x in before))
        ) / (1 + len(before))
        assert p(calibration, score, uniform) == pytest.approx(want, rel=1e-6)
        _, calibration = conformal_rejects(
            keys()[0], calibration, score[None], 0.5, np.array([is_score])
        )
        seen += [score] * bool(is_score)
    assert calibration.seen == len(seen) > size and sorted(calibration.scores) == sorted(
        seen[-size:]
    )


def test_one_call_is_many_and_only_ranks_count():
    rng = np.random.default_rng(2)
    scores = jnp.asarray(rng.standard_normal((SEEDS, SCORES)), jnp.float32)
    first, after = rejects(keys(), empty_calibration(SCORES), scores, 0.2)
    again, _ = rejects(keys(), empty_calibration(SCORES), scores * 8, 0.2)
    assert (
        (first == again).all() and (after.seen == SCORES).all() and (after.scores == scores).all()
    )
    lowest = np.argsort(scores, axis=1)[:, :8]
    assert np.take_along_axis(np.asarray(first), lowest, 1)[lowest > 50].all(), (
        "the low ones are rejected"
    )


def test_none_and_all():
    scores = jnp.zeros((SEEDS, SCORES), jnp.float32)
    assert not rejects(keys(), empty_calibration(SCORES), scores, 0.0)[0].any()
    assert rejects(keys(), empty_calibration(SCORES), scores, 1.0)[0].all()
    full = Calibration(jnp.ones(3), jnp.int32(3))
    none, after = conformal_rejects(keys()[0], full, scores[0, :4], 1.0, jnp.zeros(4, bool))
    assert not none.any() and (after.scores == 1).all() and after.seen == 3
    with pytest.raises(UsageError, match="size=0 scores must be at least 1"):
        empty_calibration(0)
