"""Cost of a certificate to Newton's method, and the rows that it keeps, against another version of the library.

    git worktree add /tmp/older d3543d0
    JAX_PLATFORMS=cpu taskset -c 0 python bench/certificate_times.py run --library . --out new.json &
    JAX_PLATFORMS=cpu taskset -c 1 python bench/certificate_times.py run --library /tmp/older --out old.json
    python bench/certificate_times.py compare new.json old.json

`run` solves every recurrence of `tests/solve/method_grid.py` by a named `Newton()`, in float32 and
float64, of 64 and 2,000 steps (--lengths), and takes the least of at least five times. Compiling is
not counted. `compare` prints which rows that the second file has right are right in the first one,
and the ratio of times of rows that both solve by iterating. Half an hour of a core each; --part 1/4
takes a quarter.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
DTYPES = ("float32", "float64")
SPEND_S = 0.6
"""Seconds for which a row is timed, after five runs."""


def solved_rows(args):
    """Solves and times the rows; yields one dictionary each."""
    import jax
    import jax.numpy as jnp
    import method_grid as grid
    from judge import excess, in_float64, nudged

    from jaxpar.solve import Newton, parallel_scan

    lengths = [int(length) for length in args.lengths.split(",")]
    names = [recurrence.name for recurrence in grid.RECURRENCES]
    rows = [(name, dtype, length) for name in names for dtype in DTYPES for length in lengths]
    part, parts = map(int, args.part.split("/"))
    for name, dtype, length in rows[part - 1 :: parts]:
        is_wide = dtype == "float64"
        with jax.enable_x64(is_wide):
            recurrence, start, inputs, _ = grid.case(name, dtype, length)
            step = recurrence.step

            def loop(start, inputs, step=step):
                return grid.loop_of(step, start, inputs)

            def solve(start, inputs, step=step):
                def body(h, x):
                    after = step(h, x)
                    return after, after

                _, states, stats = parallel_scan(
                    body, start, inputs, method=Newton(), with_stats=True
                )
                return states, stats.converged, stats.iterations

            wanted = jax.jit(loop)(start, inputs)
            moved = start, inputs
            if is_wide:
                moved = nudged(moved, float(jnp.finfo(dtype).eps))
        with jax.enable_x64(True):
            exact = jax.jit(loop)(*map(in_float64, moved))
        with jax.enable_x64(is_wide):
            program = jax.jit(solve)
            states, converged, iterations = program(start, inputs)
            rtol = 1.5 * float(jnp.finfo(dtype).eps) ** 0.75
            seconds = least_time(lambda program=program, a=start, b=inputs: program(a, b))
        yield {
            "row": [name, dtype, length],
            "converged": bool(converged),
            "is_near": float(excess(states, wanted, exact, rtol)) <= 1,
            "iterations": int(iterations),
            "seconds": seconds,
        }


def least_time(call):
    """Returns the least time of a call that returns arrays."""
    import jax

    times = []
    began = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - began < SPEND_S and len(times) < 200):
        at = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - at)
    return min(times)


def compare(new, old):
    """Prints which rows are kept, and the ratios of times."""
    new = {tuple(row["row"]): row for row in new}
    old = {tuple(row["row"]): row for row in old}
    both = [key for key in old if key in new]
    was_right = [key for key in both if old[key]["converged"] and old[key]["is_near"]]
    kept = [key for key in was_right if new[key]["converged"] and new[key]["is_near"]]
    lost = [" ".join(map(str, key)) for key in was_right if key not in kept]
    for name, rows in (("first", new), ("second", old)):
        wrong = [key for key in both if rows[key]["converged"] and not rows[key]["is_near"]]
        print(f"{name}: {len(wrong)} of {len(both)} rows converged and wrong")
    share = len(kept) / len(was_right)
    print(f"kept {len(kept)} of {len(was_right)} ({share:.1%}); lost: {', '.join(lost) or 'none'}")
    print_ratios([(new[key], old[key]) for key in kept])


def print_ratios(pairs):
    """Prints the ratios of times by length, of rows that both versions solve by iterating."""
    print(
        "\n| steps | rows | median | geometric mean | at most 1.3x | most |\n|---|---|---|---|---|---|"
    )
    ratios = {}
    for one, other in pairs:
        if one["iterations"] and other["iterations"]:
            ratio = one["seconds"] / other["seconds"]
            ratios.setdefault(one["row"][2], []).append(ratio)
    for length, found in sorted(ratios.items()):
        fair = sum(ratio <= 1.3 for ratio in found)
        print(
            f"| {length:,} | {len(found)} | {statistics.median(found):.2f}x "
            f"| {statistics.geometric_mean(found):.2f}x | {fair} | {max(found):.2f}x |"
        )


def main():
    """Runs or compares."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("--library", type=pathlib.Path, default=HERE.parent)
    run.add_argument("--out", type=pathlib.Path, required=True)
    run.add_argument("--lengths", default="64,2000")
    run.add_argument("--part", default="1/1", help="2/4 is the second of four parts of the rows")
    comparing = commands.add_parser("compare")
    comparing.add_argument("files", type=pathlib.Path, nargs=2)
    args = parser.parse_args()
    if args.command == "compare":
        compare(*(json.loads(file.read_text()) for file in args.files))
        return
    tests = HERE.parent / "tests"
    sys.path[:0] = [str(args.library.resolve()), str(tests), str(tests / "solve")]
    rows = []
    for row in solved_rows(args):
        rows.append(row)
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
