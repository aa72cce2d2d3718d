"""`parallel_scan` is `lax.scan`: values, pytrees, transforms, and sentences for what it cannot take."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells_to_solve import CELLS, DEFAULTS, distance, inputs, once_each, start, weights
from fast import jit
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.solve import Jacobi, Newton, ParallelBackward, Picard, Quasi, Sequential, parallel_scan
from jaxpar.types import UsageError

METHODS = {
    "newton": Newton(),
    "windows": Newton(window=16),  # 40 steps: the last window is filled up
    "damped": Newton(damping=0.2, clip=1.0),
    "quasi": Quasi(),
    "hutchinson": Quasi("hutchinson"),
    "jacobi": Jacobi(),
    "picard": Picard(),
    "backward": ParallelBackward(),
    "sequential": Sequential(unroll=2),
}


@once_each(METHODS)
def test_every_method_gives_the_states_of_the_loop(name, cell, x64):
    step, params, xs = functools.partial(CELLS[cell], weights()), start(cell), inputs(40)
    got = jit(lambda h, xs: parallel_scan(step, h, xs, method=METHODS[name], with_stats=True))(
        params, xs
    )
    carry, ys, stats = got
    assert distance((carry, ys), jax.lax.scan(step, params, xs)) < 1e-10
    if name in (
        "newton",
        "windows",
        "backward",
        "sequential",
    ):  # the others may have to be run sequentially
        assert stats.converged and stats.first_bad == 40 and stats.residual <= 1
    assert (stats.iterations == 0) == (name in ("backward", "sequential"))


CASES = {
    "no inputs": (lambda h, _: (jnp.sin(h) + 0.1, h), lambda: jnp.ones(3), None, 9),
    "no outputs": (lambda h, x: (jnp.sin(h) + x, None), lambda: 0.5, np.ones(9), None),
    "python numbers": (lambda h, x: (0.5 * h + x, h), lambda: 0, np.ones(9), None),
    "nested": (
        lambda h, x: (
            {"a": (jnp.cos(h["a"][0]) * x["u"], h["b"] * 0.5), "b": h["b"] + h["a"][1]},
            [x["n"] + 1, h],
        ),
        lambda: {"a": (jnp.ones((2, 1)), jnp.zeros(3)), "b": jnp.ones(3)},
        {"u": np.ones(9), "n": np.arange(9)},
        9,
    ),
    "one step": (lambda h, x: (jnp.sin(h) + x, h), lambda: jnp.ones(2), np.ones((1, 2)), None),
    "no step": (lambda h, x: (jnp.sin(h) + x, h), lambda: jnp.ones(2), np.ones((0, 2)), None),
    "no state": (lambda h, x: (h, x + 1), lambda: None, np.ones(9), None),
}


@pytest.mark.parametrize(
    "name, reverse", [*((name, False) for name in CASES), ("nested", True), ("no step", True)]
)
def test_whatever_a_loop_takes(name, reverse):
    f, init, xs, length = CASES[name]
    want = jax.lax.scan(f, init(), xs, length, reverse)
    got = jit(lambda h, xs: parallel_scan(f, h, xs, length, reverse, method=Newton()))(init(), xs)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6)


def test_random_keys_are_inputs():
    def f(h, key):
        return 0.5 * h + jax.random.normal(key, h.shape), h.sum()

    keys = jax.random.split(jax.random.key(0), 10)
    got = jit(lambda h, keys: parallel_scan(f, h, keys, method=Newton(window=4)))(
        jnp.zeros(2), keys
    )
    assert distance(got, jax.lax.scan(f, jnp.zeros(2), keys)) < 1e-6


@settings(max_examples=3, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(1, 3), max_size=2).map(tuple), min_size=1, max_size=3),
    length=st.integers(1, 7),
    window=st.sampled_from([None, 3]),
    reverse=st.booleans(),
)
def test_any_pytree(shapes, length, window, reverse):
    def f(state, x):
        total = sum(leaf.sum() for leaf in state)
        new = [jnp.sin(leaf + x) * 0.5 + 0.1 * total for leaf in state]
        return new, {"y": new[0], "old": state}

    init, xs = [jnp.ones(shape) for shape in shapes], jnp.linspace(0, 1, length)
    got = jit(lambda h, xs: parallel_scan(f, h, xs, reverse=reverse, method=Newton(window=window)))(
        init, xs
    )
    want = jax.lax.scan(f, init, xs, reverse=reverse)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    assert distance(got, want) < 1e-5


def test_vmap_is_a_loop_with_statistics_of_each_sequence(x64):
    xs = jnp.stack([inputs(40, seed) for seed in range(3)])
    gains = jnp.array([0.1, 1.0, 2.0])

    def solve(gain, xs):
        params = jax.tree.map(lambda leaf: gain * leaf, weights())
        return parallel_scan(
            functools.partial(CELLS["rnn"], params),
            start("rnn"),
            xs,
            with_stats=True,
            method=Newton(),
        )

    carry, ys, stats = jit(jax.vmap(solve))(gains, xs)
    alone = jit(solve)
    for number in range(3):
        one = alone(gains[number], xs[number])
        mine = [leaf[number] for leaf in jax.tree.leaves((carry, ys))]
        assert distance(mine, list(one[:2])) < 1e-12
        assert stats.iterations[number] == one[2].iterations and stats.converged[number]
    assert len(set(stats.iterations.tolist())) > 1


def test_a_guess_saves_iterations(x64):
    step, xs = functools.partial(CELLS["rnn"], weights("normal")), inputs(40)
    states = jax.lax.scan(lambda h, x: (step(h, x)[0],) * 2, start("rnn"), xs)[1]
    solve = jit(
        lambda guess: parallel_scan(
            step, start("rnn"), xs, guess=guess, with_stats=True, method=Newton()
        )[2]
    )
    assert solve(states).iterations == 1 < solve(jnp.zeros_like(states)).iterations


def test_what_does_not_converge_is_run_sequentially_or_nan_or_an_error(x64):
    step, xs = functools.partial(CELLS["rnn"], weights("normal")), inputs(40)
    solve = functools.partial(
        parallel_scan, step, start("rnn"), xs, method=Newton(max_iters=2), with_stats=True
    )
    want = jax.lax.scan(step, start("rnn"), xs)
    carry, ys, stats = jit(solve)()
    bad = int(stats.first_bad)
    assert not stats.converged and 0 < bad < 40
    assert distance((carry, ys), want) < 1e-12
    _, (states, _), _ = jit(lambda: solve(on_fail="nan"))()
    assert bool(jnp.isnan(states[bad:]).all()) and distance(states[:bad], want[1][0][:bad]) < 1e-10
    with pytest.raises(ArithmeticError, match=r"not converged from step \d+ on"):
        solve(on_fail="raise")


def wrong_carry(h, x):
    return {"a": h["a"].astype(jnp.float16), "b": h["b"]}, x


ERRORS = {
    r"f takes carry leaf \['a'\] as float32\[2\] but returns it as float16\[2\]": lambda: (
        parallel_scan(
            wrong_carry, {"a": jnp.ones(2), "b": jnp.ones(2)}, jnp.ones(3), method=Newton()
        )
    ),
    "f takes a carry of structure .* but returns one of": lambda: parallel_scan(
        lambda h, x: ((h, h), x), jnp.ones(2), jnp.ones(3), method=Newton()
    ),
    "returns it as float32": lambda: parallel_scan(
        lambda h, x: (h[:1], x), jnp.ones(2), jnp.ones(3), method=Newton()
    ),
    "must return a pair": lambda: parallel_scan(
        lambda h, x: [h, x], jnp.ones(2), jnp.ones(3), method=Newton()
    ),
    "length must be given": lambda: parallel_scan(
        lambda h, x: (h, x), jnp.ones(2), None, method=Newton()
    ),
    "must agree on T": lambda: parallel_scan(
        lambda h, x: (h, x), jnp.ones(2), jnp.ones(3), 4, method=Newton()
    ),
    "is a scalar": lambda: parallel_scan(
        lambda h, x: (h, x), jnp.ones(2), jnp.float32(1), method=Newton()
    ),
    "on_fail='maybe' is unknown": lambda: parallel_scan(
        lambda h, x: (h, x), 1.0, jnp.ones(3), on_fail="maybe", method=Newton()
    ),
    "guess leaf .* needs": lambda: parallel_scan(
        lambda h, x: (h, x), 1.0, jnp.ones(3), guess=jnp.ones(2), method=Newton()
    ),
    "custom_vjp": lambda: parallel_scan(
        lambda h, x: (OPAQUE(h), x), 1.0, jnp.ones(3), method=Newton()
    ),
    "window=0 must be": lambda: Newton(window=0),
    "max_iters=0 must be": lambda: Jacobi(max_iters=0),
    "clip=0 must be": lambda: Newton(clip=0),
    "damping=2 must be at least 0 and at most 1": lambda: Newton(damping=2),
    "jac='sparse' is unknown": lambda: Newton(jac="sparse"),
    "diagonal='all' is unknown": lambda: Quasi("all"),
    "samples=0 must be": lambda: Quasi("hutchinson", samples=0),
    "unroll=0 must be": lambda: Sequential(unroll=0),
    "unroll=-1 must be": lambda: parallel_scan(
        lambda h, x: (h, x), 1.0, jnp.ones(3), unroll=-1, method=Newton()
    ),
}
OPAQUE = jax.custom_vjp(jnp.sin)
OPAQUE.defvjp(lambda h: (jnp.sin(h), h), lambda h, g: (g * jnp.cos(h),))


@pytest.mark.parametrize("sentence", ERRORS)
def test_a_mistake_is_told_in_one_sentence(sentence):
    with pytest.raises(UsageError, match=sentence) as error:
        ERRORS[sentence]()
    assert str(error.value).count(". ") == 0


@pytest.mark.parametrize("length", [0, 1])
@pytest.mark.parametrize("method", DEFAULTS, ids=repr)
def test_no_step_and_one_step_are_sequences(method, length):
    def f(h, x):
        return jnp.tanh(0.5 * h + x), h

    def loss(init, xs, scan):
        carry, ys = scan(f, init, xs)
        return (carry**2).sum() + ys.sum(), (carry, ys)

    args = jnp.array([0.3, -0.2]), jnp.ones((length, 2))
    run = functools.partial(parallel_scan, method=method)
    got = jax.value_and_grad(loss, (0, 1), has_aux=True)(*args, run)
    want = jax.value_and_grad(loss, (0, 1), has_aux=True)(*args, jax.lax.scan)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), got, want)
    stats = parallel_scan(f, *args, method=method, with_stats=True)[2]
    assert stats.converged and int(stats.first_bad) == length


def test_statistics_print():
    stats = parallel_scan(
        lambda h, x: (0.5 * h + x, h), 1.0, jnp.ones(5), with_stats=True, method=Newton()
    )[2]
    assert str(stats).startswith("Newton: converged; 2 iterations in 1 windows")


@pytest.mark.parametrize("method", [Newton(), Jacobi()], ids=repr)
def test_a_callback_that_does_not_read_the_state(method):
    """It has no derivative; two of them, nested in a call, next to what reads the state."""
    weight = jnp.full(3, 0.5)

    def on_host(x):
        return np.sin(x).astype(np.float32)

    @jax.jit
    def step(carry, x):
        h, count = carry
        shown = jax.pure_callback(on_host, jax.ShapeDtypeStruct((3,), jnp.float32), 2 * x)
        other = jax.pure_callback(on_host, jax.ShapeDtypeStruct((3,), jnp.float32), x)
        h = jnp.tanh(weight * h + shown - 0.5 * other)
        return (h, count + 1), h * x

    def run(scan, xs, h):
        (h, _), ys = scan(step, (h, 0), xs)
        return jnp.sin(ys).sum() + h.sum(), ys

    xs = jnp.linspace(0, 3, 60).reshape(20, 3)
    solve = functools.partial(parallel_scan, method=method)
    got = jax.jit(jax.grad(functools.partial(run, solve, xs), has_aux=True))(jnp.ones(3))
    want = jax.jit(jax.grad(functools.partial(run, jax.lax.scan, xs), has_aux=True))(jnp.ones(3))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)
