"""Our environments in the shapes that JAX's other tools expect: gymnax's, and dictionaries over agents."""

import dataclasses
from typing import cast

import gymnax.environments.spaces as gymnax_spaces
import jax
import jax.numpy as jnp
import numpy as np
from gymnax.environments.environment import Environment as GymnaxEnvironment

from jaxpar.env._convert import fingerprint, nested
from jaxpar.env.capabilities import capabilities, is_adapter
from jaxpar.env.kernel import reset, step
from jaxpar.env.protocols import Adapter, Environment
from jaxpar.env.spaces import Box, Discrete, Fields, MultiDiscrete, Space, mask_shape
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["AgentsView", "agents_view", "to_gymnax"]


def to_gymnax(env: Environment | Adapter, params: PyTree = None) -> "Gymnax":
    """`env` as a gymnax environment, with gymnax's six values and its reset in the same step.

    Runs in gymnax's `LogWrapper`, `RolloutWrapper` and the like, and compiles once for equal environments.

    Args:
        env: an environment for one agent, ours or adapted.
        params: what `default_params` shall be; those of `env` if None.

    Raises:
        UsageError: the environment has several agents.
    """
    if (count := capabilities(env).num_agents) is not None:
        raise UsageError(f"gymnax knows no agents, and {env.name} has {count}; see `agents_view`")
    return Gymnax(env, env.default_params if params is None else params)


class Gymnax(GymnaxEnvironment):
    """A gymnax environment over one of ours; made by `to_gymnax`."""

    def __init__(self, env: Environment | Adapter, params: PyTree):
        self.env, self._params = env, params
        self._value = (env, fingerprint(params))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gymnax) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    @property
    def name(self) -> str:
        """The environment's name."""
        return self.env.name

    @property
    def default_params(self) -> PyTree:
        """The parameters that `to_gymnax` was given."""
        return self._params

    @property
    def num_actions(self) -> int:
        """How many discrete actions there are."""
        return cast(Discrete, self.env.action_space(self._params)).n

    def action_space(self, params: PyTree = None) -> gymnax_spaces.Space:
        """Gymnax's space of the actions."""
        return _gymnax_space(self.env.action_space(self._params if params is None else params))

    def observation_space(self, params: PyTree = None) -> gymnax_spaces.Space:
        """Gymnax's space of the observations."""
        return _gymnax_space(self.env.observation_space(self._params if params is None else params))

    def state_space(self, params: PyTree = None) -> gymnax_spaces.Space:
        """Gymnax's space of the states: their fields, each within what its dtype can hold; keys are left out."""
        params = self._params if params is None else params
        return _space_of(jax.eval_shape(lambda: reset(jax.random.key(0), self.env, params)[1]))

    def observe(self, key: PRNGKey, state: PyTree, action: PyTree | None, params: PyTree) -> PyTree:
        """What is seen of a state, entered by `action` (None at a start); consumes `key`."""
        return self._parts("observe").observe(key, state, action, params)

    def get_obs(self, state: PyTree, params: PyTree = None, key: PRNGKey | None = None) -> PyTree:
        """Gymnax's older name of `observe`; without a key where nothing is drawn for an observation.

        Raises:
            UsageError: no key, and the observation is drawn; or the environment is an adapter, which has no such part.
        """
        params, parts = self._params if params is None else params, self._parts("observe")
        try:
            return parts.observe(cast(PRNGKey, key), state, None, params)
        except TypeError as error:
            if key is not None:
                raise
            raise UsageError(
                f"an observation of {self.name} is drawn: give get_obs a key."
            ) from error

    def is_terminated(self, state: PyTree, params: PyTree) -> Array:
        """Whether the process has ended in `state`; `is_terminal` and `discount` are gymnax's, by this."""
        return jnp.asarray(self._parts("terminal").terminal(state, params), bool)

    def is_truncated(self, state: PyTree, params: PyTree) -> Array:
        """Whether the episode is cut in `state`, though the process goes on."""
        cut = capabilities(self._parts("truncated")).truncated
        return jnp.asarray(False if cut is None else cut(state, params), bool)

    def reset_env(self, key: PRNGKey, params: PyTree) -> tuple[PyTree, PyTree]:
        """Begins an episode; consumes `key`."""
        return reset(key, self.env, params)

    def step_env(self, key: PRNGKey, state: PyTree, action: PyTree, params: PyTree) -> tuple:
        """One step without a reset, `(obs, state, reward, terminated, info)`; `info["truncated"]` is the other end."""
        made = step(key, self.env, state, action, params)
        return (
            made.obs,
            made.state,
            made.reward,
            made.terminated,
            {**made.info, "truncated": made.truncated},
        )

    # The base class jits its own method, which a type checker takes for a field.
    def step(  # pyright: ignore[reportIncompatibleVariableOverride]
        self, key: PRNGKey, state: PyTree, action: PyTree, params: PyTree = None
    ) -> tuple:
        """One step, and where it ends the episode the first of the next; `info["final_observation"]` is the last.

        Gymnax's own way, a reset at every step, of which nearly all are thrown away: our rollouts do better.
        """
        params = self._params if params is None else params
        step_key, reset_key = jax.random.split(key)
        obs, next_state, reward, terminated, info = self.step_env(step_key, state, action, params)
        over = terminated | info["truncated"]
        fresh = reset(reset_key, self.env, params)
        kept_obs, kept_state = jax.tree.map(
            lambda new, old: jnp.where(over, new, old), fresh, (obs, next_state)
        )
        info = {**info, "terminated": terminated, "final_observation": obs}
        return kept_obs, kept_state, reward, terminated, info["truncated"], info

    def _parts(self, asked: str) -> Environment:
        """The environment, whose part `asked` is wanted; adapters have `reset` and `step` alone."""
        if is_adapter(self.env):
            raise UsageError(
                f"{self.name} is an adapter, of which reset and step can be asked, but no {asked}."
            )
        return self.env


