"""How long does training stand still for a checkpoint, beside torch.distributed.checkpoint's asynchronous save?

    python bench/checkpoint_stall.py                          # 1.2e9 parameters: 14.4 GB of float32 with AdamW
    python bench/checkpoint_stall.py --params 2e6 --seq-len 64 # any machine: checks that the script runs
    python bench/checkpoint_stall.py --folder /scratch        # the disk to measure

Trains a decoder-only model, saves while it trains, with a snapshot on the device and with one on the host, and prints
step time without a save, the stall of the save, the slowdown of the steps while it is written, seconds until it is
whole, and bytes a second; the same for `async_save` of as many bytes from torch tensors, with matmuls as the steps,
where torch is installed. A line for one plain write of as many bytes says what the disk can do. Each measurement is a
process of its own. Writes JSON to bench/results/.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))


def model_config(num_params: float, seq_len: int, vocab_size: int):
    """Returns a model of about so many parameters: width 2048 where it is large, and as many layers as that takes."""
    from lm_models import lm_config

    width = 2048 if num_params > 5e8 else 512 if num_params > 3e7 else 128
    a_layer = 12 * width**2  # four projections, and a gated mlp of 8/3 of the width
    layers = max(1, round((num_params - 2 * vocab_size * width) / a_layer))
    return lm_config(
        vocab_size=vocab_size, max_seq_len=seq_len, num_layers=layers, embed_dim=width, num_heads=width // 64,
        mlp_dim=width * 8 // 3 // 64 * 64, tied=False, remat="names",
    )  # fmt: skip


def measure_ours(
    mode: str, params: float, seq_len: int, batch: int, vocab: int, seconds: float, folder: str
) -> dict:
    """Times jaxpar's optimizer step with and without a save under way."""
    import jax
    import jax.numpy as jnp

    from jaxpar.io import Checkpoints
    from jaxpar.lm import OptimizerConfig, Trainer, num_params
    from jaxpar.loop import compile_step
    from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh

    trainer = Trainer(
        model_config(params, seq_len, vocab), OptimizerConfig(learning_rate=1e-4), num_steps=10_000
    )
    key, device = jax.random.key(0), jax.devices()[0]
    with use_mesh(make_mesh(MeshSpec(data=1), [device])):
        shardings = named_shardings(jax.eval_shape(trainer.init, key), trainer.axes())
        state = jax.jit(trainer.init, out_shardings=shardings)(key)
        tokens = jax.random.randint(key, (2, batch, seq_len), 0, vocab, jnp.int32)
        inputs = {"tokens": tokens[0], "targets": tokens[1]}
        step = compile_step(trainer, state, inputs, axes=trainer.axes())
        checkpoints = Checkpoints(folder, keep=1, snapshot=mode, best_metric=None)
        checkpoints.prepare(state)
        number, before = 0, None

        def advance() -> None:
            """Sends a step off and waits for the one before it, as `fit` does."""
            nonlocal state, number, before
            state, info = step(key, jnp.int32(number), state, inputs)
            if before is not None:
                before.block_until_ready()
            number, before = number + 1, info["loss"]

        def save() -> float:
            before.block_until_ready()  # as `fit` has fetched the step's metrics by then
            return checkpoints.save(number, state, {}, {})

        result = timed(advance, save, lambda: checkpoints.is_saving, seconds)
        checkpoints.close()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    stats = device.memory_stats() or {}
    return result | {
        "side": f"jaxpar, snapshot on the {mode}",
        "bytes": size,
        "params": num_params(trainer.model),
        "peak_bytes": stats.get("peak_bytes_in_use", 0),
        "device": device.device_kind,
        "version": f"jax {jax.__version__}",
    }


