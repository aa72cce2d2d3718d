"""Sigmoids of return against compute: planted curves are found, intervals cover what comes, a run gives a curve."""

import numpy as np
import pytest

from experiments.papers.rl_scaling import Curve, fit, foretold, learned, share
from jaxpar.types import UsageError

COMPUTE = np.linspace(1e4, 4e5, 20)


@pytest.mark.parametrize("planted", [Curve(20.0, 480.0, 9e4, 2.3), Curve(-500.0, -80.0, 3e4, 1.1)])
def test_planted_curves_are_found(planted):
    found = fit(COMPUTE, planted(COMPUTE), rounds=12)
    np.testing.assert_allclose(found, planted, rtol=1e-3)
    np.testing.assert_allclose(found(np.array(1e6)), planted(np.array(1e6)), rtol=1e-3)


def test_half_of_the_way_is_at_the_middle():
    assert share(np.array(5.0), np.array(5.0), np.array(3.0)) == 0.5
    np.testing.assert_allclose(share(np.array(10.0), np.array(5.0), np.array(3.0)), 1 / (1 + 1 / 8))


def test_a_fit_beats_all_others_nearby():
    rng = np.random.default_rng(0)
    returns = Curve(0.0, 1.0, 1e5, 2.0)(COMPUTE) + 0.05 * rng.standard_normal(20)
    found = fit(COMPUTE, returns)

    def error(curve):
        return ((curve(COMPUTE) - returns) ** 2).sum()

    near = [Curve(*(np.array(found) * (1 + 0.02 * rng.standard_normal(4)))) for _ in range(200)]
    assert error(found) <= min(map(error, near))


@pytest.mark.slow  # 60 s
def test_intervals_cover_what_comes():
    """Of noise planted on a curve whose first half is seen: 90 % are 80 to 98 of 100."""
    planted, inside = Curve(0.0, 1.0, 8e4, 2.0), 0
    for seed in range(100):
        noisy = planted(COMPUTE) + 0.03 * np.random.default_rng(seed).standard_normal(20)
        _, low, high = foretold(COMPUTE[:10], noisy[:10], COMPUTE[-1], draws=60, seed=seed)
        inside += low <= noisy[-1] <= high
    assert 80 <= inside <= 98, inside


@pytest.mark.slow  # 15 s
def test_a_group_of_seeds_gives_a_curve_that_rises():
    compute, returns = learned("CartPole-v1", 0, 40, seeds=2)
    assert (
        compute[-1] == 40 * 16 * 64
        and returns.shape == (20,)
        and returns[-3:].mean() > 1.5 * returns[:3].mean()
    )


def test_mistakes_are_told():
    with pytest.raises(UsageError, match="five or more finite returns at compute over 0, not 3"):
        fit(COMPUTE[:3], COMPUTE[:3])
    with pytest.raises(UsageError, match="five or more finite"):
        fit(COMPUTE, np.full(20, np.nan))
