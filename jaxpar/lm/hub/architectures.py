"""The kinds of Hugging Face folders that there are: what their `config.json` means, and where each leaf lies.

An architecture is one table: where each leaf of `jaxpar.lm.params.leaves` lies in the files, and which key of
`config.json` holds each field of `LMConfig`. Both directions read the same table.
"""

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from jaxpar.fields import make_nested
from jaxpar.lm.config import LMConfig
from jaxpar.lm.hub.folders import (
    LIKE_LLAMA,
    PLAIN,
    ROPE_KEYS,
    Architecture,
    Place,
    needs_attention,
    needs_rms,
    read_rope,
    write_rope,
)
from jaxpar.lm.hub.gguf_files import folder_of
from jaxpar.lm.hub.keys import (
    ENDLESS,
    FLAG,
    IDS,
    LAYERS,
    NAMES,
    NOT_NEGATIVE,
    POSITIVE,
    RANK,
    SHARE,
    SIZE,
    TEXT,
    UNREAD,
    all_of,
    brief,
    check,
    has_own_classes,
    literal,
    plain,
    read_json,
    refuse_unknown,
)
from jaxpar.lm.hub.llamas import LLAMA, LLAMAS, OF_LLAMA, QK_NORMS
from jaxpar.types import UsageError

__all__ = ["architecture_of", "config_from_hf", "config_json", "read_config"]

GELU = {"gelu_new": "gelu", "gelu": "gelu_exact"}


def _read_gpt2(values: dict) -> dict:
    activation = GELU[values.get("activation_function", "gelu_new")]
    width = values.get("n_inner", 4 * values["n_embd"])
    return {
        "mlp.dim": width,
        "mlp.activation": activation,
        "norm.kind": "layer",
        "positions": "learned",
        "bias": True,
    }


def _write_gpt2(c: LMConfig) -> dict:
    name = next(key for key, ours in GELU.items() if ours == c.mlp.activation)
    return {
        "n_inner": c.mlp.dim,
        "activation_function": name,
        "embd_pdrop": c.dropout,
        "attn_pdrop": c.dropout,
    }


def _needs_gpt2(c: LMConfig) -> dict[str, tuple]:
    kind = needs_attention(c) | {"norm.kind": ("layer",), "positions": ("learned",)}
    kind |= {"bias": (True,), "mlp.activation": tuple(GELU.values())}
    return kind | {
        "embedding.tied": (True,),
        "attention.num_kv_heads": (c.attention.num_heads,),
        "embed_dim": (c.attention.num_heads * c.attention.head_dim,),
    }


BALANCE_KEYS = {"output_router_logits": FLAG, "router_aux_loss_coef": NOT_NEGATIVE}


def _read_balance(values: dict) -> dict:
    """Translates the balance loss; transformers adds it where `output_router_logits` is true."""
    if not values.get("output_router_logits", False):
        return {}
    weight = float(values.get("router_aux_loss_coef", 0.001))
    return {"losses.balance_loss": weight, "losses.balance_layers": "concatenated"}


def _write_balance(c: LMConfig) -> dict:
    """The inverse; nothing is written of a sum over layers, which transformers lacks."""
    if c.losses.balance_layers != "concatenated":
        return {}
    return {"output_router_logits": True, "router_aux_loss_coef": c.losses.balance_loss}


def _write_mixtral(c: LMConfig) -> dict:
    return write_rope(c) | _write_balance(c)


def _read_mixtral(values: dict) -> dict:
    if values["num_experts_per_tok"] == 1:  # it would be weighted by 1, and not by its score
        raise UsageError(
            "num_experts_per_tok=1 is not honoured of a Mixtral; legal are 2 and more."
        )
    return read_rope(values, 1e6) | LIKE_LLAMA | _read_balance(values)


def _read_qwen3(values: dict) -> dict:
    k, is_share = values["num_experts_per_tok"], values.get("norm_topk_prob", False)
    if is_share != (k > 1):
        raise UsageError(
            f"norm_topk_prob={is_share} is not honoured; legal is {k > 1} with num_experts_per_tok={k}."
        )
    return read_rope(values) | LIKE_LLAMA | {"attention.qk_norm": True} | _read_balance(values)


def _write_qwen3(c: LMConfig) -> dict:
    extra = {"norm_topk_prob": c.experts.experts_per_token > 1, "intermediate_size": c.mlp.dim}
    return write_rope(c) | _write_balance(c) | extra