def measure_torch(size: int, step_s: float, seconds: float, folder: str) -> dict:
    """Times the same save of tensors of `size` bytes, all of which each step of `step_s` seconds updates."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1
    )
    count = max(1, size // 2**28)  # tensors of about 256 MB
    state = {f"w{i}": torch.randn(size // count // 4, device=device) for i in range(count)}
    matrix = torch.randn(4096 if cuda else 256, 4096 if cuda else 256, device=device) / 64
    products, number, future = 1, 0, None

    def wait() -> None:
        if cuda:
            torch.cuda.synchronize()

    def advance() -> None:
        nonlocal number
        x = matrix
        for _ in range(products):
            x = torch.tanh(x @ matrix)
        torch._foreach_mul_(list(state.values()), 0.999)
        wait()
        number += 1

    def save() -> float:
        nonlocal future
        begin = time.perf_counter()
        writer = dcp.FileSystemWriter(f"{folder}/{number}", thread_count=8)
        for old in pathlib.Path(folder).iterdir():
            shutil.rmtree(old)  # one is kept, as on our side; there is none but the last
        future = dcp.async_save(state, storage_writer=writer)
        future = getattr(future, "upload_completion", future)
        return time.perf_counter() - begin

    advance()
    for _ in range(20):  # as many products as make a step as long as ours
        begin = time.perf_counter()
        advance()
        products = max(1, min(4 * products, int(products * step_s / (time.perf_counter() - begin))))
    result = timed(advance, save, lambda: not future.done(), seconds)
    future.result()
    dist.destroy_process_group()
    return result | {
        "side": "torch async_save",
        "bytes": sum(x.nbytes for x in state.values()),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else 0,
        "version": f"torch {torch.__version__}",
    }


def timed(advance, save, is_saving, seconds: float) -> dict:
    """Returns medians of the steps without and during a save, and what each save took, in seconds."""

    def clock() -> float:
        begin = time.perf_counter()
        advance()
        return time.perf_counter() - begin

    began = time.perf_counter()
    for _ in range(5):
        advance()
    alone = [clock() for _ in range(15)]
    step_s = statistics.median(alone)
    saves, during = [], []
    while (
        not saves
        or time.perf_counter() - began + 1.2 * saves[-1]["save_s"] < seconds
        and len(saves) < 3
    ):
        begin = time.perf_counter()
        stall, steps = save(), []
        while is_saving():
            steps.append(clock())
        save_s = time.perf_counter() - begin
        steps.append(clock())  # a snapshot on the device is paid for by the step behind it
        lost = stall + sum(steps) - len(steps) * step_s
        saves.append({"stall_s": stall, "save_s": save_s, "lost_s": lost})
        during += steps
        for _ in range(3):
            advance()
    return {
        "step_s": step_s,
        "during_s": statistics.median(during),
        "slowest_s": max(during),
        "saves": saves,
    }


def disk_rate(folder: str, size: int) -> float:
    """Returns the bytes a second of one plain write of at most 4 GB, brought to the disk."""
    block, path = os.urandom(2**26), pathlib.Path(folder) / "plain"
    blocks = max(1, min(size, 4 * 10**9) // len(block))
    begin = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(blocks):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    path.unlink()
    return blocks * len(block) / seconds


def child(request: dict) -> dict:
    """Runs one measurement in a process of its own, in a folder of its own, and returns its JSON."""
    with tempfile.TemporaryDirectory(dir=request["folder"]) as folder:
        line = [sys.executable, __file__, "--child", json.dumps(request | {"folder": folder})]
        out = subprocess.run(line, capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(f"{request} failed:\n{out.stderr[-3000:]}")
    return json.loads(out.stdout.strip().splitlines()[-1])


def main() -> None:
    """Parses flags, measures each side and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", type=float, default=1.2e9)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="on the disk to measure")
    parser.add_argument(
        "--seconds",
        type=float,
        default=30,
        help="a measurement makes no further save after this long",
    )
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        request = json.loads(args.child)
        print(
            json.dumps(
                {"ours": measure_ours, "torch": measure_torch}[request.pop("which")](**request)
            )
        )
        return
    size, free = int(12 * args.params), shutil.disk_usage(args.folder).free
    if free < 2.2 * size:  # the old checkpoint is deleted once the new one is whole
        raise SystemExit(
            f"{args.folder} has {free / 1e9:.1f} GB free and two checkpoints of {size / 1e9:.1f} GB must fit; "
            "give another --folder or fewer --params."
        )
    plain = disk_rate(args.folder, size)
    common = dict(folder=args.folder, seconds=args.seconds)
    shape = dict(params=args.params, seq_len=args.seq_len, batch=args.batch, vocab=args.vocab)
    rows = [child(dict(which="ours", mode=mode, **shape, **common)) for mode in ("device", "host")]
    if not args.no_peer and importlib.util.find_spec("torch"):
        request = dict(which="torch", size=rows[0]["bytes"], step_s=rows[0]["step_s"])
        rows.append(child(request | common))
    report(rows, plain)


def report(rows: list[dict], plain: float) -> None:
    """Prints the table, and writes JSON."""
    print(
        "| side | GB | step ms | stall ms | stall / step | steps in a save | lost ms | save s | GB/s | peak GiB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        medians = (
            statistics.median(save[name] for save in row["saves"])
            for name in ("stall_s", "save_s", "lost_s")
        )
        stall, save_s, lost = medians
        print(
            f"| {row['side']} | {row['bytes'] / 1e9:.2f} | {1e3 * row['step_s']:.1f} | {1e3 * stall:.1f} | "
            f"{stall / row['step_s']:.2f} | x{row['during_s'] / row['step_s']:.2f} | {1e3 * lost:.0f} | {save_s:.1f} | "
            f"{row['bytes'] / save_s / 1e9:.2f} | {row['peak_bytes'] / 2**30:.1f} |"
        )
    versions = ", ".join(dict.fromkeys(row["version"] for row in rows))
    print(
        f"\n{rows[0]['device']}, {versions}, {rows[0]['params']:,} parameters, plain write {plain / 1e9:.2f} GB/s"
    )
    print(
        "Medians over the saves. Lost: the stall, and what the steps until the save is whole take more than alone."
    )
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / "checkpoint_stall.json").write_text(
        json.dumps({"plain_bytes_per_s": plain, "rows": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
