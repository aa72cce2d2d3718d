"""Foreign environments through `adapt`: gymnax, small stand-ins for each form, and real suites where installed."""

import copy
import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import fast
import flax.struct
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.wrappers.purerl import LogWrapper
from worlds import Corridor

from jaxpar.env import Box, Discrete, Fields, adapt, reset, step
from jaxpar.env.check import check_identity, check_parts, check_types, check_walk, walk
from jaxpar.types import UsageError


def checked(env, num_steps=40):
    """The walk of an adapted environment that kept every promise."""
    params = env.default_params
    check_identity(env), check_types(env, params), check_parts(env, params)
    steps = fast.jit(lambda key: walk(key, env, params, 4, num_steps))(jax.random.key(0))
    check_walk(env, steps)
    return steps


def test_our_own_comes_back():
    assert adapt(Corridor()) == Corridor()


def test_gymnax_steps_as_gymnax_does():
    theirs, params = gymnax.make("CartPole-v1")
    env = adapt(theirs)
    step_key, _ = jax.random.split(jax.random.key(1))  # gymnax spends the other half on its reset
    obs, state = reset(jax.random.key(0), env, params)
    same_obs, same_state = theirs.reset(jax.random.key(0), params)
    made = step(step_key, env, state, jnp.int32(1), params)
    gymnax_made = theirs.step(jax.random.key(1), same_state, jnp.int32(1), params)
    np.testing.assert_array_equal(obs, same_obs)
    np.testing.assert_allclose(made.obs, gymnax_made[0], rtol=1e-6)
    assert (made.reward, made.terminated, made.truncated) == (1, False, False)
    np.testing.assert_array_equal(made.info["discount"], 1.0)


def test_gymnax_keeps_the_last_observation_and_both_ends():
    theirs, params = gymnax.make("CartPole-v1")
    env = adapt(theirs, params.replace(max_steps_in_episode=2))
    params = env.default_params
    _, state = reset(jax.random.key(0), env, params)
    one = step(jax.random.key(1), env, state, 1, params)
    two = step(jax.random.key(2), env, one.state, 1, params)
    assert not one.truncated and two.truncated and not two.terminated and two.state.time == 2
    fallen = two.state.replace(theta=jnp.float32(0.3))
    three = step(jax.random.key(3), env, fallen, 1, params)
    assert three.terminated and three.truncated
    np.testing.assert_allclose(three.obs[2], three.state.theta)


@pytest.mark.parametrize("name", ["Pendulum-v1", "Catch-bsuite", "FourRooms-misc"])
def test_gymnax_types_and_spaces_are_made_true(name):
    # Pendulum changes the types of its state, Catch and FourRooms have other dtypes than their spaces tell.
    checked(adapt(*gymnax.make(name)))


def test_equal_environments_compile_once():
    first, second = (adapt(*gymnax.make("Breakout-MinAtar")) for _ in range(2))
    assert first == second and hash(first) == hash(second) and copy.deepcopy(first) == first
    assert adapt(*gymnax.make("DeepSea-bsuite", size=5)) != adapt(
        *gymnax.make("DeepSea-bsuite", size=6)
    )
    theirs, params = gymnax.make("Catch-bsuite")
    assert adapt(theirs, params.replace(max_steps_in_episode=3)) != adapt(theirs, params)
    traces = []

    @functools.partial(jax.jit, static_argnums=0)
    def begin(env, key):
        traces.append(1)
        return env.reset(key, env.default_params)

    begin(first, jax.random.key(0)), begin(second, jax.random.key(1))
    assert len(traces) == 1


def test_wrappers_that_reset_and_strangers_are_refused():
    with pytest.raises(UsageError, match="LogWrapper hides an environment that resets itself"):
        adapt(LogWrapper(gymnax.make("Catch-bsuite")[0]))

    class GymAutoResetWrapper:
        observation_spec = None

    with pytest.raises(UsageError, match="resets by itself"):
        adapt(GymAutoResetWrapper())
    with pytest.raises(UsageError, match="dict is no environment of ours"):
        adapt({})


@flax.struct.dataclass
class OldState:
    place: Any
    time: int


@flax.struct.dataclass
class OldParams:
    max_steps_in_episode: int = 6


