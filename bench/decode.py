"""How fast are tokens drawn, beside real peers and beside the least that memory allows?

    git worktree add ../older 323acd7
    python bench/decode.py --older ../older                     # all cases of one GPU
    python bench/decode.py --cases D1,D10 --rounds 9
    python bench/decode.py --size cpu --older ../older          # what two cores measure in minutes
    python bench/decode.py --tiny                               # any machine: checks that the script runs
    python bench/decode.py --cases S1,S3 --target runs/lm/a/hf --draft runs/lm/b/hf

D1 to D10 draw greedily: D1 and D3 one row, D2 64, D4 beside an older checkout, D6 64 readers of one prefix beside as
many rows, D7 attention of one token alone, D10 a tiny model beside transformers on CPUs (whose tokens must be the
same), D11 a prompt of 32k. S1 to S5 speculate with a pair of byte models, folders in Hugging Face's form or trained
here for minutes: S1 counts tokens that differ from plain decoding and those where rounding decides, S2 tokens a pass of
the target, S3 wall clock, S4 the coupling, S5 speed-ups beside transformers'.

Every framework is a process of its own; first all rows of a case are compiled, then timed in turns, a round at a time;
medians, and the least in brackets. A step is the time of all new tokens but the first, by their number. The limit is
the time in which weights and cache are read once, at the rate of the fastest copy that a process of this run measured;
none where they fit into the processor's cache.
Weights are random where speed alone is asked for. Peers run by `--peer-python`, and fail their rows where they are
missing. Prints as it goes, writes JSON.
"""

import argparse
import concurrent.futures
import math
import os
import pathlib
import random
import statistics
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402
from decode_cases import CASES, PAIRS, least_bytes  # noqa: E402

MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def sides_of(args: argparse.Namespace) -> dict:
    """Returns how each framework's process is started."""
    ours, peers = [str(HERE / "decode_drafts.py")], HERE / "peers"
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)

    def checkout(folder: pathlib.Path) -> tuple:
        return ours, MEMORY | {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, paths)])}

    sides: dict[str, tuple] = {"jaxpar": checkout(HERE.parent)}
    if args.older:
        sides["older"] = checkout(pathlib.Path(args.older).resolve())
    if not args.no_peer:
        for name in ("torch", "transformers"):
            sides[name] = ([str(peers / f"{name}_decode.py")], {}, args.peer_python)
    return sides


def times_of(rounds: list[dict]) -> dict:
    """Returns the median and the least time of a row's rounds, a step's where they say how many there are.

    A step is a difference of medians, or of least times, and no median of differences: those of a loaded machine may
    even be negative.
    """
    said = {"rounds": rounds}
    for name, chosen in (("ms", statistics.median), ("least_ms", min)):
        whole, first = (
            chosen([each.get(part, 0.0) for each in rounds]) for part in ("ms", "first_ms")
        )
        said[name] = (whole - first) / rounds[0].get("steps", 1)
    return said


def in_turns(bench: harness.Bench, rows: list[dict], rounds: int, jobs: int = 1) -> list[dict]:
    """Makes all rows of a case, then times them in turns, each second round in the opposite order.

    With several jobs the sides make theirs at the same time, and ours compiles so many programs at once.
    """
    sides = {
        side: [row for row in rows if row["side"] == side]
        for side in dict.fromkeys(row["side"] for row in rows)
    }

    def make(side: str) -> dict:
        if jobs > 1 and side in ("jaxpar", "older"):
            bench.ask(
                side,
                {"do": "prepare", "rows": sides[side], "jobs": jobs},
                bench.row_s * len(sides[side]),
            )
        return {
            row["name"]: told(row, bench.ask(side, row | {"do": "make"})) for row in sides[side]
        }

    def told(row: dict, answer: dict) -> dict:  # a table is printed when the last row is there
        harness.say(
            f"  {row['name']}: {answer.get('failed') or 'made'}, {answer.get('took_s', 0):.0f} s"
        )
        return answer

    # Ours writes what a peer loads.
    first = [side for side in sides if side == "jaxpar" and any("folder" in row for row in rows)]
    answers = {name: answer for side in first for name, answer in make(side).items()}
    with concurrent.futures.ThreadPoolExecutor(len(sides) if jobs > 1 else 1) as pool:
        for made in pool.map(make, [side for side in sides if side not in first]):
            answers |= made
    times: dict[str, list] = {name: [] for name in answers}
    with harness.alone():
        for number in range(rounds):
            for row in rows[:: -1 if number % 2 else 1]:
                name = row["name"]
                if "failed" in answers[name]:
                    continue
                answer = bench.ask(row["side"], {"do": "round", "name": name})
                if "failed" in answer:
                    answers[name] = answer
                else:
                    times[name].append(answer)
    for side in {row["side"] for row in rows} & set(bench.workers):
        bench.ask(side, {"do": "drop"})
    made = [row | answers[row["name"]] for row in rows]
    return [row | (times_of(times[row["name"]]) if times[row["name"]] else {}) for row in made]


