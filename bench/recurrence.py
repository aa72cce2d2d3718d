"""Nonlinear recurrences h[t] = f(h[t-1], x[t]): ours beside lax.scan, DEER, pararnn-torch and cuDNN, in one run.

    python bench/recurrence.py --deer PATH                  # the default cases; PATH: a checkout of DEER's source
    python bench/recurrence.py --cases B1,C2.16 --budget-s 200
    JAX_PLATFORMS=cpu python bench/recurrence.py --tiny     # any machine: checks that the script runs

B: ParaGRU and ParaLSTM with pre-activations given and recurrent weights of U(-0.9, 0.9), a trained scale. C: dense
cells, recurrent matrices of N(0, 1/n), the input product inside every row. D: full cells 768 wide in bfloat16 with a
float32 state. Times are medians as in bench/scan.py, inputs rotated so that they come from memory, compile time apart,
float32 products in float32 (TF32 only where a row says so). Iterations and residual are of the forward pass; errors
are against a float64 sequential run (ys, or the gradient by the inputs), relative to the largest entry; the limit is
one read of all inputs and one write of all outputs (of dense cells up to 64 wide also of one Jacobian an iteration) at
the copy rate of the same process. The way back is the same for all our methods that iterate, so few of them are timed
with it. A loop that calls the step from Python is timed over 256 steps and scaled. Last, a table of what `Auto` (inside
jit, where it cannot measure) and `choose` (outside, where it does) picked, beside the best method. Prints as it goes,
writes JSON.
"""

import argparse
import math
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402


def case(
    cell: str, batch: int, length: int, n: int, dtype: str = "float32", scale: str = "gain 1"
) -> dict:
    """Returns the request of a case."""
    return dict(cell=cell, batch=batch, length=length, n=n, dtype=dtype, scale=scale)


CASES = {
    "B1.512": case("para_gru", 8, 512, 256, scale="uniform"),
    "B1.2048": case("para_gru", 8, 2048, 256, scale="uniform"),
    "B1.4096": case("para_gru", 8, 4096, 256, scale="uniform"),
    "B2": case("para_gru", 8, 2048, 2048, "bfloat16", "uniform"),
    "B3.512": case("para_lstm", 8, 512, 256, scale="uniform"),
    "B3.2048": case("para_lstm", 8, 2048, 256, scale="uniform"),
    "B3.4096": case("para_lstm", 8, 4096, 256, scale="uniform"),
    "B4": case("para_gru", 1, 131072, 256, scale="uniform"),
    "C1.10k": case("gru", 16, 10_000, 1),
    "C1.100k": case("gru", 16, 100_000, 1),
    "C1.300k": case("gru", 16, 300_000, 1),
    **{f"C2.{n}": case("gru", 16, 10_000, n) for n in (8, 16, 32, 64, 128, 256)},
    **{f"C2.{n}.100k": case("gru", 16, 100_000, n) for n in (8, 16, 32, 64)},
    "C3": case("tanh", 1, 65_536, 32, scale="gain 0.9"),
    "C4": case("gru", 4, 17_984, 32),
    "D1": case("lstm", 16, 1024, 768, "bfloat16"),
    "D2": case("gru", 1, 16_384, 768, "bfloat16"),
}
MAIN = ("B1.2048", "B3.2048", "C2.16", "C3")  # where every peer and method is timed
LONG = ("C1.300k", "C2.8.100k", "C2.32.100k", "C2.64.100k")  # only when asked for
GATES = {"para_gru": 3, "para_lstm": 3, "gru": 3, "lstm": 4, "tanh": 1}


