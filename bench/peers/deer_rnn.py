"""The peer of `bench/recurrence.py` from DEER's own source (machine-discovery/deer): run, never copied.

A worker: `python bench/peers/deer_rnn.py PATH` reads a line of JSON for every row and answers with one. `seq1d` solves
one sequence; the batch is a vmap, as in its authors' benchmark. Its products run at JAX's default precision (TF32 on
this kind of card) unless the row says "highest"; its tolerances are its own, its iterations at most 200.
"""

import pathlib
import sys
import types

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent.parent), str(HERE.parent)]
MAX_ITERS = 200

import harness  # noqa: E402
import jax  # noqa: E402
import problems  # noqa: E402
import recurrence  # noqa: E402


def load(path: str) -> None:
    """Makes DEER's source importable."""
    sys.path.insert(0, path)
    try:
        import optimistix  # noqa: F401
    except ImportError:  # DEER's package imports it for its other solvers; seq1d needs none of it
        sys.modules["optimistix"] = types.ModuleType("optimistix")


def solver(request: dict, *_):
    """Returns solve(w, xs) -> (ys, what DEER says of itself)."""
    from deer.fseq1d import seq1d

    cell, method = request["cell"], seq1d.DEER(max_iter=MAX_ITERS)

    def func(h, x, w):
        return problems.STEPS[cell](w, h, x)

    def solve(w, xs):
        def one(x):
            result = seq1d(func, problems.initial(cell, (request["n"],)), x, w, method=method)
            return result.value, {"converged": result.success.all()}

        with jax.default_matmul_precision("highest" if "highest" in request["row"] else "default"):
            return jax.vmap(one, in_axes=1, out_axes=(1, 0))(
                problems.input_projections(cell, w, xs)
            )

    return solve


if __name__ == "__main__":
    load(sys.argv[1])
    harness.serve(recurrence.JaxWorker(solver))
