"""Environments in Python, many at once on threads: the first that are ready make the next batch, under jit too.

    python -m experiments.hosted                      # two CPU cores, ten seconds

The pool of EnvPool (Weng et al. 2022, arXiv:2206.10558) for anything with Gymnasium's `reset(seed=)` and
`step(action)`: `send` starts steps, `recv` gives the first M that are done. What an environment does depends on its
seed and its own actions alone, so its trajectory is that of a serial replay, whatever the order in which steps end.
"""

import argparse
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from jaxpar.types import UsageError


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

    def __init__(self, make: Callable[[], Any], num_envs: int, num_threads: int, batch: int, seed: int = 0):
        if not 1 <= batch <= num_envs or not 1 <= num_threads <= num_envs:
            raise UsageError(
                f"batch={batch} and num_threads={num_threads} must be from 1 to the {num_envs} environments."
            )
        self.envs, self.batch = [make() for _ in range(num_envs)], batch
        self.asked, self.done, self.under_way = queue.SimpleQueue(), queue.SimpleQueue(), set(range(num_envs))
        self.threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
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
                raise UsageError(f"environment {i} is under way; send it an action when recv has given its result.")
            self.under_way.add(i)
            self.asked.put((i, action, None))

    def recv(self) -> Ready:
        """The first M results that are there; of the first call, first observations."""
        if len(self.under_way) < self.batch:
            raise UsageError(f"{len(self.under_way)} steps are under way, and recv waits for {self.batch}; send first.")
        rows = [self.done.get() for _ in range(self.batch)]
        for row in rows:
            self.under_way.discard(row[0])
            if len(row) == 2:
                raise row[1]
        ids, obs, reward, terminated, truncated = zip(*rows, strict=True)
        return Ready(np.int32(ids), np.stack(obs), np.float32(reward), np.array(terminated), np.array(truncated))

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


class Sleeper:
    """A counter that sleeps for random times; what `main` measures."""

    observation_space = type("Space", (), {"shape": (1,), "dtype": np.float32})

    def reset(self, seed: int | None = None) -> tuple[np.ndarray, dict]:
        """Begins at 0."""
        self.rng, self.count = np.random.default_rng(seed), 0
        return np.zeros(1, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Sleeps up to 4 ms, and counts."""
        time.sleep(4e-3 * self.rng.random())
        self.count += 1
        return np.float32([self.count]), 1.0, False, False, {}


def rate(num_envs: int, num_threads: int, batch: int, steps: int) -> float:
    """Steps a second of sleepers, in a jitted loop."""
    pool = Hosted(Sleeper, num_envs, num_threads, batch)
    first = pool.recv()

    @jax.jit
    def go(ids):
        return jax.lax.scan(lambda ids, _: (pool.exchange(jnp.zeros_like(ids), ids).ids, None), ids, None, steps)[0]

    began = time.perf_counter()
    last = jax.block_until_ready(go(first.ids))
    seconds = time.perf_counter() - began
    assert last.shape == (batch,)
    pool.close()
    return steps * batch / seconds


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    flags = parser.parse_args()
    for threads, batch, name in ((1, 16, "one thread"), (16, 16, "16 threads, all of them"), (16, 8, "the first 8")):
        print(f"{name:24} {rate(16, threads, batch, flags.steps * 8 // batch):,.0f} steps/s", flush=True)
