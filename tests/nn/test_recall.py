"""Associative recall: convolutions before chunks find what chunks alone cannot hold."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpar.nn.cells.stack_network import StackNetwork
from jaxpar.nn.mixers import Tcnca
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.position import Rope
from jaxpar.nn.stack import Stack

KEYS, T, STEPS = 4, 16, 400


def recall(rng, rows):
    """Pairs of a key and a value, then one of the keys, whose value is asked for: mostly from beyond the chunk."""
    keys = rng.permuted(np.tile(np.arange(KEYS), (rows, 1)), axis=1)
    keys = np.concatenate([keys, rng.permuted(keys, axis=1)], 1)[:, : T // 2 - 1]
    values = rng.integers(0, KEYS, (rows, KEYS))
    asked = rng.integers(0, KEYS, rows)
    shown = np.stack([keys, KEYS + np.take_along_axis(values, keys, 1)], -1).reshape(rows, -1)
    xs = np.concatenate([shown, asked[:, None]], 1)
    return np.eye(2 * KEYS, dtype=np.float32)[xs], values[np.arange(rows), asked]


def accuracy(mixer, seed):
    network = StackNetwork(
        Stack(2, 32, mixer, Mlp(64), init_std=32**-0.5, dtype="float32"), 2 * KEYS, KEYS
    )
    params, rule = network.init(jax.random.key(seed)), optax.adam(3e-3)

    def last(params, xs):
        return network.apply(params, xs)[0][:, -1]

    @jax.jit
    def update(params, moments, xs, ys):
        grads = jax.grad(
            lambda p: optax.softmax_cross_entropy_with_integer_labels(last(p, xs), ys).mean()
        )(params)
        moved, moments = rule.update(grads, moments)
        return optax.apply_updates(params, moved), moments

    moments, rng = rule.init(params), np.random.default_rng(seed)
    for _ in range(STEPS):
        params, moments = update(params, moments, *recall(rng, 64))
    xs, ys = recall(np.random.default_rng(99), 512)
    return float((jnp.argmax(last(params, xs), -1) == ys).mean())


@pytest.mark.slow  # 90 s
def test_recall_beyond_a_chunk_needs_the_convolutions():
    mixer = Tcnca(2, 16, chunk=4, dilations=(1, 2, 4), taps=4, positions=Rope())
    both = accuracy(mixer, 0)
    alone = accuracy(dataclasses.replace(mixer, dilations=()), 0)
    assert both >= alone + 0.1, (both, alone)
    print(f"recall: convolutions and chunks {both:.3f}, chunks alone {alone:.3f}")
