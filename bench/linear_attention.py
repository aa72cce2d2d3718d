"""What does linear attention cost on one GPU: our kernels and the form in XLA, beside fla-core's and mlstm_kernels?

    python bench/linear_attention.py --cases G1.rows,G1.heads       # the first shape of the report
    python bench/linear_attention.py --cases G2.exponential --mlstm-kernels ../mlstm_kernels
    python bench/linear_attention.py --cases G1.rows --only kernel --tiles outputs=64x64x4x2,key_gradients=32x64x4x2
    python bench/linear_attention.py --tiny                         # any machine: checks that the script runs

G1 to G4 are (B, T, H, K, V) = (8, 4096, 4, 128, 256), (4, 2048, 16, 128, 128), (2, 16384, 16, 128, 128) and (1, 8192,
96, 128, 128), in bfloat16, log decays in float32; M1 to M4 have 65,536 tokens of 8 heads of 256 and 512 columns, in
rows of 1,024, 8,192 and 32,768, or of 64 and 128; D1 and D2 are one token of decoding, whose float32 state is read and
written. `.rows` has a decay a row of the state (GLA), `.heads` one a head (simple GLA, retention), `.none` no decay,
and attention by cuDNN beside it; `.delta` is the gated delta rule, whose chunks' states are made by an affine scan of
matrices or by a loop; `.exponential` is the mLSTM, `.sigmoid` that of sigmoid input gates, which is not normalised.
Peers have their own layout, and autotune when a row is made, which takes minutes: give few cases a call, or a larger
`--row-s`.

Rows of a case are made first, then timed in turns, a round at a time; medians, and the least in brackets. "of copy" is
the time of reading and writing the arguments and results once, by a copy's bandwidth in this run, by the row's. "of
peer" is how many times as fast as the best peer a row of ours is. Errors are norms of differences by norms, of the
first row's first two heads: "error" of outputs, "worst" the largest of outputs and gradients, which the note
names. Ours are judged over all tokens by float32 in full precision, a peer's over the first `--check` tokens by
float64, step by step, the mLSTM's all tokens by all.
"""

import argparse
import math
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402
import linear_cases  # noqa: E402
from decode import filled, in_turns  # noqa: E402
from experts import ENV, NOWHERE, of_peer  # noqa: E402


def sides_of(args: argparse.Namespace) -> dict:
    """Returns how each framework's process is started."""
    env = ENV | (NOWHERE if args.tiny else {})
    sides: dict[str, tuple] = {
        "jaxpar": ([str(HERE / "linear_rows.py")], env | {"PYTHONPATH": str(HERE.parent)})
    }
    if not args.no_peer:
        path = (
            {"PYTHONPATH": str(args.mlstm_kernels.resolve())} if args.mlstm_kernels else {}
        )  # or it is installed
        sides["torch"] = (
            [str(HERE / "peers" / "torch_linear_attention.py")],
            env | path,
            args.peer_python,
        )
    return sides


def rows_of(name: str, direction: str, args: argparse.Namespace, sides: dict) -> list[dict]:
    """Returns what is asked of the sides for a case."""
    case, words = linear_cases.CASES[name], args.only.split(",") if args.only else [""]
    absent = ["kernel"] * args.tiny
    common = dict(
        case=name, decay=case["decay"], direction=direction, spend_s=args.spend_s, tiles=args.tiles, check=args.check,
        sizes=linear_cases.TINY if args.tiny else linear_cases.SHAPES[case["shape"]],
        dtype="float32" if args.tiny else "bfloat16",
    )  # fmt: skip
    return [
        common | {"side": side, "row": row, "name": f"{name} {row} {direction}"}
        for side, names in linear_cases.rows_of(case).items()
        for row in names
        if side in sides and any(word in row for word in words) and row not in absent
    ]


def judged(rows: list[dict], rate: float) -> list[dict]:
    """Adds to rows the time of a copy of as many bytes, and the best peer."""
    peers = [row for row in rows if "ms" in row and row["side"] == "torch"]
    for row in rows:
        row["limit_ms"] = 1e3 * linear_cases.num_bytes(row) / rate
        row["peer"] = {
            key: min((each[key] for each in peers), default=math.nan) for key in ("ms", "least_ms")
        }
        if row["side"] == "jaxpar":
            row["row"] = f"jaxpar {row['row']}"
    return rows


COLUMNS = {
    "row": lambda r: r["row"],
    "pass": lambda r: r["direction"],
    "ms (least)": lambda r: f"{r['ms']:.3f} ({r['least_ms']:.3f})",
    "of copy": lambda r: f"{100 * r['limit_ms'] / r['ms']:.0f} %",
    "of peer": of_peer,
    "error": lambda r: f"{r['error']:.1e}",
    "worst": lambda r: f"{r['worst_error']:.1e}",
    "GiB": lambda r: f"{r['peak_bytes'] / 2**30:.2f}",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "note": lambda r: r.get("note", ""),
}


def measure(args: argparse.Namespace) -> None:
    """Measures every row of the chosen cases and prints them."""
    sides = sides_of(args)
    bench, table = harness.Bench(sides, args.budget_s, args.row_s), harness.Table({}, args.out)
    request = {"do": "rates", "size": 2**16 if args.tiny else 2**28, "spend_s": args.spend_s}
    said = {side: bench.ask(side, request) for side in sides}
    for side, answer in said.items():
        print(
            f"{side}: {answer.get('failed') or '{device}, {version}'.format(**answer)}", flush=True
        )
    rate = said["jaxpar"].get("bytes", math.nan)
    print(f"copy: {rate:.3g} bytes/s", flush=True)
    for name in harness.chosen(args.cases, linear_cases.CASES):
        for direction in linear_cases.directions_of(
            name
        ):  # apart, so that fewer arrays are held at a time
            if args.passes and direction not in args.passes.split(","):
                continue
            rows = judged(
                in_turns(bench, rows_of(name, direction, args, sides), args.rounds, args.jobs), rate
            )
            table.columns = filled(COLUMNS, rows)
            table.head(f"{name}, {direction}")
            for row in rows:
                table.add(row)
    bench.close()


def main() -> None:
    """Parses flags and measures."""
    parser = harness.arguments(__doc__, linear_cases.CASES, "linear_attention.json", 1700)
    parser.set_defaults(row_s=240, spend_s=0.3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--passes", help="only these, of fwd,fwd+bwd,step; by default all of a case"
    )
    parser.add_argument(
        "--check", type=int, default=512, help="tokens over which a peer's errors are computed"
    )
    parser.add_argument(
        "--tiles",
        default="",
        help="KERNEL=COLUMNSxCOLUMNSxWARPSxSTAGES of keys and values, by commas",
    )
    parser.add_argument(
        "--mlstm-kernels", type=pathlib.Path, help="a folder that holds the package"
    )
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the interpreter that has torch"
    )
    args = parser.parse_args()
    if args.tiny:
        args.rounds, args.spend_s = min(args.rounds, 2), 0.01
    measure(args)


if __name__ == "__main__":
    main()
