"""The tables of a forest say what plain lists of tokens say, whatever is done to them."""

import jax
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
    arranged_view,
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
from jaxpar.types import UsageError


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


def test_more_than_there_are_is_not_kept():
    forest, _ = spawn(tables.empty(ROWS, SEGMENTS, BLOCKS, BLOCK), 1)
    forest, _ = reserve(forest, same(0, -1, -1), same(*[2 * LENGTH] * READERS))
    forest, _, slots = write(
        forest, lineage_view(forest, same(0, 0, -1)), same(LENGTH + 2, 1, 0), LENGTH
    )
    assert forest.length[:, 0].tolist() == [LENGTH + 1] * ROWS and not forest.refused.any()
    assert (
        np.sort(slots.reshape(ROWS, -1))[:, : LENGTH + 2].tolist()
        == [[*range(LENGTH + 1), BLOCKS * BLOCK]] * ROWS
    )


def test_a_reader_writes_to_what_comes_last():
    forest, _ = spawn(tables.empty(ROWS, SEGMENTS, BLOCKS, BLOCK), 2)
    forest, _ = spawn(forest, 1)
    forest, _ = reserve(forest, same(0, 1, -1), same(*[LENGTH] * READERS))
    forest, _, _ = write(forest, lineage_view(forest, same(0, 1, -1)), same(2, 2, 0), LENGTH)
    for target, *segments in ((1, 0, -1), (1, 1, 0)):
        with pytest.raises(
            UsageError, match="reader 2 of row 0 writes to segment 1, which holds tokens and is not"
        ):
            tables.arranged_view(
                forest, ints([[(0, 1), (1, 0), segments]] * ROWS), same(1, 2, target)
            )
    with pytest.raises(
        UsageError, match="reader 0 of row 1 writes to segment 0, which holds tokens"
    ):
        tables.joined_view(forest, ints([[1, 1]] * ROWS), ints([-1, 0]))
    view = tables.joined_view(forest, ints([[0, 1]] * ROWS), ints([2, 0]))
    assert view.write.tolist() == [[2], [0]] and view.offset[:, 0, :3].tolist() == [
        [0, 0, 2],
        [0, 0, 0],
    ]


def test_a_reader_sees_a_segment_once():
    forest, _ = spawn(tables.empty(ROWS, SEGMENTS, BLOCKS, BLOCK), 2)
    named = ints([[(0, 1, -1, -1), (1, 0, -1, -1), (0, 1, -1, 0)]] * ROWS)
    with pytest.raises(UsageError, match="reader 2 of row 0 sees segment 0 twice; name it once"):
        tables.arranged_view(forest, named, same(-1, -1, -1))
    named[0, 2, 0] = -1
    with pytest.raises(UsageError, match="reader 2 of row 1 sees"):
        tables.arranged_view(forest, named, same(-1, -1, -1))


def test_who_writes_nowhere_sees_no_more_for_it():
    forest = tables.empty(ROWS, SEGMENTS, BLOCKS, BLOCK)
    for count in (2, 2, 1):
        forest, _ = spawn(forest, count)
    forest, _ = reserve(forest, same(0, SEGMENTS - 1, -1), same(*[LENGTH] * READERS))
    forest, _, _ = write(
        forest, lineage_view(forest, same(0, SEGMENTS - 1, -1)), same(2, 1, 0), LENGTH
    )
    view = arranged_view(forest, np.full((ROWS, READERS, 2), [0, -1], np.int32), same(-1, -1, -1))
    after, seen, slots = write(forest, view, same(1, 1, 1), LENGTH)
    assert (
        (view.position == 2).all() and (slots == BLOCKS * BLOCK).all() and not after.refused.any()
    )
    jax.tree.map(np.testing.assert_array_equal, seen, view)


def test_a_chain_of_all_segments_is_seen_to_its_root():
    forest, last = spawn(tables.empty(ROWS, SEGMENTS, BLOCKS, BLOCK), 1)
    for number in range(SEGMENTS):
        forest, last = fork(forest, last[:, 0], 1) if number else (forest, last)
        forest, _ = reserve(forest, same(number, -1, -1), same(1, 0, 0))
        view = lineage_view(forest, same(number, -1, -1))
        forest, view, _ = write(forest, view, same(1, 0, 0), LENGTH)
    assert (view.seen[:, 0] == 1).all() and view.position[:, 0].tolist() == [SEGMENTS] * ROWS
