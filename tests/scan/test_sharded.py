"""Time split over devices changes neither values nor derivatives, and what is moved does not grow with time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from jax.sharding import PartitionSpec as P
from recurrences import draw
from tolerance import EXACT_MATHS, assert_close

from jaxpar.aot import hlo
from jaxpar.mesh import MeshSpec, make_mesh
from jaxpar.scan import Monoid, affine_scan, attention_scan, scan_monoid

EXACT = EXACT_MATHS["float64"]
SEQUENCE, START = P("data", "context"), P("data")


def mesh_of(pieces):
    return make_mesh(MeshSpec(context=pieces, data=8 // pieces))


def split(f, pieces, specs, check=True):
    """Runs `f(*args, axis_name="context")` with rows and time split over eight devices."""
    f = functools.partial(f, axis_name="context")
    return jax.shard_map(
        f, mesh=mesh_of(pieces), in_specs=specs, out_specs=SEQUENCE, check_vma=check
    )


def derivatives(f, args):
    def loss(*args):
        return jnp.sum(jnp.sin(f(*args) + 0.3))

    places = tuple(range(len(args)))
    return jit(lambda *x: (f(*x), jax.grad(loss, places)(*x), jax.jvp(f, x, x)[1]))(*args)


@pytest.mark.parametrize(
    ("pieces", "kind", "reverse", "impl", "check"),
    [
        (1, "diag", False, "sequential", True),
        (2, "block", True, "sequential", True),
        (4, "dense", False, "sequential", False),
        (8, "diag", True, "chunked", True),
        (8, "row", False, "chunked", True),
        (8, "matrix", True, "sequential", True),
        pytest.param(8, "dense", True, "associative", True, marks=pytest.mark.slow),
        pytest.param(4, "block", False, "auto", True, marks=pytest.mark.slow),
    ],
)
def test_pieces_equal_the_whole(pieces, kind, reverse, impl, check, x64):
    args = draw((8, 24, 2, 3)[: 4 if kind in ("row", "matrix") else 3], kind, 1)
    f = functools.partial(affine_scan, kind=kind, axis=1, reverse=reverse)
    got = derivatives(
        split(functools.partial(f, impl=impl), pieces, (SEQUENCE, SEQUENCE, START), check), args
    )
    assert_close(got, derivatives(functools.partial(f, impl="sequential"), args), 1e-12)


def test_without_a_start(x64):
    a, b, _ = draw((8, 24, 2), axis=1)
    a[:, 0] = 1.0  # would show, were anything but zeros to enter
    f = functools.partial(affine_scan, axis=1)
    assert_close(
        derivatives(split(f, 8, (SEQUENCE, SEQUENCE)), (a, b)), derivatives(f, (a, b)), 1e-12
    )


def test_a_later_piece_cannot_harm_an_earlier_one():
    a, b, _ = draw((8, 24, 2), axis=1, dtype="float32")
    f = functools.partial(affine_scan, axis=1)
    clean = f(a, b)
    a[:, 13] = np.inf
    out = jit(split(f, 8, (SEQUENCE, SEQUENCE)))(a, b)
    np.testing.assert_array_equal(
        np.isfinite(out), np.arange(24)[None, :, None].repeat(8, 0).repeat(2, 2) < 13
    )
    assert_close(out[:, :13], clean[:, :13], EXACT_MATHS["float32"])


@pytest.mark.parametrize(
    ("pieces", "reverse"), [(4, True), pytest.param(8, False, marks=pytest.mark.slow)]
)
def test_attention_in_pieces(pieces, reverse, x64):
    scores, values, _ = draw((8, 16), axis=1, scale=20)[0], draw((8, 16, 2), axis=1)[1], None
    scores[0, :5] = scores[1, 9:] = scores[2] = -np.inf
    f = functools.partial(attention_scan, axis=1, reverse=reverse)

    def derived(f):
        def loss(*args):
            return jnp.sum(jnp.sin(f(*args)))

        return jit(lambda *x: (f(*x), jax.grad(loss, (0, 1))(*x)))(scores, values)

    assert_close(derived(split(f, pieces, (SEQUENCE, SEQUENCE))), derived(f), 1e-12)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_monoid_that_does_not_commute_in_pieces(reverse, x64):
    matrices = np.random.default_rng(0).normal(size=(8, 16, 2, 2)) / 1.5
    product = Monoid(lambda x, y: jnp.matmul(y, x), lambda x: jnp.broadcast_to(jnp.eye(2), x.shape))
    f = functools.partial(scan_monoid, product, axis=1, reverse=reverse)
    assert_close(jit(split(f, 8, (SEQUENCE,)))(matrices), jit(f)(matrices), EXACT)


def moved(f, num_args, length):
    mesh = mesh_of(8)
    x = jax.ShapeDtypeStruct((1, length, 3), jnp.float32)
    g = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), tuple(range(num_args)))
    text = jit(g).lower(*[x] * num_args).compile().as_text()
    found = hlo.collectives(text, mesh)
    assert found and all(c.axes == ("context",) for c in found)
    return sorted((c.kind, c.bytes * c.trips) for c in found)


def test_what_is_moved_does_not_depend_on_the_length():
    f = split(functools.partial(affine_scan, axis=1), 8, (SEQUENCE, SEQUENCE))
    small = moved(f, 2, 64)
    assert small == moved(f, 2, 4096)
    assert sum(size for _, size in small) < 2000
