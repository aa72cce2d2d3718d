"""Which method to take for a recurrence, on what grounds, and what each would cost."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.core import Tracer

from jaxpar.solve.carries import Loop, divided
from jaxpar.solve.default import (
    ASSUMED_ITERATIONS,
    Candidate,
    Choice,
    CostModel,
    check_platform,
    iterative_methods,
    model_of,
    obstacle_of,
    reason_for,
    sequential_candidates,
    shooting,
)
from jaxpar.solve.lyapunov import lyapunov
from jaxpar.solve.newton import Newton
from jaxpar.solve.parallel import parallel_scan
from jaxpar.solve.problem import Method
from jaxpar.solve.program import leaf_names, trace
from jaxpar.solve.sequential import Sequential
from jaxpar.solve.structure import Jac
from jaxpar.types import PyTree

__all__ = ["PREFIX", "Auto", "choose"]

PREFIX = 128
"""Steps on which exponent and iterations are measured: one window, which compiles fastest."""


@dataclasses.dataclass(frozen=True)
class Auto:
    """Lets `parallel_scan` take the method that `choose` chooses; `Stats.method` says which.

    Outside of jit it measures, which compiles some short solves. Inside, values are not known, so
    that only the structure, the length and the platform decide, and the recurrence is taken to be
    predictable: where it is not, the failed iterations come on top of the sequential run that
    finishes them. So call `choose` once and pass what it returns.

    Attributes:
      gradient: Whether the cost of a gradient counts.
      jac: Structure of the Jacobian, as in `Newton`.
    """

    gradient: bool = True
    jac: Jac = "auto"

    def choose_method(
        self, f: Callable, init: PyTree, xs: PyTree, length: int, reverse: bool
    ) -> Method:
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

    The exponent of the first `PREFIX` steps rules iterative methods out if errors would grow by
    more than eps^(-1/2) over the whole length. Those that could be cheaper than a sequential run
    are then tried on the same steps, for their iterations. The model is coarse, within a factor of
    two or three at best: time both if it matters.

    Args:
      f: As for `parallel_scan`, and so are init, xs, length and reverse. Traced values are not
        looked at.
      init: A state.
      xs: Inputs.
      length: T.
      reverse: Whether time runs backwards.
      gradient: Whether the time of a gradient counts.
      jac: Structure of the Jacobian, as in `Newton`.
      platform: Row of `COSTS`; `jax.default_backend()` by default. Batches that `vmap` adds are not
        seen.

    Returns:
      A `Choice`: `method`, `reason`, and the table of all candidates; it is empty where there is
      nothing to solve.
    """
    platform = platform or jax.default_backend()
    check_platform(platform)
    num = length if length is not None else len(jax.tree.leaves(xs)[0])
    if num == 0:
        return Choice(Sequential(), "Sequential: there is no step to take.", None, ())
    traced = trace(f, init, xs, None)
    parts = divided(traced, leaf_names(init))
    if parts.reason:
        return Choice(Sequential(), f"Sequential for {num} steps: {parts.reason}.", None, ())
    if parts.first or parts.last:
        before = ()
        if parts.first:
            _, before = parts.known(Loop(num, reverse, 1, None))
        return choose(
            *parts.rest(before), num, reverse, gradient=gradient, jac=jac, platform=platform
        )
    first = tuple(leaf[0] for leaf in traced.xs)
    model = model_of(traced, first, num, gradient, jac, platform)
    structure = model.structure

    now = jnp.zeros(
        ()
    )  # a tracer wherever a program is traced, even one whose inputs are all known
    is_known = not any(
        isinstance(leaf, Tracer) for leaf in jax.tree.leaves((init, xs, traced.consts, now))
    )
    exponent = _exponent(f, init, xs, num, reverse) if is_known else None
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in traced.init)
    is_chaotic = exponent is not None and not exponent * num <= -math.log(eps) / 2
    if is_chaotic:
        obstacle = "errors grow along the sequence"
    else:
        obstacle = obstacle_of(traced, leaf_names(init))
    table = sequential_candidates(model, jac)
    limit = min(row.seconds for row in table)
    for method in iterative_methods(structure, jac):
        table.append(
            _candidate(method, model, limit, obstacle, (f, init, xs, reverse) if is_known else None)
        )
    table.append(shooting(model, jac, exponent, obstacle, eps))
    table.sort(key=lambda row: row.seconds)
    return Choice(
        table[0].method,
        reason_for(table, exponent, is_chaotic, num, platform),
        exponent,
        tuple(table),
    )


def _exponent(f: Callable, init: PyTree, xs: PyTree, num: int, reverse: bool) -> float:
    """The largest Lyapunov exponent of the first steps, in the order in which they are taken."""
    ahead = _prefix(jax.tree.map(lambda x: jnp.flip(x, 0), xs) if reverse else xs, False)
    return float(jax.jit(lambda init, xs: lyapunov(f, init, xs, min(num, PREFIX)))(init, ahead))


def _candidate(
    method: Method, model: CostModel, limit: float, obstacle: str, problem: tuple | None
) -> Candidate:
    """Tries a method on the first steps, unless it is ruled out before or values are not known."""
    if obstacle:
        return Candidate(method, 0, math.inf, f"ruled out: {obstacle}")
    if model.solve(method, 2) >= limit:
        return Candidate(
            method,
            2,
            model.solve(method, 2),
            "not tried: dearer than a sequential run with two iterations already",
        )
    if problem is None:
        if not isinstance(method, Newton):
            return Candidate(method, 0, math.inf, "not tried: its iterations can only be measured")
        seconds = model.solve(method, ASSUMED_ITERATIONS)
        return Candidate(
            method, ASSUMED_ITERATIONS, seconds, "iterations assumed: values are traced"
        )
    f, init, xs, reverse = problem
    num = min(model.length, PREFIX)
    _, _, stats = parallel_scan(
        f, init, _prefix(xs, reverse), num, reverse, method=method, with_stats=True, on_fail="nan"
    )
    if not stats.converged:
        return Candidate(
            method, int(stats.iterations), math.inf, f"ruled out: it fails within {num} steps"
        )
    count = math.ceil(int(stats.iterations) / int(stats.windows))
    return Candidate(
        method, count, model.solve(method, count), f"iterations measured on {num} steps"
    )


def _prefix(xs: PyTree, reverse: bool) -> PyTree:
    """Returns the inputs of the first `PREFIX` steps in time."""
    return jax.tree.map(lambda x: x[-PREFIX:] if reverse else x[:PREFIX], xs)
