"""Attention in parts, on one state.

| file | in -> out shapes | called by |
|---|---|---|
| `visibility` | places [B, T], [B, S] -> seen [B, T, S] | `kernels`, `mixer` |
| `state` | q [B, T, H, K], k, v [B, S, G, K] -> (max, sum, values); merged; [B, T, H, K] | `kernels`, `mixer` |
| `blockwise` | the same of tokens to each other, by blocks of both, with a gradient by blocks | `kernels` |
| `kernels` | the same by cuDNN, splash or XLA, on any mesh | `mixer` |
| `packed` | the same within documents of packed rows, by cuDNN, in linear memory | `kernels` |
| `gradient` | q, k, v, log-sum-exp over all keys -> terms of the gradients | `blockwise`, `pairs` |
| `pairs` | a full or causal pair, by cuDNN, splash or XLA: sums, terms of the gradients | `parallel.context` |
| `cache` | q, k, v of T more tokens, what is kept of those before -> (max, sum, values), what is kept | `mixer` |
| `mixer` | params, x [B, T, D], cache -> y [B, T, D], cache | `stack` |
"""

from jaxpar.nn.attention.cache import Cache, LinearCache, PositionRule
from jaxpar.nn.attention.kernels import AttentionExecution, Dropout, attention
from jaxpar.nn.attention.mixer import Attend, Attention, WholeSequence
from jaxpar.nn.attention.state import attend, capped, finish, merge, merge_parts
from jaxpar.nn.attention.visibility import Visibility, Visible

__all__ = [
    "Attend",
    "Attention",
    "Cache",
    "Dropout",
    "AttentionExecution",
    "LinearCache",
    "PositionRule",
    "Visibility",
    "Visible",
    "WholeSequence",
    "attend",
    "attention",
    "capped",
    "finish",
    "merge",
    "merge_parts",
]
