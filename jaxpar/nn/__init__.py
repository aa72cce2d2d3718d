"""What several pillars train with.

| file | in -> out shapes | called by |
|---|---|---|
| `autoregressive`, `dense_depth` | params -> samples [num, N]; x [D] -> all layers [L, D]: by sweeps | users |
| `muon` | gradients of stacks of matrices [L, ...] -> orthogonalised updates, on any mesh | `lm` |
"""
