"""Problems in time: networks act in an environment, as many episodes at once as there are slots.

G networks have E episodes each, and L slots play them, copies of the environment: one that finishes an episode starts
the next, so a network with long episodes occupies its own slot alone. When no episode is left to start, those that
still run move together into half as many slots, again and again, so more than half of all steps are of an episode.
Every random number depends on the episode and its step, not on the slot, so neither L nor the number of devices changes
a score.

On a CUDA GPU an environment whose steps are deterministic, such as a cart with poles, is played by one kernel instead:
a program an episode, from its first step to its last (`jaxpar.neat._kernels`).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, cast

import flax.struct
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpar._older_fields import newer_arguments
from jaxpar.env import (
    Adapter,
    Box,
    Discrete,
    Environment,
    Space,
    capabilities,
    is_adapter,
    reset,
    step,
)
from jaxpar.fields import AtLeast, Between, Each, Finite, check_fields, field
from jaxpar.mesh import mesh_axes
from jaxpar.neat._kernels import NotScalar, ScalarStep, episode_kernel, use_kernels
from jaxpar.neat.evolution import Score
from jaxpar.neat.hyper import CppnDecoder, decode_networks
from jaxpar.neat.network import Networks, Players
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = [
    "Episodes",
    "GeneralizationInputs",
    "GeneralizationResult",
    "GeneralizationTest",
    "PlayOptions",
    "PlayResult",
    "act",
    "io_sizes",
    "play",
]


def io_sizes(env: Environment | Adapter, params: PyTree, constant: bool) -> tuple[int, int]:
    """Numbers of inputs and outputs of a network for `env`: all observed numbers and perhaps a constant; actions."""
    obs = jax.eval_shape(lambda key: reset(key, env, params)[0], jax.random.key(0))
    numbers = sum(leaf.size for leaf in jax.tree.leaves(obs))
    space = env.action_space(params)
    if isinstance(space, Discrete) and space.shape == ():
        return numbers + constant, space.n if space.n > 2 else 1
    if isinstance(space, Box):
        return numbers + constant, max(1, math.prod(space.shape))
    raise UsageError(f"networks act by Discrete numbers or Boxes, not by {space}.")


def act(
    space: Space, y: Array, low: float = 0.0, high: float = 1.0, mask: Array | None = None
) -> Array:
    """The action of outputs `[O]` from `low` to `high`.

    It is the largest output, the upper half of a single one, or a point of the box.

    Args:
        space: `Discrete` or `Box`; `io_sizes` gives its number of outputs.
        y: float32 `[O]`.
        low: the least output.
        high: the largest output.
        mask: bool `[A]`, the legal actions of a `Discrete`; None, or none that is legal, allows all.
    """
    if isinstance(space, Discrete):
        if space.n > 2:
            return jnp.argmax(_legal_outputs(y, mask)).astype(space.dtype)
        choice = (y[0] > (low + high) / 2) & (space.n > 1)
        if mask is not None and space.n > 1:
            choice = jnp.where(mask[0] == mask[1], choice, mask[1])
        return choice.astype(space.dtype)
    assert isinstance(space, Box)  # `io_sizes` refuses others
    share = (jnp.clip(y, low, high) - low) / (high - low)
    least, most = space.bounds()
    return jnp.add(least, share.reshape(space.shape) * (most - least)).astype(space.dtype)


def _legal_outputs(y: Array, mask: Array | None) -> Array:
    if mask is None:
        return y
    # An output of minus infinity, too, is larger than an illegal action's.
    return jnp.where(mask, jnp.maximum(y, jnp.finfo(y.dtype).min), -jnp.inf)


@flax.struct.dataclass
class PlayOptions:
    """Options of `play`: the levels are arrays, all others are static.

    Attributes:
        levels: pytree with a leading axis E: episode e starts from level e, by `env.init_level`;
            None resets.
        constant: whether a last input of 1 follows the observation.
        output_range: lowest and highest output; see `act`.
        compacts: whether the last episodes move into fewer slots; if not, a single loop is
            compiled, and empty slots step on.
    """

    levels: PyTree = None
    constant: bool = field(True, pytree_node=False)
    output_range: tuple[float, float] = field((0.0, 1.0), Each(Finite()), pytree_node=False)
    compacts: bool = field(True, pytree_node=False)

    __post_init__ = check_fields


class PlayResult(NamedTuple):
    """Results of all episodes: float32 `[G, E]` returns, int32 `[G, E]` lengths; int32 `[]` steps of all slots."""

    returns: Array
    lengths: Array
    env_steps: Array


class _Slots(NamedTuple):
    job: Array  # int32 [L], the episode: network * E + number; G E for none
    time: Array
    state: PyTree
    obs: PyTree
    carry: PyTree
    total: Array


class _Table(NamedTuple):
    results: Array  # float32 [G E, 2], returns and lengths
    steps: Array  # int32 [], of all slots


class _Player(NamedTuple):
    """Arguments of `play` that all slots share."""

    key: PRNGKey
    networks: Players
    env: Environment | Adapter
    params: PyTree
    episodes: int
    max_steps: int
    options: PlayOptions

    @property
    def num_jobs(self) -> int:
        return len(self.networks.index) * self.episodes

    def key_of(self, job, time):
        own = jax.random.fold_in(self.key, self.networks.index[job // self.episodes])
        return jax.random.fold_in(jax.random.fold_in(own, job % self.episodes), time)

    def choose_action(self, y: Array, state: PyTree, params: PyTree) -> Array:
        """The legal action of one network's outputs in a state."""
        low, high = self.options.output_range
        action_mask = capabilities(self.env).action_mask
        mask = None
        if action_mask is not None:
            mask = action_mask(state, params)
        return act(self.env.action_space(params), y, low, high, mask)

    def networks_of(self, job) -> Players:
        """The networks of these episodes."""
        owner = jnp.minimum(job, self.num_jobs - 1) // self.episodes
        return jax.tree.map(lambda leaf: leaf[owner] if jnp.ndim(leaf) else leaf, self.networks)

    def fresh_slots(self, job) -> _Slots:
        """Slots at the start of these episodes."""
        env = self.env
        levels = self.options.levels
        init_level = capabilities(env).init_level

        def one(job):
            key = self.key_of(job, 0)
            if levels is None or init_level is None or is_adapter(env):
                return reset(key, env, self.params)
            init_key, observe_key = jax.random.split(key)
            level = jax.tree.map(lambda x: x[job % self.episodes], levels)
            state = init_level(init_key, level, self.params)
            return env.observe(observe_key, state, None, self.params), state

        obs, state = jax.vmap(one)(jnp.minimum(job, self.num_jobs - 1))
        memory = jax.tree.map(
            lambda x: jnp.zeros((len(job), *x.shape[1:]), x.dtype), self.networks.init_carry()
        )
        return _Slots(
            job, jnp.zeros_like(job), state, obs, memory, jnp.zeros(len(job), jnp.float32)
        )

    def step_slots(self, mine: Players, now: _Slots, table: _Table) -> tuple[_Slots, _Table]:
        """One step of every slot; one whose episode ends has none afterwards."""
        num_envs = len(now.job)
        dtype = self.networks.dtype
        rows = [leaf.reshape(num_envs, -1).astype(dtype) for leaf in jax.tree.leaves(now.obs)]
        rows.append(jnp.ones((num_envs, int(self.options.constant)), dtype))
        y, memory = mine.apply(now.carry, jnp.concatenate(rows, 1))

        action = jax.vmap(lambda y, state: self.choose_action(y, state, self.params))(y, now.state)
        keys = jax.vmap(self.key_of)(jnp.minimum(now.job, self.num_jobs - 1), now.time + 1)
        one = lambda key, state, action: step(key, self.env, state, action, self.params)  # noqa: E731
        after = jax.vmap(one)(keys, now.state, action)
        total, time = now.total + after.reward, now.time + 1
        ended = after.terminated | after.truncated | (time >= self.max_steps)
        at = jnp.where(ended, now.job, self.num_jobs)
        results = table.results.at[at].set(
            jnp.stack([total, time.astype(total.dtype)], 1), mode="drop"
        )
        table = _Table(results, table.steps + num_envs)
        job = jnp.where(ended, self.num_jobs, now.job)
        return _Slots(job, time, after.state, after.obs, memory, total), table

    def play_until_all_started(self, now: _Slots, table: _Table) -> tuple[_Slots, _Table]:
        """Steps until every episode has started."""

        def body(carry):
            now, table, next_job = carry
            now, table = self.step_slots(self.networks_of(now.job), now, table)
            idle = now.job == self.num_jobs
            fresh = self.fresh_slots(
                jnp.minimum(next_job + jnp.cumsum(idle.astype(jnp.int32)) - 1, self.num_jobs)
            )

            def chosen(new, old):
                return jnp.where(idle.reshape((-1,) + (1,) * (new.ndim - 1)), new, old)

            return (
                jax.tree.map(chosen, fresh, now),
                table,
                next_job + jnp.sum(idle, dtype=jnp.int32),
            )

        carry = now, table, jnp.int32(len(now.job))
        return jax.lax.while_loop(lambda carry: carry[2] < self.num_jobs, body, carry)[:2]

    def play_until_few_left(self, now: _Slots, table: _Table, until: int) -> tuple[_Slots, _Table]:
        """Steps until at most `until` slots have an episode, and keeps so many."""
        mine = self.networks_of(now.job)
        busy = lambda now: now.job < self.num_jobs  # noqa: E731
        go_on = lambda carry: jnp.sum(busy(carry[0]), dtype=jnp.int32) > until  # noqa: E731
        now, table = jax.lax.while_loop(
            go_on, lambda carry: self.step_slots(mine, *carry), (now, table)
        )
        kept = jnp.argsort(~busy(now), stable=True)[: max(until, 1)]
        return jax.tree.map(lambda x: x[kept], now), table

    def play_in_slots(self, num_envs: int) -> PlayResult:
        """Plays all episodes in slots, step by step."""
        num_envs = min(num_envs, self.num_jobs)
        now = self.fresh_slots(jnp.arange(num_envs, dtype=jnp.int32))
        table = _Table(jnp.zeros((self.num_jobs, 2), jnp.float32), jnp.int32(0))
        if num_envs < self.num_jobs:
            now, table = self.play_until_all_started(now, table)
        while num_envs:
            if self.options.compacts:
                num_envs //= 2
            else:
                num_envs = 0
            now, table = self.play_until_few_left(now, table, num_envs)
        returns, lengths = table.results.T.reshape(2, len(self.networks.index), self.episodes)
        return PlayResult(returns, lengths.astype(jnp.int32), table.steps)

    def scalar_step(self) -> ScalarStep:
        """A step of one episode as a function of scalars; raises `NotScalar`."""

        def move(state, params, y):
            action = self.choose_action(y, state, params)
            # `NotScalar` if it uses the key.
            after = step(jax.random.key(0), self.env, state, action, params)
            return after.state, after.obs, after.reward, after.terminated | after.truncated

        state = jax.eval_shape(lambda: self.fresh_slots(jnp.zeros(1, jnp.int32)).state)
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
        return ScalarStep.of(move, one, self.params, self.networks.io_sizes[1])

    def by_kernel(self, interpret: bool = False) -> Callable[[], PlayResult] | None:
        """A function that plays every episode inside one kernel.

        None without a GPU or a deterministic environment.
        """
        networks = self.networks
        if not isinstance(networks, Networks) or not (interpret or use_kernels(networks)):
            return None
        try:
            scalar_step = self.scalar_step()
        except NotScalar:
            return None

        def run() -> PlayResult:
            slots = self.fresh_slots(jnp.arange(self.num_jobs, dtype=jnp.int32))
            returns, lengths = episode_kernel(
                scalar_step,
                networks,
                slots.state,
                slots.obs,
                self.episodes,
                self.max_steps,
                self.options.constant,
                interpret=interpret,
            )
            shape = len(self.networks.index), self.episodes
            return PlayResult(returns.reshape(shape), lengths.reshape(shape), jnp.sum(lengths))

        return run


