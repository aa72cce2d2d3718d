"""Parameters of the transformer, each leaf declared once; all else that depends on them follows from here.

`leaves(config)` is the only list of parameters. Initialisation, sharding, checkpoint schema, decay mask,
Muon's dimension numbers and the FLOP count are all read from it.
"""

import math

import jax
import jax.numpy as jnp

from jaxpar.lm.config import LMConfig
from jaxpar.mesh import gather, in_role
from jaxpar.nn.leaf import Leaf, draw
from jaxpar.nn.mixer import mixer_leaves
from jaxpar.types import PRNGKey, PyTree

__all__ = ["Leaf", "abstract", "axes", "flops_per_token", "hold", "init", "is_weight", "leaves", "num_params"]


def _norm(config: LMConfig, stack: tuple = (), names: tuple = ()) -> dict[str, Leaf]:
    shape, axes = (*stack, config.embed_dim), (*names, None)
    out = {"scale": Leaf(shape, axes, "ones")}
    if config.norm == "layer" and config.bias:
        out["bias"] = Leaf(shape, axes, "zeros")
    return out


def leaves(c: LMConfig) -> dict:
    """Returns the declaration of every parameter of model `c`, as a nested dict of `Leaf`."""
    std, out_std = c.init_std, c.init_std / math.sqrt(2 * c.num_layers)

    def stacked(shape: tuple, names: tuple, init) -> Leaf:
        return Leaf((c.num_layers, *shape), ("layers", *names), init)

    heads, kv = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
    layer = {
        "attn_norm": _norm(c, (c.num_layers,), ("layers",)),
        "mlp_norm": _norm(c, (c.num_layers,), ("layers",)),
        "w_up": stacked((c.embed_dim, c.mlp_dim), ("embed", "mlp"), std),
        "w_down": stacked((c.mlp_dim, c.embed_dim), ("mlp", "embed"), out_std),
    }
    if c.activation == "swiglu":
        layer["w_gate"] = stacked((c.embed_dim, c.mlp_dim), ("embed", "mlp"), std)
    if c.mixer != "attention":
        recurrent = mixer_leaves(c.cell(), c.embed_dim, out_std)
        layer["mixer"] = {name: stacked(*leaf) for name, leaf in recurrent.items()}
    else:
        layer["wq"] = stacked((c.embed_dim, *heads), ("embed", "heads", "head_dim"), std)
        layer["wk"] = stacked((c.embed_dim, *kv), ("embed", "kv_heads", "head_dim"), std)
        layer["wv"] = stacked((c.embed_dim, *kv), ("embed", "kv_heads", "head_dim"), std)
        layer["wo"] = stacked((*heads, c.embed_dim), ("heads", "head_dim", "embed"), out_std)
    if c.bias and c.mixer == "attention":
        layer["bq"] = stacked(heads, ("heads", "head_dim"), "zeros")
        layer["bk"] = stacked(kv, ("kv_heads", "head_dim"), "zeros")
        layer["bv"] = stacked(kv, ("kv_heads", "head_dim"), "zeros")
        layer["bo"] = stacked((c.embed_dim,), (None,), "zeros")
    if c.bias:
        layer["b_up"] = stacked((c.mlp_dim,), ("mlp",), "zeros")
        layer["b_down"] = stacked((c.embed_dim,), (None,), "zeros")
        if c.activation == "swiglu":
            layer["b_gate"] = stacked((c.mlp_dim,), ("mlp",), "zeros")
    tree = {
        "embedding": Leaf((c.vocab_size, c.embed_dim), ("vocab", "embed"), std),
        "layers": layer,
        "final_norm": _norm(c),
    }
    if c.positions == "learned":
        tree["positions"] = Leaf((c.max_seq_len, c.embed_dim), (None, "embed"), std)
    if not c.tied:
        tree["head"] = Leaf((c.vocab_size, c.embed_dim), ("vocab", "embed"), std)
    return tree


def _is_leaf(value) -> bool:
    return isinstance(value, Leaf)


def _map(fn, config: LMConfig) -> PyTree:
    return jax.tree_util.tree_map_with_path(fn, leaves(config), is_leaf=_is_leaf)


def init(key: PRNGKey, config: LMConfig, dtype=jnp.float32) -> PyTree:
    """Draws the parameters, in `dtype`; the same values on any mesh.

    Each leaf's key is `key` folded with the leaf's path, so adding a parameter changes no other. Jit it
    with `out_shardings` to have each device make only its share. Consumes `key`.
    """
    return draw(key, leaves(config), dtype)


def axes(config: LMConfig) -> PyTree:
    """Returns the logical axes of every parameter."""
    return _map(lambda _, leaf: leaf.axes, config)


def abstract(config: LMConfig, dtype=jnp.float32) -> PyTree:
    """Returns the shape and dtype of every parameter, without making any."""
    return _map(lambda _, leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), config)


def is_weight(config: LMConfig) -> PyTree:
    """Returns True for matrices (drawn at random), False for norms and biases: the mask of weight decay."""
    return _map(lambda _, leaf: not isinstance(leaf.init, str), config)


def hold(params: PyTree, config: LMConfig) -> PyTree:
    """Returns the parameters with the layers' weights as a step holds them: in `config.dtype`, split by "embed_weight".

    Casting at once halves the bytes of every gather and gradient of a layer. Norms and biases stay as they are; the
    embedding, the head and learned positions are gathered where they are used, which is once. Gradients of the weights
    arrive split by "embed_grad".
    """

    def lower(path, leaf: Leaf, x: jax.Array):
        if isinstance(leaf.init, str):
            return x
        held, summed = in_role(leaf.axes, "weight"), in_role(leaf.axes, "grad")
        return gather(x.astype(config.dtype), leaf.axes, held, summed, jax.tree_util.keystr(path))

    layers = leaves(config)["layers"]
    return params | {"layers": jax.tree_util.tree_map_with_path(lower, layers, params["layers"], is_leaf=_is_leaf)}


def num_params(config: LMConfig) -> int:
    """Returns the number of parameters; a tied head counts once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(leaves(config), is_leaf=_is_leaf))


def flops_per_token(config: LMConfig, seq_len: int, causal: bool = False) -> float:
    """Returns the floating-point operations of one training step, per token.

    6 for each multiplied weight (forward, and two products backward), and 12 L H K T for attention's scores and
    mixing, the convention of PaLM's appendix B (arXiv:2204.02311), which nanoGPT and MaxText use.

    Args:
      config: The model.
      seq_len: T.
      causal: Counts only the half of the scores that the mask keeps.
    """
    tree = leaves(config)
    multiplied = [leaf for leaf in jax.tree.leaves(tree["layers"], is_leaf=_is_leaf) if not isinstance(leaf.init, str)]
    multiplied.append(tree.get("head", tree["embedding"]))
    matmul = 6.0 * sum(math.prod(leaf.shape) for leaf in multiplied)
    scores = 12.0 * config.num_layers * config.num_heads * config.head_dim * seq_len * (config.mixer == "attention")
    return matmul + scores / (2.0 if causal else 1.0)
