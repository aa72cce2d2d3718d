"""The peer of `bench/mixers.py`: torch's attention (SDPA) and LSTM in blocks of the same sizes.

Run as `python bench/peers/torch_mixers.py '{"embed_dim": 64, ...}'`; prints one JSON line. On a GPU training steps are
compiled by torch.compile and run under autocast where bfloat16 is asked for; on a CPU torch runs as it is.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

VOCAB = 256


class Attention(nn.Module):
    """Causal attention; with a cache [2, B, H, T, K], one token that is written to its last place."""

    def __init__(self, width: int, heads: int, length: int):
        super().__init__()
        self.heads, self.length = heads, length
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )

    def empty(self, like):
        """The cache of one row."""
        return like.new_zeros(2, 1, self.heads, self.length + 1, self.out.in_features // self.heads)

    def forward(self, x, cache=None):
        """[B, T, D] -> [B, T, D], cache."""
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if cache is not None:
            cache[0, :, :, -1:], cache[1, :, :, -1:] = k, v
            k, v = cache
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=cache is None)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width)), cache


class Lstm(nn.Module):
    """nn.LSTM of as many units as make it as large as attention: 4 (D n + n^2) + n D = 4 D^2."""

    def __init__(self, width: int, heads: int, length: int):
        super().__init__()
        units = round((-5 + 89**0.5) / 8 * width)
        self.lstm, self.out = (
            nn.LSTM(width, units, batch_first=True),
            nn.Linear(units, width, bias=False),
        )

    def empty(self, like):
        """The state of one row."""
        return (like.new_zeros(1, 1, self.out.in_features),) * 2

    def forward(self, x, cache=None):
        """[B, T, D] -> [B, T, D], state."""
        y, state = self.lstm(x, cache)
        return self.out(y), state


class Model(nn.Module):
    """Pre-norm blocks with a SwiGLU mlp between an embedding and a head."""

    def __init__(self, mixer, embed_dim, num_layers, num_heads, mlp_dim, length):
        super().__init__()
        self.embedding, self.head = (
            nn.Embedding(VOCAB, embed_dim),
            nn.Linear(embed_dim, VOCAB, bias=False),
        )
        self.mixers = nn.ModuleList(
            [mixer(embed_dim, num_heads, length) for _ in range(num_layers)]
        )
        self.norms = nn.ModuleList([nn.RMSNorm(embed_dim) for _ in range(2 * num_layers + 1)])
        self.up = nn.ModuleList(
            [nn.Linear(embed_dim, 2 * mlp_dim, bias=False) for _ in range(num_layers)]
        )
        self.down = nn.ModuleList(
            [nn.Linear(mlp_dim, embed_dim, bias=False) for _ in range(num_layers)]
        )

    def forward(self, tokens, caches=None):
        """Logits [B, T, V], caches."""
        x, after = self.embedding(tokens), []
        for i, mixer in enumerate(self.mixers):
            y, cache = mixer(self.norms[2 * i](x), None if caches is None else caches[i])
            x, after = x + y, [*after, cache]
            gate, up = self.up[i](self.norms[2 * i + 1](x)).chunk(2, -1)
            x = x + self.down[i](F.silu(gate) * up)
        return self.head(self.norms[-1](x)), after


def milliseconds(call, spend_s: float, device: str) -> float:
    """The mean ms of calls that fill `spend_s`, after two."""
    for _ in range(2):
        call()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    count, begin = 0, time.perf_counter()
    while not count or time.perf_counter() - begin < spend_s:
        call()
        wait()
        count += 1
    return 1e3 * (time.perf_counter() - begin) / count


def measure(mixer, size: dict) -> dict:
    """Times a training step and a decode step."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = size["dtype"] == "bfloat16"
    model = Model(
        mixer,
        embed_dim=size["embed_dim"],
        num_layers=size["num_layers"],
        num_heads=size["num_heads"],
        mlp_dim=size["mlp_dim"],
        length=size["length"],
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model) if device == "cuda" else model
    data = torch.randint(0, VOCAB, (size["rows"], size["length"] + 1), device=device)

    def train():
        with torch.autocast(device, dtype=torch.bfloat16, enabled=half):
            logits, _ = compiled(data[:, :-1])
        F.cross_entropy(logits.float().reshape(-1, VOCAB), data[:, 1:].reshape(-1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    found = {"train": milliseconds(train, size["spend_s"], device)}
    model = model.to(torch.bfloat16 if half else torch.float32)
    caches = [each.empty(model.embedding.weight) for each in model.mixers]
    with torch.inference_mode():
        found["decode"] = milliseconds(lambda: model(data[:1, :1], caches), size["spend_s"], device)
    kept = [part for cache in caches for part in (cache if isinstance(cache, tuple) else (cache,))]
    known = {"params": sum(p.numel() for p in model.parameters())}
    return found | {
        "known": known | {"cache_bytes": sum(p.numel() * p.element_size() for p in kept)}
    }


if __name__ == "__main__":
    torch.manual_seed(0)
    asked = json.loads(sys.argv[1])
    print(
        json.dumps(
            {f"torch {n}": measure(m, asked) for n, m in (("attention", Attention), ("lstm", Lstm))}
        )
    )
