"""What does attention cost where devices share a sequence, and how long may one be? Beside torch's context_parallel.

    python bench/context.py                                       # all GPUs of this host
    python bench/context.py --devices 1                           # one GPU: parts, decoding and training on one
    python bench/context.py --cases C1,C2 --only "zigzag,torch" --passes fwd+bwd --jobs 8
    python bench/context.py --tiny                                # any machine, two simulated devices: does it run?

C1 is causal attention to T 65,536 with 32 heads of 128 in bfloat16, C2 the same with 8 key heads and T 262,144:
`.moves` on N devices by every move, beside one of them and torch's context_parallel; `.parts` on one, in as many pieces
as devices would make of it, which is what their kernels cost before anything is sent. C3 is a new token's attention to
a cache of a million tokens that N devices share, beside one that has it all. C3.share is what the larger of C3's uneven
shares takes by itself, of which both together should take at most 1.05 times as long. C3.sweep tries kernels: "cut"
names a step's slots, warps, stages and programs, "forest" the size of a block, stages and most splits, "pairs" the
parts that cuDNN takes as rows. C4 asks for the longest sequence of which a model of 1B weights takes a training step on
one device, by what is recomputed, or on N ("ring", whose GiB are of each; "ring_split" has weights and optimizer shared
as well), and for the time of equal lengths. C5 is a token through 32 layers of Llama 3 8B's shape with tensor=N, whose
branches wait for the sum before them or do not.

Programs of a case are compiled first, then timed in turns, a round at a time; medians, and the least in brackets. The
limit is the arithmetic, or what must be read, at the rate of the fastest product or copy that a process of this run
measured, over the devices of a row. "of peer" is how many times as fast as the best foreign row on as many devices (in
C4 and C5 as our own other form), "of one" as the best of one device. "sent" is what a device sends, counted in the
compiled program. GiB is what the compiler plans a device, of torch the peak of its allocator. What a machine lacks
fails its row, and says why. For asynchronous sends on GPUs, XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true.
"""

import argparse
import concurrent.futures
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402
from decode import filled, in_turns  # noqa: E402
from layouts import count_devices  # noqa: E402

# NVLink multicast stays off unless asked for: it can take the GPUs of a shared host down.
ENV = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "NCCL_NVLS_ENABLE": "0"}
ALL_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "true", "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
NOWHERE = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
BOTH = ("fwd", "fwd+bwd")
MHA = dict(length=65536, heads=32, groups=32, width=128, dtype="bfloat16")
GQA = MHA | dict(length=262144, groups=8)
SMALL = dict(length=64, heads=4, groups=4, width=8, dtype="float32")
MOVES = [
    f"jaxpar {move} zigzag"
    for move in ("ring", "two_way", "token_ring", "gather", "swap", "swap_ring")
]
ORDERS = [f"jaxpar ring {order}" for order in ("contiguous", "striped", "unpromised")]
ROTATING = [
    f"torch {how} {kernel}" for how in ("allgather", "alltoall") for kernel in ("cudnn", "flash")
]
ALONE = ["torch one cudnn", "torch one flash"]
PARTS = ["jax one", *(f"jaxpar parts {count}" for count in (1, 2, 4))]
SHARES = ["jax one", "jaxpar shares even", "jaxpar shares uneven", "jaxpar one", "jaxpar forest 64"]
CUTS = [
    "64 4 3 528",
    "64 4 3 264",
    "64 4 3 1056",
    "64 4 2 528",
    "64 4 4 528",
    "128 4 2 264",
    "128 8 3 264",
]
FORESTS = ["64", "64 5", "64 5 66", "64 3 66", "64 6 132"]
SWEEP = [
    f"jaxpar {name}"
    for name in [*(f"cut {x}" for x in CUTS), *(f"forest {x}" for x in FORESTS), "pairs 64"]
]
LAYERS = dict(
    num_layers=16, embed_dim=2048, num_heads=16, num_kv_heads=16, mlp_dim=8192, vocab_size=32768
)
FEW = dict(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=2, mlp_dim=64, vocab_size=64)
EIGHT = dict(
    num_layers=32, embed_dim=4096, num_heads=32, num_kv_heads=8, mlp_dim=14336, vocab_size=256
)
REMATS = [
    "own none dense",
    "own none kernel",
    "own full kernel",
    "jaxpar blockwise kernel",
    "jaxpar blockwise loop",
]
REMATS += ["jaxpar ring kernel", "jaxpar ring_split kernel"]

