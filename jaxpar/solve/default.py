"""Costs of each method on a platform, and the rule that takes a default without measuring."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal, Var

from jaxpar.lower.flops import count_flops
from jaxpar.lower.jaxprs import array_of, inner_jaxpr
from jaxpar.mesh import platform as ambient_platform
from jaxpar.solve._dependence import Relation, relations
from jaxpar.solve.blindness import blind_leaves
from jaxpar.solve.carries import Division, divided, without_blind
from jaxpar.solve.fixed_point import Jacobi
from jaxpar.solve.fused import Fused, takes
from jaxpar.solve.gauss_seidel import GaussSeidel
from jaxpar.solve.newton import Newton, Quasi, diagonal_structure
from jaxpar.solve.problem import Method, Problem
from jaxpar.solve.program import Traced, leaf_names, trace
from jaxpar.solve.sequential import ParallelBackward, Sequential
from jaxpar.solve.structure import MAX_LANES, Jac, Leaves, Structure, structure_of
from jaxpar.solve.windows import auto_window
from jaxpar.types import PyTree, UsageError

__all__ = ["explain"]


class Costs(NamedTuple):
    """Costs of a platform, in seconds and per second.

    Attributes:
      unroll: Of the sequential loop.
      step: One step of a loop so unrolled, whatever it computes.
      step_back: One step of its transpose, with what it stores.
      iteration: Fixed part of one parallel iteration: its kernels' launches.
      bandwidth: Bytes of Jacobians and residuals a second, through an affine scan.
      flops: Multiplications and additions a second.
      kernel: Of the kernels for elementwise cells: seconds of a step of the sequential kernel,
        fixed seconds of a Newton iteration, and its bytes a second; None without kernels.
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

AFFINE_ITERATIONS = 2
"""Of Newton's method where f is affine in the state: one finds the states, one sees it."""

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
    """The method that was chosen, and why; `print` it.

    Attributes:
      method: To be passed to `parallel_scan`.
      reason: One sentence.
      exponent: Largest Lyapunov exponent of the first steps, nats a step; None where values were
        not known.
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
class CostModel:
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
            states = self.length * sum(
                math.prod(group.batch) * group.n for group in self.structure.groups
            )
            return self.kernel[1] + 4 * 5 * states / self.kernel[2]
        held = diagonal_structure(self.structure) if isinstance(method, Quasi) else self.structure
        products = (
            0 if isinstance(method, Jacobi) else max(group.n for group in self.structure.groups)
        )
        size = 4 * sum(math.prod(group.batch) * group.n for group in held.groups)
        bytes_per_step = 4 * size if isinstance(method, Jacobi) else held.bytes_per_step
        dense = sum(math.prod(g.batch) * g.n**3 for g in held.groups if g.n > MAX_LANES)
        flops = self.step_flops * (1 + 2 * products) + (
            0 if isinstance(method, Jacobi) else 4 * dense
        )
        windows = math.ceil(self.length / auto_window(held, self.length))
        return windows * self.costs.iteration + self.length * (
            bytes_per_step / self.costs.bandwidth + flops / self.costs.flops
        )

    def shot(self, method: GaussSeidel) -> float:
        """One pass over all blocks at once."""
        states = sum(math.prod(group.batch) * group.n for group in self.structure.groups)
        work = 10 * 4 * states / self.costs.bandwidth + self.step_flops / self.costs.flops
        return (
            self.costs.iteration
            + min(method.block, self.length) * self.costs.step
            + self.length * work
        )

    def back(self) -> float:
        """The exact gradient by one affine scan with the true Jacobian, where gradients are wanted."""
        return self.iteration(Newton()) if self.gradient else 0.0

    def solve(self, method: Method, iterations: int) -> float:
        return iterations * self.iteration(method) + self.back()


def sequential_candidates(model: CostModel, jac: Jac) -> list[Candidate]:
    """The rows of what takes one step after the other."""
    table = [
        Candidate(
            Sequential(model.costs.unroll, jac=jac),
            0,
            model.sequential() + model.gradient * model.sequential_backward(),
            "lax.scan",
        ),
        Candidate(
            ParallelBackward(jac=jac),
            0,
            model.sequential() + model.back(),
            "lax.scan, with a parallel gradient",
        ),
    ]
    if model.kernel is not None:
        seconds = model.length * model.kernel[0] + model.back()
        table.append(Candidate(Fused(jac=jac), 0, seconds, "one kernel, with a parallel gradient"))
    return table


def iterative_methods(structure: Structure, jac: Jac) -> list[Method]:
    """Returns the methods worth a trial: quasi-Newton is Newton's where nothing is coupled."""
    coupled = max(group.n for group in structure.groups) > 1
    return [Newton(jac=jac), Jacobi(jac=jac), *([Quasi(jac=jac)] if coupled else [])]


