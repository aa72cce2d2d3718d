"""Small problems for the tests of planners."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Discrete
from jaxpar.pomdp.beliefs.belief import Evidence


@flax.struct.dataclass
class Params:
    accuracy: Any = 0.85
    discount: Any = 0.95
    leaf: Any = 0.0
    penalty: Any = -100.0


@dataclasses.dataclass(frozen=True)
class Tiger:
    """Listen (0) or open the left (1) or the right (2) door; the tiger, behind one, is moved after each opening."""

    mask: tuple = (True, True, True)
    name = "Tiger"

    @property
    def default_params(self):
        return Params()

    def observation_space(self, params):
        return Discrete(2)

    def action_space(self, params):
        return Discrete(3)

    def init(self, key, params):
        return jax.random.bernoulli(key).astype(jnp.int32)

    def transition(self, key, state, action, params):
        return jnp.where(action == 0, state, jax.random.bernoulli(key).astype(jnp.int32))

    def observe(self, key, state, action, params):
        chance = jnp.where(action == 0, params.accuracy, 0.5) if action is not None else 0.5
        return jnp.where(jax.random.bernoulli(key, chance), state, 1 - state)

    def log_likelihood(self, obs, state, action, next_state, params):
        chance = jnp.where(action == 0, params.accuracy, 0.5)
        return jnp.log(jnp.where(obs == next_state, chance, 1 - chance))

    def reward(self, state, action, next_state, params):
        return jnp.where(action == 0, -1.0, jnp.where(action - 1 == state, params.penalty, 10.0))

    def terminal(self, state, params):
        return jnp.zeros((), bool)

    def heuristic(self, state, params):
        return jnp.asarray(params.leaf, jnp.float32)

    def action_mask(self, state, params):
        return jnp.asarray(self.mask)


@dataclasses.dataclass(frozen=True)
class Leaving:
    """Action 0 ends the episode half of the time, action 1 never; arriving at step two pays 10 whatever one does.

    The value of action 0 at the start is 0.5 * discount * 10: half of its simulations have no
    future.
    """

    name = "Leaving"

    @property
    def default_params(self):
        return Params()

    def observation_space(self, params):
        return Discrete(1)

    def action_space(self, params):
        return Discrete(2)

    def init(self, key, params):
        return jnp.zeros((), jnp.int32)

    def transition(self, key, state, action, params):
        ended = (action == 0) & jax.random.bernoulli(key) & (state == 0)
        return jnp.where(ended, 9, jnp.minimum(state + 1, 2)).astype(jnp.int32)

    def observe(self, key, state, action, params):
        return jnp.zeros((), jnp.int32)

    def reward(self, state, action, next_state, params):
        return jnp.where((state == 1) & (next_state == 2), 10.0, 0.0)

    def terminal(self, state, params):
        return state == 9


@flax.struct.dataclass
class Known:
    """A belief over the two states of a tiger: the probability that it is on the right (1)."""

    right: Any
    weightless, invalid = False, 0

    def sample(self, key, num):
        points = (jnp.arange(num) + jax.random.uniform(key)) / num
        return (points < self.right).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Bayes:
    """The exact belief of `Tiger`."""

    def init(self, key, env, params):
        return Known(jnp.asarray(0.5, jnp.float32))

    def update(self, key, belief, action, obs, env, params):
        heard = jnp.where(obs == 1, params.accuracy, 1 - params.accuracy)
        joint = jnp.stack([(1 - belief.right) * (1 - heard), belief.right * heard])
        evidence = jnp.where(action == 0, joint.sum(), 0.5)
        right = jnp.where(action == 0, joint[1] / joint.sum(), 0.5)
        never = jnp.zeros((), bool)
        return Known(right), Evidence(jnp.log(evidence), jnp.asarray(jnp.inf), never, never)
