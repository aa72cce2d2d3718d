"""Records of folders: what one holds, and exports and adapters by its kind and not by a guess."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import noisy_params
from lm_configs import lm_config
from safetensors.numpy import load_file
from tolerance import assert_close

from jaxpar.lm import (
    AdapterConfig,
    Imported,
    from_hf,
    from_peft,
    load_imported,
    load_model,
    merge_adapters,
    read_imported,
    save_imported,
    to_hf,
    to_peft,
    with_adapters,
)
from jaxpar.lm.adapters import begin_adapters
from jaxpar.types import UsageError

MODEL = lm_config(
    vocab_size=32,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=24,
    dtype="float32",
)
PHI3 = Imported(kind="phi3", config={"eos_token_id": [3, 4], "pad_token_id": 0}, dtype="bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Phi-3 that Llama's table can express as well."""
    path = tmp_path_factory.mktemp("given") / "phi3"
    to_hf(noisy_params(MODEL), MODEL, path, imported=PHI3)
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {"bos_token": "<s>", "pad_token": {"content": "<p>"}, "chat_template": "{{ x }}"}
        )
    )
    (path / "tokenizer.json").write_text("{}")
    return path


def test_a_record_says_what_the_folder_says_and_is_read_back(folder, tmp_path):
    found = read_imported(folder)
    assert (found.kind, found.dtype, found.template) == ("phi3", "bfloat16", "{{ x }}")
    assert found.special_tokens == {"bos_token": "<s>", "pad_token": "<p>"}
    assert found.tokenizer.startswith("44136fa355b3678a")  # SHA-256 of {}
    assert found.config == json.loads((folder / "config.json").read_text())
    assert load_imported(tmp_path) is None
    save_imported(found, tmp_path)
    assert load_imported(tmp_path) == found
    assert [path.name for path in tmp_path.iterdir()] == ["imported.json"]
    values = json.loads((tmp_path / "imported.json").read_text())
    for change, sentence in (
        ({"kind": "bert"}, "kind='bert': no architecture; expected llama, mistral"),
        ({"dtype": "int4"}, "dtype='int4': no type of numbers; expected bfloat16"),
        ({"template": None}, "template=None; legal is a string"),
        ({"special_tokens": {"bos_token": 1}}, "legal is an object of strings"),
    ):
        (tmp_path / "imported.json").write_text(json.dumps(values | change))
        with pytest.raises(UsageError, match=sentence):
            load_imported(tmp_path)


def test_the_type_of_numbers_is_that_of_the_tensors_where_the_file_is_silent(folder, tmp_path):
    to_hf(noisy_params(MODEL), MODEL, tmp_path / "half", dtype="float16")
    config = json.loads((tmp_path / "half" / "config.json").read_text())
    (tmp_path / "half" / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if key != "torch_dtype"})
    )
    assert read_imported(tmp_path / "half").dtype == "float16"
    assert load_model(tmp_path / "half")[0].dtype == "float16"


def test_an_export_keeps_the_kind_the_special_tokens_and_the_type_of_numbers(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Phi3ForCausalLM"]
    assert (config["eos_token_id"], config["pad_token_id"]) == ([3, 4], 0)
    assert config["torch_dtype"] == "bfloat16"
    names = load_file(folder / "model.safetensors")
    assert "model.layers.1.self_attn.qkv_proj.weight" in names
    assert {str(x.dtype) for x in names.values()} == {"bfloat16"}
    model, params = from_hf(folder, dtype="float32")
    to_hf(params, model, tmp_path / "wide", dtype="float32", imported=read_imported(folder))
    again = json.loads((tmp_path / "wide" / "config.json").read_text())
    assert again == config | {"torch_dtype": "float32"}
    to_hf(params, model, tmp_path / "guessed")  # without a record as ever
    guessed = json.loads((tmp_path / "guessed" / "config.json").read_text())
    assert guessed["architectures"] == ["LlamaForCausalLM"]
    assert guessed["torch_dtype"] == "float32"


def test_a_kind_that_cannot_hold_the_model_is_one_sentence(tmp_path):
    biased = lm_config(
        vocab_size=32,
        num_layers=1,
        embed_dim=16,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=24,
        bias=True,
    )
    with pytest.raises(UsageError, match="kind=phi3: Phi3ForCausalLM cannot hold a model with "
                       "model.bias=True for False; expected"):  # fmt: skip
        to_hf(noisy_params(biased), biased, tmp_path / "a", imported=PHI3)
    mixtral = dataclasses.replace(PHI3, kind="mixtral")
    with pytest.raises(UsageError, match="kind=mixtral: MixtralForCausalLM has other layers"):
        to_hf(noisy_params(MODEL), MODEL, tmp_path / "a", imported=mixtral)
    assert not (tmp_path / "a").exists()


def test_adapters_of_a_phi3_have_its_names_both_ways(folder, tmp_path):
    model, params = from_hf(folder, dtype="float32")
    imported = read_imported(folder)
    adapter = AdapterConfig("lora", rank=3, alpha=6.0)
    adapters = begin_adapters(jax.random.key(0), params, model, adapter)
    rng = np.random.default_rng(1)
    adapters = jax.tree.map(
        lambda x: x + jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), adapters
    )
    kept = with_adapters(params, adapters, adapter.scale)
    to_peft(kept, model, tmp_path / "adapter", adapter, imported=imported)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0."
    a = tensors[f"{prefix}self_attn.qkv_proj.lora_A.weight"].astype(np.float64)
    b = tensors[f"{prefix}self_attn.qkv_proj.lora_B.weight"].astype(np.float64)
    told = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert set(told["target_modules"]) == {
        "self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"
    }  # fmt: skip
    # The base's fused tensor and the change of PEFT's formula are the merged weights, fused.
    rank = told["rank_pattern"]["self_attn.qkv_proj"]
    alpha = told["alpha_pattern"]["self_attn.qkv_proj"]
    base = load_file(folder / "model.safetensors")["model.layers.0.self_attn.qkv_proj.weight"]
    to_hf(merge_adapters(kept), model, tmp_path / "m", dtype="float32", imported=imported)
    merged = load_file(tmp_path / "m" / "model.safetensors")
    np.testing.assert_allclose(
        merged["model.layers.0.self_attn.qkv_proj.weight"],
        base.astype(np.float64) + b @ a * (alpha / rank),
        atol=1e-6,
    )
    found, back = from_peft(tmp_path / "adapter", model, imported=imported)
    assert_close(
        merge_adapters(with_adapters(params, back, found.scale)), merge_adapters(kept), 1e-6
    )
    with pytest.raises(UsageError, match="lora_A.weight, of no product"):
        from_peft(tmp_path / "adapter", model)  # Llama's names have no fused product


def test_a_loaded_model_is_of_the_type_asked_for(folder):
    model, params = load_model(folder)
    assert model.dtype == "bfloat16"
    assert {str(x.dtype) for x in jax.tree.leaves(params)} == {"bfloat16"}
    want = from_hf(folder)[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype(jnp.float32), b), params, want)
    assert load_model(folder, "float32")[0].dtype == "float32"
    with pytest.raises(UsageError, match="dtype='int8': no type of numbers; expected bfloat16"):
        load_model(folder, "int8")
    if not jax.config.jax_enable_x64:
        with pytest.raises(UsageError, match="dtype=float64: JAX has no float64 here"):
            load_model(folder, "float64")
