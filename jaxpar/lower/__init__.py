"""What rooms that make kernels or read programs share: readers of jaxprs, Triton's kernels and their launchers.

| file | in -> out | called by |
|---|---|---|
| `jaxprs` | jaxpr, a rule for equations -> values of its results; which equations matter | `aot`, `solve`, `neat` |
| `triton` | text of a kernel -> Triton's function; whether there is Triton | `lookback`, `scan`, `solve`, `nn` |
| `trial` | errors of a kernel against the plain form -> whether it is taken; a warning if not | `nn` |
| `lookback` | source -> text; arrays of one shape `[..., T, ...]` -> outputs: a scan's kernel | `scan`, `solve` |
"""
