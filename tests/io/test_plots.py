import sys

import numpy as np
import pytest

from jaxpar.io import graphs, plots
from jaxpar.io.metrics import JsonlWriter
from jaxpar.types import UsageError

matplotlib = pytest.importorskip("matplotlib")


def write(path, rows):
    writer = JsonlWriter(path, None)
    for step, row in rows:
        writer.write(step, row)
    writer.close()
    return path


@pytest.fixture
def drawn(monkeypatch):
    """Collects the figures that are saved."""
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig

    def record(self, *args, **options):
        figures.append(self)
        savefig(self, *args, **options)

    monkeypatch.setattr(Figure, "savefig", record)
    return figures


def test_curves_are_the_file_s_numbers(tmp_path, drawn):
    rows = []
    for step in range(1, 101):
        row = {
            "train/loss": 5 / step,
            "train/grad_norm": float(step % 7),
            "train/learning_rate": 1e-3 * step,
        }
        if step % 25 == 0:
            row["validation/loss"] = [np.inf, 3.0, np.nan, 4.0][step // 25 - 1]
        rows.append((step, row))
    before = dict(matplotlib.rcParams), set(sys.modules)
    plots.plot_loss(write(tmp_path / "m.jsonl", rows), tmp_path / "new" / "loss.png", unit="bits")
    assert dict(matplotlib.rcParams) == before[0]
    assert "matplotlib.pyplot" not in set(sys.modules) - before[1]
    assert (tmp_path / "new" / "loss.png").read_bytes().startswith(b"\x89PNG")
    losses, norms, rates = drawn[0].axes
    raw, smooth, validation, best = losses.lines
    np.testing.assert_array_equal(raw.get_ydata(), [row["train/loss"] for _, row in rows])
    assert smooth.get_ydata().min() >= 0.05 and smooth.get_ydata().max() <= 5
    assert list(validation.get_xdata()) == [25, 50, 75, 100]
    assert best.get_label() == "best validation: 3 at step 50"
    assert losses.get_ylabel() == "loss (bits)" and norms.get_yscale() == "log"
    np.testing.assert_array_equal(
        rates.lines[0].get_ydata(), [row["train/learning_rate"] for _, row in rows]
    )


@pytest.mark.parametrize(
    "row, num_axes",
    [
        ({"train/loss": 1.0}, 1),
        ({"validation/loss": 1.0}, 1),
        ({"train/loss": np.nan, "validation/loss": np.nan}, 1),
        ({"train/loss": 1.0, "train/grad_norm": 0.0}, 2),
        ({"train/loss": 1.0, "train/learning_rate": 1e-3}, 2),
        ({"train/loss": 1.0, "train/grad_norm": 6.947221755981446}, 2),
    ],
)
def test_what_is_absent_is_left_out(tmp_path, drawn, row, num_axes):
    plots.plot_loss(write(tmp_path / "m.jsonl", [(1, row)]), tmp_path / "loss.png")
    assert len(drawn[0].axes) == num_axes


def test_histograms_count_all_and_bars_of_integers_hold_equally_many(tmp_path, drawn):
    rows = {
        "few": np.array([3, 3, 4, 6]),
        "many": np.arange(500),
        "one": np.full(7, 0.1) + [0, 0, 0, 0, 0, 0, 1e-9],
    }
    rows |= {"any": np.linspace(0, 1, 99), "rare": np.repeat(np.arange(9), [900, *[1] * 8])}
    plots.plot_histograms(rows, tmp_path / "new" / "h.png", title="all")
    panels = dict(zip(rows, drawn[0].axes, strict=True))
    for name, panel in panels.items():
        assert sum(bar.get_height() for bar in panel.patches) == len(rows[name])
        assert panel.get_xlabel() == name and panel.lines[0].get_xdata()[0] == rows[name].mean()
    assert [bar.get_height() for bar in panels["few"].patches] == [2, 1, 0, 1]
    assert {bar.get_height() for bar in panels["many"].patches[:-1]} == {13} and len(
        panels["one"].patches
    ) == 1
    assert [panel.get_yscale() for panel in panels.values()] == ["linear"] * 4 + ["log"]


def test_areas_are_stacked_in_order_with_their_colours(tmp_path, drawn):
    areas = {"low": [1, 2, 0], "high": [3, 0, 1]}
    plots.plot_areas(
        [0, 5, 10],
        areas,
        tmp_path / "new" / "a.png",
        colours=[(1.0, 0.0, 0.0), None],
        labels=("step", "count"),
    )
    (panel,) = drawn[0].axes
    low, high = panel.collections
    assert low.get_datalim(panel.transData).y1 == 2
    assert high.get_datalim(panel.transData).y1 == 4, "on top of the lower one"
    assert low.get_facecolor()[0][:3].tolist() == [1, 0, 0]
    assert len(set(high.get_facecolor()[0][:3].tolist())) == 1, "gray"
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["high", "low"]
    assert (panel.get_xlabel(), panel.get_ylabel()) == ("step", "count")


def test_smoothing_keeps_lines_and_skips_gaps():
    line = np.arange(500.0)
    np.testing.assert_allclose(plots._smoothed(line)[10:-10], line[10:-10])
    with_gap = np.where(line == 100, np.nan, 2.0)
    np.testing.assert_allclose(plots._smoothed(with_gap), 2.0)
    noise = np.random.default_rng(0).normal(size=500)
    assert plots._smoothed(noise).std() < 0.4


def test_no_losses_and_no_matplotlib_are_one_sentence(tmp_path, monkeypatch):
    path = write(tmp_path / "m.jsonl", [(1, {"x": 1.0})])
    with pytest.raises(UsageError, match='has neither "train/loss" nor "validation/loss"'):
        plots.plot_loss(path, tmp_path / "loss.png")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install \"jaxpar\[experiments\]\""):
        plots.plot_loss(path, tmp_path / "loss.png")


