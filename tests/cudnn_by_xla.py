"""cuDNN's attention computed by XLA, for machines without a GPU: JAX's own interface up to what it hands to cuDNN."""

import types

import jax.numpy as jnp


def install(monkeypatch):
    """Puts it in the place of cuDNN; returns the list to which each call's options are added."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    calls = []

    def forward(*args, **options):
        calls.append(options)
        q, k, v, at, scores, scale = scored(fused, args, options)
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        out = jnp.einsum("nts,snk->tnk", weights / total, v)
        log_sum = (top + jnp.log(total))[..., 0]  # [N, tokens]
        out = out.astype(args[0].dtype).reshape(args[0].shape)
        return [out, at(log_sum)] if options["is_training"] else [out]

    def backward(*args, **options):
        calls.append(options)
        q, k, v, at, scores, scale = scored(fused, args, options)
        statistics, out, g = args[10:]
        assert statistics.dtype == jnp.float32 and out.dtype == g.dtype == args[0].dtype
        out, g = (x.astype(jnp.float32).reshape(q.shape) for x in (out, g))
        weights = jnp.where(
            scores > -jnp.inf, jnp.exp(scores - at(statistics, back=True)[..., None]), 0
        )
        more = (
            weights
            * (jnp.einsum("tnk,snk->nts", g, v) - jnp.einsum("tnk,tnk->nt", g, out)[..., None])
            * scale
        )
        dq, dk = jnp.einsum("nts,snk->tnk", more, k), jnp.einsum("nts,tnk->snk", more, q)
        dv = jnp.einsum("nts,tnk->snk", weights, g)

        def ungrouped(
            x, like
        ):  # a head of the keys has the gradients of all queries' heads that read it
            x = x.reshape(x.shape[0], like.shape[2], -1, x.shape[2]).sum(2)
            return x.astype(like.dtype).reshape(like.shape)

        return [ungrouped(dq, args[0]), ungrouped(dk, args[1]), ungrouped(dv, args[2])]

    monkeypatch.setattr(fused, "_dot_product_attention_fwd_p", types.SimpleNamespace(bind=forward))
    monkeypatch.setattr(fused, "_dot_product_attention_bwd_p", types.SimpleNamespace(bind=backward))
    monkeypatch.setattr(fused, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(fused, "check_is_flash_attention", lambda *args: None)
    return calls


def scored(fused, args, options):
    """Queries, keys, values of all rows as one, [tokens, N, K]; how statistics lie; scores [N, tokens, tokens]."""
    q, k, v, bias, q_lengths, k_lengths, q_starts, k_starts = args[:8]
    assert (
        not bias.size
        and not options["dropout_rate"]
        and options["sliding_window_length"] in (None, 0)
    )
    (rows, length, heads, width), (_, keys, groups, _) = q.shape, k.shape
    kind, documents = options["mask_type"], 1
    if q_starts.ndim == 2:
        documents = q_starts.shape[1] - 1
        number = rows * documents
        q_starts, k_starts = (
            q_starts.reshape(-1)[:number] // (heads * width),
            k_starts.reshape(-1)[:number] // (groups * width),
        )
        q_lengths, k_lengths = q_lengths.reshape(-1), k_lengths.reshape(-1)
    else:
        q_starts, k_starts = jnp.arange(rows) * length, jnp.arange(rows) * keys
        if kind in (fused.MaskType.CAUSAL, fused.MaskType.NO_MASK):
            q_lengths, k_lengths = jnp.full(rows, length), jnp.full(rows, keys)
        assert q_lengths.shape == k_lengths.shape == (rows,)

    def owner(starts, lengths, size):  # of each token its document, and its place there
        token = jnp.arange(size)[:, None]
        inside = (starts[None] <= token) & (token < (starts + lengths)[None])
        which = inside.argmax(1)
        return jnp.where(inside.any(1), which, -1), jnp.arange(size) - starts[which]

    mine, place = owner(q_starts, q_lengths, rows * length)
    theirs, there = owner(k_starts, k_lengths, rows * keys)
    seen = (mine[:, None] == theirs[None]) & (mine[:, None] >= 0)
    if kind in (fused.MaskType.CAUSAL, fused.MaskType.PADDING_CAUSAL):
        seen = seen & (place[:, None] >= there[None])

    def at(x, back=False):  # statistics lie by document, [rows * documents, N, T]
        if back:
            return x[mine, :, place].T
        known = jnp.where(
            mine < 0, rows * documents, mine
        )  # of tokens of no document nothing is written
        return (
            jnp.full((rows * documents, heads, length), jnp.nan)
            .at[known, :, place]
            .set(x.T.astype(jnp.float32))
        )

    q, k, v = (x.astype(jnp.float32).reshape(-1, x.shape[2], width) for x in (q, k, v))
    k, v = (jnp.repeat(x, heads // groups, 1) for x in (k, v))
    scores = jnp.einsum("tnk,snk->nts", q, k) * options["scale"]
    return q, k, v, at, jnp.where(seen[None], scores, -jnp.inf), options["scale"]
