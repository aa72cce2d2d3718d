"""Does a parallel solver ever hand back a wrong answer and call it converged? Are its gradients exact?

    python bench/robustness.py --deer PATH                  # PATH: a checkout of DEER's source
    JAX_PLATFORMS=cpu python bench/robustness.py --cases G1
    JAX_PLATFORMS=cpu python bench/robustness.py --tiny

R1: recurrent weights {init, U(-0.9, 0.9), N(0, 1), 2 N(0, 1)} x T {512, 8192} x every method, on ParaGRU, a dense GRU
and a tanh network, float32, two sequences. A result is right if it is a trajectory (every step within 1e-4 of f of
the step before it) and as close to a float64 run as `lax.scan` in float32 comes, unrolled or not (within ten times,
or 1e-4): many of these systems are chaotic, and there no float32 run stays with a float64 one. A result that is not
right but claimed is a silent error; one that is right but not claimed was finished sequentially after a report.
Beside ours stand three Newton iterations without a test, as ParaRNN makes them (our own few lines), and DEER with its
own test.

R2: the same question where entries, rows or steps differ by many orders of magnitude (bench/magnitudes.py): large
starts, rows and entries, counters, growing modes, in four float types, every method at its default rtol and atol. A
result is right if every entry of every step has |h - h64| <= 10 (|h_loop - h64| + rtol |h64| + atol), h64 being the
float64 loop from the same rounded numbers and h_loop `lax.scan` in the type (`magnitudes.Judge`); a claim that is not
right is a silent error. Counted are also the rows of Newton and Auto that converged without a sequential run, and those
that took over twice the iterations of float64.

G1: gradients of every method by weights and inputs against float64 backpropagation through time, each leaf relative to
its largest entry; the bar is 1e-5. Beside them the defect of a quasi-Newton method that differentiates through the
diagonal it iterated with, as ELK does (our own few lines).

Exits with 1 after a silent error, a result that is wrong though finished, a gradient of ours beyond the bar, or a row
of ours that failed (not one that the budget left out).
"""

import argparse
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import harness  # noqa: E402

SCALES = ("init", "uniform", "normal", "normal2")
SIZES = {"para_gru": 32, "gru": 16, "tanh": 16, "para_lstm": 16}
METHODS = (
    "Sequential", "Newton", "Quasi", "Jacobi", "Picard", "GaussSeidel", "Elk", "Elk quasi", "ParallelBackward", "Fused",
    "Auto",
)  # fmt: skip
BAR = 1e-5  # of gradients
TOLERANCE = 1e-4  # of states


def fixed_three(request: dict, *_):
    """Returns solve(w, xs): three Newton iterations from f(0, x), in ParaRNN's style, and no test."""
    import jax
    import jax.numpy as jnp
    import problems
    from jax import lax

    cell = request["cell"]

    def one(w, x):  # x [T, ...] of one sequence
        step = jax.vmap(lambda h, x: problems.STEPS[cell](w, h, x))
        zero = jnp.zeros((request["n"],))

        def combine(left, right):
            if cell in problems.NAMES:
                return left[0] * right[0], right[0] * left[1] + right[1]
            return right[0] @ left[0], (right[0] @ left[1][..., None])[..., 0] + right[1]

        h = step(jnp.zeros((request["length"], request["n"])), x)
        for _ in range(3):
            before = jnp.concatenate([zero[None], h[:-1]])
            if cell in problems.NAMES:
                new, a = jax.jvp(lambda h: step(h, x), (before,), (jnp.ones_like(before),))
            else:
                new, a = (
                    step(before, x),
                    jax.vmap(jax.jacfwd(lambda h, x: problems.STEPS[cell](w, h, x)))(before, x),
                )
            h = h + lax.associative_scan(combine, (a, new - h))[1]
        return h

    def solve(w, xs):
        ys = jax.vmap(one, in_axes=(None, 1), out_axes=1)(
            w, problems.input_projections(cell, w, xs)
        )
        return ys, {"converged": jnp.bool_(True)}

    return solve


