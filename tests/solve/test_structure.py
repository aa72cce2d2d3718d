"""What of a state is coupled: read off the program, declared rightly, declared wrongly."""

import functools

import jax
import jax.numpy as jnp
import pytest
from cells_to_solve import CELLS, distance, inputs, start, weights
from fast import jit

from jaxpar.solve import (
    Block,
    Dense,
    Newton,
    ParallelBackward,
    Quasi,
    check_structure,
    parallel_scan,
)
from jaxpar.solve.structure import MAX_LANES, elementwise, probe, structure_of
from jaxpar.types import UsageError

W = jnp.arange(9.0).reshape(3, 3) / 9
X = jnp.ones((1, 3))
SLOW = pytest.mark.slow


def groups(f, init, x=X, jac="auto"):
    """The (leaves, batch, n) of each group."""
    flat, tree = jax.tree.flatten(init)

    def step(before, x):
        return tuple(jax.tree.leaves(f(tree.unflatten(before), x[0])))

    found = structure_of(step, tuple(map(jnp.asarray, flat)), (x,), jac)
    return [(group.leaves, group.batch, group.n) for group in found.groups]


def looped(h, x):
    return jax.lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h) + x, h)


def searched(h, x):
    """A loop that ends when the state says so: the derivative of what it does to the state is elementwise."""
    return jax.lax.while_loop(lambda h: h.sum() > 1, lambda h: 0.5 * h * x, h)


def layers(h, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, jnp.stack([W, W]))[0]


def chosen(h, x):
    return jax.lax.cond(x.sum() > 0, lambda h: jnp.sin(h), lambda h: h * x, h)


def gates(h, x):
    """Splits, concatenates, indexes and reshapes along the last axis; the first stays a batch."""
    both = jnp.concatenate([h @ W, h[..., ::-1]], -1)
    a, b = jnp.split(both, 2, -1)
    return jnp.pad((a * jax.nn.softmax(b)).reshape(4, 1, 3)[:, 0, :2], ((0, 0), (1, 0)))


