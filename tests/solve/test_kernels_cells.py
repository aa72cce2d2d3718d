"""Cells as kernels: the statements written from a jaxpr, and the two kernels that are made of them."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter

from jaxpar.lower import lookback
from jaxpar.solve import _fused
from jaxpar.solve._emit import NotElementwise

WEIGHTS = [
    jax.random.uniform(jax.random.fold_in(jax.random.key(1), i), (5,), minval=-0.9, maxval=0.9)
    for i in range(3)
]


def gru(h, x):
    wr, wz, wc = (weight[None] for weight in WEIGHTS)
    (h,), (xr, xz, xc) = h, x
    reset, update = jax.nn.sigmoid(wr * h + xr), jax.nn.sigmoid(wz * h + xz)
    return ((1 - update) * h + update * jnp.tanh(wc * (reset * h) + xc),)


def lstm(h, x):
    wf, wz, wo = (weight[None] for weight in WEIGHTS)
    (c, h), (xf, xz, xo) = h, x
    forget = jax.nn.sigmoid(wf * h + xf)
    c = forget * c + (1 - forget) * jnp.tanh(wz * h + xz)
    return c, jax.nn.sigmoid(wo * h + xo + 0.5 * c) * jnp.tanh(c)


def odds_and_ends(h, x):
    (h,), (a, b, c) = h, x
    h = jnp.where(a > 0, jnp.maximum(h, b), jnp.minimum(-h, 0.5)) + jnp.abs(c) ** 3 / (
        1 + jnp.exp(-h)
    )
    h = (
        jnp.clip(h, -2.0, 2.0) * jnp.float32(a < b)
        - jnp.sqrt(jnp.square(c) + 1)
        + jax.lax.rsqrt(1 + h * h)
    )
    h = h + h.astype(bool) * (h > 0)
    return (
        jnp.cos(h) * jax.nn.relu(h)
        + jnp.sin(b)
        + jnp.log(2 + h * h)
        + jnp.sign(c) * (1 + h * h) ** -2,
    )


CELLS = {
    "gru": (gru, 1),
    "lstm": (lstm, 2),
    "odds and ends": (odds_and_ends, 1),
    "a Jacobian of ones": (lambda h, x: (h[0] + x[0],), 1),
    "a Jacobian of a weight a lane": (lambda h, x: (WEIGHTS[0][None] * h[0] + x[1],), 1),
}
each_cell = pytest.mark.parametrize("name", CELLS)


def draw(k, steps=23, lanes=(2, 5)):
    keys = jax.random.split(jax.random.key(0), 3 + k)
    xs = tuple(jax.random.normal(key, (steps, *lanes)) for key in keys[:3])
    return tuple(jax.random.normal(key, lanes) for key in keys[3:]), xs


def first(xs):
    return tuple(x[0] for x in xs)


IMPORT = "from triton.language.extra.cuda import libdevice"


class NumpyTriton:
    """What written statements call, upon NumPy; any attribute that is not here is NumPy's of that name."""

    PropagateNan = types.SimpleNamespace(ALL=None)
    float32, int32 = np.float32, np.int32

    def __getattr__(self, name):
        return getattr(np, name)

    def rsqrt(self, x):
        return 1 / np.sqrt(x)

    def maximum(self, x, y, propagate_nan):
        return np.maximum(x, y)

    def minimum(self, x, y, propagate_nan):
        return np.minimum(x, y)


class Tile(np.ndarray):
    def to(self, dtype):
        return self.astype(dtype)


