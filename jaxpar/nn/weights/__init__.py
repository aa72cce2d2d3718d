"""Weights of few bits, where an array of floats may be.

| file | in -> out | called by |
|---|---|---|
| `narrow` | a weight -> `Quantised` in eight bits, `Nf4` in four | `linear`, `lm` |
| `ternary` | a weight -> `Ternary` to train, `PackedTernary` in two bits | `linear`, `lm` |
"""
