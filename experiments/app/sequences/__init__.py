"""Sequences to train on.

| file | in -> out | called by |
| --- | --- | --- |
| `series.py` | flags -> a task: digits pixel by pixel, series of files, tests of memory | `rnn.py`, `digits.py` |
| `curves.py` | generator -> curves `[B, T]` of one-dimensional digits, labels `[B]` | `series.py` |
| `memory_tasks.py` | generator -> symbols `[B, T]` and what is right after each | `series.py` |
| `sums.py` | generator -> sums in steps, a line each | step speculation, `own_models.py` |
"""
