"""What a Hugging Face folder may say: honoured, harmless, or refused by name in one sentence, whatever its type."""

import json
import math
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from fast import jit, noisy_params
from flat_decoding import lm_generate as generate
from lm_configs import lm_config, with_fields
from safetensors.numpy import load_file, save_file
from tokenizers import models, processors
from twin_folders import SIZES

from jaxpar.decode import Generated
from jaxpar.lm import Sampling, config_from_hf, from_hf, num_params, to_hf
from jaxpar.lm.text.tokenizer import load_tokenizer
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError

CONFIGS = {
    "llama": lm_config(
        **SIZES, num_kv_heads=2, tied=True, rope_theta=100.0, rope_factor=8.0, rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0, rope_original_len=16,
    ),
    "gpt2": lm_config(**SIZES, norm="layer", positions="learned", activation="gelu", bias=True, tied=True),
    "mixtral": lm_config(**SIZES, num_experts=2, tied=True),
    "qwen3_moe": lm_config(**SIZES, num_experts=2, qk_norm=True, tied=True),
    "mamba2": lm_config(
        **SIZES | dict(mlp_dim=0), mixer="mamba2", mixer_dim=16, mixer_key_dim=3, positions="none", tied=True
    ),
}  # fmt: skip
# What published folders hold besides.
MORE = {
    "llama": dict(
        _name_or_path="a/b", attention_dropout=0.0, bos_token_id=1, eos_token_id=[2, 3], pretraining_tp=1,
        transformers_version="4.43.0", use_cache=True, is_llama_config=True, rope_interleaved=False, layer_types=None,
        sliding_window=None, quantization_config=None, final_logit_softcapping=None, partial_rotary_factor=1.0,
    ),
    "gpt2": dict(
        bos_token_id=2, eos_token_id=2, n_ctx=32, summary_type="cls_index", summary_proj_to_labels=True, use_cache=True,
        task_specific_params={"text-generation": {"do_sample": True}}, id2label={"0": "LABEL_0"}, pruned_heads={},
    ),
    "mixtral": dict(sliding_window=None, output_router_logits=False, router_aux_loss_coef=0.02, use_cache=True),
    "qwen3_moe": dict(
        sliding_window=None, use_sliding_window=False, max_window_layers=48, router_aux_loss_coef=0.001, use_cache=True,
    ),
    "mamba2": dict(
        chunk_size=256, residual_in_fp32=True, norm_before_gate=True, rescale_prenorm_residual=False, time_step_rank=48,
        time_step_min=0.001, time_step_max=0.1, time_step_floor=0.0001, time_step_limit=[0.0, math.inf],
        pad_token_id=0, use_cache=True,
    ),
}  # fmt: skip
WRONG = [None, True, False, 0, 1, -1, 2, 1.5, -0.5, 1e400, -1e400, math.nan, 10**30, 10**400, "", "x", "1", [], [None],
         [[1]], ["x"], {}, {"a": 1}, {"rope_type": []}]  # fmt: skip


