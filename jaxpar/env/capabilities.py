"""What an environment can do beyond its parts, found by name in this one place and handed on as a value with fields.

An ability is added to an environment by writing the method, as below. A new ability is added to the library by adding
a field to `Capabilities`, whose name is what environments call it; its users read the field.

Example:
    from jaxpar import envs
    import jax
    import jax.numpy as jnp
    from jaxpar.env import capabilities, legal_sample

    tiger, params = envs.make("Tiger")

    class Listening(type(tiger)):
        def action_mask(self, state, params):  # the new ability: the doors stay shut
            return jnp.array([True, False, False])

    legal = capabilities(Listening()).action_mask(tiger.init(jax.random.key(0), params), params)
    drawn = [int(legal_sample(jax.random.key(i), tiger.action_space(params), legal)) for i in range(8)]
    assert capabilities(tiger).action_mask is None and drawn == [0] * 8
"""

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxpar.env.protocols import Adapter, Environment
from jaxpar.types import Array, PRNGKey, PyTree, Scalar

if TYPE_CHECKING:  # of the type checker's own stubs; Python has it from 3.13 on
    from typing_extensions import TypeIs

__all__ = ["Capabilities", "Heuristic", "OfState", "capabilities", "is_adapter", "own_discount"]

OfState = Callable[[PyTree, PyTree], Array]
"""`(state, params) -> array`."""


class Heuristic(Protocol):
    """A guess of the best value from a state, for planners; float32 `[]`."""

    def __call__(self, state: PyTree, params: PyTree, action: Array | int = -1) -> Array:
        """Guesses for `state`, to which `action` led; -1 if nothing did."""
        ...


@dataclasses.dataclass(frozen=True)
class Capabilities:
    """The optional abilities of an environment or adapter; None is an ability that it lacks.

    The functions are those of the environment, and as pure. With `num_agents` N, masks are `[N, A]` and flags `[N]`.

    Attributes:
        truncated: `(state, params) -> bool`, the episode is cut here though the process goes on; None: never.
        action_mask: `(state, params) -> bool [A]`, the legal actions; None: all.
        render: `(state, params) -> uint8 [H, W, 3]`, a picture, pure and vmappable.
        sample_level: `(key, params) -> level`, for environment design.
        init_level: `(key, level, params) -> state`, the first state in a level.
        log_likelihood: `(obs, state, action, next_state, params) -> float32`, log p(obs | action, next state).
        heuristic: `(state, params, action=-1) -> float32`, a guess of the best value from `state`. An environment may
            write it without `action`, which then changes nothing.
        upper_bound: `(state, params) -> float32`, what no policy earns more than from `state`.
        rollout_action: `(key, state, params) -> int32`, what a planner's rollouts do; None: legal actions at random.
        obs_key: `(obs, params) -> int32`, one integer an observation, for tree search; None: observations are integers.
        items: `(obs) -> float [N, F]`, an observation as rows, one an item; None: as it is, if it is `[N, F]`.
        item_moves: `(params) -> int32 [A, 1 + k]`, of each action its kind, from 0, and the rows of its items; None:
            action i is item i. Constant: no traced array.
        tabular: `(params) -> arrays`, the whole model, where it is finite.
        gaussian_start: `(params) -> (mean [S], covariance [S, S])`, of the first state of a linear Gaussian model.
        linear_gaussian: `(action, params) -> (F, u, Q, H, R)`, that model, as `jaxpar.pomdp.KalmanBelief` says.
        absorbing: the claim that a step from a terminal state earns 0 and ends there again.
        trial: `(state, params) -> int32`, where an episode is several trials of one task: how many have ended.
        num_agents: N, of several agents; None: it is written for one, without an axis N.
    """

    truncated: OfState | None = None
    action_mask: OfState | None = None
    render: OfState | None = None
    sample_level: Callable[[PRNGKey, PyTree], PyTree] | None = None
    init_level: Callable[[PRNGKey, PyTree, PyTree], PyTree] | None = None
    log_likelihood: Callable[[PyTree, PyTree, PyTree, PyTree, PyTree], Array] | None = None
    heuristic: Heuristic | None = None
    upper_bound: OfState | None = None
    rollout_action: Callable[[PRNGKey, PyTree, PyTree], Array] | None = None
    obs_key: Callable[[PyTree, PyTree], Array] | None = None
    items: Callable[[PyTree], Array] | None = None
    item_moves: Callable[[PyTree], np.ndarray] | None = None
    tabular: Callable[[PyTree], PyTree] | None = None
    gaussian_start: Callable[[PyTree], tuple[Array, Array]] | None = None
    linear_gaussian: Callable[[Array, PyTree], tuple[Array, Array, Array, Array, Array]] | None = (
        None
    )
    absorbing: bool = False
    trial: OfState | None = None
    num_agents: int | None = None

    @property
    def agents(self) -> tuple[int, ...]:
        """The axes of rewards and flags: `(N,)`, or `()` for one agent."""
        return () if self.num_agents is None else (self.num_agents,)


def capabilities(env: Environment | Adapter) -> Capabilities:
    """What `env` can do beyond its parts. A few lookups of attributes, at trace time; nothing is called or traced.

    A wrapper that forwards attributes has what it forwards; one that hides them (`jaxpar.rl.LastActionReward`) has not.
    """
    found = {
        field.name: getattr(env, field.name)
        for field in dataclasses.fields(Capabilities)
        if hasattr(env, field.name)
    }
    if "heuristic" in found:
        found["heuristic"] = _told_action(found["heuristic"])
    return Capabilities(**found)


def _told_action(heuristic: Callable[..., Array]) -> Heuristic:
    """Both forms in which environments write a heuristic, as one."""

    def guess(state: PyTree, params: PyTree, action: Array | int = -1) -> Array:
        if "action" in inspect.signature(heuristic).parameters:
            return heuristic(state, params, action)
        return heuristic(state, params)

    return guess


def is_adapter(env: Environment | Adapter) -> "TypeIs[Adapter]":
    """Whether `env` begins and steps as a whole, without parts to call alone: `transition` tells them apart."""
    return not hasattr(env, "transition")


def own_discount(params: PyTree) -> Scalar | None:
    """The discount that an environment's parameters hold as `discount`, a number or a traced array; None without."""
    return getattr(params, "discount", None)
