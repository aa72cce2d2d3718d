"""Tensors of files: parts of them, numbers that are none, files that shrink."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxpar.lm.hub import stored

KINDS = ["float32", "float16", "float64", "bfloat16"]


@pytest.fixture
def values():
    return np.random.default_rng(0).normal(size=(150, 7, 4)).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_is_what_was_saved(kind, values, tmp_path):
    saved, path = values.astype(kind), tmp_path / "x.safetensors"
    save_file({"before": np.zeros(5, np.uint8), "x": saved, "after": np.ones(3, np.uint8)}, path)
    found = stored.stored(path)
    assert set(found) == {"before", "x", "after"} and found["x"].shape == saved.shape
    whole = slice(0, 7), slice(0, 4)
    for index in [
        (slice(0, 150), *whole),
        (slice(3, 40), *whole),
        (slice(3, 40), slice(2, 5), slice(1, 4)),
    ]:
        np.testing.assert_array_equal(
            found["x"].read(index).astype(np.float64), saved[index].astype(np.float64)
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_told_by_its_bits(kind, bad, values):
    block = values.astype(kind)
    assert (
        stored.is_finite(block)
        and stored.is_finite(block.transpose(2, 0, 1))
        and stored.is_finite(-block)
    )
    for place in (0, 149):
        spoiled = block.copy()
        spoiled[place, 3, 2] = bad
        assert not stored.is_finite(spoiled)
    large = np.zeros(2**17 + 1, kind)  # of two pieces
    large[-1] = bad
    assert not stored.is_finite(large)


def test_a_file_that_shrinks_while_it_is_read_is_an_error(values, tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"x": values}, path)
    found, whole = stored.stored(path)["x"], (slice(0, 7), slice(0, 4))
    path.write_bytes(path.read_bytes()[:-4])
    assert found.read((slice(0, 10), *whole)).shape == (10, 7, 4)
    with pytest.raises(OSError, match="within a tensor"):
        found.read((slice(0, 150), *whole))
