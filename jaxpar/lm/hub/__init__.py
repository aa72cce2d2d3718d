"""Hugging Face folders: parameters and adapters in other people's files.

| file | in -> out | called by |
|---|---|---|
| `keys` | JSON of a folder -> its keys, judged one by one | all below |
| `folders`, `llamas`, `architectures` | `config.json` <-> LMConfig; where each leaf lies | `exchange` |
| `stored` | files -> blocks of leaves on their devices, read ahead by threads | `exchange` |
| `exchange`, `peft` | a folder <-> LMConfig, params; <-> AdapterConfig, adapters | experiments |
"""