@pytest.mark.parametrize(
    "keys", [("expert_load", "expert_load_min", "balance_loss"), ("dropped",), ()]
)
def test_experts_are_drawn_with_what_is_there(tmp_path, drawn, keys):
    """A map of the layers, and a panel a kind of number; of E = 4 experts the even load is 1."""
    rows = [
        (step, {"train/loss": 1.0, **{f"train/{key}": step / 3 for key in keys}})
        for step in range(1, 4)
    ]
    loads = np.array([[1.0, 1.0, 1.0, 1.0], [0.0, 4.0, 0.0, 0.0]])
    plots.plot_experts(write(tmp_path / "m.jsonl", rows), loads, tmp_path / "experts.png")
    above, *below = [panel for panel in drawn[0].axes if panel.get_label() != "<colorbar>"]
    np.testing.assert_array_equal(above.images[0].get_array(), loads)
    assert above.images[0].get_clim() == (0, 4)
    labels = {
        "expert_load": "load over the mean",
        "expert_load_min": "load over the mean",
        "dropped": "dropped",
    }
    assert [panel.get_ylabel() for panel in below] == list(
        dict.fromkeys(labels.get(k, "balance loss") for k in keys)
    )
    for panel in below:
        np.testing.assert_allclose(panel.lines[0].get_ydata(), [1 / 3, 2 / 3, 1])


def test_edges_keep_clear_of_nodes_and_of_each_other():
    places, drawn = np.array([[0.0, 0], [2, 0], [4, 0], [4, 2]]), []
    assert graphs._clear_bend(places, 0, 1, drawn) == 0, "straight where nothing is in the way"
    assert abs(graphs._clear_bend(places, 0, 2, drawn)) > 0.1, "around the node between"
    again = graphs._clear_bend(places, 0, 1, drawn)
    assert again != 0, "not on the edge that is there"
    t = np.linspace(0, 1, 33)[8:25]
    middle = places[1] / 2 - again * np.array([0, places[1][0]])
    arc = 2 * (t * (1 - t))[:, None] * middle + (t**2)[:, None] * places[1]
    np.testing.assert_allclose(drawn[-1], arc)


def test_curves_of_seeds_say_what_their_band_is(tmp_path, drawn):
    several, one = np.arange(12.0).reshape(4, 3), np.ones((1, 3))
    graphs.plot_seeds(
        {"a": (np.arange(3), several), "b": (np.arange(3), one)}, tmp_path / "s.png", title="all"
    )
    texts = [text.get_text() for text in drawn[0].axes[0].get_legend().get_texts()]
    assert texts == ["a: mean of 4 seeds, band: its 95 % interval over seeds", "b: mean of 1 seed"]
    assert drawn[0].get_suptitle() == "all"


def test_a_graph_says_what_its_colours_are(tmp_path, drawn):
    places, edges = np.array([[0.0, 0], [0, 1], [1, 0.5]]), np.array([[0, 2], [1, 2], [2, 2]])
    graphs.plot_graph(places, ["x0", "x1", "y0"], ["in", "in", "out"], edges, np.array([1.0, -2, 1]),
                      np.array([False, False, True]), tmp_path / "g.png")  # fmt: skip
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "input",
        "output",
        "weight > 0",
        "weight < 0",
        "disabled",
    ]
