"""What every gradient step shares, whatever is trained.

| file | in -> out | called by |
|---|---|---|
| `update` | new and old state -> the one to keep; schedule -> the same in the widest float | `nn.network`, `lm`, `rl` |
"""

from jaxpar.optim.update import finite_or_old, in_widest_float

__all__ = ["finite_or_old", "in_widest_float"]