def rows_of(name: str, request: dict) -> list[tuple[str, str]]:
    """Returns (side, row) of a case, peers first, so that a row of ours can be compared at once."""
    is_main, is_narrow = name in MAIN, request["n"] <= 64
    if name.startswith("B"):
        rows = [("torch", "pararnn fused K=3"), ("torch", "pararnn fused K=4")]
        rows += [("torch", "pararnn eager K=3"), ("torch", "pararnn loop")] if is_main else []
        ours = ["Newton", "Fused", "ParallelBackward"] + (
            ["Sequential", "Jacobi"] if is_main else []
        )
    else:
        rows = [("torch", "cuDNN")] + ([("torch", "cuDNN tf32")] if is_main else [])
        rows += [("deer", "DEER")] if is_narrow else []
        rows += [("deer", "DEER highest")] if is_main and is_narrow else []
        ours = (
            ["Sequential"]
            + (["Newton", "ParallelBackward"] if is_narrow else [])
            + ["Quasi", "Jacobi"]
        )
        ours += ["GaussSeidel"] + (["Elk", "Elk quasi"] if name in ("C2.8", "C3") else [])
    rows += [("jax", f"lax.scan unroll={k}") for k in ((1, 8, 32) if is_main else (8,))]
    ours += ["Auto"] + (["choose"] if name in ("C1.10k", "C2.16", "C3", "C4", "D2") else [])
    return rows + [("jax", f"jaxpar {method}") for method in ours]


def tiny(request: dict) -> dict:
    """Returns the case at a size for any machine."""
    return request | {"length": 200, "batch": 2, "n": min(request["n"], 8)}


def limit_bytes(request: dict, direction: str) -> float:
    """Returns the least bytes of a pass; see the module's text."""
    array = (
        request["length"]
        * request["batch"]
        * request["n"]
        * (2 if request["dtype"] == "bfloat16" else 4)
    )
    gates, states = GATES[request["cell"]], 2 if request["cell"] == "para_lstm" else 1
    dense = request["cell"][:4] != "para" and request["n"] <= 64
    once = array * (gates + states + (request["n"] if dense else 0))
    return once if direction == "fwd" else 2 * once + array * (gates + 1)


def method_of(row: str, backward: bool, problem: tuple):
    """Returns the method of a row of ours; "choose" measures on the problem, (f, init, xs), whose values are known."""
    from jaxpar import solve

    name = row.removeprefix("jaxpar ")
    if name == "choose":
        return solve.choose(*problem, gradient=backward).method
    if name == "Auto":
        return solve.Auto(gradient=backward)
    return solve.Elk(quasi=True) if name == "Elk quasi" else getattr(solve, name)()


def solver(request: dict, notes: dict, w, xs):
    """Returns solve(w, xs) -> (ys, what it says of itself) for a row; `notes` gets what is known while it is traced.

    Batches are a leading axis of the state, as `lax.scan` has them.
    """
    import jax
    import problems

    cell, row = request["cell"], request["row"]
    if row.startswith("lax.scan"):
        unroll = int(row.partition("=")[2])
        return lambda w, xs: (problems.sequential(cell, w, xs, unroll), {})
    from jaxpar.solve import parallel_scan

    def problem(w, xs):
        leaf = jax.tree.leaves(xs)[0]
        start = problems.initial(cell, leaf.shape[1:], leaf.dtype)
        return problems.step_of(cell, w, leaf.dtype), start, problems.input_projections(cell, w, xs)

    begin = time.perf_counter()
    method = method_of(
        row, request["direction"] == "fwd+bwd", problem(w, xs) if row == "jaxpar choose" else ()
    )
    if row == "jaxpar choose":
        notes["choose_s"] = time.perf_counter() - begin

    def solve(w, xs):
        _, ys, stats = parallel_scan(*problem(w, xs), method=method, with_stats=True)
        notes["picked"] = type(stats.method).__name__
        return ys, {name: getattr(stats, name) for name in ("iterations", "residual", "converged")}

    return solve


