"""Text: files and folders to batches of tokens.

| file | in -> out | called by |
|---|---|---|
| `tokenizer`, `chat` | text or messages -> token ids and back | all below |
| `files` | files of any kind -> texts, or records as lines of JSONL | `shards`, `corpus` |
| `long_texts` | one long text -> the ids of encoding it whole | `corpus`, evaluation |
| `examples`, `shards` | JSONL -> tokens and which of them count; files of tokens | `corpus` |
| `corpus` | files -> two streams of tokens, training and validation | `data` |
| `data`, `row_layouts` | (seed, step) -> batches: windows, streams, rows of documents | `mixture` |
| `mixture` | (seed, step) -> batches of one corpus or of several | experiments |
| `batches` | batches -> the same without ids and weights that no model has | `train` |
"""

from jaxpar.lm.text.batches import check_batch, valid_batch
from jaxpar.lm.text.chat import ChatTemplate, load_chat, open_template
from jaxpar.lm.text.data import Corpus, DataConfig, Pairs, Windows, open_corpus, sweep, sweep_pairs
from jaxpar.lm.text.examples import Template, chat_ml
from jaxpar.lm.text.mixture import Corpora, open_corpora, open_with_layout, training_batches
from jaxpar.lm.text.row_layouts import batches_of, sweep_batches
from jaxpar.lm.text.tokenizer import Bpe, Tokenizer, load_tokenizer

__all__ = [
    "Bpe",
    "ChatTemplate",
    "Corpora",
    "Corpus",
    "DataConfig",
    "Pairs",
    "Template",
    "Tokenizer",
    "Windows",
    "batches_of",
    "chat_ml",
    "check_batch",
    "load_chat",
    "load_tokenizer",
    "open_corpora",
    "open_corpus",
    "open_template",
    "open_with_layout",
    "sweep",
    "sweep_batches",
    "sweep_pairs",
    "training_batches",
    "valid_batch",
]
