"""The command of moving digits: it learns, resumes, draws; films are pure, straight and bounce; sentences."""

import re

import jax
import numpy as np
import pytest

from experiments.papers import moving_digits as films

TINY = (
    "model.width=8 model.heads=2 model.pairs=1 model.mlp=8 model.patch=4 data.batch_size=8 data.frames=3 data.size=8 "
    "train.steps=4 train.eval_every=2 train.save_every=2 hydra.run.dir=run cpu_devices=8 mesh.data=2 mesh.context=4"
).split()


def test_it_trains_and_resumes(trained):
    last = trained(*TINY, of="moving_digits", steps=4)
    assert (trained.folder / "plots" / "frames.png").stat().st_size > 1000
    assert 0 < last["validation/loss"] < 3 and last["train/skipped"] == 0


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("model.patch=3", "patch=3 does not divide images of 8 x 8 pixels; legal are 1, 2, 4, 8"),
        ("model.heads=3", "model.width=8 must be a multiple of model.heads=3"),
        ("data.size=5", "data.size=5 must be at least 6"),
        ("data.batch_size=3", "data.batch_size=3 does not divide over mesh.data=2"),
        (
            "mesh.context=1 mesh.expert=4",
            "mesh.expert=4 leaves .* a predictor of frames has nothing along expert",
        ),
    ],
)
def test_mistakes_end_in_a_sentence(main, flags, sentence):
    assert re.search(sentence, main(*TINY, *flags.split(), of="moving_digits").sentence())


def drawn(seed=0, batch=6, frames=40, size=9, digits=1):
    return np.asarray(films.moving_digits(jax.random.key(seed), batch, frames, size, digits))


def test_films_are_pure_and_of_digits():
    film = drawn()
    np.testing.assert_array_equal(film, drawn())
    assert (
        film.shape == (6, 40, 9, 9) and set(np.unique(film)) == {0, 1} and (film != drawn(1)).any()
    )
    counts = film.sum((2, 3))  # all of a digit is always there
    assert (counts == counts[:, :1]).all() and counts.min() >= 7 and counts.max() <= 13
    assert (drawn(digits=3).sum((2, 3)) <= 3 * 13).all()


def bounced(place, step, room, frames):
    """The places of a ball that is thrown back by walls at 0 and at `room`."""
    places = []
    for _ in range(frames):
        places.append(place)
        place += step
        if not 0 <= place <= room:
            place, step = -place if place < 0 else 2 * room - place, -step
    return places


def test_digits_fly_straight_and_bounce():
    film = drawn(2, batch=16, frames=60)
    for axis, room in ((2, 4), (3, 6)):
        first = film.any(5 - axis).argmax(2)  # [B, T], the first row or column that is lit
        steps = [
            [step for step in range(-2, 3) if bounced(way[0], step, room, 60) == way.tolist()]
            for way in first
        ]
        assert all(steps) and {abs(step) for each in steps for step in each} == {0, 1, 2}


def test_batches_of_training_and_of_validation_are_apart():
    task = films.open_films(films.DataConfig(batch_size=4, frames=3, size=8), seed=3)
    again = films.open_films(films.DataConfig(batch_size=4, frames=3, size=8), seed=3)
    jax.tree.map(np.testing.assert_array_equal, task.train(5), again.train(5))
    held = {film.tobytes() for batch in task.validation for film in batch["inputs"]}
    assert not held & {film.tobytes() for step in range(20) for film in task.train(step)["inputs"]}
    batch = task.train(0)
    np.testing.assert_array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.slow  # three minutes on two cores
def test_the_next_frame_is_learned(main):
    said = main("hydra.run.dir=run", of="moving_digits", compiles=True)
    loss = float(said.out.split("validation/loss")[-1].split()[0])
    constant = float(re.search(r"answer has loss ([\d.]+)", said.out)[1])
    assert loss <= constant / 3, said.out