def diagonal_adjoint(request: dict, *_):
    """Returns solve(w, xs) with the right states, and gradients through the diagonal of the Jacobian only, as ELK's."""
    import jax
    import jax.numpy as jnp
    import problems
    from jax import lax

    cell = request["cell"]

    def combine(later, earlier):
        return later[0] * earlier[0], earlier[0] * later[1] + earlier[1]

    @jax.custom_vjp
    def solve(w, xs):
        return problems.sequential(cell, w, xs)

    def forward(w, xs):
        ys = solve(w, xs)
        return ys, (w, xs, ys)

    def backward(saved, g):
        w, xs, ys = saved
        before = jnp.concatenate([jnp.zeros_like(ys[:1]), ys[:-1]])
        step = jax.vmap(
            jax.vmap(lambda w, h, x: problems.STEPS[cell](w, h, x), (None, 0, 0)), (None, 0, 0)
        )
        x = problems.input_projections(cell, w, xs)
        full = jax.vmap(jax.vmap(jax.jacfwd(lambda h, x: problems.STEPS[cell](w, h, x))))(before, x)
        a = jnp.diagonal(full, axis1=-2, axis2=-1)
        a = jnp.concatenate([a[1:], jnp.zeros_like(a[:1])])
        costate = lax.associative_scan(combine, (a, g), reverse=True)[1]
        return jax.vjp(
            lambda w, xs: step(w, before, problems.input_projections(cell, w, xs)), w, xs
        )[1](costate)

    solve.defvjp(forward, backward)
    return lambda w, xs: (solve(w, xs), {})


class Judge:
    """Answers rows: solves, and compares with float64; a method is compiled once for all weights."""

    def __init__(self, deer: str | None):
        """Takes the path of DEER's source, if it is here."""
        self.deer, self.key, self.programs, self.known = deer, None, (), {}

    def solver(self, request: dict, w, xs):
        """Returns solve(w, xs) -> (ys, what it says of itself) of a row."""
        import recurrence
        from peers import deer_rnn

        if request["row"] == "DEER":
            deer_rnn.load(self.deer)
            return deer_rnn.solver(request)
        own = {"fixed K=3": fixed_three, "diagonal adjoint": diagonal_adjoint}
        return own.get(request["row"], recurrence.solver)(request, {}, w, xs)

    def mixed(self, request: dict) -> dict:
        """Answers a row of R2."""
        import jax
        import magnitudes
        import recurrence

        from jaxpar.solve import Sequential, parallel_scan

        name, dtype = request["problem"], request["dtype"]
        problem = magnitudes.problems(dtype)[name]
        with jax.enable_x64(dtype == "float64"):
            if (name, dtype) not in self.known:
                self.known[name, dtype] = magnitudes.Judge(problem, dtype)
            method = recurrence.method_of(request["row"], False, ())

            def solve(start, xs):
                return parallel_scan(
                    magnitudes.scan_step(problem), start, xs, method=method, with_stats=True
                )

            _, ys, stats = jax.jit(solve)(*magnitudes.cast((problem.start, problem.xs), dtype))
            ys, said = jax.device_get((ys, stats))
        judge = self.known[name, dtype]
        worst = judge(ys)
        return {
            "excess": worst,
            "is_determined": judge.is_determined,
            "right": worst <= 1,
            "claimed": bool(said.converged),
            "iterations": int(said.iterations),
            "is_sequential": isinstance(stats.method, Sequential) or not said.iterations,
        }

    def __call__(self, request: dict) -> dict:
        """Answers a row."""
        if request["case"] == "R2":
            return self.mixed(request)
        import jax
        import jax.numpy as jnp
        import numpy as np
        import problems

        cell, shape = request["cell"], (request["length"], request["batch"], request["n"])
        w = jax.tree.map(
            lambda x: jnp.asarray(x, "float32"), problems.weights(cell, shape[2], request["scale"])
        )
        xs, g = jax.tree.map(
            jnp.asarray, (problems.inputs(cell, *shape), problems.inputs("tanh", *shape, seed=2))
        )
        key = {name: value for name, value in request.items() if name != "scale"}
        if key != self.key:
            solve = self.solver(request | {"direction": "fwd+bwd"}, w, xs)
            self.programs, self.key = (jax.jit(solve), jax.jit(graded(solve))), key
        name = (cell, *shape, request["scale"])
        if name not in self.known:
            loop, expected = (
                jax.jit(problems.sequential, static_argnums=(0, 3)),
                problems.reference(cell, w, xs, g),
            )
            # Two programs of one loop round apart: what either loses to float64, no method can be asked to keep.
            plain = max(
                harness.error_of([loop(cell, w, xs, unroll)], expected[:1]) for unroll in (1, 8)
            )
            self.known[name] = expected, plain
        expected, plain = self.known[name]
        if request["case"] == "G1":
            found = jax.tree.leaves(self.programs[1](w, xs, g))
            return {"error": harness.error_of(found, jax.tree.leaves(expected[1:]))}
        ys, said = jax.device_get(self.programs[0](w, xs))
        answer = {
            "error": harness.error_of([ys], expected[:1]),
            "plain_error": plain,
            "defect": defect(cell, w, xs, ys),
        }
        answer |= {
            "claimed": bool(said["converged"].all()),
            "iterations": float(np.max(said.get("iterations", np.nan))),
        }
        is_right = answer["error"] <= max(TOLERANCE, 10 * plain) and answer["defect"] <= TOLERANCE
        return answer | {"right": bool(is_right)}


