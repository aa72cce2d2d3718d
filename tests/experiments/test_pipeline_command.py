"""`python -m experiments.pipeline`: schedules compared at given costs, drawn, and mistakes in a sentence."""

import json
import re

import pytest

from experiments import pipeline
from jaxpar.pipeline import Op, simulate_schedule


def test_the_table_has_the_times_of_closed_forms(main, tmp_path):
    said = main(
        "schedules=[gpipe,zb_h1,interleaved]",
        "hydra.run.dir=run",
        "text=true",
        "cpu_devices=8",
        of="pipeline",
    )
    assert (
        said.code == 0
        and "FFFFFFFF......D" in said.out
        and "least time zb_h1, idle 11.1%" in said.out
    )
    (file,) = tmp_path.glob("run/schedules.json")
    rows = {row["schedule"]: row for row in json.loads(file.read_text())}
    p, m, v = 4, 8, 2
    assert (
        rows["gpipe"]["idle"] == pytest.approx((p - 1) / (m + p - 1)) and rows["gpipe"]["kept"] == m
    )
    assert rows["zb_h1"]["idle"] == pytest.approx((p - 1) / (3 * m + p - 1))
    assert rows["interleaved"]["idle"] == pytest.approx((p - 1) / (v * m + p - 1))
    assert rows["interleaved"]["layers"] == rows["interleaved"]["kept"] / v
    assert sorted(plot.stem for plot in tmp_path.glob("run/plots/*.png")) == [
        "gpipe",
        "interleaved",
        "zb_h1",
    ]


def test_searched_schedules_are_for_these_costs_and_heads_are_split_where_they_can_be():
    config = pipeline.compose("forward=2", "weights=0.5", "cap=4", "softmax=1", "rows=0.5")
    searched, both = config.schedule("searched"), config.schedule("bitpipe")
    timing = simulate_schedule(searched, config.costs(1))
    assert max(timing.held) <= 5 and any(
        task.op == Op.T for task in searched.tasks
    )  # one more waits for the head
    assert not both.has_vocabulary and config.costs(2).F == 1 and config.costs(2).S == 1


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("schedules=[2f2b]", "schedules.*'2f2b'.*legal are gpipe, 1f1b"),
        ("forward=0 backward=0 weights=0", "all 0, so that no schedule takes any time"),
        ("devices=0", "devices=0"),
        ("mesh.data=8 cpu_devices=8", "a simulation of schedules has nothing along data"),
    ],
)
def test_mistakes_end_in_a_sentence(main, flags, sentence):
    assert re.search(sentence, main(*flags.split(), of="pipeline").sentence())
