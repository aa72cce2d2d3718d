"""Convolutions and chunks: the equations token by token, and which tokens each sees."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.mixer import Context
from jaxpar.nn.mixers import Tcnca
from jaxpar.types import UsageError

D, C, T = 4, 4, 14
EXACT = 1e-10  # float64, of sums in another order


def layer(**changes):
    return Tcnca(**dict(num_heads=2, head_dim=2, chunk=C, dilations=(1, 3), taps=2) | changes)


def params_of(mixer):
    rng = np.random.default_rng(0)
    leaves = mixer.leaves(D, 1.0, 1.0)["mixer"]
    return {
        name: jnp.asarray(0.7 * rng.standard_normal(leaf.shape)) for name, leaf in leaves.items()
    }


def drawn(length=T, seed=1):
    return np.random.default_rng(seed).standard_normal((1, length, D))


def apply(mixer, p, x, start=None):
    length = x.shape[1]
    starts = None if start is None else jnp.arange(length)[None] == start
    return mixer.apply(
        {"mixer": p}, x, None, Context(jnp.zeros((1, length), jnp.int32), starts=starts)
    )[0]


def plain(mixer, p, x, start):
    """One row, token by token; a document begins at `start`."""
    lines, out = list(x), []
    for layer, dilation in enumerate(mixer.dilations):
        made = []
        for t in range(len(x)):
            total, first = p["shift"][layer], start if t >= start else 0
            for j in range(mixer.taps):
                if t - j * dilation >= first:
                    total = total + p["taps"][layer, j] * lines[t - j * dilation]
            made.append(lines[t] + total / (1 + jnp.exp(-total)))
        lines = made
    for t in range(len(x)):
        seen = [s for s in range(t // C * C, t + 1) if s >= start or t < start]
        y = 0.0
        for h in range(mixer.num_heads):
            rows = jnp.stack([lines[s] for s in seen])
            q, k, v = lines[t] @ p["wq"][:, h], rows @ p["wk"][:, h], rows @ p["wv"][:, h]
            weights = jnp.exp(k @ q / mixer.head_dim**0.5)
            y = y + (weights / weights.sum() @ v) @ p["wo"][h]
        out.append(y)
    return jnp.stack(out)[None]


def test_the_layer_equals_its_equations_in_value_and_gradient(x64):
    mixer, x, mix, start = layer(), drawn(7), drawn(7, seed=2), 5

    def value(run):
        return jit(jax.value_and_grad(lambda p, x: (run(p, x) * mix).sum(), (0, 1)))(
            params_of(mixer), x
        )

    got = value(lambda p, x: apply(mixer, p, x, start))
    assert_close(got, value(lambda p, x: plain(mixer, p, x[0], start)), EXACT)


def test_a_token_sees_its_chunk_and_what_the_convolutions_reach(x64):
    """Of every edit: exactly the tokens change that see it, none before it; a convolution reaches 1 + sum (k - 1) d."""
    mixer, x = layer(dilations=(1, 2), taps=3), drawn()
    assert mixer.receptive == 7
    run = jit(lambda p, x: apply(mixer, p, x))
    params = params_of(mixer)
    base, want, got = run(params, x), np.zeros((T, T), bool), np.zeros((T, T), bool)
    for edited in range(T):
        moved = run(params, x + 0.5 * (np.arange(T) == edited)[None, :, None])
        got[:, edited] = np.abs(moved - base)[0].max(-1) > 1e-12
        for t in range(T):
            want[t, edited] = any(
                0 <= s - edited < mixer.receptive for s in range(t // C * C, t + 1)
            )
    np.testing.assert_array_equal(got, want)


def test_what_cannot_be_is_refused():
    x = jnp.ones((8, 4, D))
    places = Context(jnp.zeros((8, 4), jnp.int32))
    with pytest.raises(
        UsageError, match="a mixer of convolutions and chunks cannot honour visible"
    ):
        layer().apply({"mixer": {}}, x, None, places._replace(visible=jnp.ones((8, 4, 4), bool)))
    with (
        use_mesh(make_mesh(MeshSpec(context=2, data=4))),
        pytest.raises(UsageError, match="give mesh.context=1"),
    ):
        layer().apply({"mixer": {}}, x, None, places)
    with pytest.raises(UsageError, match="taps=1 must be at least 2"):
        layer(taps=1)
