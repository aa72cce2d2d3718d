"""A convolution of boards is the library's own, in value and gradient; what is no board is refused in a sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

import envs
from jaxpar.env import Box, Discrete
from jaxpar.rl import ActorCritic, Network, Ppo, Pqn
from jaxpar.rl.board import BoardConv, convolved
from jaxpar.types import UsageError


def reference(x, kernel):
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.parametrize("height, width, channels", [(10, 10, 4), (3, 5, 1)])
def test_slices_equal_the_convolution_in_value_and_gradient(x64, height, width, channels):
    drawn = np.random.default_rng(0)
    x, kernel = (
        drawn.standard_normal((2, height, width, channels)),
        drawn.standard_normal((3, 3, channels, 5)),
    )
    pull = drawn.standard_normal((2, height - 2, width - 2, 5))

    def both(form):
        value, back = jax.vjp(form, jnp.asarray(x), jnp.asarray(kernel))
        return {"value": value, "gradients": back(jnp.asarray(pull))}

    got, want = jit(lambda: both(convolved))(), jit(lambda: both(reference))()
    assert got["value"].dtype == jnp.float64 and got["value"].shape == pull.shape
    assert_close(got, want, EXACT_MATHS["float64"])


def test_a_layer_adds_its_bias_to_each_channel():
    layer = BoardConv(3, jax.nn.initializers.lecun_normal())
    x = jax.random.normal(jax.random.key(0), (2, 4, 5, 2))
    params, apply = jit(layer.init)(jax.random.key(1), x), jit(layer.apply)
    bias = jnp.array([1.0, -2.0, 0.5])
    plain, moved = apply(params, x), apply({"params": params["params"] | {"bias": bias}}, x)
    assert plain.shape == (2, 2, 3, 3)
    np.testing.assert_allclose(moved - plain, jnp.broadcast_to(bias, plain.shape), atol=1e-6)


def test_a_network_reads_a_shift_of_the_board_with_the_same_weights():
    network = Network(conv=(4, 6), hidden=(), layer_norm=True, activation="relu")
    params = jit(lambda key: network.init(key, (7, 6, 2), {"q": (3, 1.0)}))(jax.random.key(0))
    assert params["heads"]["q"]["params"]["out"]["kernel"].shape == (3 * 2 * 6, 3)
    board = jnp.zeros((2, 1, 7, 6, 2)).at[0, 0, 2, 2, 0].set(1.0).at[1, 0, 3, 2, 0].set(1.0)
    encoded = jit(network._encoder().apply)(params["encoder"], board).reshape(2, 3, 2, 6)
    np.testing.assert_allclose(encoded[0, :-1], encoded[1, 1:], atol=1e-6)
    assert np.abs(np.asarray(encoded[0] - encoded[1])).max() > 1e-3


@pytest.mark.parametrize(
    "name, conv, words",
    [
        (
            "CartPole-v1",
            (16,),
            r"conv=\[16\] reads boards .* at least 3 x 3; this observation is \[4\]",
        ),
        ("XLand-R1-5x5-Pick", (16,), r"this observation is \[\d+\]: leave conv empty"),
        ("Breakout-MinAtar", (8,) * 5, r"at least 11 x 11; this observation is \[10, 10, 4\]"),
    ],
)
def test_what_is_no_board_is_refused(name, conv, words):
    env, _ = envs.make(name)
    for learner in (Ppo, Pqn):
        with pytest.raises(UsageError, match=words):
            learner(env, Network(conv=conv)).init(jax.random.key(0), None)


class Boards:
    """Two agents, each of whom sees a board of their own."""

    num_agents = 2
    default_params = None

    def observation_space(self, params):
        return Box(0.0, 1.0, (2, 4, 4, 1))

    def action_space(self, params):
        return Discrete(3, (2,))


def test_a_central_critic_reads_boards_flat():
    agent = ActorCritic(Boards(), Network(conv=(3,), hidden=(4,)), central=True)
    weights = jit(agent.init)(jax.random.key(0))
    assert weights["critic"]["encoder"] == {}
    obs = jax.random.uniform(jax.random.key(1), (1, 1, 2, 4, 4, 1))
    carry = jax.tree.map(lambda c: c[None], agent.first_carry())
    out = agent.apply(weights, obs, jnp.zeros((1, 1), bool), carry)
    assert out.value.shape == (1, 1, 2) and out.policy.shape == (1, 1, 2, 3)
