"""A cell over a sequence: every method, chunks and single steps give the loop's numbers and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton_interpreter
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.nn import S5, Cell, MinGRU, mixers, recurrent
from jaxpar.nn.cells.layer import method_for
from jaxpar.nn.cells.solvers import METHODS, name_taken, solver
from jaxpar.nn.mixers.recurrent import cell_of, sharded_recurrence
from jaxpar.solve import Block, Dense, Fused, Newton, Quasi, Sequential
from jaxpar.types import UsageError

B, T, D, N = 2, 12, 3, 4
CELLS = {name: cell_of(name, N, heads=1 if name == "gru" else 2) for name in mixers.CELLS}
each_cell = pytest.mark.parametrize("name", CELLS)


def some(*names):
    """These cells in CI, the others in the long run: compiling a solver takes seconds."""
    return pytest.mark.parametrize(
        "name",
        [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in CELLS],
    )


EXACT = EXACT_MATHS["float64"]
VALUES, GRADIENTS = 1e-10, 1e-8  # of a method against the loop, in float64


def noisy(cell, std=0.8):
    rng = np.random.default_rng(0)
    return {name: std * rng.standard_normal(leaf.shape) for name, leaf in cell.leaves(D).items()}


def inputs(length=T):
    return np.random.default_rng(1).standard_normal((B, length, D))


@functools.cache
def running(cell, method=None):
    return jit(lambda params, xs, h0: recurrent(cell, params, xs, h0, method=method))


def loop(cell):
    return running(cell, Sequential())


def empty(cell, rows=B):
    return cell.initial((rows,), jnp.float64)


@some("para_gru", "aaren", "lstm")
def test_chunks_and_single_steps_equal_the_whole(name, x64):
    cell, params, xs = CELLS[name], noisy(CELLS[name]), inputs()
    want, want_last = loop(cell)(params, xs, empty(cell))
    first, state = running(cell)(params, xs[:, : T // 2], empty(cell))
    second, state = running(cell)(params, xs[:, T // 2 :], state)
    assert_close((np.concatenate([first, second], 1), state), (want, want_last), VALUES)
    outputs, state = [], empty(cell)
    for t in range(T):
        y, state = running(cell)(params, xs[:, t : t + 1], state)
        outputs.append(y)
    assert_close((np.concatenate(outputs, 1), state), (want, want_last), VALUES)


@some("para_lstm", "min_gru", "aaren")
def test_values_gradients_and_resets_equal_those_of_the_loop(name, x64):
    cell, params, xs = CELLS[name], noisy(CELLS[name]), inputs()
    h0 = jax.tree.map(lambda h: h + 0.3, loop(cell)(params, xs[:, :1], empty(cell))[1])
    resets = np.zeros((B, T), bool)
    resets[0, [4, 5]] = True

    def loss(method):
        def value(params, xs, h0):
            ys, last = recurrent(cell, params, xs, h0, method=method, resets=resets)
            return (ys**2).sum() + jnp.sin(cell.output(params, last)).sum(), ys

        (_, ys), grads = jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))(params, xs, h0)
        return ys, grads

    parallel = (
        None if name in ("min_gru", "min_lstm", "aaren") else Newton()
    )  # what accelerators take
    (ys, grads), (want, want_grads) = loss(parallel), loss(Sequential())
    assert_close(ys, want, VALUES)
    assert_close(grads, want_grads, GRADIENTS)
    starts = jax.tree.map(lambda h: h[:1], h0), empty(cell, 1), empty(cell, 1)
    for (a, b), start in zip(((0, 4), (4, 5), (5, T)), starts, strict=True):
        assert_close(ys[:1, a:b], loop(cell)(params, xs[:1, a:b], start)[0], VALUES)


IN_CI = [("gru", "parallel_backward"), ("min_gru", "jacobi")]
METHOD_CASES = [
    (cell, name) if (cell, name) in IN_CI else pytest.param(cell, name, marks=pytest.mark.slow)
    for cell in ("para_gru", "para_lstm", "gru", "min_gru")
    for name in METHODS
    if name != "sequential"
]


@pytest.mark.parametrize("cell, name", METHOD_CASES)
def test_every_method_gives_the_loops_values_and_gradients(cell, name, x64):
    cell = CELLS[cell]
    params, xs, method = noisy(cell), inputs(), solver(name)

    def value(method, params):
        ys, last, stats = recurrent(cell, params, xs, method=method, with_stats=True)
        return (ys**2).sum() + cell.output(params, last).sum(), (ys, stats)

    (_, (ys, stats)), grads = jit(
        jax.value_and_grad(functools.partial(value, method), has_aux=True)
    )(params)
    (_, (want, _)), want_grads = jit(
        jax.value_and_grad(functools.partial(value, Sequential()), has_aux=True)
    )(params)
    assert_close(ys, want, VALUES)
    assert_close(grads, want_grads, GRADIENTS)
    assert (stats is None) == (cell.affine is not None and method is None)
    if stats is not None:
        assert bool(stats.converged) and float(stats.residual) <= 1


@each_cell
def test_the_solver_is_told_the_cells_structure(name):
    cell = CELLS[name]
    want = {
        "gru": Dense(1),
        "lstm": Dense(1),
        "para_lstm": Block(2),
        "lem": Block(2),
        "aaren": "auto",
    }.get(name, "diag")
    assert method_for(cell, Newton()).jac == want
    assert method_for(cell, Quasi(jac="dense")).jac == "dense"  # what the user says stands
    assert method_for(cell, None) is None


@pytest.mark.parametrize(
    ("name", "length", "platform", "taken"),
    [
        ("para_gru", 1000, "cpu", "sequential"),
        ("gru", 1000, "cpu", "sequential"),
        ("min_gru", 1000, "cpu", "auto"),
        ("para_gru", 512, "gpu", "fused"),
        ("para_lstm", 16_384, "gpu", "newton"),
        ("gru", 16_384, "gpu", "gauss_seidel"),
        ("gru", 8, "gpu", "sequential"),
    ],
)
def test_a_method_is_taken_by_platform_cell_and_length(name, length, platform, taken, monkeypatch):
    monkeypatch.setattr("jaxpar.solve.default.ambient_platform", lambda: platform)
    monkeypatch.setattr("jaxpar.solve.default.takes", lambda problem: name.startswith("para"))
    assert name_taken(CELLS[name], B, length) == taken


@pytest.mark.parametrize("name", ["aaren", "para_gru", "lstm"])
def test_resets_reach_states_of_any_shape_where_kernels_want_them_like_inputs(
    name, x64, monkeypatch
):
    cell, params, xs = CELLS[name], noisy(CELLS[name]), inputs()
    resets = jnp.arange(T)[None] % 5 == jnp.arange(B)[:, None]

    def run():
        return jax.jit(
            lambda xs: recurrent(cell, params, xs, method=Sequential(), resets=resets)[0]
        )(xs)

    want = run()
    monkeypatch.setattr("jaxpar.nn.cells.layer.platform", lambda: "gpu")
    np.testing.assert_array_equal(run(), want)


@pytest.mark.gpu(optional=True)
@triton_interpreter.NEEDED
@pytest.mark.parametrize("name", ["para_gru", "para_lstm"])
@pytest.mark.parametrize("resets", [False, True])
def test_the_kernels_take_the_units_that_do_not_see_each_other(name, resets, monkeypatch):
    """Projections in bfloat16 and documents that end included: `Auto` finds the fused loop the cheapest on a GPU."""
    if jax.default_backend() != "gpu":
        triton_interpreter.install(monkeypatch)
        monkeypatch.setattr("jaxpar.lower.triton.available", lambda: True)
    monkeypatch.setattr("jaxpar.nn.cells.layer.platform", lambda: "gpu")
    monkeypatch.setattr("jaxpar.solve.auto.jax.default_backend", lambda: "gpu")
    cell = CELLS[name]
    params = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in noisy(cell).items()}
    xs = jnp.asarray(inputs(64), jnp.bfloat16)
    flags = jnp.broadcast_to(jnp.arange(64) % 5 == 3, (B, 64)) if resets else None
    run = lambda xs: recurrent(cell, params, xs, resets=flags, with_stats=True)  # noqa: E731
    assert isinstance(jax.eval_shape(run, xs)[2].method, Fused)
    monkeypatch.undo()
    want = recurrent(cell, params, xs, resets=flags)[0]
    assert_close(jit(run)(xs)[0], want, 1e-2)


def test_a_wrong_statement_about_the_jacobian_is_refused():
    def mixes(params, h, x):
        return jnp.tanh(h[:, ::-1] + x)

    cell = Cell(mixes, N, jacobian="diag")
    with pytest.raises(UsageError, match="diag"):
        recurrent(cell, {}, np.zeros((B, T, N), np.float32), method=Newton())


def test_a_cell_that_says_nothing_may_be_iterated_on(x64):
    def leaky(params, h, x):
        return jnp.tanh(params["a"][None] * h + x @ params["b"])

    rng, cell = np.random.default_rng(0), Cell(leaky, N)
    params = {"a": rng.standard_normal(N), "b": rng.standard_normal((D, N))}
    h0 = empty(cell)
    assert_close(
        running(cell, Newton())(params, inputs(), h0), loop(cell)(params, inputs(), h0), VALUES
    )


@pytest.mark.parametrize("name", ["min_gru", "para_gru"])
def test_the_state_is_wide_where_inputs_are_narrow(name):
    """A bfloat16 state would lose a slow unit's steps: 1/512 of it is under half a unit in the last place."""
    cell = CELLS[name]
    params = {key: np.float32(x) for key, x in noisy(cell).items()}
    xs, h0 = inputs(64).astype(jnp.bfloat16), cell.initial((B,))
    narrow = {key: x.astype(jnp.bfloat16) for key, x in params.items()}
    ys, last = running(cell)(narrow, xs, h0)
    assert ys.dtype == jnp.bfloat16 and {leaf.dtype for leaf in jax.tree.leaves(last)} == {
        jnp.dtype("float32")
    }
    want, _ = loop(cell)(params, xs.astype(np.float32), h0)
    assert_close(np.float32(ys), want, 0.02)  # products and outputs in bfloat16