class OldGymnax:
    """Five values, as gymnax 0.0 and Craftax have them, with types that a step changes."""

    default_params = OldParams()

    def __init__(self, goal=2):
        self.goal = goal

    def reset_env(self, key, params):
        return jnp.zeros(1), OldState(0.0, 0)

    def step_env(self, key, state, action, params):
        state = OldState(jnp.asarray(state.place + action, jnp.int32), state.time + 1)
        done = (state.place >= self.goal) | (state.time >= params.max_steps_in_episode)
        return (
            jnp.asarray([state.place], jnp.float32),
            state,
            state.place * 1.0,
            done,
            {"discount": 1.0 - done},
        )

    def step(self, key, state, action, params=None):
        return self.step_env(key, state, action, params)

    def action_space(self, params):
        return gymnax.environments.spaces.Discrete(2)

    def observation_space(self, params):
        return gymnax.environments.spaces.Box(0, 2, (1,))


def test_five_values_are_told_apart_at_the_limit():
    env = adapt(OldGymnax())
    params = env.default_params
    assert env != adapt(OldGymnax(3)) and env == adapt(OldGymnax(2))
    _, state = reset(jax.random.key(0), env, params)
    ends = []
    for action in (0, 1, 1):
        made = step(jax.random.key(1), env, state, jnp.int32(action), params)
        state = made.state
        ends.append((bool(made.terminated), bool(made.truncated)))
    assert ends == [(False, False), (False, False), (True, False)]
    late = step(
        jax.random.key(1),
        env,
        state.replace(place=jnp.float32(0), time=jnp.int32(5)),
        jnp.int32(0),
        params,
    )
    assert (bool(late.terminated), bool(late.truncated)) == (False, True)
    steps = checked(env)
    assert steps.terminated.any() and steps.truncated.any()


@flax.struct.dataclass
class TeamState:
    step: Any


class DictTeam:
    """JaxMARL's form: dictionaries, agents that see and choose unlike each other, no mask of its own."""

    agents, max_steps = ["scout", "cook"], 5

    def reset(self, key):
        return {"scout": jnp.ones(3), "cook": jnp.ones(2)}, TeamState(jnp.zeros((), jnp.int32))

    def step_env(self, key, state, actions):
        state, late = TeamState(state.step + 1), state.step + 1 >= self.max_steps
        obs = {
            "scout": jnp.full(3, 1.0 * actions["scout"]),
            "cook": jnp.full(2, 1.0 * actions["cook"]),
        }
        done = {"scout": late | (actions["scout"] == 3), "cook": late, "__all__": late}
        return obs, state, {"scout": 1.0, "cook": -1.0}, done, {}

    def get_avail_actions(self, state):
        raise NotImplementedError

    def action_space(self, agent):
        return gymnax.environments.spaces.Discrete({"scout": 4, "cook": 2}[agent])

    def observation_space(self, agent):
        return gymnax.environments.spaces.Box(0.0, 4.0, ({"scout": 3, "cook": 2}[agent],))


def test_dictionaries_are_stacked_padded_and_masked():
    env = adapt(DictTeam())
    assert env.num_agents == 2 and env.action_space(()) == Discrete(4, (2,))
    assert env.observation_space(()) == Box(0.0, 4.0, (2, 3))
    obs, state = reset(jax.random.key(0), env, ())
    np.testing.assert_array_equal(obs, [[1, 1, 1], [1, 1, 0]])
    np.testing.assert_array_equal(
        env.action_mask(state, ()), [[True] * 4, [True, True, False, False]]
    )
    made = step(jax.random.key(0), env, state, jnp.asarray([3, 1]), ())
    np.testing.assert_array_equal(made.obs, [[3, 3, 3], [1, 1, 0]])
    np.testing.assert_array_equal(
        (made.reward, made.terminated, made.truncated), [[1, -1], [1, 0], [0, 0]]
    )
    steps = checked(env)
    assert steps.truncated.any() and steps.obs[..., 1, 0].max() == 1


class Seen(NamedTuple):
    board: Any
    action_mask: Any


@chex.dataclass
class GameState:
    place: Any
    key: Any


@chex.dataclass
class TimeStep:
    step_type: Any
    reward: Any
    discount: Any
    observation: Any
    extras: dict


class Spec:
    num_values, shape, dtype = 3, (), jnp.int32


class Game:
    """Jumanji's form: a key in the state, time steps, a mask in the observation; action 2 wins, 1 is cut."""

    observation_spec, action_spec = None, Spec()

    def reset(self, key):
        return GameState(place=jnp.zeros((), jnp.int32), key=key), self.seen(
            0, 1.0, 0.0, jnp.zeros((), jnp.int32)
        )

    def step(self, state, action):
        drawn = jax.random.randint(state.key, (), 0, 1000)
        discount, last = jnp.where(action == 2, 0.0, 1.0), jnp.where(action == 0, 1, 2)
        return GameState(place=drawn, key=state.key), self.seen(last, discount, 1.0, drawn)

    def seen(self, step_type, discount, reward, place):
        obs = Seen(place, jnp.asarray([True, True, True]))
        return TimeStep(
            step_type=jnp.asarray(step_type, jnp.int8),
            reward=jnp.asarray(reward),
            discount=jnp.asarray(discount),
            observation=obs,
            extras={},
        )


