"""Folders of Llama's kin against a NumPy twin in float64, and against transformers where the extra `peers` is there."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flat_decoding import lm_generate as generate
from lm_configs import field_of, lm_config, with_fields
from of_transformers import saved_with_other_values, scores
from twin_kin import kin_logits

from jaxpar.lm.hub.exchange import from_hf, to_hf
from jaxpar.lm.loss import loss
from jaxpar.lm.model import apply
from jaxpar.lm.params import abstract, axes
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh
from jaxpar.nn import TokenInfo
from jaxpar.nn.attention import Visibility, attention
from jaxpar.nn.attention.blockwise import attention_by_blocks
from jaxpar.types import UsageError

SIZES = dict(
    vocab_size=16, max_seq_len=64, num_layers=2, embed_dim=16, num_heads=4, num_kv_heads=2, mlp_dim=12,
    rope_theta=100.0, norm_eps=1e-3, dtype="float32",
)  # fmt: skip
GEMMA = dict(activation="geglu", post_norms=True, embed_scale=True, norm_plus_one=True, tied=True)
CONFIGS = {
    "llama": lm_config(**SIZES, rope_scaling="linear", rope_factor=4.0, bias=True),
    "mistral": lm_config(**SIZES, windows=(3,)),
    "qwen2": lm_config(**SIZES, qkv_bias=True, tied=True),
    "qwen3": lm_config(**SIZES, head_dim=6, qk_norm=True, windows=(0, 4)),
    "gemma2": lm_config(**SIZES, **GEMMA, head_dim=6, windows=(3, 0), score_cap=2.0, logit_cap=3.0, score_dim=5.0),
    "gemma3": lm_config(
        **SIZES | dict(num_layers=3), **GEMMA, head_dim=6, windows=(3, 0), qk_norm=True, rope_theta_local=10.0,
        rope_factor=2.0, rope_scaling="linear", score_dim=8.0,
    ),
    "phi3": lm_config(**SIZES | dict(num_heads=2, num_kv_heads=1), rope_share=0.75, windows=(5,)),
}  # fmt: skip
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
}  # fmt: skip
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 16, (2, 11))
STARTS = np.zeros(TOKENS.shape, bool)
STARTS[0, 4] = STARTS[0, 9] = STARTS[1, 7] = True
SEGMENTS = STARTS.cumsum(1)
POSITIONS = np.stack(
    [[t - max([0, *np.flatnonzero(row[: t + 1])]) for t in range(len(row))] for row in STARTS]
)
logits = jax.jit(apply, static_argnums=2)


def random_params(config):
    """Every leaf random, so that no norm or bias can hide behind ones and zeros."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(0.5 * rng.standard_normal(x.shape, np.float32)), abstract(config)
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("kin")
    for name, config in CONFIGS.items():
        to_hf(random_params(config), config, root / name, max_shard_bytes=3000)
    return root


@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip_is_exact_and_of_its_architecture(name, folders):
    assert json.loads((folders / name / "config.json").read_text())["architectures"] == [
        ARCHITECTURES[name]
    ]
    read, back = from_hf(folders / name, dtype="float32")
    assert read == CONFIGS[name]
    jax.tree.map(np.testing.assert_array_equal, back, random_params(CONFIGS[name]))


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_of_packed_rows_equal_the_twin_in_float64(name, folders):
    with jax.enable_x64(True):
        config, params = from_hf(folders / name, dtype="float64", param_dtype=jnp.float64)
        info = TokenInfo(positions=POSITIONS, segments=SEGMENTS)
        ours = np.asarray(logits(params, TOKENS, config, info))
    assert ours.dtype == np.float64 and np.abs(ours).max() > 0.5
    np.testing.assert_allclose(
        ours, kin_logits(folders / name, TOKENS, STARTS), atol=1e-9, rtol=1e-9
    )


