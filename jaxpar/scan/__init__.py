"""Linear recurrences in parallel over time, exact in value and in every derivative.

| file | in -> out | called by |
|---|---|---|
| `affine` | a, b `[..., T, ...]`, h0 -> h `[..., T, ...]`; the adjoint | users, `jaxpar.solve` |
| `monoid` | elements, leaves `[..., T, ...]` -> running combinations; attention | users |
| `sharded` | one summary a device -> the state that enters each piece of time | `affine`, `monoid` |
| `rules` | platform, length -> which of `_xla`, `_triton`, `_pallas` (by `_kernels`) | `affine` |
| `_rings` | how 1 x 1, k x k, dense and rows' transitions multiply | all above |
"""

from jaxpar.scan.affine import affine_lanes, affine_scan
from jaxpar.scan.monoid import (
    LOGSUMEXP,
    LogSumExp,
    Monoid,
    attention_scan,
    attention_step,
    scan_monoid,
)

__all__ = [
    "LOGSUMEXP",
    "LogSumExp",
    "Monoid",
    "affine_lanes",
    "affine_scan",
    "attention_scan",
    "attention_step",
    "scan_monoid",
]
