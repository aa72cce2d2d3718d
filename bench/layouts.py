"""How fast do several GPUs of one host train a language model, beside PyTorch's FSDP2?

    python bench/layouts.py --out layouts.json                        # all GPUs: fsdp and tensor, and one GPU alone
    python bench/layouts.py --layout 1,4,1/zero2 --layout 1,2,2/sequence --rounds 5 --seconds 1500
    JAX_PLATFORMS=cpu python bench/layouts.py --case tiny --devices 2  # any machine: checks that the script runs

A layout is data,fsdp,tensor, and after a slash the layout's name if it is not zero3. FSDP2 runs twice: gathering
weights again in the backward pass (zero3) and keeping them (zero2). The batch is fixed a device, so one GPU against N
gives the scaling efficiency, and every layout of N devices trains on the same global batch. Every measurement is a
process of its own; both sides take turns, and a round starts only while `--seconds` leaves time for it. The JSON is
written after each measurement.
"""

import argparse
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
PEAK = 989.4e12  # dense bf16 FLOP/s of an H100 or H200 SXM

CASES = {
    "1b": dict(
        vocab_size=32768,
        seq_len=2048,
        embed_dim=2048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=8,
        mlp_dim=8192,
    ),
    "tiny": dict(
        vocab_size=512,
        seq_len=64,
        embed_dim=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=128,
    ),
}


def model_config(shape: dict):
    """Returns our model of the peer's shape."""
    from lm_models import lm_config

    names = (
        "vocab_size",
        "embed_dim",
        "num_layers",
        "num_heads",
        "num_kv_heads",
        "mlp_dim",
        "rope_theta",
        "remat",
    )
    return lm_config(
        **{name: shape[name] for name in names},
        max_seq_len=shape["seq_len"], tied=True, scan_layers=False, low_logits=True, loss_chunk=32768,
    )  # fmt: skip


def measure_ours(shape: dict) -> dict:
    """Times jaxpar's optimizer step on a layout: clipping, finiteness check and metrics included."""
    from jaxpar.mesh import (
        MeshSpec,
        make_mesh,
        named_shardings,
        rules_from,
        simulate_devices,
        use_mesh,
    )

    simulate_devices(shape["devices"])  # of the CPU only
    import jax
    import jax.numpy as jnp
    from lm_models import Training

    from jaxpar.aot import hlo
    from jaxpar.lm import OptimizerConfig, Trainer, flops_per_token
    from jaxpar.lm.params import num_params

    trainer = Trainer(model_config(shape), OptimizerConfig(learning_rate=1e-4), num_steps=10_000)
    key, devices = jax.random.key(0), jax.devices()[: shape["devices"]]
    sizes, _, name = shape["layout"].partition("/")
    data, fsdp, tensor = map(int, sizes.split(","))
    mesh = make_mesh(MeshSpec(data=data, fsdp=fsdp, tensor=tensor), devices)
    with use_mesh(mesh, rules_from(layout=name or "zero3")):
        state = jax.jit(
            trainer.init,
            out_shardings=named_shardings(jax.eval_shape(trainer.init, key), trainer.axes()),
        )(key)
        tokens = jax.random.randint(
            key,
            (4, 2, shape["rows"] * len(devices), shape["seq_len"]),
            0,
            shape["vocab_size"],
            jnp.int32,
        )
        rows = {"tokens": ("batch", None), "targets": ("batch", None)}
        batches = [{"tokens": pair[0], "targets": pair[1]} for pair in tokens]
        batches = [jax.device_put(batch, named_shardings(batch, rows)) for batch in batches]
        training = Training(trainer, key, state, batches)
        seconds = training.median_s(shape["warmup"], shape["steps"])
    sent: dict[str, int] = {}
    for collective in hlo.collectives(training.step.as_text(), mesh):
        where, what = "+".join(collective.axes or ("?",)), "+".join(sorted(set(collective.dtypes)))
        kind = f"{collective.kind} over {where} of {what}"
        sent[kind] = sent.get(kind, 0) + collective.bytes * collective.trips
    return {
        "tokens_per_s": tokens[0, 0].size / seconds,
        "compile_s": training.compile_s,
        "peak_bytes": max(
            (device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices
        ),
        "loss": float(training.losses[-1]),
        "parameters": num_params(trainer.model),
        "flops_per_token": flops_per_token(trainer.model, shape["seq_len"]),
        "collectives": sent,
        "device": devices[0].device_kind,
        "version": f"jax {jax.__version__}",
    }


def child(arguments: list[str], caches: str) -> dict:
    """Runs one measurement in a process of its own and returns its JSON, or why it failed."""
    # NVLink multicast stays off unless asked for: it can take the GPUs of a shared host down.
    env = {"NCCL_NVLS_ENABLE": "0"} | os.environ
    env |= {
        "JAX_COMPILATION_CACHE_DIR": f"{caches}/jax",
        "TORCHINDUCTOR_CACHE_DIR": f"{caches}/torch",
    }
    out = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=env)
    lines = [line for line in out.stdout.splitlines() if line.startswith("{")]
    return (
        json.loads(lines[-1])
        if not out.returncode and lines
        else {"error": out.stderr[-3000:] or "no result"}
    )