def rows_of(name: str, case: dict, args: argparse.Namespace, sides: dict) -> list[dict]:
    """Returns what is asked of the sides for a case, ours first: it writes what a peer loads."""
    words, others = (
        args.only.split(",") if args.only else [""],
        args.skip.split(",") if args.skip else [],
    )
    common = {key: value for key, value in case.items() if key != "sides"} | {
        "spend_s": args.spend_s
    }
    draws = random.Random(0)

    def shape(rows: int) -> dict:
        if not case.get("exported"):
            return common | {"rows": rows}
        places, size = range(case["prompt"]), case["model"]["vocab_size"]
        return common | {
            "rows": rows,
            "prompts": [[draws.randrange(size) for _ in places] for _ in range(rows)],
        }

    return [
        batch | {"side": side, "row": row, "name": f"{name} {row} {batch['rows']}"}
        for batch in map(
            shape, case["rows"] if isinstance(case.get("rows"), list) else [case.get("rows", 1)]
        )
        for side, names in case["sides"].items()
        for row in names
        if side in sides
        and any(word in row for word in words)
        and not any(word in row for word in others)
    ]


def judged(rows: list[dict], rate: float) -> list[dict]:
    """Adds to rows of one batch size the limit, the best peer and whether the tokens are the same."""
    peers = [row for row in rows if row["side"] != "jaxpar" and "ms" in row]
    best = {
        f"best_peer_{name}": min((row[name] for row in peers), default=math.inf)
        for name in ("ms", "least_ms")
    }
    parameters = next((row["parameters"] for row in rows if "parameters" in row), 0)
    size = least_bytes(rows[0], parameters)
    whose = next(
        (row["tokens"] for row in rows if row["side"] == "jaxpar" and "tokens" in row), None
    )
    plain: dict = {}
    for row in rows:
        row |= best | ({"limit_ms": 1e3 * size / rate} if size > harness.CACHE else {})
        if row["row"].split()[-1] in ("plain", "dynamic") and "ms" in row:
            plain[row["side"]] = {"plain_ms": row["ms"], "plain_least_ms": row["least_ms"]}
        row |= plain.get(row["side"], {}) | {"texts": len(row.pop("prompts", ()))}
        tokens = row.pop("tokens", None)
        if tokens is not None and whose is not None:
            row["same"] = sum(a == b for a, b in zip(tokens, whose, strict=True)) / len(whose)
    return rows


def best_ratio(row: dict) -> str:
    """Returns how many times faster than the best peer of the case ours is, by medians and by least times."""
    if row["side"] != "jaxpar" or row["best_peer_ms"] == math.inf:
        return ""
    return f"{row['best_peer_ms'] / row['ms']:.2f}x ({row['best_peer_least_ms'] / row['least_ms']:.2f})"


TIMES = {
    "row": lambda r: r["row"],
    "rows": lambda r: str(r["rows"]),
    "ms (least)": lambda r: f"{r['ms']:.3f} ({r['least_ms']:.3f})",
}
STEPS = TIMES | {
    "tokens/s": lambda r: (
        f"{r['rows'] * r.get('readers', 1) / r['ms'] * 1e3:,.0f}" if r["kind"] == "steps" else ""
    ),
    "limit ms": lambda r: f"{r['limit_ms']:.3f}",
    "of limit": lambda r: f"{100 * r['limit_ms'] / r['ms']:.0f} %",
    "of best peer": best_ratio,
    "same texts": lambda r: f"{100 * r['same']:.0f} %",
    "GiB": lambda r: f"{r['peak_bytes'] / 2**30:.2f}",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "note": lambda r: r.get("note", ""),
}
DRAFTS = TIMES | {
    "tokens a pass": lambda r: f"{r['tokens_a_pass']:.2f}",
    "of plain": lambda r: (
        f"{r['plain_ms'] / r['ms']:.2f}x ({r['plain_least_ms'] / r['least_ms']:.2f})"
    ),
    "T": lambda r: f"{r['temperature']:g}",
    "texts that differ": lambda r: f"{r['differing']} of {r['texts']}, {r['near_ties']} near ties",
    "same texts": lambda r: f"{100 * r['same']:.0f} %",
    "coupled / (1 - TV)": lambda r: f"{r['coupled']:.3f} / {r['most']:.3f} = {r['ratio']:.3f}",
    "kept": lambda r: f"{r['kept']:.3f}",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "note": lambda r: r.get("note", ""),
}


def filled(columns: dict, rows: list[dict]) -> dict:
    """Returns the columns in which a row has something to say; the last stays, for why a row failed."""

    def says(show, row: dict) -> bool:
        try:
            return bool(show(row))
        except (KeyError, TypeError, ZeroDivisionError):
            return False

    kept = {name: show for name, show in columns.items() if any(says(show, row) for row in rows)}
    return kept | {"note": columns["note"]}


