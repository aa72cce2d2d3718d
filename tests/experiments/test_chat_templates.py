"""A folder's own chat template trains, evaluates and is exported, unless data.template= says another."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from word_folders import MODEL, write_folder

from experiments import generate, lm
from experiments.app.lm import initial_model
from jaxpar.lm import load_imported
from jaxpar.lm.text.chat import load_chat
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError

WORDS = ["<unk>", "<s>", "</s>", "U", "A", "user", "assistant", "w1", "w2", "w3", "X"]
OWN = "{{ bos_token }} {% for m in messages %}{{ 'U' if m.role == 'user' else 'A' }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}A {% endif %}"  # noqa: E501
OTHER = OWN.replace("'U'", "'X'")


@pytest.fixture
def folder(tmp_path):
    path = write_folder(tmp_path / "given", MODEL, WORDS)
    (path / "chat_template.jinja").write_text(OWN)
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    turns = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]
    (tmp_path / "chats.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 60)
    return path


@pytest.fixture
def opened(monkeypatch):
    """The corpora that commands open, in turn."""
    found = []
    plain = lm.open_corpora
    laid_out = lm.open_with_layout

    def open_corpora(*arguments):
        found.append(plain(*arguments))
        return found[-1]

    def open_with_layout(*arguments):
        corpora, data = laid_out(*arguments)
        found.append(corpora)
        return corpora, data

    monkeypatch.setattr(lm, "open_corpora", open_corpora)
    monkeypatch.setattr(lm, "open_with_layout", open_with_layout)
    monkeypatch.setattr(lm, "draw_sample", lambda *_: "")  # a program of its own
    with use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])):
        yield found


def compose(folder, *flags):
    sizes = (
        "data.seq_len=8",
        "data.batch_size=4",
        "data.split=tail:0.3",
        "data.pack=false",
        "model.dtype=float32",
        "train.steps=1",
        "train.eval_every=0",
        "train.eval_batches=1",
    )
    path = f"data.path={folder.parent / 'chats.jsonl'}"
    return lm.compose("preset=finetune", f"init=hf:{folder}", path, *sizes, *flags)


def words(corpora):
    """The words of one document, which all are alike."""
    tokens = corpora.first.train
    return [WORDS[i] for i in tokens.read(0, int(tokens.lengths[0]))]


def exported(run, out, *flags):
    lm.export(lm.compose("mode=export", f"run={run}", f"out={out}", "checkpoint=newest", *flags), run)  # fmt: skip
    return out


def test_the_folders_template_trains_evaluates_and_is_exported(folder, opened, tmp_path):
    run = tmp_path / "run"
    lm.train(compose(folder), run)
    assert [word for word in words(opened[0]) if word in "UA"] == ["U", "A"]
    assert "<unk>" not in words(opened[0])
    assert load_imported(run).template == OWN
    loaded = lm.load(run, lm.compose(f"run={run}"))[0]
    assert loaded.data.template == str(run / "init")
    out = exported(run, tmp_path / "out")
    assert load_chat(out).text == OWN and load_chat(out).tokens == {"bos_token": "<s>"}
    # The folder itself is judged with its own template as well.
    assert lm.load(folder, lm.compose(f"run={folder}"))[0].data.template == str(folder)
    said = {}
    for which in (run, folder):
        flags = ("mode=eval", f"run={which}", "eval.kind=documents", "checkpoint=newest")
        lines = tmp_path / "lines.jsonl"
        found = lm.compose(*flags, f"eval.path={folder.parent / 'chats.jsonl'}", f"out={lines}")
        lm.evaluate(found, run)
        said[which] = json.loads(lines.read_text().splitlines()[0])["tokens"]
    assert said[run] == said[folder] == int(opened[0].first.train.counts[: len(words(opened[0]))].sum())  # fmt: skip


def test_another_template_overrides_it_and_is_exported(folder, opened, tmp_path):
    (tmp_path / "other.jinja").write_text(OTHER)
    run = tmp_path / "run"
    lm.train(compose(folder, f"data.template={tmp_path / 'other.jinja'}"), run)
    assert [word for word in words(opened[0]) if word in "UAX"] == ["X", "A"]
    assert load_imported(run).template == OWN  # what the folder said
    (tmp_path / "other.jinja").unlink()
    assert load_chat(exported(run, tmp_path / "out")).text == OTHER
    (tmp_path / "third.jinja").write_text("third")
    flag = f"data.template={tmp_path / 'third.jinja'}"
    assert load_chat(exported(run, tmp_path / "third", flag)).text == "third"


def test_an_older_run_keeps_chatml(folder, opened, tmp_path):
    run = tmp_path / "run"
    initial_model.kept_tokenizer(run, folder)
    (run / "imported.json").unlink()
    lm.train(compose(folder), run)
    assert words(opened[-1])[:1] == ["<unk>"]  # <|im_start|>user
    assert lm.load(run, lm.compose(f"run={run}"))[0].data.template == ""
    lm.train(compose(folder, "train.steps=2"), run)
    assert words(opened[-1])[:1] == ["<unk>"]
    out = exported(run, tmp_path / "out")
    assert {str(x.dtype) for x in load_file(out / "model.safetensors").values()} == {"float32"}


def test_an_export_is_of_the_folders_numbers_or_of_those_asked_for(folder, opened, tmp_path):
    run = tmp_path / "run"
    lm.train(compose(folder), run)
    for flags, dtype in (((), "bfloat16"), (("export.dtype=float16",), "float16")):
        out = exported(run, tmp_path / dtype, *flags)
        kinds = {str(x.dtype) for x in load_file(out / "model.safetensors").values()}
        assert kinds == {dtype}
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == dtype
    exported(run, tmp_path / "a.npz", "export.dtype=float16")
    assert np.load(tmp_path / "a.npz")["embedding"].dtype == np.float16
    with pytest.raises(UsageError, match="export.dtype=bfloat16: out=.*b.npz is of NumPy"):
        exported(run, tmp_path / "b.npz", "export.dtype=bfloat16")
    with pytest.raises(UsageError, match="export.dtype"):
        lm.compose("export.dtype=int8")


def test_sampling_reads_no_moments(folder, opened, tmp_path, monkeypatch):
    run = tmp_path / "run"
    lm.train(compose(folder), run)
    read, plain = [], lm.saved_runs.restored

    def restored(*arguments):
        read.append(plain(*arguments))
        return read[-1]

    monkeypatch.setattr(lm.saved_runs, "restored", restored)
    config = generate.Config(run=str(run), checkpoint="newest")
    saved = generate.load(config.run, config, "run")
    state = read[0][1]
    assert state.opt_state is None and state.params is not None
    # Damage of what is not read does not matter; of the parameters it does.
    held = dataclasses.asdict(state)
    assert saved.params.keys() == held["params"].keys()
