"""Each cell against its paper's equations in NumPy, against torch and flax, and against what it says of itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close
from traced import equations, inner_jaxprs

from jaxpar.nn import (
    GRU,
    LEM,
    LSTM,
    Aaren,
    Cell,
    CfC,
    MinGRU,
    MinLSTM,
    ParaGRU,
    ParaLSTM,
    recurrent,
)
from jaxpar.solve import Sequential
from jaxpar.types import UsageError

B, T, D, N = 2, 7, 3, 6
CELLS = {
    "gru": GRU(N),
    "gru-heads": GRU(N, heads=3),
    "lstm": LSTM(N),
    "min_gru": MinGRU(N),
    "min_lstm": MinLSTM(N),
    "para_gru": ParaGRU(N),
    "para_lstm": ParaLSTM(N),
    "lem": LEM(N),
    "cfc": CfC(N),
}
each_cell = pytest.mark.parametrize("name", CELLS)
EXACT = EXACT_MATHS["float64"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def noisy(cell, input_dim=D, std=0.8):
    """Parameters as after training: none of them zero or one."""
    rng = np.random.default_rng(0)
    return {
        name: std * rng.standard_normal(leaf.shape) for name, leaf in cell.leaves(input_dim).items()
    }


def inputs(seed=1, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal((B, T, D)).astype(dtype)


def lanes_of(state):
    return state if isinstance(state, tuple) else (state,)


# ---------------------------------------------------------------- the equations, once more, as loops over time


def blocks(u):
    """Recurrent matrices [G, n, n] of block-diagonal ones [H, K, G, K]."""
    heads, width, gates, _ = u.shape
    out = np.zeros((gates, heads * width, heads * width))
    for h in range(heads):
        part = slice(h * width, (h + 1) * width)
        out[:, part, part] = u[h].swapaxes(0, 1)
    return out


def slow_gru(p, h, x):
    ur, uz, un = blocks(p["u"])
    r = sigmoid(x @ p["wr"] + p["br"] + h @ ur)
    z = sigmoid(x @ p["wz"] + p["bz"] + h @ uz)
    return (1 - z) * np.tanh(x @ p["wn"] + p["bn"] + r * (h @ un + p["bu"])) + z * h


def slow_lstm(p, state, x):
    c, h = state
    ui, uf, ug, uo = blocks(p["u"])
    i, f = sigmoid(x @ p["wi"] + p["bi"] + h @ ui), sigmoid(x @ p["wf"] + p["bf"] + h @ uf)
    c = f * c + i * np.tanh(x @ p["wg"] + p["bg"] + h @ ug)
    return c, sigmoid(x @ p["wo"] + p["bo"] + h @ uo) * np.tanh(c)


def slow_min_gru(p, h, x):
    z = sigmoid(x @ p["wz"] + p["bz"])
    return (1 - z) * h + z * (x @ p["wh"] + p["bh"])


def slow_min_lstm(p, h, x):
    f, i = sigmoid(x @ p["wf"] + p["bf"]), sigmoid(x @ p["wi"] + p["bi"])
    return f / (f + i) * h + i / (f + i) * (x @ p["wh"] + p["bh"])


def slow_para_gru(p, h, x):
    z = sigmoid(np.diag(p["az"]) @ h + x @ p["wz"] + p["bz"])
    r = sigmoid(np.diag(p["ar"]) @ h + x @ p["wr"] + p["br"])
    return (1 - z) * h + z * np.tanh(np.diag(p["ac"]) @ (h * r) + x @ p["wc"] + p["bc"])


def slow_para_lstm(p, state, x):
    c, h = state
    f = sigmoid(np.diag(p["af"]) @ h + x @ p["wf"] + np.diag(p["pf"]) @ c + p["bf"])
    c = f * c + (1 - f) * np.tanh(np.diag(p["ag"]) @ h + x @ p["wg"] + p["bg"])
    o = sigmoid(np.diag(p["ao"]) @ h + x @ p["wo"] + np.diag(p["po"]) @ c + p["bo"])
    return c, o * np.tanh(c)


def slow_lem(p, state, x):
    z, y = state
    d, e = (
        sigmoid(p["ad"] * y + x @ p["wd"] + p["bd"]),
        sigmoid(p["ae"] * y + x @ p["we"] + p["be"]),
    )
    z = (1 - d) * z + d * np.tanh(p["az"] * y + x @ p["wz"] + p["bz"])
    return z, (1 - e) * y + e * np.tanh(p["ay"] * z + x @ p["wy"] + p["by"])


def slow_cfc(p, h, x):
    gate = sigmoid(-(p["af"] * h + x @ p["wf"] + p["bf"]))
    g, k = (
        np.tanh(p["ag"] * h + x @ p["wg"] + p["bg"]),
        np.tanh(p["ak"] * h + x @ p["wk"] + p["bk"]),
    )
    return gate * g + (1 - gate) * k


SLOW = {
    "gru": slow_gru, "lstm": slow_lstm, "min_gru": slow_min_gru, "min_lstm": slow_min_lstm, "para_gru": slow_para_gru,
    "para_lstm": slow_para_lstm, "lem": slow_lem, "cfc": slow_cfc,
}  # fmt: skip


@each_cell
def test_a_cell_is_its_papers_equations(name, x64):
    cell, slow = CELLS[name], SLOW[name.removesuffix("-heads")]
    params, xs = noisy(cell), inputs()
    ys, last = jit(lambda params, xs: recurrent(cell, params, xs, method=Sequential()))(params, xs)
    for row in range(B):
        state = (np.zeros(N),) * cell.lanes if cell.lanes > 1 else np.zeros(N)
        for t in range(T):
            state = slow(params, state, xs[row, t])
            assert_close(ys[row, t], lanes_of(state)[-1], EXACT)
        for got, want in zip(lanes_of(last), lanes_of(state), strict=True):
            assert_close(got[row], want, EXACT)


@pytest.mark.parametrize("name", ["min_gru", "min_lstm"])
def test_gates_start_by_keeping_the_state(name):
    """Without an input, a new cell keeps half of its state at least, and some units more than others."""
    params = CELLS[name].init(jax.random.key(0), D)
    zeros, ones = jnp.zeros((1, 1, D)), jnp.ones((1, N))
    kept = (
        recurrent(CELLS[name], params, zeros, ones, method=Sequential())[1]
        - recurrent(CELLS[name], params, zeros, 0 * ones, method=Sequential())[1]
    )
    assert (kept > 0.49).all() and kept.max() > 0.6
    assert (jnp.diff(kept[0]) > 0).all()


def torch_weights(module, names):
    """torch's stacked weights by gate: input matrices, recurrent matrices, both biases."""
    w, u, bw, bu = (getattr(module, name).detach().double().numpy() for name in
                    ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0"))  # fmt: skip
    parts = {
        name: [np.split(x, len(names))[i] for x in (w, u, bw, bu)] for i, name in enumerate(names)
    }
    params = {f"w{name}": part[0].T for name, part in parts.items()}
    params |= {f"b{name}": part[2] + part[3] for name, part in parts.items()}
    params["u"] = np.stack([part[1].T for part in parts.values()], 1)[None]
    return params, parts


def test_gru_equals_torch(x64):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.GRU(D, N, batch_first=True).double()
    params, parts = torch_weights(module, "rzn")
    params |= {"bn": parts["n"][2], "bu": parts["n"][3]}
    xs, h0 = inputs(), np.random.default_rng(2).standard_normal((B, N))
    want, last = module(torch.tensor(xs), torch.tensor(h0)[None])
    ys, h = recurrent(GRU(N), params, xs, h0)
    assert_close(ys, want.detach().numpy(), EXACT)
    assert_close(h, last[0].detach().numpy(), EXACT)


def test_lstm_equals_torch(x64):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    module = torch.nn.LSTM(D, N, batch_first=True).double()
    params, _ = torch_weights(module, "ifgo")
    xs, (c0, h0) = inputs(), np.random.default_rng(2).standard_normal((2, B, N))
    want, (h_last, c_last) = module(
        torch.tensor(xs), (torch.tensor(h0)[None], torch.tensor(c0)[None])
    )
    ys, (c, h) = recurrent(LSTM(N), params, xs, (c0, h0))
    assert_close(ys, want.detach().numpy(), EXACT)
    assert_close((c, h), (c_last[0].detach().numpy(), h_last[0].detach().numpy()), EXACT)


def test_gru_equals_flax(x64):
    nn = pytest.importorskip("flax.linen")
    params, xs = noisy(GRU(N)), inputs()
    flax_params = {f"i{g}": {"kernel": params["w" + g], "bias": params["b" + g]} for g in "rzn"}
    flax_params |= {f"h{g}": {"kernel": params["u"][0, :, i]} for i, g in enumerate("rzn")}
    flax_params["hn"]["bias"] = params["bu"]
    want = nn.RNN(nn.GRUCell(N, param_dtype=jnp.float64)).apply(
        {"params": {"cell": flax_params}}, xs
    )
    assert_close(recurrent(GRU(N), params, xs)[0], want, EXACT)


# ---------------------------------------------------------------- what a cell says of itself


def moment(cell, seed=3):
    """A random state and projections of one moment."""
    rng = np.random.default_rng(seed)
    state = tuple(rng.standard_normal((B, N)) for _ in range(cell.lanes))
    projections = {gate: rng.standard_normal((B, N)) for gate in cell.gates}
    return state if cell.lanes > 1 else state[0], projections


@each_cell
def test_the_jacobian_has_the_structure_that_the_cell_states(name, x64):
    cell = CELLS[name]
    params = noisy(cell)
    h, projections = moment(cell)
    lanes = jnp.stack(lanes_of(h))  # [k, B, n]

    def step(lanes):
        return jnp.stack(
            lanes_of(cell.step(params, tuple(lanes) if cell.lanes > 1 else lanes[0], projections))
        )

    jacobian = np.abs(jax.jacfwd(step)(lanes))  # [k, B, n, k, B, n]
    rows = np.eye(B, dtype=bool)[None, :, None, None, :, None]
    units = np.eye(N, dtype=bool)[None, None, :, None, None, :]
    assert (jacobian[~np.broadcast_to(rows, jacobian.shape)] == 0).all(), (
        "rows of a batch are coupled"
    )
    within = jacobian[:, 0, :, :, 0, :]
    if cell.jacobian in ("diag", "block"):
        assert (within[~np.broadcast_to(units[:, 0, :, :, 0], within.shape)] == 0).all(), (
            "units are coupled"
        )
        assert cell.jacobian == ("diag" if cell.lanes == 1 else "block")
        assert (np.einsum("inin->in", within) != 0).all()
    else:
        coupled = np.kron(np.eye(cell.heads), np.ones((N // cell.heads,) * 2)) > 0
        np.testing.assert_array_equal(within.max((0, 2)) > 0, coupled)


ELEMENTWISE = {
    "add", "add_any", "sub", "mul", "div", "neg", "logistic", "tanh", "exp", "log1p", "max", "min", "select_n", "ne",
    "abs", "convert_element_type", "integer_pow",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name for name, cell in CELLS.items() if cell.jacobian in ("diag", "block")]
)
def test_a_step_is_elementwise_over_lanes_with_vectors_of_weights(name):
    """What a kernel needs that gives a thread its own unit: lanes [B, n], weights [n], broadcast in so many words."""
    cell = CELLS[name]
    products = {letter + gate for gate in cell.gates for letter in "wb"}
    weights = {k: np.float32(v) for k, v in noisy(cell).items() if k not in products}
    assert all(v.shape == (N,) for v in weights.values())
    h, projections = jax.tree.map(np.float32, moment(cell))
    jaxpr = jax.make_jaxpr(cell.step)(weights, h, projections)
    for eqn in equations(jaxpr.jaxpr):
        if list(inner_jaxprs(eqn)):  # a call: its equations follow
            continue
        if eqn.primitive.name in ("reshape", "broadcast_in_dim", "squeeze"):
            assert eqn.invars[0].aval.shape in ((N,), (1, N), ()), eqn
        else:
            assert eqn.primitive.name in ELEMENTWISE, eqn
            assert {v.aval.shape for v in eqn.outvars} <= {(B, N), (1, N), ()}, eqn


@each_cell
def test_an_affine_cell_says_so_rightly(name, x64):
    cell = CELLS[name]
    params = noisy(cell)
    h, projections = moment(cell)
    if cell.affine is None:
        assert cell.closed_form(params, projections, h) is None
        twice = jax.jvp(lambda h: cell.step(params, h, projections), (h,), (h,))[1]
        assert not np.allclose(lanes_of(cell.step(params, h, projections))[0], lanes_of(twice)[0])
    else:
        a, b = cell.affine(params, projections)
        assert_close(a * h + b, cell.step(params, h, projections), EXACT)


@pytest.mark.parametrize("name", [*CELLS, "aaren"])
def test_declared_and_drawn_parameters_agree(name):
    cell = Aaren(N, 2) if name == "aaren" else CELLS[name]
    params, declared = cell.init(jax.random.key(0), D), cell.leaves(D)
    assert params.keys() == declared.keys()
    for key, leaf in declared.items():
        assert params[key].shape == leaf.shape and len(leaf.axes) == len(leaf.shape)
    again = cell.init(jax.random.key(0), D)
    jax.tree.map(np.testing.assert_array_equal, params, again)
    assert not np.array_equal(
        params["w" + cell.gates[0]], cell.init(jax.random.key(1), D)["w" + cell.gates[0]]
    )


# ---------------------------------------------------------------- a cell of one's own


def leaky(params, h, x):
    return jnp.tanh(params["a"][None] * h + x @ params["b"])


def test_a_function_is_a_cell(x64):
    rng = np.random.default_rng(0)
    params = {"a": rng.standard_normal(N), "b": rng.standard_normal((D, N))}
    cell = Cell(leaky, size=N)
    xs = inputs()
    ys, last = recurrent(cell, params, xs)  # the default of a cell that says nothing is the loop
    h = np.zeros((B, N))
    for t in range(T):
        h = np.tanh(params["a"] * h + xs[:, t] @ params["b"])
        assert_close(ys[:, t], h, EXACT)
    assert_close(last, h, EXACT)
    with pytest.raises(UsageError, match="this cell declares no parameters"):
        cell.init(jax.random.key(0), D)


def test_cells_are_static_arguments():
    for make in (GRU, LSTM, MinGRU, MinLSTM, ParaGRU, ParaLSTM, LEM, CfC, Aaren):
        assert make(4) == make(4) and hash(make(4)) == hash(make(4)) and make(4) != make(5)
        with pytest.raises(dataclasses.FrozenInstanceError):
            make(4).size = 5


@pytest.mark.parametrize(
    "make, sentence",
    [
        (lambda: ParaGRU(0), "para_gru.size=0 must be at least 1"),
        (lambda: GRU(6, heads=4), "heads=4 of cell gru do not divide size=6; legal are 1, 2, 3, 6"),
        (
            lambda: Cell(leaky, 4, jacobian="full"),
            "jacobian='full' is unknown; legal are diag, block, dense, auto",
        ),
        (lambda: Aaren(6, 4), "size=6 of Aaren must be a multiple of heads=4"),
    ],
)
def test_impossible_cells_are_refused(make, sentence):
    with pytest.raises(UsageError, match=sentence):
        make()
