"""Helpers of commands that train, continue, judge and export language models.

| file | in -> out | called by |
| --- | --- | --- |
| `initial_model.py` | `init=` -> model, parameters, tokenizer | `lm.py` |
| `validation.py` `expert_loads.py` | batch -> loss, loads of experts | `lm.py` |
| `pipeline_flags.py` | flags -> schedule of a pipeline | `lm.py`, `estimate.py` |
| `requests.py` `prompt_batches.py` `completions.py` | file of prompts -> batches -> file of texts | `generate.py` |
| `text_codec.py` | texts -> tokens -> texts | `generate.py`, `lm.py` |
| `benchmark.py` `export_files.py` | model -> scores; model -> files | `lm.py` |
| `judged_trainings.py` | layout -> two trainings that must agree | `verify.py` |
"""
