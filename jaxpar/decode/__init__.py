"""Generation with any model: it is a function here, and this room knows none.

| file | in -> out shapes | called by |
|---|---|---|
| `process` | logits [..., V], counts, bias, mask -> logits of what may be drawn [..., V] | `lm.generate`, users |
| `penalties` | tokens [B, S] -> counts [B, V]; logits, counts [..., V] -> logits [..., V] | `process`, users |
| `noise` | key, seeds, positions, lineage [...] -> noise [..., V]; one key a token [...] | `accept`, users |
| `trees` | parents -> masks [T, T]; rates [depth, rank] -> tree; probabilities [B, k] -> counts [B] | `accept`, users |
| `accept` | scores [B, T, V], tokens [B, T], tree -> new tokens [B, T], count [B], path [B, T] | users |
"""

from jaxpar.decode.accept import Accepted, Drawn, Verdict, coupled, expected_length, rejection, verdict
from jaxpar.decode.noise import gumbel, token_keys
from jaxpar.decode.penalties import Counts, count_token, count_tokens
from jaxpar.decode.process import Sampling, is_stuck, process, token_log_probs
from jaxpar.decode.trees import Tree, allocate, best_tree, chain, expected_tokens

__all__ = [
    "Accepted",
    "Counts",
    "Drawn",
    "Sampling",
    "Tree",
    "Verdict",
    "allocate",
    "best_tree",
    "chain",
    "count_token",
    "count_tokens",
    "coupled",
    "expected_length",
    "expected_tokens",
    "gumbel",
    "is_stuck",
    "process",
    "rejection",
    "token_keys",
    "token_log_probs",
    "verdict",
]
