"""Under the default laws a population lasts; under the first ones all die again and again."""

import pytest
from bench_modules import bench_modules

from jaxpar.life import Laws
from jaxpar.life.laws import FIRST_LAWS


@pytest.fixture
def bench():
    """The measurement of the docs' table, forgotten afterwards."""
    with bench_modules("life_laws") as modules:
        yield modules["life_laws"]


@pytest.mark.slow  # minutes on a busy core, most of them compiling
def test_a_small_population_lasts_by_the_default_laws_alone(bench):
    seeds = [20, 21, 22]
    found = bench.live(bench.small_world(), [Laws(), FIRST_LAWS], seeds, 1000)

    def by_laws(values):
        return values.reshape(2, len(seeds)).mean(1).tolist()

    # A small world may begin once or twice again until its population has children.
    lasting, first = by_laws(found.arrivals.sum(0))
    assert 4 * lasting < first
    lasting, first = by_laws(found.alive[len(found.alive) // 2 :].mean(0))
    assert lasting > 3 * first
    lasting, first = by_laws(found.births.mean(0))
    assert lasting > 10 * first, "by children, not by those who came first"


@pytest.mark.slow
@pytest.mark.gpu  # 3 min of an H200; 10 worlds of 128 slots on two cores take hours
def test_a_population_lasts_for_a_hundred_thousand_steps(bench):
    found = bench.live(bench.usual_world(), [Laws()], list(range(20, 30)), 100_000)
    assert (found.arrivals.sum(0) == 0).sum() >= 8
    assert (found.fewest.min(0) > 0).sum() >= 8
    later = found.alive[len(found.alive) // 2 :].mean(0)
    assert (later > 120).sum() >= 8, "of 128 slots"
