"""Environments by name."""

import dataclasses
import difflib
import functools
import importlib
from collections.abc import Callable, Iterable
from typing import Any

from jaxpar.env import adapt
from jaxpar.types import UsageError

MODULES: tuple[str, ...] = (
    "classic.cart_pole",
    "classic.pendulum",
    "classic.acrobot",
    "classic.mountain_car",
    "classic.double_pole",
    "classic.swing_up",
    "memory.card_games",
    "memory.masked_cart_pole",
    "arcade.mine_sweeper",
    "arcade.brick_breaker",
    "arcade.games",
    "arcade.tetris",
    "arcade.pixels",
    "minatar.console",
    "multi.particles",
    "multi.foraging",
    "multi.combat",
    "grid.rooms",
    "grid.xland",
    "grid.survival",
    "pomdp.tiger",
    "pomdp.baby",
    "pomdp.rocksample",
    "pomdp.tag",
    "pomdp.mars",
    "pomdp.navigation",
    "pomdp.light_dark",
    "pomdp.laser_tag",
    "pomdp.sub_hunt",
    "pomdp.crowd",
    "puzzles.countdown",
    "puzzles.knapsack",
    "puzzles.tours",
    "puzzles.job_shop",
    "puzzles.bin_pack",
    "puzzles.tiles2048",
    "puzzles.rubiks_cube",
    "puzzles.sliding_tile",
    "puzzles.sokoban",
    "puzzles.connector",
)
"""The files, as family.file, that define `VARIANTS`: a dictionary from names to functions without arguments."""


@functools.cache
def _variants() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable[[], Any]] = {}
    for module in MODULES:
        new = importlib.import_module(f".{module}", __package__).VARIANTS
        if twice := sorted(set(new) & set(found)):
            raise ValueError(f"envs/{module.replace('.', '/')}.py gives {twice[0]} a second time")
        found |= new
    return found


def names() -> tuple[str, ...]:
    """The names of our own environments; `make` also knows gymnax's."""
    return tuple(_variants())


def make(name: str, **fields: Any) -> tuple[Any, Any]:
    """The environment of that name, with some of its fields changed, and its default parameters.

    Names that are gymnax's alone give its environment, adapted; `fields` are then what its constructor takes.

    Raises:
        UsageError: no environment has that name, or this one has no such field.
    """
    if name not in _variants():
        return _of_gymnax(name, fields)
    env = _variants()[name]()
    legal = [field.name for field in dataclasses.fields(env)]
    for field in fields:
        if field not in legal:
            raise UsageError(f"{name} has no field {field!r}; {_nearest(field, legal)}")
    env = dataclasses.replace(env, **fields)
    return env, env.default_params


def _of_gymnax(name: str, fields: dict[str, Any]) -> tuple[Any, Any]:
    import gymnax  # takes a second, and most runs need none of it

    if name not in gymnax.registered_envs:
        raise UsageError(
            f"there is no environment {name!r}; {_nearest(name, {*names(), *gymnax.registered_envs})}"
        )
    try:
        env, params = gymnax.make(name, **fields)
    except TypeError as error:
        raise UsageError(
            f"{name}, which is gymnax's, cannot be made with these fields: {error}"
        ) from None
    env = adapt(env, params)
    return env, env.default_params


MOST = 12
"""So many names are listed where none is near; more would fill the screen."""


def _nearest(name: str, known: Iterable[str]) -> str:
    folded = {each.casefold(): each for each in sorted(known)}
    near = difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.5)
    near = near or [each for each in folded if name and name.casefold() in each][:3]
    if near:
        return f"the nearest are {', '.join(folded[each] for each in near)}"
    if len(folded) > MOST:
        return f"it is none of {len(folded)}; python -c 'from jaxpar import envs; print(*envs.names())' lists ours"
    return f"it has {', '.join(folded.values()) or 'none'}"
