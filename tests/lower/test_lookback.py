"""Constants with which the scan's kernel is launched: they lead to every element, in the order of the scan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.lower import lookback
from jaxpar.lower.lookback import ScanAxis, Tile
from jaxpar.scan import _triton


def launched(monkeypatch, along, **options):
    """Returns the constants of one launch, and the number of its outputs."""
    call = {}

    def record(*arrays, out, **constants):
        call.update(constants, arrays=arrays)
        return [jnp.zeros(x.shape, x.dtype) for x in out]

    monkeypatch.setattr(lookback, "call_kernel", record)
    x = jnp.ones(along.shape)
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    results = lookback.launch(_triton.arrays(1, False), [x, x], out, along, **options)
    return call, len(results)


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis"), [((6,), 0), ((2, 6, 3), 1), ((6, 3), 0), ((2, 3, 6), 2)]
)
def test_constants_lead_to_each_step_and_to_the_one_before(
    shape, axis, reverse, adjoint, monkeypatch
):
    along = ScanAxis(shape=shape, axis=axis, reverse=reverse, adjoint=adjoint)
    call, _ = launched(monkeypatch, along)
    steps = call["T"]
    columns = call["COLUMNS"]
    index = np.moveaxis(np.arange(np.prod(shape)).reshape(shape), axis, 0).reshape(steps, -1)
    if reverse:
        index = index[::-1]
    lanes = np.arange(call["LANES"])
    base = lanes // columns * call["BATCH_STRIDE"] + lanes % columns * call["COLUMN_STRIDE"]
    time = np.arange(steps)
    if call["REVERSE"]:
        time = time[::-1]
    at = base + time[:, None] * call["TIME_STRIDE"]
    np.testing.assert_array_equal(at, index)
    np.testing.assert_array_equal(at[1:] - call["BACK"], index[:-1])
    coefficients = index
    if adjoint:
        coefficients = index[:-1]
        at = at[1:]
    np.testing.assert_array_equal(at + call["SHIFT"], coefficients)


def test_outputs_that_start_as_zeros_come_before_the_scratch(monkeypatch):
    tile = Tile(steps=4, lanes=2, span=4, warps=1)
    along = ScanAxis(shape=(6, 3), axis=0)
    call, count = launched(monkeypatch, along, tile=tile, zeroed=(0,))
    assert call["zeroed_outputs"] == (0, 1, 2) and count == 1
    sizes = {name: call[name] for name in ("L", "W", "SPAN", "num_warps", "grid")}
    assert sizes == {"L": 4, "W": 2, "SPAN": 4, "num_warps": 1, "grid": (4,)}
