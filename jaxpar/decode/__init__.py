"""Generation with any model: it is a function here, and this room knows none.

| file | in -> out shapes | called by |
|---|---|---|
| `noise` | key, seeds, positions, lineage [...] -> noise [..., V]; one key a token [...] | `accept`, users |
| `trees` | parents -> masks [T, T]; rates [depth, rank] -> tree; probabilities [B, k] -> counts [B] | `accept`, users |
| `accept` | scores [B, T, V], tokens [B, T], tree -> new tokens [B, T], count [B], path [B, T] | users |
"""

from jaxpar.decode.accept import Accepted, Drawn, Verdict, coupled, expected_length, rejection, verdict
from jaxpar.decode.noise import gumbel, token_keys
from jaxpar.decode.trees import Tree, allocate, best_tree, chain, expected_tokens

__all__ = [
    "Accepted",
    "Drawn",
    "Tree",
    "Verdict",
    "allocate",
    "best_tree",
    "chain",
    "coupled",
    "expected_length",
    "expected_tokens",
    "gumbel",
    "rejection",
    "token_keys",
    "verdict",
]
