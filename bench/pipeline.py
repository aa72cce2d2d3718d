"""What does a pipeline cost: beside its simulation, beside torch.distributed.pipelining, beside FSDP on the same cards?

    python bench/pipeline.py                                        # two GPUs: all parts
    python bench/pipeline.py --what torch,fsdp,run --seconds 1200   # the step alone, ours after its peers
    python bench/pipeline.py --what tables,vocabulary,compile,aot   # CPU: tables, a large head, the compiler
    python bench/pipeline.py --tiny --peer-python PYTHON            # any machine, two simulated devices: does it run?

A row is loss and gradient of a batch of m microbatches, without the optimizer's update, which is the same for all. The
model is Llama's shape with 1.1B weights in 16 layers, bfloat16 where it multiplies; ours holds weights and sums of
gradients in float32 and casts once a step, torch's are all bfloat16. Each row of ours is a process of its own, so its
peak is its own; torch's processes reset their counters. Medians of five steps at least, each waited for.

"of lock-step" is our time by that of `simulate_schedule(..., lockstep=True)` fed with the times of F, B, W, BW and both
ends of the model, measured in the same process on one device: a tick takes as long as its longest task, so 1 is what
the table allows. It counts neither messages nor what is outside of the ticks: casting weights, layers sent to their
chunks. "of torch" is how many times as fast as torch's form of the same schedule ours is, "of best" as torch's fastest.
`run` and `fsdp` print the loss and the norm of the gradient: they are the same model, and must agree. GiB are the
device's own count of its peak; "planned" is the compiler's. `offload` compares a schedule with and without what
`experiments.lm offload=true` puts on the host; a slot must travel within a task, so take --remat full, or expect the
time that "lock-step ms" tells. For asynchronous sends on GPUs,
--xla=--xla_gpu_enable_latency_hiding_scheduler=true.
"""

import argparse
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402
from layouts import count_devices  # noqa: E402

# NVLink multicast stays off: it can take the GPUs of a shared host down.
SAFE = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
NOWHERE = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
WHAT = ("torch", "fsdp", "run", "offload", "tables", "vocabulary", "compile", "aot")
ON_DEVICES = WHAT[:4]

MODEL = dict(
    num_layers=16, embed_dim=2048, num_heads=32, num_kv_heads=8, mlp_dim=8192, vocab_size=32768
)
TINY = dict(num_layers=4, embed_dim=32, num_heads=4, num_kv_heads=2, mlp_dim=64, vocab_size=64)
FULL = dict(model=MODEL, length=2048, dtype="bfloat16")
SMALL = dict(model=TINY, length=16, dtype="float32")
OURS = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "blockwise")
THEIRS = ("gpipe", "1f1b", "interleaved", "zb_v", "blockwise")
OFFLOADED = (
    "gpipe",
    "interleaved",
    "zb_v",
)  # two stages keep two microbatches by 1f1b, and one slot more is under way


