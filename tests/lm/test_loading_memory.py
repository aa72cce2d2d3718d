"""What a process holds while it reads a Hugging Face folder: what is under way, and no more."""

import threading
import tracemalloc

import jax
import numpy as np
from lm_configs import lm_config

from jaxpar.lm import apply, from_hf, init, load_model, to_hf
from jaxpar.lm.hub import stored

MODEL = lm_config(
    vocab_size=512,
    num_layers=8,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=256,
    dtype="float32",
)
BOUND = 2**18
"""Bytes; the largest tensor has half of them, all of them have sixteen times as many."""


def test_no_more_is_read_ahead_than_may_be_under_way(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "LARGE", 0)
    monkeypatch.setattr(stored, "UNDER_WAY", BOUND)
    params = init(jax.random.key(0), MODEL)
    to_hf(params, MODEL, tmp_path / "folder", max_shard_bytes=2**19)
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    put, lay, held, most, read, lock = stored._put, stored._place, 0, 0, 0, threading.Lock()

    def began(part, places):
        nonlocal held, most, read
        with lock:
            held, read = held + part.num_bytes, read + part.num_bytes
            most = max(most, held)
        return put(part, places)

    def laid(out, piece, *rest):
        nonlocal held
        with lock:
            held -= piece.nbytes
        return lay(out, piece, *rest)

    monkeypatch.setattr(stored, "_put", began)
    monkeypatch.setattr(stored, "_place", laid)
    loaded = from_hf(tmp_path / "folder", dtype="float32")[1]
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert read == total  # every number once
    assert held == 0 < most <= BOUND < total / 8


def test_a_model_to_use_takes_the_memory_of_its_parameters(tmp_path, monkeypatch):
    model = lm_config(
        vocab_size=16384,
        num_layers=4,
        embed_dim=256,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=512,
        tied=True,
        dtype="bfloat16",
    )
    params = init(jax.random.key(0), model)
    to_hf(params, model, tmp_path / "folder", dtype="bfloat16")
    total = 2 * sum(x.size for x in jax.tree.leaves(params))
    made, plain = [], stored._aligned

    def aligned(shape, dtype):
        made.append(plain(shape, dtype))
        return made[-1]

    monkeypatch.setattr(stored, "_aligned", aligned)
    tracemalloc.start()
    try:
        loaded = load_model(tmp_path / "folder")[1]
        peak = tracemalloc.get_traced_memory()[1]  # NumPy's arrays are among it
    finally:
        tracemalloc.stop()
    assert total < peak < 1.15 * total
    # XLA took the memory as it is: nothing was copied where this does not count it.
    if jax.default_backend() == "cpu":
        here = {x.addressable_data(0).unsafe_buffer_pointer() for x in jax.tree.leaves(loaded)}
        assert here == {x.ctypes.data for x in made}
    want = from_hf(tmp_path / "folder")[1]
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a.astype("float32"), b), loaded, want)
    tokens = np.arange(12).reshape(2, 6)
    run = jax.jit(apply, static_argnums=2)
    np.testing.assert_array_equal(run(loaded, tokens, model), run(want, tokens, model))