def test_time_steps_and_the_key_in_their_state():
    env = adapt(Game())
    assert isinstance(env.observation_space(()), Fields) and env.action_space(()) == Discrete(3)
    obs, state = reset(jax.random.key(0), env, ())
    assert set(obs) == {"board", "action_mask"} and env.action_mask(state, ()).all()
    ends = [step(jax.random.key(0), env, state, jnp.int32(action), ())[3:5] for action in range(3)]
    np.testing.assert_array_equal(ends, [[False, False], [False, True], [True, False]])
    drawn = [
        int(step(jax.random.key(seed), env, state, jnp.int32(0), ()).obs["board"])
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2], (
        "randomness must come from the step's key, not from the state's"
    )
    checked(env)


@flax.struct.dataclass
class BodyState:
    obs: Any
    reward: Any
    done: Any
    info: dict
    metrics: dict


@dataclasses.dataclass
class Body:
    """Brax's form: one state with everything, done as a float, truncation in `info`."""

    observation_size, action_size = 2, 1
    resets_itself: bool = False

    def reset(self, rng):
        info = {"truncation": jnp.zeros(()), "rng": rng, "time": jnp.zeros((), jnp.int32)}
        info |= {"first_obs": jnp.zeros(2)} if self.resets_itself else {}
        return BodyState(
            jnp.zeros(2), jnp.zeros(()), jnp.zeros(()), info, {"height": jnp.zeros(())}
        )

    def step(self, state, action):
        time, noise = state.info["time"] + 1, jax.random.normal(state.info["rng"], (2,))
        info = state.info | {"time": time, "truncation": jnp.where(time >= 4, 1.0, 0.0)}
        done = jnp.where((time >= 4) | (action[0] > 0.9), 1.0, 0.0)
        return state.replace(obs=noise, reward=action[0], done=done, info=info)


def test_bodies():
    env = adapt(Body())
    assert env.action_space(()) == Box(-1.0, 1.0, (1,))
    steps = checked(env)
    assert (
        steps.terminated.any()
        and steps.truncated.any()
        and not (steps.terminated & steps.truncated).any()
    )
    with pytest.raises(UsageError, match="Body resets itself"):
        adapt(Body(resets_itself=True))


def test_a_step_that_changes_the_structure_is_refused():
    class Changing(OldGymnax):
        def step_env(self, key, state, action, params):
            return jnp.zeros(1), (state, state), 0.0, False, {}

    with pytest.raises(UsageError, match="changes the structure"):
        reset(jax.random.key(0), adapt(Changing()), OldParams())


def from_craftax():
    names = pytest.importorskip("craftax.craftax_env")
    return names.make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=True), None


SUITES = {
    "craftax": from_craftax,
    "jaxmarl-spread": lambda: (pytest.importorskip("jaxmarl").make("MPE_simple_spread_v3"), None),
    "jaxmarl-tag": lambda: (pytest.importorskip("jaxmarl").make("MPE_simple_tag_v3"), None),
    "jumanji": lambda: (pytest.importorskip("jumanji").make("Game2048-v1"), None),
    "navix": lambda: (pytest.importorskip("navix").make("Navix-DoorKey-5x5-v0"), None),
    "pgx-one": lambda: (pytest.importorskip("pgx").make("minatar-breakout"), None),
    "pgx-two": lambda: (pytest.importorskip("pgx").make("tic_tac_toe"), None),
    "popgym-arcade": lambda: (pytest.importorskip("popgym_arcade").make("CountRecallEasy"), None),
    "xminigrid": lambda: pytest.importorskip("xminigrid").make("MiniGrid-Empty-5x5"),
}


@pytest.fixture
def looser():
    """Suites draw from raw keys while they are made, and broadcast ranks."""
    jax.config.update("jax_legacy_prng_key", "allow")
    with jax.numpy_rank_promotion("allow"):
        yield
    jax.config.update("jax_legacy_prng_key", "error")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("suite", SUITES)
def test_real_suites_where_they_are_installed(suite, looser):
    make = SUITES[suite]
    env = adapt(*make())
    assert env == adapt(*make())
    assert np.isfinite(checked(env, 60).reward).all()
