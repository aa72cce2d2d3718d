"""The Legendre memory: what it holds, its four forms, the unit around it, and units that spike."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import OPTIMISED, jit
from scipy.linalg import solve
from tolerance import assert_close

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.nn.leaf import init_leaves
from jaxpar.nn.mixer import Context
from jaxpar.nn.mixers import Lmu
from jaxpar.nn.mixers.legendre import impulse_response, legendre, memory
from jaxpar.nn.mixers.spikes import integrate_and_fire, spike
from jaxpar.types import UsageError

EXACT = 1e-10  # float64, of forms that add up to T terms in another order
B, T, D = 2, 11, 6
STARTS = np.zeros((B, T), bool)
STARTS[0, [0, 3, 4]] = STARTS[1, 8] = True


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def test_the_system_is_the_exact_solution_over_a_step():
    """A by squaring 2^30 small steps, B by the integral in closed form; the equation's own matrices by loops."""
    d, theta = 5, 7.0
    a = np.array(
        [
            [(2 * i + 1) * (-1.0 if i < j else (-1.0) ** (i - j + 1)) for j in range(d)]
            for i in range(d)
        ]
    )
    b = np.array([(2 * i + 1) * (-1.0) ** i for i in range(d)])
    small = a / theta / 2**30
    step = np.eye(d) + small + small @ small / 2
    for _ in range(30):
        step = step @ step
    got_a, got_b = legendre(d, theta)
    np.testing.assert_allclose(got_a, step, atol=1e-6)
    np.testing.assert_allclose(got_b, solve(a, (got_a - np.eye(d)) @ b), atol=1e-12)
    np.testing.assert_allclose(
        impulse_response(d, theta, 9)[6], np.linalg.matrix_power(got_a, 6) @ got_b, atol=1e-12
    )


def test_a_memory_holds_its_window():
    """Of a slow wave the Legendre sum gives every input of the last theta steps, half a step late by the hold."""
    d, theta, length = 12, 64, 200
    wave = np.sin(2 * np.pi * np.arange(length) / 80)
    m = np.zeros(d)
    a, b = legendre(d, float(theta))
    for u in wave:
        m = a @ m + b * u
    lag = np.arange(theta)
    got = np.polynomial.legendre.legval(2 * (lag + 0.5) / theta - 1, m)
    np.testing.assert_allclose(got, wave[::-1][:theta], atol=1e-2)


def test_forms_agree_in_value_and_gradient(x64):
    u, before, d, theta = drawn(B, T, 2), drawn(B, 2, 5, seed=1), 5, 6.0
    mix = drawn(B, T, 2, 5, seed=2)

    def run(form, chunk, u, before, starts):
        def value(u, before):
            m = memory(u, before, starts, size=d, theta=theta, form=form, chunk=chunk)
            return (m * mix).sum(), m

        wanted = (0,) if before is None else (0, 1)
        return jit(jax.value_and_grad(value, wanted, has_aux=True))(u, before)

    want = run("scan", 0, u, before, STARTS)
    assert_close(run("chunks", 4, u, before, STARTS), want, EXACT)
    assert_close(run("affine", 0, u, before, STARTS), want, EXACT)
    alone = run("scan", 0, u, None, None)
    assert_close(run("fft", 0, u, None, None), alone, EXACT)
    assert_close(run("chunks", 4, u, None, None), alone, EXACT)
    assert_close(run("affine", 0, u, None, None), alone, EXACT)
    assert_close(run("affine", 0, u, before, None), run("scan", 0, u, before, None), EXACT)
    m, a = np.array(before), legendre(d, theta)  # and all of them a loop in NumPy
    for t in range(T):
        m = np.where(STARTS[:, t, None, None], 0, m) @ a[0].T + u[:, t, :, None] * a[1]
    np.testing.assert_allclose(want[0][1][:, -1], m, atol=EXACT)


