"""Finite models from files, and their policies that are solved or read before an episode begins."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp

from jaxpar.env import Environment
from jaxpar.fields import AtLeast, Positive, check_fields, field
from jaxpar.pomdp import (
    Exact,
    TabularPomdp,
    from_environment,
    load_policy,
    load_pomdp,
    load_pomdpx,
    qmdp,
    solve_exact,
)
from jaxpar.types import PyTree, UsageError

FILE = "file:"
READERS = {".pomdp": load_pomdp, ".pomdpx": load_pomdpx}
"""Readers of models by the suffix in small letters."""


@dataclasses.dataclass(frozen=True)
class ExactPolicy:
    """The best policy of a finite model, as alpha vectors.

    Attributes:
      tolerance: Gap between the bounds of the value at the start at which solving ends.
      max_iterations: Most trials of solving.
      policy: File in `.alpha` or `.policy` format that is read instead of solving.
    """

    tolerance: float = field(1e-3, Positive())
    max_iterations: int = field(1000, AtLeast(1))
    policy: str = ""

    def __post_init__(self) -> None:
        check_fields(self, "planner.")

    def solve(self, model: TabularPomdp) -> Exact:
        """Returns the policy; cost as of `solve_exact`."""
        if self.policy:
            return load_policy(pathlib.Path(self.policy), model)
        return solve_exact(model, tol=self.tolerance, max_iterations=self.max_iterations)


@dataclasses.dataclass(frozen=True)
class QmdpPolicy:
    """The policy of the values that a model has if every state is observed after one step.

    It gathers no information. Littman, Cassandra and Kaelbling (1995).

    Attributes:
      tolerance: Share of the largest value by which values may be too high.
    """

    tolerance: float = field(1e-6, Positive())

    def __post_init__(self) -> None:
        check_fields(self, "planner.")

    def solve(self, model: TabularPomdp) -> Exact:
        """Returns the policy: one vector an action. Its value bounds the best one from above."""
        vectors = qmdp(model, tol=self.tolerance)
        value = (vectors @ model.start).max()
        unknown = jnp.full_like(value, -jnp.inf)
        actions = jnp.arange(len(vectors), dtype=jnp.int32)
        return Exact(
            value=value,
            lower=unknown,
            upper=value,
            alphas=vectors,
            actions=actions,
            converged=True,
            num_iterations=0,
        )


def load_model(env: str) -> TabularPomdp | None:
    """Returns the model of the file that `env=file:path` names; None for another name.

    Raises:
      UsageError: The file cannot be read, has another format, or is named without `file:`.
    """
    suffix = pathlib.PurePath(env).suffix.lower()
    if not env.startswith(FILE):
        if suffix in READERS or "/" in env:
            raise UsageError(
                f"env={env}: no environment of that name; expected env={FILE}{env} for a file."
            )
        return None
    if suffix not in READERS:
        raise UsageError(
            f"env={env}: a file of an unknown kind; expected one that ends in .POMDP or .pomdpx."
        )
    return READERS[suffix](pathlib.Path(env.removeprefix(FILE)))


def tabular_of(env: Environment, params: PyTree) -> TabularPomdp:
    """Returns the arrays of a finite environment, in which a state is its number.

    Raises:
      UsageError: The environment has no arrays.
    """
    if isinstance(params, TabularPomdp):
        return params
    return from_environment(env, jax.device_get(params))
