"""Architectures of GGUF files: the `config.json` of their metadata, and where their tensors lie.

Names are from llama.cpp's `gguf-py/gguf/constants.py`. Unknown metadata are written to
`config.json` under their own names, and are checked there as any other unknown key is.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxpar.lm.hub.keys import brief
from jaxpar.types import UsageError

Metadata: TypeAlias = Mapping[str, Any]
"""What a GGUF file says by name: numbers, texts and lists of either."""


class Contents(NamedTuple):
    """All that a GGUF file says.

    Attributes:
      path: The file.
      values: Metadata by name.
      arrays: Bytes of each tensor by rows, mapped.
      kinds: Type of each tensor's numbers.
      shapes: Shape of each tensor, the longest stride first.
    """

    path: Path
    values: Metadata
    arrays: Mapping[str, np.ndarray]
    kinds: Mapping[str, Any]  # of a package that is not always there
    shapes: Mapping[str, tuple[int, ...]]


class Placed(NamedTuple):
    """Where a tensor lies in a Hugging Face folder.

    Attributes:
      name: Its name there.
      num_heads: Number of heads, if the file has their rows in another order; 0 otherwise.
      added: Number that the file has added to each of its numbers.
    """

    name: str
    num_heads: int = 0
    added: float = 0.0


class Kind(NamedTuple):
    """An architecture of GGUF files.

    Attributes:
      model_type: `model_type` in `config.json`.
      name: Class of transformers.
      layer: Names of a layer's tensors in the file, and in the folder.
      read: Function that returns keys of `config.json` besides `KEYS`, and removes from the
        metadata all that it reads.
      is_permuted: Whether rows of queries and keys are in llama.cpp's order.
      norms_added: Number that the file has added to the scales of norms.
    """

    model_type: str
    name: str
    layer: Mapping[str, str]
    read: Callable[[Contents, dict, dict], dict]
    is_permuted: bool = False
    norms_added: float = 0.0


KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Metadata that every file has, without the architecture's name, and the keys of `config.json`."""

OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""Names of tensors outside of layers."""

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
FACTORS = "rope_freqs.weight"
"""Tensor of what the frequencies of Llama 3.1 and later are divided by."""


def config_values(contents: Contents) -> dict[str, object]:
    """Returns what `config.json` would say of a file; the tokenizer's keys are not among it.

    Raises:
      UsageError: The architecture is another one, or the file has a part of a model or lacks a key.
    """
    path = contents.path
    kind = _kind(contents)
    prefix = contents.values["general.architecture"] + "."
    left = {
        name.removeprefix(prefix): _one(path, name, value)
        for name, value in contents.values.items()
        if name.startswith(prefix)
    }
    if "attention.head_count" in left:
        left.setdefault("attention.head_count_kv", left["attention.head_count"])
    if absent := [key for key in KEYS if key not in left]:
        raise UsageError(f"{path} lacks {prefix}{absent[0]}; expected a model with it.")
    if "token_embd.weight" not in contents.shapes:
        raise UsageError(f"{path} lacks the tensor token_embd.weight; expected a whole model.")

    config: dict = {key: left.pop(name) for name, key in KEYS.items()}
    rows = contents.shapes["token_embd.weight"][0]
    config["vocab_size"] = rows
    if left.pop("vocab_size", rows) != rows:
        raise UsageError(
            f"{path}: {prefix}vocab_size differs from the {rows} rows of token_embd.weight; "
            "expected the same."
        )
    config["tie_word_embeddings"] = "output.weight" not in contents.shapes
    config["head_dim"] = _head_dim(path, config, left)
    config["rope_theta"] = left.pop("rope.freq_base", 10000.0)
    config |= _rope_scaling(contents, config, left)
    config |= kind.read(contents, config, left)
    for name in ("expert_count", "expert_used_count"):
        if left.get(name) == 0:
            del left[name]
    unknown = {prefix + name: value for name, value in left.items()}
    return {"model_type": kind.model_type, "architectures": [kind.name]} | config | unknown


def place_tensors(contents: Contents) -> dict[str, Placed]:
    """Returns where each tensor of a file lies; unknown tensors keep their names."""
    kind = _kind(contents)
    values = contents.values
    prefix = values["general.architecture"] + "."
    heads = values[prefix + "attention.head_count"]
    groups = {
        "attn_q": heads,
        "attn_k": _one(
            contents.path, prefix, values.get(prefix + "attention.head_count_kv", heads)
        ),
    }
    found = {}
    for name in contents.shapes:
        if name == FACTORS:
            continue
        found[name] = Placed(name)
        match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
        if match is None:
            continue
        layer, piece, end = match.groups()
        table = kind.layer
        if layer is None:
            table = OUTER
        if piece not in table:
            continue
        place = f"{table[piece]}.{end}"
        if layer is not None:
            place = f"model.layers.{layer}.{place}"
        num_heads = 0
        if kind.is_permuted:
            num_heads = groups.get(piece, 0)
        added = 0.0
        if place.endswith("norm.weight"):
            added = kind.norms_added
        found[name] = Placed(name=place, num_heads=num_heads, added=added)
    return found


def number_type(contents: Contents) -> str:
    """Returns the type of a file's matrices: float16, bfloat16, or float32 for all others."""
    sizes: dict[str, int] = {}
    for name, shape in contents.shapes.items():
        if len(shape) > 1:
            kind = contents.kinds[name].name
            sizes[kind] = sizes.get(kind, 0) + int(np.prod(shape))
    if set(sizes) == {"F16"}:
        return "float16"
    if set(sizes) == {"BF16"}:
        return "bfloat16"
    return "float32"


