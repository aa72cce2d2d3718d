"""Job shop against plain sums, longest paths, all orders, and branch and bound."""

import itertools

import jax
import numpy as np
import pytest
from best import best_schedule, longest_path
from fast import jit
from following import follow, replay

import envs
from envs.puzzles.job_shop import FT06, JobShop, Random, orlib
from jaxpar.types import UsageError

THREE = """an instance of three jobs
3 3
0 3 1 2 2 2
0 2 2 1 1 4
1 4 2 3 0 1
"""
FOUR = THREE.replace("0 3 1 2 2 2", "2 9 1 1 0 5")


class Twin:
    """Times as a list for each machine and each job."""

    def __init__(self, state):
        self.machine, self.duration = state.level.machine.tolist(), state.level.duration.tolist()
        self.jobs, self.machines = len(self.machine), len(self.machine[0])
        self.starts, self.free, self.makespan = [[] for _ in self.machine], [0] * self.machines, 0

    def legal(self):
        return [len(starts) < self.machines for starts in self.starts]

    def step(self, job):
        place = len(self.starts[job])
        if place == self.machines:
            return -2 * sum(map(sum, self.duration)), True
        ready = self.starts[job][-1] + self.duration[job][place - 1] if place else 0
        on = self.machine[job][place]
        self.starts[job].append(max(ready, self.free[on]))
        self.free[on] = self.starts[job][-1] + self.duration[job][place]
        before, self.makespan = self.makespan, max(self.makespan, self.free[on])
        return before - self.makespan, not any(self.legal())

    def same(self, state):
        starts = [row[row >= 0].tolist() for row in state.start]
        return starts == self.starts and state.machine_free.tolist() == self.free


def every_makespan(machine, duration):
    """Of all orders in which the jobs' operations can be dispatched."""
    jobs, machines = len(machine), len(machine[0])
    for order in set(itertools.permutations([j for j in range(jobs) for _ in range(machines)])):
        yield order_makespan(machine, duration, order)


def order_makespan(machine, duration, order):
    done, job_free, free = [0] * len(machine), [0] * len(machine), [0] * len(machine[0])
    for j in order:
        k = done[j]
        job_free[j] = free[machine[j][k]] = max(job_free[j], free[machine[j][k]]) + duration[j][k]
        done[j] += 1
    return max(job_free)


def test_equals_sums_and_no_schedule_is_shorter_than_the_best_of_all():
    env = JobShop(orlib(THREE, FOUR))
    best = {}
    for level in env.generator.levels():
        problem = level.machine.tolist(), level.duration.tolist()
        shortest, order = best_schedule(*problem)
        best[str(problem)] = shortest
        total, state = replay(env, order, level)
        assert -total == shortest == longest_path(*problem, np.asarray(state.start).tolist())
        first = env.init_level(jax.random.key(0), level, env.default_params)
        assert -shortest <= float(env.upper_bound(first, env.default_params)) < -5
    outcomes = follow(env, Twin)
    assert len({str((twin.machine, twin.duration)) for *_, twin in outcomes}) == 2
    for total, illegal, twin in outcomes:
        problem = twin.machine, twin.duration
        assert total <= -best[str(problem)]
        if not illegal:
            assert -total == twin.makespan == longest_path(*problem, twin.starts)


def test_the_shortest_schedule_of_ft06_takes_55():
    env = envs.make("JobShop-FT06")[0]
    (level,) = env.generator.levels()
    assert level.duration.sum() == 197
    shortest, order = best_schedule(level.machine.tolist(), level.duration.tolist())
    total, _ = replay(env, order)
    assert shortest == -total == 55


def test_branch_and_bound_finds_the_best_of_all_orders():
    rng = np.random.default_rng(0)
    for _ in range(3):
        machine = [rng.permutation(2).tolist() for _ in range(4)]
        duration = rng.integers(1, 9, (4, 2)).tolist()
        assert best_schedule(machine, duration)[0] == min(every_makespan(machine, duration))


def test_masks_of_ten_thousand_states_and_orders_of_machines_are_uniform():
    env = JobShop(Random(4, 3))

    def one(key):
        state = env.init(key, env.default_params)
        state = state.replace(num_done=jax.random.randint(key, (4,), 0, 4))
        return state.level, state.num_done, env.action_mask(state, env.default_params)

    level, num_done, masks = jit(jax.vmap(one))(jax.random.split(jax.random.key(0), 10_000))
    for done, mask in zip(np.asarray(num_done).tolist(), np.asarray(masks).tolist(), strict=True):
        assert mask == [each < 3 for each in done]
    orders, counts = np.unique(np.asarray(level.machine).reshape(-1, 3), axis=0, return_counts=True)
    assert len(orders) == 6 and (np.sort(orders, axis=1) == np.arange(3)).all()
    assert (
        np.sum((counts - 40_000 / 6) ** 2) / (40_000 / 6) < 25.7
    )  # chi-square, 5 degrees, p = 1e-4
    assert (level.duration.min(), level.duration.max()) == (1, 99)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: orlib("no numbers"), "begins with its numbers of jobs and machines"),
        (lambda: orlib(THREE.replace("3 3\n", "4 3\n")), "4 jobs on 3 machines take 4 rows of 6"),
        (
            lambda: orlib(THREE.replace("0 3 1 2 2 2", "0 3 1 2 1 2")),
            "pass every machine, 0 to 2, once",
        ),
        (lambda: orlib(THREE.replace("0 3 1", "0 0 1")), "durations must be over 0"),
        (lambda: orlib(THREE, FT06), "all must be as in the first"),
        (lambda: Random(0), "num_jobs=0 must be"),
        (lambda: JobShop("ft06"), "takes a generator"),
        (lambda: JobShop(rewards="never"), "rewards='never' is unknown"),
    ],
)
def test_bad_input_ends_in_a_sentence(make, message):
    with pytest.raises(UsageError, match=message):
        make()


def test_the_picture_is_the_schedule():
    env, params = envs.make("JobShop-FT06")
    state = env.init(jax.random.key(0), params)
    empty = np.asarray(env.render(state, params))
    state = env.transition(jax.random.key(0), state, np.int32(0), params)
    picture = np.asarray(env.render(state, params))
    assert picture.shape == (96, 240, 3) and picture.dtype == np.uint8
    assert np.unique(empty.reshape(-1, 3), axis=0).tolist() == [[235] * 3, [255] * 3]
    rows, columns = np.nonzero((picture != empty).any(-1))
    assert set(rows // 16) == {2}, "job 0 begins on machine 2"
    assert (
        columns.min() == 0 and columns.max() == -(-240 // (2 * 47)) - 1
    )  # one of 94 units of time
