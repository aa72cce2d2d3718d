"""The tables of a forest say what plain lists of tokens say, whatever is done to them."""

import numpy as np
import pytest
from forest_twin import (
    BLOCK,
    BLOCKS,
    LENGTH,
    READERS,
    ROWS,
    SEGMENTS,
    Twin,
    fork,
    ints,
    lineage_view,
    release,
    reserve,
    spawn,
    steps,
    write,
)
from hypothesis import given, settings

from jaxpar.decode import forest as tables


@pytest.mark.parametrize("masked", [False, True], ids=["places", "slots"])
@settings(max_examples=60, deadline=None)
@given(steps)
def test_any_steps_lead_to_what_lists_say(masked, steps):
    Twin(masked).run(steps)


def same(*numbers):
    return ints([numbers] * ROWS)


def test_what_the_living_go_on_from_stays_however_far_up():
    forest, root = spawn(tables.empty(ROWS, SEGMENTS, BLOCKS, BLOCK), 1)
    forest, child = fork(forest, root[:, 0], 1)
    forest, _ = fork(forest, child[:, 0], 1)
    kept = release(forest, same(0, 1, -1))
    assert kept.live.sum(1).tolist() == [3] * ROWS and kept.refused.tolist() == [2] * ROWS
    gone = release(forest, same(0, 2, 1))
    assert not gone.live.any() and not gone.refused.any()


def test_a_child_begins_after_its_parents_places_not_its_slots():
    """Two readers of one segment stand at the same places: three slots, two places."""
    forest, _ = spawn(tables.empty(ROWS, SEGMENTS, BLOCKS, BLOCK), 1)
    forest, _ = reserve(forest, same(0, -1, -1), same(*[2 * LENGTH] * READERS))
    forest, _, _ = write(forest, lineage_view(forest, same(0, 0, -1)), same(2, 1, 0), LENGTH)
    forest, child = fork(forest, same(0)[:, 0], 1)
    view = lineage_view(forest, np.repeat(child, READERS, 1))
    assert forest.length[:, 0].tolist() == [3] * ROWS and (view.position == 2).all()
