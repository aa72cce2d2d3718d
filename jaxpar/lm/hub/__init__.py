"""Hugging Face folders: parameters and adapters in other people's files.

| file | in -> out | called by |
|---|---|---|
| `keys` | JSON of a folder -> its keys, judged one by one | all below |
| `folders`, `llamas`, `architectures` | `config.json` <-> LMConfig; where each leaf lies | `exchange` |
| `stored` | files -> blocks of leaves on their devices, read ahead by threads | `exchange` |
| `gguf_headers`, `gguf_architectures`, `gguf_tokenizers` | a GGUF file -> a folder's values | `gguf_files` |
| `gguf_files` | a GGUF file -> a folder, and parts of its tensors | all |
| `exchange`, `peft` | a folder <-> LMConfig, params; <-> AdapterConfig, adapters | experiments |
"""
