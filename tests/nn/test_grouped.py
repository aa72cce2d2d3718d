"""Grouped products equal a loop over groups, in value and in every gradient, whatever the sizes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.nn.experts import grouped, grouped_matmul
from jaxpar.types import UsageError

M, D, F, E = 37, 3, 5, 4
SIZES = {
    "even": [10, 9, 9, 9],
    "uneven": [1, 20, 8, 8],
    "all in one": [0, 0, 37, 0],
    "none": [0, 0, 0, 0],
    "first and last": [16, 0, 0, 21],
    "rows beyond": [0, 17, 1, 0],
    "a whole tile beyond": [8, 0, 0, 0],
}


def normal(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def by_loop(x, w, sizes):
    parts, start = [], 0
    for group, size in enumerate(sizes):
        parts.append(x[start : start + size] @ w[group])
        start += size
    return np.concatenate([*parts, np.zeros((len(x) - start, w.shape[2]))])


def outcome(impl):
    @jit
    def run(x, w, sizes, g):
        y, pull = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes, impl=impl), x, w)
        return y, *pull(g)

    return run


RUNS = {impl: outcome(impl) for impl in ("tiles", "ragged")}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("impl", RUNS)
def test_it_is_a_loop_over_groups(impl, dtype, x64):
    x, w, g = (
        normal(M, D, dtype=dtype),
        normal(E, D, F, seed=1, dtype=dtype),
        normal(M, F, seed=2, dtype=dtype),
    )
    for name, sizes in SIZES.items():
        total = sum(sizes)
        # What lies beyond may be anything: it must not be multiplied, not even by 0.
        filled = [
            np.where((np.arange(M) < total)[:, None], a, np.nan).astype(dtype) for a in (x, g)
        ]
        y, dx, dw = RUNS[impl](filled[0], w, np.array(sizes, np.int32), filled[1])
        assert y.dtype == dx.dtype == dw.dtype == dtype
        ends = np.cumsum([0, *sizes])
        want_dw = np.stack([x[a:b].T @ g[a:b] for a, b in zip(ends, ends[1:], strict=False)])
        want = by_loop(x, w, sizes), by_loop(g, w.swapaxes(1, 2), sizes), want_dw
        for got, right in zip((y, dx, dw), want, strict=True):
            if right.any():
                assert_close(got, right.astype(dtype), EXACT_MATHS[dtype])
        assert not np.any(y[total:]) and not np.any(dx[total:]), name
        assert not np.any(np.asarray(dw)[np.array(sizes) == 0]), name


def test_many_tiles_and_sums_wider_than_the_rows(monkeypatch):
    """512 rows of one group by tiles of 8: summed in bfloat16, what is added would be lost in what there is."""
    monkeypatch.setattr(grouped, "MOST_ROWS", 8)
    x, w, g = (
        jnp.ones((515, 2), jnp.bfloat16),
        jnp.ones((3, 2, 4), jnp.bfloat16),
        jnp.ones((515, 4), jnp.bfloat16),
    )
    y, dx, dw = outcome("tiles")(x, w, np.array([2, 0, 512], np.int32), g)
    np.testing.assert_array_equal(np.float32(dw[:, 0, 0]), [2, 0, 512])
    np.testing.assert_array_equal(np.float32(y[[0, 513, 514], 0]), [2, 2, 0])
    np.testing.assert_array_equal(np.float32(dx[[0, 513, 514], 0]), [4, 4, 0])


def test_vmap_is_a_loop_and_sizes_over_the_rows_are_cut():
    x, w = normal(2, 6, D, dtype=np.float32), normal(2, E, D, F, dtype=np.float32)
    sizes = np.array([[1, 2, 3, 0], [0, 2, 9, 9]])
    got = jit(jax.vmap(lambda *args: grouped_matmul(*args, impl="tiles")))(x, w, sizes)
    assert_close(got[0], by_loop(x[0], w[0], sizes[0]), EXACT_MATHS["float32"])
    assert_close(got[1], by_loop(x[1], w[1], [0, 2, 4, 0]), EXACT_MATHS["float32"])


def test_nothing_times_anything_is_nothing():
    assert grouped_matmul(np.zeros((0, 3)), np.ones((2, 3, 4)), np.zeros(2, int)).shape == (0, 4)


@pytest.mark.parametrize(
    "args, message",
    [
        (
            (np.ones((2, 3)), np.ones((2, 4, 5)), np.ones(2, int)),
            r"x \(2, 3\), w \(2, 4, 5\).*are \[M, D\], \[E, D, F\] and",
        ),
        ((np.ones((2, 3)), np.ones((2, 3, 5)), np.ones(3, int)), r"group_sizes \(3,\) do not fit"),
    ],
)
def test_shapes_that_do_not_fit_are_told(args, message):
    with pytest.raises(UsageError, match=message):
        grouped_matmul(*args)
    with pytest.raises(
        UsageError, match="impl='dense' is unknown; legal are auto, tiles, ragged, kernel"
    ):
        grouped_matmul(np.ones((2, 3)), np.ones((1, 3, 5)), np.ones(1, int), impl="dense")
