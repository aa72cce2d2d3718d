"""Finite models as arrays: checked once, traced ever after, and an environment like any other."""

import dataclasses
from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpar.env import Discrete, Environment, capabilities, picture
from jaxpar.pomdp.model import LARGEST
from jaxpar.types import Array, PRNGKey, PyTree, UsageError, concrete_values

__all__ = ["TabularEnvironment", "TabularPomdp", "from_environment", "tabular_update"]

SUM_TOLERANCE = 1e-4
"""How far a row of probabilities may be from one: published files round to five digits."""


@flax.struct.dataclass
class TabularPomdp:
    """A finite POMDP: a pytree of arrays with static names, and the parameters of its own `environment`.

    Make one with `TabularPomdp.of`, which checks it. A state that no action leaves and in which no action earns is
    terminal. Floats are float64 where x64 is enabled, else float32.

    Attributes:
        transition: `[A, S, S]`, p(next state | state, action).
        observation: `[A, S, O]`, p(observation | action, next state).
        reward: `[A, S]`, or `[A, S, S]` by next state.
        start: `[S]`, the first belief.
        terminal: bool `[S]`.
        discount: `[]`, in [0, 1].
        states: S names.
        actions: A names.
        observations: O names.
    """

    transition: Array
    observation: Array
    reward: Array
    start: Array
    terminal: Array
    discount: Array
    states: tuple[str, ...] = flax.struct.field(pytree_node=False)
    actions: tuple[str, ...] = flax.struct.field(pytree_node=False)
    observations: tuple[str, ...] = flax.struct.field(pytree_node=False)

    @classmethod
    def of(
        cls,
        transition: ArrayLike,
        observation: ArrayLike,
        reward: ArrayLike,
        start: ArrayLike | None = None,
        discount: Array | np.ndarray | float = 0.95,
        *,
        states: Sequence[str] | None = None,
        actions: Sequence[str] | None = None,
        observations: Sequence[str] | None = None,
    ) -> "TabularPomdp":
        """A checked model from concrete arrays.

        Args:
            transition: `[A, S, S]`.
            observation: `[A, S, O]`, by the next state.
            reward: `[A, S]` or `[A, S, S]`.
            start: `[S]`; uniform if None.
            discount: in [0, 1]; 0 counts the next reward alone.
            states: names; the numbers 0, 1, ... if None.
            actions: likewise.
            observations: likewise.

        Raises:
            UsageError: a shape, row, reward, name or discount that no POMDP has. Rows may be off one by `1e-4`, and
                those that are off by more than rounding are normalised.
        """
        transition, observation, reward = (
            np.asarray(x, np.float64) for x in (transition, observation, reward)
        )
        _check_shapes(transition, observation, reward)
        (num_actions, num_states), num_observations = transition.shape[:2], observation.shape[-1]
        start = (
            np.full(num_states, 1 / num_states) if start is None else np.asarray(start, np.float64)
        )
        if start.shape != (num_states,):
            raise UsageError(f"start is {list(start.shape)} but must be [S] = [{num_states}]")
        named = [
            _names("states", states, num_states),
            _names("actions", actions, num_actions),
            _names("observations", observations, num_observations),
        ]
        if not (np.abs(reward) <= LARGEST).all():
            where = tuple(int(i) for i in np.argwhere(~(np.abs(reward) <= LARGEST))[0])
            raise UsageError(
                f"the reward at {list(where)} of {list(reward.shape)} is {reward[where]}, not finite and at most "
                f"{LARGEST:g} in size"
            )
        if np.shape(discount) != () or not 0 <= float(discount) <= 1:
            raise UsageError(f"the discount must be a number in [0, 1], not {discount}")
        transition = normalised("transition", transition, named[1], named[0])
        observation = normalised("observation", observation, named[1], named[0])
        start = normalised("start", start[None, None], ("",), ("",))[0, 0]
        dtype = jnp.result_type(float)
        return cls(
            transition=jnp.asarray(transition, dtype),
            observation=jnp.asarray(observation, dtype),
            reward=jnp.asarray(reward, dtype),
            start=jnp.asarray(start, dtype),
            terminal=jnp.asarray(_absorbing(transition, reward)),
            discount=jnp.asarray(float(discount), dtype),
            states=named[0],
            actions=named[1],
            observations=named[2],
        )

    @property
    def environment(self) -> "TabularEnvironment":
        """What planners and learners run on; this model is its parameters."""
        return TabularEnvironment(self.states, self.actions, self.observations)

    @property
    def expected_reward(self) -> Array:
        """`[A, S]`, the mean over next states."""
        return self.reward if self.reward.ndim == 2 else (self.transition * self.reward).sum(-1)


