"""Environments in Python, many at once on threads: the first that are ready make the next batch, under jit too.

    python -m experiments.hosted                      # beside gymnasium's, two CPU cores, a minute and a half
    python -m experiments.hosted rounds=1 steps=1000  # ten seconds, without a spread
    python -m experiments.hosted num_envs=4
    python -m experiments.hosted num_envs=32 steps=6000
    python -m experiments.hosted rounds=9

The pool of EnvPool (Weng et al. 2022, arXiv:2206.10558) for anything with Gymnasium's `reset(seed=)` and
`step(action)`: `send` starts steps, `recv` gives the first M that are done. What an environment does depends on its
seed and its own actions alone, so its trajectory is that of a serial replay, whatever the order in which steps end.
"""

import dataclasses
import queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxpar.fields import AtLeast, field
from jaxpar.types import UsageError

from .app import small_commands


class Ready(NamedTuple):
    """M results: `ids` int32, observations `[M, ...]`, rewards float32, and flags; an episode's end begins another."""

    ids: np.ndarray
    obs: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray


class Hosted:
    """N environments on threads.

    Args:
      make: Makes one.
      num_envs: N.
      num_threads: Of them, at most N.
      batch: M, how many results `recv` waits for.
      seed: Environment i begins with seed + i; where an episode ends the next begins by the environment's own numbers.

    Raises:
      UsageError: Counts that cannot be.
    """

    def __init__(
        self, make: Callable[[], Any], num_envs: int, num_threads: int, batch: int, seed: int = 0
    ):
        if not 1 <= batch <= num_envs or not 1 <= num_threads <= num_envs:
            raise UsageError(
                f"batch={batch} and num_threads={num_threads} must be from 1 to the {num_envs} environments."
            )
        self.envs, self.batch = [make() for _ in range(num_envs)], batch
        self.asked, self.done, self.under_way = (
            queue.SimpleQueue(),
            queue.SimpleQueue(),
            set(range(num_envs)),
        )
        self.threads = [
            threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)
        ]
        for thread in self.threads:
            thread.start()
        for i in range(num_envs):
            self.asked.put((i, None, seed + i))

    def _work(self) -> None:
        while (task := self.asked.get()) is not None:
            i, action, seed = task
            try:
                if seed is not None:
                    self.done.put((i, self.envs[i].reset(seed=seed)[0], 0.0, False, False))
                    continue
                obs, reward, terminated, truncated, _ = self.envs[i].step(action)
                if terminated or truncated:
                    obs, _ = self.envs[i].reset()
                self.done.put((i, obs, reward, terminated, truncated))
            except Exception as error:  # which belongs to whoever waits for the result
                self.done.put((i, error))

    def send(self, actions: np.ndarray, ids: np.ndarray) -> None:
        """Starts a step of each of these; none may be under way."""
        for action, i in zip(np.asarray(actions), np.asarray(ids).tolist(), strict=True):
            if i in self.under_way:
                raise UsageError(
                    f"environment {i} is under way; send it an action when recv has given its result."
                )
            self.under_way.add(i)
            self.asked.put((i, action, None))

    def recv(self) -> Ready:
        """The first M results that are there; of the first call, first observations."""
        if len(self.under_way) < self.batch:
            raise UsageError(
                f"{len(self.under_way)} steps are under way, and recv waits for {self.batch}; send first."
            )
        rows = [self.done.get() for _ in range(self.batch)]
        for row in rows:
            self.under_way.discard(row[0])
            if len(row) == 2:
                raise row[1]
        ids, obs, reward, terminated, truncated = zip(*rows, strict=True)
        return Ready(
            np.int32(ids),
            np.stack(obs),
            np.float32(reward),
            np.array(terminated),
            np.array(truncated),
        )

    def close(self) -> None:
        """Ends the threads."""
        for _ in self.threads:
            self.asked.put(None)
        for thread in self.threads:
            thread.join()

    def exchange(self, actions: jax.Array, ids: jax.Array) -> Ready:
        """`send`, then `recv`, in a jitted program, in the order of its calls; one program drives a pool."""
        space, m = self.envs[0].observation_space, self.batch
        flags = jax.ShapeDtypeStruct((m,), bool)
        shapes = Ready(
            jax.ShapeDtypeStruct((m,), np.int32), jax.ShapeDtypeStruct((m, *space.shape), space.dtype),
            jax.ShapeDtypeStruct((m,), np.float32), flags, flags,
        )  # fmt: skip

        def both(actions, ids):
            self.send(actions, ids)
            return self.recv()

        return io_callback(both, shapes, actions, ids, ordered=True)


