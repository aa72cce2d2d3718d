"""Which method to take for a recurrence, on what grounds, and what each would cost."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Jaxpr, Literal, Var

from jaxpar.aot.flops import count_flops
from jaxpar.lower.jaxprs import array_of, inner_jaxpr
from jaxpar.solve.carries import Loop, divided
from jaxpar.solve.fixed_point import Jacobi
from jaxpar.solve.fused import Fused, takes
from jaxpar.solve.gauss_seidel import GaussSeidel
from jaxpar.solve.lyapunov import lyapunov
from jaxpar.solve.newton import Newton, Quasi, diagonal_structure
from jaxpar.solve.parallel import parallel_scan
from jaxpar.solve.problem import Method, Problem
from jaxpar.solve.program import leaf_names, trace
from jaxpar.solve.sequential import ParallelBackward, Sequential
from jaxpar.solve.structure import MAX_LANES, Jac, Structure, structure_of
from jaxpar.solve.windows import auto_window
from jaxpar.types import PyTree, UsageError

__all__ = ["COSTS", "PREFIX", "Auto", "Candidate", "Choice", "Costs", "choose"]


class Costs(NamedTuple):
    """What a platform takes, in seconds and per second.

    Attributes:
      unroll: Of the sequential loop.
      step: One step of a loop so unrolled, whatever it computes.
      step_back: One step of its transpose, with what it stores.
      iteration: Fixed part of one parallel iteration: its kernels' launches.
      bandwidth: Bytes of Jacobians and residuals a second, through an affine scan.
      flops: Multiplications and additions a second.
      kernel: Of the kernels for elementwise cells: seconds of a step of the sequential kernel, fixed seconds of a
        Newton iteration, and its bytes a second; None without kernels.
      source: Where the numbers are from.
    """

    unroll: int
    step: float
    step_back: float
    iteration: float
    bandwidth: float
    flops: float
    kernel: tuple[float, float, float] | None
    source: str


COSTS = {
    "gpu": Costs(
        8, 1.5e-6, 4e-6, 1.3e-4, 0.83e12, 3e13, (1.5e-7, 8e-5, 1.1e12),
        "one H100, bench/recurrence.py: GRU of 1 and 16, B = 16, T = 10,000: lax.scan 56 ms, unrolled by 8 8.7 and "
        "24 ms, with its gradient 41 and 81 (not unrolled 180 and 217); Newton 0.15 and 0.9 ms an iteration; ParaGRU, "
        "2048 lanes: sequentially 0.14 us a step, Newton step 0.11 ms at T = 2048, 0.6 ms for 33 million states; half "
        "of the peak of float32 in flops",
    ),
    "cpu": Costs(
        1, 2e-8, 2e-8, 1e-5, 2.7e9, 2e10, None,
        "two busy cores, least of 60 runs, T = 4096: lax.scan 0.02 us a step for 3 elementwise lanes and 0.06 for a "
        "dense 8, its gradient 0.03 and 0.07 in all; Newton 0.06 and 0.46 a step and iteration; flops not timed",
    ),
    "tpu": Costs(
        1, 5.6e-6, 1.3e-5, 1.1e-4, 0.4e12, 3e13, None, "not timed: a GPU's, with half of its bandwidth"
    ),
}  # fmt: skip
"""All constants of the cost model, by `jax.default_backend()`."""

PREFIX = 128
"""Steps on which exponent and iterations are measured: one window, which compiles fastest."""

ASSUMED_ITERATIONS = 6
"""Of Newton's method where nothing can be measured: a network at exponents below -0.2 takes 4 or 5."""


class Candidate(NamedTuple):
    """A row of the table: a method, its iterations, and the seconds that the model expects, infinite if ruled out.

    Attributes:
      method: The method.
      iterations: Measured, or assumed; of a window.
      seconds: Forward, and backward where gradients are wanted.
      note: Why it is ruled out, or what the iterations are.
    """

    method: Method
    iterations: int
    seconds: float
    note: str


