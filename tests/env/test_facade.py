import fast
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.experimental import RolloutWrapper
from gymnax.wrappers.purerl import LogWrapper
from worlds import Corridor, Params, Team

from envs.multi.foraging import Foraging
from jaxpar.env import Discrete, adapt, agents_view, reset, step, to_gymnax
from jaxpar.env.check import check_types
from jaxpar.types import UsageError


def test_six_values_with_the_reset_in_the_same_step():
    env = to_gymnax(Corridor())
    params = Params(slip=0.0)
    state = Corridor().init(jax.random.key(0), params).replace(place=jnp.int32(5))
    obs, after, reward, terminated, truncated, info = env.step(
        jax.random.key(1), state, jnp.int32(2), params
    )
    step_key, reset_key = jax.random.split(jax.random.key(1))
    made = step(step_key, Corridor(), state, jnp.int32(2), params)
    fresh = reset(reset_key, Corridor(), params)
    assert reward == 1
    assert (bool(terminated), bool(truncated)) == (True, False)
    assert (bool(info["terminated"]), bool(info["truncated"])) == (True, False)
    assert info["final_observation"] == made.obs
    jax.tree.map(np.testing.assert_array_equal, (obs, after), fresh)
    _, going, *_ = env.step(jax.random.key(1), state, jnp.int32(1), params)
    assert going.place == 5 and going.time == 1
    _, fresh_state, _, terminated, truncated, info = env.step(
        jax.random.key(1), state.replace(time=jnp.int32(11)), jnp.int32(1), params
    )
    assert (bool(terminated), bool(truncated)) == (False, True)
    assert info["truncated"] and fresh_state.time == 0


def test_equal_by_value():
    assert to_gymnax(Corridor()) == to_gymnax(Corridor()) and hash(to_gymnax(Corridor())) == hash(
        to_gymnax(Corridor())
    )
    assert to_gymnax(Corridor()) != to_gymnax(Corridor(9))
    assert to_gymnax(Corridor()) != to_gymnax(Corridor(), Params(slip=0.5))


def test_it_runs_in_gymnax_own_tools():
    env = LogWrapper(to_gymnax(Corridor(), Params(slip=0.0)))
    space = env.action_space()

    def one(carry, key):
        _, state = carry
        obs, state, *_, info = env.step(key, state, space.sample(key))
        return (obs, state), info

    keys = jax.random.split(jax.random.key(1), 50)
    _, info = fast.jit(lambda: jax.lax.scan(one, env.reset(jax.random.key(0)), keys))()
    assert info["returned_episode"].sum() >= 4 and set(
        np.unique(info["returned_episode_returns"])
    ) <= {0.0, 1.0}
    assert (
        info["returned_episode_lengths"].max() <= 12
        and env.name == "Corridor-7"
        and env.num_actions == 3
    )

    rollout = RolloutWrapper(env=to_gymnax(Corridor()), num_env_steps=20)
    obs, action, reward, next_obs, done, total = rollout.batch_rollout(
        jax.random.split(jax.random.key(0), 3), None
    )
    assert obs.shape == reward.shape == done.shape == (3, 20) and total.shape == (3, 1)
    assert isinstance(env.observation_space(), gymnax.environments.spaces.Discrete)


def test_there_and_back_again():
    there = to_gymnax(Corridor())
    back = adapt(there)
    check_types(back, back.default_params)
    assert back == adapt(to_gymnax(Corridor())) and back.action_space(Params()) == Discrete(3)
    key = jax.random.key(5)
    state = Corridor().init(jax.random.key(0), Params()).replace(time=jnp.int32(11))
    ours, again = (step(key, env, state, jnp.int32(1), Params()) for env in (Corridor(), back))
    jax.tree.map(np.testing.assert_array_equal, ours[:5], again[:5])
    assert again.truncated and not again.terminated


def test_dictionaries_over_agents():
    team = Team()
    view = agents_view(team)
    assert view.agents == ("agent_0", "agent_1", "agent_2") and view.num_agents == 3
    obs, state = view.reset(jax.random.key(0))
    stacked, same = reset(jax.random.key(0), team, Params())
    jax.tree.map(np.testing.assert_array_equal, state, same)
    np.testing.assert_array_equal(np.stack([obs[agent] for agent in view.agents]), stacked)
    state = state.replace(places=jnp.asarray([2, 0, 2]))
    actions = dict(zip(view.agents, jnp.asarray([2, 0, 1]), strict=True))
    made = step(jax.random.key(1), team, state, jnp.asarray([2, 0, 1]), Params())
    obs, state, reward, terminated, truncated, _ = view.step(jax.random.key(1), state, actions)
    assert [float(reward[agent]) for agent in view.agents] == made.reward.tolist() == [1, -1, 0]
    assert [bool(terminated[agent]) for agent in view.agents] == [True, False, False]
    ends = [terminated["__all__"], truncated["__all__"], view.over(terminated, truncated)]
    assert list(map(bool, ends)) == [False, False, False]
    _, _, _, terminated, truncated, _ = view.step(
        jax.random.key(1), state.replace(time=jnp.int32(11)), actions
    )
    ends = [terminated["__all__"], truncated["__all__"], view.over(terminated, truncated)]
    assert list(map(bool, ends)) == [False, True, True]


def test_dictionaries_of_masks_and_spaces():
    view = agents_view(Team())
    _, state = view.reset(jax.random.key(0))
    masks = view.action_masks(state.replace(places=jnp.asarray([-5, 0, 0])))
    assert not masks["agent_0"][0] and masks["agent_1"].all()
    assert view.action_space("agent_1") == Discrete(3)
    assert view.observation_space("agent_0").shape == (2,)


def test_an_agents_actions_keep_their_names():
    view = agents_view(Foraging())
    assert view.action_space("agent_1").names == ("rest", "up", "down", "left", "right", "load")
    assert agents_view(Team()).action_space("agent_1").names == ()


def test_mistakes_are_named():
    with pytest.raises(UsageError, match="gymnax knows no agents, and Team has 3"):
        to_gymnax(Team())
    with pytest.raises(UsageError, match="Corridor-7 has one agent"):
        agents_view(Corridor())
    view = agents_view(Team())
    with pytest.raises(UsageError, match="no agent 'agent_3'; there are agent_0"):
        view.action_space("agent_3")
    _, state = view.reset(jax.random.key(0))
    with pytest.raises(UsageError, match="an action for each of agent_0, agent_1, agent_2"):
        view.step(jax.random.key(0), state, {"agent_0": jnp.int32(0)})
