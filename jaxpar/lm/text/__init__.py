"""Text: files and folders to batches of tokens.

| file | in -> out | called by |
|---|---|---|
| `tokenizer`, `chat` | text or messages -> token ids and back | all below |
| `files` | files of any kind -> texts, or records as lines of JSONL | `shards`, `corpus` |
| `examples`, `shards` | JSONL -> tokens and which of them count; files of tokens | `corpus` |
| `corpus` | files -> two streams of tokens, training and validation | `data` |
| `data`, `mixture` | (seed, step) -> batches of one corpus, of several | experiments |
| `batches` | batches -> the same without ids and weights that no model has | `train` |
"""

from jaxpar.lm.text.batches import check_batch, valid_batch
from jaxpar.lm.text.chat import load_chat, open_template
from jaxpar.lm.text.data import Corpus, DataConfig, Pairs, Windows, open_corpus, sweep, sweep_pairs
from jaxpar.lm.text.examples import Template, chat_ml
from jaxpar.lm.text.mixture import open_corpora, training_batches
from jaxpar.lm.text.tokenizer import Bpe, Tokenizer, load_tokenizer

__all__ = [
    "Bpe",
    "Corpus",
    "DataConfig",
    "Pairs",
    "Template",
    "Tokenizer",
    "Windows",
    "chat_ml",
    "check_batch",
    "load_chat",
    "load_tokenizer",
    "open_corpora",
    "open_corpus",
    "open_template",
    "sweep",
    "sweep_pairs",
    "training_batches",
    "valid_batch",
]
