"""Every carry that `lax.scan` takes: leaves that are no unknowns are run first, or the whole is run sequentially."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cells_to_solve import DEFAULTS
from fast import jit
from jax.sharding import PartitionSpec as P

from jaxpar.lower.jaxprs import inner_jaxpr
from jaxpar.mesh import MeshSpec, make_mesh
from jaxpar.solve import (
    Auto,
    GaussSeidel,
    Jacobi,
    Newton,
    ParallelBackward,
    Quasi,
    Sequential,
    check_structure,
    choose,
    parallel_scan,
)
from jaxpar.solve.carries import Loop, divided
from jaxpar.solve.program import leaf_names, trace
from jaxpar.types import UsageError

T = 6


def moved(h, x, by=0.0):
    return jnp.tanh(0.5 * h + x + by)


def counted(c, x):
    new = {"h": moved(c["h"], x, 0.1 * c["n"] * (c["n"] % 4)), "n": c["n"] + 2}
    return new, new


def toggled(c, x):
    h, flag = c
    return (moved(h, x, jnp.where(flag, 0.3, -0.3)), ~flag), (flag, h)


def keyed(c, x):
    h, key = c
    key, now = jax.random.split(key)
    return (moved(h, x, jax.random.normal(now, h.shape)), key), (h, key)


def old_keyed(c, x):
    """A key as the words that it was before keys had a type."""
    key, now = jax.random.split(jax.random.wrap_key_data(c[1]))
    return (moved(c[0], x, jax.random.normal(now, (2,))), jax.random.key_data(key)), c[0]


def rotated(c, x):
    """A phase with its own inputs and no unknown."""
    h, z = c
    new = z * jnp.exp(1j * x[0]) + x[1]
    return (moved(h, x, new.imag), new), (h, z)


def everything(c, x):
    """A counter, a flag, a key and a phase at once."""
    h, n, flag, (key, z) = c
    key, now = jax.random.split(key)
    z = z * jnp.exp(1j * x[0]) + x[1]
    h = moved(h, x, jnp.where(flag, 0.3, -0.3) * z.imag + 0.1 * n + jax.random.uniform(now))
    return (h, n + 1, flag ^ (n % 3 == 0), (key, z)), (h, n, flag, key, z)


def driven(c, x):
    """A complex state that an unknown drives."""
    h, z = c
    return (moved(h, x, z.real), (0.5 + 0.5j) * z + h[0]), (h, z)


def crossings(c, x):
    """Counts what no derivative sees."""
    h, n = c
    return (moved(h, x), n + jnp.where(h[0] > 0, 1, 0).astype(n.dtype)), (h, n)


def nested(c, x):
    (a, n), flags, d = c["a"], c["flags"], c["d"]
    n = {"n": n["n"] + 1, "m": n["m"] * 2 + n["n"].astype(n["m"].dtype)}
    new = {
        "a": (moved(a, x, d.sum() / 4), n),
        "flags": flags ^ (n["m"] % 3 == 0),
        "d": jnp.where(flags, d, 0.5 * d),
    }
    return new, [new["a"][0], new["flags"], n]


def plain_numbers(c, x):
    """Python's own: the first becomes floating, the second stays an int."""
    h, n, flag = c
    return (0.5 * h + x.sum() * jnp.where(flag, n, 1), n + 1, jnp.logical_not(flag)), (h, n)


def only_a_counter(n, x):
    return n + 1, x * n


def only_empty(c, x):
    """A batch of 0."""
    return {"h": jnp.tanh(c["h"] + x.sum()), "n": c["n"] + 1}, x * 2 + c["h"].sum()


def some_empty(c, x):
    h, none = c
    return (moved(h, x, none.sum()), jnp.tanh(none + h[:, None])), (h, none)


H = functools.partial(jnp.array, [0.3, -0.2])


def all_at_once():
    return H(), 0, True, (jax.random.key(0), jnp.array(0.5 + 0.2j))


CARRIES = {
    "a counter": (counted, lambda: {"h": H(), "n": jnp.int32(3)}, True),
    "a flag": (toggled, lambda: (H(), True), True),
    "a key": (keyed, lambda: (H(), jax.random.key(1)), True),
    "an old key": (old_keyed, lambda: (H(), jax.random.key_data(jax.random.key(2))), True),
    "a phase": (rotated, lambda: (H(), jnp.array(0.5 + 0.2j)), True),
    "a driven phase": (driven, lambda: (H(), jnp.array(0.5 + 0.2j)), False),
    "crossings": (crossings, lambda: (H(), jnp.uint8(0)), True),
    "nested": (
        nested,
        lambda: {
            "a": (H(), {"n": jnp.int32(0), "m": jnp.uint32(1)}),
            "flags": jnp.array([True, False]),
            "d": H(),
        },
        True,
    ),
    "python's numbers": (plain_numbers, lambda: (0, 1, False), True),
    "no unknown": (only_a_counter, lambda: jnp.int32(0), False),
    "an empty batch": (
        only_empty,
        lambda: {"h": jnp.zeros((0, 2)), "n": jnp.zeros((3, 0), jnp.int32)},
        False,
    ),
    "an empty leaf": (some_empty, lambda: (H(), jnp.zeros((2, 0))), True),
}
METHODS = [*DEFAULTS, Newton(window=4), GaussSeidel(block=2)]
"""One for each carry, in turn."""


