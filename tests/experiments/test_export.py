"""What leaves a run: Hugging Face folders and files of arrays; and where its checkpoints may live."""

import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from safetensors.numpy import load_file

from jaxpar.io import Checkpoints
from jaxpar.io.lock import LOCK
from jaxpar.io.reading import flatten
from jaxpar.lm import apply, from_hf


@pytest.fixture
def params(copied):
    """The parameters of the checkpoint that export takes, on the host, by name."""
    checkpoints = Checkpoints(copied / "checkpoints", read_only=True)
    arrays = checkpoints.numpy(checkpoints.best())["params"]
    checkpoints.close()
    return arrays


def test_a_hugging_face_folder_gives_the_same_logits(main, tmp_path, params):
    from experiments import lm

    said = main("mode=export", "run=run", "out=exported")
    assert said.code == 0 and "written    exported" in said.out, said
    assert not (tmp_path / "exported" / "tokenizer.json").exists()  # bytes need none
    model, loaded = from_hf(tmp_path / "exported", dtype="float32")
    tokens = np.arange(24, dtype=np.int32).reshape(2, 12)
    ours = lm.runner.load(tmp_path / "run", lm.Config).model
    run = jit(apply, static_argnums=2)
    want = run(params, tokens, ours)
    np.testing.assert_allclose(
        run(loaded, tokens, model), want, atol=0.05 * float(jnp.std(want))
    )  # bfloat16 here
    exact = [run(p, tokens, model) for p in (params, loaded)]
    np.testing.assert_array_equal(*exact)


@pytest.mark.parametrize(
    "name, read", [("params.npz", np.load), ("folder/params.safetensors", load_file)]
)
def test_a_file_of_arrays_has_them_bit_for_bit(main, tmp_path, params, name, read):
    said = main("mode=export", "run=run", f"out={name}")
    assert said.code == 0, said
    arrays, want = dict(read(tmp_path / name)), flatten(params)
    assert arrays.keys() == want.keys() and "layers/wq" in arrays
    for path, x in want.items():
        assert arrays[path].dtype == x.dtype
        np.testing.assert_array_equal(arrays[path], x)
    assert [path.name for path in (tmp_path / name).parent.glob("*partial*")] == []


def test_a_tokenizer_goes_along(main):
    flags = "data.tokenizer=bpe:300", "train.steps=1", "hydra.run.dir=bpe"
    assert main(*flags, compiles=True).code == 0
    assert main("mode=export", "run=bpe", "out=exported").code == 0
    said = main("mode=sample", "run=exported", "prompt=alpha beta", "model.dtype=float32")
    assert said.code == 0 and "\nalpha beta" in said.out, said


@pytest.mark.parametrize(
    "flags, sentence",
    [
        ("mode=export run=run", "mode=export needs out="),
        ("mode=export run=nowhere out=x", "needs run= to name an existing folder"),
        ("mode=export run=run out=run", "already holds something"),
        ("mode=export run=run out=run/config.yaml/x.npz", "could not be written"),
    ],
)
def test_what_cannot_be_exported_is_one_sentence(main, copied, flags, sentence):
    assert sentence in main(*flags.split()).sentence()


@pytest.mark.slow
def test_checkpoints_may_live_elsewhere(main, tmp_path):
    flags = (
        "checkpoints=elsewhere",
        "hydra.run.dir=run",
        "train.keep_every_s=1e-6",
        "train.save_every=1",
    )
    said = main(*flags, "train.steps=4", compiles=True)
    assert said.code == 0 and "checkpoint elsewhere/run" in said.out, said
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert sorted(path.name for path in (tmp_path / "elsewhere" / "run").iterdir()) == [
        LOCK,
        "1",
        "2",
        "3",
        "4",
    ]
    again = main(*flags, "train.steps=4")
    assert again.code == 0 and "(resuming at step 4)" in again.out, again
    assert "checkpoint of step 4" in main("mode=eval", "run=run").out


def test_a_bucket_that_cannot_be_reached_is_one_sentence(main, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gcsfs", None)
    assert (
        "gs://b/f/run cannot be written"
        in main("checkpoints=gs://b/f", "hydra.run.dir=run").sentence()
    )