def count_of(layout: str) -> int:
    """Returns the devices that a layout needs."""
    return math.prod(int(size) for size in layout.partition("/")[0].split(","))


def count_devices() -> int:
    """Asks a process of its own, so that this one holds no GPU."""
    command = [sys.executable, "-c", "import jax; print(jax.device_count())"]
    return int(
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    )


def main() -> None:
    """Parses flags, measures both sides in turns and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=list(CASES), default="1b")
    parser.add_argument("--devices", type=int, default=0, help="by default all")
    parser.add_argument(
        "--layout",
        action="append",
        help="data,fsdp,tensor[/name]; by default fsdp (both ways) and tensor over all",
    )
    parser.add_argument("--rows", type=int, default=8, help="sequences a device")
    parser.add_argument("--remat", default="none", help="ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--seconds", type=float, default=330, help="no measurement starts that would end later"
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "layouts.json")
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        print(json.dumps(measure_ours(json.loads(args.ours))))
        return
    rows = measure(args, args.devices or count_devices())
    report(rows)
    if any("error" in row["result"] for row in rows):
        sys.exit(1)


def measure(args: argparse.Namespace, devices: int) -> list[dict]:
    """Measures every layout and the peer in turns, round after round."""
    layouts = args.layout or [f"1,{devices},1", f"1,{devices},1/zero2", f"1,1,{devices}"]
    plan: list[tuple[str, int, str]] = []
    for count in sorted({count_of(layout) for layout in layouts} | {1}):
        # The peer of each number of devices stands beside the layouts of that number.
        if not args.no_peer:
            plan += [
                ("torch", count, name)
                for name in (("zero3",) if count == 1 else ("zero3", "zero2"))
            ]
        plan += [
            ("jaxpar", count, layout) for layout in ("1,1,1", *layouts) if count_of(layout) == count
        ]
    shape = CASES[args.case] | {
        name: getattr(args, name) for name in ("rows", "steps", "warmup", "remat")
    }
    shape |= {"rope_theta": 500000.0}
    start, rows, took = time.monotonic(), [], {}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as caches:
        for number in range(args.rounds):
            for side, count, layout in plan:
                began = time.monotonic()
                if (
                    began - start + took.get((side, layout, count), max(took.values(), default=0))
                    > args.seconds
                ):
                    continue
                request = json.dumps(
                    shape | {"devices": count, "layout": layout, "gather_again": layout == "zero3"}
                )
                arguments = [str(HERE / "peers" / "torch_fsdp.py"), request]
                result = child(
                    arguments if side == "torch" else [__file__, "--ours", request], caches
                )
                took[side, layout, count] = time.monotonic() - began
                rows.append(
                    dict(
                        side=side,
                        devices=count,
                        layout=layout,
                        round=number,
                        shape=shape,
                        result=result,
                    )
                )
                args.out.write_text(json.dumps(rows, indent=1))
                speed = (
                    f"{result['tokens_per_s']:,.0f} tokens/s"
                    if "error" not in result
                    else result["error"]
                )
                print(f"# {side} {layout} on {count}: {speed}", file=sys.stderr, flush=True)
    return rows


def report(rows: list[dict]) -> None:
    """Prints medians over the rounds, ratios to the peer on as many devices, and scaling against one device times N."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        if "error" not in row["result"]:
            name = f"FSDP2 {row['layout']}" if row["side"] == "torch" else row["layout"]
            groups.setdefault((row["devices"], row["side"], name), []).append(row["result"])
    median = {
        key: statistics.median(r["tokens_per_s"] for r in results)
        for key, results in groups.items()
    }
    flops = next(
        (
            r["flops_per_token"]
            for results in groups.values()
            for r in results
            if "flops_per_token" in r
        ),
        0,
    )
    print(
        "| devices | side | layout | tokens/s (min..max) | of torch's best | scaling | MFU | peak GiB | compile s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for (count, side, name), results in sorted(groups.items()):
        speeds, speed = [r["tokens_per_s"] for r in results], median[count, side, name]
        peer = max(
            (speed for key, speed in median.items() if key[:2] == (count, "torch")), default=None
        )
        alone = median.get((1, side, "FSDP2 zero3" if side == "torch" else "1,1,1"))
        ratio, scaling = (
            f"{speed / other:.3f}" if other else "" for other in (peer, alone and alone * count)
        )
        span = f"{speed:,.0f} ({min(speeds):,.0f}..{max(speeds):,.0f})"
        print(
            f"| {count} | {side} | {name} | {span} | {ratio} | {scaling} | "
            f"{flops * speed / count / PEAK:.3f} | {max(r['peak_bytes'] for r in results) / 2**30:.1f} | "
            f"{results[0]['compile_s']:.0f} |"
        )
    versions = sorted({r["version"] for results in groups.values() for r in results})
    sizes = sorted(
        {f"{r['parameters']:,} parameters" for results in groups.values() for r in results}
    )
    devices = sorted({r["device"] for results in groups.values() for r in results})
    print(
        f"\n{', '.join([*devices, *versions, *sizes])}; {max((len(r) for r in groups.values()), default=0)} rounds"
    )


if __name__ == "__main__":
    main()
