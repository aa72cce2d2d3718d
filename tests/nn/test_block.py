"""Norms, rotary positions and whole layers against loops over their formulas."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit, noisy_params
from lm_configs import llama, lm_config
from tolerance import EXACT_MATHS, assert_close

from jaxpar.nn.auxiliary import NOTHING
from jaxpar.nn.block import ResidualBlock, dropout
from jaxpar.nn.mixer import Context
from jaxpar.nn.norm import Norm
from jaxpar.nn.position import Rope

B, T, D = 2, 6, 16
BASE = dict(
    vocab_size=8, num_layers=1, embed_dim=D, num_heads=4, mlp_dim=24, init_std=0.3, dtype="float32"
)
TOLERANCE = EXACT_MATHS["float32"]


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ---------------------------------------------------------------- slow references, in double precision


def slow_norm(x, weights, kind, eps):
    out = np.zeros(x.shape)
    for place in np.ndindex(x.shape[:-1]):
        row = [float(value) for value in x[place]]
        mean = 0.0
        if kind == "layer":
            mean = sum(row) / len(row)
        variance = sum((value - mean) ** 2 for value in row) / len(row)
        for i, value in enumerate(row):
            bias = float(weights["bias"][i]) if "bias" in weights else 0.0
            out[place][i] = (value - mean) / math.sqrt(variance + eps) * float(
                weights["scale"][i]
            ) + bias
    return out


def slow_frequency(i, config):
    """Llama 3.1's rule as published: by the wavelength, in three cases."""
    frequency = config.rope.theta ** (-2 * i / config.attention.head_dim)
    if config.rope.factor == 1.0:
        return frequency
    wavelength = 2 * math.pi / frequency
    longest_kept = config.rope.original_len / config.rope.high_freq_factor
    shortest_divided = config.rope.original_len / config.rope.low_freq_factor
    if wavelength < longest_kept:
        return frequency
    if wavelength > shortest_divided:
        return frequency / config.rope.factor
    smooth = config.rope.original_len / wavelength - config.rope.low_freq_factor
    smooth /= config.rope.high_freq_factor - config.rope.low_freq_factor
    return (1 - smooth) * frequency / config.rope.factor + smooth * frequency


def slow_rotate(x, positions, config):
    out = np.zeros(x.shape)
    half = x.shape[-1] // 2
    for b, t, h, i in np.ndindex(*x.shape[:-1], half):
        turned = complex(x[b, t, h, i], x[b, t, h, i + half])
        turned *= np.exp(1j * int(positions[b, t]) * slow_frequency(i, config))
        out[b, t, h, i], out[b, t, h, i + half] = turned.real, turned.imag
    return out


