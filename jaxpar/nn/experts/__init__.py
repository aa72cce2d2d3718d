"""Mixtures of experts: which experts each token goes to, and what they make of it.

| file | in -> out shapes | called by |
|---|---|---|
| `route` | logits [N, E] -> chosen experts [N, k], their weights [N, k], scores [N, E] | `layer`, users |
| `losses` | scores, chosen experts, logits -> scalars over all tokens | `layer`, users |
| `dispatch` | chosen experts [N, k] -> rows by expert, and back; what a capacity keeps | `layer`, users |
| `grouped` | rows [M, D], weights [E, D, F], sizes [E] -> [M, F], each row by its group's weight | `layer`, users |
| `transport` | x [B, T, D], choices, weights -> [B, T, D]: how tokens reach experts of other devices | `layer` |
| `by_index` | the same and its gradients in Triton, rows read and written by index | `grouped` |
| `layer` | params, x [B, T, D] -> [B, T, D]: in the place of `jaxpar.nn.mlp.Mlp`; and its plain form | `stack`, `lm` |
"""

from jaxpar._renamed import renamed
from jaxpar.nn.experts.dispatch import combine, rows_of, sort_choices
from jaxpar.nn.experts.grouped import grouped_matmul
from jaxpar.nn.experts.layer import Experts, dense_mixture
from jaxpar.nn.experts.losses import information_gain, load
from jaxpar.nn.experts.route import Routing, heard, route
from jaxpar.nn.experts.transport import Routed, Transport, mixture

__all__ = [
    "Experts",
    "Routed",
    "Routing",
    "Transport",
    "combine",
    "dense_mixture",
    "grouped_matmul",
    "heard",
    "information_gain",
    "load",
    "mixture",
    "route",
    "rows_of",
    "sort_choices",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