def play(
    key: PRNGKey,
    networks: Players,
    env: Environment | Adapter,
    params: PyTree,
    episodes: int,
    num_envs: int,
    max_steps: int,
    options: PlayOptions | None = None,
    **older: object,
) -> PlayResult:
    """Plays `episodes` episodes with each of G networks; consumes `key`.

    Episode e of network g has keys made of (key, g's number in the population, e, step).

    Cost: about (all steps of all episodes) / L iterations, of L network calls each, then the steps
    of the last episodes in ever fewer slots: more than half of the slots are busy in every step.
    Compiles a loop for each halving of L, which is most of the compile time.

    Args:
        key: consumed.
        networks: G of them.
        env: an environment or adapter; static.
        params: its parameters.
        episodes: E.
        num_envs: L, slots; more than the number of all episodes are not used. The kernel has none.
        max_steps: of an episode, at most.
        options: start levels, inputs and outputs, and the use of slots; None means the defaults.
        **older: fields of `options`, which were arguments; accepted until the first release.
    """
    names = [declared.name for declared in dataclasses.fields(PlayOptions)]
    paths = {name: f"options.{name}" for name in names}
    groups = {"options": options or PlayOptions()}
    options = cast(PlayOptions, newer_arguments("play", paths, groups, older)["options"])

    needed = io_sizes(env, params, options.constant)
    ends = networks.io_sizes
    if needed != ends:
        raise UsageError(
            f"networks have {ends[0]} inputs and {ends[1]} outputs; the environment takes "
            f"{needed[0]} and {needed[1]}."
        )
    for name, value in (("episodes", episodes), ("num_envs", num_envs), ("max_steps", max_steps)):
        if value < 1:
            raise UsageError(f"{name}={value} must be at least 1.")
    if not options.output_range[0] < options.output_range[1]:
        raise UsageError(f"output_range={options.output_range} must ascend.")

    game = _Player(
        key=key,
        # Arrays of JAX, since traced numbers index them.
        networks=jax.tree.map(jnp.asarray, networks),
        env=env,
        params=params,
        episodes=episodes,
        max_steps=max_steps,
        options=options,
    )

    def play_in_slots():
        return game.play_in_slots(num_envs)

    kernel = game.by_kernel()
    if kernel is None:
        return play_in_slots()
    return jax.lax.platform_dependent(default=play_in_slots, cuda=kernel)


