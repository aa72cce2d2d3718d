"""What an environment is: the parts that all have, those on top that a planner needs, and the form of an adapter.

An environment is a frozen dataclass, hashable by value, whose fields are what changes compilation (sizes, counts,
modes). Every number is in its parameters, a traced pytree, so that physics and levels can be `vmap`ped. It never
resets itself, holds no clock that its rules do not need, and stores no key: a planner that is handed a state must not
read the future in it.
"""

from typing import NamedTuple, Protocol

from jaxpar.env.spaces import Space
from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["Adapter", "Environment", "PartiallyObserved", "Transition"]


class Environment(Protocol):
    """The parts that every environment has; the optional ones are the fields of `jaxpar.env.Capabilities`.

    With several agents (`num_agents = N`), observations, actions, rewards and masks have a leading axis N, `terminal`
    and `truncated` return `bool [N]`, and the episode ends when every agent has ended.
    """

    @property
    def name(self) -> str:
        """The name under which people know it."""
        ...

    @property
    def default_params(self) -> PyTree:
        """A `flax.struct.dataclass` of numbers."""
        ...

    def observation_space(self, params: PyTree) -> Space:
        """The space of what `observe` returns."""
        ...

    def action_space(self, params: PyTree) -> Space:
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


class PartiallyObserved(Environment, Protocol):
    """An environment that knows how likely its observations are: what filters and trees over beliefs need on top."""

    def log_likelihood(
        self, obs: PyTree, state: PyTree, action: PyTree, next_state: PyTree, params: PyTree
    ) -> Array:
        """The float32 log p(obs | action, next state); the density where observations are continuous."""
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


class Adapter(Protocol):
    """What begins and steps as a whole, because its parts cannot be had alone: another suite's environment.

    Rollouts and learners take one wherever they take an `Environment`; planners, which need the parts, do not.
    """

    @property
    def name(self) -> str:
        """The name under which people know it."""
        ...

    @property
    def default_params(self) -> PyTree:
        """Its parameters; `()` where it has none."""
        ...

    def observation_space(self, params: PyTree) -> Space:
        """The space of what is seen."""
        ...

    def action_space(self, params: PyTree) -> Space:
        """The space of the actions that `step` takes."""
        ...

    def reset(self, key: PRNGKey, params: PyTree) -> tuple[PyTree, PyTree]:
        """Begins an episode: `(obs, state)`; consumes `key`."""
        ...

    def step(self, key: PRNGKey, state: PyTree, action: PyTree, params: PyTree) -> Transition:
        """One step without a reset, `obs` being the last of an episode that ends; consumes `key`."""
        ...
