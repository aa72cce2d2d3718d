"""How far is an estimate from what the machine does: peak memory and step time, estimated and measured.

    python bench/estimate_error.py                       # every case that fits the GPUs here
    python bench/estimate_error.py --case "preset=tiny mesh.fsdp=2"     # any flags of experiments.estimate; any machine

Each case is a process of its own: it estimates (a real compile, and the analytic model alone), then makes real steps of
the same program and reads the device's own peak. Prints a table, writes JSON.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

GPT2 = "preset=gpt2_124m model.dropout=0 model.execution.remat=none"
LLAMA = (
    "preset=llama_1b model.vocab_size=32768 model.losses.low_logits=true train.accumulate=1 data.seq_len=2048 "
    "data.batch_size=8"
)
UNROLLED = f"{LLAMA} model.execution.remat=none model.execution.scan_layers=false"
CASES = {
    1: [
        f"{GPT2} data.batch_size=32 train.accumulate=1",
        f"{GPT2} data.batch_size=64 train.accumulate=1",
        UNROLLED,
        f"{LLAMA} model.execution.remat=names",
        f"{LLAMA} model.execution.remat=full data.seq_len=4096",
    ],
    2: [
        f"{UNROLLED} data.batch_size=16 mesh.data=1 mesh.fsdp=2",
        f"{LLAMA} model.execution.remat=names data.batch_size=16 mesh.data=1 mesh.fsdp=2",
        f"{UNROLLED} data.batch_size=16 mesh.data=1 mesh.tensor=2",
    ],
}


def measure(flags: list[str]) -> dict:
    """Estimates and runs one case."""
    import jax

    from experiments import estimate as experiment
    from experiments.lm import make_trainer
    from jaxpar import aot

    config, devices, chip = experiment.find_devices(experiment.compose(*flags))
    job = experiment.make_job(config, devices)
    estimated, alone = (
        aot.estimate(job, effort=config.effort, chip=chip),
        aot.estimate(job, effort="none", chip=chip),
    )
    compiled = aot.compile_job(job, config.effort).program
    if compiled is None:
        raise SystemExit("the case does not fit this machine")
    with job.ambient():
        key, shardings, shape = jax.random.key(0), job.shardings(), job.args[2]["tokens"].shape
        state = jax.jit(make_trainer(config).init, out_shardings=shardings[1])(key)
        tokens = jax.random.randint(key, shape, 0, config.model.vocab_size)
        batch = jax.device_put({"tokens": tokens, "targets": tokens}, shardings[2])
        del tokens
        for _ in range(3):
            state, info = compiled(key, state, batch)
        jax.block_until_ready(info)
        times = []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(4):
                state, info = compiled(key, state, batch)
            jax.block_until_ready(info)
            times.append((time.perf_counter() - start) / 4)
    peak = max((device.memory_stats() or {}).get("peak_bytes_in_use", 0) for device in devices)
    return {
        "device": devices[0].device_kind,
        "devices": len(devices),
        "peak": peak,
        "estimated_peak": estimated.peak,
        "analytic_peak": alone.peak,
        "step_s": statistics.median(times),
        "predicted_s": estimated.roofline.step_s if estimated.roofline else None,
        "analytic_s": alone.roofline.step_s if alone.roofline else None,
        "tokens": shape[0] * shape[1],
    }


def error(said: float | None, seen: float) -> str:
    """Returns the signed error in percent."""
    return f"{100 * (said / seen - 1):+.1f} %" if said and seen else ""


def main() -> None:
    """Runs the cases and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--case", action="append", help="flags of experiments.estimate, in one argument"
    )
    parser.add_argument(
        "--devices", type=int, default=1, choices=list(CASES), help="whose cases to run"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=HERE / "results" / "estimate_error.json"
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one.split())))
        return
    rows = []
    columns = (
        "case",
        "peak GiB",
        "estimated",
        "analytic",
        "step ms",
        "predicted",
        "analytic",
        "tokens/s",
    )
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for case in args.case or CASES[args.devices]:
        done = subprocess.run(
            [sys.executable, __file__, "--one", case], capture_output=True, text=True
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not lines:
            print(
                f"| {case} | {(done.stderr.strip().splitlines() or ['no result'])[-1]} |",
                flush=True,
            )
            continue
        row = json.loads(lines[-1]) | {"case": case}
        rows.append(row)
        cells = [
            case,
            f"{row['peak'] / 2**30:.2f}",
            error(row["estimated_peak"], row["peak"]),
            error(row["analytic_peak"], row["peak"]),
            f"{1e3 * row['step_s']:.1f}",
            error(row["predicted_s"], row["step_s"]),
            error(row["analytic_s"], row["step_s"]),
            f"{row['tokens'] / row['step_s']:,.0f}",
        ]
        print(f"| {' | '.join(cells)} |", flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
