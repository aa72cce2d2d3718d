"""Attention over a sequence that devices share: one state, and tables of what travels.

| file | in -> out | called by |
|---|---|---|
| `orders` | the place of each token, for N devices; arrays [B, T, ...] in it and back | all |
| `moves` | a name, N -> the steps of both passes: what is sent how far; bytes over each link | `walk` |
| `_partial` | queries and a piece of the keys, by places or by the order's table -> sums; gradients | `walk` |
| `split_cache` | q [B, T, H, K], a cache in shares of any sizes -> outputs; states of blocks -> their sum | users |
| `shares_kernel` | the same of one device's share by a kernel on GPUs -> states [parts, B, T, H, K] | `split_cache` |
| `walk` | q [B, T, H, K], k, v [B, T, G, K] split over T -> outputs, by any move | `split_sequence`, users |
| `split_sequence` | a mixer, q, k, v -> outputs, by a move that suits it; its collectives | `jaxpar.lm` |
"""

from jaxpar._renamed import renamed
from jaxpar.nn.attention.context.moves import MOVES, Move, Sizes, move_for
from jaxpar.nn.attention.context.split_cache import (
    attend_split_cache,
    blocks_in_turn,
    merge_shares,
    spread_blocks,
)
from jaxpar.nn.attention.context.split_sequence import (
    CONTEXT_MOVES,
    CONTEXT_ORDERS,
    SplitSequence,
    choose_move,
)
from jaxpar.nn.attention.context.token_orders import Order, in_order, padded
from jaxpar.nn.attention.context.walk import context_attention

__all__ = [
    "CONTEXT_MOVES",
    "CONTEXT_ORDERS",
    "MOVES",
    "Move",
    "Order",
    "Sizes",
    "SplitSequence",
    "attend_split_cache",
    "blocks_in_turn",
    "choose_move",
    "context_attention",
    "in_order",
    "merge_shares",
    "move_for",
    "padded",
    "spread_blocks",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
