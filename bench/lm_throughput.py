"""How fast does one GPU train a language model, beside torch.compile + SDPA + fused AdamW?

    python bench/lm_throughput.py                      # both cases, three interleaved rounds
    python bench/lm_throughput.py --case gpt2 --rounds 1 --override scan_layers=true
    python bench/lm_throughput.py --case tiny --no-peer # any machine: checks that the script runs

Every measurement is a process of its own, so that neither side holds memory of the other. Prints a table of
tokens/s, model FLOP utilisation (with and without the causal half of attention), share of the matmul rate
measured in the same process, peak memory and compile time, and writes JSON to bench/results/.
"""

import argparse
import collections
import json
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
    "gpt2": dict(
        vocab_size=50304, seq_len=1024, embed_dim=768, num_layers=12, num_heads=12, batch_size=32
    ),
    "0.9b": dict(
        vocab_size=50304, seq_len=2048, embed_dim=2048, num_layers=16, num_heads=16, batch_size=8
    ),
    "gpt2-b64": dict(
        vocab_size=50304, seq_len=1024, embed_dim=768, num_layers=12, num_heads=12, batch_size=64
    ),
    "tiny": dict(vocab_size=512, seq_len=64, embed_dim=64, num_layers=2, num_heads=2, batch_size=4),
}


def model_config(shape: dict, overrides: dict):
    """Returns our model of the peer's shape."""
    from lm_models import lm_config

    base = dict(
        vocab_size=shape["vocab_size"], max_seq_len=shape["seq_len"], num_layers=shape["num_layers"],
        embed_dim=shape["embed_dim"], num_heads=shape["num_heads"], mlp_dim=4 * shape["embed_dim"],
        norm="layer", positions="learned", activation="gelu", tied=True,
        scan_layers=False, low_logits=True, loss_chunk=32768,
    )  # fmt: skip
    return lm_config(**(base | overrides))


def measure_ours(shape: dict, overrides: dict, profile: bool) -> dict:
    """Times jaxpar's optimizer step: clipping, finiteness check and metrics included."""
    import jax
    import jax.numpy as jnp
    from lm_models import Training

    from jaxpar.lm import OptimizerConfig, Trainer, flops_per_token
    from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh

    trainer = Trainer(
        model_config(shape, overrides), OptimizerConfig(learning_rate=1e-4), num_steps=10_000
    )
    key, device = jax.random.key(0), jax.devices()[0]
    with use_mesh(make_mesh(MeshSpec(data=1), [device])):
        shardings = named_shardings(jax.eval_shape(trainer.init, key), trainer.axes())
        state = jax.jit(trainer.init, out_shardings=shardings)(key)
        size = (4, 2, shape["batch_size"], shape["seq_len"])
        data = jax.random.randint(key, size, 0, shape["vocab_size"], jnp.int32)
        batches = [{"tokens": pair[0], "targets": pair[1]} for pair in data]
        training = Training(trainer, key, state, batches)
        seconds = training.median_s(shape["warmup"], shape["steps"])
        kernels = _kernel_times(lambda: training.group(3)) if profile else []
        stats = device.memory_stats() or {}
    tokens = shape["batch_size"] * shape["seq_len"]
    counts = {f"flops{'_causal' if causal else ''}": flops_per_token(trainer.model, shape["seq_len"], causal)
              for causal in (False, True)}  # fmt: skip
    return {
        "tokens_per_s": tokens / seconds,
        "compile_s": training.compile_s,
        "peak_bytes": stats.get("peak_bytes_in_use", 0),
        "matmul_flops_per_s": _matmul_rate(),
        "device": device.device_kind,
        "version": f"jax {jax.__version__}",
        "kernels": kernels,
        **counts,
    }


def _matmul_rate(size: int = 8192) -> float:
    """FLOP/s of a bf16 product of random matrices, median of ten."""
    import jax
    import jax.numpy as jnp

    size = size if jax.default_backend() != "cpu" else 256
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(a, a))
    times = []
    for _ in range(10):
        begin = time.perf_counter()
        for _ in range(5):
            out = product(a, a)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / 5)
    return 2 * size**3 / statistics.median(times)


def _kernel_times(run) -> list:
    """Profiles `run` and returns the 40 longest kernels as (total ms, count, name)."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        file = next(pathlib.Path(folder).rglob("*.xplane.pb"))
        data = jax.profiler.ProfileData.from_file(str(file))
        total, calls = collections.Counter(), collections.Counter()
        for plane in data.planes:
            if "GPU" not in plane.name:
                continue
            for line in plane.lines:
                if "Stream" in line.name:
                    for event in line.events:
                        total[event.name] += event.duration_ns / 1e6
                        calls[event.name] += 1
    return [(round(ms, 3), calls[name], name[:110]) for name, ms in total.most_common(40)]


def child(arguments: list[str]) -> dict:
    """Runs one measurement in a process of its own and returns its JSON."""
    out = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    if out.returncode:
        raise SystemExit(f"{' '.join(arguments)[:200]} failed:\n{out.stderr[-3000:]}")
    return json.loads(out.stdout.strip().splitlines()[-1])


def main() -> None:
    """Parses flags, measures both sides in turns and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--profile", action="store_true", help="list our longest kernels")
    parser.add_argument(
        "--override", action="append", default=[], help="a field of LMConfig, as name=value"
    )
    parser.add_argument("--ours", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.ours:
        request = json.loads(args.ours)
        print(json.dumps(measure_ours(**request)))
        return
    overrides = {
        k: json.loads(v) if v[0] in "0123456789tf" else v
        for k, v in (o.split("=") for o in args.override)
    }
    rows = []
    for case in args.case or ["gpt2", "0.9b"]:
        shape = CASES[case] | {"steps": args.steps, "warmup": args.warmup}
        for _ in range(args.rounds):
            if not args.no_peer:
                rows.append(
                    (
                        case,
                        "torch",
                        child([str(HERE / "peers" / "torch_gpt.py"), json.dumps(shape)]),
                    )
                )
            request = {"shape": shape, "overrides": overrides, "profile": args.profile}
            rows.append((case, "jaxpar", child([__file__, "--ours", json.dumps(request)])))
    report(rows)


def report(rows: list) -> None:
    """Prints medians over the rounds, and writes every round."""
    groups = collections.defaultdict(list)
    flops = {case: result for case, side, result in rows if side == "jaxpar"}
    for case, side, result in rows:
        groups[case, side].append(result)
    print(
        "| case | side | tokens/s (min..max) | MFU | MFU causal | of measured matmul | peak GiB | compile s |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for (case, side), results in groups.items():
        speeds = [r["tokens_per_s"] for r in results]
        speed, rate = (
            statistics.median(speeds),
            statistics.median(r["matmul_flops_per_s"] for r in results),
        )
        full, causal = flops[case]["flops"] * speed, flops[case]["flops_causal"] * speed
        print(
            f"| {case} | {side} | {speed:,.0f} ({min(speeds):,.0f}..{max(speeds):,.0f}) | {full / PEAK:.3f} | "
            f"{causal / PEAK:.3f} | {full / rate:.3f} | {results[-1]['peak_bytes'] / 2**30:.1f} | "
            f"{results[-1]['compile_s']:.0f} |"
        )
    last = rows[-1][2]
    print(
        f"\n{last['device']}, {last['version']}, matmul {last['matmul_flops_per_s'] / 1e12:.0f} TFLOP/s"
    )
    for ms, calls, name in last.get("kernels", []):
        print(f"{ms:9.3f} ms {calls:5d}  {name}")
    folder = HERE / "results"
    folder.mkdir(exist_ok=True)
    (folder / "lm_throughput.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
