"""Hugging Face folders <-> parameters, for Llama and GPT-2.

An architecture is one table: where each leaf of `jaxpar.lm.params.leaves` lies in the files, and which key of
`config.json` holds each field of `LMConfig`. Both directions read the same table.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxpar.lm.config import CHOICES, LMConfig
from jaxpar.lm.params import abstract, axes
from jaxpar.mesh import named_shardings
from jaxpar.types import PyTree, UsageError

__all__ = ["from_hf", "to_hf"]


class Row(NamedTuple):
    """Where a leaf lies in the files."""

    name: str  # of the tensor; in a layer, what follows the layer's prefix
    layout: str  # the leaf's axes > the tensor's, commas between; "dhk>hk,d": Linear [out, in], out = h * K + k
    third: int | None = None  # which third of the tensor's last axis, where three leaves are fused


class Architecture(NamedTuple):
    """One kind of folder; the parts of `config.json` that are not one key a field go through `read` and `write`."""

    name: str  # in "architectures"
    model_type: str
    layer: str  # prefix of a layer's tensors; a file may lack its first word
    passed_over: str  # pattern of tensors that are no parameters
    rows: dict[str, Row]  # leaf -> place
    fields: dict[str, tuple]  # field -> its key, and the default of transformers unless required
    fixed: dict[str, Any]  # key -> the one value that this library computes
    read: Callable[[dict], dict]  # config.json without nulls -> the other fields
    write: Callable[[LMConfig], dict]  # its inverse
    needs: Callable[[LMConfig], dict[str, tuple]]  # config -> legal values of the fields that are not free


ROPE = {
    "rope_factor": "factor", "rope_low_freq_factor": "low_freq_factor", "rope_high_freq_factor": "high_freq_factor",
    "rope_original_len": "original_max_position_embeddings",
}  # fmt: skip
GELU = {"gelu_new": "gelu", "gelu": "gelu_exact"}


def _read_llama(values: dict) -> dict:
    bias = values.get("mlp_bias", False)
    if values.get("attention_bias", False) != bias:
        raise UsageError(f"mlp_bias={bias} and attention_bias={not bias} must be equal: biases are everywhere or nowhere.")
    rope = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if key in values}
    rope |= values.get("rope_scaling", {}) | values.get("rope_parameters", {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UsageError(f"rope type {kind!r} is unknown; legal are default and llama3.")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError(f"partial_rotary_factor={rope['partial_rotary_factor']} is unknown; legal is 1.0.")
    keys = ROPE if kind == "llama3" else {}
    if absent := [key for key in keys.values() if key not in rope]:
        raise UsageError(f"rope type 'llama3' also needs {', '.join(absent)}.")
    fields = {ours: rope[key] for ours, key in keys.items()} | {"rope_theta": rope.get("rope_theta", 10000.0)}
    return fields | {"bias": bias, "norm": "rms", "positions": "rope", "activation": "swiglu"}


def _write_llama(c: LMConfig) -> dict:
    # The older spelling, which every version of transformers reads.
    scaling = {"rope_type": "llama3"} | {key: getattr(c, ours) for ours, key in ROPE.items()}
    rope = {"rope_theta": c.rope_theta, "rope_scaling": None if c.rope_factor == 1.0 else scaling}
    return rope | {"attention_bias": c.bias, "mlp_bias": c.bias}


def _needs_llama(c: LMConfig) -> dict[str, tuple]:
    # transformers refuses an uneven width even where head_dim is given.
    width = c.embed_dim // c.num_heads * c.num_heads or c.num_heads
    return {"norm": ("rms",), "positions": ("rope",), "activation": ("swiglu",), "embed_dim": (width,)}


def _read_gpt2(values: dict) -> dict:
    name = values.get("activation_function", "gelu_new")
    if name not in GELU:
        raise UsageError(f"activation_function={name!r} is unknown; legal are {', '.join(GELU)}.")
    width = values.get("n_inner", 4 * values["n_embd"])
    return {"mlp_dim": width, "activation": GELU[name], "norm": "layer", "positions": "learned", "bias": True}


def _write_gpt2(c: LMConfig) -> dict:
    name = next(key for key, ours in GELU.items() if ours == c.activation)
    return {"n_inner": c.mlp_dim, "activation_function": name, "embd_pdrop": c.dropout, "attn_pdrop": c.dropout}


def _needs_gpt2(c: LMConfig) -> dict[str, tuple]:
    kind = {"norm": ("layer",), "positions": ("learned",), "activation": tuple(GELU.values()), "bias": (True,)}
    return kind | {"tied": (True,), "num_kv_heads": (c.num_heads,), "embed_dim": (c.num_heads * c.head_dim,)}


LLAMA = Architecture(
    "LlamaForCausalLM", "llama", "model.layers.{}.", r"rotary_emb\.inv_freq$|^lm_head\.weight$",
    rows={
        "embedding": Row("model.embed_tokens.weight", "vd>v,d"), "head": Row("lm_head.weight", "vd>v,d"),
        "final_norm.scale": Row("model.norm.weight", "d>d"),
        "layers.attn_norm.scale": Row("input_layernorm.weight", "d>d"),
        "layers.mlp_norm.scale": Row("post_attention_layernorm.weight", "d>d"),
        "layers.wq": Row("self_attn.q_proj.weight", "dhk>hk,d"), "layers.bq": Row("self_attn.q_proj.bias", "hk>hk"),
        "layers.wk": Row("self_attn.k_proj.weight", "dgk>gk,d"), "layers.bk": Row("self_attn.k_proj.bias", "gk>gk"),
        "layers.wv": Row("self_attn.v_proj.weight", "dgk>gk,d"), "layers.bv": Row("self_attn.v_proj.bias", "gk>gk"),
        "layers.wo": Row("self_attn.o_proj.weight", "hkd>d,hk"), "layers.bo": Row("self_attn.o_proj.bias", "d>d"),
        "layers.w_gate": Row("mlp.gate_proj.weight", "df>f,d"), "layers.b_gate": Row("mlp.gate_proj.bias", "f>f"),
        "layers.w_up": Row("mlp.up_proj.weight", "df>f,d"), "layers.b_up": Row("mlp.up_proj.bias", "f>f"),
        "layers.w_down": Row("mlp.down_proj.weight", "fd>d,f"), "layers.b_down": Row("mlp.down_proj.bias", "d>d"),
    },
    fields={
        "vocab_size": ("vocab_size",), "num_layers": ("num_hidden_layers",), "embed_dim": ("hidden_size",),
        "num_heads": ("num_attention_heads",), "mlp_dim": ("intermediate_size",), "head_dim": ("head_dim", 0),
        "num_kv_heads": ("num_key_value_heads", 0), "max_seq_len": ("max_position_embeddings", 2048),
        "norm_eps": ("rms_norm_eps", 1e-6), "tied": ("tie_word_embeddings", False),
        "init_std": ("initializer_range", 0.02),
    },
    fixed={"hidden_act": "silu"}, read=_read_llama, write=_write_llama, needs=_needs_llama,
)  # fmt: skip

GPT2 = Architecture(
    "GPT2LMHeadModel", "gpt2", "transformer.h.{}.", r"\.attn\.(masked_)?bias$|^lm_head\.weight$",
    rows={
        "embedding": Row("transformer.wte.weight", "vd>v,d"), "positions": Row("transformer.wpe.weight", "td>t,d"),
        "final_norm.scale": Row("transformer.ln_f.weight", "d>d"), "final_norm.bias": Row("transformer.ln_f.bias", "d>d"),
        "layers.attn_norm.scale": Row("ln_1.weight", "d>d"), "layers.attn_norm.bias": Row("ln_1.bias", "d>d"),
        "layers.mlp_norm.scale": Row("ln_2.weight", "d>d"), "layers.mlp_norm.bias": Row("ln_2.bias", "d>d"),
        "layers.wq": Row("attn.c_attn.weight", "dhk>d,hk", 0), "layers.bq": Row("attn.c_attn.bias", "hk>hk", 0),
        "layers.wk": Row("attn.c_attn.weight", "dhk>d,hk", 1), "layers.bk": Row("attn.c_attn.bias", "hk>hk", 1),
        "layers.wv": Row("attn.c_attn.weight", "dhk>d,hk", 2), "layers.bv": Row("attn.c_attn.bias", "hk>hk", 2),
        "layers.wo": Row("attn.c_proj.weight", "hkd>hk,d"), "layers.bo": Row("attn.c_proj.bias", "d>d"),
        "layers.w_up": Row("mlp.c_fc.weight", "df>d,f"), "layers.b_up": Row("mlp.c_fc.bias", "f>f"),
        "layers.w_down": Row("mlp.c_proj.weight", "fd>f,d"), "layers.b_down": Row("mlp.c_proj.bias", "d>d"),
    },
    fields={
        "vocab_size": ("vocab_size",), "num_layers": ("n_layer",), "embed_dim": ("n_embd",), "num_heads": ("n_head",),
        "max_seq_len": ("n_positions",), "norm_eps": ("layer_norm_epsilon", 1e-5), "dropout": ("resid_pdrop", 0.1),
        "tied": ("tie_word_embeddings", True), "init_std": ("initializer_range", 0.02),
    },
    fixed={
        "tie_word_embeddings": True, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False, "add_cross_attention": False,
    },
    read=_read_gpt2, write=_write_gpt2, needs=_needs_gpt2,
)  # fmt: skip


def from_hf(folder: str | Path, *, dtype: str = "bfloat16", param_dtype: Any = jnp.float32) -> tuple[LMConfig, PyTree]:
    """Reads a Llama or GPT-2 folder of `config.json` and safetensors, whole or in shards.

    Under `jaxpar.mesh.use_mesh` every device's slice is read from the files and placed at once; a process holds at most
    its own slices of one leaf besides. Without a mesh the leaves are ordinary arrays.

    Args:
      folder: As `save_pretrained` or `to_hf` writes it; tensors bfloat16, float16, float32 or float64.
      dtype: Of computation, for `LMConfig.dtype`.
      param_dtype: Of the parameters.

    Returns:
      The model and its parameters. GPT-2's dropout is `resid_pdrop`; a Llama has none.

    Raises:
      UsageError: If a file is absent or damaged, the architecture or a setting is unknown, or a tensor is missing,
        unexpected or misshapen.
    """
    folder, param_dtype = Path(folder), jnp.empty((), param_dtype).dtype
    arch, config = _read_config(folder, dtype)
    with ExitStack() as stack:
        tensors = _find_tensors(folder, arch, config, stack)

        def load(path, leaf, sharding=None):
            name = _dotted(path)
            row, blocks = arch.rows[name], {}

            def block(index):
                bounds = tuple(cut.indices(size)[:2] for cut, size in zip(index, leaf.shape, strict=True))
                # Once for all devices that hold the same.
                if bounds not in blocks:
                    blocks[bounds] = np.empty([stop - start for start, stop in bounds], param_dtype)
                    rest = len(leaf.shape) - len(row.layout.split(">")[0])
                    places = range(*bounds[0]) if rest else [0]
                    for layer, out in zip(places, blocks[bounds] if rest else blocks[bounds][None], strict=True):
                        out[...] = _cut(tensors[_name(arch, name, layer)], row, leaf.shape[rest:], bounds[rest:])
                return blocks[bounds]

            if sharding is None:
                return jnp.asarray(block((slice(None),) * len(leaf.shape)))
            return jax.make_array_from_callback(leaf.shape, sharding, block)

        shapes = abstract(config, param_dtype)
        on_mesh = () if jax.sharding.get_mesh().empty else (named_shardings(shapes, axes(config)),)
        return config, jax.tree_util.tree_map_with_path(load, shapes, *on_mesh)
