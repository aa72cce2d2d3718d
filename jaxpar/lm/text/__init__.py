"""Text: files and folders to batches of tokens.

| file | in -> out | called by |
|---|---|---|
| `tokenizer`, `chat` | text or messages -> token ids and back | all below |
| `examples`, `shards` | JSONL -> tokens and which of them count; files of tokens | `corpus` |
| `corpus` | files -> two streams of tokens, training and validation | `data` |
| `data`, `mixture` | (seed, step) -> batches of one corpus, of several | experiments |
| `batches` | batches -> the same without ids and weights that no model has | `train` |
"""
