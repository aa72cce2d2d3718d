"""Job shop: every job passes every machine in an order of its own; the last of all shall be done early.

An action names a job, whose next operation is then put behind everything on its machine, as early as its job allows
(dispatching, as in Zhang et al., "Learning to Dispatch for Job Shop Scheduling via Deep Reinforcement Learning", 2020).
Every order of operations is a sequence of actions, so one of them is optimal. J x M actions are an episode; a job that
has no operation left is illegal, ends it, and costs `illegal_cost` x all durations together, which no schedule exceeds.
The outcome is minus the makespan.

`FT06` is the problem of six jobs of Fisher and Thompson, 1963, whose shortest makespan is 55.
"""

import colorsys
import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete
from jaxpar.fields import AtLeast, Between, OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from .given import Generator, Given, check_generator
from .rewards import REWARDS, reward_of_outcome, unless

__all__ = ["FT06", "VARIANTS", "JobShop", "Level", "Random", "orlib"]


@flax.struct.dataclass
class Level:
    """Of the operations of every job, in order, the `machine` and the `duration` over 0, int32 `[J, M]`."""

    machine: Array
    duration: Array


@flax.struct.dataclass
class Params:
    """What an action that the mask forbids costs, in sums of all durations."""

    illegal_cost: Any = 2.0


@flax.struct.dataclass
class State:
    """The `level` and the schedule so far.

    Attributes:
        level: what is to be done.
        start: int32 `[J, M]`, when each operation begins; -1 where that is open.
        num_done: int32 `[J]`, operations of every job that are scheduled.
        job_free: int32 `[J]`, when the last of them ends.
        machine_free: int32 `[M]`, when the last on every machine ends.
        illegal: bool `[]`, whether an illegal action ended it.
    """

    level: Level
    start: Array
    num_done: Array
    job_free: Array
    machine_free: Array
    illegal: Array


@dataclasses.dataclass(frozen=True)
class Random:
    """Durations uniform from 1 to `longest`, and orders of machines uniform, as of Taillard, 1993."""

    num_jobs: int = field(6, AtLeast(1))
    num_machines: int = field(6, Between(1, 64))
    longest: int = field(99, Between(1, 10_000))
    __post_init__ = check_fields

    def __call__(self, key: PRNGKey) -> Level:
        """Draws; consumes `key`."""
        order_key, duration_key = jax.random.split(key)
        shape = self.num_jobs, self.num_machines
        draw, place = jax.random.uniform(order_key, shape), np.arange(self.num_machines)
        ahead = draw[:, :, None] > draw[:, None]
        tie = (draw[:, :, None] == draw[:, None]) & (place[:, None] > place[None])[None]
        machine = jnp.sum(ahead | tie, axis=2).astype(
            jnp.int32
        )  # ranks of numbers are a permutation
        return Level(machine, jax.random.randint(duration_key, shape, 1, self.longest + 1))


def orlib(*texts: str) -> Given:
    """A generator of the instances in texts in the format of the OR-library (Beasley, 1990), all of one size.

    A line with the numbers of jobs and machines, then a line a job: machine and duration of each operation, machines
    from 0. Lines with words are left out.

    Raises:
        UsageError: rows or numbers are missing, or a job does not pass every machine once.
    """
    return Given.of(*map(_read, texts))


def _read(text: str) -> Level:
    rows = [line.split() for line in text.splitlines()]
    rows = [
        [int(word) for word in row] for row in rows if row and all(word.isdecimal() for word in row)
    ]
    if not rows or len(rows[0]) != 2:
        raise UsageError(
            "an instance of the OR-library begins with its numbers of jobs and machines"
        )
    (jobs, machines), *table = rows
    if len(table) != jobs or any(len(row) != 2 * machines for row in table):
        raise UsageError(
            f"{jobs} jobs on {machines} machines take {jobs} rows of {2 * machines} whole numbers"
        )
    level = np.array(table, np.int64).reshape(jobs, machines, 2)
    if (np.sort(level[:, :, 0], axis=1) != np.arange(machines)).any():
        raise UsageError(f"every job must pass every machine, 0 to {machines - 1}, once")
    if level[:, :, 1].min() < 1 or level[:, :, 1].sum() > 2**24:
        raise UsageError("durations must be over 0, and at most 2^24 together")
    return Level(level[:, :, 0].astype(np.int32), level[:, :, 1].astype(np.int32))


