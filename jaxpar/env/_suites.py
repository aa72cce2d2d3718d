"""How each foreign suite is read, one function a suite: an environment of theirs to the `Parts` of `jaxpar.env.adapt`.

No suite is imported. Randomness is the caller's: where a suite keeps a key in its state, each step overwrites it with
its own, so that no state holds the future.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env._convert import Foreign, foreign_space, with_names
from jaxpar.env.spaces import Box, Discrete, Space, mask_shape
from jaxpar.types import Array, PRNGKey, PyTree, UsageError


class Parts(NamedTuple):
    """What a suite gives.

    Attributes:
        params: the default parameters, `()` where the suite has none.
        reset: `(key, params) -> (obs, state)`.
        step: `(key, state, action, params) -> (obs, state, reward, terminated, truncated, info)`, without a reset.
        observation_space: `(params, obs) -> Space`, where `obs` is abstract: spaces are told as they are.
        action_space: `params -> Space`.
        optional: parts of the protocol by name, such as `action_mask`.
    """

    params: PyTree
    reset: Callable
    step: Callable
    observation_space: Callable[[PyTree, PyTree], Space]
    action_space: Callable[[PyTree], Space]
    optional: Mapping[str, object] = {}


def gymnax(env: Foreign, params: PyTree) -> Parts:
    """Gymnax 1.0 (six values), and what keeps to its older five: gymnax 0.0, Craftax, POPGym Arcade.

    Five values have one flag for both ends. It is a truncation where `info` says so, or where the state's clock has
    reached the limit that the parameters (or the environment) hold; a termination in that very step is then not seen.
    What gymnax 1.0.1 gets wrong stays: MountainCarContinuous stops at the goal in place of the left wall (ours is in
    `envs/classic/mountain_car.py`), and MetaMaze and GaussianBandit leave their observation spaces.
    """
    params = env.default_params if params is None else params

    def reset(key, params):
        obs, state = env.reset_env(key, params)
        return with_names(obs), state

    def values(key):
        _, state = env.reset_env(key, params)
        return env.step(key, state, env.action_space(params).sample(key), params)

    has_six = len(jax.eval_shape(values, jax.random.key(0))) == 6

    def step(key, state, action, params):
        obs, state, reward, done, info = env.step_env(key, state, action, params)
        if "truncated" in info:
            cut = info["truncated"]
        else:
            cut = env.is_truncated(state, params) if has_six else _past_limit(state, params, env)
        ends = (done, cut) if has_six else (done & ~cut, done & cut)
        return with_names(obs), state, reward, *ends, info

    return Parts(
        params,
        reset,
        step,
        lambda params, obs: foreign_space(env.observation_space(params), obs),
        lambda params: foreign_space(env.action_space(params)),
    )


def jaxmarl(env: Foreign, params: PyTree) -> Parts:
    """JaxMARL: dictionaries over agents, stacked in the order of `env.agents`.

    Vectors of unequal length are padded with zeros, unequal numbers of choices are masked. The suite has one flag for
    both ends, read as in `gymnax`: an end at `env.max_steps` is a truncation. Where `__all__` ends an episode, every
    agent ends.
    """
    agents, spaces = tuple(env.agents), [env.action_space(agent) for agent in env.agents]
    choices = [int(space.n) for space in spaces if hasattr(space, "n")]
    is_discrete = len(choices) == len(agents)

    def stack(by_agent):
        rows = [jnp.asarray(by_agent[agent]) for agent in agents]
        if rows[0].ndim != 1:
            return jnp.stack(rows)
        widest = max(row.shape[0] for row in rows)
        return jnp.stack([jnp.pad(row, (0, widest - row.shape[0])) for row in rows])

    def reset(key, params):
        obs, state = env.reset(key)
        return stack(obs), state

    def step(key, state, action, params):
        given = {
            agent: action[i] if is_discrete else action[i, : space.shape[0]]
            for i, (agent, space) in enumerate(zip(agents, spaces, strict=True))
        }
        obs, state, reward, done, info = env.step_env(key, state, given)
        ended = stack(done) | done["__all__"]
        cut = ended & _past_limit(state, params, env)
        return stack(obs), state, stack(reward), ended & ~cut, cut, info

    def action_mask(state, params):
        masks = env.get_avail_actions(state)
        return stack({agent: jnp.asarray(masks[agent], bool) for agent in agents})

    def bounds(spaces, shape, dtype):
        ends = [np.asarray(end, float) for space in spaces for end in (space.low, space.high)]
        return Box(
            min(float(end.min()) for end in ends),
            max(float(end.max()) for end in ends),
            shape,
            dtype,
        )

    def observation_space(params, obs):
        given = [env.observation_space(agent) for agent in agents]
        return (
            bounds(given, obs.shape, obs.dtype)
            if hasattr(given[0], "low")
            else foreign_space(None, obs)
        )

    def action_space(params):
        if is_discrete:
            return Discrete(max(choices), (len(agents),))
        return bounds(spaces, (len(agents), max(space.shape[0] for space in spaces)), jnp.float32)

    optional: dict[str, object] = {"num_agents": len(agents)}
    try:
        jax.eval_shape(lambda key: env.get_avail_actions(env.reset(key)[1]), jax.random.key(0))
        optional |= {"action_mask": action_mask} if is_discrete else {}
    except NotImplementedError:
        if is_discrete and len(set(choices)) > 1:
            legal = np.arange(max(choices)) < np.asarray(choices)[:, None]
            optional["action_mask"] = lambda state, params: jnp.asarray(legal)
    return Parts((), reset, step, observation_space, action_space, optional)


def jumanji(env: Foreign, params: PyTree) -> Parts:
    """Jumanji: a last step with discount 0 terminates, one with another discount is truncated.

    Many of its environments call their time limit a termination, and nothing here can tell. Masks come along where
    they have the shape of ours; environments with a reward for each agent are refused.
    """
    action_space = foreign_space(env.action_spec)

    def seen(timestep):
        obs = with_names(timestep.observation)
        return obs, obs.get("action_mask") if isinstance(obs, dict) else None

    def reset(key, params):
        state, timestep = env.reset(key)
        obs, mask = seen(timestep)
        return obs, (state, mask)

    def step(key, state, action, params):
        state, timestep = env.step(_with_key(state[0], key), action)
        if timestep.reward.shape:
            raise UsageError(
                f"{type(env).__name__} rewards each agent; such Jumanji environments are not adapted"
            )
        obs, mask = seen(timestep)
        last, ended = timestep.step_type == 2, timestep.discount == 0
        return obs, (state, mask), timestep.reward, last & ended, last & ~ended, timestep.extras

    _, (_, mask) = jax.eval_shape(reset, jax.random.key(0), ())
    fits = mask is not None and mask.shape == mask_shape(action_space)
    return Parts(
        (),
        reset,
        step,
        lambda params, obs: foreign_space(env.observation_spec, obs),
        lambda params: action_space,
        {"action_mask": lambda state, params: state[1]} if fits else {},
    )


def xminigrid(env: Foreign, params: PyTree) -> Parts:
    """XLand-MiniGrid: a last step with discount 0 terminates, one with discount 1 is truncated; both: terminated.

    Its parameters are static but for the ruleset, so only rulesets can be stacked.
    """
    params = env.default_params() if params is None else params

    def reset(key, params):
        timestep = env.reset(params, key)
        return with_names(timestep.observation), timestep

    def step(key, state, action, params):
        state = env.step(params, state.replace(state=_with_key(state.state, key)), action)
        last, ended = state.step_type == 2, state.discount == 0
        return with_names(state.observation), state, state.reward, last & ended, last & ~ended, {}

    return Parts(
        params,
        reset,
        step,
        lambda params, obs: foreign_space(None, obs),
        lambda params: Discrete(int(env.num_actions(params))),
    )


def navix(env: Foreign, params: PyTree) -> Parts:
    """Navix: step type 1 is a truncation, 2 a termination (also where both hold).

    Its symbolic observations leave the space that it declares (tiles of 10 where 9 is the bound), so the dtype bounds.
    """

    def reset(key, params):
        timestep = env.reset(key)
        return with_names(timestep.observation), timestep

    def step(key, state, action, params):
        state = env._step(state.replace(state=_with_key(state.state, key)), action)
        ends = state.step_type == 2, state.step_type == 1
        return with_names(state.observation), state, state.reward, *ends, {}

    return Parts(
        (),
        reset,
        step,
        lambda params, obs: foreign_space(None, obs),
        lambda params: Discrete(int(env.action_space.n)),
    )


def pgx(env: Foreign, params: PyTree) -> Parts:
    """Pgx: one player is one agent; several are stacked, and only the one whose turn it is acts.

    Each player sees the board with its own eyes; the choices of those who wait are all legal and ignored. The suite
    itself never truncates.
    """
    num_players = env.num_players
    players = jnp.arange(num_players)
    num_actions = jax.eval_shape(env.init, jax.random.key(0)).legal_action_mask.shape[-1]

    def seen(state):
        return (
            state.observation
            if num_players == 1
            else jax.vmap(lambda player: env._observe(state, player))(players)
        )

    def reset(key, params):
        state = env.init(key)
        return seen(state), state

    def step(key, state, action, params):
        if num_players == 1:
            state = env.step(state, action, key)
            return seen(state), state, state.rewards[0], state.terminated, state.truncated, {}
        state = env.step(state, action[state.current_player], key)
        ends = (
            jnp.broadcast_to(flag, (num_players,)) for flag in (state.terminated, state.truncated)
        )
        return seen(state), state, state.rewards, *ends, {}

    def action_mask(state, params):
        if num_players == 1:
            return state.legal_action_mask
        waiting = players[:, None] != state.current_player
        return waiting | state.legal_action_mask[None]

    return Parts(
        (),
        reset,
        step,
        lambda params, obs: foreign_space(None, obs),
        lambda params: Discrete(num_actions, () if num_players == 1 else (num_players,)),
        {"action_mask": action_mask} | ({"num_agents": num_players} if num_players > 1 else {}),
    )


def brax(env: Foreign, params: PyTree) -> Parts:
    """Brax, MuJoCo Playground and their likes, without their auto-reset wrapper.

    `info["truncation"]`, which their episode wrapper writes, is the truncation; without that wrapper there is none.
    """

    def reset(key, params):
        state = env.reset(key)
        return with_names(state.obs), state

    def step(key, state, action, params):
        if "rng" in state.info:
            state = state.replace(info={**state.info, "rng": key})
        state = env.step(state, action)
        done, cut = state.done > 0, jnp.asarray(state.info.get("truncation", 0)) > 0
        return with_names(state.obs), state, state.reward, done & ~cut, done & cut, state.metrics

    _, state = jax.eval_shape(reset, jax.random.key(0), ())
    if held := [name for name in state.info if name.startswith("first_")]:
        raise UsageError(
            f"{type(env).__name__} resets itself (its state holds {held[0]}); adapt it without auto-reset"
        )
    return Parts(
        (),
        reset,
        step,
        lambda params, obs: foreign_space(None, obs),
        lambda params: Box(-1.0, 1.0, (env.action_size,)),
    )


CLOCKS = ("time", "timestep", "step")
LIMITS = ("max_steps_in_episode", "max_timesteps", "max_steps")


def _past_limit(state: PyTree, *holders: Foreign) -> Array:
    """Whether the state's clock has reached the limit that one of `holders` knows; False where there is neither."""
    for clock in (getattr(state, name) for name in CLOCKS if hasattr(state, name)):
        for limit in (
            getattr(holder, name) for holder in holders for name in LIMITS if hasattr(holder, name)
        ):
            return jnp.asarray(clock) >= limit
    return jnp.zeros((), bool)


def _with_key(state: PyTree, key: PRNGKey) -> PyTree:
    """The state with its own key, where it has one, replaced."""
    if getattr(state, "key", None) is None:
        return state
    return (
        state._replace(key=key)
        if hasattr(state, "_replace")
        else dataclasses.replace(state, key=key)
    )
