"""Problems in time: networks act in an environment, on lanes that never wait.

P networks have E episodes each, and L lanes play them: a lane that finishes an episode takes the next that nobody has
begun, so a network that lives long holds up its own lane alone. When none is left, those that still play move together
into half as many lanes, again and again, so few lane-steps are made for nothing. Every draw depends on the episode and
its step, not on the lane, so neither L nor the number of devices changes a score.

On a CUDA GPU an environment whose steps draw nothing, such as a cart with poles, is played by one kernel instead: a
program an episode, from its first step to its last (`jaxpar.neat._kernels`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.env import Box, Discrete, reset, step
from jaxpar.fields import AtLeast, Between, Each, Finite, check_fields, field
from jaxpar.mesh import mesh_axes
from jaxpar.neat._kernels import NotNumbers, Play, on_gpu, played
from jaxpar.neat.network import Networks, apply, start
from jaxpar.neat.search import Score
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Episodes", "Exam", "Examined", "Played", "Trials", "act", "ends_of", "play"]


def ends_of(env: Any, params: PyTree, constant: bool) -> tuple[int, int]:
    """How many inputs and outputs a network needs: all observed numbers and perhaps a constant; an output a choice."""
    obs = jax.eval_shape(lambda key: reset(key, env, params)[0], jax.random.key(0))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(obs))
    space = env.action_space(params)
    if isinstance(space, Discrete) and space.shape == ():
        return numbers + constant, space.n if space.n > 2 else 1
    if isinstance(space, Box):
        return numbers + constant, max(1, math.prod(space.shape))
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


class _Table(NamedTuple):
    results: Array  # float32 [P E, 2], returns and lengths
    made: Array  # int32 [], lane steps


class _Game(NamedTuple):
    """What all lanes share."""

    key: PRNGKey
    networks: Networks
    env: Any
    params: PyTree
    levels: PyTree
    episodes: int
    max_steps: int
    constant: bool
    output_range: tuple[float, float]

    @property
    def num_jobs(self) -> int:
        return len(self.networks.bias) * self.episodes

    def key_of(self, job, time):
        own = jax.random.fold_in(self.key, self.networks.index[job // self.episodes])
        return jax.random.fold_in(jax.random.fold_in(own, job % self.episodes), time)

    def owned(self, job) -> Networks:
        """The networks that play these episodes."""
        owner = jnp.minimum(job, self.num_jobs - 1) // self.episodes
        return jax.tree.map(lambda leaf: leaf[owner] if jnp.ndim(leaf) else leaf, self.networks)

    def begun(self, job) -> _Lanes:
        """Lanes at the start of these episodes."""

        def one(job):
            key = self.key_of(job, 0)
            if self.levels is None:
                return reset(key, self.env, self.params)
            init_key, observe_key = jax.random.split(key)
            level = jax.tree.map(lambda x: x[job % self.episodes], self.levels)
            state = self.env.init_level(init_key, level, self.params)
            return self.env.observe(observe_key, state, None, self.params), state

        obs, state = jax.vmap(one)(jnp.minimum(job, self.num_jobs - 1))
        memory = jax.tree.map(lambda x: jnp.zeros((len(job), *x.shape[1:]), x.dtype), start(self.networks))
        return _Lanes(job, jnp.zeros_like(job), state, obs, memory, jnp.zeros(len(job), jnp.float32))

    def advanced(self, mine: Networks, now: _Lanes, table: _Table) -> tuple[_Lanes, _Table]:
        """One step of every lane; one whose episode ends has none afterwards."""
        lanes, dtype = len(now.job), self.networks.bias.dtype
        rows = [leaf.reshape(lanes, -1).astype(dtype) for leaf in jax.tree.leaves(now.obs)]
        y, memory = apply(mine, now.carry, jnp.concatenate([*rows, jnp.ones((lanes, int(self.constant)), dtype)], 1))
        space = self.env.action_space(self.params)
        action = jax.vmap(lambda y: act(space, y, *self.output_range))(y)
        keys = jax.vmap(self.key_of)(jnp.minimum(now.job, self.num_jobs - 1), now.time + 1)
        one = lambda key, state, action: step(key, self.env, state, action, self.params)  # noqa: E731
        after = jax.vmap(one)(keys, now.state, action)
        total, time = now.total + after.reward, now.time + 1
        ended = after.terminated | after.truncated | (time >= self.max_steps)
        at = jnp.where(ended, now.job, self.num_jobs)
        results = table.results.at[at].set(jnp.stack([total, time.astype(total.dtype)], 1), mode="drop")
        table = _Table(results, table.made + lanes)
        job = jnp.where(ended, self.num_jobs, now.job)
        return _Lanes(job, time, after.state, after.obs, memory, total), table

    def refilled(self, now: _Lanes, table: _Table) -> tuple[_Lanes, _Table]:
        """Plays on until every episode has begun."""

        def body(carry):
            now, table, next_job = carry
            now, table = self.advanced(self.owned(now.job), now, table)
            idle = now.job == self.num_jobs
            fresh = self.begun(jnp.minimum(next_job + jnp.cumsum(idle.astype(jnp.int32)) - 1, self.num_jobs))

            def chosen(new, old):
                return jnp.where(idle.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

            return jax.tree.map(chosen, fresh, now), table, next_job + jnp.sum(idle, dtype=jnp.int32)

        carry = now, table, jnp.int32(len(now.job))
        return jax.lax.while_loop(lambda carry: carry[2] < self.num_jobs, body, carry)[:2]

    def drained(self, now: _Lanes, table: _Table, until: int) -> tuple[_Lanes, _Table]:
        """Plays on until at most `until` lanes have an episode, and keeps so many."""
        mine = self.owned(now.job)
        busy = lambda now: now.job < self.num_jobs  # noqa: E731
        go_on = lambda carry: jnp.sum(busy(carry[0]), dtype=jnp.int32) > until  # noqa: E731
        now, table = jax.lax.while_loop(go_on, lambda carry: self.advanced(mine, *carry), (now, table))
        kept = jnp.argsort(~busy(now), stable=True)[: max(until, 1)]
        return jax.tree.map(lambda x: x[kept], now), table

    def by_lanes(self, lanes: int, narrows: bool) -> Played:
        """Plays all episodes on lanes, step by step."""
        lanes = min(lanes, self.num_jobs)
        now = self.begun(jnp.arange(lanes, dtype=jnp.int32))
        table = _Table(jnp.zeros((self.num_jobs, 2), jnp.float32), jnp.int32(0))
        if lanes < self.num_jobs:
            now, table = self.refilled(now, table)
        while lanes:
            lanes = lanes // 2 if narrows else 0
            now, table = self.drained(now, table, lanes)
        returns, lengths = table.results.T.reshape(2, len(self.networks.bias), self.episodes)
        return Played(returns, lengths.astype(jnp.int32), table.made)

    def in_numbers(self) -> Play:
        """A step of one episode, in numbers; raises `NotNumbers`."""

        def move(state, params, y):
            action = act(self.env.action_space(params), y, *self.output_range)
            after = step(jax.random.key(0), self.env, state, action, params)  # a draw is refused, so no key is used
            return after.state, after.obs, after.reward, after.terminated | after.truncated

        state = jax.eval_shape(lambda: self.begun(jnp.zeros(1, jnp.int32)).state)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
        return Play.of(move, one, self.params, self.networks.config.num_outputs)

    def by_kernel(self, interpret: bool = False) -> Callable[[], Played] | None:
        """What plays every episode whole inside a kernel, where there is a GPU and the environment permits it."""
        if not (interpret or on_gpu(self.networks)):
            return None
        try:
            moves = self.in_numbers()
        except NotNumbers:
            return None

        def run() -> Played:
            begun = self.begun(jnp.arange(self.num_jobs, dtype=jnp.int32))
            returns, lengths = played(moves, self.networks, begun.state, begun.obs, self.episodes, self.max_steps,
                                      self.constant, interpret=interpret)  # fmt: skip
            shape = len(self.networks.bias), self.episodes
            return Played(returns.reshape(shape), lengths.reshape(shape), jnp.sum(lengths))

        return run


def play(
    key: PRNGKey, networks: Networks, env: Any, params: PyTree, episodes: int, lanes: int, max_steps: int,
    *, constant: bool = True, output_range: tuple[float, float] = (0.0, 1.0), levels: PyTree = None,
    narrows: bool = True,
) -> Played:  # fmt: skip
    """Plays `episodes` episodes with each of P networks; consumes `key`.

    Episode e of network p begins and goes on by a key of (key, p's number in the population, e, step). Cost: about
    (all steps of all episodes) / L loops, of L network calls each, then those of the last to begin, in ever fewer
    lanes: more than half of the lanes are busy in every step. Compiles a loop for each halving of L, the same steps of
    another shape each: most of what compiling takes.

    Args:
        key: consumed.
        networks: P of them.
        env: an environment or adapter; static.
        params: its parameters.
        episodes: E.
        lanes: L; the number of all episodes at most makes sense. A kernel that plays episodes whole needs none.
        max_steps: of an episode, at most.
        constant: whether a last input of 1 follows the observation.
        output_range: what outputs lie in; see `act`.
        levels: pytree with a leading axis E: episode e begins from level e, by `env.init_level`; None draws starts.
        narrows: whether the last lanes move together; if not, a single loop is compiled, and those that ended wait.
    """
    needed, ends = ends_of(env, params, constant), (networks.config.num_inputs, networks.config.num_outputs)
    if needed != ends:
        raise UsageError(f"networks have {ends[0]} inputs and {ends[1]} outputs; the environment takes {needed[0]} and "
                         f"{needed[1]}.")  # fmt: skip
    for name, value in (("episodes", episodes), ("lanes", lanes), ("max_steps", max_steps)):
        if value < 1:
            raise UsageError(f"{name}={value} must be at least 1.")
    if not output_range[0] < output_range[1]:
        raise UsageError(f"output_range={output_range} must ascend.")
    networks = jax.tree.map(jnp.asarray, networks)  # indexed by traced numbers
    game = _Game(key, networks, env, params, levels, episodes, max_steps, constant, output_range)
    kernel, by_lanes = game.by_kernel(), lambda: game.by_lanes(lanes, narrows)
    return by_lanes() if kernel is None else jax.lax.platform_dependent(default=by_lanes, cuda=kernel)


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
    goal: float = field(legal=Between(-math.inf, math.inf))
    episodes: int = field(1, AtLeast(1))
    lanes: int = field(0, AtLeast(0))
    max_steps: int = field(1000, AtLeast(1))
    constant: bool = True
    output_range: tuple[float, float] = field((0.0, 1.0), Each(Finite()))

    __post_init__ = check_fields

    def __call__(self, key: PRNGKey, networks: Networks, inputs: PyTree) -> Score:
        """Scores P networks; consumes `key`."""
        lanes = self.lanes or len(networks.bias)
        played = play(key, networks, self.env, inputs, self.episodes, lanes, self.max_steps, constant=self.constant,
                      output_range=self.output_range)  # fmt: skip
        fitness = jnp.mean(played.returns, 1)
        return Score(fitness, fitness >= self.goal)


class Trials(NamedTuple):
    """What `Examined` reads.

    Attributes:
        params: of the environment that gives the fitness.
        exam_params: of the environment of the exam.
        levels: its starts, pytree with a leading axis.
    """

    params: PyTree
    exam_params: PyTree
    levels: PyTree


class Exam(NamedTuple):
    """Steps balanced from the usual start, int32 `[]`, and from how many of the levels it passed, int32 `[]`."""

    steps: Array
    passed: Array


@dataclasses.dataclass(frozen=True)
class Examined:
    """Fitness by episodes; solved when the best network of a generation passes an exam.

    It must last for `long_steps` from the usual start, and then for `short_steps` from at least `needed` of the levels.
    Of equally fit networks the first is examined. With a mesh ambient, it is the best of all devices. The problem's
    `inputs` are `Trials`. Source: the double pole without velocities of Stanley and Miikkulainen 2002, section 4.3.

    Attributes:
        search: gives the fitness; its `goal` is not read.
        env: of the exam; it earns 1 a step that it lasts.
        long_steps: to last from the usual start.
        short_steps: to last from a level.
        needed: levels to pass.
    """

    search: Episodes
    env: Any
    long_steps: int = field(100_000, AtLeast(1))
    short_steps: int = field(1000, AtLeast(1))
    needed: int = field(200, AtLeast(0))

    __post_init__ = check_fields

    def __call__(self, key: PRNGKey, networks: Networks, inputs: Trials) -> Score:
        """Scores P networks; consumes `key`."""
        search_key, exam_key = jax.random.split(key)
        fitness = self.search(search_key, networks, inputs.params).fitness
        comparable = jnp.where(jnp.isfinite(fitness), fitness, -jnp.inf)
        best, over = jnp.max(comparable), mesh_axes("population")
        best = jax.lax.pmax(best, over) if over else best
        first = jnp.min(jnp.where(comparable == best, networks.index, jnp.iinfo(jnp.int32).max))
        first = jax.lax.pmin(first, over) if over else first
        exam = self.exam(exam_key, chosen(networks, jnp.argmax(networks.index == first)), inputs)
        passes = (exam.steps >= self.long_steps) & (exam.passed >= self.needed)
        return Score(fitness, passes & (networks.index == first))

    def exam(self, key: PRNGKey, network: Networks, inputs: Trials) -> Exam:
        """Examines one network, `[1]`; from the levels only if it lasts. Consumes `key`."""
        kinds = {"constant": self.search.constant, "output_range": self.search.output_range}
        long_key, short_key = jax.random.split(key)
        long = play(long_key, network, self.env, inputs.exam_params, 1, 1, self.long_steps, **kinds).returns[0, 0]
        count = len(jax.tree.leaves(inputs.levels)[0])

        def from_levels():
            played = play(short_key, network, self.env, inputs.exam_params, count, count, self.short_steps,
                          levels=inputs.levels, narrows=False, **kinds)  # fmt: skip
            return jnp.sum(played.returns >= self.short_steps, dtype=jnp.int32)

        passed = jax.lax.cond(long >= self.long_steps, from_levels, lambda: jnp.int32(0))
        return Exam(long.astype(jnp.int32), passed)


def chosen(networks: Networks, number: Any) -> Networks:
    """One of the networks, `[1]`; `number` is int32 `[]`."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[number][None] if jnp.ndim(leaf) else leaf, networks)
