"""Attention over a sequence that devices share: one state, and tables of what travels.

| file | in -> out | called by |
|---|---|---|
| `orders` | the place of each token, for N devices; arrays [B, T, ...] in that order and back | users |
| `moves` | a name, N -> the steps of both passes: what is sent how far; bytes over each link | `walk` |
| `_partial` | queries and a piece of the keys -> (maximum, sum, weighted values); their gradients | `walk` |
| `split_cache` | q [B, T, H, K], a cache split in shares of any sizes -> outputs; who keeps how many blocks | users |
| `walk` | q [B, T, H, K], k, v [B, T, G, K] split over T -> outputs, by any move | users |
"""

from jaxpar.parallel.context.moves import MOVES, Move, Sizes, move_for
from jaxpar.parallel.context.orders import ORDERS, Order
from jaxpar.parallel.context.split_cache import attend_split_cache, spread_blocks
from jaxpar.parallel.context.walk import context_attention

__all__ = [
    "MOVES",
    "ORDERS",
    "Move",
    "Order",
    "Sizes",
    "attend_split_cache",
    "context_attention",
    "move_for",
    "spread_blocks",
]