def pair_of(bench: harness.Bench, args: argparse.Namespace) -> dict:
    """Returns the folders of target and draft and the prompts, training what is not there."""
    request = PAIRS[args.size] | {
        "do": "pair",
        "folder": str(args.out.parent.resolve() / f"pair-{args.size}"),
    }
    for name in ("target", "draft"):
        if given := getattr(args, name):
            request[f"{name}_folder"] = str(pathlib.Path(given).resolve())
    if args.train_s:
        request["train_s"] = dict(
            zip(("target", "draft"), map(float, args.train_s.split(",")), strict=True)
        )
    request["grow"] = args.grow
    pair = bench.ask("jaxpar", request, 3 * sum(request["train_s"].values()) + args.row_s)
    if "failed" in pair:
        raise SystemExit(f"no pair of models: {pair['failed']}")
    for name, said in pair["said"].items():
        print(f"{name}: {said}", flush=True)
    return pair


def started(bench: harness.Bench, sides: dict, args: argparse.Namespace) -> float:
    """Tells what machine this is; returns the rate of the fastest copy, and refuses processes of another checkout."""
    size = {"full": 2**31, "cpu": 2**28, "tiny": 2**20}[args.size]
    request = {"do": "copy", "bytes": size, "spend_s": args.spend_s}
    said = {side: bench.ask(side, request) for side in sides if side != "transformers"}
    for side, answer in said.items():
        print(
            f"{side}: "
            + (answer.get("failed") or "{device}, {version}, copy {rate:.3g} B/s".format(**answer))
        )
        if "from" in answer and answer["from"] != sides[side][1]["PYTHONPATH"].split(os.pathsep)[0]:
            raise SystemExit(f"{side} would be measured from {answer['from']}")
    return max((answer["rate"] for answer in said.values() if "rate" in answer), default=math.nan)


def measure(args: argparse.Namespace) -> None:
    """Measures every row of the chosen cases and prints them."""
    sides, pair = sides_of(args), None
    bench, table = harness.Bench(sides, args.budget_s, args.row_s), harness.Table({}, args.out)
    known = {name: sizes[args.size] for name, sizes in CASES.items() if args.size in sizes}
    names = harness.chosen(args.cases, known)
    rate = started(bench, sides, args)
    for name in names:
        case, columns = known[name], DRAFTS if name.startswith("S") else STEPS
        if columns is DRAFTS:
            pair = pair or pair_of(bench, args)
            folders, prompts = (
                pair["folders"],
                pair["prompts"][: min(case["count"], args.prompts or case["count"])],
            )
            case = case | {"folders": folders, "prompts": prompts}
            case |= {
                "folder": folders["target"],
                "assistant": folders["draft"],
            }  # as the peer calls them
        with tempfile.TemporaryDirectory() as folder:
            case = case | ({"folder": f"{folder}/hf"} if case.get("exported") else {})
            rounds = min(args.rounds, case.get("rounds", args.rounds))
            rows = in_turns(bench, rows_of(name, case, args, sides), rounds, args.jobs)
        sizes = dict.fromkeys(row["rows"] for row in rows)
        rows = [
            row
            for size in sizes
            for row in judged([row for row in rows if row["rows"] == size], rate)
        ]
        table.columns = filled(columns, rows)
        table.head(f"{name}: {case['about']}")
        for row in rows:
            table.add(row)
        if any(row.get("peak_bytes", 0) > 20e9 for row in rows):
            bench.close()  # the pools of two frameworks with such arrays fill a card
    bench.close()


def main() -> None:
    """Parses flags and measures."""
    parser = harness.arguments(__doc__, CASES, "decode.json", 3000)
    parser.set_defaults(row_s=300)
    parser.add_argument("--size", choices=("full", "cpu", "tiny"), default="full")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--skip", help="no rows whose name contains one of these words, separated by commas"
    )
    parser.add_argument("--older", help="a checkout of another commit, for D4")
    parser.add_argument(
        "--peer-python",
        default=sys.executable,
        help="the interpreter that has torch and transformers",
    )
    parser.add_argument("--target", help="a folder in Hugging Face's form: a model of bytes")
    parser.add_argument("--draft", help="likewise, a smaller one")
    parser.add_argument(
        "--grow",
        type=int,
        help="MLP units that the target is given, all new ones idle: more to read",
    )
    parser.add_argument(
        "--prompts", type=int, help="prompts that are continued at most, where drafts are measured"
    )
    parser.add_argument("--train-s", help="seconds of training of the two, as 900,80")
    args = parser.parse_args()
    if args.tiny:
        args.size, args.rounds, args.spend_s = "tiny", min(args.rounds, 2), 0.01
    measure(args)


if __name__ == "__main__":
    main()
