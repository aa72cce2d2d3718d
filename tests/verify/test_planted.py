"""Planted errors: four of the table are found a day, all by `make test-slow`; the table is whole."""

import collections
import datetime
import functools
import os

import pytest

from tests.verify import planted as planting
from tests.verify.errors import ERRORS
from tests.verify.outside import BEYOND, OUTSIDE
from tests.verify.planted import KINDS, Planted, planted, resolve, verify_error

ALL = tuple(error for error in (*ERRORS, *OUTSIDE) if error.name not in BEYOND)
A_DAY = 4
VARIABLE = "JAXPAR_PLANTED"
"""Environment variable that names the errors of today by the number of a day."""


def day():
    """Returns the number of the day that chooses errors."""
    given = os.environ.get(VARIABLE, "")
    if given:
        return int(given)
    return datetime.date.today().toordinal()


def seconds_of(error):
    """Estimates, in no unit, what verifying an error costs: stages compile longest."""
    cost = 1
    cost += 8 * ("stage" in error.layout)
    cost += 4 * ("expert" in error.layout)
    cost += 2 * ("context" in error.layout)
    cost += 3 * bool(error.flags)
    return cost


def errors_of_day(number):
    """Returns the errors of a day, cheap ones first; all of the table come on some day."""
    stride = -(-len(ALL) // A_DAY)
    first = number % stride
    # Neighbours in the table share a kind: errors of a day lie a stride apart.
    return sorted(ALL[first::stride], key=seconds_of)


@functools.cache
def clean(flags):
    """Returns a configuration with its twins, which errors with the same flags share."""
    return planting.Clean(flags)


def test_errors_of_today_are_seen():
    number = day()
    missed = []
    for error in errors_of_day(number):
        row = verify_error(clean(error.flags), error)
        if not row.breaches:
            missed.append(f"{error.kind}: {error.name} ({error.target}, {error.layout})")
    again = f"again by {VARIABLE}={number}"
    assert not missed, "\n".join(["not found:", *missed, again])


@pytest.mark.slow  # 10 to 30 CPU s each
@pytest.mark.parametrize("error", ALL, ids=lambda error: f"{error.kind}: {error.name}")
def test_every_error_is_seen(error):
    row = verify_error(clean(error.flags), error)
    assert row.breaches, error


def test_every_error_has_a_day():
    stride = -(-len(ALL) // A_DAY)
    days = [errors_of_day(number) for number in range(stride)]
    names = [error.name for errors in days for error in errors]
    assert sorted(names) == sorted(error.name for error in ALL)
    assert max(map(len, days)) <= A_DAY


def test_the_table_is_large_and_of_every_kind():
    assert len(ALL) >= 48
    seen_outside = [error for error in OUTSIDE if error.name not in BEYOND]
    assert len(seen_outside) >= 24
    assert set(BEYOND) <= {error.name for error in OUTSIDE}
    counts = collections.Counter(error.kind for error in ALL)
    assert set(counts) == set(KINDS)
    few = {kind: count for kind, count in counts.items() if count < 4}
    assert not few


def test_names_of_errors_differ():
    names = collections.Counter(error.name for error in ALL)
    assert not [name for name, count in names.items() if count > 1]


@pytest.mark.parametrize("error", ALL, ids=lambda error: f"{error.kind}: {error.name}")
def test_what_an_error_replaces_is_there(error):
    holders = resolve(error.target)
    assert holders
    for holder, names in holders:
        assert names, holder


def holders_of(target):
    """Returns all that holds what a target names, with what it holds."""
    found = []
    for holder, names in resolve(target):
        found += [(holder, name, vars(holder)[name]) for name in names]
    return found


def wrap(right):
    """Returns another function than the right one."""
    return lambda *args, **options: right(*args, **options)


TARGETS = (
    "jaxpar.pipeline.accumulation:parts_of",  # a function, which several modules hold
    "jaxpar.pipeline.accumulation:InTurn.__call__",  # a method
    "jaxpar.nn.experts.sharded.choose:LeastSent.of",
)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fails", [False, True])
def test_what_was_replaced_comes_back(target, fails):
    error = Planted("batch", "nothing", target, wrap, "data8")
    before = holders_of(target)
    try:
        with planted(error):
            for holder, name, value in before:
                assert vars(holder)[name] is not value
            if fails:
                raise KeyError(target)
    except KeyError:
        assert fails
    for holder, name, value in before:
        assert vars(holder)[name] is value


def test_a_property_stays_one(monkeypatch):
    class Owner:
        @property
        def size(self):
            return 2

    monkeypatch.setattr(planting, "Owner", Owner, raising=False)
    error = Planted(
        "batch",
        "twice",
        "tests.verify.planted:Owner.size",
        lambda right: lambda self: 2 * right(self),
        "data8",
    )
    with planted(error):
        assert Owner().size == 4
    assert Owner().size == 2


def test_a_target_that_is_not_there_is_an_error():
    error = Planted("batch", "nothing", "jaxpar.pipeline.accumulation:no_such", wrap, "data8")
    with pytest.raises(LookupError, match="jaxpar.pipeline.accumulation:no_such"), planted(error):
        pass