FT06 = """
6 6
2 1  0  3  1  6  3  7  5  3  4  6
1 8  2  5  4 10  5 10  0 10  3  4
2 5  3  4  5  8  0  9  1  1  4  7
1 5  0  5  2  5  3  3  4  8  5  9
2 9  1  3  4  5  5  4  0  3  3  1
1 3  3  3  5  9  0 10  4  4  2  1
"""
"""Six jobs on six machines; `Given` of it is the generator of "JobShop-FT06"."""


@dataclasses.dataclass(frozen=True)
class JobShop:
    """Observation: float32 `[J, 5 + M]`, a row for each job. Action: a job, int32.

    Columns: legal; of its next operation the duration and the earliest start; work that is left of the job; work that
    is left for the machine of that operation; then which machine that is. Times are shares of the least makespan that
    jobs and machines alone allow.

    Attributes:
        generator: `Random`, what `orlib` reads, or any that draws a `Level`.
        rewards: "dense", minus what each operation adds to the makespan, or "sparse", minus all of it at the end.
    """

    generator: Generator = Random()
    rewards: str = field("dense", OneOf(REWARDS))
    absorbing = True  # `unless`

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no generator of a `Level`."""
        check_fields(self)
        _ = self.sizes

    @property
    def sizes(self) -> tuple[int, int]:
        """J and M."""
        return check_generator(
            "JobShop", self.generator, Level, "Random, orlib(text)"
        ).machine.shape

    @property
    def name(self) -> str:
        """With its jobs and machines."""
        return "JobShop-{}x{}".format(*self.sizes)

    @property
    def default_params(self) -> Params:
        """An illegal action costs more than any schedule."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Rows of features."""
        jobs, machines = self.sizes
        return Box(0.0, float(jobs * machines), (jobs, 5 + machines))

    def action_space(self, params: Params) -> Discrete:
        """A job."""
        return Discrete(self.sizes[0])

    def sample_level(self, key: PRNGKey, params: Params) -> Level:
        """The generator's; consumes `key`."""
        return self.generator(key)

    def init_level(self, key: PRNGKey, level: Level, params: Params) -> State:
        """Nothing is scheduled; deterministic."""
        jobs, machines = self.sizes
        level = Level(jnp.asarray(level.machine, jnp.int32), jnp.asarray(level.duration, jnp.int32))
        each_job, each_machine = jnp.zeros(jobs, jnp.int32), jnp.zeros(machines, jnp.int32)
        return State(
            level,
            jnp.full((jobs, machines), -1, jnp.int32),
            each_job,
            each_job,
            each_machine,
            jnp.zeros((), bool),
        )

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def action_mask(self, state: State, params: Params) -> Array:
        """Jobs with an operation left, bool `[J]`."""
        return state.num_done < self.sizes[1]

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Schedules the next operation of a job, or ends by an illegal action; deterministic."""
        jobs, machines = self.sizes
        legal, over = self.action_mask(state, params)[action], self.terminal(state, params)
        step = jnp.minimum(state.num_done[action], machines - 1)
        machine = state.level.machine[action, step]
        start = jnp.maximum(state.job_free[action], state.machine_free[machine])
        end = start + state.level.duration[action, step]
        job, on, at = (
            np.arange(jobs) == action,
            np.arange(machines) == machine,
            np.arange(machines) == step,
        )
        moved = state.replace(
            start=jnp.where(job[:, None] & at[None], start, state.start),
            num_done=state.num_done + job,
            job_free=jnp.where(job, end, state.job_free),
            machine_free=jnp.where(on, end, state.machine_free),
        )
        return unless(over | ~legal, moved, state).replace(illegal=state.illegal | (~legal & ~over))

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """Of every job what comes next."""
        machines, legal = self.sizes[1], self.action_mask(state, params)
        job_left, machine_left = self.work_left(state)
        here = (np.arange(machines)[None] == state.num_done[:, None]) & legal[:, None]
        on = jnp.any(
            here[:, :, None] & (state.level.machine[:, :, None] == np.arange(machines)[None, None]),
            axis=1,
        )  # [J, M]
        duration = jnp.sum(jnp.where(here, state.level.duration, 0), axis=1)
        start = jnp.where(
            legal, jnp.maximum(state.job_free, jnp.max(on * state.machine_free[None], axis=1)), 0
        )
        load = jnp.sum(on * machine_left[None], axis=1)
        horizon = jnp.maximum(
            jnp.max(jnp.sum(state.level.duration, axis=1)), jnp.max(self.loads(state.level))
        )
        times = jnp.stack([duration, start, job_left, load], axis=1) / horizon
        return jnp.concatenate(
            [legal[:, None].astype(jnp.float32), times, on.astype(jnp.float32)], axis=1
        )

    def loads(self, level: Level, left: Array | bool = True) -> Array:
        """The durations of operations that are `left` `[J, M]`, summed by machine, int32 `[M]`."""
        on = level.machine[:, :, None] == np.arange(self.sizes[1])[None, None]
        return jnp.sum(
            jnp.where(on, jnp.where(left, level.duration, 0)[:, :, None], 0), axis=(0, 1)
        )

    def work_left(self, state: State) -> tuple[Array, Array]:
        """Durations that are not scheduled yet, by job int32 `[J]` and by machine int32 `[M]`."""
        left = state.start < 0
        return jnp.sum(jnp.where(left, state.level.duration, 0), axis=1), self.loads(
            state.level, left
        )

    reward = reward_of_outcome

    def terminal(self, state: State, params: Params) -> Array:
        """All is scheduled, or an illegal action ended it."""
        return state.illegal | jnp.all(state.num_done == self.sizes[1])

    def makespan(self, state: State) -> Array:
        """When the last operation ends, int32 `[]`."""
        return jnp.max(state.job_free)

    def outcome(self, state: State, params: Params) -> Array:
        """Minus the makespan, and the cost of an illegal action; float32."""
        cost = params.illegal_cost * jnp.sum(state.level.duration).astype(jnp.float32)
        return -self.makespan(state).astype(jnp.float32) - jnp.where(state.illegal, cost, 0.0)

    def upper_bound(self, state: State, params: Params) -> Array:
        """Minus the time that the rest of every job and of every machine takes alone, float32 `[]`."""
        job_left, machine_left = self.work_left(state)
        least = jnp.maximum(
            jnp.max(state.job_free + job_left), jnp.max(state.machine_free + machine_left)
        )
        more = self.makespan(state) - least if self.rewards == "dense" else -least
        return jnp.where(self.terminal(state, params), 0, more).astype(jnp.float32)

    def heuristic(self, state: State, params: Params) -> Array:
        """The upper bound, which no schedule exceeds."""
        return self.upper_bound(state, params)

    def render(self, state: State, params: Params) -> Array:
        """A row a machine, a colour a job, time to the right up to twice the bound of the start or the makespan.

        Uint8 `[16 M, 240, 3]`.
        """
        jobs, machines = self.sizes
        alone = jnp.maximum(
            jnp.max(jnp.sum(state.level.duration, axis=1)), jnp.max(self.loads(state.level))
        )
        time = (np.arange(240) / 240 * jnp.maximum(2 * alone, self.makespan(state)))[None, None]
        start, end = state.start[:, :, None], (state.start + state.level.duration)[:, :, None]
        busy = (start >= 0) & (time >= start) & (time < end)  # [J, M, 240]
        on = state.level.machine[:, :, None] == np.arange(machines)[None, None]
        who = jnp.max(
            jnp.where(
                busy[:, :, None] & on[..., None], np.arange(1, jobs + 1)[:, None, None, None], 0
            ),
            (0, 1),
        )
        colors = [(235, 235, 235)]
        colors += [
            tuple(255 * x for x in colorsys.hsv_to_rgb(j / jobs, 0.6 + 0.3 * (j % 2), 0.85))
            for j in range(jobs)
        ]
        rows = jnp.asarray(np.array(colors, np.uint8))[who].repeat(16, axis=0)
        return jnp.where((np.arange(16 * machines) % 16 == 15)[:, None, None], jnp.uint8(255), rows)


VARIANTS = {
    "JobShop-6x6": JobShop,
    "JobShop-10x10": lambda: JobShop(Random(10, 10)),
    "JobShop-FT06": lambda: JobShop(orlib(FT06)),
}