@each_cell
def test_statements_compute_the_cell_and_its_jacobian(name):
    step, k = CELLS[name]
    start, xs = draw(k)
    cell, constants = _fused.lane_cell(step, start, first(xs))
    scope = {
        "tl": NumpyTriton(),
        "libdevice": types.SimpleNamespace(fast_dividef=np.divide),
        "triton": types.SimpleNamespace(jit=lambda f: f),
    }
    exec(f"{cell.value}\n{cell.linear}".replace(IMPORT, ""), scope)
    args = [np.asarray(x).view(Tile) for x in (*start, *first(xs), *constants)]
    want = step(start, first(xs))
    got = scope["cell"](*args)
    np.testing.assert_allclose(got if k > 1 else [got], want, rtol=1e-5, atol=1e-6)
    both = scope["cell_and_jacobian"](*args)
    assert all(
        np.shape(each) == (2, 5) for each in both
    )  # Triton's scan takes tiles of one shape only
    np.testing.assert_allclose(both[:k], want, rtol=1e-5, atol=1e-6)
    full = jax.jacobian(lambda *h: step(h, first(xs)), argnums=tuple(range(k)))(*start)
    columns = [[np.einsum("abab->ab", np.asarray(full[i][j])) for j in range(k)] for i in range(k)]
    np.testing.assert_allclose(both[k:], [x for row in columns for x in row], rtol=1e-4, atol=1e-5)


def test_the_fast_functions_are_as_exact_as_float32_allows():
    step = lambda h, x: (jnp.tanh(h[0]), jax.nn.sigmoid(h[1]))  # noqa: E731
    x = np.concatenate([np.geomspace(1e-6, 200, 4000), [0.0, 0.6, np.inf]])
    x = np.concatenate([x, -x]).astype(np.float32)
    cell, _ = _fused.lane_cell(step, (x, x), ())
    scope = {
        "tl": NumpyTriton(),
        "libdevice": types.SimpleNamespace(fast_dividef=np.divide),
        "triton": types.SimpleNamespace(jit=lambda f: f),
    }
    exec(cell.value.replace(IMPORT, ""), scope)
    with np.errstate(all="ignore"):
        tanh, logistic = scope["cell"](x, x)
        wide = x.astype(float)
        np.testing.assert_allclose(tanh, np.tanh(wide), rtol=4e-7)
        np.testing.assert_allclose(
            logistic, 1 / (1 + np.exp(-wide)), rtol=1e-5, atol=1e-37
        )  # exp of a rounded large argument
    assert np.isnan(scope["cell"](np.float32(np.nan), np.float32(np.nan))).all()


