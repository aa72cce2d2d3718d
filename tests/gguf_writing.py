"""Writes GGUF files of Hugging Face folders by the package `gguf`, as llama.cpp's converter does."""

import json
import string

import gguf
import numpy as np
from safetensors.numpy import load_file

ARCHITECTURES = {
    "llama": ("llama", gguf.MODEL_ARCH.LLAMA),
    "qwen2": ("qwen2", gguf.MODEL_ARCH.QWEN2),
    "qwen3": ("qwen3", gguf.MODEL_ARCH.QWEN3),
    "gemma2": ("gemma2", gguf.MODEL_ARCH.GEMMA2),
    "gemma3_text": ("gemma3", gguf.MODEL_ARCH.GEMMA3),
    "phi3": ("phi3", gguf.MODEL_ARCH.PHI3),
}
KINDS = gguf.GGMLQuantizationType


def permuted(weights, heads):
    """Rows of queries and keys in the order of llama.cpp."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def stored_tensor(name, tensor, config):
    """A tensor as the converter has it, before it is quantised."""
    tensor = tensor.astype(np.float32)
    if config["model_type"] == "llama" and "self_attn.q_proj" in name:
        return permuted(tensor, config["num_attention_heads"])
    if config["model_type"] == "llama" and "self_attn.k_proj" in name:
        return permuted(tensor, config["num_key_value_heads"])
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return tensor + 1
    return tensor


def write_gguf(folder, path, kind="F32", tokenizer=None, more=(), without=(), factors=None):
    """Writes the model of a folder; matrices have a type of numbers, all else is float32.

    Args:
      folder: As `to_hf` writes it.
      path: File to write.
      kind: Type of matrices.
      tokenizer: Function that adds a tokenizer to the writer; None for `byte_tokens`.
      more: Functions that add metadata.
      without: Names of keys that are left out.
      factors: Tensor of rope factors.
    """
    config = json.loads((folder / "config.json").read_text())
    arch, known = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, arch)
    size = config["head_dim"]
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": size,
        "attention.value_length": size,
        "vocab_size": config["vocab_size"],
        "rope.dimension_count": round(size * config.get("partial_rotary_factor", 1)),
    }
    for name, value in numbers.items():
        if name not in without:
            writer.add_uint32(f"{arch}.{name}", value)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "rope.freq_base" not in without:
        writer.add_rope_freq_base(config["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    (tokenizer or byte_tokens(config["vocab_size"]))(writer)
    for add in more:
        add(writer)
    names = gguf.get_tensor_name_map(known, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        add_tensor(writer, found, stored_tensor(name, tensor, config), kind)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer, name, numbers, kind):
    """Adds a tensor to a file; a matrix in a type of numbers."""
    if numbers.ndim == 1 or kind == "F32":
        writer.add_tensor(name, numbers)
    elif kind == "F16":
        writer.add_tensor(name, numbers.astype(np.float16))
    else:
        packed = gguf.quants.quantize(numbers, KINDS[kind])
        writer.add_tensor(name, packed, raw_dtype=KINDS[kind])


def byte_tokens(count):
    """A byte-level BPE without merges: a space, letters, others, and last the end of a text."""
    tokens = ["Ġ", *string.ascii_lowercase, *(f"t{number}" for number in range(count))]

    def add(writer):
        add_bpe(writer, [*tokens[: count - 1], "<end>"], [], {count - 1: 3})
        writer.add_eos_token_id(count - 1)

    return add


def add_bpe(writer, tokens, merges, types=(), pre="gpt-2"):
    """Adds a byte-level BPE; `types` has the types of tokens that are not normal ones."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([dict(types).get(number, 1) for number in range(len(tokens))])
    writer.add_token_merges(merges)


def as_read(folder, kind):
    """Tensors of a folder by name, quantised in the file's order and dequantised."""
    config = json.loads((folder / "config.json").read_text())
    out = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.ndim > 1 and kind != "F32":
            rows = gguf.quants.quantize(tensor.astype(np.float32), KINDS[kind])
            tensor = gguf.quants.dequantize(rows, KINDS[kind])
        elif config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
            tensor = (tensor + np.float32(1)) - np.float32(1)
        out[name] = tensor
    return out
