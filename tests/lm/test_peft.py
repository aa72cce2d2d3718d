"""Adapters in PEFT's files: against the files' own formula in NumPy, against PEFT, and what is refused."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit, noisy_params
from lm_configs import gpt2, lm_config
from safetensors.numpy import load_file, save_file
from tolerance import assert_close

from jaxpar.lm import (
    AdapterConfig,
    apply,
    from_hf,
    from_peft,
    merge_adapters,
    to_hf,
    to_peft,
    with_adapters,
)
from jaxpar.lm.adapters import begin_adapters
from jaxpar.types import UsageError

SIZES = dict(vocab_size=32, num_layers=2, embed_dim=16, num_heads=4, mlp_dim=24, dtype="float32")
MODELS = {
    "llama": lm_config(**SIZES, num_kv_heads=2),
    "gpt2": gpt2(**SIZES, max_seq_len=16, dropout=0.0),
}
KINDS = {
    "lora": {},
    "rslora": {"rslora": True, "target": ("wq", "w_up")},
    "dora": {"dora": True, "target": ("wv", "wo")},
}
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 9))


def made(name, kind, folder):
    """Parameters, adapters and their configuration, written to `folder`/base and `folder`/adapter."""
    model, adapter = (
        MODELS[name],
        AdapterConfig("lora", rank=3, alpha=5.0, dropout=0.05, **KINDS[kind]),
    )
    params, rng = noisy_params(model), np.random.default_rng(1)
    adapters = begin_adapters(jax.random.key(0), params, model, adapter)
    adapters = jax.tree.map(
        lambda x: x + jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), adapters
    )
    kept = with_adapters(params, adapters, adapter.scale)
    to_hf(params, model, folder / "base")
    to_peft(kept, model, folder / "adapter", adapter, base="some/model")
    return model, adapter, params, kept


def merged_files(folder, out):
    """The base's files with the adapter merged, from the files alone, by PEFT's formula in float64."""
    told = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    base = load_file(folder / "base" / "model.safetensors")
    tensors = load_file(folder / "adapter" / "adapter_model.safetensors")
    for name, a in tensors.items():
        if not name.endswith("lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        assert any(module.endswith("." + target) for target in told["target_modules"])
        key = next((key for key in told["rank_pattern"] if module.endswith("." + key)), "")
        rank = told["rank_pattern"].get(key, told["r"])
        alpha = told["alpha_pattern"].get(next((k for k in told["alpha_pattern"] if module.endswith("." + k)), ""),
                                          told["lora_alpha"])  # fmt: skip
        assert a.shape[0] == rank
        change = tensors[name.replace("lora_A", "lora_B")].astype(np.float64) @ a
        change *= alpha / (np.sqrt(rank) if told["use_rslora"] else rank)
        weight = base[module + ".weight"].astype(np.float64)
        total = (weight.T if told["fan_in_fan_out"] else weight) + change
        if told["use_dora"]:
            m = tensors[name.replace("lora_A.weight", "lora_magnitude_vector")]
            total *= (m / np.linalg.norm(total, axis=1))[:, None]
        base[module + ".weight"] = np.ascontiguousarray(
            total.T if told["fan_in_fan_out"] else total, np.float32
        )
    out.mkdir()
    save_file(base, out / "model.safetensors")
    (out / "config.json").write_text((folder / "base" / "config.json").read_text())
    return out


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_the_adapters_and_give_them_back(name, kind, tmp_path):
    model, adapter, params, kept = made(name, kind, tmp_path)
    assert_close(
        from_hf(merged_files(tmp_path, tmp_path / "merged"), dtype="float32")[1],
        merge_adapters(kept),
        1e-6,
    )
    found, adapters = from_peft(tmp_path / "adapter", model)
    assert found == dataclasses.replace(adapter, target=("*",))
    assert_close(
        merge_adapters(with_adapters(params, adapters, found.scale)), merge_adapters(kept), 1e-6
    )


def test_patterns_set_a_weight_apart(tmp_path):
    model, adapter, params, kept = made("llama", "lora", tmp_path)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"alpha_pattern": {"self_attn.q_proj": 10.0}})
    )
    found, adapters = from_peft(tmp_path / "adapter", model)
    got = merge_adapters(with_adapters(params, adapters, found.scale))["layers"]
    layers = dict(kept["layers"])
    layers["wq"] = dataclasses.replace(layers["wq"], scale=2 * adapter.scale)
    assert_close({name: got[name] for name in ("wq", "wk")},
                 {name: merge_adapters(layers)[name] for name in ("wq", "wk")}, 1e-6)  # fmt: skip


def test_what_is_not_honoured_is_refused(tmp_path):
    model, adapter, params, kept = made("llama", "lora", tmp_path)
    folder = tmp_path / "adapter"
    config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    with pytest.raises(UsageError, match="already holds something"):
        to_peft(kept, model, folder, adapter)
    with pytest.raises(UsageError, match="no adapter among the parameters"):
        to_peft(params, model, tmp_path / "none", adapter)
    with pytest.raises(
        UsageError,
        match=r"none/adapter_config.json; give a folder with .* adapter_model.safetensors",
    ):
        from_peft(tmp_path / "none", model)
    told, arrays = json.loads(config.read_text()), load_file(tensors)
    for change, sentence in (
        ({"peft_type": "IA3"}, "peft_type='IA3'; legal is 'LORA'"),
        ({"r": 0}, "has r=0"),
        ({"bias": "all"}, "bias='all'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices=.*not honoured"),
        ({"init_lora_weights": "pissa"}, "changes the base"),
        ({"r": 4}, "lora_A.weight is of shape .3, 24., but the model means .4, 24."),
    ):
        config.write_text(json.dumps(told | change))
        with pytest.raises(UsageError, match=sentence):
            from_peft(folder, model)
    config.write_text(json.dumps(told))
    for change, sentence in (
        (
            {"base_model.model.model.norm.lora_A.weight": np.ones((3, 16))},
            "norm.lora_A.weight, of no product",
        ),
        ({min(arrays): np.full_like(arrays[min(arrays)], np.nan)}, "holds NaN"),
    ):
        save_file(arrays | change, tensors)
        with pytest.raises(UsageError, match=sentence):
            from_peft(folder, model)
    save_file({name: x for name, x in arrays.items() if ".layers.1." not in name}, tensors)
    _, adapters = from_peft(folder, model)  # of layer 0 alone: the others are the base's own
    assert all(
        not np.asarray(x[1]).any() and np.asarray(x[0]).any() for x in jax.tree.leaves(adapters)
    )
    save_file({name: x for name, x in arrays.items() if name != min(arrays)}, tensors)
    with pytest.raises(UsageError, match="is of shape absent"):
        from_peft(folder, model)


# PEFT itself, of the extra `peers`: a skip in the slow suite would hide wrong files, so its absence fails.
@pytest.mark.slow  # 15 s in all
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_peft_agrees_both_ways(name, kind, tmp_path):
    import peft
    import torch
    import transformers

    model, _, params, kept = made(name, kind, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        want = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    logits = jit(apply, static_argnums=2)
    np.testing.assert_allclose(logits(kept, TOKENS, model), want, atol=1e-5)
    assert np.abs(np.asarray(logits(params, TOKENS, model)) - want).max() > 0.1
    theirs.save_pretrained(tmp_path / "theirs")
    found, adapters = from_peft(tmp_path / "theirs", model)
    again = with_adapters(params, adapters, found.scale)
    np.testing.assert_allclose(logits(again, TOKENS, model), want, atol=1e-5)