class Sleeper(gymnasium.Env):
    """A counter that sleeps for random times; what `main` measures."""

    observation_space = gymnasium.spaces.Box(0, np.inf, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(
        self, seed: int | None = None, options: dict | None = None
    ) -> tuple[np.ndarray, dict]:
        """Begins at 0."""
        self.rng, self.count = np.random.default_rng(seed), 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Sleeps up to 4 ms, and counts."""
        time.sleep(4e-3 * self.rng.random())
        self.count += 1
        return np.float32([self.count]), 1.0, False, False, {}


def of_vector(vector: gymnasium.vector.VectorEnv) -> Callable[[int], int]:
    """What makes about so many steps of a vector environment of gymnasium, and returns how many it made."""
    vector.reset(seed=0)
    actions = np.zeros(vector.num_envs, np.int64)

    def go(steps: int) -> int:
        turns = -(-steps // vector.num_envs)
        for _ in range(turns):
            vector.step(actions)
        return turns * vector.num_envs

    return go


def of_pool(pool: Hosted) -> Callable[[int], int]:
    """The same of a pool, in a jitted loop, which is compiled beforehand."""
    ids = jnp.asarray(pool.recv().ids)

    @jax.jit
    def turns(ids, count):
        return jax.lax.fori_loop(
            0, count, lambda _, ids: pool.exchange(jnp.zeros_like(ids), ids).ids, ids
        )

    def go(steps: int) -> int:
        nonlocal ids
        count = -(-steps // pool.batch)
        ids = jax.block_until_ready(turns(ids, count))
        return count * pool.batch

    go(1)
    return go


@dataclasses.dataclass(frozen=True)
class Config(small_commands.SmallConfig):
    """What it measures.

    Attributes:
      steps: Of all environments together, a round.
      rounds: In which each side is measured once; medians are told.
      num_envs: Environments, and threads of the pool.
    """

    steps: int = field(3000, AtLeast(1))
    rounds: int = field(5, AtLeast(1))
    num_envs: int = field(16, AtLeast(2))


def vectors_of_gymnasium(config: Config) -> dict[str, Any]:
    """Makes gymnasium's, whose processes are forked: that is safe before JAX has threads."""
    print(f"{2 * config.num_envs} processes and {config.num_envs} environments begin", flush=True)
    made = {"gymnasium SyncVectorEnv": gymnasium.vector.SyncVectorEnv([Sleeper] * config.num_envs)}
    for name, shared in (
        ("gymnasium AsyncVectorEnv", True),
        ("the same without shared memory", False),
    ):
        made[name] = gymnasium.vector.AsyncVectorEnv(
            [Sleeper] * config.num_envs, shared_memory=shared
        )
    return made


def execute(config: Config, vectors: dict[str, Any]) -> None:
    """Measures sleepers in a pool beside gymnasium's vector environments, in turn."""
    n = config.num_envs
    sizes = {
        "one thread": (1, n),
        f"{n} threads, all of them": (n, n),
        f"the first {n // 2} of them": (n, n // 2),
    }
    pools = {name: Hosted(Sleeper, n, threads, batch) for name, (threads, batch) in sizes.items()}
    sides = {name: of_vector(made) for name, made in vectors.items()}
    sides |= {name: of_pool(made) for name, made in pools.items()}
    rates = {name: [] for name in sides}
    for _ in range(config.rounds):
        for name, go in sides.items():
            began = time.perf_counter()
            rates[name].append(go(config.steps) / (time.perf_counter() - began))
    for name, found in rates.items():
        print(
            f"{name:32} {statistics.median(found):7,.0f} steps/s ({min(found):,.0f} to {max(found):,.0f})",
            flush=True,
        )
    for made in (*vectors.values(), *pools.values()):
        made.close()


if __name__ == "__main__":
    small_commands.launch("hosted", Config, execute, vectors_of_gymnasium)
