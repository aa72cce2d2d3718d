"""What a program will need and do on machines that are not here, from its compiled text and its jaxpr.

| file | in -> out | called by |
|---|---|---|
| `hlo` | compiled text, mesh -> collectives: kind, axes, bytes, times run | `plan`, tests |
"""
