"""Each layer against its paper's equations, a plain loop over time in NumPy from the layer's own parameters.

One row of T tokens and one head after the other. Every parameter is drawn, those as well that begin
at 0 or 1, so that nothing drops out of an equation. Constants below the roots of norms are ours:
papers do not tell them.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from jaxpar.nn.leaf import Leaf
from jaxpar.nn.mixer import Context
from jaxpar.nn.mixers import Hgrn, MatrixState, layer_of
from jaxpar.nn.position import Rope

B, T, D, H, K, V, TAPS = 2, 7, 5, 4, 4, 3, 4
EXACT = 1e-9


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def swish(x):
    return x * sigmoid(x)


def softplus(x):
    return np.log(1 + np.exp(x))


def mean_square_norm(x, scale=1.0):
    return x / np.sqrt(np.mean(x**2) + 1e-5) * scale


def layer_norm(x, scale):
    return (x - np.mean(x)) / np.sqrt(np.var(x) + 1e-5) * scale


def convolved(lane, taps, t):
    """A causal depthwise convolution at token t; the last tap is the token's own."""
    return sum(taps[TAPS - 1 - back] * lane[t - back] for back in range(TAPS) if t >= back)


def retention(p, x):
    """Retentive network, equations 5 to 8: positions are phases, e^(i n theta), and the state is complex."""
    y, theta = np.zeros((T, D)), np.array([1.0, 0.25])  # 16^(-2 j / K)
    for h in range(H):
        state, gamma = np.zeros((K // 2, V), complex), 1 - 2.0 ** (-5 - h)
        for n in range(T):
            q, k = (x[n] @ p[name][:, h] for name in ("w_q", "w_k"))
            q, k = (z[: K // 2] + 1j * z[K // 2 :] for z in (q, k))
            q, k = q * np.exp(1j * n * theta) / np.sqrt(K), k * np.exp(1j * n * theta)
            state = gamma * state + np.outer(k.conj(), x[n] @ p["w_v"][:, h])
            head = mean_square_norm((q @ state).real, p["norm_scale"][h])
            y[n] += (swish(x[n] @ p["w_r"][:, h]) * head) @ p["w_out"][h]
    return y


def gla(p, x):
    """Gated linear attention, section 4.4: alpha is of each row of the state, to the power 1/16."""
    y = np.zeros((T, D))
    for h in range(H):
        state = np.zeros((K, V))
        for t in range(T):
            q, k, v, r = (x[t] @ p[name][:, h] for name in ("w_q", "w_k", "w_v", "w_r"))
            alpha = sigmoid(x[t] @ p["w_gate_in"] @ p["w_gate_out"][:, h] + p["b_gate"][h]) ** (
                1 / 16
            )
            state = np.diag(alpha) @ state + np.outer(k, v)
            y[t] += (mean_square_norm(q @ state / np.sqrt(K), p["norm_scale"][h]) * swish(r)) @ p[
                "w_out"
            ][h]
    return y


def simple_gla(p, x):
    """The same with one alpha a head; the sum over the past as it stands, without a state."""
    y = np.zeros((T, D))
    alpha = sigmoid(x @ p["w_gate"] + p["b_gate"]) ** (1 / 16)
    for h in range(H):
        q, k, v, r = (x @ p[name][:, h] for name in ("w_q", "w_k", "w_v", "w_r"))
        for t in range(T):
            o = sum(
                np.prod(alpha[s + 1 : t + 1, h]) * (q[t] @ k[s]) * v[s] for s in range(t + 1)
            ) / np.sqrt(K)
            y[t] += (mean_square_norm(o, p["norm_scale"][h]) * swish(r[t])) @ p["w_out"][h]
    return y


def mamba2(p, x):
    """State space duality: h' = exp(A dt) h + dt B x^T, y = C h + D x, two heads to a group of B, C and the norm."""
    groups, y = p["w_b"].shape[1], np.zeros((T, D))
    states, lanes = (
        np.zeros((H, K, V)),
        {name: np.einsum("td,dhv->thv", x, p[f"w_{name}"]) for name in "xbc"},
    )
    for t in range(T):
        u, b, c = (swish(convolved(lanes[n], p[f"conv_{n}"], t) + p[f"bias_{n}"]) for n in "xbc")
        gated = np.zeros((H, V))
        for h in range(H):
            dt, g = softplus(x[t] @ p["w_dt"][:, h] + p["b_dt"][h]), h * groups // H
            states[h] = np.exp(-np.exp(p["a_log"][h]) * dt) * states[h] + np.outer(dt * b[g], u[h])
            gated[h] = (c[g] @ states[h] + p["d_skip"][h] * u[h]) * swish(x[t] @ p["w_z"][:, h])
        for g in range(groups):
            own = slice(g * H // groups, (g + 1) * H // groups)
            y[t] += np.einsum(
                "hv,hvd->d", mean_square_norm(gated[own], p["norm_scale"][own]), p["w_out"][own]
            )
    return y


def mlstm(p, x):
    """xLSTM, equations 19 to 27, stabilised by m as in 15 to 17: gates are exp(log i - m) and exp(log f + m' - m)."""
    y, floors = np.zeros((T, D)), []
    for h in range(H):
        c, n, m = np.zeros((V, K)), np.zeros(K), -np.inf
        for t in range(T):
            q, k, v, r = (x[t] @ p[name][:, h] for name in ("w_q", "w_k", "w_v", "w_r"))
            k, log_i = k / np.sqrt(K), x[t] @ p["w_i"][:, h] + p["b_i"][h]
            log_f, before = np.log(sigmoid(x[t] @ p["w_f"][:, h] + p["b_f"][h])), m
            m = max(log_f + before, log_i)
            i, f = np.exp(log_i - m), np.exp(log_f + before - m)
            c, n = f * c + i * np.outer(v, k), f * n + i * k
            floors.append(abs(n @ q) < np.exp(-m))
            out = layer_norm(c @ q / max(abs(n @ q), np.exp(-m)), p["norm_scale"][h])
            y[t] += (sigmoid(r) * out) @ p["w_out"][h]
    assert 0.1 < np.mean(floors) < 0.9, "both sides of the maximum are taken"
    return y


def mlstm_sig(p, x):
    """Tiled flash linear attention, section 2: input gates are sigmoids, and there is neither n nor m."""
    y = np.zeros((T, D))
    for h in range(H):
        c = np.zeros((V, K))
        for t in range(T):
            q, k, v, r = (x[t] @ p[name][:, h] for name in ("w_q", "w_k", "w_v", "w_r"))
            i, f = (sigmoid(x[t] @ p[f"w_{gate}"][:, h] + p[f"b_{gate}"][h]) for gate in "if")
            c = f * c + i * np.outer(v, k / np.sqrt(K))
            y[t] += (sigmoid(r) * layer_norm(c @ q, p["norm_scale"][h])) @ p["w_out"][h]
    return y


def gated_delta(p, x):
    """Gated delta networks, equation 10: S' = S (alpha (1 - beta k k^T)) + beta v k^T."""
    y = np.zeros((T, D))
    for h in range(H):
        state, lanes = np.zeros((V, K)), {name: x @ p[f"w_{name}"][:, h] for name in "qkv"}
        for t in range(T):
            q, k, v = (swish(convolved(lanes[name], p[f"conv_{name}"][:, h], t)) for name in "qkv")
            q, k = (z / np.sqrt(z @ z + 1e-6) for z in (q, k))
            alpha = np.exp(-np.exp(p["a_log"][h]) * softplus(x[t] @ p["w_a"][:, h] + p["b_a"][h]))
            beta = sigmoid(x[t] @ p["w_b"][:, h])
            state = state @ (alpha * (np.eye(K) - beta * np.outer(k, k))) + beta * np.outer(v, k)
            out = mean_square_norm(state @ q / np.sqrt(K), p["norm_scale"][h])
            y[t] += (out * swish(x[t] @ p["w_r"][:, h])) @ p["w_out"][h]
    return y


def rwkv6(p, x):
    """Eagle and Finch, equations 16 to 22: the sum over the past as it stands, with products of decays between."""
    y, before = np.zeros((T, D)), np.vstack([np.zeros(D), x[:-1]])
    inner, lerp = x + (before - x) * p["mu_mix"], {}
    for n, name in enumerate(("d", "k", "v", "r", "g")):
        lora = p["mu"][n] + np.tanh(inner @ p["mix_in"][:, n]) @ p["mix_out"][n]
        lerp[name] = x + (before - x) * lora
    for h in range(H):
        k, v, r, g = (lerp[name] @ p[f"w_{name}"][:, h] for name in "kvrg")
        w = np.exp(
            -np.exp(p["b_decay"][h] + np.tanh(lerp["d"] @ p["w_decay_in"]) @ p["w_decay_out"][:, h])
        )
        for t in range(T):
            wkv = np.outer(p["bonus"][h] * k[t], v[t])
            for i in range(t):
                wkv += np.outer(np.prod(w[i + 1 : t], 0) * k[i], v[i])
            y[t] += (swish(g[t]) * layer_norm(r[t] @ wkv, p["norm_scale"][h])) @ p["w_out"][h]
    return y


def hgrn(p, x):
    """Scalable MatMul-free language modelling, section 3.3.1: units of one number, no head."""
    y, h = np.zeros((T, D)), np.zeros(len(p["w_out"]))
    for t in range(T):
        f, c = sigmoid(x[t] @ p["wf"] + p["bf"]), swish(x[t] @ p["wi"] + p["bi"])
        h = f * h + (1 - f) * c
        y[t] = (mean_square_norm(h) * swish(x[t] @ p["wg"])) @ p["w_out"]
    return y


PAPERS = (retention, gla, simple_gla, mamba2, mlstm, mlstm_sig, gated_delta, rwkv6, hgrn)
# Angles are made from frequencies in float32, of which these are exact.
CHANGES = {"retention": {"positions": Rope(theta=16.0)}, "mamba2": {"num_groups": 2}}
CHANGES |= {"gla": {"rank": 3}, "rwkv6": {"rank": 3}}


def leaf_by_leaf(value, p, ways, step=3e-5):
    """The change of `value` as each leaf alone moves along its way, by four loops, right but for fifth derivatives."""

    def change(name, by):
        return value(p | {name: p[name] + by * ways[name]}) - value(
            p | {name: p[name] - by * ways[name]}
        )

    return {name: (8 * change(name, step) - change(name, 2 * step)) / (12 * step) for name in p}


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.__name__)
def test_a_layer_is_its_papers_equations_in_value_and_gradient(paper, x64):
    name, rng = paper.__name__, np.random.default_rng(0)
    if name == "hgrn":
        mixer = Hgrn(6)
    else:
        mixer = MatrixState(
            dataclasses.replace(layer_of(name, H * V, H, K), **CHANGES.get(name, {})), chunk=4
        )
    shapes = {name: leaf.shape for name, leaf in mixer.leaves(D, 1.0, 1.0)["mixer"].items()} | {
        "x": (B, T, D)
    }
    p, ways = (
        {name: 0.7 * rng.standard_normal(shape) for name, shape in shapes.items()} for _ in range(2)
    )
    mix = rng.standard_normal((B, T, D))
    if name == "mlstm":
        p["b_i"] += np.array([-2.0, -2.0, 0.0, 800.0])  # no float holds the exponential of the last
    context = Context(jnp.broadcast_to(jnp.arange(T), (B, T)))

    def ours(p):
        y = mixer.apply({"mixer": p}, p["x"], None, context)[0]
        return (y * mix).sum(), y

    def loops(p):
        return np.stack([paper(p, row) for row in p["x"]])

    (_, got), grads = jit(jax.value_and_grad(ours, has_aux=True))(jax.tree.map(jnp.asarray, p))
    assert_close(got, loops(p), EXACT)
    slopes = {name: (grads[name] * ways[name]).sum() for name in p}
    assert_close(
        slopes, leaf_by_leaf(lambda p: (loops(p) * mix).sum(), p, ways), 1e-7
    )  # of a difference


# Numbers of a head's state beside the words of the table of docs/matrix_state.md; W - 1 inputs are of D_x columns.
STATED = {
    "gla": ("K V", lambda k, v: k * v),
    "simple_gla": ("K V", lambda k, v: k * v),
    "retention": ("K V", lambda k, v: k * v),
    "mlstm": ("K (V + 1) + 1", lambda k, v: k * (v + 1) + 1),
    "mlstm_sig": ("K V", lambda k, v: k * v),
    "mamba2": (
        "K V, and W - 1 inputs",
        lambda k, v: k * v + (TAPS - 1) * (v + 2 * k / H),
    ),  # B and C are shared
    "gated_delta": ("K V, and W - 1 inputs", lambda k, v: k * v + (TAPS - 1) * (2 * k + v)),
    "rwkv6": ("K V; of a layer D", lambda k, v: k * v + D / H),
    "hgrn": ("1 a unit", None),
}


def test_states_are_as_large_as_the_page_says_whatever_came_before():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "matrix_state.md").read_text()
    rows = [
        [cell.strip() for cell in line.split(" | ")]
        for line in page.splitlines()
        if line.startswith("| `")
    ]
    said = {row[0].strip("|` "): row[-2] for row in rows if len(row) == 9 and row[-2] != "state"}
    assert said == {name: words for name, (words, _) in STATED.items()}
    for name, (_, numbers) in STATED.items():
        mixer = Hgrn(H * V) if numbers is None else MatrixState(layer_of(name, H * V, H, K))
        for slots in (1, 4096):
            cache = jax.tree.leaves(
                jax.eval_shape(lambda m=mixer, n=slots: m.init_cache(B, n, D, jnp.bfloat16))
            )
            assert sum(x.size for x in cache) == B * (
                H * V if numbers is None else round(H * numbers(K, V))
            ), name
            assert {x.dtype for x in cache} == {np.dtype("float32")}, name


@pytest.mark.parametrize("name", [name for name in STATED if name != "hgrn"])
def test_chunks_are_as_long_as_the_mixer_says(name):
    """Results do not depend on it but by rounding; the arrays of pairs are [C, C]."""

    def has_pairs_of(chunk):
        mixer = MatrixState(layer_of(name, H * V, H, K), chunk=chunk)
        params = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape),
            mixer.leaves(D, 1.0, 1.0),
            is_leaf=lambda x: isinstance(x, Leaf),
        )
        context = Context(jnp.zeros((1, 40), int))
        program = jax.make_jaxpr(lambda x: mixer.apply(params, x, None, context)[0])
        return [f",{size},{size}]" in str(program(jnp.zeros((1, 40, D)))) for size in (16, 32)]

    assert has_pairs_of(16) == [True, False]
    assert has_pairs_of(32)[1]