@dataclasses.dataclass(frozen=True)
class AgentsView:
    """An environment of several agents, with dictionaries over `agent_0`, `agent_1`, ... as in JaxMARL.

    Nothing resets by itself. `terminated` and `truncated` tell each agent's end apart, and under `__all__` whether all
    of them have ended so: the episode is over where every agent has one or the other, `over(terminated, truncated)`.
    """

    env: Environment | Adapter

    @property
    def num_agents(self) -> int:
        """How many agents there are."""
        return capabilities(self.env).num_agents or 0

    @property
    def agents(self) -> tuple[str, ...]:
        """Their names, in the order of the stacked arrays."""
        return tuple(f"agent_{i}" for i in range(self.num_agents))

    @property
    def default_params(self) -> PyTree:
        """The environment's parameters."""
        return self.env.default_params

    def observation_space(self, agent: str, params: PyTree = None) -> Space:
        """What one agent sees."""
        return _of_one(self.env.observation_space(self._params(params)), self._place(agent))

    def action_space(self, agent: str, params: PyTree = None) -> Space:
        """What one agent may do."""
        return _of_one(self.env.action_space(self._params(params)), self._place(agent))

    def reset(self, key: PRNGKey, params: PyTree = None) -> tuple[dict[str, PyTree], PyTree]:
        """Begins an episode: observations by agent, and the state; consumes `key`."""
        obs, state = reset(key, self.env, self._params(params))
        return self._split(obs), state

    def step(
        self, key: PRNGKey, state: PyTree, actions: dict[str, PyTree], params: PyTree = None
    ) -> tuple:
        """`(obs, state, reward, terminated, truncated, info)`, all by agent but `state` and `info`; consumes `key`."""
        if set(actions) != set(self.agents):
            raise UsageError(
                f"an action for each of {', '.join(self.agents)} is needed, not for {sorted(actions)}"
            )
        stacked = jax.tree.map(
            lambda *rows: jnp.stack(rows), *(actions[agent] for agent in self.agents)
        )
        made = step(key, self.env, state, stacked, self._params(params))
        terminated, truncated = (
            {**self._split(flags), "__all__": jnp.all(flags)}
            for flags in (made.terminated, made.truncated)
        )
        return (
            self._split(made.obs),
            made.state,
            self._split(made.reward),
            terminated,
            truncated,
            made.info,
        )

    def over(self, terminated: dict[str, Array], truncated: dict[str, Array]) -> Array:
        """Whether the episode has ended: every agent terminated or was truncated."""
        return jnp.all(jnp.stack([terminated[agent] | truncated[agent] for agent in self.agents]))

    def action_masks(self, state: PyTree, params: PyTree = None) -> dict[str, Array]:
        """The legal actions of each agent; all, where the environment has no masks."""
        if (mask := capabilities(self.env).action_mask) is not None:
            return self._split(mask(state, self._params(params)))
        return {
            agent: jnp.ones(mask_shape(self.action_space(agent, params)), bool)
            for agent in self.agents
        }

    def _params(self, params: PyTree) -> PyTree:
        return self.env.default_params if params is None else params

    def _place(self, agent: str) -> int:
        if agent not in self.agents:
            raise UsageError(f"there is no agent {agent!r}; there are {', '.join(self.agents)}")
        return self.agents.index(agent)

    def _split(self, stacked: PyTree) -> dict[str, PyTree]:
        return {
            agent: jax.tree.map(lambda x, i=i: x[i], stacked) for i, agent in enumerate(self.agents)
        }


