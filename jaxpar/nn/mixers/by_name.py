"""Layers with a matrix state by name and size, as flags give them."""

import functools
import math
from collections.abc import Callable

from jaxpar.nn.mixers.gated_delta import GatedDelta
from jaxpar.nn.mixers.gated_linear import GatedLinear
from jaxpar.nn.mixers.matrix_state import Layer, MatrixState
from jaxpar.nn.mixers.mlstm import MLstm
from jaxpar.nn.mixers.rwkv import Rwkv6
from jaxpar.nn.mixers.ssd import Mamba2
from jaxpar.nn.position import Rope

__all__ = ["LAYERS", "layer_of", "layer_size"]

LAYERS: dict[str, Callable[..., Layer]] = {
    "gla": GatedLinear,
    "simple_gla": functools.partial(GatedLinear, gate="heads"),
    "retention": functools.partial(GatedLinear, gate="fixed", positions=Rope()),
    "mlstm": MLstm,
    "mlstm_sig": functools.partial(MLstm, gate="sigmoid"),
    "mamba2": Mamba2,
    "gated_delta": GatedDelta,
    "rwkv6": Rwkv6,
}
"""Name -> layer of `num_heads` H, `key_dim` K and `value_dim` V."""

WHOLE = ("mamba2", "rwkv6")  # keys as wide as values


def layer_of(name: str, size: int, heads: int, key_dim: int = 0) -> Layer:
    """Returns the layer that `LAYERS` names, of H heads with V = size / H and K = `key_dim`.

    By default K is half of V, as of GLA (arXiv:2312.06635), or V, as of Mamba-2's and RWKV's smallest models.
    """
    value_dim = size // heads
    if not key_dim:
        key_dim = value_dim if name in WHOLE else value_dim // 2
    return LAYERS[name](num_heads=heads, key_dim=key_dim, value_dim=value_dim)


def layer_size(name: str, embed_dim: int, heads: int, num_params: int, key_dim: int = 0) -> int:
    """Returns the size at which a mixer has nearly `num_params` parameters: a multiple of 4 H."""

    def gap(size: int) -> int:
        leaves = MatrixState(layer_of(name, size, heads, key_dim)).leaves(embed_dim, 1.0, 1.0)[
            "mixer"
        ]
        return abs(sum(math.prod(leaf.shape) for leaf in leaves.values()) - num_params)

    size = unit = 4 * heads
    while gap(size + unit) < gap(size):
        size += unit
    return size
