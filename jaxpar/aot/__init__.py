"""What a step will need and do on machines that are not here, from its jaxpr and its compiled text.

| file | in -> out | called by |
|---|---|---|
| `topology` | "v5p:4x4x4" -> chip, compile-only devices | experiments |
| `job` | step, arguments, logical axes, mesh -> `Job`; how each argument lies | all below |
| `flops`, `traffic` | jaxpr -> FLOPs; bytes moved and alive | `memory`, `plan` |
| `memory` | job -> analytic account of bytes | `plan`, `search` |
| `hlo` | compiled text, mesh -> collectives: kind, axes, bytes, times run | `plan`, tests |
| `roofline` | traffic, collectives, chip -> predicted seconds | `plan`, `search` |
| `plan` | job -> `Plan` | experiments |
| `search` | candidates -> plans, the best first | experiments |
"""

from jaxpar.aot.flops import count_flops
from jaxpar.aot.job import Job, Placement, placements
from jaxpar.aot.memory import analyse
from jaxpar.aot.plan import Plan, compile_job, plan
from jaxpar.aot.search import Finding, factorisations, search
from jaxpar.aot.topology import CHIPS, Chip, Topology, chip_of, devices, parse

__all__ = [
    "CHIPS",
    "Chip",
    "Finding",
    "Job",
    "Placement",
    "Plan",
    "Topology",
    "analyse",
    "chip_of",
    "compile_job",
    "count_flops",
    "devices",
    "factorisations",
    "parse",
    "placements",
    "plan",
    "search",
]