def is_rounded(jaxpr: Jaxpr, wanted: Sequence[Var | Literal], eps: float) -> bool:
    """Returns whether what makes the `wanted` of its results passes through a type coarser than `eps`."""
    used = {atom for atom in wanted if isinstance(atom, Var)}
    for eqn in reversed(jaxpr.eqns):
        places = [place for place, var in enumerate(eqn.outvars) if var in used]
        kinds = [array_of(eqn.outvars[place]).dtype for place in places]
        if any(
            jnp.issubdtype(kind, jnp.floating) and float(jnp.finfo(kind).eps) > eps
            for kind in kinds
        ):
            return True
        inner = inner_jaxpr(eqn)
        if inner is not None and is_rounded(inner, [inner.outvars[place] for place in places], eps):
            return True
        if places:
            used.update(atom for atom in eqn.invars if isinstance(atom, Var))
    return False


def shooting(
    model: CostModel, jac: Jac, exponent: float | None, obstacle: str, eps: float
) -> Candidate:
    """Multiple shooting: a pass for each block until a wrong start is forgotten, one to see it, one for the insides."""
    method = GaussSeidel(jac=jac)
    if obstacle or (exponent is not None and exponent >= 0):
        return Candidate(
            method, 0, math.inf, f"ruled out: {obstacle or 'a wrong start is never forgotten'}"
        )
    count = 1 if exponent is None else math.ceil(math.log(eps) / (exponent * method.block))
    source = "assumed" if exponent is None else "from the exponent"
    seconds = (count + 2) * model.shot(method)
    # The gradient of a wide cell shoots too, each step three times as dear.
    seconds += 3 * seconds * model.gradient if method.shoots(model.structure) else model.back()
    return Candidate(method, count, seconds, f"iterations {source}")


def reason_for(
    table: list[Candidate], exponent: float | None, is_chaotic: bool, num: int, platform: str
) -> str:
    best, name = table[0], type(table[0].method).__name__
    if is_chaotic:
        why = f"errors grow by {exponent:+.3f} nats a step, too much over {num} steps for any iteration"
    else:
        one_by_one = Sequential | ParallelBackward | Fused
        other = next(
            row
            for row in table
            if isinstance(row.method, one_by_one) != isinstance(best.method, one_by_one)
        )
        why = f"{best.seconds:.1e} s expected against {other.seconds:.1e} s for {type(other.method).__name__}"
        forgets = (
            "predictability assumed"
            if exponent is None
            else f"exponent {exponent:+.3f} nats a step"
        )
        why = f"{why}; {forgets}"
    return f"{name} for {num} steps on {platform}: {why}."