@dataclasses.dataclass(frozen=True)
class Episodes:
    """The mean return over episodes of an environment; solved when it reaches `goal`.

    The problem's `inputs` are the environment's parameters.

    Attributes:
        env: an environment or adapter.
        goal: the mean return that solves it.
        episodes: E, of each network.
        num_envs: L on each device; 0 means one for each network.
        max_steps: of an episode.
        constant: whether a last input of 1 follows the observation.
        output_range: what outputs lie in.
        decoder: the `Substrate` or `Quadtree` on which networks, as CPPNs, give those that play;
            None has networks play themselves.
    """

    env: Environment | Adapter
    goal: float = field(legal=Between(-math.inf, math.inf))
    episodes: int = field(1, AtLeast(1))
    num_envs: int = field(0, AtLeast(0))
    max_steps: int = field(1000, AtLeast(1))
    constant: bool = True
    output_range: tuple[float, float] = field((0.0, 1.0), Each(Finite()))
    decoder: CppnDecoder | None = None

    __post_init__ = check_fields

    def express(self, networks: Networks) -> Players:
        """The networks that play."""
        if self.decoder is None:
            return networks
        return decode_networks(self.decoder, networks)

    def __call__(self, key: PRNGKey, networks: Networks, inputs: PyTree) -> Score:
        """Scores G networks; consumes `key`."""
        num_envs = self.num_envs or len(networks.index)
        options = PlayOptions(constant=self.constant, output_range=self.output_range)
        players = self.express(networks)
        result = play(
            key, players, self.env, inputs, self.episodes, num_envs, self.max_steps, options
        )
        fitness = jnp.mean(result.returns, 1)
        return Score(fitness, fitness >= self.goal)


