"""Experts over devices: who computes what.

| file | in -> out | called by |
|---|---|---|
| `spill` | tokens of each expert [E], N devices -> how many of them each device computes [E, N] | users |
"""

from jaxpar.parallel.experts.spill import least_loaded

__all__ = ["least_loaded"]
