"""Inside a stage of a pipeline: a program over the mesh axis `stage` alone, in which stages do different things."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import jax

from jaxpar.types import PyTree, UsageError

__all__ = ["as_in_stage", "by_stage", "in_stage", "refuse_in_stage"]

_stage = jax.make_user_context(False)


def by_stage(fn: Callable, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """Runs `fn` on each pipeline stage's own block, by `jax.shard_map` over the axis `stage` alone.

    Inside, GSPMD splits over all other axes as it does outside, and everything of this module says how; collectives
    over `stage` are `fn`'s own. Nothing is differentiated through. Specs name `stage` or nothing; in loops of `fn`
    that not all stages enter see `refuse_in_stage`.
    """

    def apart(*args):
        with as_in_stage():
            return fn(*args)

    return jax.shard_map(
        apart, in_specs=in_specs, out_specs=out_specs, axis_names={"stage"}, check_vma=False
    )


def as_in_stage() -> AbstractContextManager:
    """Has what is asked under it answer as inside of `by_stage`: to say what a stage will do, without tracing it."""
    return _stage(True)


def in_stage() -> bool:
    """Whether what is traced is what one stage of a pipeline does, inside of `by_stage`."""
    return _stage.value


def refuse_in_stage(what: str, instead: str) -> None:
    """Refuses messages between devices of a pipeline's stage: while other stages do something else, nobody gets them.

    Collectives of all devices of a group are safe, since a group lies within a stage.

    Raises:
      UsageError: Inside of `by_stage`.
    """
    if in_stage():
        raise UsageError(
            f"{what} sends from device to device, which a pipeline's stages cannot do; {instead}."
        )