class GeneralizationInputs(NamedTuple):
    """Inputs of `GeneralizationTest`.

    Attributes:
        params: of the environment that gives the fitness.
        test_params: of the environment of the test.
        levels: its starts, pytree with a leading axis.
    """

    params: PyTree
    test_params: PyTree
    levels: PyTree


class GeneralizationResult(NamedTuple):
    """Steps balanced from the usual start, int32 `[]`, and from how many of the levels it passed, int32 `[]`."""

    steps: Array
    passed: Array


@dataclasses.dataclass(frozen=True)
class GeneralizationTest:
    """Fitness by episodes; solved when the best network of a generation passes a test of generalization.

    It must last for `long_steps` from the usual start, and then for `short_steps` from at least `needed` of the levels.
    Of equally fit networks the first is tested. With a mesh ambient, it is the best of all devices. The problem's
    `inputs` are `GeneralizationInputs`. Source: the double pole without velocities of Stanley and Miikkulainen 2002,
    section 4.3.

    Attributes:
        training: gives the fitness; its `goal` is not read.
        env: of the test; its reward is 1 in every step.
        long_steps: to last from the usual start.
        short_steps: to last from a level.
        needed: levels to pass.
    """

    training: Episodes
    env: Environment | Adapter
    long_steps: int = field(100_000, AtLeast(1))
    short_steps: int = field(1000, AtLeast(1))
    needed: int = field(200, AtLeast(0))

    __post_init__ = check_fields

    def __call__(self, key: PRNGKey, networks: Networks, inputs: GeneralizationInputs) -> Score:
        """Scores G networks; consumes `key`."""
        fitness_key, test_key = jax.random.split(key)
        fitness = self.training(fitness_key, networks, inputs.params).fitness
        comparable = jnp.where(jnp.isfinite(fitness), fitness, -jnp.inf)
        best, over = jnp.max(comparable), mesh_axes("population")
        best = jax.lax.pmax(best, over) if over else best
        first = jnp.min(jnp.where(comparable == best, networks.index, jnp.iinfo(jnp.int32).max))
        first = jax.lax.pmin(first, over) if over else first
        result = self.test(test_key, chosen(networks, jnp.argmax(networks.index == first)), inputs)
        passes = (result.steps >= self.long_steps) & (result.passed >= self.needed)
        return Score(fitness, passes & (networks.index == first))

    def test(
        self, key: PRNGKey, network: Networks, inputs: GeneralizationInputs
    ) -> GeneralizationResult:
        """Tests one network, `[1]`; from the levels only if it lasts. Consumes `key`."""
        env = self.env
        params = inputs.test_params
        training = self.training
        options = PlayOptions(constant=training.constant, output_range=training.output_range)
        long_key, short_key = jax.random.split(key)
        player = training.express(network)
        usual = play(long_key, player, env, params, 1, 1, self.long_steps, options)
        long = usual.returns[0, 0]
        count = len(jax.tree.leaves(inputs.levels)[0])

        def from_levels():
            each = dataclasses.replace(options, levels=inputs.levels, compacts=False)
            result = play(short_key, player, env, params, count, count, self.short_steps, each)
            return jnp.sum(result.returns >= self.short_steps, dtype=jnp.int32)

        passed = jax.lax.cond(long >= self.long_steps, from_levels, lambda: jnp.int32(0))
        return GeneralizationResult(long.astype(jnp.int32), passed)


def chosen(networks: Networks, number: ArrayLike) -> Networks:
    """One of the networks, `[1]`; `number` is int32 `[]`."""
    return jax.tree.map(
        lambda leaf: jnp.asarray(leaf)[number][None] if jnp.ndim(leaf) else leaf, networks
    )
