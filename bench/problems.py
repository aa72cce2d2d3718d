"""The recurrences that the benchmarks solve: cells, weights, inputs, and their float64 sequential solution.

Everything is drawn with numpy, so that each framework gets the same numbers. A cell is `step(w, h, x) -> h` on arrays
[..., n] of any float type; `input_projections` computes its pre-activations x from the inputs of all steps at once.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import sigmoid

TRAINED = "uniform"  # U(-0.9, 0.9): recurrent weights of a trained diagonal cell, far from its initialisation


def dot(h, u):
    """Returns h @ u at u's precision, summed in at least float32.

    TF32 would be an error of the problem, not of the solver.
    """
    wide = jnp.promote_types(u.dtype, jnp.float32)
    return jnp.matmul(h.astype(u.dtype), u, precision="highest", preferred_element_type=wide)


def para_gru(w, h, x):
    """ParaGRU (Danieli et al. 2025, eq. 3.1a) with diagonal recurrent weights; x = (update, reset, candidate)."""
    z = sigmoid(w["z"] * h + x[0])
    r = sigmoid(w["r"] * h + x[1])
    n = jnp.tanh(w["n"] * (h * r) + x[2])
    return h + z * (n - h)


def para_lstm(w, state, x):
    """ParaLSTM (eq. 3.1b): coupled gates, peepholes; state = (c, h), x = (forget, candidate, output)."""
    c, h = state
    f = sigmoid(w["f"] * h + w["pf"] * c + x[0])
    c = f * c + (1 - f) * jnp.tanh(w["z"] * h + x[1])
    return c, sigmoid(w["o"] * h + w["po"] * c + x[2]) * jnp.tanh(c)


def gru(w, h, x):
    """The GRU of cuDNN without biases; x [..., 3n] holds reset, update, candidate."""
    r, z, n = jnp.split(dot(h, w["u"]), 3, -1)
    a, b, c = jnp.split(x, 3, -1)
    z = sigmoid(b + z)
    return (1 - z) * jnp.tanh(c + sigmoid(a + r) * n) + z * h


def lstm(w, state, x):
    """The LSTM of cuDNN without biases; state = (c, h), x [..., 4n] holds input, forget, candidate, output."""
    c, h = state
    i, f, g, o = jnp.split(x + dot(h, w["u"]), 4, -1)
    c = sigmoid(f) * c + sigmoid(i) * jnp.tanh(g)
    return c, sigmoid(o) * jnp.tanh(c)


def tanh(w, h, x):
    """Elman's network without biases."""
    return jnp.tanh(x + dot(h, w["u"]))


STEPS = {"para_gru": para_gru, "para_lstm": para_lstm, "gru": gru, "lstm": lstm, "tanh": tanh}
NAMES = {"para_gru": "zrn", "para_lstm": ("f", "z", "o", "pf", "po")}  # diagonal weights
GATES = {
    "gru": 3,
    "lstm": 4,
    "tanh": 1,
}  # of cells that multiply by matrices: w["w"] [n, gates n] and w["u"] alike


def weights(cell: str, n: int, scale: str = TRAINED, seed: int = 0) -> dict[str, np.ndarray]:
    """Draws weights in float64.

    Scales: "init" (the initialisation that the cell's authors use), "uniform" (entries of U(-0.9, 0.9)), "normal",
    "normal2" (entries of N(0, 1) and twice that), and for matrices "gain" x (N(0, x^2 / n)).
    """
    rng = np.random.default_rng(seed)

    def draw(shape, fan):
        if scale == "uniform":
            return rng.uniform(-0.9, 0.9, shape)
        std = {"init": 1 / math.sqrt(fan), "normal": 1.0, "normal2": 2.0}.get(scale)
        return rng.normal(size=shape) * (
            float(scale.removeprefix("gain ")) / math.sqrt(fan) if std is None else std
        )

    if cell in NAMES:
        return {name: draw(n, 5 * n / 4) for name in NAMES[cell]}
    shape = (n, GATES[cell] * n)
    return {"w": rng.normal(size=shape) / math.sqrt(n), "u": draw(shape, n)}