def _needs_mixtral(c: LMConfig) -> dict[str, tuple]:
    # Of one expert a token it makes the weight 1.
    several = {"experts.experts_per_token": (max(2, c.experts.experts_per_token),)}
    return needs_rms(c) | _needs_router(c) | several


def _needs_qwen3(c: LMConfig) -> dict[str, tuple]:
    return needs_rms(c) | _needs_router(c) | {"attention.qk_norm": (True,)}


def _needs_router(c: LMConfig) -> dict[str, tuple]:
    del c
    return {
        "experts.shared": (0,),
        "experts.scores": ("softmax",),
        "losses.router_bias": (0.0,),
        "bias": (False,),
    }


def _read_mamba2(values: dict) -> dict:
    heads, size, width = values["num_heads"], values.get("head_dim", 64), values["hidden_size"]
    if heads * size != values.get("expand", 2) * width:
        raise UsageError(
            f"num_heads={heads} heads of head_dim={size} are not expand={values.get('expand', 2)} times "
            f"hidden_size={width} wide; legal is num_heads * head_dim = expand * hidden_size."
        )
    inner = values.get("intermediate_size", heads * size)
    if inner != heads * size:
        raise UsageError(
            f"config.json has intermediate_size={inner}, which is not honoured of a Mamba-2; legal is "
            f"expand * hidden_size = {heads * size}, or no such key."
        )
    # That of attention, which there is none of, matters only where the default of LMConfig is no whole number.
    unused = size if width % heads else 0
    return {
        "mixer.kind": "mamba2",
        "mixer.dim": heads * size,
        "mlp.dim": 0,
        "positions": "none",
        "attention.head_dim": unused,
    }


def _write_mamba2(c: LMConfig) -> dict:
    values = c.mixer.dim // c.attention.num_heads
    return {
        "head_dim": values,
        "state_size": c.mixer.key_dim or values,
        "expand": c.mixer.dim // c.embed_dim,
    }


