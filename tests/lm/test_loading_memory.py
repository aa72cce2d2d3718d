"""What a process holds while it reads a Hugging Face folder: what is under way, and no more."""

import threading

import jax
import numpy as np
import pytest

from jaxpar.lm import LMConfig, from_hf, init, stored, to_hf
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh

MODEL = LMConfig(vocab_size=512, num_layers=8, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=256, dtype="float32")
BOUND = 2**18
"""Bytes; the largest tensor has half of them, all of them have sixteen times as many."""


@pytest.mark.parametrize("devices", [1, 2])
def test_no_more_is_read_ahead_than_may_be_under_way(tmp_path, monkeypatch, devices):
    monkeypatch.setattr(stored, "LARGE", 0)
    monkeypatch.setattr(stored, "UNDER_WAY", BOUND)
    params = init(jax.random.key(0), MODEL)
    to_hf(params, MODEL, tmp_path / "folder", max_shard_bytes=2**19)
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    put, held, most, read, lock = stored._put, 0, 0, 0, threading.Lock()

    def measured(part, places):
        nonlocal held, most, read
        with lock:
            held, read = held + part.num_bytes, read + part.num_bytes
            most = max(most, held)
        try:
            return put(part, places)  # returns when the host's memory is free again
        finally:
            with lock:
                held -= part.num_bytes

    monkeypatch.setattr(stored, "_put", measured)
    with use_mesh(make_mesh(MeshSpec(fsdp=devices), jax.devices()[:devices])):
        loaded = from_hf(tmp_path / "folder", dtype="float32")[1]
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert read == total  # every number once, and of each device what it holds
    assert 0 < most <= BOUND < total / 8
