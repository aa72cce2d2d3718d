"""The peer of `bench/layouts.py`: a Llama-like model under FSDP2, torch.compile, SDPA and fused AdamW.

Run as `python bench/peers/torch_fsdp.py '{"embed_dim": 2048, ...}'`; starts one process a device and prints one JSON
line. Parameters and optimizer are float32, products and the sums of gradients bfloat16, as ours are.
"""

import json
import socket
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

CUDA = torch.cuda.is_available()


def rotate(x, cos, sin):
    """Rotates the halves of the last dimension of x [B, H, T, K] by position, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Block(nn.Module):
    """Pre-norm grouped-query attention and gated mlp without biases."""

    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int):
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.attn_norm, self.mlp_norm = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x, cos, sin):
        """[B, T, D] -> [B, T, D]."""
        batch, length, width = x.shape
        h = self.attn_norm(x)
        q = self.q(h).view(batch, length, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(h).view(batch, length, 2, self.kv_heads, self.size).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Rotary positions, tied head, mean cross entropy."""

    def __init__(self, shape: dict):
        super().__init__()
        width, heads = shape["embed_dim"], shape["num_heads"]
        self.embedding = nn.Embedding(shape["vocab_size"], width)
        self.blocks = nn.ModuleList(
            [
                Block(width, heads, shape["num_kv_heads"], shape["mlp_dim"])
                for _ in range(shape["num_layers"])
            ]
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        half = width // heads // 2
        angles = torch.outer(
            torch.arange(shape["seq_len"]), shape["rope_theta"] ** (-torch.arange(half) / half)
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.tail = torch.compile(self._tail)

    def _tail(self, x, targets):
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))

    def forward(self, tokens, targets):
        """Mean loss of targets [B, T]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.tail(x, targets)


def sharded(shape: dict, device: torch.device, world: int) -> Llama:
    """Each block compiled and sharded, then the rest, as torchtitan does."""
    mesh = init_device_mesh(device.type, (world,))
    with device:
        model = Llama(shape)
    half = torch.bfloat16
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=half, cast_forward_inputs=False)
    for block in model.blocks:
        block.compile(fullgraph=True)
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=shape["gather_again"])
    # The embedding is the head too: it stays gathered from the first use to the last.
    return fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def worker(rank: int, world: int, port: int, shape: dict) -> None:
    """One process of the job; the first one prints the result."""
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    backend = "nccl" if CUDA else "gloo"
    dist.init_process_group(
        backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world
    )
    model = sharded(shape, device, world)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=CUDA
    )
    size = (4, 2, shape["rows"], shape["seq_len"])
    data = torch.randint(
        0, shape["vocab_size"], size, generator=torch.Generator().manual_seed(rank)
    ).to(device)
    count, loss = 0, torch.zeros(())

    def step():
        nonlocal count, loss
        tokens, targets = data[count % 4]
        count += 1
        loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    start = time.perf_counter()
    step()
    synchronize()
    compile_s = time.perf_counter() - start
    seconds = median_seconds(step, shape["steps"], shape["warmup"])
    if not torch.isfinite(loss):
        raise SystemExit("the loss is not finite")
    if rank == 0:
        result = {
            "tokens_per_s": world * shape["rows"] * shape["seq_len"] / seconds,
            "compile_s": compile_s,
            "peak_bytes": torch.cuda.max_memory_allocated() if CUDA else 0,
            "loss": float(loss.detach()),
            "parameters": sum(p.numel() for p in model.parameters()),
            "device": torch.cuda.get_device_name() if CUDA else "cpu",
            "version": f"torch {torch.__version__}",
        }
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def synchronize() -> None:
    """Waits for the device."""
    if CUDA:
        torch.cuda.synchronize()


def median_seconds(step, count: int, warmup: int) -> float:
    """Median over ten groups of steps, each waited for at its end only."""
    for _ in range(warmup):
        step()
    synchronize()
    dist.barrier()
    times, group = [], max(1, count // 10)
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(group):
            step()
        synchronize()
        times.append((time.perf_counter() - begin) / group)
    return sorted(times)[len(times) // 2]


def main(shape: dict) -> None:
    """Starts one process for each of `devices`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = shape["devices"]
    torch.multiprocessing.spawn(worker, args=(world, port, shape), nprocs=world)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
