"""Saved modules, embeddings and heads in PEFT's files: by their formula, and against PEFT."""

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
    Trainer,
    apply,
    from_hf,
    from_peft,
    merge_adapters,
    to_hf,
    to_peft,
    with_adapters,
)
from jaxpar.types import UsageError

SIZES = dict(vocab_size=32, num_layers=2, embed_dim=16, num_heads=4, mlp_dim=24, dtype="float32")
LLAMA = lm_config(**SIZES, num_kv_heads=2)
MODELS = {
    "llama": LLAMA,
    "tied": dataclasses.replace(LLAMA, embedding=dataclasses.replace(LLAMA.embedding, tied=True)),
    "gpt2": gpt2(**SIZES, max_seq_len=16, dropout=0.0),
    "experts": lm_config(**SIZES, num_kv_heads=2, num_experts=4, experts_per_token=2),
}
LORA = AdapterConfig("lora", rank=3, alpha=5.0)
CASES = {
    "norms and head": ("llama", {"modules_to_save": ("head", "*norm*")}),
    "the last norm": ("llama", {"modules_to_save": ("final_norm*",)}),
    "a product": ("llama", {"target": ("wq", "w_down"), "modules_to_save": ("wv",)}),
    "embedding and head": ("llama", {"target": ("*", "embedding", "head"), "rslora": True}),
    "a tied embedding": ("tied", {"modules_to_save": ("embedding", "attn_norm*")}),
    "of fused weights": ("gpt2", {"target": ("w_up",), "modules_to_save": ("wk", "final_norm*")}),
}
ENDS = {
    "norms and head": ["input_layernorm", "lm_head", "norm", "post_attention_layernorm"],
    "the last norm": ["model.norm"],
    "a product": ["v_proj"],
    "embedding and head": None,
    "a tied embedding": ["embed_tokens", "input_layernorm", "lm_head"],
    "of fused weights": ["c_attn", "ln_f"],
}
TOKENS = np.random.default_rng(0).integers(0, 32, (2, 9))


def written(name, folder, **options):
    """A state of noisy adapters, in files: of the base, and PEFT's."""
    kind, changes = CASES[name]
    model = MODELS[kind]
    adapter = dataclasses.replace(LORA, **changes)
    params = noisy_params(model)
    state = Trainer(model, adapter=adapter).begin(params, jax.random.key(0))
    rng = np.random.default_rng(1)
    noisy = jax.tree.map(
        lambda x: x + jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), state.adapters
    )
    state = state.replace(adapters=noisy)
    to_hf(params, model, folder / "base")
    to_peft(state.params, model, folder / "adapter", adapter, adapters=state.adapters, **options)
    return model, adapter, params, state


def files_of(folder):
    config = json.loads((folder / "adapter_config.json").read_text())
    return config, load_file(folder / "adapter_model.safetensors")


def by_hand(folder):
    """The base's tensors with what the adapter's files say, by PEFT's formula in float64."""
    config, tensors = files_of(folder / "adapter")
    base = load_file(folder / "base" / "model.safetensors")
    prefix = "base_model.model."
    power = 1.0
    if config["use_rslora"]:
        power = 0.5
    for full, array in tensors.items():
        name = full.removeprefix(prefix)
        module, _, part = name.rpartition(".")
        if part == "lora_embedding_A":
            change = tensors[full.replace("_A", "_B")].astype(np.float64) @ array
            base[module + ".weight"] += (5 / 3**power * change.T).astype(np.float32)
        elif name.endswith("lora_A.weight"):
            module = name.removesuffix(".lora_A.weight")
            change = tensors[full.replace("lora_A", "lora_B")].astype(np.float64) @ array
            if config["fan_in_fan_out"]:
                change = change.T
            base[module + ".weight"] += (5 / 3**power * change).astype(np.float32)
        elif "lora_" not in name:
            assert any(module.endswith(end) for end in config["modules_to_save"])
            if name != "lm_head.weight" or name in base:
                base[name] = array
    out = folder / "merged"
    out.mkdir()
    save_file(base, out / "model.safetensors")
    (out / "config.json").write_text((folder / "base" / "config.json").read_text())
    return out


@pytest.mark.parametrize("name", CASES)
def test_files_hold_what_is_trained_and_give_it_back(name, tmp_path):
    model, adapter, params, state = written(name, tmp_path)
    want = merge_adapters(state.params)
    assert_close(from_hf(by_hand(tmp_path), dtype="float32")[1], want, 1e-6)
    config, tensors = files_of(tmp_path / "adapter")
    assert config["modules_to_save"] == ENDS[name]
    assert ("ensure_weight_tying" in config) == (name == "a tied embedding")
    found, adapters = from_peft(tmp_path / "adapter", model)
    assert_close(merge_adapters(with_adapters(params, adapters, found.scale)), want, 1e-6)
    # What was read trains on: it is an adapter of this model.
    shapes = jax.eval_shape(Trainer(model, adapter=found).init, jax.random.key(0))
    assert jax.tree.structure(shapes.adapters) == jax.tree.structure(adapters)


def test_sums_alone_are_saved_as_modules(tmp_path):
    """Parameters without the adapters have the sums of embedding and head: written whole."""
    model, adapter, params, state = written("embedding and head", tmp_path)
    to_peft(state.params, model, tmp_path / "whole", adapter)
    config, tensors = files_of(tmp_path / "whole")
    assert config["modules_to_save"] == ["embed_tokens", "lm_head"]
    found, adapters = from_peft(tmp_path / "whole", model)
    assert set(found.modules_to_save) == {"embedding", "head"}
    again = merge_adapters(with_adapters(params, adapters, found.scale))
    assert_close(again, merge_adapters(state.params), 1e-6)


