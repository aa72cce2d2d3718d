"""A game small enough to be known by heart, for one or two, and the plain equations of Q-learning on it."""

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from fast import jit

from jaxpar.env import Box, Discrete

NEXT = np.array([[1, 2, 0], [2, 0, 3], [0, 3, 1], [3, 1, 2]], np.int32)  # place, action -> place
LEGAL = np.array([[1, 1, 0], [1, 0, 1], [0, 1, 1], [0, 1, 1]], bool)
LAST = 3  # the step that is cut


@flax.struct.dataclass
class ForkParams:
    bonus: float = 0.5


@flax.struct.dataclass
class ForkState:
    place: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class Fork:
    """Walks between four places, of which the last ends it; three steps at most. What is seen is the whole state."""

    name = "Fork"
    default_params = ForkParams()

    def shape(self):
        return ()

    def observation_space(self, params):
        return Box(0.0, 1.0, (*self.shape(), 9))

    def action_space(self, params):
        return Discrete(3, self.shape())

    def init(self, key, params):
        return ForkState(jax.random.randint(key, self.shape(), 0, 3), jnp.int32(0))

    def transition(self, key, state, action, params):
        return ForkState(jnp.asarray(NEXT)[state.place, action], state.time + 1)

    def observe(self, key, state, action, params):
        time = jnp.broadcast_to(jax.nn.one_hot(state.time, 5), (*self.shape(), 5))
        return jnp.concatenate([jax.nn.one_hot(state.place, 4), time], -1)

    def reward(self, state, action, next_state, params):
        return next_state.place - params.bonus * action

    def terminal(self, state, params):
        return state.place == 3

    def truncated(self, state, params):
        return jnp.broadcast_to(state.time >= LAST, self.shape())

    def action_mask(self, state, params):
        return jnp.asarray(LEGAL)[state.place]


@dataclasses.dataclass(frozen=True)
class Forks(Fork):
    """Two of them, over for both when they meet at the last place."""

    num_agents = 2
    name = "Forks"

    def shape(self):
        return (2,)

    def terminal(self, state, params):
        return jnp.broadcast_to(jnp.all(state.place == 3), (2,))


def read(obs):
    """Place(s) and time of an observation."""
    obs = np.asarray(obs)
    return obs[..., :4].argmax(-1), int(obs[..., 4:].argmax(-1).reshape(-1)[0])


def after(obs, action):
    """The observation that an action leads to, whether the game is over by itself, whether it is cut."""
    place, time = read(obs)
    place = NEXT[place, np.asarray(action)]
    clock = np.broadcast_to(np.eye(5)[time + 1], (*place.shape, 5))
    return np.concatenate([np.eye(4)[place], clock], -1), bool(np.all(place == 3)), time + 1 >= LAST


def network(weights, x):
    """Values [A] of features [F] by a network with one hidden layer, normalised."""
    p = weights["network"]["heads"]["q"]["params"]
    x = x @ p["Dense_0"]["kernel"] + p["Dense_0"]["bias"]
    x = (x - x.mean()) / jnp.sqrt(x.var() + 1e-6) * p["LayerNorm_0"]["scale"] + p["LayerNorm_0"][
        "bias"
    ]
    return jnp.maximum(x, 0) @ p["out"]["kernel"] + p["out"]["bias"]


def mixer(weights, kind, state, q):
    """The team's value, as the papers write it, unit by unit."""
    if kind == "vdn":
        return sum(q[i] for i in range(len(q)))
    p = {name: (leaf["kernel"], leaf["bias"]) for name, leaf in weights["decomposition"].items()}

    def hyper(name, x):
        return x @ p[name][0] + p[name][1]

    width = p["b1"][1].shape[0]
    state = (state - state.mean()) / (((state - state.mean()) ** 2).mean() + 1e-6) ** 0.5
    first, second = abs(hyper("w1", state)), abs(hyper("w2", state))
    total = hyper("v2", jnp.maximum(hyper("v1", state), 0))[0]
    for unit in range(width):
        drive = hyper("b1", state)[unit] + sum(
            q[i] * first[i * width + unit] for i in range(len(q))
        )
        total += second[unit] * jnp.where(drive > 0, drive, jnp.exp(jnp.minimum(drive, 0)) - 1)
    return total


def values(weights, kind, obs):
    """Values [A] of one, or [N, A] of two."""
    return (
        network(weights, obs) if kind is None else jnp.stack([network(weights, own) for own in obs])
    )


@functools.partial(jit, static_argnums=1)
def best(weights, kind, obs, legal):
    """The value of the best legal action(s): of one, of each of two, or of the team."""
    q = jnp.max(jnp.where(legal, values(weights, kind, obs), -jnp.inf), -1)
    return q if kind in (None, "none") else mixer(weights, kind, obs.reshape(-1), q)


def legal(obs):
    """Legal actions of an observation."""
    return LEGAL[read(obs)[0]]


def perturbed(weights):
    """Weights of which none is zero, so that no gradient is zero by accident."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(x + 0.2 * rng.standard_normal(x.shape), jnp.float32), weights
    )
