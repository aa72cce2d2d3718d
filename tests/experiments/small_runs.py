"""Flags of language models that a test trains for a few steps."""

SIZES = (
    "model.num_layers=1",
    "model.embed_dim=16",
    "model.attention.num_heads=2",
    "model.attention.num_kv_heads=2",
    "model.mlp.dim=16",
    "data.seq_len=16",
    "data.batch_size=8",
    "data.split=tail:0.2",
    "train.eval_every=0",
    "train.eval_batches=1",
    "train.save_every=1",
    "sampling.max_new_tokens=2",
    "optimizer.learning_rate=0.01",
    "optimizer.decay_steps=9",
)
"""Later flags of the same names win."""
