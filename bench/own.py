"""What does `jaxpar.own` cost beside a loop that one writes by hand, and beside Redco? On simulated devices.

    python bench/own.py                                   # one device and eight, a small transformer and a wider one
    python bench/own.py --redco FOLDER                    # of pip install --no-deps --target FOLDER redco tqdm
    python bench/own.py --cases data2.tensor4 --rounds 9 --steps 40
    python bench/own.py --tiny                            # checks that the script runs

The model is the transformer of linen of `experiments.own`, on sums, 64 rows a batch, by `optax.adam`. "by hand" is the
plain loop of flax and optax that one writes: `jax.jit` of a step, `NamedSharding`s given by name, the loss read a step
late. Redco's (arXiv:2310.16355) `Trainer` takes the rules of its own `Deployer`, which knows data and tensor alone.

The sides take turns in one process, so many steps each, and a turn counts all of a step: collating examples, placing
the batch, the step, what is read of it. "of by hand" is the median over rounds of the ratio within a round, of seconds
and of the processor's seconds; these hold on a machine that has other work too. "first" is the first turn less a usual
one, in the processor's seconds: compiling, and for `jaxpar.own` reading the axes off. "loss" is that of examples that
were held out: the same of the first two, which begin alike and see the same batches.

Then, of each case, how many parameters have the axes of the hand-written side, and those that have not.
"""

import argparse
import pathlib
import statistics
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402

CASES = {
    "one": {"data": 1},
    "data8": {"data": 8},
    "data2.tensor4": {"data": 2, "tensor": 4},
    "data2.fsdp2.tensor2": {"data": 2, "fsdp": 2, "tensor": 2},
}
SIZES = {"small": (64, 2), "wide": (256, 4)}  # width and layers


def ratio(key: str):
    """Returns how a ratio is shown."""
    return lambda r: f"{r[key]:.2f}x"


COLUMNS = {
    "row": lambda r: r["row"],
    "ms (least)": lambda r: f"{r['ms']:.1f} ({r['least_ms']:.1f})",
    "processor ms": lambda r: f"{r['cpu_ms']:.1f}",
    "steps/s of by hand": ratio("of_hand"),
    "by processor time": ratio("cpu_of_hand"),
    "first, processor s": lambda r: f"{r['first_s']:.1f}",
    "loss": lambda r: f"{r['loss']:.3f}",
    "note": lambda r: r.get("note", ""),
}


def judged(side: str, rows: dict, steps: int) -> dict:
    """Returns a side's row: medians of its turns, and how its speed compares with the hand-written loop's."""
    row = rows[side]
    if "failed" in row:
        return {"row": side} | row
    wall, cpu = row["wall"][1:], row["cpu"][1:]
    found = {
        "row": side,
        "ms": 1e3 * statistics.median(wall) / steps,
        "least_ms": 1e3 * min(wall) / steps,
        "cpu_ms": 1e3 * statistics.median(cpu) / steps,
        "first_s": row["cpu"][0] - statistics.median(cpu),
        "loss": row["loss"],
        "turns": row,
    }
    if side != "by hand" and "failed" not in rows["by hand"]:
        for key, name, own in (("of_hand", "wall", wall), ("cpu_of_hand", "cpu", cpu)):
            pairs = zip(rows["by hand"][name][1:], own, strict=True)
            found[key] = statistics.median(hand / mine for hand, mine in pairs)
    return found


def tell_axes(axes: dict[str, dict[str, list[str]]]) -> None:
    """Prints how many parameters lie as the hand-written ones, and those that do not."""
    for side in ("jaxpar.own", "redco"):
        known = {path: said for path, said in axes.items() if side in said}
        if not known:
            continue
        others = {path: said for path, said in known.items() if said[side] != said["by hand"]}
        print(f"\n{side}: {len(known) - len(others)} of {len(known)} parameters lie as by hand")
        for path, said in others.items():
            shown = {
                name: ", ".join(axis or "-" for axis in said[name]) for name in (side, "by hand")
            }
            print(f"  {path}: {shown[side]}; by hand {shown['by hand']}")


def measure(args: argparse.Namespace) -> None:
    """Measures each case in a process of its own."""
    env = {"PYTHONPATH": str(HERE.parent), "JAX_PLATFORMS": "cpu"}
    bench = harness.Bench({"own": ([str(HERE / "own_rows.py")], env)}, args.budget_s, args.row_s)
    table = harness.Table(COLUMNS, args.out)
    try:
        for name in harness.chosen(args.cases, CASES):
            mesh = CASES[name]
            for size in harness.chosen(args.sizes, SIZES):
                width, layers = SIZES[size]
                sides = ["jaxpar.own", "by hand"]
                if args.redco and mesh.get("fsdp", 1) == 1:
                    sides.append("redco")
                devices = 1 if name == "one" else 8
                request = {
                    "mesh": mesh, "devices": devices, "width": width, "layers": layers, "steps": args.steps,
                    "total": args.steps * (args.rounds + 1) + 1, "sides": sides, "redco": args.redco,
                }  # fmt: skip
                table.head(f"{name}, {size}: {layers} layers of {width}")
                answer = bench.ask("own", request)
                bench.close()
                if "failed" in answer:
                    table.add({"row": "all", "failed": answer["failed"]})
                    continue
                for side in sides:
                    table.add(
                        judged(side, answer["rows"], args.steps) | {"case": name, "size": size}
                    )
                tell_axes(answer["axes"])
    finally:
        bench.close()


def main() -> None:
    """Parses flags and measures."""
    parser = harness.arguments(__doc__, CASES, "own.json", 3000)
    parser.set_defaults(row_s=600)
    parser.add_argument("--rounds", type=int, default=7, help="turns of each side that are counted")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--redco", default="", help="a folder that holds Redco and tqdm")
    parser.add_argument(
        "--sizes", help=f"separated by commas, of {','.join(SIZES)}; by default all"
    )
    args = parser.parse_args()
    args.redco = str(pathlib.Path(args.redco).resolve()) if args.redco else ""
    if args.tiny:
        args.rounds, args.steps, args.sizes = 2, 2, "small"
    measure(args)


if __name__ == "__main__":
    main()
