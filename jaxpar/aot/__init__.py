"""What a step will need and do on machines that are not here, from its jaxpr and its compiled text.

| file | in -> out | called by |
|---|---|---|
| `topology` | "v5p:4x4x4" -> chip, compile-only devices | experiments |
| `flops` | function, arguments -> FLOPs of all devices | `plan` |
| `hlo` | compiled text, mesh -> collectives: kind, axes, bytes, times run | `plan`, tests |
"""

from jaxpar.aot.flops import count_flops

__all__ = ["count_flops"]
