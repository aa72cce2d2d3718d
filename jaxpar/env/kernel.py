"""What an environment is: pure parts, and the two functions that compose them.

An environment is a frozen dataclass, hashable by value, whose fields are what changes compilation (sizes, counts,
modes). Every number is in its parameters, a traced pytree, so that physics and levels can be `vmap`ped. It never
resets itself, holds no clock that its rules do not need, and stores no key: a planner that is handed a state must not
read the future in it.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["Environment", "Transition", "reset", "step"]


class Environment(Protocol):
    """The parts that every environment has; those below are optional and found by name.

    | part | what it is |
    | --- | --- |
    | `truncated(state, params) -> bool` | the episode is cut here though the process goes on; without it, never |
    | `action_mask(state, params) -> bool [A]` | the legal actions; without it, all |
    | `render(state, params) -> uint8 [H, W, 3]` | a picture, pure and vmappable |
    | `sample_level(key, params) -> level`, `init_level(key, level, params) -> state` | environment design |
    | `log_likelihood(obs, state, action, next_state, params) -> float` | log p(obs | action, next state), for beliefs |
    | `heuristic(state, params) -> float` | a guess of the best value from `state`, for planners; one that names a \
      third parameter `action` is told what led there, -1 if nothing did |
    | `obs_key(obs, params) -> int32` | one integer an observation, for tree search |
    | `tabular(params) -> arrays` | the whole model, where it is finite |
    | `absorbing: bool` | the claim that a step from a terminal state earns 0 and ends there again |
    | `trial(state, params) -> int32` | where an episode is several trials of one task: how many have ended |
    | `num_agents: int` | several agents: see below |

    With `num_agents = N`, observations, actions, rewards and masks have a leading axis N, `terminal` and `truncated`
    return `bool [N]`, and the episode ends when every agent has ended.
    """

    @property
    def name(self) -> str:
        """The name under which people know it."""
        ...

    @property
    def default_params(self) -> PyTree:
        """A `flax.struct.dataclass` of numbers."""
        ...

    def observation_space(self, params: PyTree) -> Any:
        """The space (`jaxpar.env.spaces`) of what `observe` returns."""
        ...

    def action_space(self, params: PyTree) -> Any:
        """The space of the actions that `transition` takes."""
        ...

    def init(self, key: PRNGKey, params: PyTree) -> PyTree:
        """Draws the first state; consumes `key`."""
        ...

    def transition(self, key: PRNGKey, state: PyTree, action: PyTree, params: PyTree) -> PyTree:
        """Draws the next state; consumes `key`. Structure, shapes and dtypes are those of `init`."""
        ...

    def observe(self, key: PRNGKey, state: PyTree, action: PyTree | None, params: PyTree) -> PyTree:
        """Draws what is seen of `state`, entered by `action` (None after `init`); consumes `key`."""
        ...

    def reward(self, state: PyTree, action: PyTree, next_state: PyTree, params: PyTree) -> Array:
        """The float32 reward of one step."""
        ...

    def terminal(self, state: PyTree, params: PyTree) -> Array:
        """Whether the process has ended in `state`: nothing is earned after it."""
        ...


class Transition(NamedTuple):
    """What one step gives, in gymnax 1.0's order, before any reset: `obs` is the last of an episode that ends here.

    Attributes:
        obs: what is seen of `state`.
        state: the next state.
        reward: float32, `[]` or `[N]` agents.
        terminated: bool, the process has ended; nothing is bootstrapped.
        truncated: bool, the episode was cut; the value of `obs` is bootstrapped. Both may be true: then it ended.
        info: arrays by name.
    """

    obs: PyTree
    state: PyTree
    reward: Array
    terminated: Array
    truncated: Array
    info: dict[str, Array]


def reset(key: PRNGKey, env: Any, params: PyTree) -> tuple[PyTree, PyTree]:
    """Begins an episode: `(obs, state)`; consumes `key`.

    Takes an `Environment`, or an adapter with its own `reset(key, params)` (`jaxpar.env.adapt`).
    """
    if not hasattr(env, "transition"):
        return env.reset(key, params)
    init_key, observe_key = jax.random.split(key)
    state = env.init(init_key, params)
    return env.observe(observe_key, state, None, params), state


def step(key: PRNGKey, env: Any, state: PyTree, action: PyTree, params: PyTree) -> Transition:
    """One step of an `Environment`, or of an adapter, without any reset; consumes `key`."""
    if not hasattr(env, "transition"):
        return env.step(key, state, action, params)
    transition_key, observe_key = jax.random.split(key)
    following = env.transition(transition_key, state, action, params)
    terminated = jnp.asarray(env.terminal(following, params), bool)
    cut = env.truncated(following, params) if hasattr(env, "truncated") else jnp.zeros_like(terminated)
    return Transition(
        obs=env.observe(observe_key, following, action, params),
        state=following,
        reward=jnp.asarray(env.reward(state, action, following, params), jnp.float32),
        terminated=terminated,
        truncated=jnp.asarray(cut, bool),
        info={},
    )
