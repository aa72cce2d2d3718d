"""The command of pipelined speculation: schedules change no token and take the ticks of a plain count."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.papers import pipelined_speculation
from experiments.papers._ticks import VOCAB, Schedule, expected_ticks, simulate

SIZE, SEEDS, HIT = 120, 20, 0.6
TABLE = np.random.default_rng(0).integers(0, VOCAB, (VOCAB, 7))
SCHEDULES = [
    Schedule(3),
    Schedule(4, 3, 3),
    Schedule(4, 3, 3, ahead=2),
    Schedule(4, 2, 1, ahead=3),
    Schedule(5, 1, 1, continuous=True),
    Schedule(5, 3, 2, continuous=True),
    Schedule(4, 2, 4, continuous=True),
    Schedule(5, 3, 2, continuous=True, cancel=False),
]


def language(token, position):
    return jnp.asarray(TABLE, jnp.int32)[token, position % 7]


def greedy(size):
    text = [1]
    for position in range(1, size):
        text.append(int(TABLE[text[-1], position % 7]))
    return text


def ended(schedule, agrees, hits):
    one = lambda agrees, hits: simulate(schedule, language, agrees, hits)  # noqa: E731
    return jax.device_get(jax.vmap(one)(jnp.asarray(agrees), jnp.asarray(hits)))


def counted(schedule, agrees, hits):
    """Ticks until every token is certain, counted from mistake to mistake; pipeline and draft as two sums."""
    right = lambda position: agrees[min(position, len(agrees) - 1)]  # noqa: E731
    time = place = 0
    if not schedule.continuous:
        time = schedule.draft_ticks
        while True:
            time, correct = time + schedule.stages, 0
            while correct < schedule.guesses and right(place + 1 + correct):
                correct += 1
            place += correct + 1
            if place + 1 >= len(agrees):
                return time
            time += schedule.draft_ticks - hits[place] * min(schedule.ahead, schedule.draft_ticks)
    while True:
        time, place, runs = time + schedule.stages, place + 1, 0  # what follows the known token
        while place + 1 < len(agrees) and right(place):
            runs, left = runs + 1, schedule.guesses
            while left and right(place):  # each right guess has its successor verified
                place, left = place + 1, left - 1
            if left:
                break
        time += runs * schedule.draft_ticks
        if place + 1 >= len(agrees):
            return time


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_tokens_are_those_of_the_greedy_loop_and_each_is_verified_once(schedule):
    rng = np.random.default_rng(1)
    rates = np.linspace(0, 1, SEEDS)[:, None]  # never right, and never wrong, among them
    agrees, hits = rng.random((SEEDS, SIZE)) < rates, rng.random((SEEDS, SIZE)) < HIT
    end = ended(schedule, agrees, hits)
    assert (end.text == greedy(SIZE)).all()
    reads = np.arange(SIZE) < end.length[:, None] - 1  # the last certain token is no run's yet
    assert (end.reads == reads).all()
    under_way = (end.runs.length > 0).sum(1)
    assert (end.started == end.kept + end.stale + end.cancelled + under_way).all()
    assert (
        end.ticks == [counted(schedule, *rows) for rows in zip(agrees, hits, strict=True)]
    ).all()
    assert (end.busy <= schedule.stages * end.ticks).all()
    if schedule.cancel:
        assert not end.stale.any()
    else:
        assert not end.cancelled.any() and end.stale[:-1].all()


def test_cancelling_saves_work_and_no_tick():
    rng = np.random.default_rng(2)
    agrees, hits = rng.random((SEEDS, SIZE)) < 0.7, np.ones((SEEDS, SIZE), bool)
    kept, stopped = (ended(schedule, agrees, hits) for schedule in (SCHEDULES[-1], SCHEDULES[-3]))
    assert SCHEDULES[-1]._replace(cancel=True) == SCHEDULES[-3]
    assert (kept.ticks == stopped.ticks).all() and (kept.busy > stopped.busy).all()


@pytest.mark.parametrize("schedule", SCHEDULES[:-1], ids=str)
def test_ticks_a_token_are_those_of_the_closed_form(schedule):
    """By the plain count, which the simulator equals tick for tick above, and so over far more tokens."""
    rng, size = np.random.default_rng(3), 4000
    for acceptance in (0.0, 0.45, 0.9, 1.0):
        found = [
            counted(schedule, rng.random(size) < acceptance, rng.random(size) < HIT) / (size - 1)
            for _ in range(SEEDS)
        ]
        error = np.std(found, ddof=1) / np.sqrt(SEEDS)
        rounding = (
            schedule.stages + schedule.draft_ticks + schedule.guesses
        ) / size  # first draft, where it is cut
        assert (
            abs(np.mean(found) - expected_ticks(schedule, acceptance, HIT)) <= 3 * error + rounding
        )


def test_the_command_tells_and_writes(main, tmp_path):
    flags = (
        "stages=4 early=2 acceptance=[0.5,0.9] tokens=60 hydra.run.dir=run cpu_devices=8".split()
    )
    said = main(*flags, of="pipelined_speculation")
    assert said.code == 0, said
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [50, 90]
    for row in rows:
        assert row["plain/ticks"] == row["plain/closed_form"] == 4
        assert row["mirrored/ticks"] <= row["in_turn/ticks"]
        assert row["not_cancelled/ticks"] == row["pipelined/ticks"]
        assert row["not_cancelled/work"] > row["pipelined/work"]
        assert f"{row['pipelined/ticks']:.3f}" in said.out
    assert (tmp_path / "run" / "plots" / "ticks.png").stat().st_size > 1000


def test_a_wrong_text_is_noticed(monkeypatch):
    right = pipelined_speculation.simulate

    def wrong(*arguments):
        end = right(*arguments)
        return end._replace(text=end.text.at[-1].add(1))

    monkeypatch.setattr(pipelined_speculation, "simulate", wrong)
    config = pipelined_speculation.compose("tokens=9", "acceptance=[0.5]")
    with pytest.raises(AssertionError, match="other tokens than the greedy loop"):
        pipelined_speculation.run(config, Schedule(2))


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("early=9", "early=9 is after the last of stages=8"),
        (
            "pipelined=9",
            "pipelined=9 guesses take the draft 9 ticks, and the pipeline of stages=8 would run empty",
        ),
        ("acceptance=[0.9,0.5]", "must rise, by whole percents"),
        ("acceptance=[]", "must rise, by whole percents"),
        ("hit=1.1", "hit=1.1 must be at least 0 and at most 1"),
        ("mesh.data=8 cpu_devices=8", "a simulation of ticks has nothing along data"),
    ],
)
def test_mistakes_end_in_a_sentence(main, flags, sentence):
    assert re.search(sentence, main(*flags.split(), of="pipelined_speculation").sentence())