class Choice(NamedTuple):
    """What `choose` found; `print` it.

    Attributes:
      method: To be passed to `parallel_scan`.
      reason: One sentence.
      exponent: Largest Lyapunov exponent of the first steps, nats a step; None where values were not known.
      table: All candidates, the cheapest first.
    """

    method: Method
    reason: str
    exponent: float | None
    table: tuple[Candidate, ...]

    def __str__(self):
        rows = [
            f"  {row.seconds:9.2e} s  {row.iterations:4d} iterations  {type(row.method).__name__}: {row.note}"
            for row in self.table
        ]
        return "\n".join([self.reason, *rows])


@dataclasses.dataclass(frozen=True)
class Auto:
    """Lets `parallel_scan` take the method that `choose` chooses; `Stats.method` says which.

    Outside of jit it measures, which compiles some short solves. Inside, values are not known, so that only the
    structure, the length and the platform decide, and the recurrence is taken to be predictable: where it is not,
    the failed iterations come on top of the sequential run that finishes them. So call `choose` once and pass what it
    returns.

    Attributes:
      gradient: Whether the cost of a gradient counts.
      jac: Structure of the Jacobian, as in `Newton`.
    """

    gradient: bool = True
    jac: Jac = "auto"

    def choose_method(self, f: Callable, init: PyTree, xs: PyTree, length: int, reverse: bool) -> Method:
        """Returns the method that `choose` chooses."""
        return choose(f, init, xs, length, reverse, gradient=self.gradient, jac=self.jac).method


def choose(
    f: Callable,
    init: PyTree,
    xs: PyTree,
    length: int | None = None,
    reverse: bool = False,
    *,
    gradient: bool = True,
    jac: Jac = "auto",
    platform: str | None = None,
) -> Choice:
    """Chooses a method for `parallel_scan(f, init, xs, length, reverse)`: predictability, then cost.

    The exponent of the first `PREFIX` steps rules iterative methods out if errors would grow by more than
    eps^(-1/2) over the whole length. Those that could be cheaper than a sequential run are then tried on the same
    steps, for their iterations. The model is coarse, within a factor of two or three at best: time both if it matters.

    Args:
      f: As for `parallel_scan`, and so are init, xs, length and reverse. Traced values are not looked at.
      init: A state.
      xs: Inputs.
      length: T.
      reverse: Whether time runs backwards.
      gradient: Whether the time of a gradient counts.
      jac: Structure of the Jacobian, as in `Newton`.
      platform: Row of `COSTS`; `jax.default_backend()` by default. Batches that `vmap` adds are not seen.

    Returns:
      A `Choice`: `method`, `reason`, and the table of all candidates; it is empty where there is nothing to solve.
    """
    platform = platform or jax.default_backend()
    if platform not in COSTS:
        raise UsageError(f"platform={platform!r} has no costs; legal are {', '.join(map(repr, COSTS))}.")
    num = length if length is not None else len(jax.tree.leaves(xs)[0])
    if num == 0:
        return Choice(Sequential(), "Sequential: there is no step to take.", None, ())
    traced = trace(f, init, xs, None)
    parts = divided(traced, leaf_names(init))
    if parts.reason:
        return Choice(Sequential(), f"Sequential for {num} steps: {parts.reason}.", None, ())
    if parts.first:
        _, before = parts.known(Loop(num, reverse, 1, None))
        return choose(*parts.rest(before), num, reverse, gradient=gradient, jac=jac, platform=platform)
    first = tuple(leaf[0] for leaf in traced.xs)
    structure, program = structure_of(traced.step, traced.init, first, jac), traced.recurrence
    flops = count_flops(traced.step, traced.init, first).total
    problem = Problem(traced.step, traced.init, traced.xs, num, structure)
    kernel = COSTS[platform].kernel if num > 0 and takes(problem) else None
    model = _Model(COSTS[platform], structure, num, flops, gradient, kernel)

    now = jnp.zeros(())  # a tracer wherever a program is traced, even one whose inputs are all known
    is_known = not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((init, xs, traced.consts, now)))
    exponent = _exponent(f, init, xs, num, reverse) if is_known else None
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in traced.init)
    is_chaotic = exponent is not None and not exponent * num <= -math.log(eps) / 2
    if is_chaotic:
        obstacle = "errors grow along the sequence"
    elif _is_rounded(program.jaxpr, program.jaxpr.outvars[: program.num_carry], eps):
        obstacle = "f rounds to a narrower type than the state's, and iterates do not settle below that"
    else:
        obstacle = ""
    table = _sequential_candidates(model, jac)
    limit = min(row.seconds for row in table)
    for method in _iterative(structure, jac):
        table.append(_candidate(method, model, limit, obstacle, (f, init, xs, reverse) if is_known else None))
    table.append(_shooting(model, jac, exponent, obstacle, eps))
    table.sort(key=lambda row: row.seconds)
    return Choice(table[0].method, _reason(table, exponent, is_chaotic, num, platform), exponent, tuple(table))


