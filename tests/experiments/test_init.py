"""`init=hf:folder` and preset=finetune: a run from a folder's model, its resumption and export."""

import json
import shutil

import jax
import numpy as np
import pytest
import word_folders
from fast import noisy_params
from gguf_writing import write_gguf
from lm_configs import with_fields
from word_folders import write_folder

from experiments import lm
from jaxpar.lm import from_hf, to_hf
from jaxpar.lm.text.chat import load_chat
from jaxpar.lm.text.tokenizer import load_tokenizer
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError

MODEL = with_fields(word_folders.MODEL, windows=(3,))


@pytest.fixture
def folder(tmp_path):
    words = [f"w{token}" for token in range(14)] + ["<s>", "</s>"]
    write_folder(tmp_path / "given", MODEL, words)
    config = json.loads((tmp_path / "given" / "config.json").read_text()) | {"eos_token_id": 15}
    (tmp_path / "given" / "config.json").write_text(json.dumps(config))
    (tmp_path / "given" / "chat_template.jinja").write_text(
        "{{ bos_token }}{{ messages[0].content }}"
    )
    (tmp_path / "given" / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    rng = np.random.default_rng(0)
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in rng.integers(0, 14, 600)))
    return tmp_path / "given"


def compose(folder, *flags):
    text = folder.parent / "text.txt"
    sizes = (
        "data.seq_len=8",
        "data.batch_size=8",
        "data.split=tail:0.2",
        "data.pack=false",
        "model.dtype=float32",
    )
    length = ("train.steps=2", "train.eval_every=0", "train.eval_batches=1", "train.save_every=1")
    flags = (*sizes, *length, "sampling.max_new_tokens=2", *flags)
    return lm.compose("preset=finetune", f"init=hf:{folder}", f"data.path={text}", *flags)


def test_a_run_begins_with_the_folder_resumes_without_it_and_is_written_back(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(lm, "draw_sample", lambda *_: "")  # a program of its own
    run, out, rate = tmp_path / "run", tmp_path / "out", 1e-3
    given = from_hf(folder, dtype="float32")[1]
    flags = (
        f"optimizer.learning_rate={rate}",
        "optimizer.warmup_steps=0",
        "optimizer.schedule=constant",
    )

    def furthest(params):
        moved = jax.tree.map(
            lambda a, b: float(abs(np.asarray(a) - np.asarray(b)).max()), params, given
        )
        return np.max(jax.tree.leaves(moved))

    with use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])):
        result = lm.train(compose(folder, *flags, "train.steps=1"), run)
        # One step of AdamW moves a number by the rate at most; another start would lie 0.3 away.
        assert 0.5 * rate < furthest(result.state.params) < 1.5 * rate
        shutil.rmtree(folder)
        lm.train(compose(folder, *flags, "train.steps=2"), run)
        assert "resuming at step 1" in capsys.readouterr().out
        lm.export(lm.compose("mode=export", f"run={run}", f"out={out}", "checkpoint=newest"), run)
    read, params = from_hf(out, dtype="float32")
    assert read == MODEL and load_tokenizer(out).eos_ids == (15,)
    assert load_chat(out).render([{"role": "user", "content": "w1"}]) == "<s>w1"
    assert rate < furthest(params) < 3 * rate


def test_a_gguf_file_is_a_start_that_a_run_needs_no_longer(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(lm, "draw_sample", lambda *_: "")  # a program of its own
    model = with_fields(MODEL, windows=())
    to_hf(noisy_params(model), model, tmp_path / "llama")
    file = write_gguf(tmp_path / "llama", tmp_path / "a.gguf")
    (tmp_path / "text.txt").write_text("ab cd " * 200)
    run = tmp_path / "run"
    flags = ("optimizer.learning_rate=1e-6", "optimizer.warmup_steps=0")
    with use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])):
        lm.train(compose(file, *flags, "train.steps=1"), run)
        given = from_hf(file, dtype="float32")[1]
        file.unlink()
        lm.train(compose(file, *flags, "train.steps=2"), run)
        lm.export(lm.compose("mode=export", f"run={run}", f"out={tmp_path / 'out'}"), run)
    read, params = from_hf(tmp_path / "out", dtype="float32")
    assert read == model and load_tokenizer(tmp_path / "out").eos_ids == (15,)
    assert load_tokenizer(tmp_path / "out").encode("ab c").tolist() == [1, 2, 0, 3]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), params, given)


@pytest.mark.parametrize(
    ("init", "sentence"),
    [
        ("folder", "init=folder names no start; legal are hf:folder, run:folder"),
        ("hf:/nowhere", "there is no /nowhere/config.json"),
    ],
)
def test_what_is_no_start_is_refused(init, sentence, tmp_path):
    with use_mesh(make_mesh(MeshSpec(data=8))), pytest.raises(UsageError, match=sentence):
        lm.train(lm.compose("preset=finetune", f"init={init}"), tmp_path / "run")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("preset=finetune",), "init='': finetune trains a model that exists on"),
        (("preset=finetune", "name=mine"), "init='': mine trains .*; expected init=hf:folder or"),
        (
            ("adapter=lora",),
            "adapter.kind=lora: without init= .*; expected init=hf:folder or init=run",
        ),
        (("preset=finetune", "adapter=dora"), "adapter.kind=lora: without init="),
    ],
)
def test_fine_tuning_without_a_start_is_refused(flags, sentence, tmp_path):
    with use_mesh(make_mesh(MeshSpec(data=8))), pytest.raises(UsageError, match=sentence):
        lm.train(lm.compose(*flags), tmp_path / "run")
    assert not (tmp_path / "run" / "config.yaml").exists(), "it would be a run to resume"


def test_runs_that_were_begun_without_a_start_go_on(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    for flags in (("preset=finetune",), ("adapter=lora",)):
        lm._check_start(lm.compose(*flags), tmp_path)
    lm._check_start(lm.compose("preset=finetune", "train.needs_init=false"), tmp_path / "new")


def test_another_start_is_another_run(folder):
    from experiments.app.runner import folder_name

    names = {folder_name(lm.compose(*flags)) for flags in ((), ("init=hf:a",), ("init=hf:b",))}
    assert len(names) == 3
