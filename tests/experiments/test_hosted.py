"""Environments on threads: each one's trajectory is its own serial replay, nothing is lost, and mistakes are told."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.hosted import Hosted, Ready, Sleeper, of_pool, of_vector
from jaxpar.types import UsageError


def made():
    return gymnasium.make("CartPole-v1", max_episode_steps=9)


def replayed(seed, actions):
    """Observations and rewards of one environment, alone."""
    env = made()
    rows = [(env.reset(seed=seed)[0], 0.0)]
    for action in actions:
        obs, reward, terminated, truncated, _ = env.step(action)
        rows.append((env.reset()[0] if terminated or truncated else obs, reward))
    return rows


@pytest.mark.parametrize("batch", [2, 5])
def test_each_trajectory_is_its_serial_replay(batch):
    pool, rng = Hosted(made, 5, 3, batch, seed=7), np.random.default_rng(0)
    seen, acted = {i: [] for i in range(5)}, {i: [] for i in range(5)}
    for _ in range(40):
        ready = pool.recv()
        actions = rng.integers(0, 2, batch)
        for row, i in enumerate(ready.ids.tolist()):
            seen[i].append((ready.obs[row], ready.reward[row]))
            acted[i].append(int(actions[row]))
        pool.send(actions, ready.ids)
    pool.close()
    assert sum(map(len, seen.values())) == 40 * batch
    for i in range(5):
        for (obs, reward), (want, earned) in zip(seen[i], replayed(7 + i, acted[i]), strict=False):
            np.testing.assert_array_equal(obs, want)
            assert reward == earned


def test_a_jitted_loop_drives_them_in_order():
    pool = Hosted(Sleeper, 4, 4, 4)
    first = pool.recv()

    @jax.jit
    def go(ids):
        def body(ids, _):
            ready = pool.exchange(jnp.zeros_like(ids), ids)
            return ready.ids, Ready(*ready)

        return jax.lax.scan(body, ids, None, 5)[1]

    told = go(first.ids)
    pool.close()
    np.testing.assert_array_equal(
        told.obs[..., 0], np.broadcast_to(np.arange(1.0, 6)[:, None], (5, 4))
    )
    assert {tuple(sorted(ids)) for ids in np.asarray(told.ids).tolist()} == {(0, 1, 2, 3)}


def test_mistakes_are_told():
    with pytest.raises(
        UsageError, match="batch=3 and num_threads=1 must be from 1 to the 2 environments"
    ):
        Hosted(made, 2, 1, 3)
    pool = Hosted(made, 2, 1, 2)
    with pytest.raises(UsageError, match="environment 1 is under way"):
        pool.send(np.zeros(1, int), np.array([1]))
    ready = pool.recv()
    with pytest.raises(UsageError, match="0 steps are under way, and recv waits for 2"):
        pool.recv()
    pool.send(np.array([5, 0]), ready.ids)
    with pytest.raises(AssertionError, match="invalid"):
        pool.recv()
    pool.close()


def test_what_is_measured_makes_the_steps_that_it_counts():
    vector, pool = gymnasium.vector.SyncVectorEnv([Sleeper] * 4), Hosted(Sleeper, 4, 2, 2)
    assert of_vector(vector)(6) == 8
    assert [env.unwrapped.count for env in vector.envs] == [2] * 4
    assert of_pool(pool)(5) == 6
    while pool.under_way:
        pool.batch = 1
        pool.recv()
    pool.close()
    assert sum(env.count for env in pool.envs) == 6 + 2  # one turn compiles
