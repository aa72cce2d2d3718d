"""Problems in time: networks act in an environment, on lanes that never wait.

P networks have E episodes each, and L lanes play them: a lane that finishes an episode takes the next that nobody has
begun, so a network that lives long holds up its own lane alone. Every draw depends on the episode and its step, not on
the lane, so neither L nor the number of devices changes a score.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.env import Box, Discrete, reset, step
from jaxpar.neat.network import Networks, apply, start
from jaxpar.neat.search import Score
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Episodes", "Played", "act", "ends_of", "play"]


def ends_of(env: Any, params: PyTree, constant: bool) -> tuple[int, int]:
    """How many inputs and outputs a network needs: all observed numbers and perhaps a constant; an output a choice."""
    obs = jax.eval_shape(lambda key: reset(key, env, params)[0], jax.random.key(0))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(obs))
    space = env.action_space(params)
    if isinstance(space, Discrete) and space.shape == ():
        return numbers + constant, space.n if space.n > 2 else 1
    if isinstance(space, Box):
        return numbers + constant, max(1, int(jnp.prod(jnp.asarray(space.shape))))
    raise UsageError(f"networks act by Discrete numbers or Boxes, not by {space}.")


def act(space: Any, y: Array, low: float = 0.0, high: float = 1.0) -> Array:
    """The action that outputs, `[O]` from `low` to `high`, mean: the largest, the upper half, or a point of the box."""
    if isinstance(space, Discrete):
        choice = jnp.argmax(y) if space.n > 2 else (y[0] > (low + high) / 2)
        return choice.astype(space.dtype)
    share = (jnp.clip(y, low, high) - low) / (high - low)
    least, most = space.bounds()
    return (least + share.reshape(space.shape) * (most - least)).astype(space.dtype)


class Played(NamedTuple):
    """Of each network's episodes: float32 `[P, E]` returns, int32 `[P, E]` lengths; int32 `[]` lane steps made."""

    returns: Array
    lengths: Array
    lane_steps: Array


class _Lanes(NamedTuple):
    job: Array  # int32 [L], the episode: network * E + number; P E for none
    time: Array
    state: PyTree
    obs: PyTree
    carry: PyTree
    total: Array


def play(
    key: PRNGKey, networks: Networks, env: Any, params: PyTree, episodes: int, lanes: int, max_steps: int,
    *, constant: bool = True, output_range: tuple[float, float] = (0.0, 1.0),
) -> Played:  # fmt: skip
    """Plays `episodes` episodes with each of P networks; consumes `key`.

    Episode e of network p begins and goes on by a key of (key, p's number in the population, e, step). Cost: about
    (all steps of all episodes) / L loops, of L network calls each, besides the longest of the last to begin.

    Args:
        key: consumed.
        networks: P of them.
        env: an environment or adapter; static.
        params: its parameters.
        episodes: E.
        lanes: L; the number of all episodes at most makes sense.
        max_steps: of an episode, at most.
        constant: whether a last input of 1 follows the observation.
        output_range: what outputs lie in; see `act`.
    """
    networks = jax.tree.map(jnp.asarray, networks)  # indexed by traced numbers
    count = len(networks.bias)
    num_jobs = count * episodes
    lanes = min(lanes, num_jobs)
    space = env.action_space(params)

    def key_of(job, time):
        own = jax.random.fold_in(jax.random.fold_in(key, networks.index[job // episodes]), job % episodes)
        return jax.random.fold_in(own, time)

    def begun(job, time):
        return jax.vmap(lambda j, t: reset(key_of(j, t), env, params))(jnp.minimum(job, num_jobs - 1), time)

    def fresh(lanes):
        return jax.tree.map(lambda x: jnp.zeros((lanes, *x.shape[1:]), x.dtype), start(networks))

    def loop(carry):
        now, next_job, returns, lengths, made = carry
        alive = now.job < num_jobs
        job = jnp.minimum(now.job, num_jobs - 1)
        owner = job // episodes
        rows = [leaf.reshape(lanes, -1).astype(networks.bias.dtype) for leaf in jax.tree.leaves(now.obs)]
        x = jnp.concatenate([*rows, jnp.ones((lanes, int(constant)), networks.bias.dtype)], 1)
        mine = jax.tree.map(lambda leaf: leaf[owner] if jnp.ndim(leaf) else leaf, networks)
        y, memory = apply(mine, now.carry, x)
        action = jax.vmap(lambda y: act(space, y, *output_range))(y)
        keys = jax.vmap(key_of)(job, now.time + 1)
        after = jax.vmap(lambda key, state, action: step(key, env, state, action, params))(keys, now.state, action)
        total, time = now.total + after.reward, now.time + 1
        ended = alive & (after.terminated | after.truncated | (time >= max_steps))
        at = jnp.where(ended, job, num_jobs)
        returns, lengths = returns.at[at].set(total, mode="drop"), lengths.at[at].set(time, mode="drop")
        given = next_job + jnp.cumsum(ended.astype(jnp.int32)) - 1
        new_job = jnp.where(ended, jnp.minimum(given, num_jobs), now.job)
        obs, state = begun(new_job, jnp.zeros_like(new_job))

        def chosen(new, old):
            return jnp.where(ended.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

        state, obs, carry = jax.tree.map(chosen, (state, obs, fresh(lanes)), (after.state, after.obs, memory))
        following = _Lanes(new_job, jnp.where(ended, 0, time), state, obs, carry, jnp.where(ended, 0, total))
        return following, next_job + jnp.sum(ended, dtype=jnp.int32), returns, lengths, made + lanes

    job = jnp.arange(lanes, dtype=jnp.int32)
    zero = jnp.zeros_like(job)
    obs, state = begun(job, zero)
    first = _Lanes(job, zero, state, obs, fresh(lanes), jnp.zeros(lanes, jnp.float32))
    carry = first, jnp.int32(lanes), jnp.zeros(num_jobs, jnp.float32), jnp.zeros(num_jobs, jnp.int32), jnp.int32(0)
    done = jax.lax.while_loop(lambda carry: jnp.any(carry[0].job < num_jobs), loop, carry)
    shape = (count, episodes)
    return Played(done[2].reshape(shape), done[3].reshape(shape), done[4])


@dataclasses.dataclass(frozen=True)
class Episodes:
    """The mean return over episodes of an environment; solved when it reaches `goal`.

    The problem's `inputs` are the environment's parameters.

    Attributes:
        env: an environment or adapter.
        goal: the mean return that solves it.
        episodes: E, of each network.
        lanes: L on each device; 0 means one a network.
        max_steps: of an episode.
        constant: whether a last input of 1 follows the observation.
        output_range: what outputs lie in.
    """

    env: Any
    goal: float
    episodes: int = 1
    lanes: int = 0
    max_steps: int = 1000
    constant: bool = True
    output_range: tuple[float, float] = (0.0, 1.0)

    def __call__(self, key: PRNGKey, networks: Networks, inputs: PyTree) -> Score:
        """Scores P networks; consumes `key`."""
        lanes = self.lanes or len(networks.bias)
        played = play(key, networks, self.env, inputs, self.episodes, lanes, self.max_steps, constant=self.constant,
                      output_range=self.output_range)  # fmt: skip
        fitness = jnp.mean(played.returns, 1)
        return Score(fitness, fitness >= self.goal)
