"""Generation with any model: it is a few functions here (`model`), and this room knows none.

| file | in -> out shapes | called by |
|---|---|---|
| `model` | what is asked of a model: params, tokens [B, T], cache -> logits [B, T, V], cache | `reader` |
| `noise` | key, seeds, positions, lineage [...] -> noise [..., V]; one key a token [...] | `accept`, `generate` |
| `penalties` | tokens [B, S] -> counts [B, V]; logits [..., V], counts -> logits | `process`, `generate` |
| `process` | logits [..., V] -> those of the law that a token is drawn from | `generate` |
| `stops` | tokens [B, S], sequences [n, L] -> ends [B]; pieces of text -> text up to a stop | `generate`, users |
| `automaton` | a regular expression, bytes of tokens -> table [states, V]; states -> masks [..., V] | `generate` |
| `trees` | parents -> masks [T, T]; rates [D, C] -> tree; probabilities [B, k] -> counts [B] | `accept`, `draft` |
| `accept` | scores [B, T, V], tokens [B, T], tree -> new tokens [B, T], count [B], path [B, T] | `generate` |
| `forest` | N blocks of b slots [B, N, b], M segments [B, M], what R readers see [B, R, M] | `blocks`, `reader` |
| `policies` | queries, places [B, R, N, b] -> what is read, and what is remembered | `blocks` |
| `split_k` | the same on a GPU by one kernel -> parts (max, sum, values) [parts, B R, T, H, K] | `blocks` |
| `blocks` | q, k, v of T tokens of B R readers, [B, G, N, b, K] -> (max, sum, values), blocks | `reader` |
| `reader` | prompts [B, T] -> a reading; tokens [B R, T], a reading -> logits, a reading | `draft`, `generate` |
| `draft` | text [B, S] -> guesses [B, T-1] | `generate` |
| `generate` | prompts [B, T] -> texts [B, S] | pillars |
| `beam` | prompts [B, T] -> texts [B, W, S], the best first | pillars |
| `cost` | sizes of a model, of prompt and continuations -> operations and bytes | users |
"""

from jaxpar._renamed import renamed
from jaxpar.decode.accept import Accepted, Drawn, Verdict, coupled, rejection, verdict
from jaxpar.decode.automaton import Automaton, regex_automaton
from jaxpar.decode.beam import Beams, Found, beam_search
from jaxpar.decode.cost import DecodingCost, ModelSizes, decoding_cost
from jaxpar.decode.draft import (
    CopyDraft,
    Draft,
    JacobiDraft,
    LookaheadDraft,
    ModelDraft,
    NoDraft,
    Proposal,
)
from jaxpar.decode.generate import Constraints, Decoding, Generated, Prompts, generate
from jaxpar.decode.model import TokenModel
from jaxpar.decode.noise import NoiseIndex, gumbel, token_keys
from jaxpar.decode.penalties import Counts
from jaxpar.decode.policies import BlockTopK, CachePolicy, HeavyHitters, SinksAndWindow
from jaxpar.decode.process import Sampling, is_stuck, process, token_log_probs
from jaxpar.decode.stops import StopSequences, StopStream, cut_at_stop, ends_with, stop_sequences
from jaxpar.decode.trees import Tree, allocate, best_tree, chain

__all__ = [
    "Accepted",
    "Automaton",
    "Beams",
    "BlockTopK",
    "CachePolicy",
    "CopyDraft",
    "Counts",
    "Decoding",
    "DecodingCost",
    "Draft",
    "Drawn",
    "Found",
    "Generated",
    "HeavyHitters",
    "JacobiDraft",
    "Constraints",
    "LookaheadDraft",
    "ModelDraft",
    "ModelSizes",
    "NoDraft",
    "NoiseIndex",
    "Prompts",
    "Proposal",
    "Sampling",
    "SinksAndWindow",
    "StopSequences",
    "StopStream",
    "TokenModel",
    "Tree",
    "Verdict",
    "allocate",
    "beam_search",
    "best_tree",
    "chain",
    "coupled",
    "cut_at_stop",
    "decoding_cost",
    "ends_with",
    "generate",
    "gumbel",
    "is_stuck",
    "process",
    "regex_automaton",
    "rejection",
    "stop_sequences",
    "token_keys",
    "token_log_probs",
    "verdict",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
