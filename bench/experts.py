"""What does a mixture of experts cost on one GPU: its grouped product alone, and the whole SwiGLU layer with routing?

    python bench/experts.py --scattermoe ../scattermoe        # a folder that holds the package, if it is not installed
    python bench/experts.py --cases E64 --only "dense,sorted,grouped_mm"
    python bench/experts.py --cases E8.product,E128.product --tiles 128x256x64x8x4,128x128x64x4x4
    python bench/experts.py --skew 0.9                        # nine in ten tokens choose the same experts
    python bench/experts.py --passes fwd+bwd --jobs 2         # half of it; torch compiles while JAX does
    python bench/experts.py --tiny                            # any machine: checks that the script runs

E8, E64 and E128 are N 16384 D 2048 F 8192 E 8 k 2, N 16384 D 2048 F 1024 E 64 k 8 and N 32768 D 1024 F 512 E 128 k 8,
in bfloat16. `.product` multiplies N k rows [D] by their experts' weights [D, F], forward and with both gradients. Its
"dense" is one product of as many rows by one weight, the limit; "sorted" takes rows that lie expert after expert;
"read" reads tokens where they are; "write" writes rows to where their choices are and adds up each token's k. Peers are
`jax.lax.ragged_dot`, JAX's Mosaic kernels (`jax/experimental/pallas/ops/gpu`), tokamax, torch's `_grouped_mm` and
scattermoe; all get the same sizes. `.layer` has a router, products, activation and the sum of each token's experts.

Programs of a case are compiled first, then timed in turns, a round at a time; medians, and the least in brackets. "of
dense" is the time of the fastest dense product by the row's, in `.layer` that of all its products by the rate of the
fastest dense product of this run. "of peer" is how many times as fast as the best row of others but "dense" a row is.
"error" is that of the forward pass against a loop over experts. What a machine lacks fails its row, and says why.
"""

import argparse
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402
from decode import filled, in_turns  # noqa: E402
from expert_cases import CASES, flops  # noqa: E402

ENV = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
NOWHERE = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def sides_of(args: argparse.Namespace) -> dict:
    """Returns how each framework's process is started."""
    env = ENV | (NOWHERE if args.tiny else {})
    sides: dict[str, tuple] = {
        "jaxpar": ([str(HERE / "expert_rows.py")], env | {"PYTHONPATH": str(HERE.parent)})
    }
    if not args.no_peer:
        path = {"PYTHONPATH": str(args.scattermoe.resolve())} if args.scattermoe else {}
        sides["torch"] = ([str(HERE / "peers" / "torch_experts.py")], env | path, args.peer_python)
    return sides


def rows_of(name: str, args: argparse.Namespace, sides: dict) -> list[dict]:
    """Returns what is asked of the sides for a case."""
    case, words = CASES[name], args.only.split(",") if args.only else [""]
    common = {"case": name, "kind": case["kind"], "spend_s": args.spend_s, "skew": args.skew}
    common |= case["tiny" if args.tiny else "full"]
    tiles = [
        f"jaxpar tile {tile}"
        for tile in args.tiles.split(",")
        if tile and case["kind"] == "product"
    ]
    return [
        common
        | {"side": side, "row": row, "direction": direction, "name": f"{name} {row} {direction}"}
        for direction in args.passes.split(",")
        for side, names in case["sides"].items()
        for row in [*names, *(tiles if side == "jaxpar" else [])]
        if side in sides and any(word in row for word in words)
    ]


def judged(rows: list[dict], rate: float) -> list[dict]:
    """Adds to rows of one direction the time of a dense product of as many operations, and the best peer."""
    timed = [row for row in rows if "ms" in row]
    dense = [row for row in timed if row["row"].endswith("dense")]
    peers = [row for row in timed if not row["row"].startswith("jaxpar") and row not in dense]
    for row in rows:
        row["flops"] = flops(row)
        row["limit_ms"] = min((each["ms"] for each in dense), default=1e3 * row["flops"] / rate)
        row["peer"] = {
            key: min((each[key] for each in peers), default=math.nan) for key in ("ms", "least_ms")
        }
    return rows