def inputs(cell: str, length: int, batch: int, n: int, seed: int = 1):
    """Draws N(0, 1) in float32: pre-activations [T, B, n] of each gate for diagonal cells, inputs [T, B, n] else."""
    rng = np.random.default_rng(seed)
    drawn = [
        rng.standard_normal((length, batch, n), np.float32)
        for _ in range(3 if cell in NAMES else 1)
    ]
    return tuple(drawn) if cell in NAMES else drawn[0]


def input_projections(cell: str, w, xs):
    """Returns what each step of the recurrence consumes: of matrix cells one product over all steps."""
    return xs if cell in NAMES else dot(xs, w["w"])


def initial(cell: str, shape: tuple[int, ...], dtype=jnp.float32):
    """Returns the zero state for inputs of a dtype: at least float32."""
    zero = jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32))
    return (zero, zero) if "lstm" in cell else zero


def output(cell: str, states):
    """Returns h of the states."""
    return states[1] if "lstm" in cell else states


def step_of(cell: str, w, dtype):
    """Returns f(carry, x) -> (carry, y) as `lax.scan` takes it, with y = h rounded to the dtype of the inputs."""

    def step(carry, x):
        carry = STEPS[cell](w, carry, x)
        return carry, output(cell, carry).astype(dtype)

    return step


def sequential(cell: str, w, xs, unroll: int = 1):
    """Returns ys [T, B, n] by `lax.scan`."""
    leaf = jax.tree.leaves(xs)[0]
    start = initial(cell, leaf.shape[1:], leaf.dtype)
    return lax.scan(
        step_of(cell, w, leaf.dtype), start, input_projections(cell, w, xs), unroll=unroll
    )[1]


@functools.cache
def _solved(cell: str):
    """Compiles ys and gradients of a cell, once for every shape."""

    @jax.jit
    def solve(w, xs, g):
        ys, pull = jax.vjp(lambda w, xs: sequential(cell, w, xs), w, xs)
        return (ys, *pull(g))

    return solve


def reference(cell: str, w, xs, g, on_accelerator: bool = False):
    """Returns ys and the gradients of sum(ys g) by (w, xs), all in float64: `lax.scan` and its reverse mode.

    On the CPU, except where matrices are so wide that an accelerator's float64 is needed.
    """
    device = jax.devices()[0] if on_accelerator else jax.devices("cpu")[0]
    with jax.enable_x64(True), jax.default_device(device):
        w, xs, g = jax.tree.map(
            lambda x: jax.device_put(np.asarray(x, np.float64), device), (w, xs, g)
        )
        return jax.tree.map(np.asarray, _solved(cell)(w, xs, g))


def part(cell: str, w, xs, g):
    """Returns a few channels of a diagonal cell, or the first sequence of another: what can be solved on its own."""
    if cell in NAMES:
        return (
            {name: value[:4] for name, value in w.items()},
            tuple(x[..., :4] for x in xs),
            g[..., :4],
        )
    return w, xs[:, :1], g[:, :1]


def part_of(cell: str, array):
    """Returns that part of one array [T, B, n]."""
    return array[..., :4] if cell in NAMES else array[:, :1]


def affine_reference(a, b, g):
    """Returns h of h[t] = a[t] h[t-1] + b[t] and the gradients of sum(h g) by (a, b), in float64.

    Time is first; a [T, ...] of b's shape, or [T, ..., k, k] for b [T, ..., k].
    """
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        a, b, g = (jnp.asarray(np.asarray(x, np.float64)) for x in (a, b, g))

        def solve(a, b):
            def step(h, ab):
                h = (
                    ab[0] * h if a.ndim == b.ndim else jnp.einsum("...ij,...j->...i", ab[0], h)
                ) + ab[1]
                return h, h

            return lax.scan(step, jnp.zeros_like(b[0]), (a, b))[1]

        h, pull = jax.vjp(jax.jit(solve), a, b)
        return jax.tree.map(np.asarray, (h, *pull(g)))
