"""Tensors of files: blocks that threads read side by side, conversions by bits, what is not a number."""

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpar.lm import tensors
from jaxpar.types import UsageError


@pytest.fixture
def values():
    return np.random.default_rng(0).normal(size=(150, 7, 4)).astype(np.float32)


@pytest.mark.parametrize("kind", ["float32", "float16", "float64", "bfloat16"])
def test_a_slice_is_what_the_library_reads(kind, values, tmp_path, monkeypatch):
    monkeypatch.setattr(tensors, "BLOCK", 96)  # many blocks, of which none ends with a row
    saved = values.astype(kind)
    save_file({"before": np.zeros(5, np.uint8), "x": saved, "after": np.ones(3, np.uint8)}, tmp_path / "x.safetensors")
    found = tensors.open_tensors(tmp_path / "x.safetensors")
    assert set(found) == {"before", "x", "after"} and found["x"].shape == saved.shape
    for index in [
        (slice(0, 150),) * 3,
        (slice(3, 40), slice(2, 5), slice(1, 4)),
        (slice(9, 9), slice(0, 7), slice(0, 4)),
    ]:
        np.testing.assert_array_equal(found["x"].read(index).astype(np.float64), saved[index].astype(np.float64))


@pytest.mark.parametrize("kind", ["float32", "float16", "float64", "bfloat16"])
@pytest.mark.parametrize("to", ["float32", "bfloat16"])
def test_numbers_are_converted_as_numpy_does(kind, to, values):
    block = values.astype(kind).transpose(2, 0, 1)
    out = np.zeros(block.shape, to)
    assert tensors.fill(block, out)
    np.testing.assert_array_equal(out.astype(np.float64), block.astype(to).astype(np.float64))


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 64, 149])  # of the first piece, the second and the last
def test_what_is_no_number_is_told(kind, bad, place, values):
    for to in ("float32", "bfloat16"):
        block = values.astype(kind)
        block[place, 3, 2] = bad
        assert not tensors.fill(block, np.zeros(block.shape, to))
    assert not tensors.fill(np.full((1, 2), 1e300), np.zeros((1, 2), np.float32))  # infinite there


def test_a_file_that_shrinks_while_it_is_read_is_refused(values, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": values}, path)
    found = tensors.open_tensors(path)["x"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UsageError, match="ends before its tensors do"):
        found.read((slice(0, 150),) * 3)
    assert jnp.shape(found.read((slice(0, 10), slice(0, 7), slice(0, 4)))) == (10, 7, 4)
    with pytest.raises(UsageError, match="not a whole safetensors file"):
        tensors.open_tensors(path)
