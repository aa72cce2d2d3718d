import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from forks import mixer
from tolerance import EXACT_MATHS, assert_close

from jaxpar.rl.value_decomposition import init_decomposition, joint_value

AGENTS, STATE, WIDTH = 3, 5, 4


def lively(seed=0):
    params = init_decomposition(jax.random.key(seed), "qmix", STATE, AGENTS, WIDTH)
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(x + 0.5 * rng.standard_normal(x.shape), x.dtype), params
    )


@pytest.mark.parametrize("kind", ["vdn", "qmix"])
def test_a_mixer_equals_its_equations(kind):
    rng = np.random.default_rng(0)
    params, state, q = lively(), rng.standard_normal((6, STATE)), rng.standard_normal((6, AGENTS))
    state, q = jnp.asarray(state, jnp.float32), jnp.asarray(q, jnp.float32)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    want = [
        mixer({"decomposition": wide}, kind, np.float64(s), np.float64(x))
        for s, x in zip(state, q, strict=True)
    ]
    assert_close(joint_value(params, kind, state, q), np.asarray(want), 5 * EXACT_MATHS["float32"])


def test_qmix_rises_with_every_agent_and_so_each_may_choose_for_itself():
    rng = np.random.default_rng(1)
    state = jnp.asarray(rng.standard_normal((20, STATE)), jnp.float32)
    table = jnp.asarray(
        rng.standard_normal((20, AGENTS, 3)), jnp.float32
    )  # values of three actions
    params = lively(1)
    slope = jit(jax.grad(lambda q: jnp.sum(joint_value(params, "qmix", state, q))))(table[..., 0])
    assert (slope > 0).all() and float(slope.std()) > 0.01
    joint = list(itertools.product(range(3), repeat=AGENTS))
    one = jax.vmap(lambda a: joint_value(params, "qmix", state, table[:, jnp.arange(AGENTS), a]))
    totals = jit(one)(jnp.array(joint))
    together = np.array(joint)[np.asarray(totals).argmax(0)]
    np.testing.assert_array_equal(together, np.asarray(table).argmax(-1))


def test_qmix_with_constant_weights_is_the_sum():
    params = jax.tree.map(jnp.zeros_like, lively())
    params["w1"]["bias"] = -jnp.ones(AGENTS * WIDTH)  # its absolute value counts
    params["b1"]["bias"] = jnp.full(WIDTH, 50.0)  # where elu is the identity
    params["w2"]["bias"] = jnp.full(WIDTH, 1 / WIDTH)
    params["v2"]["bias"] = jnp.full(1, -50.0)
    rng = np.random.default_rng(2)
    state, q = (jnp.asarray(rng.standard_normal((8, n)), jnp.float32) for n in (STATE, AGENTS))
    assert_close(
        joint_value(params, "qmix", state, q), joint_value({}, "vdn", state, q), 1e-5
    )  # 50 is taken off again


def test_only_qmix_has_weights():
    assert init_decomposition(jax.random.key(0), "vdn", STATE, AGENTS, WIDTH) == {}