def greedy(folder, prompt, count):
    """The longest way to continue a prompt: all of the text anew for each token."""
    for _ in range(count):
        prompt = np.append(prompt, kin_logits(folder, prompt[None])[0, -1].argmax())
    return prompt


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("gemma3", "gemma2") else pytest.param(name, marks=pytest.mark.slow)
        for name in CONFIGS
    ],
)
def test_greedy_tokens_of_padded_prompts_are_the_twins(name, folders):
    # 1 s each. Prompts of two lengths in one batch, past the window.
    from jaxpar.decode import Sampling

    config, params = from_hf(folders / name, dtype="float32")
    lengths = np.array([4, 6])
    run = jax.jit(generate, static_argnums=(3, 4))
    drawn = run(
        jax.random.key(0),
        params,
        TOKENS[:, :6],
        config,
        Sampling(6, temperature=0.0),
        prompt_lengths=lengths,
    )
    for row, tokens, length in zip(np.asarray(drawn.tokens), TOKENS, lengths, strict=True):
        np.testing.assert_array_equal(row[: length + 6], greedy(folders / name, tokens[:length], 6))


def test_gradients_of_capped_logits_and_scores_are_those_of_the_plain_formula():
    config = with_fields(CONFIGS["gemma2"], num_layers=1, dtype="float64", loss_chunk=8)
    batch = {"tokens": TOKENS, "targets": np.roll(TOKENS, -1, 1)}

    def plain(params):
        law = jax.nn.log_softmax(apply(params, TOKENS, config))
        return -jnp.take_along_axis(law, batch["targets"][..., None], 2).mean()

    with jax.enable_x64(True):
        params = jax.tree.map(jnp.float64, random_params(config))
        value, grads = jax.jit(jax.value_and_grad(lambda p: loss(p, batch, config)))(params)
        want, wanted = jax.jit(jax.value_and_grad(plain))(params)
    np.testing.assert_allclose(value, want, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), grads, wanted)


def test_capped_scores_by_blocks_are_those_at_once():
    rng = np.random.default_rng(3)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(3 * rng.standard_normal((1, 9, heads, 4))) for heads in (2, 1, 1))

        def total(attend):
            return jax.jit(jax.value_and_grad(lambda x: jnp.square(attend(*x)).sum()))((q, k, v))

        capped = Visibility(cap=1.5)
        value, grads = total(lambda q, k, v: attention(q, k, v, visibility=capped))
        again, by_blocks = total(lambda q, k, v: attention_by_blocks(q, k, v, visibility=capped))
    np.testing.assert_allclose(again, value, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-10), by_blocks, grads)


def test_layers_of_windows_are_read_by_each_device_for_itself(folders):
    mesh = make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))
    with use_mesh(mesh):
        config, params = from_hf(folders / "gemma3", dtype="float32")
        assert jax.tree.map(lambda x: x.sharding, params) == named_shardings(
            abstract(config), axes(config)
        )
        split = np.asarray(logits(params, np.tile(TOKENS, (2, 1)), config))[:2]
    jax.tree.map(np.testing.assert_array_equal, params, random_params(config))
    np.testing.assert_allclose(split, logits(random_params(config), TOKENS, config), atol=2e-5)


