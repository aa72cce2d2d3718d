"""Parameters of the transformer, each leaf declared once; all else that depends on them follows from here.

`leaves(config)` is the only list of parameters. Initialisation, sharding, checkpoint schema, decay mask,
Muon's dimension numbers and the FLOP count are all read from it.
"""

import math

import jax
import jax.numpy as jnp

from jaxpar.lm.config import LMConfig
from jaxpar.nn.leaf import Leaf, init_leaves
from jaxpar.types import PRNGKey, PyTree

__all__ = [
    "Leaf",
    "abstract",
    "axes",
    "decay_mask",
    "flops_per_token",
    "init",
    "leaves",
    "num_params",
]


def leaves(c: LMConfig) -> dict:
    """Returns the declaration of every parameter of model `c`, as a nested dict of `Leaf`."""
    std = c.init_std
    tree = {
        "embedding": Leaf((c.vocab_size, c.embed_dim), ("vocab", "embed"), std),
        **c.stack().leaves(),
    }
    if c.positions == "learned":
        tree["positions"] = Leaf((c.max_seq_len, c.embed_dim), (None, "embed"), std)
    if not c.embedding.tied:
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
    return init_leaves(key, leaves(config), dtype)


def axes(config: LMConfig) -> PyTree:
    """Returns the logical axes of every parameter."""
    return _map(lambda _, leaf: leaf.axes, config)


def abstract(config: LMConfig, dtype=jnp.float32) -> PyTree:
    """Returns the shape and dtype of every parameter, without making any."""
    return _map(lambda _, leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), config)


def decay_mask(config: LMConfig) -> PyTree:
    """Returns True for matrices (drawn at random), False for norms and biases: the mask of weight decay."""
    return _map(lambda _, leaf: not isinstance(leaf.init, str), config)


def num_params(config: LMConfig) -> int:
    """Returns the number of parameters; a tied head counts once."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(leaves(config), is_leaf=_is_leaf))


def flops_per_token(config: LMConfig, seq_len: int, causal: bool = False) -> float:
    """Returns the floating-point operations of one training step, per token.

    6 for each weight that a token is multiplied by (forward, and two products backward), and 12 L H K T for attention's
    scores and mixing, the convention of PaLM's appendix B (arXiv:2204.02311), which nanoGPT and MaxText use.

    Args:
      config: The model.
      seq_len: T.
      causal: Counts only the half of the scores that the mask keeps.
    """
    tree = leaves(config)
    multiplied = [
        leaf
        for leaf in jax.tree.leaves(tree["layers"], is_leaf=_is_leaf)
        if not isinstance(leaf.init, str)
    ]
    multiplied.append(tree.get("head", tree["embedding"]))
    matmul = 6.0 * sum(math.prod(leaf.shape) * _share(leaf, config) for leaf in multiplied)
    mixers = config.stack().mixers
    scores = (
        12.0
        * (config.num_layers // len(mixers))
        * sum(mixer.score_size for mixer in mixers)
        * seq_len
    )
    return matmul + scores / (2.0 if causal else 1.0)


def _share(leaf: Leaf, config: LMConfig) -> float:
    """What part of a weight a token is multiplied by."""
    return (
        config.experts.experts_per_token / config.experts.num_experts
        if "experts" in leaf.axes
        else 1.0
    )
