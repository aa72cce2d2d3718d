"""Tasks that tell mixers apart: what is right is what a loop over the symbols says, and what a layer could store."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.app.sequences import memory_tasks
from experiments.app.sequences.series import SeriesConfig, open_task
from jaxpar.nn.mixers import RecurrenceExecution, delta_rule, linear_attention
from jaxpar.types import UsageError

TASKS = ("recall", "mqar", "delayed_copy", "s5")


def batch(task, step=5, **fields):
    task = open_task(SeriesConfig(task=task, batch_size=16, **fields), seed=3)
    return task, task.train(step)


def by_a_loop(task, line, fields):
    """What is right at each place of a line of symbols, None where nothing is asked, told place by place."""
    out, stored, waiting = [], {}, None
    for place, symbol in enumerate(line):
        answer = None
        if task == "delayed_copy":
            answer = (
                line[place - fields["length"]] - memory_tasks.KEYS
                if place >= fields["length"]
                else None
            )
        elif task == "s5":
            orders = list(itertools.permutations(range(5)))
            before = orders[out[-1]] if out else range(5)
            answer = orders.index(tuple(orders[symbol][thing] for thing in before))
        elif waiting is not None:
            stored[waiting], waiting = symbol - memory_tasks.KEYS, None
        elif symbol < memory_tasks.KEYS:
            is_question = place >= 2 * fields["symbols"]
            answer, waiting = (stored[symbol], None) if is_question else (None, symbol)
        out.append(answer)
    return out


@pytest.mark.parametrize("task", TASKS)
def test_what_is_right_is_what_a_loop_says(task):
    fields = dict(length=9, symbols=7)
    opened, got = batch(task, **fields)
    lines = got["inputs"].argmax(-1)
    assert (
        got["inputs"].shape == (16, opened.length, opened.inputs)
        and (got["inputs"].sum(-1) == 1).all()
    )
    for line, right, weights in zip(lines.tolist(), got["targets"], got["weights"], strict=True):
        want = by_a_loop(task, line, fields)
        assert (weights > 0).tolist() == [answer is not None for answer in want]
        assert [answer for answer in want if answer is not None] == right[weights > 0].tolist()
    assert got["targets"].max() < opened.outputs
    asked = got["weights"].sum(1)
    assert (asked == {"recall": 1, "mqar": 7, "delayed_copy": 7, "s5": 9}[task]).all()


@pytest.mark.parametrize("task", TASKS)
def test_a_batch_is_a_pure_function_of_seed_and_step(task):
    opened, got = batch(task, length=9, symbols=7)
    jax.tree.map(np.testing.assert_array_equal, got, batch(task, length=9, symbols=7)[1])
    assert not np.array_equal(got["inputs"], opened.train(6)["inputs"])
    assert not np.array_equal(got["inputs"], opened.validation[5]["inputs"])


def test_a_swap_and_a_cycle_make_every_permutation():
    table = memory_tasks.permutations(5)
    swap, cycle = (table[number] for number in memory_tasks.generators(5, 2))
    assert swap.tolist() == [1, 0, 2, 3, 4] and cycle.tolist() == [1, 2, 3, 4, 0]
    met, new = {tuple(range(5))}, [np.arange(5)]
    while new:
        new = [order[then] for order in new for then in (swap, cycle)]
        new = [
            order
            for order in {tuple(order): order for order in new}.values()
            if tuple(order) not in met
        ]
        met |= {tuple(order) for order in new}
    assert len(met) == 120 == len(set(memory_tasks.generators(5, 1000)))
    shown = batch("s5", length=9, symbols=2)[1]["inputs"].argmax(-1)
    assert set(shown.ravel()) == set(memory_tasks.generators(5, 2))


def test_a_question_has_the_newest_value_and_keys_do_come_again():
    lines = batch("recall", length=1, symbols=12)[1]["inputs"].argmax(-1)
    again = [np.unique(line[:24:2]).size < 12 for line in lines]
    assert sum(again) > 8


def test_questions_are_near_the_pairs_and_never_twice():
    """Of 1,000 rows the first free place is asked far more often than the last one, as a power law has it."""
    shown, _, judged = memory_tasks.mqar(np.random.default_rng(0), 1000, 4, 16)
    questions = judged[:, 8:]
    assert questions[:, 0].mean() > 3 * questions[:, -1].mean() > 0
    assert all(np.unique(row[place]).size == 4 for row, place in zip(shown, judged, strict=True))


def test_a_key_that_comes_again_is_what_the_delta_rule_is_for():
    """Keys and values as unit vectors, written at the value's place: the delta rule reads exactly what is right.

    Sums of all values of a key do not, where it has several.
    """
    _, got = batch("recall", length=1, symbols=12)
    lines = got["inputs"].argmax(-1)
    eye = jnp.eye(2 * memory_tasks.KEYS + 1)
    is_value = (lines >= memory_tasks.KEYS) & (lines < memory_tasks.BLANK)
    keys = np.concatenate([lines[:, :1], lines[:, :-1]], 1)  # of the place before
    k, v, q = eye[keys] * is_value[..., None], eye[lines], eye[lines]
    k, v, q = (x[:, :, None] for x in (k, v, q))
    right = got["targets"][:, -1]
    chunks = RecurrenceExecution(chunk=8)

    def read(out):
        return np.asarray(out[:, -1, 0, memory_tasks.KEYS : memory_tasks.BLANK])

    exact = read(delta_rule(q, k, v, jnp.ones(lines.shape)[..., None], execution=chunks)[0])
    np.testing.assert_allclose(exact, np.eye(memory_tasks.KEYS)[right], atol=1e-6)
    summed = read(linear_attention(q, k, v, execution=chunks)[0])
    assert (summed.sum(-1) > 1.5).any() and (summed[np.arange(16), right] > 0.5).all()


@pytest.mark.parametrize("fields", [dict(symbols=17, length=40), dict(symbols=10, length=9)])
def test_more_questions_than_there_is_room_for_are_refused(fields):
    with pytest.raises(
        UsageError, match=r"of data\.task=mqar is over the 16 keys or over data\.length=\d+"
    ):
        batch("mqar", **fields)