def of_peer(row: dict) -> str:
    """Returns how many times as fast as the best peer a row of ours is, by medians and by least times."""
    peer = row["peer"]
    is_ours = row["row"].startswith("jaxpar") and peer["ms"] > 0
    return (
        f"{peer['ms'] / row['ms']:.2f}x ({peer['least_ms'] / row['least_ms']:.2f})"
        if is_ours
        else ""
    )


COLUMNS = {
    "row": lambda r: r["row"],
    "pass": lambda r: r["direction"],
    "ms (least)": lambda r: f"{r['ms']:.3f} ({r['least_ms']:.3f})",
    "TFLOP/s": lambda r: f"{r['flops'] / r['ms'] / 1e9:.3g}",
    "of dense": lambda r: f"{100 * r['limit_ms'] / r['ms']:.0f} %",
    "of peer": of_peer,
    "error": lambda r: f"{r['error']:.1e}",
    "GiB": lambda r: f"{r['peak_bytes'] / 2**30:.2f}",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "note": lambda r: r.get("note", ""),
}


def started(bench: harness.Bench, sides: dict, args: argparse.Namespace) -> float:
    """Tells what machine this is; returns the rate of its fastest dense product."""
    request = {
        "do": "rates",
        "size": 256 if args.tiny else 8192,
        "dtype": "float32" if args.tiny else "bfloat16",
    }
    said = {side: bench.ask(side, request | {"spend_s": args.spend_s}) for side in sides}
    for side, answer in said.items():
        words = answer.get("failed") or "{device}, {version}, {flops:.3g} FLOP/s".format(**answer)
        print(f"{side}: {words}", flush=True)
    return max((answer["flops"] for answer in said.values() if "flops" in answer), default=math.nan)


def measure(args: argparse.Namespace) -> None:
    """Measures every row of the chosen cases and prints them."""
    sides = sides_of(args)
    bench, table = harness.Bench(sides, args.budget_s, args.row_s), harness.Table({}, args.out)
    rate = started(bench, sides, args)
    for name in harness.chosen(args.cases, CASES):
        for direction in args.passes.split(","):  # apart, so that fewer arrays are held at a time
            asked = [row for row in rows_of(name, args, sides) if row["direction"] == direction]
            rows = judged(in_turns(bench, asked, args.rounds, args.jobs), rate)
            table.columns = filled(COLUMNS, rows)
            table.head(f"{name}, {direction}")
            for row in rows:
                table.add(row)
            if not args.tiny:
                bench.close()  # what a row that ran out of memory left behind
    bench.close()


def main() -> None:
    """Parses flags and measures."""
    parser = harness.arguments(__doc__, CASES, "experts.json", 1700)
    parser.set_defaults(row_s=240, spend_s=0.3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", default="fwd,fwd+bwd", help="one of the two, or both")
    parser.add_argument(
        "--skew",
        type=float,
        default=0.0,
        help="the share of tokens that choose the first k experts",
    )
    parser.add_argument(
        "--tiles", default="", help="of `.product`: ROWSxCOLUMNSxTERMSxWARPSxSTAGES, by commas"
    )
    parser.add_argument("--scattermoe", type=pathlib.Path, help="a folder that holds the package")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the interpreter that has torch"
    )
    args = parser.parse_args()
    if not set(args.passes.split(",")) <= {"fwd", "fwd+bwd"}:
        parser.error(
            f"--passes {args.passes} is unknown; legal are fwd, fwd+bwd and both by a comma."
        )
    if args.tiny:
        args.rounds, args.spend_s = min(args.rounds, 2), 0.01
    measure(args)


if __name__ == "__main__":
    main()
