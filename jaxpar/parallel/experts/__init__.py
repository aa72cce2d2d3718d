"""Experts over devices: how tokens reach them, and who computes what.

| file | in -> out | called by |
|---|---|---|
| `gather` | a layer, tokens [B, T, D], choices -> the mixture, of tokens known to all | `choose`, users |
| `choose` | a name, sizes -> a transport | `jaxpar.lm` |
| `spill` | tokens of each expert [E], N devices -> how many of them each device computes [E, N] | users |
| `place` | experts that tokens chose [L, B, T, k] -> device of each [L, E]; a model's experts in that order | users |
"""

from jaxpar.parallel.experts.choose import TRANSPORTS, transport_for
from jaxpar.parallel.experts.gather import Gather
from jaxpar.parallel.experts.place import (
    chosen_experts,
    count_crossings,
    count_transitions,
    place_experts,
    reorder_experts,
)
from jaxpar.parallel.experts.spill import least_loaded

__all__ = [
    "TRANSPORTS",
    "Gather",
    "chosen_experts",
    "count_crossings",
    "count_transitions",
    "least_loaded",
    "place_experts",
    "reorder_experts",
    "transport_for",
]
