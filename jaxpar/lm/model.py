"""Tokens -> residual stream -> logits."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.lm.attention import dropout
from jaxpar.lm.blocks import INSIDE, RESIDUAL, block, norm
from jaxpar.lm.config import LMConfig
from jaxpar.lm.params import hold
from jaxpar.mesh import constrain, gather, local, mesh_axes
from jaxpar.types import PRNGKey, PyTree, UsageError

__all__ = ["apply", "embed", "head", "hidden"]

SAVED_NAMES = ("qkv", "attention", "mlp", "residual")


def head(params: PyTree) -> Float[Array, "V D"]:
    """Returns the output head, which is the embedding itself when tied."""
    return params.get("head", params["embedding"])


def embed(table: Float[Array, "V D"], tokens: Int[Array, "B T"], axes: tuple = INSIDE) -> Float[Array, "B T D"]:
    """Looks tokens up in a table split over the vocabulary; one sum over its parts, no gather of the table.

    `axes` are those of the result.
    """
    parts = mesh_axes("vocab")

    def lookup(table, tokens):
        if not parts:
            return table[tokens]
        index = tokens - jax.lax.axis_index(parts) * table.shape[0]
        mine = (index >= 0) & (index < table.shape[0])
        rows = table[jnp.where(mine, index, 0)]
        return jax.lax.psum(jnp.where(mine[..., None], rows, 0), parts)

    table = gather(table, ("vocab", "embed"), ("vocab", None), ("vocab", "embed_grad"), "the embedding")
    return local(lookup, [("vocab", None), axes[:2]], axes)(table, tokens)


def place(table: Float[Array, "S D"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Looks learned positions up, in a table that is gathered whole, as is its gradient: it is small."""
    return constrain(table, None, None)[positions]


def _remat(body, config: LMConfig):
    """Wraps a layer by what its backward pass may keep."""
    policies = jax.checkpoint_policies
    policy = {
        "dots": policies.save_only_these_names("product"),
        "names": policies.save_only_these_names(*SAVED_NAMES),
        "full": policies.nothing_saveable,
        "offload": policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(SAVED_NAMES),
            offload_src="device",
            offload_dst="pinned_host",
        ),
    }
    if config.remat == "none":
        return body
    # Inside a scan the loop itself keeps XLA from merging the recomputation with the forward pass.
    return jax.checkpoint(body, policy=policy[config.remat], prevent_cse=not config.scan_layers)


def hidden(
    params: PyTree,
    tokens: Int[Array, "B T"],
    config: LMConfig,
    *,
    positions: Int[Array, "B T"] | None = None,
    segments: Int[Array, "B T"] | None = None,
    dropout_key: PRNGKey | None = None,
) -> Float[Array, "B T D"]:
    """Computes the last residual stream after the final norm, in `config.dtype`.

    Args:
      params: As from `jaxpar.lm.init`.
      tokens: Symbols in [0, V).
      config: The model; static.
      positions: Place of each token in its document; by default 0..T-1.
      segments: Document numbers, if several documents share a row.
      dropout_key: Switches dropout on; consumed.

    Raises:
      UsageError: If T is over the learned positions.
    """
    batch, length = tokens.shape
    if config.positions == "learned" and length > config.max_seq_len:
        raise UsageError(f"sequences of {length} tokens are over model.max_seq_len={config.max_seq_len}.")
    params = hold(params, config)
    if positions is None:
        positions = jnp.broadcast_to(jnp.arange(length), (batch, length))
    x = embed(params["embedding"], tokens)
    if config.positions == "learned":
        x = x + place(params["positions"], positions)
    # Folded by number, so that layer l drops the same things scanned and unrolled.
    if dropout_key is not None:
        x = dropout(x, config.dropout, jax.random.fold_in(dropout_key, config.num_layers))
    x = constrain(x.astype(config.dtype), *RESIDUAL)

    def body(x, layer_and_index):
        layer, index = layer_and_index
        key = None if dropout_key is None else jax.random.fold_in(dropout_key, index)
        return block(x, layer, config, positions, segments, key)[0], None

    body = _remat(body, config)
    if config.scan_layers:
        x, _ = jax.lax.scan(body, x, (params["layers"], jnp.arange(config.num_layers)))
    else:
        for index, layer in enumerate(_unstack(params["layers"], config.num_layers)):
            x, _ = body(x, (layer, index))
    return gather(norm(x, params["final_norm"], config), RESIDUAL, INSIDE)


def _unstack(layers: PyTree, num_layers: int) -> list[PyTree]:
    """Splits stacked layers by `lax.split`, whose transpose is a concatenation that XLA fuses into the optimizer."""
    flat, treedef = jax.tree.flatten(layers)
    parts = [jax.lax.split(leaf, [1] * num_layers, axis=0) for leaf in flat]
    return [treedef.unflatten([jnp.squeeze(part[i], 0) for part in parts]) for i in range(num_layers)]


def apply(params: PyTree, tokens: Int[Array, "B T"], config: LMConfig, **kwargs) -> Float[Array, "B T V"]:
    """Computes all logits, in float32 at least; for training take `jaxpar.lm.loss`, which never holds them.

    Takes the keyword arguments of `hidden`. Memory: B T V float32.
    """
    x = hidden(params, tokens, config, **kwargs)
    weight = constrain(head(params).astype(x.dtype), "vocab", None)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return jnp.einsum("btd,vd->btv", x, weight, preferred_element_type=wide)
