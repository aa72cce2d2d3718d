"""Layers with a matrix state by name and size, as flags give them."""

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

LAYERS: dict[str, Callable[[int, int, int], Layer]] = {
    "gla": lambda *sizes: GatedLinear(*sizes),
    "simple_gla": lambda *sizes: GatedLinear(*sizes, gate="heads"),
    "retention": lambda *sizes: GatedLinear(*sizes, gate="fixed", positions=Rope()),
    "mlstm": lambda *sizes: MLstm(*sizes),
    "mlstm_sig": lambda *sizes: MLstm(*sizes, gate="sigmoid"),
    "mamba2": lambda *sizes: Mamba2(*sizes),
    "gated_delta": lambda *sizes: GatedDelta(*sizes),
    "rwkv6": lambda *sizes: Rwkv6(*sizes),
}
"""Name -> layer of (H, K, V)."""

WHOLE = ("mamba2", "rwkv6")  # keys as wide as values


def layer_of(name: str, size: int, heads: int, key_dim: int = 0) -> Layer:
    """Returns the layer that `LAYERS` names, of H heads with V = size / H and K = `key_dim`.

    By default K is half of V, as of GLA (arXiv:2312.06635), or V, as of Mamba-2's and RWKV's smallest models.
    """
    values = size // heads
    return LAYERS[name](heads, key_dim or (values if name in WHOLE else values // 2), values)


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