def sides_of(args: argparse.Namespace) -> dict:
    """Returns how each framework's process is started."""
    env = SAFE | (NOWHERE if args.tiny else {})
    ours = env | {"PYTHONPATH": str(HERE.parent), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    if args.xla:
        ours |= {"XLA_FLAGS": args.xla}
    ours |= {"JAX_COMPILATION_CACHE_DIR": args.cache} if args.cache else {}
    ours |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"} if args.cache else {}
    counts = {"PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu"}
    return {
        "jaxpar": ([str(HERE / "pipeline_rows.py")], ours),
        "torch": (
            [str(HERE / "peers" / "torch_pipeline.py"), str(args.devices)],
            env,
            args.peer_python,
        ),
        "tables": (
            [str(HERE / "peers" / "torch_pipeline.py"), "1"],
            SAFE | NOWHERE,
            args.peer_python,
        ),
        "counts": ([str(HERE / "pipeline_counts.py")], counts),
    }


def rows_of(what: str, args: argparse.Namespace) -> list[dict]:
    """Returns the rows of a part that devices run, in the order in which they run."""
    common = (SMALL if args.tiny else FULL) | {
        "what": what,
        "devices": args.devices,
        "mesh": args.devices,
    }
    common |= {
        "rows": args.rows,
        "remat": args.remat,
        "attention": args.attention,
        "spend_s": args.spend_s,
    }
    common |= {"chunks": args.chunks, "timings": args.timings, "schedule": ""}
    rows = []
    for m in map(int, args.microbatches.split(",")):
        each = common | {"microbatches": m}
        if what == "torch":
            rows += [
                each | {"side": "torch", "row": f"torch {name}", "schedule": name}
                for name in THEIRS
            ]
        if what == "run":
            rows += [
                each | {"side": "jaxpar", "row": name, "schedule": name, "kind": "run"}
                for name in OURS
            ]
        if what == "fsdp":
            kinds = {"fsdp, in turn": "turn", "fsdp, all at once": "whole"}
            rows += [
                each | {"side": "jaxpar", "row": name, "kind": kind} for name, kind in kinds.items()
            ]
            rows.append(
                each
                | {"side": "jaxpar", "row": "one device, in turn", "kind": "turn", "devices": 1}
            )
        if what == "offload":
            for name in OFFLOADED:
                one = each | {"side": "jaxpar", "schedule": name}
                rows += [
                    one | {"row": name, "kind": "run"},
                    one | {"row": f"{name} with offload", "kind": "offload"},
                ]
    words = args.only.split(",") if args.only else [""]
    return [row for row in rows if any(word in row["row"] for word in words)]


def judged(row: dict, before: list[dict]) -> dict:
    """Adds to a row what it is measured against, of those before it with as many microbatches."""
    if "ms" not in row:
        return row
    known = [x for x in before if "ms" in x and x["microbatches"] == row["microbatches"]]

    def times(chosen) -> list[float]:
        return [x["ms"] for x in chosen]

    theirs, ours = [
        [x for x in known if (x["side"] == "torch") == torch] for torch in (True, False)
    ]
    found = {
        "of_torch": times(x for x in theirs if x["schedule"] == row["schedule"]),
        "of_best": times(theirs),
        "of_1f1b": times(x for x in ours if x["row"] == "1f1b" and x["kind"] == "run"),
        "of_fsdp": times(x for x in ours if x["row"].startswith("fsdp")),
    }
    row |= {
        name: min(all_of) / row["ms"]
        for name, all_of in found.items()
        if all_of and row["side"] == "jaxpar"
    }
    if "lockstep_ms" in row:
        row["of_lockstep"] = row["ms"] / row["lockstep_ms"]
    if row.get("kind") == "offload":
        plain = [x for x in ours if x["row"] == row["schedule"] and x["what"] == "offload"]
        for one in plain:
            same = "bits equal" if one["bits"] == row["bits"] else "bits differ"
            size = peak_of(row) / peak_of(one)
            row["note"] = (
                f"{same}; {row['sides']} sides; {size:.2f} of the bytes, {row['ms'] / one['ms']:.3f} of the time"
            )
    return row


def peak_of(row: dict) -> float:
    """Returns the most bytes of any device: as counted, or planned where nothing counts."""
    return max(row["peaks"]) if "peaks" in row else row["planned_bytes"]


def costs_of(row: dict) -> str:
    """Returns the measured times of tasks, in ms."""
    names = ("F", "B", "W", "BW", "head", "leave") + (
        ("offload", "fetch") if row["costs"]["offload"] else ()
    )
    return " ".join(f"{name} {row['costs'][name]:.2f}" for name in names)


COLUMNS = {
    "row": lambda r: r["row"],
    "m": lambda r: str(r["microbatches"]),
    "ms (least)": lambda r: f"{r['ms']:.1f} ({r['least_ms']:.1f})",
    "tokens/s": lambda r: f"{1e3 * r['microbatches'] * r['rows'] * r['length'] / r['ms']:,.0f}",
    "lock-step ms": lambda r: f"{r['lockstep_ms']:.1f}",
    "of lock-step": lambda r: f"{r['of_lockstep']:.3f}x",
    "by events ms": lambda r: f"{r['events_ms']:.1f}",
    "ticks": lambda r: str(r["ticks"]),
    "of torch": lambda r: f"{r['of_torch']:.2f}x",
    "of best": lambda r: f"{r['of_best']:.2f}x",
    "of 1f1b": lambda r: f"{r['of_1f1b']:.2f}x",
    "of fsdp": lambda r: f"{r['of_fsdp']:.2f}x",
    "GiB a device": lambda r: ", ".join(f"{peak / 2**30:.2f}" for peak in r["peaks"]),
    "planned GiB": lambda r: f"{r['planned_bytes'] / 2**30:.2f}",
    "loss": lambda r: f"{r['loss']:.4f}",
    "gradient": lambda r: f"{r['norm']:.4f}",
    "compile s": lambda r: f"{r['compile_s']:.0f}",
    "tasks, ms": costs_of,
    "note": lambda r: r.get("note", ""),
}


def measure(
    what: str, bench: harness.Bench, table: harness.Table, args: argparse.Namespace
) -> None:
    """Runs a part that devices run, a row a process of ours."""
    table.columns = COLUMNS
    table.head(
        f"{what}: {args.devices} devices, {args.rows} rows of a microbatch, remat={args.remat}"
    )
    version = ""
    for row in rows_of(what, args):
        answer = bench.ask(row["side"], row)
        if "version" in answer and answer["version"] != version:
            version = answer["version"]
            print(f"<!-- {answer['device']}, {version} -->", flush=True)
        if row["side"] == "jaxpar" or "failed" in answer:
            bench.close(
                row["side"]
            )  # the next row's peak is its own, and no broken group of processes stays
        table.add(judged(row | answer, table.rows))
    bench.close()


def count(what: str, bench: harness.Bench, table: harness.Table, args: argparse.Namespace) -> None:
    """Runs a part that asks no devices."""
    from pipeline_counts import PARTS

    part = PARTS[what]
    table.columns = part.columns
    table.head(part.title)
    for request in part.requests(args.tiny):
        request |= {"what": what}
        if request.get("torch"):
            theirs = bench.ask("tables", request)
            request["torch"] = theirs.get("tables", {})
            if "failed" in theirs:
                table.add(request | {"row": "torch", "torch": 0} | theirs)
        answer = bench.ask("counts", request)
        request.pop("torch", 0)
        for row in answer.get("rows", [answer]):
            table.add({"row": what} | request | row)
        if part.fresh:
            bench.close("counts")
    bench.close()


def main() -> None:
    """Parses flags and measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--what", default=",".join(WHAT), help=f"separated by commas, of {','.join(WHAT)}"
    )
    parser.add_argument("--seconds", type=float, default=math.inf, help="no row starts after these")
    parser.add_argument(
        "--row-s", type=float, default=240, help="a row without an answer by then has failed"
    )
    parser.add_argument("--spend-s", type=float, default=4, help="seconds of timing for a step")
    parser.add_argument("--timings", type=int, default=8, help="steps of torch that are timed")
    parser.add_argument("--devices", type=int, default=0, help="stages; by default 2")
    parser.add_argument("--microbatches", default="8,4")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a microbatch")
    parser.add_argument(
        "--chunks", type=int, default=2, help="of each device, where a schedule leaves it open"
    )
    parser.add_argument("--remat", default="none", help="ours")
    parser.add_argument(
        "--attention", default="auto", help="ours: auto (cuDNN on GPUs), cudnn or xla"
    )
    parser.add_argument(
        "--only", help="only rows whose name contains one of these words, separated by commas"
    )
    parser.add_argument("--xla", default="", help="XLA_FLAGS of our processes")
    parser.add_argument(
        "--cache", default="", help="folder of compiled programs, so that rows share what they time"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny shapes, for any machine: checks that the script runs",
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the interpreter that has torch"
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "pipeline.json")
    args = parser.parse_args()
    names = harness.chosen(args.what, WHAT)
    if args.tiny:
        args.spend_s, args.timings = min(args.spend_s, 0.05), min(args.timings, 5)
    on_devices = set(names) & set(ON_DEVICES)
    args.devices = args.devices or (2 if args.tiny or not on_devices else min(2, count_devices()))
    bench = harness.Bench(sides_of(args), args.seconds, args.row_s)
    table = harness.Table({}, args.out)
    for what in names:
        (measure if what in ON_DEVICES else count)(what, bench, table, args)


if __name__ == "__main__":
    main()
