"""Folders of Llama's kin: Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3, Phi-3. Each is Llama's table, changed."""

from jaxpar.lm.config import LMConfig
from jaxpar.lm.hub.folders import (
    LAYER_TYPES,
    LIKE_LLAMA,
    PART,
    ROPE_KEYS,
    TYPES,
    Architecture,
    Place,
    needs_rms,
    one_window,
    read_rope,
    read_windows,
    write_rope,
    write_windows,
)
from jaxpar.lm.hub.keys import FLAG, LAYERS, NOT_NEGATIVE, POSITIVE, SHARE, SIZE, brief, literal
from jaxpar.types import UsageError


def _read_llama(values: dict) -> dict:
    bias = values.get("mlp_bias", False)
    if values.get("attention_bias", False) != bias:
        raise UsageError(
            f"mlp_bias={bias} and attention_bias={not bias} differ; legal are both true or both false."
        )
    return read_rope(values) | {"bias": bias} | LIKE_LLAMA


def _write_llama(c: LMConfig) -> dict:
    return write_rope(c) | {"attention_bias": c.bias, "mlp_bias": c.bias}


def _needs_llama(c: LMConfig) -> dict[str, tuple]:
    # transformers refuses an uneven width even where head_dim is given.
    heads = c.attention.num_heads
    return needs_rms(c) | {"embed_dim": (c.embed_dim // heads * heads or heads,)}


def _all_windowed(values: dict, window: int) -> dict:
    return {"attention.windows": (values.get("sliding_window", window),)}


def _one_for_all(c: LMConfig) -> tuple:
    return (c.attention.windows if len(c.attention.windows) < 2 else (),)


def _read_mistral(values: dict) -> dict:
    return read_rope(values) | _all_windowed(values, 4096) | LIKE_LLAMA


def _write_mistral(c: LMConfig) -> dict:
    return write_rope(c) | {
        "sliding_window": c.attention.windows[0] if c.attention.windows else None
    }


def _needs_mistral(c: LMConfig) -> dict[str, tuple]:
    return needs_rms(c) | {"bias": (False,), "attention.windows": _one_for_all(c)}


def _read_qwen(values: dict) -> dict:
    window = values.get("sliding_window", 4096) if values.get("use_sliding_window", False) else 0
    first = values.get("max_window_layers", 28)
    types = [TYPES[bool(window) and layer >= first] for layer in range(values["num_hidden_layers"])]
    return read_rope(values) | read_windows(values, window, types) | LIKE_LLAMA


def _read_qwen2(values: dict) -> dict:
    return _read_qwen(values) | {"attention.qkv_bias": True}


def _read_qwen3(values: dict) -> dict:
    return _read_qwen(values) | {"attention.qk_norm": True}


def _write_qwen(c: LMConfig) -> dict:
    first = next(
        (
            layer
            for layer in range(c.num_layers)
            if c.attention.windows and c.attention.windows[layer % len(c.attention.windows)]
        ),
        0,
    )
    return (
        write_rope(c)
        | write_windows(c)
        | {"use_sliding_window": bool(c.attention.windows), "max_window_layers": first}
    )


def _needs_qwen2(c: LMConfig) -> dict[str, tuple]:
    width = {"embed_dim": (c.attention.num_heads * c.attention.head_dim,)}
    return needs_rms(c) | one_window(c) | width | {"bias": (False,), "attention.qkv_bias": (True,)}


def _needs_qwen3(c: LMConfig) -> dict[str, tuple]:
    return needs_rms(c) | one_window(c) | {"bias": (False,), "attention.qk_norm": (True,)}


LIKE_GEMMA = LIKE_LLAMA | {
    "mlp.activation": "geglu",
    "norm.post_norms": True,
    "embedding.scale": True,
    "norm.plus_one": True,
}


def _read_gemma2(values: dict) -> dict:
    types = [TYPES[layer % 2 == 0] for layer in range(values["num_hidden_layers"])]
    caps = {"attention.score_cap": values.get("attn_logit_softcapping", 50.0)}
    caps |= {"embedding.logit_cap": values.get("final_logit_softcapping", 30.0)}
    return _read_gemma(values, 4096, types) | read_rope(values) | caps


def _read_gemma(values: dict, window: int, types: list[str]) -> dict:
    window = values.get("sliding_window", window)
    windows = read_windows(values, window, types if window else [TYPES[0]] * len(types))
    return (
        windows
        | {"attention.score_dim": float(values.get("query_pre_attn_scalar", 256))}
        | LIKE_GEMMA
    )


def _write_gemma(c: LMConfig) -> dict:
    caps = {
        "attn_logit_softcapping": c.attention.score_cap or None,
        "final_logit_softcapping": c.embedding.logit_cap or None,
    }
    return (
        write_rope(c)
        | write_windows(c)
        | caps
        | {"query_pre_attn_scalar": int(c.attention.score_dim) or c.attention.head_dim}
    )


def _needs_gemma(c: LMConfig) -> dict[str, tuple]:
    gemma = {field: (value,) for field, value in LIKE_GEMMA.items()}
    free = {
        "attention.score_cap": (c.attention.score_cap,),
        "attention.score_dim": (float(int(c.attention.score_dim)),),
        "embedding.logit_cap": (c.embedding.logit_cap,),
    }
    return needs_rms(c) | one_window(c) | gemma | free | {"bias": (False,)}


def _read_gemma3(values: dict) -> dict:
    turn, layers = values.get("sliding_window_pattern", 6), values["num_hidden_layers"]
    fields = _read_gemma(values, 4096, [TYPES[(layer + 1) % turn != 0] for layer in range(layers)])
    told = values.get("rope_parameters", {})
    if set(told) & set(TYPES):  # as transformers 5 writes it: one table for each type of layer
        if unknown := set(told) - set(TYPES):
            raise UsageError(
                f"rope_parameters has {brief(min(unknown))}; legal are {' and '.join(TYPES)}."
            )
        rope = read_rope({"rope_parameters": told.get(TYPES[0]) or {}}, 1e6)
        local = read_rope({"rope_parameters": told.get(TYPES[1]) or {}})
    else:
        rope = read_rope(values, 1e6)
        local = {"rope.theta": values.get("rope_local_base_freq", 10000.0)}
    if "rope.factor" in local:
        raise UsageError(
            "rope_parameters scales the layers of sliding_attention; legal is rope_type default there."
        )
    theta = local["rope.theta"]
    is_other = any(fields["attention.windows"]) and (
        theta != rope["rope.theta"] or rope.get("rope.factor", 1.0) != 1.0
    )
    caps = {"attention.score_cap": values.get("attn_logit_softcapping", 0.0)}
    caps |= {"embedding.logit_cap": values.get("final_logit_softcapping", 0.0)}
    return (
        fields
        | rope
        | caps
        | {"rope.theta_local": theta if is_other else 0.0, "attention.qk_norm": True}
    )


def _write_gemma3(c: LMConfig) -> dict:
    return _write_gemma(c) | {"rope_local_base_freq": c.rope.theta_local or c.rope.theta}


def _needs_gemma3(c: LMConfig) -> dict[str, tuple]:
    # Its layers with a window have no scaling.
    is_told = c.rope.theta_local or not c.attention.windows or c.rope.factor == 1.0
    local = {"rope.theta_local": (c.rope.theta_local if is_told else c.rope.theta,)}
    return _needs_gemma(c) | local | {"attention.qk_norm": (True,)}


def _read_phi3(values: dict) -> dict:
    return read_rope(values, is_partial=True) | _all_windowed(values, 0) | LIKE_LLAMA


def _write_phi3(c: LMConfig) -> dict:
    is_scaled = c.rope.factor != 1.0
    extra = {
        "partial_rotary_factor": c.rope.share,
        "original_max_position_embeddings": c.rope.original_len if is_scaled else c.max_seq_len,
    }
    return _write_mistral(c) | extra | {"embd_pdrop": c.dropout, "attention_dropout": c.dropout}


def _needs_phi3(c: LMConfig) -> dict[str, tuple]:
    width = {
        "embed_dim": (c.attention.num_heads * c.attention.head_dim,),
        "rope.share": (c.rope.share,),
    }
    factor = 1.0
    if c.rope.scaling == "yarn":
        factor = c.rope.factor
    return (
        needs_rms(c)
        | width
        | {"bias": (False,), "attention.windows": _one_for_all(c), "rope.factor": (factor,)}
    )


LLAMA = Architecture(
    "LlamaForCausalLM", "llama", "model.layers.{}.", r"rotary_emb\.inv_freq$",
    rows={
        "embedding": Place("model.embed_tokens.weight", "vd>v,d"), "head": Place("lm_head.weight", "vd>v,d"),
        "final_norm.scale": Place("model.norm.weight", "d>d"),
        "layers.attn_norm.scale": Place("input_layernorm.weight", "d>d"),
        "layers.mlp_norm.scale": Place("post_attention_layernorm.weight", "d>d"),
        "layers.wq": Place("self_attn.q_proj.weight", "dhk>hk,d"), "layers.bq": Place("self_attn.q_proj.bias", "hk>hk"),
        "layers.wk": Place("self_attn.k_proj.weight", "dgk>gk,d"), "layers.bk": Place("self_attn.k_proj.bias", "gk>gk"),
        "layers.wv": Place("self_attn.v_proj.weight", "dgk>gk,d"), "layers.bv": Place("self_attn.v_proj.bias", "gk>gk"),
        "layers.wo": Place("self_attn.o_proj.weight", "hkd>d,hk"), "layers.bo": Place("self_attn.o_proj.bias", "d>d"),
        "layers.w_gate": Place("mlp.gate_proj.weight", "df>f,d"), "layers.b_gate": Place("mlp.gate_proj.bias", "f>f"),
        "layers.w_up": Place("mlp.up_proj.weight", "df>f,d"), "layers.b_up": Place("mlp.up_proj.bias", "f>f"),
        "layers.w_down": Place("mlp.down_proj.weight", "fd>d,f"), "layers.b_down": Place("mlp.down_proj.bias", "d>d"),
    },
    fields={
        "vocab_size": ("vocab_size", SIZE), "num_layers": ("num_hidden_layers", LAYERS),
        "embed_dim": ("hidden_size", SIZE), "attention.num_heads": ("num_attention_heads", SIZE),
        "mlp.dim": ("intermediate_size", SIZE), "attention.head_dim": ("head_dim", SIZE, 0),
        "attention.num_kv_heads": ("num_key_value_heads", SIZE, 0),
        "max_seq_len": ("max_position_embeddings", SIZE, 2048),
        "norm.eps": ("rms_norm_eps", NOT_NEGATIVE, 1e-6), "embedding.tied": ("tie_word_embeddings", FLAG, False),
        "init_std": ("initializer_range", NOT_NEGATIVE, 0.02),
    },
    others=ROPE_KEYS | {"mlp_bias": FLAG, "attention_bias": FLAG},
    fixed={"hidden_act": "silu"}, read=_read_llama, write=_write_llama, needs=_needs_llama,
)  # fmt: skip

OF_LLAMA = {
    leaf: place
    for leaf, place in LLAMA.rows.items()
    if "mlp." not in place.name and "bias" not in place.name
}
BIASES = {f"layers.b{name}": LLAMA.rows[f"layers.b{name}"] for name in "qkv"}
MLP = {f"layers.w_{name}": LLAMA.rows[f"layers.w_{name}"] for name in ("gate", "up", "down")}
QK_NORMS = {
    "layers.q_norm.scale": Place("self_attn.q_norm.weight", "k>k"),
    "layers.k_norm.scale": Place("self_attn.k_norm.weight", "k>k"),
}
FOUR_NORMS = {
    "layers.attn_post_norm.scale": Place("post_attention_layernorm.weight", "d>d"),
    "layers.mlp_norm.scale": Place("pre_feedforward_layernorm.weight", "d>d"),
    "layers.mlp_post_norm.scale": Place("post_feedforward_layernorm.weight", "d>d"),
}

MISTRAL = Architecture(
    "MistralForCausalLM", "mistral", LLAMA.layer, LLAMA.passed_over, rows=OF_LLAMA | MLP,
    fields=LLAMA.fields | {
        "attention.num_kv_heads": ("num_key_value_heads", SIZE, 8),
        "max_seq_len": ("max_position_embeddings", SIZE, 131072),
    },
    others=ROPE_KEYS | {"sliding_window": SIZE}, fixed={"hidden_act": "silu"},
    read=_read_mistral, write=_write_mistral, needs=_needs_mistral, nulls=("sliding_window",),
)  # fmt: skip

OF_QWEN = ROPE_KEYS | {
    "sliding_window": SIZE, "use_sliding_window": FLAG, "max_window_layers": NOT_NEGATIVE, "layer_types": LAYER_TYPES,
}  # fmt: skip
QWEN2 = Architecture(
    "Qwen2ForCausalLM", "qwen2", LLAMA.layer, LLAMA.passed_over, rows=OF_LLAMA | MLP | BIASES,
    fields=LLAMA.fields | {
        "attention.num_kv_heads": ("num_key_value_heads", SIZE, 32),
        "max_seq_len": ("max_position_embeddings", SIZE, 32768),
    },
    others=OF_QWEN, fixed={"hidden_act": "silu"},
    read=_read_qwen2, write=_write_qwen, needs=_needs_qwen2, nulls=("sliding_window",),
)  # fmt: skip

QWEN3 = QWEN2._replace(
    name="Qwen3ForCausalLM", model_type="qwen3", rows=OF_LLAMA | MLP | QK_NORMS,
    fields=QWEN2.fields | {"attention.head_dim": ("head_dim", SIZE, 128)},
    fixed={"hidden_act": "silu", "attention_bias": False}, read=_read_qwen3, needs=_needs_qwen3,
)  # fmt: skip

GEMMA2 = Architecture(
    "Gemma2ForCausalLM", "gemma2", LLAMA.layer, LLAMA.passed_over, rows=OF_LLAMA | MLP | FOUR_NORMS,
    fields=LLAMA.fields | {
        "attention.head_dim": ("head_dim", SIZE, 256), "attention.num_kv_heads": ("num_key_value_heads", SIZE, 4),
        "attention.num_heads": ("num_attention_heads", SIZE, 8), "max_seq_len": ("max_position_embeddings", SIZE, 8192),
        "embedding.tied": ("tie_word_embeddings", FLAG, True),
    },
    others=ROPE_KEYS | {
        "sliding_window": SIZE, "layer_types": LAYER_TYPES, "query_pre_attn_scalar": POSITIVE,
        "attn_logit_softcapping": POSITIVE, "final_logit_softcapping": POSITIVE,
        "hidden_act": literal("gelu_pytorch_tanh"),
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    read=_read_gemma2, write=_write_gemma, needs=_needs_gemma,
    nulls=("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"),
)  # fmt: skip

GEMMA3 = GEMMA2._replace(
    name="Gemma3ForCausalLM", model_type="gemma3_text", rows=GEMMA2.rows | QK_NORMS,
    fields=GEMMA2.fields | {"max_seq_len": ("max_position_embeddings", SIZE, 131072)},
    others=GEMMA2.others | {"sliding_window_pattern": SIZE, "rope_local_base_freq": POSITIVE},
    read=_read_gemma3, write=_write_gemma3, needs=_needs_gemma3,
)  # fmt: skip

PHI3 = Architecture(
    "Phi3ForCausalLM", "phi3", LLAMA.layer, LLAMA.passed_over,
    rows=OF_LLAMA | MLP | {
        "layers.wq": Place("self_attn.qkv_proj.weight", "dhk>hk,d", 0, 0),
        "layers.wk": Place("self_attn.qkv_proj.weight", "dgk>gk,d", 1, 0),
        "layers.wv": Place("self_attn.qkv_proj.weight", "dgk>gk,d", 2, 0),
        "layers.w_gate": Place("mlp.gate_up_proj.weight", "df>f,d", 0, 0),
        "layers.w_up": Place("mlp.gate_up_proj.weight", "df>f,d", 1, 0),
    },
    fields=LLAMA.fields | {
        "max_seq_len": ("max_position_embeddings", SIZE, 4096), "norm.eps": ("rms_norm_eps", NOT_NEGATIVE, 1e-5),
        "dropout": ("resid_pdrop", SHARE, 0.0),
    },
    others=ROPE_KEYS | {
        "sliding_window": SIZE, "partial_rotary_factor": PART, "original_max_position_embeddings": SIZE,
    },
    fixed={"hidden_act": "silu", "attention_bias": False},
    read=_read_phi3, write=_write_phi3, needs=_needs_phi3, nulls=("sliding_window",),
)  # fmt: skip

LLAMAS = LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3
