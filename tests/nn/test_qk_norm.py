"""Norms of queries and keys: those of the formula, also joined for decoding and with a cache."""

import jax
import jax.numpy as jnp
from fast import jit
from test_for_decoding import drawn, in_steps
from tolerance import EXACT_MATHS, assert_close

from jaxpar.nn.attention import Attention
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.norm import Norm
from jaxpar.nn.position import Rope
from jaxpar.nn.stack import Stack

H, G, K = 4, 2, 4
EPS = 0.1  # large, so that another one would show
# With this theta frequencies are powers of two: `Rope` rounds others to float32.
STACK = Stack(
    2,
    8,
    Attention(H, G, K, positions=Rope(4.0), qk_norm=Norm("rms", EPS)),
    Mlp(12),
    dtype="float64",
)


def formula(params, x):
    """Two layers, a head at a time."""

    def rms(x, eps, scale):
        return scale.reshape(1, 1, -1) * x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)

    def rotated(x):
        t, freq = jnp.arange(x.shape[1])[:, None], 4.0 ** (-jnp.arange(K // 2)[None] / (K // 2))
        a, b = x[..., : K // 2], x[..., K // 2 :]
        c, s = jnp.cos(t * freq)[None], jnp.sin(t * freq)[None]
        return jnp.concatenate([a * c - b * s, b * c + a * s], -1)

    seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    for layer in params["layers"]:
        y = rms(x, 1e-5, layer["attn_norm"]["scale"])
        for head in range(H):
            q = rotated(rms(y @ layer["wq"][:, head], EPS, layer["q_norm"]["scale"]))
            k = rotated(rms(y @ layer["wk"][:, head * G // H], EPS, layer["k_norm"]["scale"]))
            scores = jnp.where(seen[None], q @ k.swapaxes(1, 2) / 2, -jnp.inf)
            x = x + jax.nn.softmax(scores) @ (y @ layer["wv"][:, head * G // H]) @ layer["wo"][head]
        y = rms(x, 1e-5, layer["mlp_norm"]["scale"])
        x = x + (jax.nn.silu(y @ layer["w_gate"]) * (y @ layer["w_up"])) @ layer["w_down"]
    return rms(x, 1e-5, params["final_norm"]["scale"])


def test_value_and_gradients_are_those_of_the_formula(x64):
    params, x = drawn(STACK)

    def run(form):
        return jit(jax.value_and_grad(lambda p, x: jnp.sin(form(p, x)).sum(), (0, 1)))(params, x)

    got = run(lambda params, x: STACK.apply(params, x)[0])
    assert set(got[1][0]["layers"][0]) >= {"q_norm", "k_norm"}
    # Two layers' sums in another order, and two more divisions by roots each.
    assert_close(got, run(formula), 10 * EXACT_MATHS["float64"])


def test_steps_and_joined_products_are_the_same_function(x64):
    params, x = drawn(STACK)
    steps = in_steps(STACK)
    whole = jit(lambda params, x: STACK.apply(params, x)[0])(params, x)
    assert_close(steps(params, x), whole, EXACT_MATHS["float64"])
    laid = STACK.for_decoding(params)
    assert "wqkv" in laid["layers"][0]
    assert_close(steps(laid, x), whole, EXACT_MATHS["float64"])
