"""Does "converged" mean right? Every method on sixty recurrences, in four float types, from no step to 10,000.

    JAX_PLATFORMS=cpu python bench/certificates.py                       # the whole grid: hours of one core
    JAX_PLATFORMS=cpu python bench/certificates.py --cover               # each pair once: 20 minutes
    JAX_PLATFORMS=cpu python bench/certificates.py --cover --part 1/4    # a quarter of it, beside three others
    JAX_PLATFORMS=cpu python bench/certificates.py --methods newton --dtypes float32,float64 --lengths 2000

A row is judged as `tests/solve/judge.py` says: states and gradients may differ from the loop's by ten times what the
loop differs from itself in float64, and ten times the tolerance. Prints rows that are called converged and are wrong,
rows that are wrong although the loop finished them, and counts; writes JSON. Exits with 1 after a wrong row.
"""

import argparse
import collections
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests"), str(HERE.parent / "tests" / "solve")]

import method_grid as grid  # noqa: E402


def wanted(args):
    """Returns the rows that the flags ask for."""
    rows = grid.cover() if args.cover else grid.whole()
    if args.lengths:
        lengths = [int(length) for length in args.lengths.split(",")]
        rows = [
            row._replace(length=length) for row in rows if row.length == 0 for length in lengths
        ]
    for name in ("method", "recurrence", "dtype"):
        chosen = getattr(args, f"{name}s")
        if chosen:
            rows = [row for row in rows if getattr(row, name) in chosen.split(",")]
    part, parts = map(int, args.part.split("/"))
    return rows[part - 1 :: parts]


def kind_of(verdict):
    """Returns in one word what became of a row."""
    if verdict.converged:
        return "solved" if verdict.is_right else "WRONG"
    return "finished" if verdict.is_right else "off"


def main():
    """Judges the rows and prints what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cover", action="store_true", help="each pair of two axes once, not all rows"
    )
    parser.add_argument(
        "--methods", help=f"separated by commas, of {','.join(grid.METHODS)}; by default all"
    )
    parser.add_argument("--recurrences", help="names, separated by commas")
    parser.add_argument("--dtypes", help=f"of {','.join(grid.DTYPES)}")
    parser.add_argument(
        "--lengths", help="any lengths, in place of those of the grid; not with --cover"
    )
    parser.add_argument("--part", default="1/1", help="2/4 is the second of four parts of the rows")
    parser.add_argument(
        "--budget-s", type=float, default=1e9, help="no row starts after these seconds"
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "certificates.json")
    args = parser.parse_args()
    counts = collections.defaultdict(collections.Counter)
    kept = []
    began = time.monotonic()
    for row in wanted(args):
        if time.monotonic() - began > args.budget_s:
            counts[row.method]["left out"] += 1
            continue
        verdict = grid.judged(row)
        kind = kind_of(verdict)
        counts[row.method][kind] += 1
        kept.append(row._asdict() | verdict._asdict() | {"kind": kind})
        if kind in ("WRONG", "off"):
            said = f"states {verdict.value:.2g}, gradient {verdict.gradient:.2g}, reported {verdict.reported:.2g}"
            print(kind, *row, said, flush=True)
    kinds = ("solved", "finished", "off", "WRONG", "left out")
    print(f"\n| method | {' | '.join(kinds)} |\n{'|---' * (len(kinds) + 1)}|")
    for method, found in counts.items():
        print(f"| {method} | {' | '.join(str(found[kind]) for kind in kinds)} |")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(kept, indent=1))
    sys.exit(any(found["WRONG"] for found in counts.values()))


if __name__ == "__main__":
    main()