def graded(solve):
    """Returns the gradient of sum(ys g) by (w, xs)."""
    import jax

    return lambda w, xs, g: jax.vjp(lambda w, xs: solve(w, xs)[0], w, xs)[1](g)


def defect(cell: str, w, xs, ys) -> float:
    """Returns how far any step is from f of the step before it, relative to the largest state; in float64."""
    import jax
    import numpy as np
    import problems

    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        w, xs, ys = jax.tree.map(lambda x: np.asarray(x, np.float64), (w, xs, ys))
        before = np.concatenate([np.zeros_like(ys[:1]), ys[:-1]])
        return harness.error_of(
            [problems.STEPS[cell](w, before, problems.input_projections(cell, w, xs))], [ys]
        )


def verdict(row: dict) -> str:
    """Returns what a row of R1 or R2 amounts to."""
    if row["claimed"]:
        return "right" if row["right"] else "SILENT ERROR"
    return (
        "finished"
        if row["right"]
        else "reported"
        if not row["row"].startswith("jaxpar")
        else "WRONG"
    )


R1_COLUMNS = {
    "cell": lambda r: r["cell"],
    "T": lambda r: str(r["length"]),
    "weights": lambda r: r["scale"],
    "row": lambda r: r["row"],
    "verdict": verdict,
    "iterations": lambda r: f"{r['iterations']:g}" if r["iterations"] >= 0 else "",
    "error": lambda r: f"{r['error']:.1e}",
    "lax.scan's": lambda r: f"{r['plain_error']:.1e}",
    "defect": lambda r: f"{r['defect']:.1e}",
    "note": lambda r: "",
}
R2_COLUMNS = {
    "problem": lambda r: r["problem"],
    "type": lambda r: r["dtype"],
    "row": lambda r: r["row"],
    "verdict": verdict,
    "iterations": lambda r: str(r["iterations"]),
    "error, of ten times what is allowed": lambda r: f"{r['excess']:.1e}",
    "note": lambda r: ", ".join(
        ["sequential"] * r["is_sequential"] + ["judged step by step"] * (not r["is_determined"])
    ),
}
G1_COLUMNS = {
    "cell": lambda r: r["cell"],
    "row": lambda r: r["row"],
    "error": lambda r: f"{r['error']:.1e}",
    "verdict": lambda r: (
        "exact" if r["error"] <= BAR else "MISSED" if r["row"].startswith("jaxpar") else "off"
    ),
    "note": lambda r: "",
}


def measure(args: argparse.Namespace, case: str, bench: harness.Bench) -> list[dict]:
    """Runs one of the two tests and prints its rows."""
    table = harness.Table(
        R1_COLUMNS if case == "R1" else G1_COLUMNS, args.out.with_stem(f"{args.out.stem}_{case}")
    )
    table.head({"R1": "R1: silent errors", "G1": "G1: gradients, float32 against float64"}[case])
    peers = ["fixed K=3" if case == "R1" else "diagonal adjoint"] + (["DEER"] if args.deer else [])
    lengths = [64, 256] if args.tiny else [512, 8192]
    scales = SCALES if case == "R1" else ("init",)
    for cell in ("para_gru", "gru", "tanh") if case == "R1" else SIZES:
        for length in lengths if case == "R1" else [50 if args.tiny else 200]:
            for row in [*peers, *(f"jaxpar {method}" for method in METHODS)]:
                if (args.only and not any(word in row for word in args.only.split(","))) or (
                    cell == "para_lstm" and not row.startswith("jaxpar")
                ):
                    continue
                for scale in scales:
                    request = dict(
                        case=case,
                        cell=cell,
                        batch=2,
                        length=length,
                        n=SIZES[cell],
                        row=row,
                        scale=scale,
                    )
                    table.add(request | bench.ask("jax", request | {"dtype": "float32"}))
    return table.rows


