"""The block-recurrent layer: its equations token by token, decoding, what it sees, and its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.mixer import Context, TokenInfo
from jaxpar.nn.mixers import BlockRecurrent
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.stack import Stack
from jaxpar.types import UsageError

D, W, S, T = 6, 3, 2, 10
EXACT = 1e-10  # float64, of sums in another order
STARTS = np.zeros((1, T), bool)
STARTS[0, [4, 6]] = (
    True  # one begins within a window, where a second one ends, and one with a window
)


def layer(gate="fixed", **changes):
    return BlockRecurrent(
        **dict(num_heads=2, head_dim=3, window=W, num_states=S, gate=gate) | changes
    )


def stack_of(mixer, dtype="float64"):
    return Stack(1, D, mixer, Mlp(4), dtype=dtype)


def params_of(mixer, dtype=np.float64):
    rng = np.random.default_rng(0)
    leaves = jax.eval_shape(lambda: stack_of(mixer).init(jax.random.key(0)))
    return jax.tree.map(
        lambda leaf: jnp.asarray(0.6 * rng.standard_normal(leaf.shape), dtype), leaves
    )


def drawn(length=T, rows=1, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, length, D))


def softmax(scores, values):
    xp = jnp if isinstance(scores, jax.Array) else np
    weights = xp.exp(scores - scores.max())
    return (weights / weights.sum()) @ values


def plain(mixer, p, x, starts, xp=jnp):
    """One row, token by token and head by head, by JAX or NumPy: lists of what is seen in place of masks."""
    states, zero, out = xp.zeros((S, D)), xp.zeros((S, D)), []
    first, root, heads, size = 0, mixer.head_dim**0.5, range(mixer.num_heads), mixer.window

    def sigmoid(x):
        return 1 / (1 + xp.exp(-x))

    def of(vector, name, h):
        return vector @ p[name][:, h]

    def shown(c):
        return c / xp.sqrt((c**2).mean(1, keepdims=True) + 1e-5) + p["ids"]

    for t in range(len(x)):
        first = t if starts[t] else first
        window = t // size
        tokens = [s for s in range(t + 1) if s >= first and s // size >= window - 1]
        s, y = shown(zero if first >= window * size else states), 0.0
        for h in heads:
            slope = 2.0 ** (-8 * (h + 1) / mixer.num_heads)
            scores = xp.stack(
                [of(x[t], "wq", h) @ of(x[j], "wk", h) / root - slope * (t - j) for j in tokens]
            )
            y = y + softmax(scores, xp.stack([of(x[j], "wv", h) for j in tokens])) @ p["wo"][0, h]
            scores = xp.stack([of(x[t], "wq_states", h) @ of(c, "swk", h) / root for c in s])
            y = y + softmax(scores, of(s, "swv", h)) @ p["wo"][1, h]
        out.append(y)
        if t % size == size - 1:
            states = zero if first >= window * size else states
            tokens = x[max(first, window * size) : t + 1]
            s, z = shown(states), [p["bz"]] * S
            for h in heads:
                for i in range(S):
                    own = softmax(of(s[i], "swq", h) @ of(s, "swk", h).T / root, of(s, "swv", h))
                    scores = of(s[i], "swq_tokens", h) @ of(tokens, "wk", h).T / root
                    other = softmax(scores, of(tokens, "wv", h))
                    z[i] = (
                        z[i]
                        + xp.tensordot(own, p["wz"][0, h], 1)
                        + xp.tensordot(other, p["wz"][1, h], 1)
                    )
            z = xp.stack(z)
            if mixer.gate == "fixed":
                share = sigmoid(p["gate"])[None]
                states = share * states + (1 - share) * z[:, 0]
            else:
                states = sigmoid(z[:, 1] + 1) * states + sigmoid(z[:, 2] - 1) * xp.tanh(z[:, 0])
    return xp.stack(out)


def value_and_gradient(mixer, starts):
    """Value and gradients of the layer by parameters and inputs, jitted; and the arguments."""
    x, mix = drawn(starts.shape[1]), drawn(starts.shape[1], seed=2)
    params = jax.tree.map(lambda x: x[0], params_of(mixer)["layers"]["mixer"])

    def whole(p, x):
        context = stack_of(mixer).context(x, TokenInfo(starts=jnp.asarray(starts)))
        return (mixer.apply({"mixer": p}, x, None, context)[0] * mix).sum()

    return jit(jax.value_and_grad(whole, (0, 1)))(params, x), (params, x), mix


@pytest.mark.parametrize("gate", ["fixed", pytest.param("lstm", marks=pytest.mark.slow)])  # 5 s
def test_the_layer_equals_its_equations_in_value_and_gradient(gate, x64):
    """The equations are NumPy's; of the gradient the slope along three directions, by differences of the equations."""
    mixer = layer(gate)
    (value, grads), args, mix = value_and_gradient(mixer, STARTS)
    args, rng = jax.tree.map(np.asarray, args), np.random.default_rng(3)

    def total(args):
        return float((plain(mixer, args[0], args[1][0], STARTS[0], np) * mix[0]).sum())

    np.testing.assert_allclose(value, total(args), rtol=EXACT)
    for _ in range(3):
        way = jax.tree.map(lambda x: rng.standard_normal(x.shape), args)
        ends = [
            total(jax.tree.map(lambda x, w, by=by: x + by * w, args, way)) for by in (-1e-5, 1e-5)
        ]
        slope = sum(jax.tree.leaves(jax.tree.map(lambda g, w: float((g * w).sum()), grads, way)))
        np.testing.assert_allclose(slope, (ends[1] - ends[0]) / 2e-5, rtol=1e-7)