def from_environment(env: Environment, params: PyTree = None) -> TabularPomdp:
    """The whole model of a finite environment, from its part `tabular(params)`.

    That part gives a dictionary of the arguments of `TabularPomdp.of`: `transition`, `observation`, `reward`, `start`,
    `discount` and perhaps names. States that end an episode absorb there and earn nothing.

    Raises:
        UsageError: it has no such part, or no POMDP has these arrays.
    """
    tabular = capabilities(env).tabular
    if tabular is None:
        raise UsageError(
            f"{env.name} has no part tabular(params), so it cannot be turned into arrays"
        )
    arrays = tabular(env.default_params if params is None else params)
    return arrays if isinstance(arrays, TabularPomdp) else TabularPomdp.of(**arrays)


def tabular_update(
    model: TabularPomdp, belief: Array, action: Array, obs: Array
) -> tuple[Array, Array]:
    """Bayes: `b'(s') ∝ O(obs | action, s') sum_s T(s' | s, action) b(s)`.

    Args:
        model: with arrays of any batch-free shape; `vmap` for batches.
        belief: `[S]`.
        action: int32.
        obs: int32.

    Returns:
        The belief `[S]` and the evidence p(obs | belief, action). Where the evidence is 0 under a trace, the belief is
        the prediction that no observation entered, and the caller must look at the evidence.

    Raises:
        UsageError: a known index is out of range; or, outside a trace, an observation has
            probability zero.
    """
    _check_index("action", action, model.actions)
    _check_index("observation", obs, model.observations)
    predicted = belief @ model.transition[action]
    joint = predicted * model.observation[action, :, obs]
    evidence = joint.sum()
    known = concrete_values(evidence, action, obs)
    if known is not None and known[0] == 0:
        _, action_index, obs_index = known
        obs_name = model.observations[int(obs_index)]
        action_name = model.actions[int(action_index)]
        event = f"observation {obs_name!r} after action {action_name!r}"
        raise UsageError(f"{event} has probability zero under this belief")
    return jnp.where(
        evidence > 0, joint / jnp.where(evidence > 0, evidence, 1), predicted
    ), evidence


