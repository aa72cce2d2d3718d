"""HGRN, MatMul-free's token mixer: its equations step by step, a wide state, units over devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.cells.cell import Cell
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.nn.mixers import Hgrn
from jaxpar.solve import Sequential, parallel_scan
from jaxpar.types import UsageError

B, T, D, N = 2, 7, 4, 6
MIXER = Hgrn(N)


def drawn(dtype="float64"):
    rng, leaves = np.random.default_rng(0), MIXER.leaves(D, 1.0, 1.0)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), dtype), leaves, is_leaf=_is_leaf
    )
    return params, *(
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((B, T, D), (B, N))
    )


def _is_leaf(value):
    return hasattr(value, "init")


def context(**fields):
    return Context(jnp.broadcast_to(jnp.arange(T), (B, T)), **fields)


def by_hand(params, x, h, starts, eps=1e-5):
    """The paper's equations, one token after the other."""
    p, out = params["mixer"], []
    for t in range(T):
        h = jnp.where(starts[:, t, None], 0, h)
        f = jax.nn.sigmoid(x[:, t] @ p["wf"] + p["bf"][None])
        i = x[:, t] @ p["wi"] + p["bi"][None]
        h = f * h + i * jax.nn.sigmoid(i) * (1 - f)
        g = x[:, t] @ p["wg"]
        normed = h / jnp.sqrt((h * h).mean(-1, keepdims=True) + eps)
        out.append(normed * g * jax.nn.sigmoid(g) @ p["w_out"])
    return jnp.stack(out, 1), h


def test_it_is_its_equations_step_by_step_in_value_and_gradient(x64):
    params, x, h = drawn()
    starts = jnp.zeros((B, T), bool).at[0, 3].set(True).at[1, 0].set(True)

    def of(run):
        def weighted(params, x, h):
            y, last = run(params, x, h)
            return (y * jnp.cos(jnp.arange(y.size)).reshape(y.shape)).sum() + jnp.sin(last).sum(), (
                y,
                last,
            )

        return jit(jax.value_and_grad(weighted, (0, 1, 2), has_aux=True))(params, x, h)

    got = of(lambda params, x, h: MIXER.apply(params, x, h, context(starts=starts))[:2])
    assert_close(
        got, of(lambda params, x, h: by_hand(params, x, h, starts)), EXACT_MATHS["float64"]
    )


def test_its_scan_is_its_step(x64):
    cell: Cell = MIXER.cell
    rng = np.random.default_rng(0)
    lanes = {gate: jnp.asarray(4 * rng.standard_normal((T, B, N))) for gate in "fi"}
    h0 = jnp.asarray(rng.standard_normal((B, N)))

    def step(h, u):
        h = cell.step({}, h, u)
        return h, h

    want = parallel_scan(step, h0, lanes, method=Sequential())[1]
    assert_close(cell.closed_form({}, lanes, h0), want, EXACT_MATHS["float64"])


def test_bfloat16_keeps_a_wide_state_and_gates_of_any_strength():
    params, x, _ = drawn("bfloat16")
    cache = MIXER.init_cache(B, 100, D, jnp.bfloat16)
    assert cache.shape == (B, N) and cache.dtype == jnp.float32
    y, cache, _ = MIXER.apply(params, 1e3 * x, cache, context(seen=jnp.zeros(B, jnp.int32)))
    assert y.dtype == jnp.bfloat16 and cache.dtype == jnp.float32 and jnp.isfinite(y).all()


def test_units_lie_on_devices_apart_and_a_split_sequence_is_refused():
    params, x, h = drawn("float32")
    want = jit(lambda *args: MIXER.apply(*args, context())[:2])(params, x, h)
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))):
        sizes = ActivationSizes(tokens=8, layers=2, width=2, again=1, embed_dim=D, rows=1)
        (told,) = MIXER.transfers(sizes)
        assert tuple(told)[:4] == ("sum", ("tensor",), 6, 6 * 8 * 4)
    with use_mesh(make_mesh(MeshSpec(data=2, tensor=2), jax.devices()[:4])):
        got = jit(lambda *args: MIXER.apply(*args, context())[:2])(params, x, h)
        assert got[1].sharding.shard_shape((B, N)) == (B // 2, N // 2)
    assert_close(jax.device_get(got), jax.device_get(want), EXACT_MATHS["float32"])
    with (
        use_mesh(make_mesh(MeshSpec(data=4, context=2))),
        pytest.raises(UsageError, match="give mesh.context=1"),
    ):
        jax.eval_shape(lambda *args: MIXER.apply(*args, context())[:2], params, x, h)