class JaxWorker:
    """Answers rows of JAX; keeps the arrays and the float64 solution of the case in hand."""

    def __init__(self, solver):
        """Takes solver(request, notes, w, xs) -> solve(w, xs) -> (ys, what it says of itself)."""
        self.solver = solver
        self.key = None
        self.data, self.expected, self.notes = None, None, {}
        self.programs = harness.Programs(self.program)

    def __call__(self, request: dict) -> dict:
        """Compiles, checks and times a row."""
        return harness.answer_row(self, request)

    def load(self, request: dict) -> None:
        """Draws the case, and solves a part of it in float64."""
        import jax
        import jax.numpy as jnp
        import problems

        cell, shape = request["cell"], tuple(request[k] for k in ("length", "batch", "n"))
        key = (cell, *shape, request["dtype"], request["scale"])
        if key == self.key:
            return
        self.data, self.expected, self.key, self.programs.ready = None, None, None, {}
        wide = (
            cell in problems.GATES and shape[2] > 64
        )  # there a float64 reference takes an accelerator
        w, xs = problems.weights(cell, shape[2], request["scale"]), problems.inputs(cell, *shape)
        g = problems.inputs("tanh", *shape, seed=2)
        xs, g = jax.tree.map(lambda x: jnp.asarray(x, request["dtype"]), (xs, g))
        w = jax.tree.map(lambda x: jnp.asarray(x, request["dtype"] if wide else "float32"), w)
        copies = harness.copies_beyond_cache(sum(x.nbytes for x in jax.tree.leaves(xs)))
        self.data = w, [jax.tree.map(jnp.copy, xs) for _ in range(copies)], g
        ys, _, dxs = problems.reference(cell, *problems.part(cell, w, xs, g), on_accelerator=wide)
        self.expected, self.key = (ys, jax.tree.leaves(dxs)), key

    def program(self, request: dict) -> tuple:
        """Returns the function of a row and its arguments."""
        import jax

        assert self.data
        w, copies, g = self.data
        notes = self.notes.setdefault((request["row"], request["direction"]), {})
        solve = self.solver(request, notes, w, copies[0])

        def both(w, xs, g):
            return jax.vjp(lambda w, xs: solve(w, xs)[0], w, xs)[1](g)

        return (
            (both, (w, copies[0], g))
            if request["direction"] == "fwd+bwd"
            else (solve, (w, copies[0]))
        )

    def measure(self, request: dict) -> dict:
        """Checks and times a row of the case in hand."""
        import jax
        import problems

        assert self.data and self.expected
        backward = request["direction"] == "fwd+bwd"
        compiled, args, compile_s = self.programs(request)
        out = compiled(*args)
        found = jax.tree.leaves(out[1]) if backward else [out[0]]
        expected = self.expected[1] if backward else [self.expected[0]]
        parts = [problems.part_of(request["cell"], x).astype("float32") for x in found]
        answer = self.notes[request["row"], request["direction"]] | {
            "error": harness.error_of(parts, expected),
            "compile_s": compile_s,
        }
        if not backward:
            said = jax.device_get(out[1])
            answer |= {
                name: float(said[name].max()) for name in ("iterations", "residual") if name in said
            }
            answer |= {"converged": bool(said["converged"].all())} if "converged" in said else {}
        del out, found, parts
        inputs = [(args[0], xs, *args[2:]) for xs in self.data[1]]
        return harness.time_jax(compiled, inputs, request["spend_s"]) | answer


COLUMNS = {
    "row": lambda r: r["row"],
    "pass": lambda r: r["direction"],
    "ms": lambda r: f"{r['ms']:.3f}",
    "of limit": lambda r: f"{100 * r['limit_ms'] / r['ms']:.1f} %",
    "of best peer": harness.ratio_to_peer,
    "iterations": lambda r: f"{r['iterations']:g}",
    "residual": lambda r: f"{r['residual']:.1e}",
    "max error": lambda r: f"{r['error']:.1e}",
    "compile s": lambda r: f"{r['compile_s']:.1f}",
    "note": lambda r: " ".join(filter(None, (r.get("note"), said(r)))),
}


def said(row: dict) -> str:
    """Returns what a row of ours says about itself."""
    picked = (
        f"picked {row['picked']}"
        if row["row"] in ("jaxpar Auto", "jaxpar choose") and "picked" in row
        else ""
    )
    picked += f" in {row['choose_s']:.1f} s" if "choose_s" in row else ""
    return " ".join(
        filter(None, (picked, "" if row.get("converged", True) else "finished sequentially"))
    )


