"""Experts over devices: how tokens reach them, and who computes what.

| file | in -> out | called by |
|---|---|---|
| `gather` | a layer, tokens [B, T, D], choices -> the mixture, of tokens known to all | `choose`, users |
| `exchange` | the same, of tokens that go where their experts are, by slots or where there is room | `choose`, users |
| `ragged` | the same, of as many as there are | `choose`, users |
| `annotate` | the same, by products with masks | `choose`, users |
| `lend` | the same, of tokens and weights that go where `spill` plans | `choose`, users |
| `choose` | a name -> a transport; a layer, sizes -> bytes sent, and the transport that sends least | `jaxpar.lm` |
| `spill` | tokens of each expert [E], N devices -> how many of them each device computes [E, N] | users |
| `place` | experts that tokens chose [L, B, T, k] -> device of each [L, E]; a model's experts in that order | users |
"""

from jaxpar.nn.experts.sharded.all_to_all import AllToAll
from jaxpar.nn.experts.sharded.annotate import Annotated
from jaxpar.nn.experts.sharded.choose import TRANSPORTS, LeastSent, bytes_sent, transport_for
from jaxpar.nn.experts.sharded.gather import Gather
from jaxpar.nn.experts.sharded.lend import Spill
from jaxpar.nn.experts.sharded.place import (
    chosen_experts,
    count_crossings,
    count_transitions,
    place_experts,
    reorder_experts,
)
from jaxpar.nn.experts.sharded.ragged import Ragged
from jaxpar.nn.experts.sharded.spill import least_loaded

__all__ = [
    "TRANSPORTS",
    "AllToAll",
    "Annotated",
    "Gather",
    "LeastSent",
    "Ragged",
    "Spill",
    "bytes_sent",
    "chosen_experts",
    "count_crossings",
    "count_transitions",
    "least_loaded",
    "place_experts",
    "reorder_experts",
    "transport_for",
]
