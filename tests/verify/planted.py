"""Errors that are planted in the library, and what of them `experiments.verify` sees.

    python -m tests.verify.planted                    # all, with what found each; 25 minutes
    python -m tests.verify.planted accumulation keys  # errors of some kinds

Each error replaces a named function of the library, wherever it was imported, while one layout is
verified. All share the plain twin, which is compiled from the library as it is.
"""

import contextlib
import dataclasses
import functools
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from experiments import verify
from experiments.app.lm import judged_trainings
from experiments.app.mesh_flags import parse_layout, staged
from jaxpar.mesh import simulate_devices
from jaxpar.verify import TOLERANCE, VerifyOptions, verify_cases

KINDS = (
    "rules",
    "batch",
    "keys",
    "stages",
    "context",
    "experts",
    "pipelines",
    "accumulation",
    "optimizer",
    "casts",
    "gathers",
    "losses",
)


@dataclasses.dataclass(frozen=True)
class Planted:
    """An error that a proof has to see.

    Attributes:
      kind: One of `KINDS`.
      name: Short sentence that says what is wrong.
      target: Function that is replaced, as "module:name" or "module:Class.name".
      wrong: Function of the right one that returns the wrong one.
      layout: Layout under which it must be found, as `experiments.verify layouts=[...]` takes it.
      dtype: "float64" where values, gathers or operations are wrong; "bfloat16" where bytes of
        casts are.
      flags: Further flags of `experiments.verify`.
    """

    kind: str
    name: str
    target: str
    wrong: Callable[[Any], Any]
    layout: str
    dtype: str = "float64"
    flags: tuple[str, ...] = ()


Held = list[tuple[Any, list[str]]]
"""Modules or one class, each with the names under which it holds a function."""


def resolve(target: str) -> Held:
    """Returns all modules of the library, or the class, that hold a function, with its names there.

    Args:
      target: The function, as "module:name" or "module:Class.name".

    Raises:
      LookupError: If the library has no such function.
    """
    module_name, _, path = target.partition(":")
    owner = importlib.import_module(module_name)
    *outer, last = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    right = vars(owner).get(last)
    if right is None:
        raise LookupError(f"{target} is held by no module.")
    if outer:
        holders = [owner]
    else:
        holders = _holders(right)
    held = []
    for holder in holders:
        names = [name for name, value in vars(holder).items() if value is right]
        held.append((holder, names))
    return held


@contextlib.contextmanager
def planted(error: Planted) -> Iterator[None]:
    """Replaces the function of an error wherever it is held, and forgets all traces.

    Raises:
      LookupError: If the library has no such function.
    """
    held = resolve(error.target)
    first, names = held[0]
    right = vars(first)[names[0]]
    wrong = _wrapped(right, error.wrong)
    try:
        _hold(held, wrong)
        _forget()
        yield
    finally:
        _hold(held, right)
        _forget()


def _hold(held: Held, function: Any) -> None:
    """Puts a function under all names of another."""
    for holder, names in held:
        for name in names:
            setattr(holder, name, function)


def _forget() -> None:
    """Empties JAX's caches of traces and the library's of tables, which may hold what is wrong."""
    jax.clear_caches()
    for name, module in sorted(sys.modules.items()):
        if name.split(".")[0] != "jaxpar":
            continue
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper):
                value.cache_clear()


def _wrapped(right: Any, wrong: Callable[[Any], Any]) -> Any:
    """The wrong function as a class or module holds the right one: a property stays one."""
    if isinstance(right, property):
        return property(wrong(right.fget))
    if isinstance(right, staticmethod | classmethod):
        return type(right)(wrong(right.__func__))
    return wrong(right)


def _holders(right: Any) -> list[Any]:
    """Modules of the library that hold a function under any name."""
    modules = []
    for name, module in sorted(sys.modules.items()):
        # Wrong functions, of tests.verify, go on to call the right ones.
        is_ours = name.split(".")[0] in ("jaxpar", "experiments")
        if is_ours and any(value is right for value in vars(module).values()):
            modules.append(module)
    return modules


Report = Callable[[Planted, Any, float], None]


def find(errors: tuple[Planted, ...], report: Report) -> list[Planted]:
    """Verifies the layout of each error while it is planted, and returns those that nothing saw.

    Args:
      errors: What is planted, one at a time.
      report: Called with each error, its `LayoutReport` and the seconds that it took.
    """
    lived = []
    for error in errors:
        begin = time.perf_counter()
        row = verify_error(_clean(error.flags), error)
        report(error, row, time.perf_counter() - begin)
        if not row.breaches:
            lived.append(error)
    return lived


class Clean:
    """A configuration of `experiments.verify` with the twins that its layouts are compared with."""

    def __init__(self, flags: tuple[str, ...]):
        self.config = verify.compose(*flags)
        self.proof = judged_trainings.Proof(self.config)


@functools.cache
def _clean(flags: tuple[str, ...]) -> Clean:
    """Returns and keeps the configuration with these flags.

    Its twins are made before anything is planted.
    """
    return Clean(flags)


def verify_error(clean: Clean, error: Planted) -> Any:
    """Returns the report of the layout of an error, planted after the twin was made."""
    layout = staged(parse_layout(error.layout))
    training = clean.proof.training(layout, number=0)
    case = clean.proof.case(layout, training)
    if error.dtype in TOLERANCE:
        with jax.enable_x64(error.dtype == "float64"):
            case.twin(error.dtype)
    clean.proof.flops(training)
    with planted(error):
        (row,) = verify_cases([case], VerifyOptions(dtypes=[error.dtype]))
    if row.refused:
        raise ValueError(f"{error.name}: {error.layout} is not legal: {row.refused}")
    return row


def main(kinds: list[str]) -> int:
    """Plants the errors of some kinds, or all, and prints what found each."""
    from tests.verify.errors import ERRORS
    from tests.verify.outside import BEYOND, OUTSIDE

    def is_chosen(error: Planted) -> bool:
        return not kinds or error.kind in kinds or any(kind in error.name for kind in kinds)

    chosen = tuple(error for error in (*ERRORS, *OUTSIDE) if is_chosen(error))

    def report(error: Planted, row: Any, seconds: float) -> None:
        found = "NOT FOUND"
        if row.breaches:
            found = row.breaches[0]
        if error.name in BEYOND:
            found = f"{found}: {BEYOND[error.name]}"
        print(
            f"{error.kind:12} {error.name:45} {error.layout:24} {seconds:4.0f} s  {found}",
            flush=True,
        )

    lived = find(chosen, report)
    print(f"{len(chosen) - len(lived)} of {len(chosen)} planted errors are found")
    if any(error.name not in BEYOND for error in lived):
        return 1
    return 0


if __name__ == "__main__":
    simulate_devices(8)
    sys.exit(main(sys.argv[1:]))