REFUSED = {
    "integers": (lambda h, x: (h[0] + (h[0].astype(jnp.int32) // 2).astype(jnp.float32),), "int32"),
    "three cases": (
        lambda h, x: (jax.lax.select_n((h[0] > 0).astype(jnp.int32), h[0], x[0], x[1]),),
        "int32|two",
    ),
    "a product": (lambda h, x: (h[0] @ jnp.eye(5),), "dot_general|shape"),
    "a sum over lanes": (lambda h, x: (h[0] + h[0].sum(-1, keepdims=True),), "reduce_sum|shape"),
    "a turn": (lambda h, x: (jnp.roll(h[0], 1, -1),), "slice|shape|concatenate"),
    "a batch weight": (lambda h, x: (h[0] * jnp.arange(2.0)[:, None],), "shape"),
    "a mix of axes": (
        lambda h, x: (h[0].reshape(5, 2).reshape(2, 5).T.reshape(2, 5),),
        "reshape|shape|transpose",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_moves_values_between_lanes_is_refused(name):
    step, reason = REFUSED[name]
    start, xs = draw(1)
    with pytest.raises(NotElementwise, match=reason):
        _fused.lane_cell(step, start, first(xs))


def test_a_cell_under_checkpoint_is_the_same_kernel():
    start, xs = draw(1)
    plain, again = (
        _fused.lane_cell(step, start, first(xs))[0] for step in (gru, jax.checkpoint(gru))
    )
    assert again.value == plain.value and again.k == 1
    assert again.linear.count("=") >= plain.linear.count("=") > plain.value.count("=")


def test_a_square_carry_does_not_hide_a_transposition():
    with pytest.raises(NotElementwise):
        _fused.lane_cell(lambda h, x: (h[0].T,), [jnp.ones((3, 3))], [])
    with pytest.raises(NotElementwise):
        weights = jnp.arange(3.0)
        _fused.lane_cell(
            lambda h, x: (h[0] * jax.lax.broadcast_in_dim(weights, (3, 3), (0,)),),
            [jnp.ones((3, 3))],
            [],
        )


@pytest.fixture
def kernels(monkeypatch):
    if jax.default_backend() != "gpu":
        triton_interpreter.install(monkeypatch)
        monkeypatch.setattr(lookback, "tile_for", lambda *args: lookback.Tile(8, 4, 4, 4))


def scan(step, start, xs, reverse):
    return jax.lax.scan(lambda h, x: (step(h, x),) * 2, start, xs, reverse=reverse)[1]


@pytest.mark.gpu(optional=True)
@triton_interpreter.NEEDED
@each_cell
@pytest.mark.parametrize("reverse", [False, True])
def test_sequential_kernel_equals_scan(kernels, name, reverse):
    step, k = CELLS[name]
    start, xs = draw(k)
    cell, constants = _fused.lane_cell(step, start, first(xs))
    got = _fused.states_sequentially(cell, start, xs, constants, steps=23, reverse=reverse)
    np.testing.assert_allclose(got, scan(step, start, xs, reverse), rtol=1e-5, atol=2e-6)


@pytest.mark.gpu(optional=True)
@triton_interpreter.NEEDED
@pytest.mark.parametrize("name", ["gru", "lstm"])
@pytest.mark.parametrize("reverse", [False, True])
def test_newton_steps_reach_the_scan_and_say_how_far_they_were(kernels, name, reverse):
    step, k = CELLS[name]
    start, xs = draw(k)
    cell, constants = _fused.lane_cell(step, start, first(xs))
    want = scan(step, start, xs, reverse)
    states, bound = [jnp.zeros_like(x) for x in want], (1e-3, 1e-2, 0.1)
    for _ in range(6):
        before = states
        states, updates = _fused.newton_step(
            cell, states, start, xs, constants, bound=bound, reverse=reverse
        )
        if before[0].any():
            check_measure(step, (before, states), updates, start, xs, bound, reverse)
    np.testing.assert_allclose(states, want, rtol=1e-5, atol=2e-6)
    assert all(update.shape == (2, 5) and (update < 1e-3).all() for update in updates)


def check_measure(step, pair, updates, start, xs, bound, reverse):
    """The largest |update| of each lane in units of a |new| + b + c |J| |state before|."""
    old, new = pair
    ends = (lambda x, h: (h[1:], x[None])) if reverse else (lambda x, h: (x[None], h[:-1]))
    at = tuple(jnp.concatenate(ends(x, h)) for x, h in zip(start, old, strict=True))
    terms = [0.0] * len(old)
    for place in range(len(old)):
        seed = tuple(jnp.full_like(h, i == place) for i, h in enumerate(at))
        column = jax.jvp(lambda at: jax.vmap(step)(at, xs), (at,), (seed,))[1]
        terms = [total + jnp.abs(c * at[place]) for total, c in zip(terms, column, strict=True)]
    for a, b, term, update in zip(old, new, terms, updates, strict=True):
        want = (jnp.abs(b - a) / (bound[0] * jnp.abs(b) + bound[1] + bound[2] * term)).max(0)
        np.testing.assert_allclose(update, want, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu(optional=True)
@triton_interpreter.NEEDED
def test_a_nan_shows_in_the_update(kernels):
    start, xs = draw(1)
    xs = (xs[0].at[9, 1, 2].set(jnp.nan), *xs[1:])
    cell, constants = _fused.lane_cell(gru, start, first(xs))
    _, updates = _fused.newton_step(
        cell, [jnp.zeros((23, 2, 5))], start, xs, constants, bound=(1e-5, 1e-6, 1e-7)
    )
    bad = np.zeros((2, 5), bool)
    bad[1, 2] = True
    np.testing.assert_array_equal(np.isnan(updates[0]), bad)