CASES = {
    "C1.moves": dict(
        about="as many key heads as heads, N devices", kind="moves", directions=BOTH, full=MHA, tiny=SMALL,
        sides={"jaxpar": ["jax one", *MOVES, *ORDERS], "ranks": [*ALONE, *ROTATING]},
    ),
    "C1.parts": dict(
        about="the same on one device, in pieces", kind="parts", directions=BOTH, full=MHA, tiny=SMALL,
        sides={"jaxpar": PARTS, "ranks": ALONE},
    ),
    "C2.moves": dict(
        about="few key heads, N devices", kind="moves", directions=BOTH, rounds=2, full=GQA,
        tiny=SMALL | dict(groups=2),
        sides={"jaxpar": ["jax one", *MOVES], "ranks": [*ALONE, *ROTATING]},
    ),
    "C2.parts": dict(
        about="the same on one device, in pieces", kind="parts", directions=BOTH, full=GQA, tiny=SMALL | dict(groups=2),
        sides={"jaxpar": PARTS, "ranks": ALONE},
    ),
    "C3": dict(
        about="a token's attention to a long cache", kind="attend", directions=("fwd",),
        full=dict(shape=(1, 32, 8, 2**20, 128), dtype="bfloat16"), tiny=dict(shape=(1, 4, 2, 256, 32), dtype="float32"),
        sides={"jaxpar": SHARES, "torch": ["torch sdpa", "torch groups", "torch flex"]},
    ),
    "C3.share": dict(
        about="nine tenths of it on one device", kind="attend", directions=("fwd",),
        full=dict(shape=(1, 32, 8, 2**20 * 9 // 10, 128), dtype="bfloat16"),
        tiny=dict(shape=(1, 4, 2, 230, 32), dtype="float32"), sides={"jaxpar": ["jax one", "jaxpar one"]},
    ),
    "C3.sweep": dict(
        about="the same on one GPU, its kernels cut in other ways", kind="attend", directions=("fwd",),
        full=dict(shape=(1, 32, 8, 2**20, 128), dtype="bfloat16"), sides={"jaxpar": ["jax one", *SWEEP]},
    ),
    "C4": dict(
        about="the longest sequence that trains on one device", kind="train", directions=("fwd+bwd",),
        full=dict(model=LAYERS, first=2048, most=2**21, at=16384, dtype="bfloat16"),
        tiny=dict(model=FEW, first=32, most=64, at=32, dtype="float32", memory=4e6), sides={"training": REMATS},
    ),
    "C5": dict(
        about="a token through layers whose heads and units N devices share", kind="step",
        directions=("1 row", "4 rows", "16 rows"), full=dict(model=EIGHT, slots=2048, dtype="bfloat16"),
        tiny=dict(model=FEW, slots=32, dtype="float32"), sides={"jaxpar": ["own standard", "jaxpar ladder"]},
    ),
}  # fmt: skip


def sides_of(args: argparse.Namespace) -> dict:
    """Returns how each framework's process is started."""
    peers, env = HERE / "peers", ENV | (NOWHERE if args.tiny else {})
    ours, path = [str(HERE / "context_rows.py")], {"PYTHONPATH": str(HERE.parent)}
    sides: dict[str, tuple] = {
        "jaxpar": (ours, env | path),
        "training": (ours, env | path | ALL_MEMORY),
    }
    if not args.no_peer:
        sides["ranks"] = (
            [str(peers / "torch_context.py"), str(args.devices)],
            env,
            args.peer_python,
        )
        sides["torch"] = ([str(peers / "torch_decode.py")], env, args.peer_python)
    return sides


def devices_of(row: str, devices: int) -> int:
    """Returns how many devices a row has, by its name."""
    alone = ("one", "parts", "forest", "cut", "pairs", "own none", "own full", "blockwise")
    return (
        1 if any(word in row for word in alone) or row in CASES["C3"]["sides"]["torch"] else devices
    )


def rows_of(name: str, args: argparse.Namespace, sides: dict) -> list[dict]:
    """Returns what is asked of the sides for a case; what needs several devices is left out where there is one."""
    case, words = CASES[name], args.only.split(",") if args.only else [""]
    common = {"kind": case["kind"], "spend_s": args.spend_s, "row_s": args.row_s}
    common |= case["tiny" if args.tiny else "full"]
    if case["kind"] == "step" and args.layers:
        common["model"] = common["model"] | {"num_layers": args.layers}
    return [
        common
        | {
            "case": name,
            "side": side,
            "row": row,
            "direction": direction,
            "devices": devices_of(row, args.devices),
        }
        | {"mesh": args.devices, "name": f"{name} {row} {direction}"}
        for direction in passes_of(name, args)
        for side, names in case["sides"].items()
        for row in names
        if side in sides and any(word in row for word in words)
        if args.devices > 1 or devices_of(row, 2) == 1
    ]


def passes_of(name: str, args: argparse.Namespace) -> list[str]:
    """Returns the passes of a case, or numbers of rows, that are wanted."""
    wanted = args.passes.split(",") if args.passes else CASES[name]["directions"]
    return [direction for direction in CASES[name]["directions"] if direction in wanted]


def work_of(row: dict) -> tuple[float, float]:
    """Returns the operations and the bytes that a row cannot do without, over all its devices."""
    if row["kind"] in ("moves", "parts"):
        # Two products forward, five more backward, of half of the pairs.
        products = 2 if row["direction"] == "fwd" else 7
        return products * row["length"] ** 2 * row["heads"] * row["width"], 0.0
    if row["kind"] == "attend":
        batch, _, groups, slots, width = row["shape"]
        return 0.0, 2 * batch * slots * groups * width * {"bfloat16": 2, "float32": 4}[row["dtype"]]
    return row.get("flops", 0.0), row.get("bytes", 0.0)


def judged(rows: list[dict], rates: dict) -> list[dict]:
    """Adds to rows of one direction the limit, the best foreign row on as many devices, and the best of one."""
    timed = [row for row in rows if "ms" in row]

    def best(chosen: list[dict]) -> dict:
        return {
            name: min((row[name] for row in chosen), default=math.nan)
            for name in ("ms", "least_ms")
        }

    for row in rows:
        foreign = [
            x for x in timed if not x["row"].startswith("jaxpar") and x["devices"] == row["devices"]
        ]
        row["peer"], row["alone"] = best(foreign), best([x for x in timed if x["devices"] == 1])
        flops, size = work_of(row)
        if "ms" in row and (flops or size > harness.CACHE):
            row["limit_ms"] = (
                1e3 * max(flops / rates["flops"], size / rates["bytes"]) / row["devices"]
            )
    return rows


def ratio(row: dict, name: str) -> str:
    """Returns how many times as fast as another row a row is, by medians and by least times."""
    other = row[name]
    return (
        f"{other['ms'] / row['ms']:.2f}x ({other['least_ms'] / row['least_ms']:.2f})"
        if other["ms"] > 0
        else ""
    )


COLUMNS = {
    "row": lambda r: r["row"],
    "pass, rows": lambda r: r["direction"],
    "devices": lambda r: str(r["devices"]),
    "longest T": lambda r: f"{r['longest']:,}",
    "ms (least)": lambda r: f"{r['ms']:.3f} ({r['least_ms']:.3f})",
    "of peer": lambda r: ratio(r, "peer") if r["row"].startswith("jaxpar") else "",
    "of one": lambda r: ratio(r, "alone") if r["devices"] > 1 else "",
    "limit ms": lambda r: f"{r['limit_ms']:.3f}",
    "of limit": lambda r: f"{100 * r['limit_ms'] / r['ms']:.0f} %",
    "sent MiB": lambda r: f"{r['sent'] / 2**20:.3f}",
    "error": lambda r: f"{r['error']:.1e}",
    "GiB": lambda r: f"{r['peak_bytes'] / 2**30:.3f}",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "note": lambda r: r.get("note", ""),
}


def started(bench: harness.Bench, sides: list[str], args: argparse.Namespace) -> dict:
    """Starts these sides, tells what machine this is; returns the rates of its fastest product and copy."""
    with concurrent.futures.ThreadPoolExecutor() as pool:  # frameworks take seconds to be loaded
        list(pool.map(lambda side: bench.ask(side, {"do": "drop"}), sides))
    request = {
        "do": "rates",
        "size": 256 if args.tiny else 8192,
        "bytes": 2**20 if args.tiny else 2**31,
    }
    request |= {
        "spend_s": args.spend_s,
        "mesh": args.devices,
        "dtype": "float32" if args.tiny else "bfloat16",
    }
    said = {side: bench.ask(side, request) for side in sides if side != "torch"}
    for side, answer in said.items():
        words = (
            "{device} x "
            + str(args.devices)
            + ", {version}, product {flops:.3g} FLOP/s, copy {bytes:.3g} B/s"
        )
        print(f"{side}: " + (answer.get("failed") or words.format(**answer)), flush=True)
    return {
        name: max((x[name] for x in said.values() if name in x), default=math.nan)
        for name in ("flops", "bytes")
    }


def search(
    bench: harness.Bench, table: harness.Table, name: str, asked: list[dict], rates: dict
) -> None:
    """Measures rows that take all memory, one after the other, and prints each when it is there."""
    from context_training import trained

    for side in [side for side in bench.workers if side != "training"]:
        bench.close(side)
    rows = [
        dict(row, longest=0, ms=math.nan, least_ms=math.nan, peak_bytes=0, compile_s=0.0)
        for row in asked
    ]
    table.columns = filled(COLUMNS, judged(rows, rates))
    table.head(f"{name}: {CASES[name]['about']}")
    rows = []
    for row in asked:
        rows.append(trained(bench, row))
        table.add(judged(rows, rates)[-1])


def measure(args: argparse.Namespace) -> None:
    """Measures every row of the chosen cases and prints them."""
    sides = sides_of(args)
    bench, table = harness.Bench(sides, args.budget_s, args.row_s), harness.Table({}, args.out)
    names = harness.chosen(
        args.cases, [name for name in CASES if not args.tiny or "tiny" in CASES[name]]
    )
    wanted = {side for name in names for side in CASES[name]["sides"]}
    if len(wanted) > 1:
        wanted.discard("training")  # begins when nobody else holds memory
    rates = started(bench, [side for side in sides if side in wanted], args)
    for name in names:
        asked = rows_of(name, args, sides)
        if CASES[name]["kind"] == "train":
            search(bench, table, name, asked, rates)
            continue
        rows, rounds = [], min(args.rounds, CASES[name].get("rounds", args.rounds))
        for direction in passes_of(name, args):
            if some := [row for row in asked if row["direction"] == direction]:
                rows += judged(in_turns(bench, some, rounds, args.jobs), rates)
        table.columns = filled(COLUMNS, rows)
        table.head(f"{name}: {CASES[name]['about']}")
        for row in rows:
            table.add(row)
    bench.close()


def main() -> None:
    """Parses flags and measures."""
    parser = harness.arguments(__doc__, CASES, "context.json", 3000)
    parser.set_defaults(row_s=600)
    parser.add_argument("--devices", type=int, default=0, help="N; by default all, of --tiny two")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--passes", help="only these, as fwd,fwd+bwd,1 row,16 rows; by default all of a case"
    )
    parser.add_argument(
        "--layers", type=int, help="layers of C5, for fewer seconds of compiling; by default 32"
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the interpreter that has torch"
    )
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.spend_s = min(args.rounds, 2), 0.01
    args.devices = args.devices or (2 if args.tiny else count_devices())
    measure(args)


if __name__ == "__main__":
    main()