def sentence_of(function, *args):
    """The refusal, on one line."""
    with pytest.raises(UsageError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    for name, config in CONFIGS.items():
        to_hf(noisy_params(config), config, root / name)
        change(root / name / "config.json", MORE[name])
    return root


def change(path, changes):
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


@pytest.fixture
def folder(folders, tmp_path, request):
    return shutil.copytree(folders / getattr(request, "param", "llama"), tmp_path / "model")


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize("name", CONFIGS)
def test_any_key_of_any_type_is_taken_or_refused_in_a_sentence(folders, tmp_path, name):
    values = json.loads((folders / name / "config.json").read_text())
    config_from_hf(folders / name)
    path, refused = tmp_path / "config.json", {}
    places = [(values, key) for key in values]
    places += [(values["rope_scaling"], key) for key in values.get("rope_scaling") or ()]
    for place, key in places:
        kept = place[key]
        for wrong in WRONG:
            place[key] = wrong
            path.write_text(json.dumps(values))
            try:
                config_from_hf(path)
            except UsageError as error:
                assert "\n" not in str(error)
                refused.setdefault(key, []).append(wrong)
        place[key] = kept
    sizes = {
        "vocab_size",
        *(
            ("n_embd", "n_layer", "n_inner")
            if name == "gpt2"
            else ("hidden_size", "num_hidden_layers")
        ),
    }
    for key in sizes | {"initializer_range"}:
        assert {str(x) for x in (True, -1, math.nan, 1e400, "x")} <= set(map(str, refused[key])), (
            key
        )
    assert {key for key in values if key not in refused} <= {
        "torch_dtype", "pretraining_tp", "attention_dropout", "_name_or_path", "transformers_version", "use_cache",
        "is_llama_config", "n_ctx", "summary_type", "summary_proj_to_labels", "task_specific_params", "id2label",
        "output_router_logits", "router_aux_loss_coef", "max_window_layers", "sliding_window", "pad_token_id",
    }  # fmt: skip


HARMFUL = [
    ("llama", dict(quantization_config={"quant_method": "gptq", "bits": 4}), "quantization_config="),
    ("llama", dict(sliding_window=4096), "sliding_window=4096; legal is null, or use_sliding_window=false"),
    ("llama", dict(sliding_window=4096, use_sliding_window=True), "use_sliding_window=True|sliding_window=4096"),
    ("llama", dict(layer_types=["full_attention", "sliding_attention"]), "layer_types=.* a list of 'full_attention'"),
    ("llama", dict(attn_logit_softcapping=50.0), "attn_logit_softcapping=50.0, which is not honoured"),
    ("llama", dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0, which is not honoured"),
    ("llama", dict(attention_multiplier=0.01), "attention_multiplier=0.01"),
    ("llama", dict(num_local_experts=8), "num_local_experts=8"),
    ("llama", dict(auto_map={"AutoModel": "modeling_x.X"}), "auto_map="),
    ("llama", dict(rope_theta=-1.0), "rope_theta=-1.0; legal is a finite number over 0"),
    ("llama", dict(rope_theta=None, rope_parameters={"rope_theta": 0.0}), "rope_theta=0.0; legal is a finite"),
    ("llama", dict(rope_parameters={"rope_theta": 5.0}), "rope_theta is 100.0 and 5.0; legal is one value"),
    ("llama", dict(rms_norm_eps=math.nan), "rms_norm_eps=nan; legal is a finite number of at least 0"),
    ("llama", dict(rms_norm_eps=-1e-6), "rms_norm_eps=-1e-06; legal"),
    ("llama", dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000; legal is a whole number from 1 to 65535"),
    ("llama", dict(tie_word_embeddings=1), "tie_word_embeddings=1; legal is true or false"),
    ("llama", dict(architectures="LlamaForCausalLM"), "architectures='LlamaForCausalLM'; legal is a list of strings"),
    ("llama", dict(model_type=3), "model_type=3; legal is a string"),
    ("llama", dict(rope_scaling=[8.0]), r"rope_scaling=\[8.0\]; legal is an object"),
    ("llama", dict(rope_scaling={"rope_type": "default", "factor": 2.0}), "'default' does not honour factor=2.0"),
    (
        "llama",
        dict(rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0,
                           "original_max_position_embeddings": 16}),
        "high_freq_factor=4.0 is not over low_freq_factor=4.0",
    ),
    ("mixtral", dict(sliding_window=4096), "sliding_window=4096; legal is null"),
    ("mixtral", dict(router_jitter_noise=0.1), "router_jitter_noise=0.1; legal is 0.0"),
    ("mixtral", dict(num_experts_per_tok=1), "num_experts_per_tok=1 is not honoured of a Mixtral; legal"),
    ("mixtral", dict(num_experts_per_tok=3), "experts_per_token=3 is over num_experts=2; legal are 1 to 2"),
    ("mixtral", dict(num_local_experts=0), "num_local_experts=0; legal is a whole number"),
    ("mixtral", dict(num_local_experts=None), "config.json lacks num_local_experts"),
    ("mixtral", dict(attention_bias=True), "attention_bias=True, which is not honoured"),
    ("qwen3_moe", dict(norm_topk_prob=False), "norm_topk_prob=False is .*; legal is True with num_"),
    ("qwen3_moe", dict(norm_topk_prob=None), "norm_topk_prob=False is not honoured"),
    ("qwen3_moe", dict(num_experts_per_tok=1), "norm_topk_prob=True is .*; legal is False with num_"),
    ("qwen3_moe", dict(decoder_sparse_step=2), "decoder_sparse_step=2; legal is 1"),
    ("qwen3_moe", dict(mlp_only_layers=[0]), r"mlp_only_layers=\[0\]; legal is \[\]"),
    ("qwen3_moe", dict(attention_bias=True), "attention_bias=True; legal is False"),
    ("qwen3_moe", dict(sliding_window=4096, use_sliding_window=True), "use_sliding_window=True|sliding_window=4096"),
    ("qwen3_moe", dict(num_local_experts=3), "num_experts=2 and num_local_experts=3; legal is one value"),
    ("qwen3_moe", dict(num_experts=None), "config.json lacks num_experts"),
    ("qwen3_moe", dict(head_dim=3), "model.attention.head_dim=3 must be even for rope"),
    ("qwen3_moe", dict(shared_expert_intermediate_size=8), "shared_expert_intermediate_size=8, which is not honoured"),
    ("mamba2", dict(time_step_limit=[0.0, 0.1]), r"time_step_limit=\[0.0, 0.1\]; legal is \[0, Infinity\]"),
    ("mamba2", dict(time_step_limit=[0.001, math.inf]), r"time_step_limit=\[0.001, inf\]; legal"),
    ("mamba2", dict(use_bias=True), "use_bias=True; legal is False"),
    ("mamba2", dict(use_conv_bias=False), "use_conv_bias=False; legal is True"),
    ("mamba2", dict(rms_norm=False), "rms_norm=False; legal is True"),
    ("mamba2", dict(conv_kernel=3), "conv_kernel=3; legal is 4"),
    ("mamba2", dict(hidden_act="gelu"), "hidden_act='gelu'; legal is 'silu'"),
    ("mamba2", dict(n_groups=3), "model.mixer.groups=3 must divide model.attention.num_heads=4"),
    ("mamba2", dict(n_groups=None), "model.mixer.groups=8 must divide model.attention.num_heads=4"),
    ("mamba2", dict(head_dim=None), "num_heads=4 heads of head_dim=64 are not expand=2 times hidden_size=8 wide"),
    ("mamba2", dict(expand=3), "num_heads=4 heads of head_dim=4 are not expand=3 times hidden_size=8 wide; legal is"),
    ("mamba2", dict(hidden_size=12, head_dim=6), "model.mixer.dim=24 is no multiple of 4 heads, 16"),
    ("mamba2", dict(layer_types=["full_attention"] * 2), "layer_types=.*; legal is a list of 'linear_attention'"),
    ("mamba2", dict(attention_layers_idx=[1]), r"attention_layers_idx=\[1\], which is not honoured"),
    ("mamba2", dict(intermediate_size=24), "intermediate_size=24, which is not honoured"),
    ("gpt2", dict(layer_norm_epsilon="1e-5"), "layer_norm_epsilon='1e-5'; legal is a finite number"),
    ("gpt2", dict(resid_pdrop=1.0), "resid_pdrop=1.0; legal is a number from 0 to under 1"),
    ("gpt2", dict(pruned_heads={"0": [1]}), "pruned_heads="),
    ("gpt2", dict(scale_attn_weights=1), "scale_attn_weights=1; legal is True"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "sentence"), HARMFUL, ids=lambda x: str(x)[:60])
def test_what_would_change_the_function_is_refused_by_name(
    folders, tmp_path, name, changes, sentence
):
    values = json.loads((folders / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    assert re.search(sentence, sentence_of(config_from_hf, tmp_path))


def test_what_is_switched_off_changes_nothing(folders, tmp_path):
    off = dict(
        sliding_window=4096, use_sliding_window=False, max_window_layers=28, layer_types=["full_attention"] * 2,
        attn_logit_softcapping=None, quantization_config=None, use_qk_norm=False,
    )  # fmt: skip
    values = json.loads((folders / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | off))
    assert config_from_hf(tmp_path, dtype="float32") == CONFIGS["llama"]


def test_the_newer_spelling_is_read(folders, tmp_path):
    values = json.loads((folders / "qwen3_moe" / "config.json").read_text())
    values["num_local_experts"] = values.pop("num_experts")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert config_from_hf(tmp_path, dtype="float32") == CONFIGS["qwen3_moe"]


def test_the_published_mamba2_has_its_size(tmp_path):
    published = dict(  # state-spaces/mamba2-130m
        architectures=["Mamba2ForCausalLM"], model_type="mamba2", vocab_size=50288, hidden_size=768, num_heads=24,
        num_hidden_layers=24, state_size=128, n_groups=1, tie_word_embeddings=True, **MORE["mamba2"],
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(published))
    assert (
        num_params(config_from_hf(tmp_path)) == 128_989_632
    )  # as many as transformers' own module has


def test_mamba2_is_read_as_transformers_reads_it(folders, tmp_path):
    values = json.loads((folders / "mamba2" / "config.json").read_text())
    newer = dict(
        time_step_limit=[0.0, {"__float__": "Infinity"}],
        time_step_rank="auto",
        rms_norm=None,
        n_groups=None,
    )
    newer |= dict(
        layer_types=["linear_attention"] * 2,
        state_size=None,
        initializer_range=None,
        num_heads=8,
        head_dim=2,
    )
    (tmp_path / "config.json").write_text(json.dumps(values | newer))
    want = dict(
        num_heads=8, num_kv_heads=8, head_dim=1, mixer_groups=8, mixer_key_dim=128, init_std=0.1
    )
    with pytest.raises(UsageError, match="mixer.dim=16 is no multiple of 4 heads, 32"):
        config_from_hf(tmp_path, dtype="float32")
    (tmp_path / "config.json").write_text(json.dumps(values | newer | dict(head_dim=4, expand=4)))
    read = config_from_hf(tmp_path, dtype="float32")
    assert read == with_fields(CONFIGS["mamba2"], **want, max_seq_len=1024, mixer_dim=32)
    (tmp_path / "config.json").write_text(
        json.dumps(values | dict(hidden_size=12, head_dim=12, expand=4))
    )
    uneven = config_from_hf(tmp_path)
    assert (uneven.embed_dim, uneven.mixer.dim, uneven.stack().mixer.layer.value_dim) == (
        12,
        48,
        12,
    )
    (tmp_path / "config.json").write_text(
        json.dumps(values | dict(hidden_size=10, head_dim=20, expand=8))
    )
    assert (
        config_from_hf(tmp_path).attention.head_dim == 20
    )  # 4 heads do not divide the width, which means nothing here


@pytest.mark.parametrize("name", ["a\nb", "\ud800", "x" * 5000, ""])
def test_a_name_cannot_break_the_sentence(folders, tmp_path, name):
    values = json.loads((folders / "llama" / "config.json").read_text())
    rope = values["rope_scaling"] | {name: 1}
    for changes in (
        {name: 1},
        {"model_type": name},
        {"architectures": [name]},
        {"rope_scaling": rope},
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | changes))
        said = sentence_of(config_from_hf, tmp_path).replace(str(tmp_path), "")
        assert len(said.encode()) < 400


def test_json_that_python_cannot_hold_is_refused(tmp_path):
    for text in ("[" * 10**5, '{"vocab_size": ' + "9" * 5000 + "}", '"\xff"'.encode("latin-1")):
        (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
        assert "is not a JSON file" in sentence_of(config_from_hf, tmp_path)


# ---------------------------------------------------------------- the index and the tensors


NOWHERE = [{"a": file} for file in (None, 3, "../x", "/x", "..", "", "a\0", "x" * 5000)]


@pytest.mark.parametrize("places", WRONG[:-1] + NOWHERE, ids=lambda x: str(x)[:20])
def test_any_index_is_refused_in_a_sentence(folder, places):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    said = sentence_of(from_hf, folder)
    assert "legal is" in said or "is not a whole safetensors file" in said
    if places in NOWHERE[:-1]:
        assert "legal is a safetensors file of that folder" in said


def test_a_tensor_that_lies_there_twice_is_refused(folder):
    weights = folder / "model.safetensors"
    for name in ("a", "b"):
        shutil.copy(weights, folder / f"{name}.safetensors")
    weights.unlink()
    places = {"x": "a.safetensors", "y": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert re.search("holds tensor model.* twice", sentence_of(from_hf, folder))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("on_mesh", [False, True])
def test_weights_that_are_no_numbers_are_refused_by_tensor(folder, value, on_mesh):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][-1, 3] = value
    save_file(tensors, folder / "model.safetensors")
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2) if on_mesh else MeshSpec(data=8))):
        assert f"tensor {name} holds NaN or infinity" in sentence_of(from_hf, folder)


def test_weights_that_the_asked_dtype_cannot_hold_are_refused(folder):
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = 1e5
    save_file(tensors, folder / "model.safetensors")
    from_hf(folder)
    with pytest.raises(UsageError, match="tensor model.norm.weight holds .* infinite as float16"):
        from_hf(folder, param_dtype=jnp.float16)


@pytest.mark.parametrize("folder", CONFIGS, indirect=True)
@pytest.mark.parametrize("on_mesh", [False, True])
def test_a_tied_head_is_the_embedding_or_refused(folder, on_mesh):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    (name,) = [
        name
        for name in tensors
        if name.endswith(("embed_tokens.weight", "wte.weight", "embeddings.weight"))
    ]
    spec = MeshSpec(data=2, fsdp=2, tensor=2) if on_mesh else MeshSpec(data=8)
    with use_mesh(make_mesh(spec)):
        save_file(tensors | {"lm_head.weight": tensors[name]}, path)
        from_hf(folder)
        other = tensors[name].copy()
        other[-1, -1] += 1
        save_file(tensors | {"lm_head.weight": other}, path)
        assert f"tensor lm_head.weight differs from {name}" in sentence_of(from_hf, folder)
        save_file(tensors | {"lm_head.weight": other[:-1]}, path)
        assert "tensor lm_head.weight in" in sentence_of(from_hf, folder)


@pytest.mark.parametrize("folder", ["mixtral", "qwen3_moe"], indirect=True)
@pytest.mark.parametrize("num", [3, 4])
def test_another_number_of_experts_is_told(folder, num):
    key = "num_local_experts" if folder_kind(folder) == "mixtral" else "num_experts"
    change(folder / "config.json", {key: num})
    assert f"{folder} has 2 experts a layer, but its config.json has {key}={num}." == sentence_of(
        from_hf, folder
    )


def folder_kind(folder):
    return json.loads((folder / "config.json").read_text())["model_type"]


# ---------------------------------------------------------------- BOS and EOS


def spell(folder, template="<s> $A"):
    """A tokenizer of words, whose BOS is 14 and whose EOS are 15 and, of a chat, 13."""
    vocab = {f"w{i}": i for i in range(13)} | {"<turn>": 13, "<s>": 14, "</s>": 15}
    library = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.decoder = tokenizers.decoders.WordPiece(prefix="##")
    if template:
        library.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", 14), ("</s>", 15)]
        )
    library.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("template", "files", "bos_ids", "eos_ids"),
    [
        ("<s> $A", {}, (14,), (2, 3)),
        ("<s> $A </s>", {"generation_config": dict(eos_token_id=15)}, (14,), (15,)),
        ("<s> $A", {"tokenizer_config": dict(add_bos_token=False)}, (), (2, 3)),
        (None, {"tokenizer_config": dict(bos_token="<s>", eos_token="</s>")}, (), (2, 3)),
        (
            None,
            {"tokenizer_config": dict(add_bos_token=True, bos_token={"content": "<s>"})},
            (14,),
            (2, 3),
        ),
        (None, {"tokenizer_config": dict(add_bos_token=True)}, (1,), (2, 3)),
        (
            None,
            {
                "config": dict(eos_token_id=None),
                "tokenizer_config": dict(eos_token={"content": "</s>", "lstrip": False}),
            },
            (),
            (15,),
        ),
        (None, {"config": dict(eos_token_id=None)}, (), ()),
        ("<s> $A", {"generation_config": dict(eos_token_id=[15, 13])}, (14,), (15, 13)),
    ],
)
def test_bos_and_eos_are_those_of_the_folder(folder, template, files, bos_ids, eos_ids):
    spell(folder, template)
    for name, changes in files.items():
        change(folder / f"{name}.json", changes)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_ids, tokenizer.eos_ids) == (bos_ids, eos_ids)
    assert tokenizer.encode("w3 w4").tolist() == [3, 4]
    alone = load_tokenizer(folder / "tokenizer.json")
    assert alone.identity == tokenizer.identity and (alone.bos_ids, alone.eos_ids) == ((), ())


