"""Which kernel takes given arrays is decided without a machine that could run it."""

import importlib.util

import jax.numpy as jnp
import pytest

from jaxpar.lower import triton
from jaxpar.scan import _kernels
from jaxpar.scan._rings import LANE_RING


def lanes(k, width=128):
    return [[jnp.ones((128, width))] * k] * k, [jnp.ones((128, width))] * k


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_a_platform_with_a_kernel_takes_lanes_and_blocks_up_to_its_largest(platform, monkeypatch):
    monkeypatch.setattr(triton, "available", lambda: True)
    if platform == "tpu" and not importlib.util.find_spec("libtpu"):
        pytest.skip("libtpu is not installed")
    largest = {"cuda": 2, "tpu": 1}[platform]
    for k in (1, 2, 3):
        takes = _kernels.kernel_for(platform, LANE_RING, *lanes(k), None, axis=0) is not None
        assert takes == (k <= largest)
    assert _kernels.kernel_for("cpu", LANE_RING, *lanes(1), None, axis=0) is None
