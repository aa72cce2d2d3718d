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
    found = bench.live(bench.small_world(), [Laws(), FIRST_LAWS], [20], 1000)
    # A small world may begin once or twice again until its population has children.
    lasting, first = found.arrivals.sum(0).tolist()
    assert 3 * lasting < first
    later = found.alive[len(found.alive) // 2 :].mean(0)
    assert later[0] > 40, "of 64 slots"
    assert later[1] < 16
    assert found.births.mean(0)[0] > 0.02, "by children, not by those who came first"


@pytest.mark.slow
@pytest.mark.gpu  # 3 min of an H200; 10 worlds of 128 slots on two cores take hours
def test_a_population_lasts_for_a_hundred_thousand_steps(bench):
    found = bench.live(bench.usual_world(), [Laws()], list(range(20, 30)), 100_000)
    assert (found.arrivals.sum(0) == 0).sum() >= 8
    assert (found.fewest.min(0) > 0).sum() >= 8
    later = found.alive[len(found.alive) // 2 :].mean(0)
    assert (later > 120).sum() >= 8, "of 128 slots"