@pytest.mark.parametrize("name", ["generation_config", "config", "tokenizer_config"])
@pytest.mark.parametrize(
    "key", ["eos_token_id", "bos_token_id", "bos_token", "eos_token", "add_bos_token"]
)
def test_any_special_token_is_taken_or_refused_in_a_sentence(folder, name, key):
    spell(folder, None)
    change(folder / "config.json", dict(eos_token_id=None, bos_token_id=None))
    change(folder / "tokenizer_config.json", dict(add_bos_token=True, bos_token="<s>"))
    refused = 0
    kept = (
        json.loads((folder / f"{name}.json").read_text())
        if (folder / f"{name}.json").exists()
        else {}
    )
    for wrong in WRONG:
        (folder / f"{name}.json").write_text(json.dumps(kept | {key: wrong}))
        try:
            load_tokenizer(folder)
        except UsageError as error:
            refused += 1
            assert "\n" not in str(error)
    read = (name == "tokenizer_config") == (not key.endswith("_id")) and key != "bos_token_id"
    assert (refused > len(WRONG) // 2) == read


def test_rows_end_at_any_of_the_stop_tokens():
    config = CONFIGS["llama"]
    params, prompt = noisy_params(config), np.tile(np.arange(3), (2, 1))
    run = jit(generate, static_argnums=(3, 4))
    free, *_ = run(jax.random.key(0), params, prompt, config, Sampling(12))
    stops = {int(free[0, 5]), int(free[1, 7])}
    first = [next(t for t in range(3, 15) if int(row[t]) in stops) for row in free]
    tokens, lengths, *_ = run(
        jax.random.key(0), params, prompt, config, Sampling(12), stop_tokens=tuple(stops)
    )
    assert lengths.tolist() == [t + 1 for t in first]
    for row, end in enumerate(lengths):
        np.testing.assert_array_equal(tokens[row, :end], free[row, :end])


def test_the_command_begins_and_ends_as_the_folder_says(folder, monkeypatch, capsys):
    from experiments import lm

    spell(folder)
    asked = []

    def record(key, params, prompts, model, sampling, decoding):
        prompt = jnp.asarray(prompts.tokens)
        asked.append((np.asarray(prompt)[0].tolist(), tuple(map(int, decoding.stop_tokens))))
        row = jnp.concatenate([prompt[0], jnp.array([7, 3, 0])])
        return Generated(row[None], jnp.array([len(prompt[0]) + 2]), None, None)

    monkeypatch.setattr(lm, "draw", record)
    for prompt in ("w5 w6", "<s> w5 w6", ""):
        config = lm.compose(
            "mode=sample", f"run={folder}", *([f"prompt='{prompt}'"] if prompt else [])
        )
        with use_mesh(make_mesh(MeshSpec(data=8))):
            lm.sample(config, folder)
    out = capsys.readouterr().out.splitlines()
    assert asked == [([14, 5, 6], (2, 3)), ([14, 5, 6], (2, 3)), ([14], (2, 3))]
    assert out == ["w5 w6 w7", "<s> w5 w6 w7", "w7"]
    with (
        use_mesh(make_mesh(MeshSpec(context=8))),
        pytest.raises(UsageError, match="sampling has nothing along context"),
    ):
        lm.sample(config, folder)
    for spec, sentence in (
        (MeshSpec(stage=8), "mesh.stage=8 leaves 8 devices with the same work"),
        (MeshSpec(data=8), "data.batch_size=12 does not divide over mesh.data=8"),
    ):
        with use_mesh(make_mesh(spec)), pytest.raises(UsageError, match=sentence):
            lm.evaluate(lm.compose("mode=eval", f"run={folder}", "data.batch_size=12"), folder)
    change(folder / "generation_config.json", dict(eos_token_id=99))
    with pytest.raises(UsageError, match="token 99 is none of the model's 16 symbols"):
        lm.sample(config, folder)