def _needs_mamba2(c: LMConfig) -> dict[str, tuple]:
    kind = {
        name: legal
        for name, legal in PLAIN.items()
        if name not in ("mixer.kind", "mixer.in_turn", "weights")
    }
    kind |= {"mlp.dim": (0,), "norm.kind": ("rms",), "positions": ("none", "rope")}
    width = max(1, c.mixer.dim // c.embed_dim) * c.embed_dim
    return kind | {"experts.num_experts": (0,), "bias": (False,), "mixer.dim": (width,)}


GPT2 = Architecture(
    "GPT2LMHeadModel", "gpt2", "transformer.h.{}.", r"\.attn\.(masked_)?bias$",
    rows={
        "embedding": Place("transformer.wte.weight", "vd>v,d"), "positions": Place("transformer.wpe.weight", "td>t,d"),
        "final_norm.scale": Place("transformer.ln_f.weight", "d>d"),
        "final_norm.bias": Place("transformer.ln_f.bias", "d>d"),
        "layers.attn_norm.scale": Place("ln_1.weight", "d>d"), "layers.attn_norm.bias": Place("ln_1.bias", "d>d"),
        "layers.mlp_norm.scale": Place("ln_2.weight", "d>d"), "layers.mlp_norm.bias": Place("ln_2.bias", "d>d"),
        "layers.wq": Place("attn.c_attn.weight", "dhk>d,hk", 0), "layers.bq": Place("attn.c_attn.bias", "hk>hk", 0),
        "layers.wk": Place("attn.c_attn.weight", "dhk>d,hk", 1), "layers.bk": Place("attn.c_attn.bias", "hk>hk", 1),
        "layers.wv": Place("attn.c_attn.weight", "dhk>d,hk", 2), "layers.bv": Place("attn.c_attn.bias", "hk>hk", 2),
        "layers.wo": Place("attn.c_proj.weight", "hkd>hk,d"), "layers.bo": Place("attn.c_proj.bias", "d>d"),
        "layers.w_up": Place("mlp.c_fc.weight", "df>d,f"), "layers.b_up": Place("mlp.c_fc.bias", "f>f"),
        "layers.w_down": Place("mlp.c_proj.weight", "fd>f,d"), "layers.b_down": Place("mlp.c_proj.bias", "d>d"),
    },
    fields={
        "vocab_size": ("vocab_size", SIZE), "num_layers": ("n_layer", LAYERS), "embed_dim": ("n_embd", SIZE),
        "attention.num_heads": ("n_head", SIZE), "max_seq_len": ("n_positions", SIZE),
        "norm.eps": ("layer_norm_epsilon", NOT_NEGATIVE, 1e-5), "dropout": ("resid_pdrop", SHARE, 0.1),
        "embedding.tied": ("tie_word_embeddings", FLAG, True), "init_std": ("initializer_range", NOT_NEGATIVE, 0.02),
    },
    others={"activation_function": literal(*GELU), "n_inner": SIZE, "embd_pdrop": SHARE, "attn_pdrop": SHARE},
    fixed={
        "tie_word_embeddings": True, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False, "add_cross_attention": False,
    },
    read=_read_gpt2, write=_write_gpt2, needs=_needs_gpt2,
)  # fmt: skip

MIXTRAL = Architecture(
    "MixtralForCausalLM", "mixtral", LLAMA.layer, LLAMA.passed_over,
    rows=OF_LLAMA | {
        "layers.w_router": Place("block_sparse_moe.gate.weight", "de>e,d"),
        "layers.w_gate": Place("block_sparse_moe.experts.{}.w1.weight", "df>f,d"),
        "layers.w_up": Place("block_sparse_moe.experts.{}.w3.weight", "df>f,d"),
        "layers.w_down": Place("block_sparse_moe.experts.{}.w2.weight", "fd>d,f"),
    },
    fields=LLAMA.fields | {
        "attention.num_kv_heads": ("num_key_value_heads", SIZE),
        "max_seq_len": ("max_position_embeddings", SIZE, 131072),
        "norm.eps": ("rms_norm_eps", NOT_NEGATIVE, 1e-5), "experts.num_experts": ("num_local_experts", SIZE),
        "experts.experts_per_token": ("num_experts_per_tok", SIZE),
    },
    others=ROPE_KEYS | BALANCE_KEYS, fixed={"hidden_act": "silu", "router_jitter_noise": 0.0},
    read=_read_mixtral, write=_write_mixtral, needs=_needs_mixtral,
)  # fmt: skip

QWEN3_MOE = Architecture(
    "Qwen3MoeForCausalLM", "qwen3_moe", LLAMA.layer, LLAMA.passed_over,
    rows=OF_LLAMA | QK_NORMS | {
        "layers.w_router": Place("mlp.gate.weight", "de>e,d"),
        "layers.w_gate": Place("mlp.experts.{}.gate_proj.weight", "df>f,d"),
        "layers.w_up": Place("mlp.experts.{}.up_proj.weight", "df>f,d"),
        "layers.w_down": Place("mlp.experts.{}.down_proj.weight", "fd>d,f"),
    },
    fields=LLAMA.fields | {
        "attention.num_kv_heads": ("num_key_value_heads", SIZE),
        "max_seq_len": ("max_position_embeddings", SIZE, 32768),
        "mlp.dim": ("moe_intermediate_size", SIZE), "experts.num_experts": ("num_experts", SIZE),
        "experts.experts_per_token": ("num_experts_per_tok", SIZE),
    },
    # The last key belongs to layers without experts.
    others=ROPE_KEYS | BALANCE_KEYS | {"norm_topk_prob": FLAG, "intermediate_size": SIZE},
    fixed={"hidden_act": "silu", "decoder_sparse_step": 1, "mlp_only_layers": [], "attention_bias": False},
    read=_read_qwen3, write=_write_qwen3, needs=_needs_qwen3,
)  # fmt: skip

MAMBA2 = Architecture(
    "Mamba2ForCausalLM", "mamba2", "backbone.layers.{}.", r"^$",
    rows={
        "embedding": Place("backbone.embeddings.weight", "vd>v,d"), "head": Place("lm_head.weight", "vd>v,d"),
        "final_norm.scale": Place("backbone.norm_f.weight", "d>d"),
        "layers.attn_norm.scale": Place("norm.weight", "d>d"),
        "layers.mixer.w_z": Place("mixer.in_proj.weight", "dhv>hv,d", 0, 0),
        "layers.mixer.w_x": Place("mixer.in_proj.weight", "dhv>hv,d", 1, 0),
        "layers.mixer.w_b": Place("mixer.in_proj.weight", "dgn>gn,d", 2, 0),
        "layers.mixer.w_c": Place("mixer.in_proj.weight", "dgn>gn,d", 3, 0),
        "layers.mixer.w_dt": Place("mixer.in_proj.weight", "dh>h,d", 4, 0),
        "layers.mixer.conv_x": Place("mixer.conv1d.weight", "whv>hv,,w", 0, 0),
        "layers.mixer.conv_b": Place("mixer.conv1d.weight", "wgn>gn,,w", 1, 0),
        "layers.mixer.conv_c": Place("mixer.conv1d.weight", "wgn>gn,,w", 2, 0),
        "layers.mixer.bias_x": Place("mixer.conv1d.bias", "hv>hv", 0),
        "layers.mixer.bias_b": Place("mixer.conv1d.bias", "gn>gn", 1),
        "layers.mixer.bias_c": Place("mixer.conv1d.bias", "gn>gn", 2),
        "layers.mixer.b_dt": Place("mixer.dt_bias", "h>h"), "layers.mixer.a_log": Place("mixer.A_log", "h>h"),
        "layers.mixer.d_skip": Place("mixer.D", "h>h"), "layers.mixer.norm_scale": Place("mixer.norm.weight", "hv>hv"),
        "layers.mixer.w_out": Place("mixer.out_proj.weight", "hvd>d,hv"),
    },
    fields={
        "vocab_size": ("vocab_size", SIZE), "num_layers": ("num_hidden_layers", LAYERS),
        "embed_dim": ("hidden_size", SIZE), "attention.num_heads": ("num_heads", SIZE),
        "mixer.key_dim": ("state_size", SIZE, 128), "mixer.groups": ("n_groups", SIZE, 8),
        "norm.eps": ("layer_norm_epsilon", NOT_NEGATIVE, 1e-5), "embedding.tied": ("tie_word_embeddings", FLAG, False),
        "init_std": ("initializer_range", NOT_NEGATIVE, 0.1),
    },
    others={
        "head_dim": SIZE, "expand": SIZE, "intermediate_size": SIZE, "time_step_limit": ENDLESS,
        "layer_types": all_of("linear_attention"),
        # Of how training starts, of chunks, of rounding, and one that transformers no longer reads.
        "time_step_rank": RANK, "time_step_min": POSITIVE, "time_step_max": POSITIVE, "time_step_floor": POSITIVE,
        "rescale_prenorm_residual": FLAG, "chunk_size": SIZE, "residual_in_fp32": FLAG, "norm_before_gate": FLAG,
    },
    fixed={"hidden_act": "silu", "rms_norm": True, "use_bias": False, "use_conv_bias": True, "conv_kernel": 4},
    read=_read_mamba2, write=_write_mamba2, needs=_needs_mamba2,
)  # fmt: skip

KINDS = *LLAMAS, GPT2, MIXTRAL, QWEN3_MOE, MAMBA2
SPELLINGS = {"qwen3_moe": {"num_local_experts": "num_experts"}}  # of transformers 5
COMMON = {
    "bos_token_id": IDS, "eos_token_id": IDS, "use_sliding_window": literal(False), "pruned_heads": literal({}),
    "layer_types": all_of("full_attention"),
}  # fmt: skip
"""Keys of all architectures."""


def config_from_hf(path: str | Path, *, dtype: str = "bfloat16", strict: bool = True) -> LMConfig:
    """Returns the model that a `config.json` describes, or that of the folder it lies in; reads no parameter.

    Args:
      path: The file or its folder, or a GGUF file.
      dtype: Type of computation, for `LMConfig.dtype`.
      strict: Whether keys that nobody knows are rejected; otherwise a warning names them.

    Raises:
      UsageError: If the file is absent or damaged, the architecture is unknown, or a key is not honoured.
    """
    return read_config(Path(path), dtype, strict)[1]


def read_config(path: Path, dtype: str, strict: bool = True) -> tuple[Architecture, LMConfig]:
    """Translates `config.json`; an absent key means what it means to transformers, and so does null."""
    path = folder_of(path)
    path = path if path.is_file() else path / "config.json"
    given = read_json(path)
    nulls = [key for key, value in given.items() if value is None]
    values = {key: value for key, value in given.items() if value is not None}
    for key, what in (("model_type", TEXT), ("architectures", NAMES)):
        check(path, key, values.get(key, "" if what is TEXT else []), what)
    kind = values.get("model_type")
    name = (values.get("architectures") or [kind])[0]
    arch = next(
        (a for a in KINDS if name in (a.name, a.model_type) and kind in (a.model_type, None)), None
    )
    if arch is None:
        raise UsageError(
            f"{path} is of architecture {plain(name)} (model_type {plain(kind)}); legal are "
            f"{', '.join(a.name for a in KINDS[:-1])} and {KINDS[-1].name}."
        )
    for newer, key in SPELLINGS.get(arch.model_type, {}).items():
        if newer in values and (there := values.pop(newer)) != values.setdefault(key, there):
            raise UsageError(
                f"{path} has {key}={brief(values[key])} and {newer}={brief(there)}; legal is one value."
            )
    known = COMMON | {key: kind for key, kind, *_ in arch.fields.values()} | arch.others
    known |= {key: literal(value) for key, value in arch.fixed.items()}
    unread = set(UNREAD.get(arch.model_type, ()))
    if has_own_classes(values.get("auto_map"), arch.name):
        unread.add("auto_map")
    refuse_unknown(path, values, known, unread, strict)
    if absent := [
        key for key, _, *default in arch.fields.values() if not default and key not in values
    ]:
        raise UsageError(f"{path} lacks {', '.join(absent)}.")
    fields = {ours: values.get(key, *default) for ours, (key, _, *default) in arch.fields.items()}
    values |= {key: 0 for key in arch.nulls if key in nulls}
    return arch, make_nested(LMConfig, fields | arch.read(values) | {"dtype": dtype})


def architecture_of(config: LMConfig, kind: str = "") -> Architecture:
    """Returns the architecture that expresses `config`, or says which fields stand in the way.

    Args:
      config: The model.
      kind: `model_type` of the folder that it came from; empty where there is none, for the first
        architecture that expresses it.

    Raises:
      UsageError: No architecture, or not that one, expresses the model.
    """
    if not kind:
        return _first_architecture(config)
    return _architecture_of_kind(config, kind)


def _first_architecture(config: LMConfig) -> Architecture:
    """Returns the first architecture that expresses `config`."""
    reasons = []
    for arch in (arch for arch in KINDS if _is_alike(arch, config)):
        wrong = {
            field: legal
            for field, legal in arch.needs(config).items()
            if attrgetter(field)(config) not in legal
        }
        if not wrong:
            return arch
        parts = (f"model.{field}={' or '.join(map(str, legal))}" for field, legal in wrong.items())
        reasons.append((wrong, f"{arch.name} needs {' and '.join(parts)}"))
    nearest = min(len(wrong) for wrong, _ in reasons)
    reasons = [reason for reason in reasons if len(reason[0]) == nearest]
    fields = " ".join(
        f"{field}={attrgetter(field)(config)}"
        for field in dict.fromkeys(f for w, _ in reasons for f in w)
    )
    raise UsageError(
        f"no folder can hold a model with {fields}: {'; '.join(text for _, text in reasons)}."
    )


def _architecture_of_kind(config: LMConfig, kind: str) -> Architecture:
    """Returns the architecture of a `model_type`, once it is sure to express `config`."""
    arch = next((arch for arch in KINDS if arch.model_type == kind), None)
    if arch is None:
        kinds = ", ".join(arch.model_type for arch in KINDS)
        raise UsageError(f"kind={brief(kind)}: no architecture; expected {kinds}.")
    if not _is_alike(arch, config):
        raise UsageError(
            f"kind={kind}: {arch.name} has other layers than this model, of "
            f"model.mixer.kind={config.mixer.kind} and "
            f"model.experts.num_experts={config.experts.num_experts}; "
            "expected the kind of the folder that the model came from."
        )
    wrong = []
    for name, legal in arch.needs(config).items():
        value = attrgetter(name)(config)
        if value not in legal:
            wrong.append(f"model.{name}={value} for {' or '.join(map(str, legal))}")
    if wrong:
        raise UsageError(
            f"kind={kind}: {arch.name} cannot hold a model with {', '.join(wrong)}; "
            "expected the model as the folder had it."
        )
    return arch


def _is_alike(arch: Architecture, config: LMConfig) -> bool:
    """Whether an architecture is worth a word on why it does not express `config`."""
    if config.mixer.kind == "mamba2":
        return "layers.mixer.w_x" in arch.rows
    return "layers.wq" in arch.rows and ("layers.w_router" in arch.rows) == bool(
        config.experts.num_experts
    )


def config_json(
    arch: Architecture,
    config: LMConfig,
    dtype: str,
    given: Mapping[str, Any] | None = None,  # any JSON
) -> dict[str, object]:
    """Returns what `config.json` of a model says.

    Args:
      arch: Architecture of the folder.
      config: The model.
      dtype: Type of the tensors.
      given: `config.json` of the folder that the model came from, whose special tokens stay.
    """
    values = {"architectures": [arch.name], "model_type": arch.model_type, "torch_dtype": dtype}
    # Left out, these would be the ids of transformers' own vocabularies.
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[key] = (given or {}).get(key)
    return (
        values
        | arch.fixed
        | {key[0]: attrgetter(ours)(config) for ours, key in arch.fields.items()}
        | arch.write(config)
    )