def _kind(contents: Contents) -> Kind:
    """Returns the architecture of a file that holds one whole model."""
    path = contents.path
    values = contents.values
    name = values.get("general.architecture")
    if name not in KINDS:
        raise UsageError(
            f"{path} is of architecture {brief(name)}; expected a GGUF file of {', '.join(KINDS)}."
        )
    if values.get("general.type", "model") != "model":
        raise UsageError(
            f"{path}: general.type={brief(values['general.type'])}; expected a model's file."
        )
    if values.get("split.count", 1) > 1:
        raise UsageError(
            f"{path} is one of {values['split.count']} files; expected the one file that "
            "`llama-gguf-split --merge` makes of them."
        )
    return KINDS[name]


def _one(path: Path, name: str, value: Any) -> Any:  # as metadata are
    """Returns a value that may be written once a layer, and floats as they were before float32."""
    if isinstance(value, list):
        if len(set(value)) != 1:
            raise UsageError(f"{path} has {name}={brief(value)}; expected one value of all layers.")
        value = value[0]
    if type(value) is float:
        return float(str(np.float32(value)))
    return value


def _head_dim(path: Path, config: dict, left: dict) -> int:
    """Returns the width of a head."""
    size = left.pop("attention.key_length", config["hidden_size"] // config["num_attention_heads"])
    value = left.pop("attention.value_length", size)
    if value != size:
        raise UsageError(f"{path}: attention.value_length={value}; expected {size}, as of keys.")
    return size


def _rope_scaling(contents: Contents, config: dict, left: dict) -> dict:
    """Returns `rope_scaling`, if the file has any."""
    kind = left.pop("rope.scaling.type", "none")
    factor = left.pop("rope.scaling.factor", 0.0)
    old = left.pop("rope.scale_linear", 0.0)
    length = left.pop("rope.scaling.original_context_length", 0)
    left.pop("rope.scaling.finetuned", None)  # says where the numbers come from
    if old and kind == "none":
        kind = "linear"
        factor = old
    if FACTORS in contents.shapes:
        if kind != "none":
            raise UsageError(
                f"{contents.path} has {FACTORS} and rope.scaling.type={kind}; expected one of them."
            )
        return {"rope_scaling": _llama3(contents, config)}
    if kind == "none" or factor in (0.0, 1.0):
        return {}
    scaling = {"rope_type": kind, "factor": factor}
    if kind != "yarn":
        return {"rope_scaling": scaling}
    if left.pop("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UsageError(f"{contents.path}: rope.scaling.attn_factor; expected 1, or no such key.")
    if length:
        scaling["original_max_position_embeddings"] = length
    for key in ("beta_fast", "beta_slow"):
        if f"rope.scaling.yarn_{key}" in left:
            scaling[key] = left.pop(f"rope.scaling.yarn_{key}")
    return {"rope_scaling": scaling}


def _llama3(contents: Contents, config: dict) -> dict:
    """Returns the rule of Llama 3.1, after a check that it gives the factors in the file.

    The file holds the factors that the rule computes and not its settings. `factor` is the
    largest of them; the other settings are the same in all published models.
    """
    if contents.kinds[FACTORS].name != "F32":
        raise UsageError(f"{contents.path}: {FACTORS} are no floats; expected F32.")
    given = contents.arrays[FACTORS].view(np.float32)
    size = config["head_dim"]
    factor = float(given.max())
    low = 1.0
    high = 4.0
    length = 8192
    wavelengths = 2 * np.pi * config["rope_theta"] ** (np.arange(0, size, 2) / size)
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if given.shape != expected.shape or not np.allclose(given, expected, rtol=1e-3):
        raise UsageError(
            f"{contents.path}: {FACTORS} are not those of Llama 3's rule with "
            f"low_freq_factor=1, high_freq_factor=4, original length 8192; expected those."
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }


def _check_rotated(contents: Contents, config: dict, left: dict) -> None:
    """Rejects heads that are rotated in part."""
    size = left.pop("rope.dimension_count", config["head_dim"])
    if size != config["head_dim"]:
        raise UsageError(
            f"{contents.path}: rope.dimension_count={size} of heads of {config['head_dim']}; "
            "expected the same."
        )


def _read_llama(contents: Contents, config: dict, left: dict) -> dict:
    _check_rotated(contents, config, left)
    return {}


def _read_gemma2(contents: Contents, config: dict, left: dict) -> dict:
    caps = {
        name: left.pop(name)
        for name in ("attn_logit_softcapping", "final_logit_softcapping")
        if name in left
    }
    return _read_gemma(contents, config, left, 46) | caps


def _read_gemma3(contents: Contents, config: dict, left: dict) -> dict:
    if "attention.sliding_window" not in left:
        raise UsageError(f"{contents.path} lacks gemma3.attention.sliding_window; expected it.")
    out = {"rope_local_base_freq": left.pop("rope.freq_base_swa", 10000.0)}
    if "attention.sliding_window_pattern" in left:
        out["sliding_window_pattern"] = left.pop("attention.sliding_window_pattern")
    return _read_gemma(contents, config, left, 62) | out


def _read_gemma(contents: Contents, config: dict, left: dict, largest: int) -> dict:
    """Reads what both Gemmas have.

    Scores are divided by the root of the head's width. In the model of `largest` layers it is the
    root of embed_dim / num_heads, as in llama.cpp; the files have no key for it.
    """
    _check_rotated(contents, config, left)
    scale = config["head_dim"]
    if config["num_hidden_layers"] == largest:
        scale = config["hidden_size"] // config["num_attention_heads"]
    out = {"query_pre_attn_scalar": scale}
    if "attention.sliding_window" in left:
        out["sliding_window"] = left.pop("attention.sliding_window")
    return out


def _read_phi3(contents: Contents, config: dict, left: dict) -> dict:
    size = left.pop("rope.dimension_count", config["head_dim"])
    for name in contents.shapes:
        if name.startswith("rope_factors_"):
            raise UsageError(
                f"{contents.path} has the tensor {name} of long rope; expected a model without it."
            )
    out: dict[str, Any] = {"partial_rotary_factor": size / config["head_dim"]}
    out["sliding_window"] = left.pop("attention.sliding_window", 0) or None
    return out


KINDS = {
    "llama": Kind(
        model_type="llama",
        name="LlamaForCausalLM",
        layer=LAYER,
        read=_read_llama,
        is_permuted=True,
    ),
    "qwen2": Kind(model_type="qwen2", name="Qwen2ForCausalLM", layer=LAYER, read=_read_llama),
    "qwen3": Kind(
        model_type="qwen3",
        name="Qwen3ForCausalLM",
        layer={**LAYER, **QK_NORMS},
        read=_read_llama,
    ),
    "gemma2": Kind(
        model_type="gemma2",
        name="Gemma2ForCausalLM",
        layer={**LAYER, **FOUR_NORMS},
        read=_read_gemma2,
        norms_added=1.0,
    ),
    "gemma3": Kind(
        model_type="gemma3_text",
        name="Gemma3ForCausalLM",
        layer={**LAYER, **FOUR_NORMS, **QK_NORMS},
        read=_read_gemma3,
        norms_added=1.0,
    ),
    "phi3": Kind(
        model_type="phi3",
        name="Phi3ForCausalLM",
        layer={**LAYER, **FUSED},
        read=_read_phi3,
    ),
}
"""Architectures that are read, by `general.architecture`. Mistral's files have llama's."""
