"""The cells of the literature, each written from its paper's equations; s is the logistic function, * elementwise.

| cell | state | Jacobian of a step | in parallel by |
|---|---|---|---|
| `GRU`, `LSTM` | h; (c, h) | dense | any iteration, at O(n^3) a step for Newton |
| `MinGRU`, `MinLSTM` | h | diagonal, and the same for all h | one affine scan, no iteration |
| `ParaGRU`, `CfC` | h | diagonal | Newton, a few iterations |
| `ParaLSTM`, `LEM` | (c, h); (z, y) | one 2 x 2 block a unit | Newton, a few iterations |

The steps of all but the first row are elementwise functions of lanes [B, n] with recurrent weights [n]. The biases of
gates that keep or renew the state start so that the units' states last from 2 to 100 steps (`jaxpar.nn.leaf`).
"""

import math

import jax
import jax.numpy as jnp

from jaxpar.nn.cells.cell import Cell, along, heads_product
from jaxpar.nn.leaf import Leaf

__all__ = ["GRU", "LEM", "LSTM", "CfC", "MinGRU", "MinLSTM", "ParaGRU", "ParaLSTM"]

RECURRENT_STD = 0.3
"""Of diagonal recurrent weights at the start: contracting, so that the state's own past is neither lost nor echoed."""


def GRU(size: int, heads: int = 1) -> Cell:
    """Gated recurrent unit (Cho et al. 2014, arXiv:1406.1078), in cuDNN's and PyTorch's form.

        r = s(x wr + br + h Ur)    z = s(x wz + bz + h Uz)
        n = tanh(x wn + bn + r * (h Un + bu))
        h' = (1 - z) * n + z * h

    With `heads` > 1 each U is block-diagonal. Of torch.nn.GRU's parameters: br and bz are the sums of its two biases.
    """
    return Cell(_gru, size, ("r", "z", "n"), _gru_weights, jacobian="dense", heads=heads)


def _gru_weights(cell: Cell) -> dict[str, Leaf]:
    return _matrices(cell, 3) | _bias(cell, "bu", "zeros") | _bias(cell, "bz", "keep")


def _gru(params, h, u):
    r, z, n = heads_product(h, params["u"])
    r, z = jax.nn.sigmoid(u["r"] + r), jax.nn.sigmoid(u["z"] + z)
    n = jnp.tanh(u["n"] + r * (n + along(params["bu"], n)))
    return (1 - z) * n + z * h


def LSTM(size: int, heads: int = 1) -> Cell:
    """Long short-term memory (Hochreiter and Schmidhuber 1997; forget gate of Gers et al. 2000), as PyTorch has it.

        i = s(x wi + bi + h Ui)    f = s(x wf + bf + h Uf)
        g = tanh(x wg + bg + h Ug)    o = s(x wo + bo + h Uo)
        c' = f * c + i * g    h' = o * tanh(c')

    State (c, h). With `heads` > 1 each U is block-diagonal. Of torch.nn.LSTM's parameters: each bias is the sum of its
    two.
    """
    return Cell(
        _lstm, size, ("i", "f", "g", "o"), _lstm_weights, lanes=2, jacobian="dense", heads=heads
    )


def _lstm_weights(cell: Cell) -> dict[str, Leaf]:
    return _matrices(cell, 4) | _bias(cell, "bf", "keep")


def _lstm(params, state, u):
    c, h = state
    i, f, g, o = heads_product(h, params["u"])
    c = jax.nn.sigmoid(u["f"] + f) * c + jax.nn.sigmoid(u["i"] + i) * jnp.tanh(u["g"] + g)
    return c, jax.nn.sigmoid(u["o"] + o) * jnp.tanh(c)


def MinGRU(size: int) -> Cell:
    """MinGRU (Feng et al. 2024, arXiv:2410.01201, section 3.1): the gate and the candidate see the input alone.

    z = s(x wz + bz)    h' = (1 - z) * h + z * (x wh + bh)
    """
    return Cell(
        _min_gru, size, ("z", "h"), _min_gru_weights, jacobian="diag", affine=_min_gru_affine
    )


def _min_gru_weights(cell: Cell) -> dict[str, Leaf]:
    return _bias(cell, "bz", "renew")


def _min_gru(params, h, u):
    a, b = _min_gru_affine(params, u)
    return a * h + b


def _min_gru_affine(params, u):
    del params
    return jax.nn.sigmoid(-u["z"]), jax.nn.sigmoid(u["z"]) * u["h"]


def MinLSTM(size: int) -> Cell:
    """MinLSTM (Feng et al. 2024, arXiv:2410.01201, section 3.2): a GRU's two gates apart, made to sum to one.

    f = s(x wf + bf)    i = s(x wi + bi)    h' = f / (f + i) * h + i / (f + i) * (x wh + bh)

    """
    return Cell(
        _min_lstm,
        size,
        ("f", "i", "h"),
        _min_lstm_weights,
        jacobian="diag",
        affine=_min_lstm_affine,
    )


def _min_lstm_weights(cell: Cell) -> dict[str, Leaf]:
    return _bias(cell, "bf", "keep")


def _min_lstm(params, h, u):
    a, b = _min_lstm_affine(params, u)
    return a * h + b


def _min_lstm_affine(params, u):
    del params
    # log f - log i, so that neither gate is ever divided by an underflown sum.
    odds = jax.nn.log_sigmoid(u["f"]) - jax.nn.log_sigmoid(u["i"])
    return jax.nn.sigmoid(odds), jax.nn.sigmoid(-odds) * u["h"]


