"""Systems of one paper, with their twins and tests, and without a promise that their names stay.

| file | in -> out | paper |
|---|---|---|
| `attention_experts` | x [B, T, D], cache -> y: attention with experts for queries and results | SwitchHead |
| `autoregressive` | parameters -> samples [num, N], by sweeps over all elements | Song et al. 2021 |
| `conformal` | scores [M], those before -> which to reject [M] | step speculation |
| `controller` | functions, values and futures, meshes -> futures | Pathways |
| `dense_depth` | x [D] -> all layers [L, D], by sweeps | Song et al. 2021 |
| `placement_conversion` | an array at rest in one placement -> the same in another | SBP |
| `product_chain` | placements of x, w1, w2, ... -> the cheapest way of x @ w1 @ w2 | SBP |
| `pseudo_tokens`, `trained_drafts` | states [B, N, D] -> guesses; their training | hidden transfer |
| `saliency`, `action_saliency` | an agent or a world, observations -> what its choice depends on | saliency maps |

Nothing else in the library imports them. Read in this order, each by itself.
"""
