"""Frames that a world's run keeps: which, how many, and what is counted in them."""

import jax
import numpy as np

from experiments.app.env import world_film
from experiments.app.env.world_film import Frame, Frames, count_lineages, frame_interval
from jaxpar.life import Reflex, World, draw_world, lineage_colours


def frame(step, *lineages):
    return Frame(step, np.zeros((2, 2, 3), np.uint8), np.asarray(lineages, np.int32))


def test_frames_are_at_most_so_many_and_remain_in_longer_runs():
    for chunk in (1, 7, 50):
        before = 0
        for steps in range(chunk, 40 * chunk, chunk):
            interval = frame_interval(steps, chunk, 5)
            assert interval % chunk == 0 and steps / interval <= 5
            assert not before or interval % before == 0
            before = interval
    assert frame_interval(2000, 50, 150) == 50 and frame_interval(16000, 50, 150) == 200


def test_frames_of_other_intervals_and_later_steps_are_dropped(tmp_path):
    world = World(
        Reflex(), num_agents=4, num_start=2, num_robots=2, size=4, window=1,
        seen_agents=1, seen_robots=1, max_births=1, newcomers=0,
    )  # fmt: skip
    state = world.init(jax.random.key(0))
    frames = Frames(tmp_path, 4, 3)
    for step in (2, 4, 6, 8, 10, 12):
        frames.keep(step, state)
    kept = frames.read(10)
    assert [each.step for each in kept] == [4, 8, 10]
    assert frames.has(4) and not frames.has(2) and not frames.has(12)
    np.testing.assert_array_equal(kept[0].image, draw_world(state, 3))
    assert kept[0].lineages.tolist() == [0, 1], "of those alive"


def test_lineages_are_counted_largest_by_name_and_others_together():
    frames = [frame(1, 3, 3, 5, 7), frame(2, 5, 5, 5), frame(3)]
    numbers, counts = count_lineages(frames, 2)
    assert numbers == [3, 5] and counts.tolist() == [[2, 0, 0], [1, 3, 0], [1, 0, 0]]


def test_lineages_are_drawn_by_name_and_in_the_films_colours(tmp_path, monkeypatch):
    drawn = {}

    def keep(x, areas, out, **rest):
        drawn.update(rest, x=x.tolist(), areas={name: y.tolist() for name, y in areas.items()})

    monkeypatch.setattr(world_film, "plot_areas", keep)
    frames = [frame(1, 3, 3, 5), frame(4, 5, 5)]
    world_film.plot_lineages(frames, tmp_path / "x.png", "title")
    assert drawn["x"] == [1, 4]
    assert drawn["areas"] == {"lineage 3": [2, 0], "lineage 5": [1, 2], "all others": [0, 0]}
    np.testing.assert_allclose(drawn["colours"][0], lineage_colours(np.asarray(3)) / 255)
    assert drawn["colours"][2] is None


def test_an_agent_is_a_mark_that_one_sees():
    world = World(
        Reflex(), num_agents=1, num_robots=2, size=64, seen_agents=1, max_births=1, newcomers=1
    )
    state = world.init(jax.random.key(0))
    gone = state._replace(agents=state.agents._replace(alive=state.agents.alive & False))
    marked = (np.asarray(draw_world(state, 6)) != np.asarray(draw_world(gone, 6))).any(-1)
    assert 100 <= marked.sum() <= 121, "eleven pixels a side, at 64 cells and 384 pixels"
