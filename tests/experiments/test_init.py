"""`init=hf:folder` and preset=finetune: a run that begins with a folder's model, goes on, and is written back."""

import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import models

from experiments import lm
from jaxpar.lm import LMConfig, from_hf, to_hf
from jaxpar.lm.params import abstract
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError

MODEL = LMConfig(
    vocab_size=16, max_seq_len=64, num_layers=2, embed_dim=8, num_heads=2, mlp_dim=12, dtype="float32",
    windows=(3, 0), activation="geglu", post_norms=True, embed_scale=True, norm_plus_one=True, tied=True, logit_cap=5.0,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jax.numpy.asarray(0.3 * rng.standard_normal(x.shape), "float32"), abstract(MODEL))
    to_hf(params, MODEL, tmp_path / "given")
    words = {f"w{i}": i for i in range(14)} | {"<s>": 14, "</s>": 15}
    library = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.save(str(tmp_path / "given" / "tokenizer.json"))
    config = json.loads((tmp_path / "given" / "config.json").read_text()) | {"eos_token_id": 15}
    (tmp_path / "given" / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in rng.integers(0, 14, 600)))
    return tmp_path / "given"


def compose(folder, *flags):
    text = folder.parent / "text.txt"
    sizes = ("data.seq_len=8", "data.batch_size=8", "data.split=tail:0.2", "data.pack=false", "model.dtype=float32")
    length = ("train.steps=2", "train.eval_every=0", "train.eval_batches=1", "train.save_every=1")
    flags = (*sizes, *length, "sampling.max_new_tokens=2", *flags)
    return lm.compose("preset=finetune", f"init=hf:{folder}", f"data.path={text}", *flags)


def test_a_run_begins_with_the_folder_resumes_without_it_and_is_written_back(folder, tmp_path, capsys):
    run = tmp_path / "run"
    with use_mesh(make_mesh(MeshSpec(fsdp=8))):
        # At a rate of nothing what is saved is what was read.
        still = compose(folder, "optimizer.learning_rate=1e-30", "train.steps=1")
        result = lm.train(still, tmp_path / "still")
        given = from_hf(folder, dtype="float32")[1]
        jax.tree.map(np.testing.assert_array_equal, result.state.params, given)
        lm.train(compose(folder, "train.steps=1"), run)
        shutil.rmtree(folder)
        config = compose(folder, "train.steps=2", "optimizer.learning_rate=1e-2")
        with pytest.raises(UsageError, match="optimizer"):
            lm.train(config, run)
        lm.train(compose(folder, "train.steps=2"), run)
        out = tmp_path / "out"
        lm.export(lm.compose("mode=export", f"run={run}", f"out={out}", "checkpoint=newest"), run)
        read, params = from_hf(out, dtype="float32")
    assert read == MODEL and (out / "tokenizer.json").is_file()
    assert "resuming at step 1" in capsys.readouterr().out
    moved = jax.tree.map(lambda a, b: float(abs(np.asarray(a) - np.asarray(b)).max()), params, given)
    assert 0 < max(jax.tree.leaves(moved)) < 1e-3


@pytest.mark.parametrize(
    ("init", "sentence"),
    [("folder", "init=folder names no start; legal is hf:folder"), ("hf:/nowhere", "there is no /nowhere/config.json")],
)
def test_what_is_no_start_is_refused(init, sentence, tmp_path):
    with use_mesh(make_mesh(MeshSpec(data=8))), pytest.raises(UsageError, match=sentence):
        lm.train(lm.compose("preset=finetune", f"init={init}"), tmp_path / "run")


def test_another_start_is_another_run(folder):
    from experiments._run import folder_name

    names = {folder_name(lm.compose(*flags)) for flags in ((), ("init=hf:a",), ("init=hf:b",))}
    assert len(names) == 3