def _exponent(f: Callable, init: PyTree, xs: PyTree, num: int, reverse: bool) -> float:
    """The largest Lyapunov exponent of the first steps, in the order in which they are taken."""
    ahead = _prefix(jax.tree.map(lambda x: jnp.flip(x, 0), xs) if reverse else xs, False)
    return float(jax.jit(lambda init, xs: lyapunov(f, init, xs, min(num, PREFIX)))(init, ahead))


@dataclasses.dataclass(frozen=True)
class _Model:
    """Seconds of the parts of a solve."""

    costs: Costs
    structure: Structure
    length: int
    step_flops: float
    gradient: bool
    kernel: tuple[float, float, float] | None

    def sequential(self) -> float:
        return self.length * (self.costs.step + self.step_flops / self.costs.flops)

    def sequential_backward(self) -> float:
        return self.length * (self.costs.step_back + 2 * self.step_flops / self.costs.flops)

    def iteration(self, method: Method) -> float:
        """One iteration over the whole length, all windows together."""
        if self.kernel is not None and isinstance(method, Newton):
            states = self.length * sum(math.prod(group.batch) * group.n for group in self.structure.groups)
            return self.kernel[1] + 4 * 5 * states / self.kernel[2]
        held = diagonal_structure(self.structure) if isinstance(method, Quasi) else self.structure
        products = 0 if isinstance(method, Jacobi) else max(group.n for group in self.structure.groups)
        size = 4 * sum(math.prod(group.batch) * group.n for group in held.groups)
        bytes_per_step = 4 * size if isinstance(method, Jacobi) else held.bytes_per_step
        dense = sum(math.prod(g.batch) * g.n**3 for g in held.groups if g.n > MAX_LANES)
        flops = self.step_flops * (1 + 2 * products) + (0 if isinstance(method, Jacobi) else 4 * dense)
        windows = math.ceil(self.length / auto_window(held, self.length))
        return windows * self.costs.iteration + self.length * (
            bytes_per_step / self.costs.bandwidth + flops / self.costs.flops
        )

    def shot(self, method: GaussSeidel) -> float:
        """One pass over all blocks at once."""
        states = sum(math.prod(group.batch) * group.n for group in self.structure.groups)
        work = 10 * 4 * states / self.costs.bandwidth + self.step_flops / self.costs.flops
        return self.costs.iteration + min(method.block, self.length) * self.costs.step + self.length * work

    def back(self) -> float:
        """The exact gradient by one affine scan with the true Jacobian, where gradients are wanted."""
        return self.iteration(Newton()) if self.gradient else 0.0

    def solve(self, method: Method, iterations: int) -> float:
        return iterations * self.iteration(method) + self.back()


def _sequential_candidates(model: _Model, jac: Jac) -> list[Candidate]:
    """The rows of what takes one step after the other."""
    table = [
        Candidate(
            Sequential(model.costs.unroll, jac=jac),
            0,
            model.sequential() + model.gradient * model.sequential_backward(),
            "lax.scan",
        ),
        Candidate(
            ParallelBackward(jac=jac), 0, model.sequential() + model.back(), "lax.scan, with a parallel gradient"
        ),
    ]
    if model.kernel is not None:
        seconds = model.length * model.kernel[0] + model.back()
        table.append(Candidate(Fused(jac=jac), 0, seconds, "one kernel, with a parallel gradient"))
    return table


def _iterative(structure: Structure, jac: Jac) -> list[Method]:
    """Returns the methods worth a trial: quasi-Newton is Newton's where nothing is coupled."""
    coupled = max(group.n for group in structure.groups) > 1
    return [Newton(jac=jac), Jacobi(jac=jac), *([Quasi(jac=jac)] if coupled else [])]


