"""Every configuration, of library, environments and experiments, refuses impossible numbers: one table."""

import dataclasses
import importlib
import inspect
import pkgutil
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ranges_of_fields import INF, NAN
from table_of_fields import BASIS, BY_HAND, OWNERS, RESULTS, TABLE

import envs
import experiments
import jaxpar
from jaxpar.fields import AtLeast, Between, Each, Finite, OneOf, Positive, check_fields, field
from jaxpar.io import Checkpoints
from jaxpar.pomdp import Vopp
from jaxpar.rl.replay import ReplayFields
from jaxpar.types import Scalar, UsageError


def is_number(value):
    return isinstance(value, int | float) and not isinstance(value, bool)


PARTS = {ReplayFields}
"""Bases that are no configurations by themselves: their fields are those of the classes below."""


def own_numbers(cls):
    """The fields that a class adds, itself or by a base in `PARTS`, and in which there are numbers."""
    added = {
        name
        for kind in (cls, *PARTS.intersection(cls.__mro__))
        for name in kind.__dict__.get("__annotations__", {})
    }
    for declared in dataclasses.fields(cls):
        parts = () if typing.get_origin(declared.type) is dict else typing.get_args(declared.type)
        types = [kind for kind in (declared.type, *parts) if kind in (int, float)]
        swept = declared.type is typing.Any and is_number(declared.default)
        legal = declared.metadata.get("legal")
        ranged = isinstance(legal.legal if isinstance(legal, Each) else legal, Between)
        if declared.name in added and (types or swept or ranged):
            yield declared.name


def is_configuration(package, module, name, cls):
    """True where a name of a module is a public frozen dataclass of its own, with numbers, that is no result."""
    if not (inspect.isclass(cls) and dataclasses.is_dataclass(cls) and cls.__module__ == module):
        return False
    if package is envs and hasattr(cls, "_flax_dataclass"):
        # Parameters, which are traced; flags that change them are checked where they are read.
        return False
    is_known = f"{module.partition('.')[2]}.{name}" in RESULTS or name.startswith("_")
    if is_known or cls in PARTS or not cls.__dataclass_params__.frozen:
        return False
    return any(True for _ in own_numbers(cls))


def configurations():
    """Every public frozen dataclass with numbers of its own in the library and its experiments."""
    for package in (jaxpar, envs, experiments):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if package is jaxpar and "._" in module.name:
                continue
            for name, cls in vars(importlib.import_module(module.name)).items():
                if is_configuration(package, module.name, name, cls):
                    yield cls


def rows(cls):
    return [(name, *ends) for names, ends in TABLE[cls].items() for name in names.split()]


def test_the_table_has_every_configuration_and_every_number():
    found = {
        cls: {name for name in own_numbers(cls) if (cls, name) not in BY_HAND}
        for cls in configurations()
    }
    assert {cls: {name for name, *_ in rows(cls)} for cls in TABLE} == found


# ---------------------------------------------------------------- how each is made


def changed(cls, name, value):
    """A configuration with another value in one field, in a tuple where the field holds several."""
    declared = next(each for each in dataclasses.fields(cls) if each.name == name)
    value = (value,) if isinstance(declared.metadata["legal"], Each) else value
    made = dataclasses.replace(cls(*BASIS.get(cls, ())), **{name: value})
    return OWNERS[cls](made) if cls in OWNERS else made


def legal_of(cls, name):
    legal = next(each for each in dataclasses.fields(cls) if each.name == name).metadata["legal"]
    return legal.legal if isinstance(legal, Each) else legal


@pytest.mark.parametrize(
    "cls", TABLE, ids=lambda cls: f"{cls.__module__}.{cls.__name__}".removeprefix("jaxpar.")
)
def test_impossible_numbers_are_refused(cls):
    for name, outside, ends in rows(cls):
        annotation = next(each for each in dataclasses.fields(cls) if each.name == name).type
        is_whole = int in {annotation, *typing.get_args(annotation)}
        infinite = () if INF in ends else (INF, -INF)
        for value in (NAN, *infinite, True, "1", *outside, *([2.0, 1.5] if is_whole else [])):
            with pytest.raises(UsageError) as error:
                changed(cls, name, value)
            said = str(error.value)
            assert (
                f"{name}=" in said
                and repr(value) in said
                and said.endswith(".")
                and "\n" not in said
            ), said
            assert not outside or isinstance(value, bool | str) or "must be" in said, said
        for value in ends:
            assert value in legal_of(cls, name), (name, value)


def test_checkpoints_refuse_impossible_numbers(tmp_path):
    for name, values in (("keep", (0, 1.5, NAN, True)), ("keep_every_s", (-1.0, NAN, INF, "1"))):
        for value in values:
            with pytest.raises(UsageError, match=f"{name}={value!r} must be"):
                Checkpoints(tmp_path, **{name: value})


# ---------------------------------------------------------------- ranges themselves


@dataclasses.dataclass(frozen=True)
class Example:
    whole: int = field(3, AtLeast(1, also=(-1,)))
    real: float = field(0.5, Between(0, 1, "[)"))
    swept: Scalar = field(0.5, Positive())
    maybe: int | None = field(None, AtLeast(1))
    widths: tuple[int, ...] = field((), Each(AtLeast(1)), identity=False)
    name: str = field("a", OneOf({"a": 1, "b": 2}))
    signed: float = field(0.0, Finite())

    def __post_init__(self):
        check_fields(self, "example.")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(whole=0), "example.whole=0 must be at least 1, or -1."),
        (dict(whole=2.0), "example.whole=2.0 must be a whole number, at least 1, or -1."),
        (dict(real=1.0), "example.real=1.0 must be at least 0 and under 1."),
        (dict(real=NAN), "example.real=nan must be a finite number, at least 0 and under 1."),
        (dict(swept=-1), "example.swept=-1 must be over 0."),
        (dict(swept=np.float32(0)), "example.swept=np.float32(0.0) must be over 0."),
        (dict(swept=jnp.array([1.0, NAN])), "must be a finite number, over 0."),
        (dict(maybe=0), "example.maybe=0 must be at least 1, or None."),
        (dict(widths=(4, 0)), "example.widths=(4, 0) has an entry that must be at least 1."),
        (dict(widths=4), "example.widths=4 must be a list, each entry at least 1."),
        (dict(name="c"), "example.name='c' is unknown; legal are a, b."),
        (dict(name=1), "example.name=1 is unknown; legal are a, b."),
        (dict(signed=INF), "example.signed=inf must be a finite number."),
    ],
    ids=str,
)
def test_sentences(changes, sentence):
    with pytest.raises(UsageError) as error:
        Example(**changes)
    assert str(error.value).endswith(sentence)


def test_what_is_legal_is_taken():
    Example(whole=-1, real=0, swept=3, maybe=2, widths=[1, 2], name="b", signed=-7)
    Example(whole=np.int64(2), real=np.float32(0.5), swept=jnp.float32(2), signed=np.float64(1))


def test_a_number_that_is_swept_is_not_looked_at():
    jax.vmap(lambda x: Example(swept=x).swept)(jnp.array([1.0, -1.0, NAN]))
    jax.jit(lambda x: Vopp(eta=x).eta)(-1.0)


def test_other_metadata_stays():
    declared = {each.name: each.metadata for each in dataclasses.fields(Example)}
    assert declared["widths"]["identity"] is False and "identity" not in declared["whole"]
