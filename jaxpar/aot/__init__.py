"""What a step will need and do on machines that are not here, from its jaxpr and its compiled text.

| file | in -> out | called by |
|---|---|---|
| `topology` | "v5p:4x4x4" -> chip, compile-only devices | experiments |
| `job` | step, arguments, logical axes, mesh -> `Job`; how each argument lies | all below |
| `flops`, `traffic` | jaxpr -> FLOPs; bytes moved and alive | `memory_estimate`, `estimate` |
| `memory_estimate` | job -> analytic account of bytes | `estimate`, `candidates` |
| `hlo` | compiled text, mesh -> collectives: kind, axes, bytes, times run | `estimate`, tests |
| `roofline` | traffic, collectives, chip -> predicted seconds | `estimate`, `candidates` |
| `estimate` | job -> `Estimate` | experiments |
| `candidates` | candidates -> estimates, the best first | experiments |
"""

from jaxpar.aot.candidates import Finding, factorisations, rank_candidates
from jaxpar.aot.estimate import Estimate, compile_job, estimate, has_margin
from jaxpar.aot.job import Job, Placement, placements
from jaxpar.aot.memory_estimate import JobLayout, analyse
from jaxpar.aot.roofline import LINK_SHARE
from jaxpar.aot.topology import CHIPS, Chip, Topology, chip_of, devices, parse_topology
from jaxpar.lower.flops import count_flops

__all__ = [
    "CHIPS",
    "LINK_SHARE",
    "Chip",
    "Estimate",
    "Finding",
    "Job",
    "JobLayout",
    "Placement",
    "Topology",
    "analyse",
    "chip_of",
    "compile_job",
    "count_flops",
    "devices",
    "estimate",
    "factorisations",
    "has_margin",
    "parse_topology",
    "placements",
    "rank_candidates",
]
