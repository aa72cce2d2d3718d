"""Puzzles whose copies are split over eight devices: the same bits as on one, levels, steps and resets."""

import chex
import jax
import pytest

import envs
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.rollout import init, random_policy, rollout

NAMES = (
    "Knapsack-20", "Countdown-3", "TSP-10", "CVRP-10", "JobShop-FT06", "BinPack-10", "2048-3x3", "RubiksCube-2",
    "SlidingTile-3x3", "Sokoban-6x6", "Connector-6x6-2p", "MineSweeper-6x6-Cells",
)  # fmt: skip


@pytest.mark.slow  # a minute for all
@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_on_one_and_on_eight_devices(name):
    env, params = envs.make(name)

    def walked():
        start = init(jax.random.key(0), env, params, 16)
        return rollout(jax.random.key(1), start, env, params, random_policy(env), params, 24)

    one = walked()
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=4))):
        eight = walked()
    assert len(eight[1].reward.sharding.device_set) == 8
    chex.assert_trees_all_equal(jax.device_get(eight), jax.device_get(one))
