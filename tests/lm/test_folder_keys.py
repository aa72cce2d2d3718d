"""Keys of config.json: those that change no number are harmless, and rope types mean their papers'."""

import json
import warnings

import numpy as np
import pytest
from fast import jit, noisy_params
from lm_configs import lm_config
from test_imported import MODEL

from jaxpar.lm import Imported, apply, config_from_hf, load_model, read_imported, to_hf
from jaxpar.lm.hub.architectures import KINDS
from jaxpar.lm.hub.keys import HARMLESS, UNREAD
from jaxpar.types import UsageError

RING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "llama"
    to_hf(noisy_params(MODEL), MODEL, path)
    return path


def read(folder, tmp_path, changes, **options):
    values = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    return config_from_hf(tmp_path, dtype="float32", **options)


@pytest.mark.parametrize(
    "changes",
    [
        {"unk_token_id": 0},
        {"mask_token_id": 4, "cls_token_id": 5},
        {"pretraining_tp": 2},
        {"auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM",
                      "AutoTokenizer": ["x.Y", None]}},
    ],
)  # fmt: skip
def test_keys_that_change_no_number_are_harmless(folder, tmp_path, changes):
    assert read(folder, tmp_path, changes) == config_from_hf(folder, dtype="float32")


def test_keys_of_an_architecture_are_harmless_to_it_alone(folder, tmp_path):
    assert set(UNREAD) <= {arch.model_type for arch in KINDS}
    for arch in KINDS:  # a key is in one table
        known = {key for key, *_ in arch.fields.values()} | set(arch.others) | set(arch.fixed)
        assert not UNREAD.get(arch.model_type, frozenset()) & (known | HARMLESS)
    with pytest.raises(UsageError, match="time_step_init_scheme='random', which is not honoured"):
        read(folder, tmp_path, {"time_step_init_scheme": "random"})
    mamba = lm_config(
        vocab_size=16, num_layers=1, embed_dim=8, num_heads=2, mlp_dim=0, mixer="mamba2",
        mixer_dim=16, positions="none",
    )  # fmt: skip
    to_hf(noisy_params(mamba), mamba, tmp_path / "mamba")
    keys = {"time_step_init_scheme": "random", "time_step_scale": 1.0, "intermediate_size": 16}
    assert read(tmp_path / "mamba", tmp_path, keys) == config_from_hf(
        tmp_path / "mamba", dtype="float32"
    )


def test_code_of_another_class_is_rejected(folder, tmp_path):
    with pytest.raises(UsageError, match="auto_map=.*strict=false loads the folder without it"):
        read(folder, tmp_path, {"auto_map": {"AutoModel": "modeling_mine.MineForCausalLM"}})


