"""The default mesh is one that the model allows, in training, evaluating and export."""

import json

import jax
import numpy as np
import pytest
from lm_configs import with_fields
from word_folders import MODEL, write_folder

from experiments import estimate, generate, lm
from experiments.app import runner
from experiments.app.lm import initial_model
from experiments.app.lm.default_mesh import check_divides, fitting_mesh
from jaxpar.mesh import RULES, MeshSpec, make_mesh, rules_from, use_mesh
from jaxpar.types import UsageError

THREE = with_fields(MODEL, embed_dim=12, num_heads=3, num_kv_heads=3, head_dim=4, mlp_dim=16)


@pytest.fixture
def folder(tmp_path):
    write_folder(tmp_path / "given", THREE, [f"w{token}" for token in range(16)])
    config = json.loads((tmp_path / "given" / "config.json").read_text()) | {"eos_token_id": 15}
    (tmp_path / "given" / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    (tmp_path / "text.txt").write_text(" ".join(f"w{i}" for i in rng.integers(0, 14, 600)))
    return tmp_path / "given"


@pytest.mark.parametrize(
    ("changes", "rows", "expected"),
    [
        ({}, 8, runner.SHOWN),
        ({}, 3, runner.SHOWN),  # refused later, by its flag
        ({"num_heads": 3, "num_kv_heads": 3, "head_dim": 4}, 8, MeshSpec(data=2, fsdp=4)),
        ({"num_heads": 3, "num_kv_heads": 3, "head_dim": 4}, 4, MeshSpec(data=2, fsdp=2)),
        ({"num_heads": 3, "num_kv_heads": 3, "head_dim": 4}, 3, MeshSpec()),
        ({"vocab_size": 17, "embed_dim": 6, "head_dim": 4}, 16, MeshSpec(data=4, fsdp=2)),
        ({"vocab_size": 17, "embed_dim": 7, "head_dim": 4}, 16, MeshSpec(data=8)),
    ],
)
def test_a_mesh_fits_the_weights_and_the_rows(changes, rows, expected):
    model = with_fields(MODEL, **changes)
    assert fitting_mesh(runner.SHOWN, model, RULES, rows) == expected
    if model.vocab_size == 17:
        rules = rules_from({"vocab": "none", "embed": "none"})
        assert fitting_mesh(runner.SHOWN, model, rules, rows) == runner.SHOWN


def test_a_run_of_a_folder_is_trained_evaluated_and_exported_as_typed(
    folder, tmp_path, monkeypatch, capsys
):
    """With three key heads on eight devices, and no flag of a mesh."""
    monkeypatch.setattr(lm, "draw_sample", lambda *_: "")  # a program of its own
    sizes = "data.seq_len=8 data.batch_size=4 data.split=tail:0.2 train.steps=1 train.save_every=1"
    where = (f"init=hf:{folder}", f"data.path={tmp_path / 'text.txt'}", "train.eval_batches=1")
    run = tmp_path / "run"
    flags = (*sizes.split(), *where, "adapter=lora", "train.eval_every=0", "model.dtype=float32")
    lm.execute(lm.compose(*flags), run)
    assert "mesh       data=2 fsdp=2 on 4" in capsys.readouterr().out
    # A run names its own folder no longer needed, and other modes read its model.
    lm.execute(lm.compose("mode=eval", f"run={run}"), tmp_path)
    lm.execute(lm.compose("mode=export", f"run={run}", f"out={tmp_path / 'out'}"), tmp_path)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    assert "mesh       data=2 fsdp=2 on 4" in capsys.readouterr().out
    asked = lm.compose("mode=export", f"run={run}", "out=other", "mesh.data=4", "mesh.tensor=2")
    with pytest.raises(UsageError, match=r"^mesh.tensor=2: kv_heads of size 3 of layers.wk"):
        lm.execute(asked, tmp_path)


def test_rows_are_split_as_the_table_says():
    model = with_fields(MODEL, num_heads=3, num_kv_heads=3, head_dim=4)
    rules = rules_from({"batch": "data"})
    assert fitting_mesh(runner.SHOWN, model, rules, 2) == MeshSpec(data=2, fsdp=4)


def test_weights_are_split_as_the_table_says():
    whole_heads = rules_from({"heads": "none", "kv_heads": "none"})
    with use_mesh(make_mesh(MeshSpec(data=4, tensor=2)), whole_heads):
        check_divides(THREE)


def test_the_sentence_names_the_flag():
    with use_mesh(make_mesh(MeshSpec(data=4, tensor=2))):
        check_divides(MODEL)
        sentence = (
            r"mesh.tensor=2: kv_heads of size 3 of layers.wk does not divide over 2 devices; "
            r"expected mesh.tensor of 1."
        )
        with pytest.raises(UsageError, match=sentence):
            check_divides(THREE)
    with use_mesh(make_mesh(MeshSpec(fsdp=8, inner=2))):
        with pytest.raises(UsageError, match="mesh.fsdp=8: embed of size 12 .* of 1, 2, 3, 4, 6."):
            check_divides(THREE)


@pytest.mark.parametrize(
    "flags", [("init=hf:{}",), ("mode=eval", "run={}")], ids=["training", "evaluating"]
)
def test_the_default_mesh_reads_folders_with_unknown_keys_where_others_do(flags, folder, tmp_path):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"colour": "blue"}))
    flags = [flag.format(folder) for flag in flags]
    with pytest.raises(UsageError, match="colour='blue', which is not honoured"):
        lm.usual_mesh(lm.compose(*flags), tmp_path / "new")
    with pytest.warns(UserWarning, match="colour='blue'"):
        mesh = lm.usual_mesh(
            lm.compose(*flags, "strict=false", "data.batch_size=4"), tmp_path / "new"
        )
    assert mesh == MeshSpec(data=2, fsdp=2)


@pytest.mark.parametrize("strict", [True, False])
def test_every_reader_of_a_folder_takes_unknown_keys_where_it_may(strict, folder):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"colour": "blue"}))
    config = generate.Config(hf=str(folder), strict=strict)
    given = estimate.Config(hf=str(folder), strict=strict)
    readers = (
        lambda: generate.load(config.hf, config, "hf"),
        lambda: initial_model.imported_of(folder, strict),
        lambda: estimate.with_model(given),
    )
    with use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])):
        for read in readers:
            expected = pytest.warns(UserWarning, match="colour='blue'")
            if strict:
                expected = pytest.raises(UsageError, match="colour='blue', which is not honoured")
            with expected:
                read()
