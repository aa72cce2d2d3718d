"""What no model can be is refused in one sentence."""

import dataclasses

import pytest
from lm_configs import lm_config

from jaxpar.fields import leaf_fields
from jaxpar.lm import LMConfig, gpt2, llama
from jaxpar.lm.flat_names import FLAT_NAMES
from jaxpar.types import UsageError


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(norm="batch"), "model.norm.kind='batch' is unknown; legal are rms, layer."),
        (
            dict(positions="alibi"),
            "model.positions='alibi' is unknown; legal are rope, learned, none.",
        ),
        (
            dict(activation="relu"),
            "model.mlp.activation='relu' is unknown; legal are swiglu, geglu, gelu, gelu_exact.",
        ),
        (
            dict(dtype="int8"),
            "model.dtype='int8' is unknown; legal are bfloat16, float16, float32, float64.",
        ),
        (
            dict(remat="some"),
            "model.execution.remat='some' is unknown; legal are none, dots, names, full, offload, blockwise.",
        ),
        (
            dict(attention="flash"),
            "model.execution.kernel='flash' is unknown; legal are auto, cudnn, splash, xla.",
        ),
        (dict(num_layers=0), "model.num_layers=0 must be at least 1."),
        (dict(loss_chunk=0), "model.execution.loss_chunk=0 must be at least 1."),
        (dict(dropout=1.0), "model.dropout=1.0 must be at least 0 and under 1."),
        (
            dict(num_heads=6, num_kv_heads=4, embed_dim=48),
            "model.attention.num_heads=6 is not a multiple of model.attention.num_kv_heads=4; legal are 1, 2, 3, 6.",
        ),
        (dict(num_kv_heads=-1), "model.attention.num_kv_heads=-1 must be at least 0."),
        (
            dict(rope_factor=8.0, rope_low_freq_factor=4.0),
            "model.rope.high_freq_factor=4.0 must be over",
        ),
        (
            dict(embed_dim=130),
            "model.embed_dim=130 is not a multiple of model.attention.num_heads=4; nearest is 128, or give "
            "model.attention.head_dim.",
        ),
        (dict(head_dim=7), "model.attention.head_dim=7 must be even for rope."),
        (dict(head_dim=-2), "model.attention.head_dim=-2"),
        (
            dict(residual="steps"),
            "model.residual.kind='steps' is unknown; legal are standard, ladder.",
        ),
        (dict(ladder_from=2), "ladder_from=2 needs residual=ladder, not standard."),
        (dict(residual="ladder", ladder_from=4), "ladder_from=4 must be under num_layers=4."),
        (dict(mlp_dim=-1), "model.mlp.dim=-1 must be at least 0."),
        (
            dict(mlp_dim=0, num_experts=2),
            "model.experts.num_experts=2 are mlps, but model.mlp.dim=0; give one over 0.",
        ),
        (
            dict(mlp_dim=0, shared_experts=1),
            "model.experts.shared=1 is of experts; give model.experts.num_experts too.",
        ),
        (
            dict(mixer_groups=2),
            "model.mixer.groups=2 is of mamba2, not of model.mixer.kind=attention; take 1.",
        ),
        (
            dict(mixer="gla", mixer_groups=2),
            "model.mixer.groups=2 is of mamba2, not of model.mixer.kind=gla; take 1.",
        ),
        (
            dict(mixer="mamba2", mixer_groups=3),
            "model.mixer.groups=3 must divide model.attention.num_heads=4.",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refusals(changes, sentence):
    with pytest.raises(UsageError) as error:
        lm_config(**changes)
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_derived_sizes():
    config = lm_config(embed_dim=64, num_heads=8)
    assert (config.attention.num_kv_heads, config.attention.head_dim) == (8, 8)
    assert (
        lm_config(positions="learned", head_dim=7).attention.head_dim
        == lm_config(positions="none", head_dim=7).attention.head_dim
        == 7
    )


def test_a_config_is_static():
    assert hash(gpt2()) == hash(gpt2()) and gpt2() == gpt2() and gpt2() != gpt2(num_layers=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        gpt2().num_layers = 3
    assert dataclasses.replace(llama(), num_layers=2) == llama(num_layers=2)


def test_identity_leaves_out_how_a_model_is_computed():
    older = {path: name for name, path in FLAT_NAMES.items()}
    fields = [(older.get(path, path), field) for path, field, _ in leaf_fields(LMConfig())]
    how = {name for name, field in fields if field.metadata.get("identity") is False}
    assert how == {
        "remat",
        "attention",
        "scan_layers",
        "loss_chunk",
        "solver",
        "ranges",
        "mixer_chunk",
        "context",
        "context_order",
        "transport",
    }
    later = {name for name, field in fields if field.metadata.get("identity") == "changed"}
    experts = {"num_experts", "experts_per_token", "capacity", "capacity_group", "router_scores"}
    mixers = {
        "mixer",
        "mixer_dim",
        "mixer_window",
        "mixer_states",
        "mixer_key_dim",
        "mixer_groups",
        "mixers",
        "qk_norm",
    }
    experts |= {"balance_loss", "router_z_loss", "router_bias", "shared_experts", "expert_failures"}
    experts |= {"balance_layers"}
    folders = {"windows", "qkv_bias", "post_norms", "norm_plus_one", "embed_scale", "logit_cap"}
    folders |= {"score_cap", "score_dim", "rope_scaling", "rope_share", "rope_theta_local"}
    folders |= {"rope.score_scale"}
    assert later == {"residual", "ladder_from", "z_loss", "weights"} | experts | mixers | folders