@pytest.mark.slow  # 20 s each: the plain form is unrolled
@pytest.mark.parametrize("gate", ["fixed", "lstm"])
def test_every_number_of_the_gradient_is_that_of_the_equations(gate, x64):
    mixer = layer(gate)
    got, args, mix = value_and_gradient(mixer, STARTS)
    want = jit(
        jax.value_and_grad(lambda p, x: (plain(mixer, p, x[0], STARTS[0]) * mix[0]).sum(), (0, 1))
    )(*args)
    assert_close(got, want, EXACT)


@pytest.mark.parametrize(
    "gate, dtype, tolerance",
    [("fixed", "float64", EXACT), pytest.param("lstm", "float64", EXACT, marks=pytest.mark.slow),
     pytest.param("fixed", "float32", 1e-4, marks=pytest.mark.slow)],
)  # fmt: skip
def test_decoding_token_by_token_equals_training_over_windows(gate, dtype, tolerance, x64):
    """Two rows, of which one is a token behind: their windows end at different steps."""
    mixer = layer(gate)
    stack, params, x = (
        stack_of(mixer, dtype),
        params_of(mixer, dtype),
        drawn(T + 1, 2).astype(dtype),
    )
    starts = np.concatenate([STARTS[:, :1] & False, STARTS], 1).repeat(2, 0)
    want = jit(lambda p, x: stack.apply(p, x, TokenInfo(starts=starts))[0])(params, x)
    step = jit(
        lambda p, x, starts, cache, valid: stack.apply(
            p, x, TokenInfo(starts=starts, valid=valid), cache=cache
        )[:2]
    )
    cache, place, got = stack.init_cache(2, 4), np.zeros(2, int), np.zeros_like(want)
    for count in range(T + 2):
        valid = np.array([count <= T, count > 0], np.int32)
        at = np.minimum(place, T)
        y, cache = step(params, x[[0, 1], at][:, None], starts[[0, 1], at][:, None], cache, valid)
        for row in range(2):
            if valid[row]:
                got[row, at[row]] = y[row, 0]
        place = place + valid
    assert_close(got, want, tolerance)


def test_what_is_far_is_seen_through_states_alone(x64):
    """An edit of the first token changes nothing before it, and what is over two windows later only by the states."""
    x = drawn(12)
    for states in (0, S):
        mixer = layer(num_states=states)
        stack, params = stack_of(mixer), params_of(mixer)
        apply = jit(lambda p, x, stack=stack: stack.apply(p, x)[0])
        moved = [np.asarray(apply(params, x + edit) - apply(params, x)) for edit in _edits(x)]
        for t, change in zip((0, 5), moved, strict=True):
            changed = np.abs(change[0]).max(1) > 1e-12
            np.testing.assert_array_equal(changed[:t], False)
            end = (t // W + 2) * W
            np.testing.assert_array_equal(changed[t:end], True)
            np.testing.assert_array_equal(changed[end:], bool(states))


def _edits(x):
    for t in (0, 5):
        edit = np.zeros_like(x)
        edit[:, t] = 1
        yield edit


@pytest.mark.parametrize(
    "of", [lambda f: f, pytest.param(jax.grad, marks=pytest.mark.slow)], ids=["value", "gradient"]
)
def test_memory_is_linear_in_the_length(of):
    """Temporary memory is that of T (2 W + S) scores a head, times 20, and far below that of T^2."""
    mixer, length = layer(window=8), 2048
    params = jax.eval_shape(
        lambda: jax.tree.map(lambda x: x[0], params_of(mixer, np.float32)["layers"])
    )
    x, context = (
        jax.ShapeDtypeStruct((1, length, D), np.float32),
        Context(jnp.zeros((1, length), jnp.int32)),
    )
    run = jit(of(lambda p, x: mixer.apply(p, x, None, context)[0].sum())).lower(params, x).compile()
    scores = 4 * mixer.num_heads * length * (2 * mixer.window + S)
    assert run.memory_analysis().temp_size_in_bytes < min(20 * scores, 4 * length**2)


def test_what_cannot_be_is_refused():
    stack = stack_of(layer(), "float32")
    x, params = jnp.ones((8, 4, D)), params_of(layer(), np.float32)
    with pytest.raises(UsageError, match="a block-recurrent mixer cannot honour visible"):
        stack.apply(params, x, TokenInfo(visible=jnp.ones((8, 4, 4), bool)))
    with (
        use_mesh(make_mesh(MeshSpec(context=2, data=4))),
        pytest.raises(UsageError, match="give mesh.context=1"),
    ):
        layer().apply({"mixer": {}}, x, None, Context(jnp.zeros((8, 4), jnp.int32)))
    with pytest.raises(UsageError, match="gate='gru' is unknown; legal are fixed, lstm"):
        layer("gru")
