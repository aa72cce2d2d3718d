"""Llama, Mistral, Qwen 2 and 3, Gemma 2 and 3 and Phi-3 in slow NumPy, in float64, from names and config.json alone.

Documents may share a row: positions then count from each one's start, and no token sees another
document.
"""

import json
import math

import numpy as np
from safetensors.numpy import load_file


def turned(x, place, theta, width, factor=1.0):
    """The first `width` numbers of one head's vector at one place, turned in pairs half of them apart."""
    out, half = x.copy(), width // 2
    for i in range(half):
        angle = place * theta ** (-2 * i / width) / factor
        a, b = x[i], x[i + half]
        out[i], out[i + half] = (
            a * math.cos(angle) - b * math.sin(angle),
            b * math.cos(angle) + a * math.sin(angle),
        )
    return out


def cap(x, at):
    return at * np.tanh(x / at) if at else x


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def layer_windows(cfg):
    """The published rule of each architecture, unless layer_types says it."""
    kind, layers, window = cfg["model_type"], cfg["num_hidden_layers"], cfg.get("sliding_window")
    if kind in ("mistral", "phi3"):
        return [window] * layers
    if kind == "llama" or not cfg.get("use_sliding_window", True):
        return [None] * layers
    return [window if name == "sliding_attention" else None for name in cfg["layer_types"]]


def kin_logits(folder, tokens, starts=None):
    """Logits [B, T, V]; `starts` bool [B, T] says where documents begin."""
    cfg = json.loads((folder / "config.json").read_text())
    w = {}
    for path in folder.glob("*.safetensors"):
        w |= {name: x.astype(np.float64) for name, x in load_file(path).items()}
    starts = np.zeros(tokens.shape, bool) if starts is None else starts
    return np.stack(
        [one_row(cfg, w, row, begin) for row, begin in zip(tokens, starts, strict=True)]
    )


def one_row(cfg, w, tokens, starts):
    kind, heads, groups = cfg["model_type"], cfg["num_attention_heads"], cfg["num_key_value_heads"]
    gemma, width = kind.startswith("gemma"), cfg["head_dim"]
    act = gelu if gemma else silu

    def rms(x, name):
        scale = w[name + ".weight"] + 1 if gemma else w[name + ".weight"]
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + cfg["rms_norm_eps"]) * scale

    def linear(x, name):
        return x @ w[name + ".weight"].T + w.get(name + ".bias", 0.0)

    first, firsts = 0, []
    for t in range(len(tokens)):
        first = t if starts[t] else first
        firsts.append(first)
    x = w["model.embed_tokens.weight"][tokens]
    x = x * math.sqrt(cfg["hidden_size"]) if gemma else x
    for layer, window in enumerate(layer_windows(cfg)):
        at = f"model.layers.{layer}."
        h = rms(x, at + "input_layernorm")
        if kind == "phi3":
            joined = linear(h, at + "self_attn.qkv_proj")
            q, k, v = np.split(joined, [heads * width, (heads + groups) * width], axis=1)
        else:
            q, k, v = (linear(h, f"{at}self_attn.{name}_proj") for name in "qkv")
        q, k, v = (part.reshape(len(tokens), -1, width) for part in (q, k, v))
        if kind in ("qwen3", "gemma3_text"):
            q, k = rms(q, at + "self_attn.q_norm"), rms(k, at + "self_attn.k_norm")
        theta, scaling = cfg["rope_theta"], cfg["rope_scaling"] or {}
        factor = scaling.get("factor", 1.0)
        if kind == "gemma3_text" and window:
            theta, factor = cfg["rope_local_base_freq"], 1.0
        part = int(width * cfg.get("partial_rotary_factor", 1.0))
        root = math.sqrt(cfg["query_pre_attn_scalar"] if gemma else width)
        mixed = np.zeros((len(tokens), heads, width))
        for n in range(heads):
            g = n * groups // heads
            turn = [turned(k[s, g], s - firsts[s], theta, part, factor) for s in range(len(tokens))]
            for t in range(len(tokens)):
                query = turned(q[t, n], t - firsts[t], theta, part, factor)
                seen = [s for s in range(firsts[t], t + 1) if not window or t - s < window]
                scores = cap(
                    np.array([query @ turn[s] for s in seen]) / root,
                    cfg.get("attn_logit_softcapping"),
                )
                weights = np.exp(scores - scores.max())
                mixed[t, n] = (weights / weights.sum()) @ v[seen, g]
        out = linear(mixed.reshape(len(tokens), -1), at + "self_attn.o_proj")
        x = x + (rms(out, at + "post_attention_layernorm") if gemma else out)
        h = rms(x, at + ("pre_feedforward_layernorm" if gemma else "post_attention_layernorm"))
        if kind == "phi3":
            gate, up = np.split(linear(h, at + "mlp.gate_up_proj"), 2, axis=1)
        else:
            gate, up = (linear(h, f"{at}mlp.{name}_proj") for name in ("gate", "up"))
        out = linear(act(gate) * up, at + "mlp.down_proj")
        x = x + (rms(out, at + "post_feedforward_layernorm") if gemma else out)
    head = "model.embed_tokens.weight" if cfg["tie_word_embeddings"] else "lm_head.weight"
    return cap(rms(x, "model.norm") @ w[head].T, cfg.get("final_logit_softcapping"))