ROWS = jnp.ones((4, 3))
PROGRAMS = {
    "elementwise": (
        lambda h, x: jnp.where(h > 0, jax.nn.gelu(h), jax.nn.relu(h) ** 2) * x,
        ROWS,
        [((0,), (4, 3), 1)],
    ),
    "scalar": (lambda h, x: jnp.sin(h), 1.0, [((0,), (), 1)]),
    "product": (lambda h, x: jnp.tanh(h @ W + x), ROWS, [((0,), (4,), 3)]),
    "einsum over the batch": (
        lambda h, x: jnp.einsum("bi,bc->ci", h, jnp.ones((4, 4))),
        ROWS,
        [((0,), (), 12)],
    ),
    "transpose": (lambda h, x: h.T, jnp.ones((3, 3)), [((0,), (), 9)]),
    "softmax": (lambda h, x: jax.nn.softmax(h), ROWS, [((0,), (4,), 3)]),
    "norm without a gradient": (
        lambda h, x: h / jax.lax.stop_gradient(h.sum()),
        ROWS,
        [((0,), (4, 3), 1)],
    ),
    "vmap": (lambda h, x: jax.vmap(lambda row: jnp.cumsum(row) * x[0])(h), ROWS, [((0,), (4,), 3)]),
    "loop": (looped, ROWS, [((0,), (4, 3), 1)]),
    "search": (searched, ROWS, [((0,), (4, 3), 1)]),
    "layers": (layers, ROWS, [((0,), (4,), 3)]),
    "branches": (chosen, ROWS, [((0,), (4, 3), 1)]),
    "gates": (gates, ROWS, [((0,), (4,), 3)]),
    "jit and checkpoint": (
        jax.jit(jax.checkpoint(lambda h, x: jnp.sin(h) * x)),
        ROWS,
        [((0,), (4, 3), 1)],
    ),
    "unknown primitive": (lambda h, x: jnp.linalg.inv(h), jnp.ones((2, 2, 2)), [((0,), (), 8)]),
    "unknown places": (lambda h, x: h.at[:, 0].add(h[:, 1]), ROWS, [((0,), (), 12)]),
    "two apart": (
        lambda h, x: (h[0] * x, h[1] @ W),
        (ROWS, ROWS),
        [((0,), (4, 3), 1), ((1,), (4,), 3)],
    ),
    "two coupled": (lambda h, x: (h[0] * h[1], h[1] + x), (ROWS, ROWS), [((0, 1), (4, 3), 2)]),
    "a scalar and a vector": (
        lambda h, x: (h[0] + 1, h[1] * h[0]),
        (1.0, jnp.ones(3)),
        [((0, 1), (), 4)],
    ),
    "constant": (lambda h, x: x, X, [((0,), (1, 3), 1)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_program_shows_what_is_coupled(name):
    f, init, want = PROGRAMS[name]
    assert groups(f, init) == want


@pytest.mark.parametrize(
    "name", ["gates", "loop", "a scalar and a vector", pytest.param("layers", marks=SLOW)]
)
def test_what_the_program_shows_is_the_jacobian(name):
    f, init, _ = PROGRAMS[name]
    start = tuple(map(jnp.asarray, jax.tree.leaves(init)))
    tree = jax.tree.structure(init)

    def apply(before):
        return tuple(jax.tree.leaves(jax.vmap(lambda h: f(tree.unflatten(h), X))(before)))

    before = tuple(leaf[None] + 0.3 for leaf in start)
    structure = structure_of(
        lambda h, x: tuple(leaf[0] for leaf in apply(tuple(a[None] for a in h))), start, (), "auto"
    )
    assert jit(lambda before: probe(structure, apply, before))(before) < 1e-5
    other = elementwise([leaf.shape for leaf in start])
    assert (structure == other) == (name == "loop")
    assert (jit(lambda before: probe(other, apply, before))(before) < 1e-5) == (name == "loop")


def test_dense_keeps_the_batch_and_what_is_declared_stands():
    assert groups(PROGRAMS["product"][0], ROWS, jac="dense") == [((0,), (4,), 3)]
    assert groups(PROGRAMS["elementwise"][0], ROWS, jac="dense") == [((0,), (4,), 3)]
    assert groups(PROGRAMS["product"][0], ROWS, jac=Dense()) == [((0,), (), 12)]
    assert groups(PROGRAMS["elementwise"][0], ROWS, jac="diag") == [((0,), (4, 3), 1)]
    assert groups(PROGRAMS["two coupled"][0], (ROWS, ROWS), jac=Block(2)) == [((0, 1), (4, 3), 2)]
    assert groups(PROGRAMS["product"][0], ROWS, jac=Block(3)) == [((0,), (4,), 3)]


WRONG = {
    "couples entries of carry leaf .* along axis 1 .by dot_general.": ("product", "diag"),
    "couples entries of carry leaf .* along axis 0 .by dot_general.": (
        "einsum over the batch",
        Dense(1),
    ),
    r"leaf number 0 depends on leaf number 1": ("two coupled", "diag"),
    r"Block\(k=2\) needs 2 carry leaves of one shape": ("product", Block(2)),
    r"Dense\(batch_dims=1\) needs carry leaves that share 1 leading": (
        "a scalar and a vector",
        Dense(1),
    ),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_a_wrong_declaration_is_refused(sentence):
    name, jac = WRONG[sentence]
    with pytest.raises(UsageError, match=sentence):
        groups(*PROGRAMS[name][:2], jac=jac)


def permuted(order):
    """A gather by an index that only the program's arguments know: its rule cannot tell what is coupled."""

    def f(h, x):
        return 0.5 * jnp.tanh(h[order]) + x, h.sum()

    return f


def test_what_cannot_be_decided_is_probed_and_a_wrong_gradient_is_none(x64):
    xs = jax.random.normal(jax.random.key(0), (20, 3))

    def loss(order, xs, scan):
        carry, ys, *stats = scan(permuted(order), jnp.ones(3), xs)
        return carry.sum() + (ys**2).sum(), stats

    diag = functools.partial(parallel_scan, method=Newton(jac="diag"), with_stats=True)
    solve = jit(jax.value_and_grad(functools.partial(loss, scan=diag), 1, has_aux=True))
    for order, is_diagonal in ((jnp.arange(3), True), (jnp.array([1, 2, 0]), False)):
        (value, (stats,)), grad = solve(order, xs)
        (want, _), want_grad = jax.value_and_grad(
            functools.partial(loss, scan=jax.lax.scan), 1, has_aux=True
        )(order, xs)
        assert abs(value - want) < 1e-10  # the residual is judged, not the Jacobian
        assert bool(stats.converged) == is_diagonal == (stats.structure_error < 1e-13)
        assert distance(grad, want_grad) < 1e-12 if is_diagonal else bool(jnp.isnan(grad).all())
        if is_diagonal:
            check_structure(permuted(order), jnp.ones(3), xs[0], "diag")
        else:
            with pytest.raises(UsageError, match="differs from jac='diag' by"):
                check_structure(permuted(order), jnp.ones(3), xs[0], "diag")


@pytest.mark.parametrize(
    "cell, jac",
    [
        ("lstm", "dense"),
        pytest.param("gru", "dense", marks=SLOW),
        pytest.param("rnn", Dense(), marks=SLOW),
    ],
)
def test_structures_agree(cell, jac, x64):
    step, xs = functools.partial(CELLS[cell], weights()), inputs(20)

    def solve(method):
        def value(xs):
            return sum(
                map(jnp.sum, jax.tree.leaves(parallel_scan(step, start(cell), xs, method=method)))
            )

        return jit(jax.value_and_grad(value))(xs)

    assert distance(solve(ParallelBackward(jac=jac)), solve(ParallelBackward())) < 1e-12


def test_large_blocks_are_matrices(x64):
    n = MAX_LANES + 2
    w = jax.random.normal(jax.random.key(0), (n, n)) / n
    f = lambda h, x: (jnp.tanh(h @ w + x), h)  # noqa: E731
    xs = jax.random.normal(jax.random.key(1), (20, 2, n))
    for method in (Newton(), Quasi()):
        got = jit(lambda xs, method=method: parallel_scan(f, jnp.zeros((2, n)), xs, method=method))(
            xs
        )
        assert distance(got, jax.lax.scan(f, jnp.zeros((2, n)), xs)) < 1e-10