@pytest.mark.slow  # 15 s
@pytest.mark.parametrize("form", ["fft", "chunks"])
def test_streaming_equals_the_parallel_forms_where_the_memory_is_large(form, x64):
    d, theta, length = 256, 4096.0, 5000
    u = drawn(1, length, 1)
    whole = jax.jit(
        functools.partial(memory, size=d, theta=theta, form=form), compiler_options=OPTIMISED
    )(u)
    stream = jax.jit(
        functools.partial(memory, size=d, theta=theta, form="scan"), compiler_options=OPTIMISED
    )
    first = stream(u[:, :3001])
    second = stream(u[:, 3001:], first[:, -1])
    assert_close(jnp.concatenate([first, second], 1), whole, EXACT)


# ---------------------------------------------------------------- the unit


def unit(**changes):
    return Lmu(**dict(units=6, channels=2, memory=4, theta=5.0) | changes)


def context_of(length=T, **fields):
    return Context(jnp.zeros((B, length), jnp.int32), **fields)


def params_of(mixer):
    leaves = mixer.leaves(D, 1.0, 1.0)
    return jax.tree.map(lambda x: x + 0.3, init_leaves(jax.random.key(0), leaves, jnp.float64))


def plain(mixer, params, x, start):
    """The equations of one row, token by token and channel by channel."""
    p, (a, b), ys = params["mixer"], legendre(mixer.memory, mixer.theta), []
    m = jnp.zeros((mixer.channels, mixer.memory))
    for t in range(x.shape[1]):
        m = jnp.zeros_like(m) if t == start else m
        y, new = 0.0, []
        for c in range(mixer.channels):
            new.append(a @ m[c] + b * (x[0, t] @ p["w_u"][:, c]))
            h = x[0, t] @ p["w_x"][:, c] + new[c] @ p["w_m"][c] + p["b"][c]
            h = h / 2 * (1 + jnp.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
            y = y + h @ p["w_out"][c]
        m = jnp.stack(new)
        ys.append(y)
    return jnp.stack(ys)[None]


def test_the_unit_equals_its_equations_in_value_and_gradient(x64):
    mixer, x, mix, starts = unit(), drawn(1, 4, D), drawn(1, 4, D, seed=3), np.arange(4)[None] == 2

    def value(run):
        return jit(jax.value_and_grad(lambda params, x: (run(params, x) * mix).sum(), (0, 1)))(
            params_of(mixer), x
        )

    context = Context(jnp.zeros((1, 4), jnp.int32), starts=jnp.asarray(starts))
    got = value(lambda params, x: mixer.apply(params, x, None, context)[0])
    assert_close(got, value(lambda params, x: plain(mixer, params, x, 2)), EXACT)


def test_transforms_are_taken_where_nothing_was_before(x64):
    mixer, x = unit(form="fft"), drawn(B, T, D)
    params = params_of(mixer)
    apply = jit(lambda x, cache, fresh: mixer.apply(params, x, cache, context_of(x.shape[1], fresh=fresh))[:2],
                static_argnums=2)  # fmt: skip
    whole, _ = apply(x, None, False)
    first, cache = apply(x[:, :7], mixer.init_cache(B, 9, D, x.dtype), True)
    second, _ = apply(x[:, 7:], cache, False)
    assert_close(jnp.concatenate([first, second], 1), whole, EXACT)
    traced = jax.make_jaxpr(lambda x: mixer.apply(params, x, None, context_of())[0])(x)
    assert "fft" in str(traced)


def test_spikes_have_an_arctangents_gradient():
    v = jnp.linspace(-1, 3, 9)
    np.testing.assert_array_equal(spike(v), v > 1)
    smooth = jax.grad(lambda v: (jnp.arctan(math.pi * (v - 1)) / math.pi).sum())(v)
    np.testing.assert_allclose(jax.grad(lambda v: spike(v).sum())(v), smooth, rtol=1e-6)


def test_units_fire_and_are_reset_by_what_they_fire(x64):
    x, beta = drawn(B, T, 3), 0.8
    spikes, potentials = jit(functools.partial(integrate_and_fire, beta=beta))(
        x, None, jnp.asarray(STARTS)
    )
    v = np.zeros((B, 3))
    for t in range(T):
        v = beta * np.where(STARTS[:, t, None], 0, v) + x[:, t]
        np.testing.assert_array_equal(spikes[:, t], v > 1)
        v = v - (v > 1)
        np.testing.assert_allclose(potentials[:, t], v, atol=1e-14)
    assert 0 < spikes.sum() < spikes.size


def test_spikes_of_one_step_at_a_time_are_those_of_the_whole():
    """In float32; what is within 1e-6 of the threshold may go either way, is counted, and is not there."""
    mixer, x, near = unit(units=16, spiking=True), 2 * drawn(B, 40, D).astype(np.float32), 0
    params = jax.tree.map(jnp.float32, init_leaves(jax.random.key(0), mixer.leaves(D, 1.0, 1.0)))
    apply = jit(lambda x, cache: mixer.apply(params, x, cache, context_of(x.shape[1]))[:2])
    whole, last = apply(x, mixer.init_cache(B, 0, D, x.dtype))
    cache, ys = mixer.init_cache(B, 0, D, x.dtype), []
    for t in range(x.shape[1]):
        y, cache = apply(x[:, t : t + 1], cache)
        ys.append(y)
        for v in cache[
            1:
        ]:  # potentials after their reset: at the threshold they were at 1, and are now at 0 or 1
            near += int((np.minimum(np.abs(v), np.abs(v - 1)) < 1e-6).sum())
    assert near == 0
    np.testing.assert_array_equal(np.concatenate(ys, 1), whole)
    assert_close(cache, last, 1e-5)
    assert 0.02 < (np.abs(whole) > 0).mean()


def test_what_cannot_be_is_refused():
    x, params = jnp.ones((B, 8, D)), {"mixer": {}}
    with pytest.raises(UsageError, match="units=7 must be a multiple of channels=2"):
        unit(units=7)
    with pytest.raises(
        UsageError, match="form='dct' is unknown; legal are auto, affine, chunks, fft, scan"
    ):
        memory(x, size=2, theta=4.0, form="dct")
    with pytest.raises(UsageError, match="form=fft begins with an empty memory"):
        memory(x, starts=jnp.zeros((B, 8), bool), size=2, theta=4.0, form="fft")
    with pytest.raises(UsageError, match="a Legendre memory cannot honour visible"):
        unit().apply(params, x, None, context_of(8, visible=jnp.ones((B, 8, 8), bool)))
    with (
        use_mesh(make_mesh(MeshSpec(context=2, data=4))),
        pytest.raises(UsageError, match="give mesh.context=1"),
    ):
        unit().apply(params, x, None, context_of(8))


@pytest.mark.parametrize("form", ["scan", "chunks", "affine"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_no_document_sees_what_is_not_finite_in_another(form, bad, x64):
    u = drawn(B, T, 2)
    before = drawn(B, 2, 5, seed=1)
    spoilt = u.copy()
    spoilt[0, 6, 0] = bad
    emptied = before.copy()
    emptied[1] = bad
    starts = np.zeros((B, T), bool)
    starts[0, [3, 8]] = True
    starts[1, 2] = True
    seen = np.zeros((B, T, 2), bool)  # and gradients of whole documents
    seen[0, 6:8, 0] = True
    seen[1, :2] = True
    document = seen.copy()
    document[0, 3:8, 0] = True

    def loss(u, before):
        m = memory(u, before, starts, size=5, theta=6.0, form=form, chunk=4)
        return jnp.sum(jnp.where(seen[..., None], 0, jnp.sin(m))), m

    gradient = jit(jax.grad(loss, has_aux=True))
    got, m = gradient(spoilt, emptied)
    want, wanted = gradient(u, before)
    assert not np.isfinite(m[seen]).all(-1).any()
    np.testing.assert_allclose(m[~seen], wanted[~seen], atol=EXACT)
    np.testing.assert_allclose(got[~document], want[~document], atol=EXACT)


def test_no_steps_have_no_memories():
    for form in ("auto", "affine", "scan", "fft"):
        assert memory(jnp.zeros((B, 0, 2)), size=5, theta=6.0, form=form).shape == (B, 0, 2, 5)
