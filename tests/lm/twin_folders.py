"""Llama, GPT-2, Mixtral, Qwen3-MoE and Mamba-2 in slow NumPy, in float64, from the tensors' Hugging Face names."""

import json
import math

import numpy as np
from safetensors.numpy import load_file

SIZES = dict(
    vocab_size=16,
    max_seq_len=32,
    num_layers=2,
    embed_dim=8,
    num_heads=4,
    mlp_dim=12,
    dtype="float32",
)
"""Sizes of models that folders are written of."""


def causal_attention(q, k, v):
    out = np.zeros_like(q)
    for t in range(len(q)):
        scores = np.array([q[t] @ k[s] for s in range(t + 1)]) / math.sqrt(q.shape[1])
        weights = np.exp(scores - scores.max())
        out[t] = (weights / weights.sum()) @ v[: t + 1]
    return out


def rotate(x, theta, scaling):
    width, out = x.shape[1], x.copy()
    for t in range(len(x)):
        for i in range(width // 2):
            freq = theta ** (-2 * i / width)
            if scaling:
                wavelength, old = 2 * math.pi / freq, scaling["original_max_position_embeddings"]
                low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
                if wavelength > old / low:
                    freq = freq / scaling["factor"]
                elif wavelength > old / high:
                    smooth = (old / wavelength - low) / (high - low)
                    freq = (1 - smooth) * freq / scaling["factor"] + smooth * freq
            a, b = x[t, i], x[t, i + width // 2]
            c, s = math.cos(t * freq), math.sin(t * freq)
            out[t, i], out[t, i + width // 2] = a * c - b * s, b * c + a * s
    return out


def swiglu(x, gate, up, down):
    inside = x @ gate.T
    return inside / (1 + np.exp(-inside)) * (x @ up.T) @ down.T


def mixture(x, logits, k, is_share, experts):
    """One token after the other, each by its k experts."""
    out = np.zeros_like(x)
    for t, row in enumerate(logits):
        scores = np.exp(row - row.max())
        scores = scores / scores.sum()
        chosen = np.argsort(-scores, kind="stable")[:k]
        total = scores[chosen].sum() if is_share else 1.0
        for e in chosen:
            out[t] += scores[e] / total * swiglu(x[t], *experts[e])
    return out


def experts_twin(cfg, w, at, x):
    """The names of either architecture."""
    if cfg["model_type"] == "mixtral":
        router, each, names = "block_sparse_moe", "block_sparse_moe.experts", ("w1", "w3", "w2")
        num, is_share = cfg["num_local_experts"], True
    else:
        router, each, names = "mlp", "mlp.experts", ("gate_proj", "up_proj", "down_proj")
        num, is_share = cfg["num_experts"], cfg["norm_topk_prob"]
    experts = [[w[f"{at}{each}.{e}.{name}.weight"] for name in names] for e in range(num)]
    return mixture(
        x, x @ w[f"{at}{router}.gate.weight"].T, cfg["num_experts_per_tok"], is_share, experts
    )


def llama_twin(cfg, w, tokens):
    heads, groups = cfg["num_attention_heads"], cfg["num_key_value_heads"]

    def rms(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg["rms_norm_eps"]) * w[name]

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(cfg["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        h = rms(x, at + "input_layernorm.weight")
        q = np.split(linear(h, at + "self_attn.q_proj"), heads, axis=1)
        k = np.split(linear(h, at + "self_attn.k_proj"), groups, axis=1)
        v = np.split(linear(h, at + "self_attn.v_proj"), groups, axis=1)
        if at + "self_attn.q_norm.weight" in w:
            q, k = (
                [rms(x, f"{at}self_attn.{n}_norm.weight") for x in parts]
                for n, parts in (("q", q), ("k", k))
            )
        q, k = (
            [rotate(part, cfg["rope_theta"], cfg["rope_scaling"]) for part in parts]
            for parts in (q, k)
        )
        mixed = [
            causal_attention(q[n], k[n * groups // heads], v[n * groups // heads])
            for n in range(heads)
        ]
        x = x + linear(np.concatenate(mixed, axis=1), at + "self_attn.o_proj")
        h = rms(x, at + "post_attention_layernorm.weight")
        if cfg["model_type"] != "llama":
            x = x + experts_twin(cfg, w, at, h)
            continue
        gate = linear(h, at + "mlp.gate_proj")
        x = x + linear(
            gate / (1 + np.exp(-gate)) * linear(h, at + "mlp.up_proj"), at + "mlp.down_proj"
        )
    head = "model.embed_tokens.weight" if cfg["tie_word_embeddings"] else "lm_head.weight"
    return rms(x, "model.norm.weight") @ w[head].T


def gpt2_twin(cfg, w, tokens):
    def layer_norm(x, name):
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg["layer_norm_epsilon"])
        return x * w[name + ".weight"] + w[name + ".bias"]

    def conv1d(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    def gelu(x):
        if cfg["activation_function"] == "gelu_new":
            return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))

    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: len(tokens)]
    for layer in range(cfg["n_layer"]):
        at = f"transformer.h.{layer}."
        parts = np.split(conv1d(layer_norm(x, at + "ln_1"), at + "attn.c_attn"), 3, axis=1)
        q, k, v = (np.split(part, cfg["n_head"], axis=1) for part in parts)
        mixed = [causal_attention(*qkv) for qkv in zip(q, k, v, strict=True)]
        x = x + conv1d(np.concatenate(mixed, axis=1), at + "attn.c_proj")
        x = x + conv1d(gelu(conv1d(layer_norm(x, at + "ln_2"), at + "mlp.c_fc")), at + "mlp.c_proj")
    return layer_norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T


def silu(x):
    return x / (1 + np.exp(-x))


def state_space(cfg, w, at, x):
    """One token, one head after the other, with a state [N, V] each."""
    heads, size, states, groups = (
        cfg[key] for key in ("num_heads", "head_dim", "state_size", "n_groups")
    )
    width, taps = heads * size, w[at + "conv1d.weight"].shape[-1]
    z, line, dt = np.split(
        x @ w[at + "in_proj.weight"].T, [width, 2 * (width + groups * states)], axis=1
    )
    inside = np.concatenate([np.zeros((taps - 1, line.shape[1])), line])
    convolved = [
        (inside[t : t + taps].T * w[at + "conv1d.weight"][:, 0]).sum(-1) for t in range(len(x))
    ]
    line = silu(np.stack(convolved) + w[at + "conv1d.bias"])
    out, matrices = np.zeros((len(x), width)), np.zeros((heads, states, size))
    for t in range(len(x)):
        values, keys, queries = np.split(line[t], [width, width + groups * states])
        for h in range(heads):
            group, mine = h * groups // heads, slice(h * size, (h + 1) * size)
            k, q = (row[group * states : (group + 1) * states] for row in (keys, queries))
            step = np.log1p(np.exp(dt[t, h] + w[at + "dt_bias"][h]))
            matrices[h] = np.exp(-np.exp(w[at + "A_log"][h]) * step) * matrices[
                h
            ] + step * np.outer(k, values[mine])
            out[t, mine] = q @ matrices[h] + w[at + "D"][h] * values[mine]
    out = (out * silu(z)).reshape(len(x), groups, -1)
    out = out / np.sqrt((out**2).mean(-1, keepdims=True) + cfg["layer_norm_epsilon"])
    return (out.reshape(len(x), width) * w[at + "norm.weight"]) @ w[at + "out_proj.weight"].T


def mamba2_twin(cfg, w, tokens):
    def rms(x, name):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg["layer_norm_epsilon"]) * w[name]

    x = w["backbone.embeddings.weight"][tokens]
    for layer in range(cfg["num_hidden_layers"]):
        at = f"backbone.layers.{layer}."
        x = x + state_space(cfg, w, at + "mixer.", rms(x, at + "norm.weight"))
    head = "backbone.embeddings.weight" if cfg["tie_word_embeddings"] else "lm_head.weight"
    return rms(x, "backbone.norm_f.weight") @ w[head].T


TWINS = {"gpt2": gpt2_twin, "mamba2": mamba2_twin}


def twin_logits(folder, tokens):
    cfg = json.loads((folder / "config.json").read_text())
    w = {name: x.astype(np.float64) for name, x in load_file(folder / "model.safetensors").items()}
    twin = TWINS.get(cfg["model_type"], llama_twin)
    return np.stack([twin(cfg, w, row) for row in tokens])
