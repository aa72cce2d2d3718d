"""What a process holds while it reads a Hugging Face folder: its own slices of a leaf, and a tensor's part besides."""

import math
import tracemalloc
import weakref

import jax
import numpy as np
import pytest

from jaxpar.lm import LMConfig, exchange, from_hf, init, to_hf
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh

MODEL = LMConfig(vocab_size=512, num_layers=8, embed_dim=64, num_heads=4, num_kv_heads=2, mlp_dim=256, dtype="float32")
SLACK = 16 * 2**10  # Python's own objects


@pytest.mark.parametrize("spec", [MeshSpec(), MeshSpec(data=2, fsdp=2, tensor=2)])
def test_a_slice_is_read_once_with_one_tensors_part_besides(tmp_path, monkeypatch, spec):
    params = init(jax.random.key(0), MODEL)
    to_hf(params, MODEL, tmp_path / "folder", max_shard_bytes=2**19)
    read, seen, alive, make = exchange._read, [], [], jax.make_array_from_callback
    # A CPU device may hold the very slice that was read, which would then live as long as its array.
    monkeypatch.setattr(
        jax, "make_array_from_callback", lambda shape, place, cut: make(shape, place, lambda i: +cut(i))
    )

    def measured(tensors, of, name, leaf, bounds, shift):
        assert not [other for other, part in alive if other != name and part() is not None]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        out = read(tensors, of, name, leaf, bounds, shift)
        alive.append((name, weakref.ref(out)))
        seen.append((name, bounds, out.nbytes, tracemalloc.get_traced_memory()[1] - before))
        return out

    monkeypatch.setattr(exchange, "_read", measured)
    with use_mesh(make_mesh(spec, jax.devices()[: math.prod((spec.data, spec.fsdp, spec.tensor))])):
        tracemalloc.start()
        try:
            loaded = from_hf(tmp_path / "folder", dtype="float32")[1]
        finally:
            tracemalloc.stop()
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert len({(name, bounds) for name, bounds, *_ in seen}) == len(seen)  # once for all devices that hold the same
    assert sum(size for *_, size, _ in seen) == sum(x.nbytes for x in jax.tree.leaves(params))
    for name, bounds, size, peak in seen:
        tensors = bounds[0][1] - bounds[0][0] if name.startswith("layers.") else 1
        # The slice itself; of one tensor its part of the file, as it is and while it is looked through.
        assert peak <= size + 2.5 * size / tensors + SLACK, (name, bounds, peak / size)
    largest = max(size for *_, size, _ in seen)
    assert largest >= 8 * SLACK  # or the bound above would say little
