"""What several pillars train with.

| file | in -> out shapes | called by |
|---|---|---|
| `muon` | gradients of stacks of matrices [L, ...] -> orthogonalised updates, on any mesh | `lm` |
"""
