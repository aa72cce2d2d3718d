"""The pieces of one layer: norms, rotary positions, the branches of the mixer (attention or recurrent) and the mlp."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxpar.lm.attention import attention, dropout, in_blocks
from jaxpar.lm.config import LMConfig
from jaxpar.mesh import constrain, gather, in_role, mesh_axes, scatter
from jaxpar.nn.mixer import mixed, starts
from jaxpar.nn.solvers import solver
from jaxpar.types import PRNGKey, PyTree

__all__ = ["block", "norm", "rope_frequencies", "rotate"]


def _wide(x: jax.Array):
    return jnp.promote_types(x.dtype, jnp.float32)


def norm(x: Float[Array, "... D"], weights: dict, config: LMConfig) -> Float[Array, "... D"]:
    """RMSNorm (arXiv:1910.07467) or LayerNorm (arXiv:1607.06450), in float32 at least."""
    row = (1,) * (x.ndim - 1) + (-1,)

    # Recomputed in the backward pass: it costs a read of x, and saves keeping its intermediates.
    @jax.checkpoint
    def normed(x, weights):
        wide = x.astype(_wide(x))
        wide = wide - wide.mean(-1, keepdims=True) if config.norm == "layer" else wide
        out = wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + config.norm_eps)
        out = out * weights["scale"].reshape(row)
        return (out + weights["bias"].reshape(row) if "bias" in weights else out).astype(x.dtype)

    return normed(x, weights)


def rope_frequencies(config: LMConfig) -> Float[Array, "K/2"]:
    """Returns the rotary frequencies in radians a token, with Llama 3's scaling of the long wavelengths.

    Frequency i is theta^(-2i/K) (arXiv:2104.09864, eq. 15). With `rope_factor` s > 1, wavelengths over
    original/low are divided by s, those under original/high are kept, and those between are blended
    linearly in original/wavelength (Llama 3.1's "llama3" rule).
    """
    index = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32)
    freq = config.rope_theta ** (-index / config.head_dim)
    if config.rope_factor == 1.0:
        return freq
    turns = config.rope_original_len * freq / (2 * math.pi)
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
    return freq * (keep + (1 - keep) / config.rope_factor)


def rotate(x: Float[Array, "B T H K"], positions: Int[Array, "B T"], freq: Float[Array, "K/2"]) -> jax.Array:
    """Rotates the pair (x[i], x[i + K/2]) by positions * freq[i] radians, the pairing of Llama's weights."""
    wide = _wide(x)
    angle = positions[:, :, None, None].astype(jnp.float32) * freq[None, None, None, :]
    cos, sin = jnp.cos(angle).astype(wide), jnp.sin(angle).astype(wide)
    a, b = jnp.split(x.astype(wide), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _matmul(equation: str, x: jax.Array, layer: dict, name: str, config: LMConfig, axes: tuple) -> jax.Array:
    """Multiplies by the weight `w<name>`, split as a step holds it, and adds `b<name>`; `axes` are the weight's."""
    weight, bias = layer["w" + name], layer.get("b" + name)
    apart = not config.scan_layers and config.remat == "none"
    y: Any = checkpoint_name(_product(equation, axes, apart, x, weight.astype(x.dtype)), "product")
    return y if bias is None else y + bias.astype(y.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _product(equation: str, axes: tuple, apart: bool, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Gathers the weight and multiplies; the backward pass gathers again, so that no gathered weight is ever kept."""
    return jnp.einsum(equation, x, constrain(weight, *in_role(axes, "use"), name="a weight"))


def _product_backward(equation, axes, apart, kept, g):
    x, weight = kept
    if apart and mesh_axes("embed_weight"):  # with no loop nor remat between them, XLA would find both gathers the same
        weight, g = jax.lax.optimization_barrier((weight, g))
    weight = constrain(weight, *in_role(axes, "use"), name="a weight")
    (dx,) = jax.linear_transpose(lambda x: jnp.einsum(equation, x, weight), x)(g)
    (dweight,) = jax.linear_transpose(lambda weight: jnp.einsum(equation, x, weight), weight)(g)
    return dx, constrain(dweight, *in_role(axes, "grad"), name="gradient of a weight")


_product.defvjp(
    lambda equation, axes, apart, x, weight: (_product(equation, axes, apart, x, weight), (x, weight)),
    _product_backward,
)


def _qkv(x, layer, config: LMConfig, positions):
    """Projects [B, T, D] to queries [B, T, H, K] and keys and values [B, T, G, K], rotated if rope."""
    q = _matmul("btd,dhk->bthk", x, layer, "q", config, ("embed", "heads", "head_dim"))
    k = _matmul("btd,dgk->btgk", x, layer, "k", config, ("embed", "kv_heads", "head_dim"))
    v = _matmul("btd,dgk->btgk", x, layer, "v", config, ("embed", "kv_heads", "head_dim"))
    if config.positions == "rope":
        freq = rope_frequencies(config)
        q, k = rotate(q, positions, freq), rotate(k, positions, freq)
    return tuple(checkpoint_name(part, "qkv") for part in (q, k, v))


def _attend(x, layer, config: LMConfig, positions, segments, key, cache, begins):
    """Attention of [B, T, D] over itself, or over the cache and itself; the new cache."""
    q, k, v = _qkv(x, layer, config, positions)
    if cache is None:
        out = attention(q, k, v, segments=segments, impl=config.attention, dropout_rate=config.dropout, dropout_key=key)
    elif begins:
        # A kernel that training asked for by name may be another machine's; "auto" takes it wherever it runs.
        out = attention(q, k, v, impl="xla" if config.attention == "xla" else "auto", prompt=True)
        cache = tuple(jax.lax.dynamic_update_slice_in_dim(old, x, 0, 1) for old, x in zip(cache, (k, v), strict=True))
    else:
        rows = jnp.arange(x.shape[0])[:, None]
        cache = cache[0].at[rows, positions].set(k), cache[1].at[rows, positions].set(v)
        out = in_blocks(q, *cache, positions)
    out = checkpoint_name(out, "attention")
    return _matmul("bthk,hkd->btd", out, layer, "o", config, ("heads", "head_dim", "embed")), cache


def _recur(x, layer, config: LMConfig, segments, state, ends):
    """A recurrence over [B, T, D] from `state`, time first inside; the state at `ends`."""
    cell, x = config.cell(), jnp.swapaxes(x, 0, 1)
    drive = {gate: _matmul("tbd,dn->tbn", x, layer, gate, config, ("embed", "mlp")) for gate in cell.gates}
    drive = {gate: checkpoint_name(lane, "qkv") for gate, lane in drive.items()}
    resets = None if segments is None else starts(segments)
    out, state = mixed(cell, layer, drive, state, resets=resets, ends=ends, method=solver(config.solver))
    return _matmul("tbn,nd->btd", checkpoint_name(out, "attention"), layer, "_out", config, ("mlp", "embed")), state


def _mlp(x, layer, config: LMConfig):
    """[B, T, D] -> [B, T, F] -> [B, T, D]."""
    up = checkpoint_name(_matmul("btd,df->btf", x, layer, "_up", config, ("embed", "mlp")), "mlp")
    parts = [up]
    if config.activation == "swiglu":
        gate = _matmul("btd,df->btf", x, layer, "_gate", config, ("embed", "mlp"))
        parts = [checkpoint_name(gate, "mlp"), up]
    hidden = ACTIVATIONS[config.activation](*parts)
    return _matmul("btf,fd->btd", hidden, layer, "_down", config, ("mlp", "embed"))


def _elementwise(forward, same_for_gradient):
    """Returns `forward`, of which the backward pass keeps only the arguments.

    The gradient is that of the same function written in another way: of a literal copy XLA would keep
    intermediates of the forward pass, each as large as the arguments; and a barrier against that, as
    `jax.checkpoint` sets, would keep the gradient out of the epilogue of the product before it.
    """
    function = jax.custom_vjp(forward)

    def backward(args, g):
        wide = [x.astype(_wide(x)) for x in args]
        grads = jax.vjp(same_for_gradient, *wide)[1](g.astype(wide[0].dtype))
        return tuple(grad.astype(x.dtype) for grad, x in zip(grads, args, strict=True))

    function.defvjp(lambda *args: (forward(*args), args), backward)
    return function


ACTIVATIONS = {
    "swiglu": _elementwise(
        lambda gate, up: jax.nn.silu(gate) * up,
        lambda gate, up: 0.5 * gate * (1 + jnp.tanh(gate / 2)) * up,
    ),
    "gelu": _elementwise(
        lambda x: jax.nn.gelu(x, approximate=True),
        lambda x: x * jax.nn.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3)),
    ),
    "gelu_exact": _elementwise(
        lambda x: jax.nn.gelu(x, approximate=False),
        lambda x: 0.5 * x * (1 + jax.lax.erf(x / math.sqrt(2))),
    ),
}


# Axes of activations [B, T, D]: between branches, inside them, and while sampling, when T is a token or a prompt.
RESIDUAL, INSIDE, SAMPLED = ("batch", "seq", None), ("batch", "seq_layer", None), ("batch", None, None)


def block(
    x: Float[Array, "B T D"],
    layer: dict,
    config: LMConfig,
    positions: Int[Array, "B T"],
    segments: Int[Array, "B T"] | None = None,
    key: PRNGKey | None = None,
    cache: PyTree | None = None,
    ends: Int[Array, " B"] | None = None,
    begins: bool = False,
) -> tuple[jax.Array, PyTree | None]:
    """Applies one pre-norm layer: x + mixer(norm(x)), then x + mlp(norm(x)).

    Args:
      x: Residual stream.
      layer: This layer's parameters, without the "layers" axis.
      config: The model.
      positions: Place of each token in its document; with a cache also its slot.
      segments: Document numbers, if documents share a row.
      key: Dropout key of this layer; None while not training.
      cache: Keys and values [B, S, G, K] of what came before; the new ones are written at `positions`, and a query
        sees the slots up to its own position. Of a recurrent mixer: the state that came before.
      ends: Place of each row's last token, whose state a recurrent mixer returns; by default the last place.
      begins: Whether the tokens are the first of an empty cache: attention is then as in training, over them alone.

    Returns:
      The residual stream, and the cache with the new keys and values (None without one), or the new state.
    """
    keys = (None,) * 3 if key is None or config.dropout == 0.0 else tuple(jax.random.split(key, 3))
    outside, inside = (RESIDUAL, INSIDE) if cache is None else (SAMPLED, SAMPLED)

    # Where the two split the sequence differently: a gather into a branch, a scattered sum out of it.
    def enter(x):
        return gather(x, outside, inside)

    def leave(x):
        return scatter(x, inside, outside)

    h = enter(norm(x, layer["attn_norm"], config))
    if config.mixer == "attention":
        out, cache = _attend(h, layer, config, positions, segments, keys[0], cache, begins)
    else:
        out, cache = _recur(h, layer["mixer"], config, segments, cache, ends)
    x = x + dropout(leave(out), config.dropout, keys[1])
    out = leave(_mlp(enter(norm(x, layer["mlp_norm"], config)), layer, config))
    x = x + dropout(out, config.dropout, keys[2])
    return checkpoint_name(x, "residual"), cache