@some("para_lstm", "aaren")
def test_no_step_and_one_step(name):
    cell = CELLS[name]
    params = {key: np.float32(x) for key, x in noisy(cell).items()}
    h0 = jax.tree.map(lambda h: h + 1, cell.initial((B,)))
    ys, last = running(cell)(params, np.zeros((B, 0, D), np.float32), h0)
    assert ys.shape == (B, 0, N)
    jax.tree.map(np.testing.assert_array_equal, last, h0)
    assert running(cell)(params, np.zeros((B, 1, D), np.float32), h0)[0].shape == (B, 1, N)


def test_wrong_shapes_are_told():
    cell = MinGRU(N)
    with pytest.raises(UsageError, match=r"takes xs \[B, T, D\] with three axes, not 2"):
        recurrent(cell, {}, np.zeros((T, D)))
    with pytest.raises(UsageError, match=r"resets of shape \(12, 2\) do not fit"):
        recurrent(cell, {}, np.zeros((B, T, D)), resets=np.zeros((T, B), bool))


@pytest.mark.parametrize(
    "name, window, sentence",
    [
        ("newtn", 0, "method='newtn' is unknown; legal are auto, newton"),
        ("sequential", 8, "windows over 0 are for newton"),
        ("newton", -1, "window=-1 does not fit"),
    ],
)
def test_unknown_methods_are_refused(name, window, sentence):
    with pytest.raises(UsageError, match=sentence):
        solver(name, window)
    assert solver("newton", 8) == Newton(window=8) and solver("auto") is None