def measure_mixed(args: argparse.Namespace, bench: harness.Bench) -> list[dict]:
    """Runs R2 and prints its rows."""
    import magnitudes

    table = harness.Table(R2_COLUMNS, args.out.with_stem(f"{args.out.stem}_R2"))
    table.head("R2: silent errors among mixed magnitudes")
    known = {dtype: list(magnitudes.problems(dtype)) for dtype in magnitudes.TYPES}
    for row in (f"jaxpar {method}" for method in METHODS):
        if args.only and not any(word in row for word in args.only.split(",")):
            continue
        for dtype, names in known.items():
            for name in names[:: 6 if args.tiny else 1]:
                request = dict(case="R2", problem=name, dtype=dtype, row=row)
                table.add(request | bench.ask("jax", request))
    return table.rows


def summary_mixed(rows: list[dict]) -> None:
    """Prints which rows of Newton and Auto ran sequentially, and which took over twice the iterations of float64."""
    mine = [
        row
        for row in rows
        if row["row"] in ("jaxpar Newton", "jaxpar Auto") and "failed" not in row
    ]
    mine = [
        row for row in mine if not (row["claimed"] and row["is_sequential"])
    ]  # Auto's choice, by cost
    full = {
        (row["row"], row["problem"]): row["iterations"] for row in mine if row["dtype"] == "float64"
    }
    found = [row for row in mine if row["claimed"]]
    quick = [
        row for row in found if row["iterations"] <= 2 * full.get((row["row"], row["problem"]), 0)
    ]
    print(
        f"\nNewton and Auto: {len(found)} of {len(mine)} that iterate converged, {len(quick)} of these in at most twice"
    )
    print("the iterations of float64. The rest:")
    for row in mine:
        if row not in quick:
            print(
                f"- {row['row']}, {row['problem']}, {row['dtype']}: {verdict(row)}, {row['iterations']} iterations"
            )


def summary(rows: list[dict], case: str) -> None:
    """Prints how often each row of R1 or R2 had each verdict."""
    kinds = ("right", "finished", "reported", "SILENT ERROR", "WRONG")
    print(
        f"\n### {case}, counted\n\n| row | {' | '.join(kinds)} | failed |\n|{'---|' * (len(kinds) + 2)}"
    )
    for name in dict.fromkeys(row["row"] for row in rows):
        mine = [row for row in rows if row["row"] == name]
        found = [verdict(row) for row in mine if "failed" not in row]
        print(
            f"| {name} | {' | '.join(str(found.count(kind)) for kind in kinds)} | {len(mine) - len(found)} |"
        )


def main() -> None:
    """Parses flags, judges, and exits with 1 if something of ours is wrong."""
    parser = harness.arguments(__doc__, ("R1", "R2", "G1"), "robustness.json", 600)
    parser.add_argument("--deer", type=pathlib.Path, help="a checkout of DEER's source")
    args = parser.parse_args()
    if args.worker:
        harness.serve(Judge(str(args.deer.resolve()) if args.deer else None))
        return
    command = [__file__, "--worker", "jax"] + (["--deer", str(args.deer)] if args.deer else [])
    bench = harness.Bench(
        {"jax": (command, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})}, args.budget_s, args.row_s
    )
    bad = []
    for case in harness.chosen(args.cases, ("G1", "R1", "R2")):
        rows = measure_mixed(args, bench) if case == "R2" else measure(args, case, bench)
        ours = [row for row in rows if row["row"].startswith("jaxpar")]
        if case != "G1":
            summary(rows, case)
        if case == "R2":
            summary_mixed(rows)
        for row in ours:
            is_good = "skipped" in row.get("failed", "") or row.get(
                "right", row.get("error", 1.0) <= BAR
            )
            bad += [] if is_good else [row]
    bench.close()
    for row in bad:
        print(f"not as it must be: {row}", file=sys.stderr)
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