def agents_view(env: Environment | Adapter) -> AgentsView:
    """The dictionary view of an environment with `num_agents`.

    Raises:
        UsageError: it has one agent only.
    """
    if capabilities(env).num_agents is None:
        raise UsageError(f"{env.name} has one agent and no `num_agents`; it needs no dictionaries")
    return AgentsView(env)


def _of_one(space: Space, place: int) -> Space:
    """The space of one agent out of the stacked space of all."""
    match space:
        case Discrete():
            return Discrete(space.n, space.shape[1:], space.dtype, space.names)
        case MultiDiscrete():
            return Discrete(space.ns[place], (), space.dtype)
        case Box():
            low, high = (nested(end[place].tolist()) for end in space.bounds())
            return Box(low, high, space.shape[1:], space.dtype)
        case Fields():
            return Fields(tuple((name, _of_one(inner, place)) for name, inner in space.items))


def _gymnax_space(space: Space) -> gymnax_spaces.Space:
    match space:
        case Discrete() if not space.shape:
            return gymnax_spaces.Discrete(space.n)
        case Discrete() | MultiDiscrete():
            high = jnp.asarray(space.ns if isinstance(space, MultiDiscrete) else space.n) - 1
            return gymnax_spaces.Box(0, high, space.shape, cast(np.dtype, space.dtype))
        case Box():
            low, high = space.bounds()
            return gymnax_spaces.Box(
                jnp.asarray(low), jnp.asarray(high), space.shape, cast(np.dtype, space.dtype)
            )
        case Fields():
            return _Named({name: _gymnax_space(inner) for name, inner in space.items})


class _Named(gymnax_spaces.Dict):
    """A space of fields by name; gymnax's own finds those of objects alone, not those of dictionaries."""

    # An array, since under jit the answer is not known yet.
    def contains(self, x: PyTree) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Whether every field is in its space."""
        found = [
            space.contains(x[k] if isinstance(x, dict) else getattr(x, k))
            for k, space in self.spaces.items()
        ]
        return jnp.all(jnp.asarray(found, bool))


def _space_of(shape: PyTree) -> gymnax_spaces.Space:
    """The space of everything that has these shapes and dtypes."""
    if isinstance(shape, jax.ShapeDtypeStruct):
        if jnp.issubdtype(shape.dtype, jnp.floating):
            return gymnax_spaces.Box(-jnp.inf, jnp.inf, shape.shape, shape.dtype)
        if shape.dtype == bool:
            return gymnax_spaces.Box(0, 1, shape.shape, shape.dtype)
        ends = jnp.iinfo(
            shape.dtype
        )  # of 32 bits without a sign the largest is no int that JAX takes
        low, high = (jnp.asarray(end, shape.dtype) for end in (ends.min, ends.max))
        return gymnax_spaces.Box(low, high, shape.shape, shape.dtype)
    if dataclasses.is_dataclass(shape):
        fields = {field.name: vars(shape)[field.name] for field in dataclasses.fields(shape)}
    elif isinstance(shape, dict) or hasattr(
        shape, "_asdict"
    ):  # named tuples have no type in common but `tuple`
        fields = dict(shape if isinstance(shape, dict) else shape._asdict())
    else:
        return gymnax_spaces.Tuple([_space_of(inner) for inner in shape if not _is_key(inner)])
    return _Named(
        {
            name: _space_of(inner)
            for name, inner in fields.items()
            if inner is not None and not _is_key(inner)
        }
    )


def _is_key(shape: PyTree) -> bool:
    return isinstance(shape, jax.ShapeDtypeStruct) and jnp.issubdtype(
        shape.dtype, jax.dtypes.prng_key
    )
