"""Runnable experiments: `python -m experiments.lm model=tiny train.steps=50`."""
