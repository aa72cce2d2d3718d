"""Folders against slow NumPy twins written from the tensors' Hugging Face names, and against transformers itself."""

import itertools
import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lm_configs import lm_config, with_fields
from of_transformers import saved_with_other_values, scores
from safetensors.numpy import load_file, save_file
from twin_folders import SIZES, twin_logits

from jaxpar.decode import Sampling
from jaxpar.lm.hub import exchange, stored
from jaxpar.lm.hub.exchange import from_hf, to_hf
from jaxpar.lm.model import apply
from jaxpar.lm.params import abstract, axes
from jaxpar.lm.sample import generate
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, rules_from, use_mesh
from jaxpar.nn import TokenInfo
from jaxpar.types import UsageError

CONFIGS = {
    "llama": lm_config(**SIZES, num_kv_heads=2, rope_theta=100.0, norm_eps=1e-3),
    "llama3": lm_config(
        **SIZES, num_kv_heads=2, head_dim=4, bias=True, tied=True, rope_theta=100.0, rope_factor=8.0,
        rope_low_freq_factor=1.0, rope_high_freq_factor=4.0, rope_original_len=16, init_std=0.03,
    ),
    "gpt2": lm_config(
        **SIZES, norm="layer", positions="learned", activation="gelu", bias=True, tied=True, dropout=0.25,
    ),
    "gpt2_exact": lm_config(
        **SIZES, norm="layer", positions="learned", activation="gelu_exact", bias=True, tied=True, norm_eps=1e-2,
    ),
    "mixtral": lm_config(**SIZES, num_kv_heads=2, num_experts=4, rope_theta=100.0),
    "qwen3_moe": lm_config(
        **SIZES, num_kv_heads=2, head_dim=4, num_experts=4, experts_per_token=3, qk_norm=True, tied=True,
    ),
    "mamba2": lm_config(
        **SIZES | dict(max_seq_len=1024, mlp_dim=0), mixer="mamba2", mixer_dim=16, mixer_key_dim=3, mixer_groups=2,
        positions="none", norm_eps=1e-2, init_std=0.1,
    ),
    "qwen3_moe_one": lm_config(**SIZES, num_experts=2, experts_per_token=1, qk_norm=True, norm_eps=1e-6),
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 16, (2, 20))
logits = jax.jit(apply, static_argnums=2)


