"""The peer of `bench/lm_throughput.py`: a plain PyTorch GPT with torch.compile, SDPA and fused AdamW.

Run as `python bench/peers/torch_gpt.py '{"embed_dim": 768, ...}'`; prints one JSON line.
"""

import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """Pre-norm attention and mlp without biases."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attn_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        """[B, T, D] -> [B, T, D]."""
        batch, length, width = x.shape
        qkv = self.qkv(self.attn_norm(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """Learned positions, tied head, mean cross entropy."""

    def __init__(
        self, vocab_size: int, seq_len: int, embed_dim: int, num_layers: int, num_heads: int
    ):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.positions = nn.Embedding(seq_len, embed_dim)
        self.blocks = nn.ModuleList([Block(embed_dim, num_heads) for _ in range(num_layers)])
        self.norm = nn.LayerNorm(embed_dim)
        for weight in (self.embedding.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens, targets):
        """Mean loss of targets [B, T]."""
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.view(-1))


def main(shape: dict) -> dict:
    """Times training steps; returns tokens/s, peak memory and the matmul rate of this card."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    batch, steps, warmup = shape.pop("batch_size"), shape.pop("steps"), shape.pop("warmup")
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    rate = 2 * 8192**3 / _median_seconds(lambda: a @ b, 10, 5)
    del a, b
    model = GPT(**shape).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    compiled = torch.compile(model)
    data = torch.randint(0, shape["vocab_size"], (4, 2, batch, shape["seq_len"]), device="cuda")
    count = 0

    def step():
        nonlocal count
        tokens, targets = data[count % 4]
        count += 1
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    compile_s = time.perf_counter() - start
    seconds = _median_seconds(step, steps, warmup)
    return {
        "tokens_per_s": batch * shape["seq_len"] / seconds,
        "compile_s": compile_s,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "matmul_flops_per_s": rate,
        "device": torch.cuda.get_device_name(),
        "version": torch.__version__,
    }


def _median_seconds(fn, count: int, warmup: int) -> float:
    """Median over ten groups of calls, by device events, so that launches stay queued as in training."""
    for _ in range(warmup):
        fn()
    torch.cuda.synchronize()
    times, group = [], max(1, count // 10)
    for _ in range(10):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(group):
            fn()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / group)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
