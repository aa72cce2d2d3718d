"""`python -m experiments.digits`: it learns, resumes and tells; digits are moved as asked; sentences and exit codes."""

import re

import jax
import numpy as np
import pytest

from experiments import digits
from jaxpar.types import UsageError

pytest.importorskip("sklearn")
TINY = (
    "model.width=8 model.heads=2 model.layers=1 model.mlp=8 model.patch=4 data.batch_size=16 train.steps=4 "
    "train.eval_every=2 train.save_every=2 hydra.run.dir=run cpu_devices=8"
).split()


def test_it_trains_and_resumes(trained):
    last = trained(*TINY, of="digits", steps=4)
    assert 0 <= last["validation/accuracy"] <= 1 and last["train/skipped"] == 0


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("model.patch=3", "patch=3 does not divide images of 8 x 8 pixels; legal are 1, 2, 4, 8"),
        (
            "model.mixer=lstm",
            "model.mixer='lstm' is unknown; legal are attention, gla, simple_gla, retention",
        ),
        ("model.heads=3", "model.width=8 must be a multiple of model.heads=3"),
        ("data.held_out=0.9999", "data.held_out=0.9999 leaves no digit to train on"),
        ("data.held_out=1", "data.held_out=1.* must be over 0 and under 1"),
        ("data.batch_size=6", "data.batch_size=6 does not divide over mesh.data=2 x mesh.fsdp=2"),
        (
            "mesh.data=4 mesh.stage=2",
            "mesh.stage=2 leaves .* an image classifier has nothing along stage",
        ),
    ],
)
def test_mistakes_end_in_a_sentence(main, flags, sentence):
    assert re.search(sentence, main(*TINY, *flags.split(), of="digits").sentence())


def test_batches_are_pure_and_held_out_digits_are_never_trained_on():
    config = digits.DataConfig(batch_size=32, shift=0)
    task, again = (digits.open_digits(config, seed=3) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, task.train(5), again.train(5))

    def rows(batches):
        return {x.tobytes() for batch in batches for x in batch["inputs"][batch["weights"] > 0]}

    assert sum(batch["weights"].sum() for batch in task.validation) == 599
    held, trained = rows(task.validation), rows(task.train(step) for step in range(60))
    assert len(held) == 599 and not held & trained


def test_digits_move_by_whole_pixels():
    image = np.arange(64.0).reshape(1, 8, 8)
    moved = digits.moved(np.repeat(image, 3, 0), np.array([[0, 0], [1, -2], [-7, 7]]))
    np.testing.assert_array_equal(moved[0], image[0])
    np.testing.assert_array_equal(moved[1, 1:, :6], image[0, :7, 2:])
    assert (moved[1, 0] == -1).all() and (moved[1, :, 6:] == -1).all()
    assert moved[2, 0, 7] == image[0, 7, 0] and (moved[2] != -1).sum() == 1


def test_no_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(UsageError, match="experiments.digits needs scikit-learn: pip install"):
        digits.open_digits(digits.DataConfig(), 0)


@pytest.mark.slow
def test_digits_are_learned(main):
    said = main("hydra.run.dir=run", of="digits", compiles=True)
    accuracy = float(said.out.split("validation/accuracy")[-1].split()[0])
    assert accuracy >= 0.97, said.out
