"""Lanes split over eight devices: the same bits as on one, and not a word between them."""

import chex
import jax
import jax.numpy as jnp
import pytest
from toys import Walk, linear

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.rollout import Chunked, GivenLevel, NextStep, Pool, begin, unroll
from jaxpar.types import UsageError

KEY = jax.random.key(2)
WEIGHTS = {"w": jnp.array([-0.5, 0.1, 0.1]), "b": jnp.array(0.1)}
ENV = Walk()
PARAMS = ENV.default_params


def value(params, obs, carry):
    return obs @ params["w"]


def walked(**options):
    lanes = begin(KEY, ENV, PARAMS, 32, 0)
    return unroll(KEY, lanes, ENV, PARAMS, linear, WEIGHTS, 15, value=value, **options)


CASES = {
    "chunked": (Chunked(3), "lane"),
    "next": (NextStep(Pool(5)), "batch"),
    "level": (GivenLevel(jnp.arange(32) % 5), "batch"),
}


@pytest.mark.parametrize(
    "case", ["chunked", pytest.param("next", marks=pytest.mark.slow), pytest.param("level", marks=pytest.mark.slow)]
)
def test_same_bits_on_one_and_on_eight_devices(case):
    reset, draw = CASES[case]
    one = walked(reset=reset, draw=draw)
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=4))):
        eight = walked(reset=reset, draw=draw)
    assert len(eight[1].reward.sharding.device_set) == 8
    assert one[1].start[1:].any()
    chex.assert_trees_all_equal(jax.device_get(eight), jax.device_get(one))


@pytest.mark.parametrize("draw", ["batch", pytest.param("lane", marks=pytest.mark.slow)])
def test_devices_do_not_talk(draw):
    with use_mesh(make_mesh()):
        lanes = begin(KEY, ENV, PARAMS, 32, 0)
        go = jax.jit(lambda key, lanes: unroll(key, lanes, ENV, PARAMS, linear, WEIGHTS, 15, value=value, draw=draw))
        text = go.lower(KEY, lanes).compile().as_text()
    assert "while" in text
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", "send(", "recv("):
        assert kind not in text


@pytest.mark.slow
def test_gradient_on_the_mesh():
    def total(weights):
        return unroll(KEY, begin(KEY, ENV, PARAMS, 8, 0), ENV, PARAMS, linear, weights, 6)[1].reward.sum()

    one = jax.jit(jax.grad(total))(WEIGHTS)
    with use_mesh(make_mesh()):
        eight = jax.jit(jax.grad(total))(WEIGHTS)
    chex.assert_trees_all_close(jax.device_get(eight), one, rtol=1e-5)


def test_lanes_that_do_not_divide_are_refused():
    with use_mesh(make_mesh()), pytest.raises(UsageError, match="num_lanes=12 does not divide over data=8 .* 8 or 16"):
        begin(KEY, ENV, PARAMS, 12)
    lanes = begin(KEY, ENV, PARAMS, 12, 0)
    with use_mesh(make_mesh()), pytest.raises(UsageError, match="num_lanes=12 does not divide"):
        unroll(KEY, lanes, ENV, PARAMS, linear, WEIGHTS, 3)