def ParaGRU(size: int) -> Cell:
    """ParaGRU (arXiv:2510.21450, section 3): a GRU whose recurrent weights are vectors a, so its Jacobian is diagonal.

    z = s(x wz + bz + az * h)    r = s(x wr + br + ar * h)
    c = tanh(x wc + bc + ac * (r * h))    h' = (1 - z) * h + z * c
    """
    return Cell(_para_gru, size, ("z", "r", "c"), _para_gru_weights, jacobian="diag")


def _para_gru_weights(cell: Cell) -> dict[str, Leaf]:
    return _vectors(cell, ("az", "ar", "ac")) | _bias(cell, "bz", "renew")


def _para_gru(params, h, u):
    az, ar, ac = (along(params[name], h) for name in ("az", "ar", "ac"))
    z = jax.nn.sigmoid(u["z"] + az * h)
    r = jax.nn.sigmoid(u["r"] + ar * h)
    c = jnp.tanh(u["c"] + ac * (r * h))
    return (1 - z) * h + z * c


def ParaLSTM(size: int) -> Cell:
    """ParaLSTM (arXiv:2510.21450, section 3): coupled gates i = 1 - f, peepholes p, recurrent weights that are vectors.

        f = s(x wf + bf + af * h + pf * c)    g = tanh(x wg + bg + ag * h)
        c' = f * c + (1 - f) * g
        o = s(x wo + bo + ao * h + po * c')    h' = o * tanh(c')

    State (c, h).
    """
    return Cell(_para_lstm, size, ("f", "g", "o"), _para_lstm_weights, lanes=2, jacobian="block")


def _para_lstm_weights(cell: Cell) -> dict[str, Leaf]:
    return _vectors(cell, ("af", "ag", "ao", "pf", "po")) | _bias(cell, "bf", "keep")


def _para_lstm(params, state, u):
    c, h = state
    af, ag, ao, pf, po = (along(params[name], h) for name in ("af", "ag", "ao", "pf", "po"))
    f = jax.nn.sigmoid(u["f"] + af * h + pf * c)
    c = f * c + (1 - f) * jnp.tanh(u["g"] + ag * h)
    o = jax.nn.sigmoid(u["o"] + ao * h + po * c)
    return c, o * jnp.tanh(c)


def LEM(size: int) -> Cell:
    """Long expressive memory (Rusch et al. 2022, arXiv:2110.04744, eq. 3), its recurrent matrices taken as vectors a.

        d = s(x wd + bd + ad * y)    e = s(x we + be + ae * y)
        z' = (1 - d) * z + d * tanh(x wz + bz + az * y)
        y' = (1 - e) * y + e * tanh(x wy + by + ay * z')

    State (z, y); d and e are the learned time steps of the two, at most 1.
    """
    return Cell(_lem, size, ("d", "e", "z", "y"), _lem_weights, lanes=2, jacobian="block")


def _lem_weights(cell: Cell) -> dict[str, Leaf]:
    return (
        _vectors(cell, ("ad", "ae", "az", "ay"))
        | _bias(cell, "bd", "renew")
        | _bias(cell, "be", "renew")
    )


def _lem(params, state, u):
    z, y = state
    ad, ae, az, ay = (along(params[name], y) for name in ("ad", "ae", "az", "ay"))
    d, e = jax.nn.sigmoid(u["d"] + ad * y), jax.nn.sigmoid(u["e"] + ae * y)
    z = (1 - d) * z + d * jnp.tanh(u["z"] + az * y)
    return z, (1 - e) * y + e * jnp.tanh(u["y"] + ay * z)


def CfC(size: int) -> Cell:
    """Closed-form continuous-time cell (Hasani et al. 2022, arXiv:2106.13898, eq. 5) after a unit of time.

        f = x wf + bf + af * h    g = tanh(x wg + bg + ag * h)    k = tanh(x wk + bk + ak * h)
        h' = s(-f) * g + (1 - s(-f)) * k

    The three heads share no hidden layer, and their recurrent weights are vectors a. The paper's time t multiplies f:
    for samples that are t apart, scale wf and bf.
    """
    return Cell(_cfc, size, ("f", "g", "k"), _cfc_weights, jacobian="diag")


def _cfc_weights(cell: Cell) -> dict[str, Leaf]:
    return _vectors(cell, ("af", "ag", "ak"))


def _cfc(params, h, u):
    af, ag, ak = (along(params[name], h) for name in ("af", "ag", "ak"))
    gate = jax.nn.sigmoid(-(u["f"] + af * h))
    return gate * jnp.tanh(u["g"] + ag * h) + (1 - gate) * jnp.tanh(u["k"] + ak * h)


def _vectors(cell: Cell, names: tuple[str, ...]) -> dict[str, Leaf]:
    return {name: Leaf((cell.size,), ("mlp",), RECURRENT_STD) for name in names}


def _matrices(cell: Cell, gates: int) -> dict[str, Leaf]:
    """Recurrent matrices [H, K, G, K] of all gates in one leaf: one product a step."""
    width = cell.size // cell.heads
    return {
        "u": Leaf(
            (cell.heads, width, gates, width), ("heads", None, None, None), 1 / math.sqrt(width)
        )
    }


def _bias(cell: Cell, name: str, init: str) -> dict[str, Leaf]:
    return {name: Leaf((cell.size,), ("mlp",), init)}