def explain(
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
    """Returns the method that `parallel_scan(f, init, xs, length, reverse)` takes, and why; print it.

    Nothing is measured, and no value is looked at. The program of f decides, with shapes, T and
    the platform. What is blind or rounded inside is run sequentially. Otherwise the method is taken
    that the model of costs expects to be the fastest. Whether errors grow is not known
    here; `choose` measures it.

    Args:
      f: As for `parallel_scan`, and so are init, xs, length and reverse.
      init: A state.
      xs: Inputs.
      length: T.
      reverse: Whether time runs backwards.
      gradient: Whether the time of a gradient counts.
      jac: Structure of the Jacobian, as in `Newton`.
      platform: Row of `COSTS`; by default the platform of the ambient mesh or
        `jax.default_backend()`.

    Returns:
      A `Choice`; its table is empty where there is nothing to solve.
    """
    del reverse  # the direction changes no cost
    num = length if length is not None else len(jax.tree.leaves(xs)[0])
    if num == 0:
        return Choice(Sequential(), "Sequential: there is no step to take.", None, ())
    names = leaf_names(init)
    parts = divided(trace(f, init, xs, None), names)
    return rule(parts, num, gradient=gradient, jac=jac, platform=platform)


def rule(
    parts: Division,
    length: int,
    *,
    gradient: bool = True,
    jac: Jac = "auto",
    platform: str | None = None,
) -> Choice:
    """Returns what `explain` does, of a recurrence that has been traced."""
    platform = platform or ambient_platform()
    check_platform(platform)
    if parts.reason:
        return Choice(Sequential(), f"Sequential for {length} steps: {parts.reason}.", None, ())
    newton = Newton(jac=jac)
    program, first = _unknowns(parts, length)
    model = model_of(program, first, length, gradient, jac, platform)
    table = sequential_candidates(model, jac)
    best = min(row.seconds for row in table)
    seconds = model.solve(newton, AFFINE_ITERATIONS)
    shot = shooting(model, jac, None, "", 1.0)
    if min(seconds, shot.seconds) >= best:
        # The program is not read for what is blind: on CPUs that would cost more than it tells.
        note = "not tried: dearer than a sequential run with two iterations already"
        table.append(Candidate(newton, AFFINE_ITERATIONS, seconds, note))
        table.append(
            shot._replace(note="not tried: dearer than a sequential run with one pass already")
        )
    else:
        recurrence = parts.traced.recurrence
        causes = blind_leaves(recurrence.jaxpr, recurrence.num_carry)
        seeing = without_blind(parts, [bool(found) for found in causes])
        if seeing is not parts:
            parts = seeing
            program, first = _unknowns(parts, length)
            model = model_of(program, first, length, gradient, jac, platform)
        obstacle = obstacle_of(program, [parts.names[number] for number in parts.solved])
        table += _parallel_candidates(model, program, first, jac, obstacle)
    if parts.first or parts.last:
        # Next to a solve they are a loop of their own.
        apart = length * model.costs.step
        table = [
            row if isinstance(row.method, Sequential) else row._replace(seconds=row.seconds + apart)
            for row in table
        ]
    table.sort(key=lambda row: row.seconds)
    return Choice(
        table[0].method, reason_for(table, None, False, length, platform), None, tuple(table)
    )


def _unknowns(parts: Division, length: int) -> tuple[Traced, Leaves]:
    """Returns the program of the unknowns alone, and the inputs of its first step; of others only shapes count."""
    program = parts.traced
    if parts.first or parts.last:
        before = []
        for number in parts.first:
            leaf = program.init[number]
            before.append(jnp.broadcast_to(leaf, (length, *leaf.shape)))
        program = trace(*parts.rest(tuple(before)), None)
    return program, tuple(leaf[0] for leaf in program.xs)


def _parallel_candidates(
    model: CostModel, program: Traced, first: Leaves, jac: Jac, obstacle: str
) -> list[Candidate]:
    """Returns the rows of what iterates, by iterations that are assumed."""
    newton = Newton(jac=jac)
    if obstacle:
        return [Candidate(newton, 0, math.inf, f"ruled out: {obstacle}")]
    if is_affine(program.step, program.init, first):
        seconds = model.solve(newton, AFFINE_ITERATIONS)
        return [Candidate(newton, AFFINE_ITERATIONS, seconds, "f is affine in the state")]
    seconds = model.solve(newton, ASSUMED_ITERATIONS)
    rows = [Candidate(newton, ASSUMED_ITERATIONS, seconds, "iterations assumed")]
    return [*rows, shooting(model, jac, None, "", 1.0)]


def check_platform(platform: str) -> None:
    """Checks that there are costs of a platform."""
    if platform not in COSTS:
        legal = ", ".join(map(repr, COSTS))
        raise UsageError(f"platform={platform!r} has no costs; legal are {legal}.")


def model_of(
    program: Traced, first: Leaves, length: int, gradient: bool, jac: Jac, platform: str
) -> CostModel:
    """Returns the costs of a recurrence: `first` are the inputs of one step."""
    structure = structure_of(program.step, program.init, first, jac)
    problem = Problem(program.step, program.init, program.xs, length, structure)
    kernel = None
    if takes(problem):
        kernel = COSTS[platform].kernel
    return CostModel(
        costs=COSTS[platform],
        structure=structure,
        length=length,
        step_flops=count_flops(program.step, program.init, first).total,
        gradient=gradient,
        kernel=kernel,
    )


def obstacle_of(program: Traced, names: Sequence[str]) -> str:
    """Returns why no iteration suits a recurrence; empty if nothing in its program says so."""
    recurrence = program.recurrence
    for name, causes in zip(
        names, blind_leaves(recurrence.jaxpr, recurrence.num_carry), strict=True
    ):
        if causes:
            text = min(cause.text for cause in causes)
            return f"carry leaf {name} is blind: a derivative does not see {text}"
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in program.init)
    wanted = recurrence.jaxpr.outvars[: recurrence.num_carry]
    if is_rounded(recurrence.jaxpr, wanted, eps):
        return "f rounds to a narrower type than the state's, and iterates do not settle below that"
    return ""


def is_affine(step: Callable, start: Leaves, x: Leaves) -> bool:
    """True if the Jacobian of a step does not depend on the state."""

    def derivative(before, seed, x):
        return jax.jvp(lambda before: step(before, x), (before,), (seed,))[1]

    closed = jax.make_jaxpr(derivative)(start, start, x)
    entering: list[Relation] = [{} for _ in closed.jaxpr.invars]
    for number, leaf in enumerate(start):
        entering[number] = {number: tuple(range(leaf.ndim))}
    return not any(relations(closed.jaxpr, entering))