def random_params(config):
    """Every leaf random, so that no norm or bias can hide behind ones and zeros."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(0.5 * rng.standard_normal(x.shape, np.float32)), abstract(config)
    )


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def edit_json(path, **changes):
    values = json.loads(path.read_text())
    for key, value in changes.items():
        if value is DROP:
            values.pop(key)
        else:
            values[key] = value
    path.write_text(json.dumps(values))


DROP = "drop this field"


# The twins: one sequence, one head, one position at a time, in float64, from names and config.json alone.


@pytest.fixture(params=CONFIGS)
def config(request):
    return CONFIGS[request.param]


@pytest.fixture
def folder(config, tmp_path):
    to_hf(random_params(config), config, tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))


def test_written_tensors_compute_the_same_logits_in_numpy(config, folder):
    ours = logits(random_params(config), TOKENS, config)
    assert np.abs(ours).max() > 0.5
    np.testing.assert_allclose(ours, twin_logits(folder, TOKENS), rtol=1e-4, atol=2e-5)


def test_read_tensors_compute_the_same_logits_as_numpy(config, folder):
    # Other values than to_hf wrote, so that two equal mistakes cannot cancel.
    rng = np.random.default_rng(2)
    path = folder / "model.safetensors"
    other = {
        name: 0.5 * rng.standard_normal(x.shape, np.float32) for name, x in load_file(path).items()
    }
    save_file(other, path)
    read, params = from_hf(folder, dtype="float32")
    np.testing.assert_allclose(
        logits(params, TOKENS, read), twin_logits(folder, TOKENS), rtol=1e-4, atol=2e-5
    )


# Where each document of a row begins: the last of row 0 and the first of row 1 stand for padding on either side.
DOCUMENTS = ((0, 5, 6, 13), (0, 9, 16))
SEGMENTS = np.stack([np.searchsorted(starts, np.arange(20), "right") - 1 for starts in DOCUMENTS])
POSITIONS = np.stack(
    [np.arange(20) - np.array(starts)[row] for starts, row in zip(DOCUMENTS, SEGMENTS, strict=True)]
)


def test_packed_and_padded_rows_equal_the_twin_in_float64(config, folder):
    tokens = TOKENS.copy()
    tokens[0, 13:] = tokens[1, :9] = 0
    with jax.enable_x64(True):
        read, params = from_hf(folder, dtype="float64", param_dtype=jnp.float64)
        assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float64)}
        info = TokenInfo(positions=POSITIONS, segments=SEGMENTS)
        ours = np.asarray(logits(params, tokens, read, info))
    assert ours.dtype == np.float64 and np.abs(ours).max() > 0.5
    for row, starts in enumerate(DOCUMENTS):
        for start, stop in itertools.pairwise((*starts, 20)):
            alone = twin_logits(folder, tokens[row : row + 1, start:stop])[0]
            np.testing.assert_allclose(ours[row, start:stop], alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("limit", [None, 1500])
def test_round_trip_is_exact(config, tmp_path, limit):
    params = random_params(config)
    to_hf(
        params, config, tmp_path / "model", **({} if limit is None else {"max_shard_bytes": limit})
    )
    read, back = from_hf(tmp_path / "model", dtype="float32")
    assert read == config
    assert_same(back, params)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(back))
    index = tmp_path / "model" / "model.safetensors.index.json"
    assert index.exists() == (limit is not None)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    if limit is not None:
        check_files(tmp_path / "model", json.loads(index.read_text()), limit)


def check_files(folder, index, limit):
    """Every tensor lies where the index says, and no file is larger than asked, save for one large tensor."""
    tensors = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert {name: file for file, block in tensors.items() for name in block} == index["weight_map"]
    assert len(tensors) > 2 and all(f"-of-{len(tensors):05d}." in name for name in tensors)
    sizes = [[x.nbytes for x in block.values()] for block in tensors.values()]
    assert sum(map(sum, sizes)) == index["metadata"]["total_size"]
    assert all(sum(file) <= limit or len(file) == 1 for file in sizes)


@pytest.mark.parametrize("changes", [{}, {"embed": "none", "head_dim": "fsdp", "layers": "data"}])
def test_on_a_mesh_each_device_reads_its_slices_only(
    config, folder, mesh, changes, tmp_path, monkeypatch
):
    cut, read_shapes = exchange._cut, {}

    def record(tensor, row, *place):
        block = cut(tensor, row, *place)
        read_shapes.setdefault(row, []).append(sorted(block.shape))
        return block

    monkeypatch.setattr(exchange, "_cut", record)
    with use_mesh(mesh, rules_from(changes)):
        read, params = from_hf(folder, dtype="float32")
        declared = named_shardings(abstract(config), axes(config))
        to_hf(params, read, tmp_path / "again", max_shard_bytes=1500)
    monkeypatch.undo()
    assert_same(params, random_params(config))
    assert jax.tree.map(lambda leaf: leaf.sharding, params) == declared
    rows = exchange.architecture_of(config).rows
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        block = leaf.sharding.shard_shape(leaf.shape)
        row = rows[jax.tree_util.keystr(path, simple=True, separator=".")]
        part = block[(path[0].key == "layers") + ("{}" in row.name) :]
        # Every part of the leaf once, however many devices hold it, a layer and an expert at a time.
        assert read_shapes[row] == [sorted(part)] * (leaf.size // math.prod(part))
    assert_same(from_hf(tmp_path / "again")[1], random_params(config))


@pytest.mark.parametrize(("name", "under_way"), [("llama", 0), ("mixtral", 2**31)])
def test_large_leaves_are_stacked_on_their_devices(name, under_way, tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "LARGE", 0)
    monkeypatch.setattr(stored, "UNDER_WAY", under_way)
    params = random_params(CONFIGS[name])
    to_hf(params, CONFIGS[name], tmp_path / "half", dtype="bfloat16", max_shard_bytes=3000)
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    if name == "llama":
        with use_mesh(
            make_mesh(MeshSpec(fsdp=2), jax.devices()[:2]),
            rules_from({"embed": "none", "head_dim": "fsdp"}),
        ):
            wide = from_hf(tmp_path / "half")[1]
            assert "fsdp" in str(wide["layers"]["wq"].sharding.spec)
        assert_same(wide, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
    else:
        low = jax.tree.map(lambda x: x.astype("float16"), rounded)
        assert_same(from_hf(tmp_path / "half", param_dtype="float16")[1], low)


@pytest.mark.parametrize("kind", ["float16", "float32", "float64", "bfloat16"])
def test_bits_tell_infinity_and_nan_from_the_largest_numbers(kind):
    dtype = jnp.dtype(kind)
    for bad in (np.inf, -np.inf, np.nan):
        x = np.full((3, 2**17), jnp.finfo(dtype).max, dtype)
        assert stored.is_finite(x) and stored.is_finite(-x)
        x[2, 5] = bad
        assert not stored.is_finite(x) and not stored.is_finite(x[:, ::-1])


def test_what_ends_too_early_is_told(tmp_path):
    (tmp_path / "a").write_bytes(bytes(5))
    with pytest.raises(OSError, match="ends at byte 5"):
        stored.read_into(tmp_path / "a", 1, np.empty(3, np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_files(dtype, tmp_path):
    config, params = CONFIGS["llama"], random_params(CONFIGS["llama"])
    to_hf(params, config, tmp_path / "half", dtype=dtype)
    rounded = jax.tree.map(lambda x: x.astype(dtype), params)
    assert all(
        str(x.dtype) == dtype for x in load_file(tmp_path / "half" / "model.safetensors").values()
    )
    read, wide = from_hf(tmp_path / "half")
    assert read.dtype == "bfloat16"
    assert_same(wide, jax.tree.map(lambda x: x.astype(jnp.float32), rounded))
    assert_same(from_hf(tmp_path / "half", param_dtype=dtype)[1], rounded)


def test_older_and_bare_spellings_are_read(tmp_path):
    params = {name: random_params(CONFIGS[name]) for name in ("llama3", "gpt2")}
    for name, tree in params.items():
        to_hf(tree, CONFIGS[name], tmp_path / name)
    path = tmp_path / "gpt2" / "model.safetensors"
    bare = {name.removeprefix("transformer."): x for name, x in load_file(path).items()}
    buffers = {
        "h.0.attn.bias": np.ones((1, 1, 4, 4), bool),
        "h.1.attn.masked_bias": np.zeros((), np.float32),
    }
    save_file(bare | buffers | {"lm_head.weight": bare["wte.weight"]}, path)
    path = tmp_path / "llama3" / "model.safetensors"
    buffers = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(2, np.float32)}
    save_file(
        load_file(path)
        | buffers
        | {"lm_head.weight": load_file(path)["model.embed_tokens.weight"]},
        path,
    )
    cfg = tmp_path / "llama3" / "config.json"
    values = json.loads(cfg.read_text())
    nested = {**values["rope_scaling"], "rope_theta": values["rope_theta"]}
    typed = {
        "type" if key == "rope_type" else key: value
        for key, value in values["rope_scaling"].items()
    }
    for change in (
        {},
        {"rope_scaling": typed},
        dict(rope_theta=DROP, rope_scaling=DROP, rope_parameters=nested),
    ):
        edit_json(cfg, **change)
        read, back = from_hf(tmp_path / "llama3", dtype="float32")
        assert read == CONFIGS["llama3"]
        assert_same(back, params["llama3"])
    edit_json(tmp_path / "gpt2" / "config.json", n_inner=None, architectures=DROP)
    with pytest.raises(
        UsageError, match=r"c_fc.bias .* has shape \(12,\), but its config.json means \(32,\)"
    ):
        from_hf(tmp_path / "gpt2")
    edit_json(tmp_path / "gpt2" / "config.json", n_inner=12)
    read, back = from_hf(tmp_path / "gpt2", dtype="float32")
    assert read == CONFIGS["gpt2"]
    assert_same(back, params["gpt2"])


BAD_CONFIGS = [
    ("llama", dict(architectures=["FalconForCausalLM"], model_type="falcon"),
     r"architecture FalconForCausalLM \(model_type falcon\); legal are LlamaForCausalLM, .* GPT2LMHeadModel"),
    ("llama", dict(architectures=["LlamaForSequenceClassification"]), "architecture LlamaForSequenceClassification"),
    ("llama", dict(model_type="gpt2"), r"architecture LlamaForCausalLM \(model_type gpt2\)"),
    ("llama", dict(architectures=DROP, model_type=DROP), "architecture None"),
    ("llama", dict(hidden_act="gelu"), "hidden_act='gelu'; legal is 'silu'"),
    ("llama", dict(attention_bias=True), "mlp_bias=False and attention_bias=True differ"),
    ("llama", dict(rope_scaling={"rope_type": "ntk", "factor": 2.0}), "rope type 'ntk' is unknown; legal are"),
    ("llama", dict(rope_scaling={"type": "dynamic", "factor": 0.5}), "has factor=0.5; legal is a finite number"),
    ("llama", dict(rope_scaling={"rope_type": "llama3", "factor": 2.0}), "also needs low_freq_factor, high_freq_f"),
    ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor=0.5"),
    ("llama", dict(hidden_size=DROP, intermediate_size=None), "config.json lacks hidden_size, intermediate_size"),
    ("llama", dict(num_key_value_heads=3),
     "model.attention.num_heads=4 is not a multiple of model.attention.num_kv_heads=3"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True; legal is False"),
    ("gpt2", dict(reorder_and_upcast_attn=True), "reorder_and_upcast_attn=True; legal is False"),
    ("gpt2", dict(scale_attn_weights=False), "scale_attn_weights=False; legal is True"),
    ("gpt2", dict(tie_word_embeddings=False), "tie_word_embeddings=False; legal is True"),
    ("gpt2", dict(activation_function="relu"), "activation_function='relu'; legal is 'gelu_new' or 'gelu'"),
    ("gpt2", dict(n_positions=33), r"transformer.wpe.weight in .* has shape \(32, 8\), but .* means \(33, 8\)"),
    ("llama", dict(tie_word_embeddings=True, num_hidden_layers=1), r"tensor model\.layers\.1\..* no place for"),
    ("llama", dict(num_hidden_layers=3), r"lacks tensor model\.layers\.2\..* of shape \("),
    ("llama3", dict(tie_word_embeddings=False), r"lacks tensor lm_head\.weight of shape \(16, 8\)"),
]  # fmt: skip


def sentence_of(function, *args, **kwargs):
    """The refusal, which must be one line and end as a sentence."""
    with pytest.raises(UsageError) as caught:
        function(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    for name, config in CONFIGS.items():
        to_hf(random_params(config), config, root / name)
    return root


@pytest.mark.parametrize(("name", "changes", "sentence"), BAD_CONFIGS, ids=lambda x: str(x)[:40])
def test_bad_configs_are_refused(folders, tmp_path, name, changes, sentence):
    shutil.copytree(folders / name, tmp_path / "bad")
    edit_json(tmp_path / "bad" / "config.json", **changes)
    with pytest.raises(UsageError, match=sentence):
        from_hf(tmp_path / "bad")
    assert "\n" not in sentence_of(from_hf, tmp_path / "bad")


def test_bad_files_are_refused(folders, tmp_path):
    folder = tmp_path / "bad"
    assert f"there is no {folder}/config.json" in sentence_of(from_hf, folder)
    shutil.copytree(folders / "llama", folder)
    weights, cfg = folder / "model.safetensors", folder / "config.json"
    good, tensors = weights.read_bytes(), load_file(weights)
    for bad in (good[:-4], good[:100], b"", b"version https://git-lfs.github.com/spec/v1"):
        weights.write_bytes(bad)
        assert "model.safetensors is not a whole safetensors file: " in sentence_of(from_hf, folder)
    norm, sizes = "model.norm.weight", "of shape (8,)"
    for bad, sentence in (
        (
            {norm: tensors[norm][:4]},
            f"tensor {norm} in {folder} has shape (4,), but its config.json means (8,)",
        ),
        (
            {norm: tensors[norm].astype(np.int8)},
            f"tensor {norm} in {folder} is I8; legal are BF16, F16, F32, F64",
        ),
        (
            {"model.extra.weight": tensors[norm]},
            f"tensor model.extra.weight {sizes}, which its config.json has no",
        ),
    ):
        save_file(tensors | bad, weights)
        assert sentence in sentence_of(from_hf, folder)
    save_file({name: x for name, x in tensors.items() if name != norm}, weights)
    assert f"lacks tensor {norm} {sizes}" in sentence_of(from_hf, folder)
    weights.unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in sentence_of(
        from_hf, folder
    )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {norm: "gone.safetensors"}})
    )
    assert "gone.safetensors is not a whole safetensors file" in sentence_of(from_hf, folder)
    (folder / "model.safetensors.index.json").write_text("{")
    assert "index.json is not a JSON file" in sentence_of(from_hf, folder)
    cfg.write_text("[]")
    assert "config.json holds list instead of an object" in sentence_of(from_hf, folder)
    cfg.write_text("not json")
    assert "config.json is not a JSON file" in sentence_of(from_hf, folder)


INEXPRESSIBLE = [
    (
        CONFIGS["llama"],
        dict(positions="learned"),
        "positions=learned",
        "LlamaForCausalLM needs model.positions=rope; MistralForCausalLM needs",
    ),
    (
        CONFIGS["gpt2"],
        dict(norm="rms"),
        "norm.kind=rms",
        "GPT2LMHeadModel needs model.norm.kind=layer.",
    ),
    (
        CONFIGS["gpt2"],
        dict(tied=False),
        "tied=False",
        "GPT2LMHeadModel needs model.embedding.tied=True.",
    ),
    (
        CONFIGS["gpt2"],
        dict(num_kv_heads=2),
        "num_kv_heads=2",
        "GPT2LMHeadModel needs model.attention.num_kv_heads=4.",
    ),
    (CONFIGS["gpt2"], dict(head_dim=4), "embed_dim=8", "GPT2LMHeadModel needs model.embed_dim=16."),
    (
        CONFIGS["gpt2"],
        dict(activation="swiglu"),
        "activation=swiglu",
        "GPT2LMHeadModel needs model.mlp.activation=gelu or gelu_exact.",
    ),
    (
        CONFIGS["llama3"],
        dict(embed_dim=10),
        "embed_dim=10",
        "LlamaForCausalLM needs model.embed_dim=8;",
    ),
    (CONFIGS["llama"], dict(mlp_dim=0), "mlp.dim=0", "LlamaForCausalLM needs model.mlp.dim=1;"),
    (
        CONFIGS["llama"],
        dict(positions="none"),
        "positions=none",
        "LlamaForCausalLM needs model.positions=rope;",
    ),
    (CONFIGS["mamba2"], dict(mlp_dim=4), "mlp.dim=4", "Mamba2ForCausalLM needs model.mlp.dim=0."),
    (
        CONFIGS["mamba2"],
        dict(norm="layer"),
        "norm.kind=layer",
        "Mamba2ForCausalLM needs model.norm.kind=rms.",
    ),
    (
        CONFIGS["mamba2"],
        dict(residual="ladder"),
        "residual.kind=ladder",
        "needs model.residual.kind=standard.",
    ),
    (
        CONFIGS["mamba2"],
        dict(mixer_dim=32, embed_dim=12),
        "mixer.dim=32",
        "needs model.mixer.dim=24.",
    ),
    (
        CONFIGS["mamba2"],
        dict(positions="learned"),
        "positions=learned",
        "needs model.positions=none or rope.",
    ),
]


@pytest.mark.parametrize(
    ("base", "changes", "culprit", "sentence"), INEXPRESSIBLE, ids=lambda x: str(x)[:40]
)
def test_models_that_no_folder_can_hold_are_refused(base, changes, culprit, sentence, tmp_path):
    config = with_fields(base, **changes)
    text = sentence_of(to_hf, abstract(config), config, tmp_path / "out")
    assert sentence in text and culprit in text.split(":")[0]
    assert not any(tmp_path.iterdir())


def test_to_hf_refuses_before_it_writes(tmp_path):
    config = CONFIGS["llama"]
    params = random_params(config)
    assert "dtype='int8' is unknown; legal are bfloat16" in sentence_of(
        to_hf, params, config, tmp_path / "a", dtype="int8"
    )
    assert "no tokenizer file" in sentence_of(
        to_hf, params, config, tmp_path / "a", tokenizer=tmp_path / "t.json"
    )
    text = sentence_of(to_hf, params, with_fields(config, mlp_dim=16), tmp_path / "a")
    assert "parameter layers.w_down has shape (2, 12, 8), but the config means (2, 16, 8)" in text
    text = sentence_of(to_hf, params, with_fields(config, tied=True), tmp_path / "a")
    assert "parameter head has shape (16, 8), but the config means absent" in text
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    for place in (tmp_path / "full", tmp_path / "full" / "notes.txt"):
        assert "already holds something; give a folder that is absent or empty" in sentence_of(
            to_hf, params, config, place
        )
    assert "could not be written" in sentence_of(
        to_hf, params, config, tmp_path / "full" / "notes.txt" / "a"
    )
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "notes.txt"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("No space left on device")])
def test_an_interrupted_write_leaves_nothing(error, tmp_path, monkeypatch):
    def save_once(*args, **kwargs):
        if list(tmp_path.rglob("*.safetensors")):
            raise error
        save_file(*args, **kwargs)

    monkeypatch.setattr(exchange, "save_file", save_once)
    config = CONFIGS["llama"]
    with pytest.raises(KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else UsageError):
        to_hf(random_params(config), config, tmp_path / "model", max_shard_bytes=1500)
    assert not any(tmp_path.iterdir())


def test_an_empty_folder_is_filled_and_the_tokenizer_copied(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "t.json").write_text("{}")
    config = CONFIGS["llama"]
    to_hf(random_params(config), config, tmp_path / "model", tokenizer=tmp_path / "t.json")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert len({path.stat().st_mode for path in (tmp_path / "model").iterdir()}) == 1


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)  # not ours
@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_agrees_in_both_directions(name, tmp_path):
    import torch
    import transformers

    params = random_params(config := CONFIGS[name])
    to_hf(params, config, tmp_path / "ours", max_shard_bytes=1500)
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True
    )
    assert model.dtype == torch.float32 and not any(report.values())
    np.testing.assert_allclose(logits(params, TOKENS, config), scores(model, TOKENS), atol=1e-4)
    how = (
        dict(experts_implementation="eager") if config.experts.num_experts else {}
    )  # grouped products have no float64
    wide = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float64, **how
    )
    with jax.enable_x64(True):
        read, exact = from_hf(tmp_path / "ours", dtype="float64", param_dtype=jnp.float64)
        np.testing.assert_allclose(
            logits(exact, TOKENS, read), scores(wide, TOKENS), atol=1e-6, rtol=1e-5
        )
    run = jax.jit(generate, static_argnums=(3, 4))
    drawn = run(jax.random.key(0), params, TOKENS[:, :5], config, Sampling(8, temperature=0.0))
    options = dict(
        max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    prompt = torch.from_numpy(TOKENS[:, :5])  # with a mask, or 0 in it would be taken for padding
    best = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    np.testing.assert_array_equal(drawn.tokens, best.numpy())

    read, params = from_hf(saved_with_other_values(model, tmp_path / "theirs"), dtype="float32")
    assert read == config
    np.testing.assert_allclose(logits(params, TOKENS, read), scores(model, TOKENS), atol=1e-4)
