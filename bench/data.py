"""How fast is text made into tokens and read as batches, and in how much memory? Beside datasets and grain.

    python bench/data.py --peer-python PYTHON       # an interpreter that has datasets, grain and tokenizers
    python bench/data.py --no-peer --cases read     # ours alone
    python bench/data.py --cases memory --sizes-mb 100,400,1600
    python bench/data.py --tiny                     # checks that the script runs

Files are JSONL of documents of about 2 kB, made for it. Every row is a process of its own that works alone, and the
processor's seconds are counted, of all its threads: they hold on a machine that has other work too.

"tokenise" makes the tokens of a file by one BPE of 8,192 symbols and keeps them on disk: ours by `open_corpus`, the
peer's by `load_dataset` and `map`. "tokenizer alone" encodes the same texts, which are in memory: the limit.
"read" has batches of shuffled windows of those tokens. "windows alone" copies windows out of a memory map at places
that are drawn before: the limit. "again" is what opening it takes a second time; "resumed" the first batch of a run
that goes on at step 10,000. "packed" tells documents apart besides. "layout=" are rows by `data.layout`; the first
batch of packed rows waits until all documents are packed. grain reads the array that ours has made.
"memory" tokenises files of growing size, a byte a token: the most that the process has beside mapped files.
"""

import argparse
import os
import pathlib
import shutil
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402

CASES = ("tokenise", "read", "memory")
ROWS = {
    "tokenise": {"tokenizer alone": "jaxpar", "jaxpar": "jaxpar", "datasets": "peer"},
    "read": {
        "windows alone": "jaxpar",
        "jaxpar": "jaxpar",
        "jaxpar packed": "jaxpar",
        "jaxpar layout=stream": "jaxpar",
        "jaxpar layout=packed": "jaxpar",
        "datasets": "peer",
        "grain": "peer",
    },
    "memory": {"jaxpar": "jaxpar", "datasets": "peer"},
}
COLUMNS = {
    "row": lambda r: r["row"],
    "file MB": lambda r: f"{r['bytes'] / 1e6:,.0f}",
    "million tokens": lambda r: f"{r['tokens'] / 1e6:,.1f}",
    "processor s": lambda r: f"{r['cpu_s']:.1f}",
    "million tokens a processor second": lambda r: f"{r['tokens'] / r['cpu_s'] / 1e6:,.2f}",
    "of the limit": lambda r: f"{r['of_limit']:.2f}",
    "memory MB": lambda r: f"{r['host_bytes'] / 1e6:,.0f}",
    "again s": lambda r: f"{r['again_s']:.2f}",
    "resumed ms": lambda r: f"{1e3 * r['resumed_s']:.1f}",
    "note": lambda r: r.get("note", ""),
}


def measure(args: argparse.Namespace) -> None:
    """Measures the rows of the chosen cases, on files that are removed then."""
    env = {
        "PYTHONPATH": os.pathsep.join([str(HERE.parent), str(HERE)]),
        "JAX_PLATFORMS": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
    }
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    sides = {
        "jaxpar": ([str(HERE / "data_rows.py")], env),
        "peer": ([str(HERE / "peers" / "data_loaders.py")], env, args.peer_python),
    }
    bench, table = harness.Bench(sides, args.budget_s, args.row_s), harness.Table(COLUMNS, args.out)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="data-", dir=args.folder))
    common = {
        "folder": str(folder),
        "length": 64 if args.tiny else 1024,
        "rows": 16,
        "at": 10_000,
        "spend_s": args.spend_s,
    }
    try:
        for case in harness.chosen(args.cases, CASES):
            table.head(case)
            for size in args.sizes if case == "memory" else args.sizes[:1]:
                request = common | {"bytes": size, "path": str(folder / f"{size}.jsonl")}
                request |= {"tokenizer": "bytes" if case == "memory" else "bpe"}
                made = bench.ask("jaxpar", request | {"do": "make"})
                bench.close()
                limit = None
                for row, side in ROWS[case].items():
                    if side == "peer" and args.no_peer:
                        continue
                    asked = request | {"row": row, "do": "read" if case == "read" else "tokenise"}
                    found = {
                        "row": row,
                        "case": case,
                        "bytes": made.get("bytes", size),
                    } | bench.ask(side, asked)
                    bench.close()
                    if "cpu_s" in found:
                        rate = found["tokens"] / found["cpu_s"]
                        limit = limit or (rate if "alone" in row else None)
                        if limit and "alone" not in row:
                            found["of_limit"] = rate / limit
                    table.add(found)
    finally:
        bench.close()
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Parses flags and measures."""
    parser = harness.arguments(__doc__, CASES, "data.json", 3000)
    parser.set_defaults(row_s=900, spend_s=3.0)
    parser.add_argument(
        "--peer-python", default=sys.executable, help="the interpreter that has datasets and grain"
    )
    parser.add_argument(
        "--sizes-mb", default="16,100,400,1600", help="of files; tokenise and read take the first"
    )
    parser.add_argument(
        "--folder", help="where files are made; by default where temporary files are"
    )
    args = parser.parse_args()
    args.sizes = [int(1e6 * float(size)) for size in args.sizes_mb.split(",")]
    if args.tiny:
        args.sizes, args.spend_s = [1_000_000, 2_000_000], 0.05
    measure(args)


if __name__ == "__main__":
    main()
