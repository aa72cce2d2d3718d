"""Linear recurrences in parallel over time.

| file | in -> out | called by |
|---|---|---|
| `affine` | a, b `[..., T, ...]`, h0 -> h `[..., T, ...]` | users, `jaxpar.solve` |
"""

from jaxpar.scan.affine import affine_lanes, affine_scan

__all__ = ["affine_lanes", "affine_scan"]