def _is_rounded(jaxpr: Jaxpr, wanted: Sequence[Var | Literal], eps: float) -> bool:
    """Returns whether what makes the `wanted` of its results passes through a type coarser than `eps`."""
    used = {atom for atom in wanted if isinstance(atom, Var)}
    for eqn in reversed(jaxpr.eqns):
        places = [place for place, var in enumerate(eqn.outvars) if var in used]
        kinds = [array_of(eqn.outvars[place]).dtype for place in places]
        if any(jnp.issubdtype(kind, jnp.floating) and float(jnp.finfo(kind).eps) > eps for kind in kinds):
            return True
        inner = inner_jaxpr(eqn)
        if inner is not None and _is_rounded(inner, [inner.outvars[place] for place in places], eps):
            return True
        if places:
            used.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return False


def _candidate(method: Method, model: _Model, limit: float, obstacle: str, problem: tuple | None) -> Candidate:
    """Tries a method on the first steps, unless it is ruled out before or values are not known."""
    if obstacle:
        return Candidate(method, 0, math.inf, f"ruled out: {obstacle}")
    if model.solve(method, 2) >= limit:
        return Candidate(
            method, 2, model.solve(method, 2), "not tried: dearer than a sequential run with two iterations already"
        )
    if problem is None:
        if not isinstance(method, Newton):
            return Candidate(method, 0, math.inf, "not tried: its iterations can only be measured")
        seconds = model.solve(method, ASSUMED_ITERATIONS)
        return Candidate(method, ASSUMED_ITERATIONS, seconds, "iterations assumed: values are traced")
    f, init, xs, reverse = problem
    num = min(model.length, PREFIX)
    _, _, stats = parallel_scan(
        f, init, _prefix(xs, reverse), num, reverse, method=method, with_stats=True, on_fail="nan"
    )
    if not stats.converged:
        return Candidate(method, int(stats.iterations), math.inf, f"ruled out: it fails within {num} steps")
    count = math.ceil(int(stats.iterations) / int(stats.windows))
    return Candidate(method, count, model.solve(method, count), f"iterations measured on {num} steps")


def _shooting(model: _Model, jac: Jac, exponent: float | None, obstacle: str, eps: float) -> Candidate:
    """Multiple shooting: a pass for each block until a wrong start is forgotten, one to see it, one for the insides."""
    method = GaussSeidel(jac=jac)
    if obstacle or (exponent is not None and exponent >= 0):
        return Candidate(method, 0, math.inf, f"ruled out: {obstacle or 'a wrong start is never forgotten'}")
    count = 1 if exponent is None else math.ceil(math.log(eps) / (exponent * method.block))
    source = "assumed: values are traced" if exponent is None else "from the exponent"
    seconds = (count + 2) * model.shot(method)
    # The gradient of a wide cell shoots too, each step three times as dear.
    seconds += 3 * seconds * model.gradient if method.shoots(model.structure) else model.back()
    return Candidate(method, count, seconds, f"iterations {source}")


def _prefix(xs: PyTree, reverse: bool) -> PyTree:
    """Returns the inputs of the first `PREFIX` steps in time."""
    return jax.tree.map(lambda x: x[-PREFIX:] if reverse else x[:PREFIX], xs)


def _reason(table: list[Candidate], exponent: float | None, is_chaotic: bool, num: int, platform: str) -> str:
    best, name = table[0], type(table[0].method).__name__
    if is_chaotic:
        why = f"errors grow by {exponent:+.3f} nats a step, too much over {num} steps for any iteration"
    else:
        one_by_one = Sequential | ParallelBackward | Fused
        other = next(row for row in table if isinstance(row.method, one_by_one) != isinstance(best.method, one_by_one))
        why = f"{best.seconds:.1e} s expected against {other.seconds:.1e} s for {type(other.method).__name__}"
        forgets = "predictability assumed" if exponent is None else f"exponent {exponent:+.3f} nats a step"
        why = f"{why}; {forgets}"
    return f"{name} for {num} steps on {platform}: {why}."