def dispatch(rows: list[dict]) -> None:
    """Prints, for every case and pass, what `Auto` and `choose` took beside the best of our methods."""
    print(
        "\n### What Auto picks\n\n| case | pass | by | picked | ms | best | ms | picked / best |\n|"
        + "---|" * 8
    )
    for case, direction in dict.fromkeys((row["case"], row["direction"]) for row in rows):
        ours = {
            row["row"].removeprefix("jaxpar "): row
            for row in rows
            if (row["case"], row["direction"]) == (case, direction)
            and row["row"].startswith("jaxpar")
            and "ms" in row
        }
        pickers = {name: ours.pop(name) for name in ("Auto", "choose") if name in ours}
        for name, picker in pickers.items() if ours else ():
            best = min(ours, key=lambda name: ours[name]["ms"])
            ratio = picker["ms"] / ours[best]["ms"]
            cells = [case, direction, name, picker.get("picked", ""), f"{picker['ms']:.3f}", best]
            cells += [f"{ours[best]['ms']:.3f}", f"{ratio:.2f}{'' if ratio <= 1.5 else ' MISSED'}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def plan(name: str, shape: dict, sides, args: argparse.Namespace) -> list:
    """Returns the requests of a case; the way back is the same for most methods of ours, so a few stand for it."""
    both = harness.plan(rows_of(name, shape), shape, sides, args)
    forward_only = [f"jaxpar {method}" for method in ("Quasi", "Elk", "Elk quasi")]
    return [
        (side, request)
        for side, request in both
        if (request["direction"], request["row"])
        != ("fwd", "jaxpar ParallelBackward")  # is Sequential
        and (request["direction"] == "fwd" or request["row"] not in forward_only or name[0] == "D")
    ]


def measure(args: argparse.Namespace) -> None:
    """Measures every row of the chosen cases and prints them."""
    names, quiet = harness.chosen(args.cases, CASES), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    sides = {"jax": ([__file__, "--worker", "jax"], quiet)}
    if not args.no_peer:
        sides["torch"] = ([str(HERE / "peers" / "torch_rnn.py")], {"JAX_PLATFORMS": "cpu"})
        if args.deer:
            sides["deer"] = ([str(HERE / "peers" / "deer_rnn.py"), str(args.deer.resolve())], quiet)
    bench, table = harness.Bench(sides, args.budget_s, args.row_s), harness.Table(COLUMNS, args.out)
    rate = bench.ask("jax", {"row": "copy", "tiny": args.tiny, "spend_s": args.spend_s})
    print(
        rate.get("failed")
        or "{device}, {version}, copy {rate:.3g} B/s, an empty call {empty_ms:.4f} ms".format(
            **rate
        )
    )
    for name in names:
        if name in LONG and not args.cases:
            continue
        shape = tiny(CASES[name]) if args.tiny else CASES[name]
        table.head(
            "{0}: {cell}, B = {batch}, T = {length}, n = {n}, {dtype}, weights {scale}".format(
                name, **shape
            )
        )
        best = {"fwd": math.inf, "fwd+bwd": math.inf}
        for _, request, answer in bench.answers(plan(name, shape, sides, args), args.jobs):
            direction = request["direction"]
            if not request["row"].startswith("jaxpar"):
                best[direction] = min(best[direction], answer.get("ms", math.inf))
            limit = limit_bytes(shape, direction) / rate.get("rate", math.nan) * 1e3
            table.add(
                {"case": name}
                | request
                | answer
                | {"best_peer_ms": best[direction], "limit_ms": limit}
            )
    bench.close()
    dispatch(table.rows)


def main() -> None:
    """Parses flags and measures, or serves as a worker."""
    parser = harness.arguments(__doc__, CASES, "recurrence.json", 900)
    parser.add_argument("--deer", type=pathlib.Path, help="a checkout of DEER's source")
    args = parser.parse_args()
    if args.worker:
        harness.serve(JaxWorker(solver))
    else:
        measure(args)


if __name__ == "__main__":
    main()
