"""Puzzles whose copies are split over eight devices: the same levels, steps and resets as on one.

Whole numbers to the bit. Floats within some units of the last place: where a device has fewer
copies, the compiler takes another form of a logarithm for them.
"""

import jax
import numpy as np
import pytest

from jaxpar import envs
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.rollout import init, random_policy, rollout

NAMES = (
    "Knapsack-20", "Countdown-3", "TSP-10", "CVRP-10", "JobShop-FT06", "BinPack-10", "2048-3x3", "RubiksCube-2",
    "SlidingTile-3x3", "Sokoban-6x6", "Connector-6x6-2p", "MineSweeper-6x6-Cells",
)  # fmt: skip


@pytest.mark.slow  # three minutes for all on a busy core
@pytest.mark.parametrize("name", NAMES)
def test_one_and_eight_devices_play_the_same_games(name):
    env, params = envs.make(name)

    def walked():
        start = init(jax.random.key(0), env, params, 16)
        return rollout(jax.random.key(1), start, env, params, random_policy(env), params, 24)

    one = walked()
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=4))):
        eight = walked()
    assert len(eight[1].reward.sharding.device_set) == 8
    for got, want in zip(*map(jax.tree.leaves, jax.device_get((eight, one))), strict=True):
        if np.issubdtype(want.dtype, np.inexact):
            np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(got, want)
