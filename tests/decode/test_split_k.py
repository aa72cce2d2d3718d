"""The kernel of attention over blocks equals the plain form: on a GPU, or in Triton's interpreter."""

import jax
import numpy as np
import pytest
import triton_interpreter
from split_cases import CASES, both
from tolerance import assert_close

from jaxpar.decode import split_k

pytestmark = [triton_interpreter.NEEDED, pytest.mark.gpu(optional=True)]

ON_GPU = jax.default_backend() == "gpu"


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_plain_form(name, slots, monkeypatch):
    dtype = CASES[name][-1]
    if dtype == "bfloat16" and not ON_GPU:
        pytest.skip("Triton's interpreter does not multiply bfloat16")
    if not ON_GPU:
        triton_interpreter.install(monkeypatch)
        monkeypatch.setattr(split_k, "available", lambda: True)
        if slots:  # a step is half a block
            monkeypatch.setattr(split_k, "SLOTS_A_STEP", 8)
    (want, want_new), (got, new) = both(name, slots, monkeypatch)
    # float32: sums in another order; 16 bits: weights are rounded beside another maximum.
    assert_close(got, want, {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}[dtype])
    np.testing.assert_array_equal(np.float32(new[0]), np.float32(want_new[0]))