REFUSED = [
    ("phi3", dict(rope_scaling={"type": "longrope", "short_factor": [1.0]}), "rope type 'longrope' is unknown"),
    ("gemma3", dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
    ("gemma3", dict(architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3"), "Gemma3ForConditionalGen"),
    ("gemma2", dict(layer_types=["full_attention"]), "layer_types names 1 layers of num_hidden_layers=2"),
    ("gemma2", dict(layer_types=["chunked_attention"] * 2), "layer_types=.*; legal is a list of full_attention and"),
    ("gemma2", dict(sliding_window=None), "layer_types has sliding_attention, but there is no sliding_window"),
    ("gemma2", dict(hidden_activation="relu"), "hidden_activation='relu'; legal is 'gelu_pytorch_tanh'"),
    ("qwen3", dict(attention_bias=True), "attention_bias=True; legal is False"),
    ("mistral", dict(sliding_window=0), "sliding_window=0; legal is a whole number from 1"),
    ("llama", dict(sliding_window=4), "sliding_window=4; legal is null"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "sentence"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_is_not_honoured_is_refused_by_name(name, changes, sentence, folders, tmp_path):
    values = json.loads((folders / name / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UsageError, match=sentence) as caught:
        from_hf(tmp_path)
    assert "\n" not in str(caught.value)


ABSENT = [
    ("mistral", "sliding_window", (4096,)),
    ("gemma2", "layer_types", (3, 0)),
    ("gemma3", "layer_types", (3,)),
    ("qwen3", "layer_types", (0, 4)),
]


@pytest.mark.parametrize(("name", "key", "windows"), ABSENT)
def test_an_absent_key_means_what_transformers_takes(name, key, windows, folders, tmp_path):
    from jaxpar.lm.hub.architectures import config_from_hf

    values = json.loads((folders / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if k != key}))
    assert config_from_hf(tmp_path).attention.windows == windows


def test_null_is_no_window_and_no_cap(folders, tmp_path):
    from jaxpar.lm.hub.architectures import config_from_hf

    values = json.loads((folders / "mistral" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(values | {"sliding_window": None}))
    assert config_from_hf(tmp_path).attention.windows == ()
    values = json.loads((folders / "gemma2" / "config.json").read_text())
    for key, field, given in (
        ("attn_logit_softcapping", "score_cap", 50),
        ("final_logit_softcapping", "logit_cap", 30),
    ):
        (tmp_path / "config.json").write_text(json.dumps(values | {key: None}))
        assert field_of(config_from_hf(tmp_path), field) == 0
        (tmp_path / "config.json").write_text(
            json.dumps({k: v for k, v in values.items() if k != key})
        )
        assert field_of(config_from_hf(tmp_path), field) == given


@pytest.mark.parametrize(
    ("name", "changes", "sentence"),
    [
        ("gemma2", dict(windows=(3, 4)), "Gemma2ForCausalLM needs model.attention.windows=()"),
        (
            "gemma3",
            dict(rope_theta_local=0.0),
            "Gemma3ForCausalLM needs model.rope.theta_local=100.0",
        ),
        ("mistral", dict(windows=(3, 0)), "MistralForCausalLM needs model.attention.windows=()"),
        ("llama", dict(logit_cap=1.0), "LlamaForCausalLM needs model.embedding.logit_cap=0.0"),
        ("phi3", dict(embed_scale=True), "Phi3ForCausalLM needs model.embedding.scale=False"),
    ],
)
def test_what_no_folder_can_say_is_refused(name, changes, sentence, tmp_path):
    config = with_fields(CONFIGS[name], **changes)
    with pytest.raises(
        UsageError,
        match=re.escape(sentence) if "()" in sentence and "\\" not in sentence else sentence,
    ):
        to_hf(abstract(config), config, tmp_path / "out")


# transformers itself, of the extra `peers`: a skip in the slow suite would hide a wrong folder, so its absence fails.
@pytest.mark.slow  # 20 s in all
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)
@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_agrees_both_ways(name, folders, tmp_path):
    import torch
    import transformers

    config = CONFIGS[name]

    load = transformers.AutoModelForCausalLM.from_pretrained
    model, report = load(folders / name, output_loading_info=True, attn_implementation="eager")
    assert type(model).__name__ == ARCHITECTURES[name] and not any(report.values()), report
    np.testing.assert_allclose(
        logits(random_params(config), TOKENS, config), scores(model, TOKENS), atol=1e-4
    )
    wide = load(folders / name, dtype=torch.float64, attn_implementation="eager")
    with jax.enable_x64(True):
        read, params = from_hf(folders / name, dtype="float64", param_dtype=jnp.float64)
        np.testing.assert_allclose(
            logits(params, TOKENS, read), scores(wide, TOKENS), atol=1e-6, rtol=1e-5
        )
    # token by token
    from jaxpar.decode import Sampling

    run = jax.jit(generate, static_argnums=(3, 4))
    drawn = run(
        jax.random.key(0),
        random_params(config),
        TOKENS[:, :5],
        config,
        Sampling(8, temperature=0.0),
    )
    options = dict(
        max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    best = model.generate(torch.from_numpy(TOKENS[:, :5]), **options)
    np.testing.assert_array_equal(drawn.tokens, best.numpy())
    # What transformers writes, of other values.
    read, params = from_hf(saved_with_other_values(model, tmp_path / "theirs"), dtype="float32")
    assert read == config
    np.testing.assert_allclose(logits(params, TOKENS, read), scores(model, TOKENS), atol=1e-4)
