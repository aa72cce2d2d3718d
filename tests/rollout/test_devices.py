"""EnvState split over eight devices: the same bits as on one, and not a word between them."""

import chex
import jax
import jax.numpy as jnp
import pytest
from compiled import transfers_in
from toys import Walk, linear

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.rollout import Chunked, GivenLevel, NextStep, Pool, RolloutOptions, init, rollout
from jaxpar.types import UsageError

KEY = jax.random.key(2)
WEIGHTS = {"w": jnp.array([-0.5, 0.1, 0.1]), "b": jnp.array(0.1)}
ENV = Walk()
PARAMS = ENV.default_params


def value(params, obs, carry):
    return obs @ params["w"]


def walked(**options):
    env_state = init(KEY, ENV, PARAMS, 32, 0)
    options = RolloutOptions(value=value, **options)
    return rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 15, options)


CASES = {
    "chunked": (Chunked(3), "env"),
    "next": (NextStep(Pool(5)), "batch"),
    "level": (GivenLevel(jnp.arange(32) % 5), "batch"),
}


@pytest.mark.parametrize(
    "case",
    [
        "chunked",
        pytest.param("next", marks=pytest.mark.slow),
        pytest.param("level", marks=pytest.mark.slow),
    ],
)
def test_same_bits_on_one_and_on_eight_devices(case):
    reset, prng = CASES[case]
    one = walked(reset=reset, prng=prng)
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=4))):
        eight = walked(reset=reset, prng=prng)
    assert len(eight[1].reward.sharding.device_set) == 8
    assert one[1].start[1:].any()
    chex.assert_trees_all_equal(jax.device_get(eight), jax.device_get(one))


@pytest.mark.parametrize("prng", ["batch", pytest.param("env", marks=pytest.mark.slow)])
def test_devices_do_not_talk(prng):
    with use_mesh(make_mesh()):
        env_state = init(KEY, ENV, PARAMS, 32, 0)
        options = RolloutOptions(value=value, prng=prng)
        go = jax.jit(
            lambda key, env_state: rollout(
                key, env_state, ENV, PARAMS, linear, WEIGHTS, 15, options
            )
        )
        text = go.lower(KEY, env_state).compile().as_text()
    assert "while" in text
    assert not transfers_in(text)


@pytest.mark.slow
def test_gradient_on_the_mesh():
    def total(weights):
        return rollout(KEY, init(KEY, ENV, PARAMS, 8, 0), ENV, PARAMS, linear, weights, 6)[
            1
        ].reward.sum()

    one = jax.jit(jax.grad(total))(WEIGHTS)
    with use_mesh(make_mesh()):
        eight = jax.jit(jax.grad(total))(WEIGHTS)
    chex.assert_trees_all_close(jax.device_get(eight), one, rtol=1e-5)


def test_environments_that_do_not_divide_are_refused():
    with (
        use_mesh(make_mesh()),
        pytest.raises(UsageError, match="num_envs=12 does not divide over data=8 .* 8 or 16"),
    ):
        init(KEY, ENV, PARAMS, 12)
    env_state = init(KEY, ENV, PARAMS, 12, 0)
    with use_mesh(make_mesh()), pytest.raises(UsageError, match="num_envs=12 does not divide"):
        rollout(KEY, env_state, ENV, PARAMS, linear, WEIGHTS, 3)
