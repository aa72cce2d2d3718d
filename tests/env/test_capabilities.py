"""Optional abilities are found in one place, whoever offers them: environments, adapters and wrappers."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from worlds import Corridor, Team

import envs
from experiments.app.env.policies import Revealing
from jaxpar.env import Discrete, adapt, capabilities, is_adapter, own_discount
from jaxpar.rl import LastActionReward
from jaxpar.types import UsageError


def abilities(env):
    """The names of what `env` can do."""
    found = capabilities(env)
    return {
        field.name
        for field in dataclasses.fields(found)
        if getattr(found, field.name) is not None and getattr(found, field.name) is not False
    }


def test_actions_are_named_as_their_space_describes_them():
    """Where the line of `action_space` is the list of actions, in order, that is what the space calls them."""
    told = 0
    for name in envs.names():
        env, params = envs.make(name)
        space, line = (
            env.action_space(params),
            (type(env).action_space.__doc__ or "").split(": ")[-1],
        )
        words = [word.strip().lower() for word in line.strip().rstrip(".").split(",")]
        if isinstance(space, Discrete) and len(words) == space.n:
            told += 1
            listed = ["coast" if word == "nothing" else word for word in words]
            assert list(space.names) == listed or name == "Acrobot-v1", name
    assert told > 25
    with pytest.raises(UsageError, match="3 choices take as many names, not 2"):
        Discrete(3, names=("left", "right"))
    assert Discrete(2, names=("left", "right")) == Discrete(2)


@pytest.mark.parametrize(
    "env,want",
    [
        (Corridor(), {"truncated", "action_mask", "log_likelihood", "render", "absorbing"}),
        (Team(), {"truncated", "action_mask", "num_agents"}),
        (
            LastActionReward(Corridor()),
            {"action_mask", "render"},
        ),  # it hides the rest: its steps are its own
        (Revealing(Team()), {"truncated", "action_mask", "num_agents"}),  # it forwards everything
        (envs.make("Catcher")[0], {"truncated", "render"}),
        (envs.make("BattleShip")[0], {"truncated", "render", "action_mask"}),
        (envs.make("CartPole-v1")[0], {"truncated", "render"}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_an_environment_has_what_it_offers(env, want):
    assert abilities(env) == want


def test_all_abilities_of_ours_are_fields():
    """An optional part that no field names would be silently unused."""
    known = {field.name for field in dataclasses.fields(capabilities(Corridor()))}
    found = set().union(*(abilities(envs.make(name)[0]) for name in envs.names()))
    assert known - found == {"gaussian_start", "linear_gaussian", "items"}


def test_agents_are_axes():
    assert capabilities(Corridor()).num_agents is None and capabilities(Corridor()).agents == ()
    assert capabilities(Team(2)).num_agents == 2 and capabilities(Team(2)).agents == (2,)


def test_both_forms_of_a_heuristic_are_one():
    class Plain:
        def heuristic(self, state, params):
            return state + params

    class Told(Plain):
        def heuristic(self, state, params, action):
            return state + params + 10 * action

    plain, told = (capabilities(env).heuristic for env in (Plain(), Told()))
    assert plain(1, 2) == plain(1, 2, 5) == 3
    assert told(1, 2) == -7 and told(1, 2, 5) == 53
    env, params = envs.make("MARS-5-4")
    state = env.init(jax.random.key(0), params)
    for action in range(-1, env.action_space(params).n):
        want, got = (
            env.heuristic(state, params, action),
            capabilities(env).heuristic(state, params, action),
        )
        assert jnp.array_equal(want, got)


def test_an_adapter_has_no_parts():
    gymnax = pytest.importorskip("gymnax")
    foreign = adapt(*gymnax.make("Catch-bsuite"))
    assert [
        is_adapter(env)
        for env in (Corridor(), Revealing(Corridor()), LastActionReward(Corridor()), foreign)
    ] == [
        False,
        False,
        True,
        True,
    ]


def test_only_parameters_with_a_discount_have_one():
    assert own_discount(envs.make("Tiger")[1]) == envs.make("Tiger")[1].discount
    assert own_discount(Corridor().default_params) is None and own_discount(()) is None