def slow_attention(q, k, v, segments=None):
    out = np.zeros(q.shape)
    groups = q.shape[2] // k.shape[2]
    for b, t, h in np.ndindex(q.shape[:3]):
        seen = [s for s in range(t + 1) if segments is None or segments[b, s] == segments[b, t]]
        scores = [float(q[b, t, h] @ k[b, s, h // groups]) / math.sqrt(q.shape[-1]) for s in seen]
        weights = [math.exp(score - max(scores)) for score in scores]
        for s, weight in zip(seen, weights, strict=True):
            out[b, t, h] += weight / sum(weights) * v[b, s, h // groups]
    return out


SLOW_ACTIVATIONS = {
    "swiglu": lambda z: z / (1 + math.exp(-z)),
    "gelu": lambda z: 0.5 * z * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "gelu_exact": lambda z: 0.5 * z * (1 + math.erf(z / math.sqrt(2))),
}


def slow_block(x, layer, config, positions, segments):
    def project(x, weight, bias=0.0):
        shape = weight.shape[1:]
        return (x @ weight.reshape(D, -1)).reshape(*x.shape[:-1], *shape) + bias

    x, layer = np.asarray(x, np.float64), jax.tree.map(lambda w: np.asarray(w, np.float64), layer)
    h = slow_norm(x, layer["attn_norm"], config.norm.kind, config.norm.eps)
    q, k, v = (project(h, layer["w" + name], layer.get("b" + name, 0.0)) for name in "qkv")
    if config.positions == "rope":
        q, k = slow_rotate(q, positions, config), slow_rotate(k, positions, config)
    mixed = slow_attention(q, k, v, segments).reshape(*x.shape[:-1], -1)
    x = x + mixed @ layer["wo"].reshape(-1, D) + layer.get("bo", 0.0)
    h = slow_norm(x, layer["mlp_norm"], config.norm.kind, config.norm.eps)
    activation = np.vectorize(SLOW_ACTIVATIONS[config.mlp.activation])
    up = h @ layer["w_up"] + layer.get("b_up", 0.0)
    if config.mlp.activation == "swiglu":
        hidden = activation(h @ layer["w_gate"] + layer.get("b_gate", 0.0)) * up
    else:
        hidden = activation(up)
    return x + hidden @ layer["w_down"] + layer.get("b_down", 0.0)


# ---------------------------------------------------------------- norms


@pytest.mark.parametrize(("kind", "bias"), [("rms", False), ("layer", False), ("layer", True)])
def test_norm_equals_loop(kind, bias):
    config = lm_config(**BASE, norm=kind, bias=bias, norm_eps=1e-2)
    weights = {"scale": 1 + normal(D, seed=1)} | ({"bias": normal(D, seed=2)} if bias else {})
    x = 3 + 2 * normal(B, T, D)
    assert_close(
        config.stack().norm.apply(weights, x), slow_norm(x, weights, kind, 1e-2), TOLERANCE
    )


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_is_taken_in_float32(kind):
    """In bfloat16 the sum of squares of a long row would be off by percents."""
    config = lm_config(**BASE | {"embed_dim": 4096}, norm=kind)
    x = jnp.asarray(100 + normal(1, 4096), jnp.bfloat16)
    got = config.stack().norm.apply({"scale": np.ones(4096, np.float32)}, x)
    assert got.dtype == jnp.bfloat16
    want = slow_norm(np.asarray(x, np.float64), {"scale": np.ones(4096)}, kind, config.norm.eps)
    assert_close(got, want, 2.0**-8)  # the result alone is rounded


# ---------------------------------------------------------------- rotary positions

SCALED = llama(head_dim=64)


def rope_of(config):
    return config.stack().mixer.positions


@pytest.mark.parametrize(
    "config",
    [
        lm_config(**BASE),
        lm_config(**BASE, rope_theta=500.0, head_dim=10),
        SCALED,
        llama(
            head_dim=64,
            rope_factor=8.0,
            rope_low_freq_factor=2.0,
            rope_high_freq_factor=3.0,
            rope_original_len=512,
        ),
    ],
    ids=["plain", "theta", "llama3.2", "other"],
)
def test_frequencies_equal_the_published_rule(config):
    want = [slow_frequency(i, config) for i in range(config.attention.head_dim // 2)]
    np.testing.assert_allclose(
        rope_of(config).frequencies(config.attention.head_dim), want, rtol=3e-6
    )


def test_scaling_has_all_three_cases():
    plain = [slow_frequency(i, llama(head_dim=64, rope_factor=1.0)) for i in range(32)]
    ratios = np.array(plain) / np.asarray(rope_of(SCALED).frequencies(64))
    assert (np.abs(ratios - 1) < 1e-5).any() and (np.abs(ratios - 32) < 1e-3).any()
    assert ((ratios > 1.1) & (ratios < 31)).any()


def test_rotation_equals_loop():
    config = lm_config(**BASE | {"head_dim": 6})
    x, positions = normal(B, T, 3, 6), np.random.default_rng(1).integers(0, 50, (B, T))
    got = Rope().rotate(x, positions)
    # 50 radians in float32 carry an error of 50 * 2^-24.
    assert_close(got, slow_rotate(x, positions, config), 5e-6)


def test_scores_depend_on_distance_alone():
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)
    rotate = Rope().rotate
    scores = [
        float((rotate(q, np.array([[a + 3]])) * rotate(k, np.array([[a]]))).sum())
        for a in (0, 5, 40)
    ]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4)
    other = (rotate(q, np.array([[4]])) * rotate(k, np.array([[0]]))).sum()
    assert abs(float(other) - scores[0]) > 1e-3


# ---------------------------------------------------------------- whole layers


def layer_of(config, layer, x, context):
    stack = config.stack()
    block = ResidualBlock(mixer=stack.mixer, mlp=stack.mlp, norm=stack.norm, dropout=stack.dropout)
    return block.apply(layer, x, context)


LAYERS = {
    "rms-swiglu-rope-mha": dict(),
    "rms-swiglu-rope-gqa": dict(num_kv_heads=2),
    "rms-swiglu-rope-mqa-bias": dict(num_kv_heads=1, bias=True),
    "layer-gelu-learned-bias": dict(
        norm="layer", activation="gelu", positions="learned", bias=True
    ),
    "layer-gelu-exact-wide-heads": dict(norm="layer", activation="gelu_exact", head_dim=6),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layer_equals_loop(name, packed):
    config = lm_config(**BASE | LAYERS[name])
    layer = jax.tree.map(lambda w: w[0], noisy_params(config)["layers"])
    x = normal(B, T, D)
    segments = np.array([[0, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 2]]) if packed else None
    positions = (
        np.array([[0, 1, 2, 0, 1, 2], [0, 0, 1, 2, 3, 0]])
        if packed
        else np.tile(np.arange(T), (B, 1))
    )
    run = jit(lambda positions, segments: layer_of(config, layer, x, Context(positions, segments)))
    got, cache, _ = run(positions, segments)
    assert cache is None
    assert_close(got, slow_block(x, layer, config, positions, segments), TOLERANCE)


class Doubled:
    """A branch of tokens and of each token alone, which keeps the contexts that it gets."""

    def __init__(self):
        self.contexts = []

    def apply(self, params, x, *more):
        self.contexts.append(more[-1])
        if len(more) == 1:
            return 2 * x, NOTHING
        return 2 * x, None, NOTHING


def test_each_branch_has_a_norm_of_its_own_before_and_behind_it():
    norm = Norm("rms", eps=1e-6)
    names = ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm")
    scales = {name: normal(D, seed=seed) for seed, name in enumerate(names)}
    params = {name: {"scale": scale} for name, scale in scales.items()}
    x = normal(B, T, D)
    got, _, _ = ResidualBlock(Doubled(), Doubled(), norm).apply(
        params, x, Context(np.zeros((B, T), int))
    )

    def normed(x, name):
        return slow_norm(x, params[name], "rms", 1e-6)

    middle = x + normed(2 * normed(x, "attn_norm"), "attn_post_norm")
    want = middle + normed(2 * normed(middle, "mlp_norm"), "mlp_post_norm")
    assert_close(got, want, TOLERANCE)


@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_mixer_has_a_key_where_its_layer_drops(rate):
    mixer = Doubled()
    params = {name: {"scale": np.ones(D)} for name in ("attn_norm", "mlp_norm")}
    block = ResidualBlock(mixer, None, Norm("rms"), dropout=rate)
    block.apply(params, normal(B, T, D), Context(np.zeros((B, T), int), key=jax.random.key(0)))
    assert [context.key is None for context in mixer.contexts] == [rate == 0]


# ---------------------------------------------------------------- dropout


def test_dropout_without_key_or_rate_is_the_identity():
    x = normal(100)
    assert dropout(x, 0.5, None) is x
    assert dropout(x, 0.0, jax.random.key(0)) is x


def test_dropout_keeps_the_mean_and_drops_its_share():
    x, rate = np.ones((300, 300), np.float32), 0.3
    y = np.asarray(dropout(x, rate, jax.random.key(0)))
    kept = y != 0
    np.testing.assert_allclose(y[kept], 1 / (1 - rate), rtol=1e-6)
    deviation = (kept.mean() - (1 - rate)) / math.sqrt(rate * (1 - rate) / kept.size)
    assert abs(deviation) < 5


def test_the_three_dropouts_of_a_layer_are_different():
    """Both branches and the attention weights drop by keys of their own."""
    config = lm_config(**BASE, dropout=0.5)
    layer = jax.tree.map(lambda w: w[0], noisy_params(config)["layers"])
    x, positions, key = normal(B, T, D), np.tile(np.arange(T), (B, 1)), jax.random.key(3)
    silent = {name: jnp.zeros_like(layer[name]) for name in ("wo", "w_down")}

    def branch(name):
        alone = layer | {other: zeros for other, zeros in silent.items() if other != name}
        return (
            np.asarray(layer_of(config, alone, x, Context(positions, key=key))[0]) == x
        )  # where the branch was dropped

    attention, mlp = branch("wo"), branch("w_down")
    assert 0.4 < attention.mean() < 0.6 and 0.4 < mlp.mean() < 0.6
    assert 0.35 < (attention == mlp).mean() < 0.65
