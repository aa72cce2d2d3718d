"""Tiny language models that many files of tests share.

A worker draws each model's weights once, and compiles each program once for a shape of arguments.
A file that needs another model changes a field of one of these. (`head_dim` and `mixer_dim` are set
when `LLAMA` is made: name them where the number of heads or the width changes.)

    LEARNED = dataclasses.replace(tiny.LLAMA, positions="learned", max_seq_len=8)
    params = tiny.params_of(LEARNED)
    logits = tiny.logits(params, tiny.tokens(), LEARNED)

No test can change anything here, since each call copies the weights. A program that takes over its
arguments' memory (`donate_argnums`) takes that of a copy.
"""

import dataclasses
import functools

import jax
import numpy as np
from fast import jit, noisy_params
from lm_configs import lm_config, with_fields

from jaxpar.lm import apply, loss
from jaxpar.lm.sample import extend

VOCAB = 16
BATCH, LENGTH = 2, 8

LLAMA = lm_config(
    vocab_size=VOCAB,
    num_layers=2,
    embed_dim=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=24,
    init_std=0.3,
    dtype="float32",
)
"""RMS norms, rotary positions, grouped heads, gated MLPs."""
GPT2 = with_fields(
    LLAMA,
    num_kv_heads=0,
    norm="layer",
    positions="learned",
    activation="gelu",
    bias=True,
    max_seq_len=LENGTH,
)
"""Layer norms, learned positions, biases: the fields that `LLAMA` leaves alone."""
RECURRENT = with_fields(LLAMA, mixer="min_lstm")
"""A linear recurrence in place of attention."""
SHALLOW = lm_config(
    vocab_size=VOCAB,
    num_layers=1,
    embed_dim=8,
    num_heads=2,
    mlp_dim=8,
    dtype="float64",
    init_std=0.5,
)
"""One narrow layer in double precision, for tests that compare all of it with NumPy."""


def exact(config):
    """Returns a model that computes in double precision, for tests that take `x64`."""
    return dataclasses.replace(config, dtype="float64")


@functools.cache
def _noisy_weights(config):
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, noisy_params(config, np.dtype(config.dtype)))


def params_of(config):
    """Returns the weights of a model in its own precision, none of them zero or one."""
    params = jax.tree.map(lambda weight: jax.device_put(weight.copy()), _noisy_weights(config))
    for weight in jax.tree.leaves(params):
        assert weight.dtype == config.dtype, "a model in float64 needs the fixture x64"
    return params


def tokens(batch=BATCH, length=LENGTH, seed=1):
    """Returns [batch, length] tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB, (batch, length))


def batch_of(batch=BATCH, length=LENGTH, seed=1):
    """Returns a batch for `loss`: [batch, length] tokens, and those that follow them."""
    drawn = tokens(batch=batch, length=length + 1, seed=seed)
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


logits = jit(apply, static_argnums=2)
"""`apply(params, tokens, config)`."""
extended = jit(extend, static_argnums=3)
"""`extend(params, tokens, cache, config)`: logits of further tokens, and the cache after them."""
loss_of = jit(loss, static_argnums=2)
"""`loss(params, batch, config)`."""
loss_and_gradient = jit(jax.value_and_grad(loss), static_argnums=2)
"""`loss(params, batch, config)` and its gradient by the weights."""