def test_a_change_beside_its_own_base_is_their_sum(tmp_path):
    """PEFT writes the weight of an adapted embedding too, and puts it in place of the model's."""
    model, _, params, state = written("embedding and head", tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.embed_tokens.base_layer.weight"
    tensors[name] = np.asarray(params["embedding"]) + 1
    save_file(tensors, file)
    found, adapters = from_peft(tmp_path / "adapter", model)
    assert found.target == ("*", "head") and found.modules_to_save == ("embedding",)
    got = merge_adapters(with_adapters(params, adapters, found.scale))
    want = merge_adapters(state.params)
    assert_close(got, want | {"embedding": want["embedding"] + 1}, 1e-6)


@pytest.mark.parametrize(
    ("kind", "changes", "sentence"),
    [
        ("experts", {"target": ("wq", "experts")}, "adapter.target=experts: PEFT's files have no"),
        ("experts", {"modules_to_save": ("w_router",)}, "w_router: routers and experts have other"),
        ("gpt2", {"target": ("wq",), "modules_to_save": ("wk",)}, "layers.wk: it lies in .*c_attn"),
        ("llama", {"rank": 0}, "no adapter among the parameters|rank over 0"),
    ],
)
def test_what_peft_has_no_files_for_is_refused(kind, changes, sentence, tmp_path):
    model = MODELS[kind]
    adapter = dataclasses.replace(LORA, **changes)
    with pytest.raises(UsageError, match=sentence):
        state = Trainer(model, adapter=adapter).begin(noisy_params(model), jax.random.key(0))
        to_peft(state.params, model, tmp_path / "adapter", adapter)
    assert not (tmp_path / "adapter").exists()


PREFIX = "base_model.model."


@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("norms and head", {"lm_head.weight": None}, "modules_to_save=lm_head: .* is missing"),
        (
            "norms and head",
            {"lm_head.weight": np.ones((3, 3))},
            "is of shape .3, 3., but the model",
        ),
        ("norms and head", {"lm_head.weight": np.full((32, 16), np.inf)}, "lm_head.* holds NaN or"),
        (
            "the last norm",
            {"model.layers.0.input_layernorm.weight": np.ones(16)},
            "some layers alone",
        ),
        ("a tied embedding", {"lm_head.weight": np.ones((32, 16))}, "but the model ties them"),
        ("a tied embedding", {"lm_head.lora_A.weight": np.ones((3, 16))}, "are one weight"),
        ("embedding and head", {"model.embed_tokens.lora_embedding_B": None}, "lacks A or B"),
        ("embedding and head", {"lm_head.lora_A.weight": np.ones((4, 16))}, "lm_head.*of shape"),
        ("embedding and head", {"lm_head.lora_A.weight": np.full((3, 16), np.nan)}, "holds NaN"),
    ],
)
def test_damaged_files_are_refused(name, change, sentence, tmp_path):
    model, *_ = written(name, tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file) | {PREFIX + name: array for name, array in change.items()}
    save_file({name: x for name, x in tensors.items() if x is not None}, file)
    with pytest.raises(UsageError, match=sentence):
        from_peft(tmp_path / "adapter", model)


def test_a_head_that_is_not_saved_with_the_embedding_ties_by_the_flag_alone(tmp_path):
    model, *_ = written("a tied embedding", tmp_path)
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    del tensors[PREFIX + "lm_head.weight"]
    save_file(tensors, file)
    want = np.asarray(tensors[PREFIX + "model.embed_tokens.weight"])
    np.testing.assert_array_equal(from_peft(tmp_path / "adapter", model)[1]["embedding"], want)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"ensure_weight_tying": False}))
    with pytest.raises(UsageError, match="as ensure_weight_tying=true saves them"):
        from_peft(tmp_path / "adapter", model)


def test_modules_that_the_model_has_not_are_refused(tmp_path):
    model, *_ = written("the last norm", tmp_path)
    config = tmp_path / "adapter" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": ["score"]}))
    with pytest.raises(UsageError, match="modules_to_save=score: the model has no such module"):
        from_peft(tmp_path / "adapter", model)


# PEFT itself, of the extra `peers`: its absence fails, since a skip would hide wrong files.
@pytest.mark.slow  # 15 s in all
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("name", CASES)
def test_peft_agrees_both_ways(name, tmp_path):
    import peft
    import torch
    import transformers

    model, _, params, state = written(name, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", attn_implementation="eager"
    )
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    with torch.no_grad():
        want = theirs(torch.from_numpy(TOKENS)).logits.numpy()
    logits = jit(apply, static_argnums=2)
    np.testing.assert_allclose(logits(state.params, TOKENS, model), want, atol=1e-5)
    assert np.abs(np.asarray(logits(params, TOKENS, model)) - want).max() > 0.05
    options = [False, "auto"]
    # Where all embeddings are written, PEFT gives saved ones a second, internal name.
    if not {"embedding", "head"} & {*CASES[name][1].get("modules_to_save", ())}:
        options.append(True)
    for save_embeddings in options:
        folder = tmp_path / f"theirs {save_embeddings}"
        theirs.save_pretrained(folder, save_embedding_layers=save_embeddings)
        found, adapters = from_peft(folder, model)
        again = with_adapters(params, adapters, found.scale)
        np.testing.assert_allclose(logits(again, TOKENS, model), want, atol=1e-5)
