"""No row of the grid is called converged and is wrong: 30 rows here, all pairs in the slow suite, all in `bench/`."""

import itertools

import pytest
from method_grid import DTYPES, LENGTHS, METHODS, RECURRENCES, Row, Verdict, cover, judged

COVER = cover()
EVERY = 19
"""One row of so many runs each time: 30 of all, each method, dtype and length among them."""


def name_of(row):
    return f"{row.method}-{row.recurrence}-{row.dtype}-{row.length}"


def check(row):
    found = judged(row)
    assert not found.is_wrong, found


@pytest.mark.parametrize("row", COVER[3::EVERY], ids=name_of)
def test_some_rows(row):
    check(row)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", [row for place, row in enumerate(COVER) if place % EVERY != 3], ids=name_of
)
def test_all_pairs(row):
    check(row)


def test_the_cover_has_all_pairs():
    assert len(RECURRENCES) >= 60 and len(COVER) <= 600
    axes = (METHODS, [recurrence.name for recurrence in RECURRENCES], DTYPES, LENGTHS)
    for (one, values), (other, others) in itertools.combinations(enumerate(axes), 2):
        seen = {(row[one], row[other]) for row in COVER}
        assert seen == set(itertools.product(values, others))
    some = COVER[3::EVERY]
    assert len(some) <= 30
    for place in (0, 2, 3):
        assert {row[place] for row in some} == set(axes[place])


@pytest.mark.parametrize(
    ("verdict", "is_wrong"),
    [
        (Verdict(True, 0.5, 0.5, 0.5), False),
        (Verdict(True, 1.5, 0.5, 0.5), True),
        (Verdict(True, 0.5, 1.5, 0.5), True),
        (Verdict(True, 0.5, 0.5, 1.5), True),
        (Verdict(True, 0.5, 0.5, float("nan")), True),
        (Verdict(True, 0.5, float("nan"), 0.5), True),
        (Verdict(True, float("nan"), 0.5, 0.5), True),
        (Verdict(False, 9.0, 9.0, 9.0), False),
    ],
)
def test_a_verdict_needs_value_and_gradient(verdict, is_wrong):
    assert verdict.is_wrong == is_wrong


def test_ordinary_rows_are_solved():
    """A solver that never says that it converged would pass all of the above."""
    names = ("gru", "nanomoles", "kalman", "saturating", "relu_net", "momentum", "shares")
    solved = [judged(Row("newton", name, "float32", 64)) for name in names]
    assert all(found.converged and found.is_right for found in solved)