@pytest.mark.parametrize("name", [*CELLS, "s5"])
def test_a_reset_forgets_what_is_not_finite(name, x64):
    cell = CELLS.get(name, S5(N))
    params = noisy(cell)
    xs = inputs()
    spoilt = xs.copy()
    spoilt[0, 5] = np.nan
    resets = np.zeros((B, T), bool)
    resets[:, [3, 8]] = True
    shown = np.ones((B, T, 1), bool)
    shown[0, 3:8] = False

    def loss(xs):
        ys, last = recurrent(cell, params, xs, resets=resets)
        of_state = sum(jnp.sin(x).sum() for x in jax.tree.leaves(last))
        return jnp.sum(jnp.where(shown, jnp.sin(ys), 0)) + of_state, ys

    gradient = jit(jax.grad(loss, has_aux=True))
    got, ys = gradient(spoilt)
    want, wanted = gradient(xs)
    assert np.isnan(ys[0, 5:8]).all()
    assert_close(np.where(shown, ys, 0), np.where(shown, wanted, 0), VALUES)
    assert_close(np.where(shown, got, 0), np.where(shown, want, 0), GRADIENTS)


@pytest.mark.parametrize("name", ["para_gru", "min_gru", "lstm", "aaren"])
@pytest.mark.parametrize("length", [0, 5])
def test_a_row_without_steps_that_count_keeps_its_state(name, length):
    cell = CELLS[name]
    params = {key: np.float32(x) for key, x in noisy(cell).items()}
    h0 = jax.tree.map(lambda h: h + 0.3, cell.initial((B,)))
    xs = jnp.asarray(inputs(5)[:, :length], jnp.float32)

    def last(h0):
        projections = cell.input_projections(params, jnp.swapaxes(xs, 0, 1))
        valid = jnp.array([0, length])
        state = sharded_recurrence(cell, params, projections, h0, valid=valid)[1]
        return sum(jnp.sum(x[0]) for x in jax.tree.leaves(state)), state

    gradient, state = jit(jax.grad(last, has_aux=True))(h0)
    for got, want in zip(jax.tree.leaves(state), jax.tree.leaves(h0), strict=True):
        np.testing.assert_array_equal(got[0], want[0])
    for x in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(x[0], np.ones_like(x[0]))
