"""LMUFormer's convolutions and spiking mlp against loops in NumPy, and networks of them streamed step by step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from by_hand import slopes
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.cells.conv_embedding import ConvEmbedding
from jaxpar.nn.cells.stack_network import StackNetwork
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.mixer import Context
from jaxpar.nn.mixers import Lmu, SpikingMlp
from jaxpar.nn.mixers.spikes import spike
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.stack import Stack
from jaxpar.types import UsageError

B, T, C, D, TAPS, CONVS = 2, 6, 2, 4, 3, 2
EXACT = EXACT_MATHS["float64"]


def drawn(leaves, *shapes, seed=0):
    rng = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda leaf: rng.standard_normal(leaf.shape), leaves, is_leaf=lambda x: isinstance(x, Leaf)
    )
    return params, *(rng.standard_normal(shape) for shape in shapes)


def weighed(run):
    def weighted(params, x):
        y = run(params, x)
        return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum(), y

    return jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))


def convolved(p, number, z, t):
    """Convolution `number` at step t, tap by tap."""
    w = p[f"w_{number}"]
    return sum(
        (w[TAPS - 1 - back].T @ z[t - back] for back in range(TAPS) if t >= back), np.zeros(D)
    )


def embedded(p, x, spiking):
    """The embedding of one row, a convolution and a step after the other."""
    z = x
    for number in range(1, CONVS + 1):
        new, v = [], np.zeros(D)
        for t in range(T):
            y = convolved(p, number, z, t) + p[f"b_{number}"]
            if spiking:
                v = 0.9 * v + y
                y = (v > 1).astype(float)
                v = v - y
            else:
                y = y * (y.real > 0)
            new.append(y)
        z = new
    return np.stack([z[t] + convolved(p, CONVS + 1, z, t) for t in range(T)])


def test_the_embedding_equals_its_loops_in_value_and_gradient(x64):
    embedding = ConvEmbedding(D, CONVS)
    params, x = drawn(embedding.leaves(C), (1, T, C))
    mix = np.cos(np.arange(T * D)).reshape(T, D)
    (_, got), grads = weighed(lambda params, x: embedding.apply(params, x)[0])(params, x)
    assert_close(got[0], embedded(params, x[0], False), EXACT)
    want = slopes(lambda both: (embedded(both[0], both[1][0], False) * mix).sum(), (params, x))
    assert_close(grads, want, EXACT)


@pytest.mark.parametrize("spiking", [False, True])
def test_the_embedding_goes_on_where_it_was(spiking, x64):
    embedding = ConvEmbedding(D, CONVS, spiking=spiking)
    params, x = drawn(embedding.leaves(C), (B, T, C), seed=1)
    want = np.stack([embedded(params, row, spiking) for row in x])
    run = jit(lambda params, x, state: embedding.apply(params, x, state))
    state, parts = embedding.init_state(B, C, x.dtype), []
    for t in range(T):
        y, state = run(params, x[:, t : t + 1], state)
        parts.append(y)
    assert_close(jnp.concatenate(parts, 1), want, EXACT)
    assert len(state.potentials) == CONVS * spiking and 0.1 < np.mean(want != 0)


def test_a_spiking_mlp_is_its_loop_in_value_and_gradient(x64):
    """Documents begin within rows, rows end early, and what was before goes on."""
    mlp, starts, valid = SpikingMlp(5, beta=0.8), np.zeros((B, T), bool), np.array([T, 4])
    starts[0, 3] = starts[1, 1] = True
    params, x, before = drawn(mlp.leaves(D, 1.0, 1.0), (B, T, D), (B, 5))
    context = Context(
        jnp.zeros((B, T), jnp.int32), starts=jnp.asarray(starts), valid=jnp.asarray(valid)
    )

    def loop(params, x):
        p, v, ys, states = params["mixer"], jnp.asarray(before), [], [before]
        for t in range(T):
            v = 0.8 * jnp.where(starts[:, t, None], 0, v) + x[:, t] @ p["w_up"] + p["b_up"][None]
            s = spike(v)
            v = v - s
            ys.append(s @ p["w_down"])
            states.append(v)
        return jnp.stack(ys, 1), jnp.stack([states[n][row] for row, n in enumerate(valid)])

    def both(run):
        return weighed(lambda params, x: jnp.concatenate([y.ravel() for y in run(params, x)]))(
            params, x
        )

    got = both(lambda params, x: mlp.apply(params, x, before, context)[:2])
    assert_close(got, both(loop), EXACT)
    assert mlp.apply(params, x, None, context)[1] is None


def network(spiking):
    lmu = Lmu(6, 2, 4, 5.0, spiking=spiking)
    mixer, mlp = ((lmu, SpikingMlp(6)), None) if spiking else (lmu, Mlp(6, "gelu"))
    stack = Stack(2, D, mixer, mlp, init_std=0.5, dtype="float64")
    return StackNetwork(stack, C, 3, embedding=ConvEmbedding(D, CONVS, spiking=spiking))


@pytest.mark.parametrize("spiking", [False, True])
def test_a_network_streams_with_the_values_and_gradients_of_the_whole(spiking, x64):
    net = network(spiking)
    params, x = drawn(net.leaves(), (1, 3, C))

    def stream(params, x):
        first, cache, _ = net.apply(params, x[:, :2])
        return jnp.concatenate([first, net.apply(params, x[:, 2:], cache)[0]], 1)

    got = weighed(stream)(params, x)
    assert_close(got, weighed(lambda params, x: net.apply(params, x)[0])(params, x), 1e-10)
    if not spiking:  # what is trained is that too
        batch = {"inputs": x, "targets": np.zeros((1, 3), int), "weights": np.ones((1, 3))}
        assert_close(
            jit(net.loss)(params, batch)[0], -jax.nn.log_softmax(got[0][1])[..., 0].mean(), EXACT
        )


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="embedding.size=5 must be the stack's 4"):
        StackNetwork(Stack(1, 4, Lmu(4), Mlp(4)), 1, 2, embedding=ConvEmbedding(5))
    mlp, x = SpikingMlp(4), jnp.ones((B, 8, D))
    with pytest.raises(UsageError, match="a spiking mlp cannot honour visible"):
        mlp.apply(
            {}, x, None, Context(jnp.zeros((B, 8), jnp.int32), visible=jnp.ones((B, 8, 8), bool))
        )
    with (
        use_mesh(make_mesh(MeshSpec(context=2, data=4))),
        pytest.raises(UsageError, match="give mesh.context=1"),
    ):
        mlp.apply({}, x, None, Context(jnp.zeros((B, 8), jnp.int32)))
