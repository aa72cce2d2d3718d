import dataclasses

import pytest

import envs
from envs import registry
from jaxpar.types import UsageError


@dataclasses.dataclass(frozen=True)
class Sized:
    size: int = 3
    default_params = ()


@pytest.fixture
def sized(monkeypatch):
    monkeypatch.setattr(registry, "_variants", lambda: {"Sized-5": lambda: Sized(5)})


def test_names_and_fields(sized):
    assert envs.names() == ("Sized-5",)
    assert envs.make("Sized-5") == (Sized(5), ()) and envs.make("Sized-5", size=9) == (Sized(9), ())
    with pytest.raises(UsageError, match="Sized-5 has no field 'sise'; the nearest are size"):
        envs.make("Sized-5", sise=9)


def test_unknown_names_get_the_nearest():
    with pytest.raises(
        UsageError, match="no environment 'CartPole-v0'; the nearest are CartPole-v1"
    ):
        envs.make("CartPole-v0")
    with pytest.raises(UsageError, match="the nearest are Breakout-MinAtar"):
        envs.make("Breakout-Minatar")
    with pytest.raises(UsageError, match="the nearest are RubiksCube"):
        envs.make("cube"), "whatever its capitals, a part of a name is enough"
    with pytest.raises(UsageError, match=r"it is none of \d{3}; python -c .*lists ours$") as error:
        envs.make("typo")
    assert len(str(error.value)) < 200


def test_gymnax_fills_what_we_lack_and_no_more():
    env, params = envs.make("Catch-bsuite")
    assert type(env).__name__ == "Adapted" and env == envs.make("Catch-bsuite")[0]
    env, params = envs.make("MountainCarContinuous-v0")
    assert type(env).__module__ == "envs.classic.mountain_car"
    with pytest.raises(UsageError, match="Catch-bsuite, which is gymnax's, cannot be made"):
        envs.make("Catch-bsuite", sise=3)


def test_no_name_is_given_twice(monkeypatch):
    monkeypatch.setattr(registry, "MODULES", ("classic.acrobot", "classic.acrobot"))
    with pytest.raises(ValueError, match="envs/classic/acrobot.py gives .* a second time"):
        registry._variants.__wrapped__()