def test_a_folder_that_is_not_strict_names_all_that_it_does_not_honour(folder, tmp_path):
    changes = {"new_cap": 30.0, "sliding_window": 8, "unk_token_id": 0}
    with pytest.raises(UsageError, match="new_cap=30.0"):
        read(folder, tmp_path, changes)
    with pytest.warns(UserWarning, match=r"new_cap=30.0, sliding_window=8, which are not honour"):
        model = read(folder, tmp_path, changes, strict=False)
    assert model == config_from_hf(folder, dtype="float32")
    with pytest.raises(UsageError, match="vocab_size='x'"):  # what is known must be right
        read(folder, tmp_path, {"vocab_size": "x"}, strict=False)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    read(folder, tmp_path, {}, strict=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with pytest.raises(UsageError, match="new_cap"):
            values = json.loads((folder / "config.json").read_text())
            (tmp_path / "config.json").write_text(json.dumps(values | changes))
            load_model(tmp_path)
        load_model(tmp_path, strict=False)
    assert [str(each.message).count("new_cap") for each in told] == [1]
    with pytest.warns(UserWarning, match="new_cap"):
        assert read_imported(tmp_path, strict=False).kind == "llama"


@pytest.mark.parametrize(
    ("scaling", "fields"),
    [
        (RING, ("yarn", 4.0, 64, 1, 32, 0.0)),
        (RING | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}, ("yarn", 4.0, 64, 2, 16, 1.5)),
        # 0.1 * 2 * ln 4 + 1 over 0.1 * 0.5 * ln 4 + 1
        (RING | {"mscale": 2.0, "mscale_all_dim": 0.5, "truncate": True},
         ("yarn", 4.0, 64, 1, 32, 1.2772589 / 1.0693147)),
        ({"type": "yarn", "factor": 2.0}, ("yarn", 2.0, 256, 1, 32, 0.0)),
        ({"type": "dynamic", "factor": 2.0}, ("dynamic", 2.0, 256, 1.0, 4.0, 0.0)),
    ],
)  # fmt: skip
def test_rope_types_are_translated_and_written_back(folder, tmp_path, scaling, fields):
    model = read(folder, tmp_path, {"rope_scaling": scaling, "max_position_embeddings": 256})
    rope = model.rope
    found = (rope.scaling, rope.factor, rope.original_len, rope.low_freq_factor)
    assert found + (rope.high_freq_factor,) == fields[:-1]
    assert rope.score_scale == pytest.approx(fields[-1], rel=1e-6)
    to_hf(noisy_params(model), model, tmp_path / "out")
    again = config_from_hf(tmp_path / "out", dtype="float32").rope
    assert (again.scaling, again.original_len) == (rope.scaling, rope.original_len)
    if rope.scaling == "yarn":
        assert again.score_scale == pytest.approx(rope.score_scale or 0.1 * 1.38629436 * (
            0.5 if rope.factor == 2 else 1) + 1)  # fmt: skip


@pytest.mark.parametrize(
    ("scaling", "sentence"),
    [
        (RING | {"beta_fast": 1, "beta_slow": 2}, "beta_fast=1: not over beta_slow=2"),
        (RING | {"truncate": False}, "has truncate=False; legal is True"),
        (RING | {"short_factor": [1]}, "does not honour short_factor"),
        ({"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 8},
         "original_max_position_embeddings=8: the dynamic rule begins at max_position_embedd"),
        ({"type": "dynamic"}, "rope type 'dynamic' also needs factor"),
    ],
)  # fmt: skip
def test_rope_types_that_are_not_honoured_are_rejected(folder, tmp_path, scaling, sentence):
    with pytest.raises(UsageError, match=sentence):
        read(folder, tmp_path, {"rope_scaling": scaling, "max_position_embeddings": 256})


def test_a_phi3_that_brings_code_and_yarn_is_read(tmp_path):
    to_hf(noisy_params(MODEL), MODEL, tmp_path / "phi3", imported=Imported("phi3", {}))
    changes = {
        "auto_map": {
            "AutoConfig": "configuration_phi3.Phi3Config",
            "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
        },
        "rope_scaling": {"type": "yarn", "factor": 2.0},
        "original_max_position_embeddings": 512,
        "max_position_embeddings": 1024,
    }
    rope = read(tmp_path / "phi3", tmp_path, changes).rope
    assert (rope.scaling, rope.original_len, rope.factor) == ("yarn", 512, 2.0)
    model = read(tmp_path / "phi3", tmp_path, changes)
    to_hf(noisy_params(model), model, tmp_path / "out", imported=Imported("phi3", {}))
    assert config_from_hf(tmp_path / "out").rope.original_len == 512


@pytest.mark.slow  # 10 s
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("scaling", [RING, {"rope_type": "dynamic", "factor": 3.0}])
def test_transformers_agrees_on_scaled_rope(folder, tmp_path, scaling):
    import torch
    import transformers

    changes = {"rope_scaling": scaling, "max_position_embeddings": 8}
    model = read(folder, tmp_path, changes)
    to_hf(noisy_params(model), model, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager"
    )
    tokens = np.random.default_rng(0).integers(0, 32, (2, 20))
    with torch.no_grad():
        want = theirs.eval()(torch.from_numpy(tokens)).logits.numpy()
    got = jit(apply, static_argnums=2)(noisy_params(model), tokens, model)
    np.testing.assert_allclose(got, want, atol=1e-5)
