"""Networks over images and films.

| file | in -> out shapes | called by |
|---|---|---|
| `space_time` | params, x [B, T, S, D] -> the same, layers along space and time in turn | `vision` |
| `vision` | images [B, H, W, C] -> logits [B, classes]; films [B, T, H, W] -> next frames | experiments |
"""
