"""Small environments for the tests of the protocol: right ones, to be broken one promise at a time."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Box, Discrete


@flax.struct.dataclass
class Params:
    slip: Any = 0.2
    max_steps: Any = 12


@flax.struct.dataclass
class State:
    place: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class Corridor:
    """Walk left or right from the middle of a corridor; its right end pays 1, both absorb; a noisy view of the place.

    The view is right with probability 0.75, else uniform over all places. At the left wall, going
    left is illegal.
    """

    length: int = 7
    absorbing = True

    @property
    def name(self):
        return f"Corridor-{self.length}"

    @property
    def default_params(self):
        return Params()

    def observation_space(self, params):
        return Discrete(self.length)

    def action_space(self, params):
        return Discrete(3)

    def init(self, key, params):
        place = jax.random.randint(key, (), 1, self.length - 1)
        return State(place, jnp.zeros((), jnp.int32))

    def transition(self, key, state, action, params):
        move = jnp.where(jax.random.bernoulli(key, params.slip), 0, action - 1)
        place = jnp.where(self.terminal(state, params), state.place, state.place + move)
        return State(jnp.clip(place, 0, self.length - 1), state.time + 1)

    def observe(self, key, state, action, params):
        guess, which = jax.random.split(key)
        anywhere = jax.random.randint(guess, (), 0, self.length)
        return jnp.where(jax.random.bernoulli(which, 0.75), state.place, anywhere)

    def reward(self, state, action, next_state, params):
        arrived = (next_state.place == self.length - 1) & ~self.terminal(state, params)
        return jnp.where(arrived, 1.0, 0.0)

    def terminal(self, state, params):
        return (state.place == 0) | (state.place == self.length - 1)

    def truncated(self, state, params):
        return state.time >= params.max_steps

    def action_mask(self, state, params):
        return jnp.asarray([True, True, True]).at[0].set(state.place > 1)

    def log_likelihood(self, obs, state, action, next_state, params):
        return jnp.log(jnp.where(obs == next_state.place, 0.75, 0.0) + 0.25 / self.length)

    def render(self, state, params):
        image = jnp.zeros((1, self.length, 3), jnp.uint8)
        return image.at[0, state.place].set(255)


@flax.struct.dataclass
class TeamState:
    places: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class Team:
    """Agents on a line that step by -1, 0 or 1; each ends when it reaches 3, and all are cut after `max_steps`."""

    num_agents: int = 3

    @property
    def name(self):
        return "Team"

    @property
    def default_params(self):
        return Params()

    def observation_space(self, params):
        return Box(-20.0, 20.0, (self.num_agents, 2))

    def action_space(self, params):
        return Discrete(3, (self.num_agents,))

    def init(self, key, params):
        return TeamState(
            jax.random.randint(key, (self.num_agents,), -1, 2), jnp.zeros((), jnp.int32)
        )

    def transition(self, key, state, action, params):
        moved = jnp.where(state.places >= 3, state.places, state.places + action - 1)
        return TeamState(moved, state.time + 1)

    def observe(self, key, state, action, params):
        others = jnp.broadcast_to(state.places.mean(), (self.num_agents,))
        return jnp.stack([state.places.astype(jnp.float32), others], axis=-1)

    def reward(self, state, action, next_state, params):
        return (next_state.places - state.places).astype(jnp.float32)

    def terminal(self, state, params):
        return state.places >= 3

    def truncated(self, state, params):
        return jnp.broadcast_to(state.time >= params.max_steps, (self.num_agents,))

    def action_mask(self, state, params):
        return jnp.ones((self.num_agents, 3), bool).at[:, 0].set(state.places > -5)