@dataclasses.dataclass(frozen=True)
class TabularEnvironment:
    """A finite model as an environment: states, actions and observations are int32, parameters the `TabularPomdp`.

    Nothing is seen before the first action: the observation of a reset is drawn uniformly and says nothing.
    """

    states: tuple[str, ...]
    actions: tuple[str, ...]
    observations: tuple[str, ...]

    absorbing = True

    @property
    def name(self) -> str:
        """Tabular and its sizes."""
        return f"Tabular-{len(self.states)}-{len(self.actions)}-{len(self.observations)}"

    @property
    def default_params(self) -> TabularPomdp:
        """Uniform everything and no reward: only sizes and names are the environment's own."""
        s, a, o = len(self.states), len(self.actions), len(self.observations)
        shape = np.ones((a, s, s)) / s, np.ones((a, s, o)) / o, np.zeros((a, s))
        return TabularPomdp.of(
            *shape, states=self.states, actions=self.actions, observations=self.observations
        )

    def observation_space(self, params: TabularPomdp) -> Discrete:
        """The observations."""
        return Discrete(len(self.observations), names=tuple(map(str, self.observations)))

    def action_space(self, params: TabularPomdp) -> Discrete:
        """The actions."""
        return Discrete(len(self.actions), names=tuple(map(str, self.actions)))

    def init(self, key: PRNGKey, params: TabularPomdp) -> Array:
        """Drawn from `start`."""
        return _draw(key, params.start)

    def transition(self, key: PRNGKey, state: Array, action: Array, params: TabularPomdp) -> Array:
        """Drawn from the row of state and action."""
        return _draw(key, params.transition[action, state])

    def observe(
        self, key: PRNGKey, state: Array, action: Array | None, params: TabularPomdp
    ) -> Array:
        """Drawn from the row of action and next state."""
        if action is None:
            return jax.random.randint(key, (), 0, len(self.observations), jnp.int32)
        return _draw(key, params.observation[action, state])

    def reward(self, state: Array, action: Array, next_state: Array, params: TabularPomdp) -> Array:
        """By state and action, and by next state where the model has it so."""
        row = params.reward[action, state]
        return (row if params.reward.ndim == 2 else row[next_state]).astype(jnp.float32)

    def terminal(self, state: Array, params: TabularPomdp) -> Array:
        """Whether no action leaves the state or earns anything."""
        return params.terminal[state]

    def log_likelihood(
        self, obs: Array, state: Array, action: Array, next_state: Array, params: TabularPomdp
    ) -> Array:
        """The logarithm of one entry; minus infinity for an impossible observation."""
        return jnp.log(params.observation[action, next_state, obs]).astype(jnp.float32)

    def obs_key(self, obs: Array, params: TabularPomdp) -> Array:
        """The observation itself."""
        return obs.astype(jnp.int32)

    def tabular(self, params: TabularPomdp) -> TabularPomdp:
        """The parameters are the model."""
        return params

    def render(self, state: Array, params: TabularPomdp) -> Array:
        """One cell a state, the present one filled, uint8 `[H, W, 3]`."""
        columns = int(np.ceil(np.sqrt(len(self.states))))
        rows = -(-len(self.states) // columns)
        image = picture.canvas(16 * rows, 16 * columns, picture.GRAY)
        for cell in ((i % columns, i // columns) for i in range(len(self.states))):
            low = jnp.asarray([16.0 * cell[0] + 1, 16.0 * cell[1] + 1])
            image = picture.rectangle(image, low, low + 14.0, picture.WHITE)
        center = jnp.stack([state % columns, state // columns]).astype(jnp.float32) * 16.0 + 8.0
        return picture.to_uint8(picture.disc(image, center, 6.0, picture.BLUE))


def normalised(
    what: str, rows: np.ndarray, actions: Sequence[str], states: Sequence[str]
) -> np.ndarray:
    """Rows `[A, S, n]` of probabilities, checked, and divided by their sums where these are off by more than rounding.

    Raises:
        UsageError: naming the first row that has a negative entry or does not sum to one.
    """
    sums = rows.sum(-1, keepdims=True)
    wrong = ~((rows >= 0).all(-1) & (np.abs(sums[..., 0] - 1) <= SUM_TOLERANCE))
    if wrong.any():
        action, state = np.argwhere(wrong)[0]
        row = f" of action {actions[action]!r} and state {states[state]!r}" if actions[0] else ""
        if (rows[action, state] < 0).any():
            raise UsageError(f"{what}{row} has a negative entry, {rows[action, state].min():g}")
        raise UsageError(f"{what}{row} sums to {sums[action, state, 0]:g}, not to one")
    return np.where(np.abs(sums - 1) > 1e-6, rows / sums, rows)


def _check_shapes(transition: np.ndarray, observation: np.ndarray, reward: np.ndarray) -> None:
    if transition.ndim != 3 or transition.shape[1] != transition.shape[2] or 0 in transition.shape:
        raise UsageError(f"transition is {list(transition.shape)} but must be [A, S, S]")
    pair = transition.shape[:2]
    if observation.ndim != 3 or observation.shape[:2] != pair or 0 in observation.shape:
        raise UsageError(
            f"observation is {list(observation.shape)} but must be [A, S, O] = {[*pair, 'O']}"
        )
    if reward.shape not in (pair, transition.shape):
        raise UsageError(
            f"reward is {list(reward.shape)} but must be [A, S] = {list(pair)} or [A, S, S] = {list(transition.shape)}"
        )


def _names(what: str, names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    names = tuple(str(i) for i in range(count)) if names is None else tuple(names)
    if len(names) != count or len(set(names)) != count:
        raise UsageError(
            f"{what} must be {count} different names, not {len(names)} ({len(set(names))} different)"
        )
    return names


def _absorbing(transition: np.ndarray, reward: np.ndarray) -> np.ndarray:
    """States that no action leaves and that earn nothing, bool `[S]`."""
    stays = np.einsum("ass->as", transition) == 1
    earned = reward if reward.ndim == 2 else np.einsum("ass->as", reward)
    return (stays & (earned == 0)).all(0)


def _check_index(what: str, index: Array, names: tuple[str, ...]) -> None:
    known = concrete_values(index)
    if known is not None and not 0 <= known[0] < len(names):
        raise UsageError(f"{what} {known[0]} is out of range: there are {len(names)}, from 0")


def _draw(key: PRNGKey, probabilities: Array) -> Array:
    return jax.random.categorical(key, jnp.log(probabilities)).astype(jnp.int32)