def value(scan, init, xs):
    """A loss by everything that has a derivative, and all results; statistics too, where there are any."""
    carry, ys, *stats = scan(init, xs)
    leaves = [
        leaf for leaf in jax.tree.leaves((carry, ys)) if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    loss = sum((jnp.cos(leaf.real) * leaf.real + jnp.sin(leaf.imag)).sum() for leaf in leaves)
    return loss, ((carry, ys), stats)


def same(got, want, tolerance):
    """Types and structures equal; what is not floating equal; what is, within the tolerance."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, (a, b)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        if a.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(a, b, tolerance, tolerance)


def gradients(init, xs, scan):
    return jax.value_and_grad(functools.partial(value, scan), (0, 1), has_aux=True, allow_int=True)(
        init, xs
    )


def compared(f, init, xs, how, transform=lambda each: each, **options):
    """Asserts that values, gradients and types are those of the loop; returns the statistics."""
    how = {"method": Newton()} | how
    solve = functools.partial(parallel_scan, f, with_stats=True, **how, **options)
    scans = solve, functools.partial(jax.lax.scan, f, **options)
    results = jit(
        lambda *args: [transform(functools.partial(gradients, scan=scan))(*args) for scan in scans]
    )(init, xs)
    ((got, (got_all, [stats])), got_grad), ((want, (want_all, _)), want_grad) = results
    same((got, got_all, got_grad), (want, want_all, want_grad), 1e-9)
    return stats


@pytest.mark.parametrize("name, method", list(zip(CARRIES, METHODS, strict=True)), ids=[*CARRIES])
def test_whatever_a_loop_carries(name, method, x64):
    f, init, is_solved = CARRIES[name]
    xs = jax.random.normal(jax.random.key(0), (T, 2))
    stats = compared(f, init(), xs, {"method": method}, reverse=len(name) % 2 == 0)
    assert stats.converged and stats.first_bad == T
    if not isinstance(method, Auto | Sequential):
        assert isinstance(stats.method, Sequential) != is_solved == (stats.reason == "")


def test_each_of_many_sequences(x64):
    xs = jax.random.normal(jax.random.key(0), (3, T, 2))
    stats = compared(everything, all_at_once(), xs, {}, lambda each: jax.vmap(each, (None, 0)))
    assert stats.converged.shape == (3,) and stats.converged.all()


def depends(f, c):
    """Which leaf of a carry keeps the whole from being solved, and on which it depends."""
    return divided(trace(f, c, jnp.ones(3), None), leaf_names(c)).reason


def loops(h, n):
    """How often a loop runs."""
    return jax.lax.while_loop(lambda p: p[0] < h.sum(), lambda p: (p[0] + 1, p[1] + 1), (0.0, n))[1]


@jax.custom_jvp
def counts(h, n):
    return n + (h.sum() > 0)


counts.defjvp(lambda primals, tangents: (counts(*primals), np.zeros((), jax.dtypes.float0)))

DEPENDS = {
    "a comparison": lambda h, n: n + (h > 0).sum(),
    "a branch": lambda h, n: jax.lax.cond(h[0] > 0, lambda n: n + 1, lambda n: n, n),
    "a switch": lambda h, n: jax.lax.switch(h[0].astype(int), [lambda n: n, lambda n: n + 1], n),
    "a loop's end": loops,
    "a loop's rounds": lambda h, n: jax.lax.fori_loop(
        0, h[0].astype(jnp.int32), lambda _, n: n + 1, n
    ),
    "a scan": lambda h, n: jax.lax.scan(lambda n, h: (n + (h > 0), None), n, h)[0],
    "a scan, in two rounds": lambda h, n: jax.lax.scan(
        lambda c, _: ((c[0] + c[1], c[2], c[2]), None), (n, n, h.argmax().astype(n.dtype)), None, 3
    )[0][0],
    "a place": lambda h, n: n + h.argmax(),
    "an index": lambda h, n: n + jnp.arange(9)[h.argmax()],
    "a slice": lambda h, n: (
        n + jax.lax.dynamic_slice(jnp.arange(9), (h[0].astype(jnp.int32),), (1,))[0]
    ),
    "an update": lambda h, n: n + jnp.zeros(3, jnp.int32).at[h[0].astype(jnp.int32)].set(1).sum(),
    "rounding, held": lambda h, n: n + jax.lax.stop_gradient(jnp.round(h[0])).astype(jnp.int32),
    "an order": lambda h, n: n + jnp.argsort(h)[0],
    "a derivative of one's own": counts,
    "a remat": jax.checkpoint(lambda h, n: n + (h > 0).sum()),
}
FREE = {
    "a program": jax.jit(lambda h, n: n + 1),
    "a branch": lambda h, n: jax.lax.cond(
        n > 3, lambda h, n: (h, n + 1), lambda h, n: (2 * h, n), h, n
    )[1],
    "a loop": lambda h, n: jax.lax.while_loop(
        lambda p: p[0] < 9, lambda p: (p[0] + 1, jnp.sin(p[1])), (n, h)
    )[0],
    "a scan": lambda h, n: jax.lax.scan(lambda c, _: ((c[0] + 1, c[1] * 2), None), (n, h), None, 3)[
        0
    ][0],
    "a shape": lambda h, n: n + len(h),
}


@pytest.mark.parametrize("name", DEPENDS)
def test_what_depends_on_an_unknown_is_found(name):
    def f(c, x):
        h = jnp.tanh(c["h"] + x + c["n"])
        return {"h": h, "n": DEPENDS[name](c["h"], c["n"]).astype(jnp.int32)}, None

    carry = {"h": jnp.ones(3), "n": jnp.int32(0)}
    assert depends(f, carry) == "carry leaf ['n'], int32[], depends on ['h']"
    assert "depends" in depends(jax.jit(f), carry)


@pytest.mark.parametrize("name", FREE)
def test_what_does_not_depend_is_not_accused(name):
    @jax.jit
    def f(c, x):
        h = jnp.tanh(c["h"] + x + c["n"])
        return {"h": h, "n": FREE[name](c["h"], c["n"]).astype(jnp.int32)}, None

    assert depends(f, {"h": jnp.ones(3), "n": jnp.int32(0)}) == ""


def test_statistics_say_that_the_whole_was_run_sequentially():
    def fed(c, x):
        (h, n), _ = crossings(c, x)
        return (h + 0 * n, n), None

    stats = parallel_scan(
        fed, (H(), jnp.int32(0)), jnp.ones((T, 2)), method=Quasi(), with_stats=True
    )[2]
    assert str(stats).startswith(
        "Sequential (carry leaf [1], int32[], depends on [0]): converged; 0 iterations"
    )
    stats = parallel_scan(
        counted, {"h": H(), "n": 0}, jnp.ones((T, 2)), with_stats=True, method=Newton()
    )[2]
    assert str(stats).startswith("Newton: converged") and 0 < stats.iterations < 6


def test_what_is_no_unknown_is_run_ahead_and_not_iterated_on():
    """The loop splits keys one after the other; the solve is handed all of them."""
    init, xs = (H(), jax.random.key(0)), jnp.ones((T, 2))
    traced = trace(keyed, init, xs, None)
    parts = divided(traced, leaf_names(init))
    assert (parts.solved, parts.first) == ((0,), (1,))
    (last,), (before,) = parts.known(Loop(T, False, 1, None))
    want = jax.lax.scan(keyed, init, xs)
    same((last, before[1:]), (want[0][1], want[1][1][:-1]), 0)
    _, solved, rows = parts.rest((before,))
    assert len(solved) == 1 and rows[1][0].shape == (T,)


def summed(h, x):
    return moved(h, x), h.sum()


def gradient_of_nothing(scan):
    """Of a batch of 0 rows."""
    return jax.grad(lambda h: value(functools.partial(scan, summed), h, jnp.ones((T, 0, 2)))[0])(
        jnp.zeros((0, 2))
    )


@functools.cache
def without_a_method():
    """Of no step, and the gradient of nothing."""
    f, init, _ = CARRIES["nested"]
    return jax.lax.scan(f, init(), jnp.ones((0, 2))), gradient_of_nothing(jax.lax.scan)


@pytest.mark.parametrize("method", [*METHODS, Auto(gradient=False)], ids=repr)
def test_no_step_and_an_empty_batch(method):
    """Whatever the method: T = 0 with every type of leaf, a batch of 0 in the carry, and one by `vmap`."""
    f, init, _ = CARRIES["nested"]
    run = functools.partial(parallel_scan, method=method)
    want, gradient = without_a_method()
    same(run(f, init(), jnp.ones((0, 2))), want, 0)
    assert gradient_of_nothing(run).shape == gradient.shape == (0, 2)
    if not isinstance(method, Auto):  # which knows no values under vmap, and then assumes
        rows = jax.vmap(functools.partial(run, counted), ({"h": 0, "n": None}, None))
        got = rows({"h": jnp.zeros((0, 2)), "n": jnp.int32(0)}, jnp.ones((T, 2)))
        assert got[1]["h"].shape == (0, T, 2) and got[1]["n"].shape == (0, T)


@pytest.mark.parametrize("length", [0, 4])
def test_choices_are_made_for_such_carries_too(length):
    xs = jnp.linspace(-1, 1, 2 * length).reshape(length, 2)
    choice = choose(counted, {"h": H(), "n": jnp.int32(0)}, xs, reverse=True, platform="gpu")
    assert (len(choice.table) > 3) == (length > 0)
    if length:  # the count as an input, by hand
        rows = {"x": xs, "n": 2 * jnp.arange(length)[::-1]}
        step = lambda h, row: (counted({"h": h, "n": row["n"]}, row["x"])[0]["h"], None)  # noqa: E731
        assert choice.exponent == choose(step, H(), rows, reverse=True, platform="gpu").exponent
    fed = lambda c, x: ((crossings(c, x)[0][0] + c[1], crossings(c, x)[0][1]), None)  # noqa: E731
    choice = choose(fed, (H(), jnp.int32(0)), jnp.ones((4, 2)), platform="gpu")
    assert isinstance(choice.method, Sequential) and "depends on [0]" in str(choice)


def test_a_guess_is_read_where_it_can_be(x64):
    f, init, _ = CARRIES["a key"]
    xs = jnp.ones((T, 2))
    states = jax.lax.scan(lambda c, x: (f(c, x)[0],) * 2, init(), xs)[1]
    carry, _, stats = parallel_scan(f, init(), xs, guess=states, with_stats=True, method=Newton())
    assert stats.iterations == 1
    same(carry, jax.lax.scan(f, init(), xs)[0], 1e-12)
    with pytest.raises(UsageError, match=r"guess leaf \[1\] has shape"):
        parallel_scan(f, init(), xs, guess=(states[0], states[1][:2]), method=Newton())


def unrolls(**how):
    """How far every loop over T steps is unrolled."""
    init = {"h": H(), "n": jnp.int32(0)}
    program = jax.make_jaxpr(lambda xs: parallel_scan(counted, init, xs, **how)[0])(
        jnp.ones((T, 2))
    )

    def found(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "scan" and eqn.params["length"] == T:
                yield eqn.params["unroll"]
            if (inner := inner_jaxpr(eqn)) is not None:
                yield from found(inner)

    return set(found(program.jaxpr))


def test_loops_are_unrolled_as_asked():
    assert unrolls(method=Sequential()) == {1}
    assert unrolls(method=Sequential(), unroll=3) == unrolls(method=Sequential(unroll=3)) == {3}
    assert unrolls(method=Sequential(unroll=2), unroll=3) == {3}
    assert unrolls(method=Sequential(), unroll=True) == {T} and unrolls(
        method=Sequential(), unroll=False
    ) == {1}
    assert unrolls(method=ParallelBackward(unroll=2), unroll=3) == {3}
    assert 3 in unrolls(method=Jacobi(), unroll=3)


@pytest.mark.parametrize("parts, f", [(4, everything), (2, driven)])
def test_a_sequence_split_over_devices(parts, f, x64):
    """Every type of leaf is handed from device to device, and its gradient back."""
    init, reverse = (H(), jnp.array(0.5 + 0.2j)) if f is driven else all_at_once(), parts == 4
    mesh = make_mesh(MeshSpec(context=parts), devices=jax.devices()[:parts])

    def local(init, xs):
        return parallel_scan(
            f, init, xs, reverse=reverse, axis_name="context", with_stats=True, method=Newton()
        )

    split = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), P("context")), out_specs=(P(), P("context"), P())
    )
    xs = jax.random.normal(jax.random.key(0), (8, 2))
    got, want = (
        jit(functools.partial(gradients, scan=scan))(init, xs)
        for scan in (
            lambda *args: split(*args)[:2],
            functools.partial(jax.lax.scan, f, reverse=reverse),
        )
    )
    same(got, want, 1e-9)
    stats = jit(split)(init, xs)[2]
    assert (
        stats.converged
        and stats.first_bad == 8
        and isinstance(stats.method, Sequential) == (f is driven)
    )


def test_structure_is_checked_by_the_unknowns():
    carry = {"h": H(), "n": jnp.int32(0), "key": jax.random.key(0)}

    def f(c, x):
        return {
            "h": moved(c["h"], x, c["n"] * c["h"][::-1]),
            "n": c["n"] + 1,
            "key": c["key"],
        }, None

    assert check_structure(f, carry, jnp.ones(2), "auto").groups[0].n == 2
    with pytest.raises(UsageError, match="jac='diag'"):
        check_structure(f, carry, jnp.ones(2), "diag")
