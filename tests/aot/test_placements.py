"""Every conversion between placements gives the dense value, by the collectives and bytes that the table says."""

import collections
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxpar.aot import hlo
from jaxpar.aot.placement import Broadcast, Partial, Split, conversion
from jaxpar.experimental.placement_conversion import convert, specs
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError

SHAPE = (16, 24)
SUM, MAX, MIN = Partial("sum"), Partial("max"), Partial("min")
EACH = (Split(0), Split(1), Broadcast(), SUM, MAX, MIN)
ONE, TWO = MeshSpec(data=8), MeshSpec(data=2, tensor=4)
COLLECTIVES = {"all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective-permute"}


def placements(each=EACH):
    """Every placement over data and tensor, with both orders where they split one dimension."""
    for data, tensor in itertools.product(each, repeat=2):
        if len({where.op for where in (data, tensor) if isinstance(where, Partial)}) < 2:
            yield {"data": data, "tensor": tensor}
            if isinstance(data, Split) and data == tensor:
                yield {"tensor": tensor, "data": data}


SUMS, ALL = list(placements((Split(0), Split(1), Broadcast(), SUM))), list(placements())


def at_rest(placement, mesh, seed=0, dtype=np.float32):
    """A random array, partial axes in front, on the mesh."""
    lead = [mesh.shape[axis] for axis, where in placement.items() if isinstance(where, Partial)]
    x = np.random.default_rng(seed).normal(size=(*lead, *SHAPE)).astype(dtype)
    return jax.device_put(x, NamedSharding(mesh, specs(placement, len(SHAPE), mesh.shape)))


def dense(x, placement):
    """The value that an array at rest stands for, by NumPy."""
    ops = [where.op for where in placement.values() if isinstance(where, Partial)]
    return getattr(np.asarray(x), ops[0])(axis=tuple(range(len(ops)))) if ops else np.asarray(x)


def run(pairs, mesh, dtype=np.float32):
    """One program of one conversion a pair, each with an argument of its own: what goes in and out, and the HLO."""
    with use_mesh(mesh):
        xs = [at_rest(source, mesh, i, dtype) for i, (source, _) in enumerate(pairs)]
        convert_all = jax.jit(
            lambda xs: [convert(x, *pair) for x, pair in zip(xs, pairs, strict=True)]
        )
        program = convert_all.lower(xs).compile()
        return xs, program(xs), hlo.collectives(program.as_text(), mesh)


def sent(collective, mesh):
    """Bytes that a device sends, from the instruction alone."""
    n = math.prod(mesh.shape[axis] for axis in collective.axes)
    factor = {"all-reduce": 2 * (n - 1) / n, "collective-permute": 1}
    return factor.get(collective.kind, (n - 1) / n) * collective.bytes


def totals(rows):
    """Bytes by (kind, axes): XLA may combine instructions of one kind."""
    out = collections.Counter()
    for kind, axes, size in rows:
        out[kind, tuple(sorted(axes))] += size
    return {key: pytest.approx(size) for key, size in out.items()}


def check(pairs, mesh):
    """Values, places and collectives of these conversions."""
    xs, ys, found = run(pairs, mesh)
    declared = []
    for x, y, (source, target) in zip(xs, ys, pairs, strict=True):
        np.testing.assert_allclose(
            dense(y, target), dense(x, source), atol=2e-6, err_msg=f"{source} {target}"
        )
        assert y.sharding.is_equivalent_to(
            NamedSharding(mesh, specs(target, 2, mesh.shape)), y.ndim
        ), (source, target)
        steps = conversion(source, target, SHAPE, np.float32, mesh.shape)
        declared += [
            (step.kind, step.axes, step.bytes) for step in steps if step.kind in COLLECTIVES
        ]
    assert totals(declared) == totals((c.kind, c.axes, sent(c, mesh)) for c in found)
    return declared, found


@pytest.mark.parametrize("source", EACH, ids=str)
def test_every_pair_over_one_axis(source):
    mesh = make_mesh(ONE)
    for target in EACH:
        declared, found = check([({"data": source}, {"data": target})], mesh)
        assert [row[0] for row in declared] == [c.kind for c in found] and len(declared) <= 1


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (Split(0), Split(0), 0),
        (Split(0), Split(1), 7 / 64),
        (Split(0), Broadcast(), 7 / 8),
        (Split(0), SUM, 0),
        (Broadcast(), Split(0), 0),
        (Broadcast(), Broadcast(), 0),
        (Broadcast(), SUM, 0),
        (SUM, Split(0), 7 / 8),
        (SUM, Broadcast(), 14 / 8),
        (SUM, SUM, 0),
    ],
    ids=str,
)
def test_costs_are_those_of_the_paper_a_device(source, target, expected):
    """Table 2 of OneFlow gives bytes of all devices, here 8: an eighth of it for one, in units of the whole tensor."""
    steps = conversion({"data": source}, {"data": target}, SHAPE, np.float32, {"data": 8})
    assert sum(step.bytes for step in steps) == expected * 4 * math.prod(SHAPE)


@pytest.mark.parametrize("source", SUMS, ids=str)
def test_sums_over_two_axes(source):
    check([(source, target) for target in SUMS], make_mesh(TWO))


@pytest.mark.slow
@pytest.mark.parametrize("source", ALL, ids=str)
def test_every_pair_over_two_axes(source):
    check([(source, target) for target in ALL], make_mesh(TWO))


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (
            {"data": Split(0), "tensor": Split(0)},
            {"tensor": Split(0), "data": Split(0)},
            ["collective-permute"],
        ),
        ({"data": Split(0), "tensor": Split(0)}, {"data": Split(0)}, ["all-gather"]),
        (
            {"data": Split(0), "tensor": Split(0)},
            {"data": Split(1), "tensor": Split(1)},
            ["all-to-all"],
        ),
        ({"data": SUM, "tensor": SUM}, {}, ["all-reduce"]),
        ({"data": SUM, "tensor": SUM}, {"tensor": Split(1), "data": Split(1)}, ["reduce-scatter"]),
        ({"data": MAX}, {"data": Split(1)}, ["all-to-all"]),
        # Cheaper than to gather whole: cut further, exchange the blocks, gather half of them.
        ({"data": Split(0)}, {"tensor": Split(0)}, ["slice", "collective-permute", "all-gather"]),
    ],
    ids=str,
)
def test_known_answers(source, target, kinds):
    steps = conversion(source, target, SHAPE, np.float32, {"data": 2, "tensor": 4})
    assert [step.kind for step in steps] == kinds
    assert dict(steps[-1].after) == target


def test_a_way_round_is_never_cheaper():
    """The price of a conversion is a distance: no third placement shortens it."""
    sizes = {"data": 2, "tensor": 4}
    used = [
        p for p in SUMS if Broadcast() not in p.values()
    ]  # an axis that is broadcast at both ends is not used
    price = {
        (i, j): sum(step.bytes for step in conversion(p, q, SHAPE, np.float32, sizes))
        for i, p in enumerate(used)
        for j, q in enumerate(used)
    }
    for i, j, k in itertools.product(range(len(used)), repeat=3):
        assert price[i, k] <= price[i, j] + price[j, k] + 1e-6
    assert max(price.values()) > 0


def test_axes_of_size_one_cost_nothing():
    mesh = make_mesh(ONE)
    pair = ({"data": Split(0), "fsdp": SUM}, {"fsdp": Split(1), "data": Split(0)})
    (x,), (y,), found = run([pair], mesh)
    assert (
        x.shape == (1, *SHAPE)
        and not found
        and not conversion(*pair, SHAPE, np.float32, mesh.shape)[1:]
    )
    np.testing.assert_array_equal(y, np.asarray(x)[0])


@pytest.mark.parametrize(
    "source",
    [pytest.param(p, marks=[] if i % 5 == 2 else pytest.mark.slow) for i, p in enumerate(SUMS)],
    ids=str,
)
def test_gradients_over_two_axes(source, x64):
    """Through the dense value as on one device, and the transpose of the map between arrays at rest."""
    mesh = make_mesh(TWO)
    with use_mesh(mesh):
        xs = [at_rest(source, mesh, i, np.float64) for i, _ in enumerate(SUMS)]
        vs = [at_rest(target, mesh, i + 100, np.float64) for i, target in enumerate(SUMS)]

        def value(y, placement):
            return jnp.sin(y.sum(tuple(range(y.ndim - 2)))).sum()

        def both(xs, vs):
            through = [
                jax.grad(lambda x, target=target: value(convert(x, source, target), target))(x)
                for x, target in zip(xs, SUMS, strict=True)
            ]
            pulled = [
                jax.vjp(lambda x, target=target: convert(x, source, target), x)
                for x, target in zip(xs, SUMS, strict=True)
            ]
            return through, [(y, pull(v)[0]) for (y, pull), v in zip(pulled, vs, strict=True)]

        through, pulled = jax.jit(both)(xs, vs)
    for x, v, grad, (y, back), target in zip(xs, vs, through, pulled, SUMS, strict=True):
        x, y, back = np.asarray(x), np.asarray(y), np.asarray(back)
        np.testing.assert_allclose(dense(y, target), dense(x, source), rtol=1e-13, atol=1e-13)
        expected = np.broadcast_to(np.cos(dense(x, source)), x.shape)
        np.testing.assert_allclose(grad, expected, rtol=1e-12, atol=1e-12, err_msg=str(target))
        np.testing.assert_allclose(
            (y * np.asarray(v)).sum(), (x * back).sum(), rtol=1e-11, err_msg=str(target)
        )


@pytest.mark.parametrize(
    ("source", "target", "kinds"),
    [
        (Split(0), Broadcast(), []),
        (SUM, Broadcast(), []),
        (Split(0), SUM, []),
        (SUM, Split(0), ["all-gather"]),
        (Split(0), Split(1), ["all-to-all"]),
        (Broadcast(), Split(0), ["all-reduce"]),
        (Broadcast(), SUM, ["all-reduce"]),
    ],
    ids=str,
)
def test_collectives_of_the_backward_pass(source, target, kinds):
    mesh = make_mesh(ONE)
    source, target = {"data": source}, {"data": target}
    with use_mesh(mesh):
        x, v = at_rest(source, mesh), at_rest(target, mesh)
        back = jax.jit(lambda x, v: jax.vjp(lambda x: convert(x, source, target), x)[1](v))
        found = hlo.collectives(back.lower(x, v).compile().as_text(), mesh)
    assert [c.kind for c in found] == kinds


def test_whole_numbers_stay_exact():
    mesh = make_mesh(ONE)
    with use_mesh(mesh):
        for op in (SUM, MAX, MIN):
            x = jnp.arange(-32, 32, dtype=jnp.int32).reshape(8, 8)
            y = convert(x, {"data": Split(0)}, {"data": op})
            assert y.shape == (8, 8, 8) and y.dtype == jnp.int32
            np.testing.assert_array_equal(dense(y, {"data": op}), x)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: Partial("mean"),
            "a partial value of op 'mean' is unknown; legal are sum, max, min.",
        ),
        (
            lambda: conversion({"data": Split(1)}, {}, (8, 12), "float32", {"data": 8}),
            "dimension 1 of size 12 does not divide over data=8; the nearest legal sizes are 8 or 16.",
        ),
        (
            lambda: conversion(
                {},
                dict.fromkeys(("data", "tensor"), Split(0)),
                (2,),
                "float32",
                {"data": 2, "tensor": 4},
            ),
            "dimension 0 of size 2 does not divide over data*tensor=8; the nearest legal sizes are 8.",
        ),
        (
            lambda: conversion({"rows": Split(0)}, {}, (8,), "float32", {"data": 8}),
            "placement names unknown mesh axis 'rows'; the mesh has data.",
        ),
        (
            lambda: conversion({"data": Split(1)}, {}, (8,), "float32", {"data": 8}),
            "data=Split(dim=1) splits dimension 1 of an array of shape (8,).",
        ),
        (
            lambda: conversion(
                {"data": SUM, "tensor": MAX}, {}, (8,), "float32", {"data": 2, "tensor": 4}
            ),
            "a placement with partial ops max and sum depends on their order; use one op.",
        ),
        (
            lambda: conversion({"data": SUM}, {}, (8,), bool, {"data": 8}),
            "a partial value needs numbers, not bool.",
        ),
        (
            lambda: convert(jnp.zeros(8), {}, {}),
            "convert needs an ambient mesh; put it under jaxpar.mesh.use_mesh(mesh).",
        ),
    ],
)
def test_errors(call, sentence):
    with pytest.raises(UsageError) as error:
        call()
    assert str(error.value) == sentence


def test_partial_values_need_their_leading_dimension():
    with (
        use_mesh(make_mesh(ONE)),
        pytest.raises(UsageError, match=r"partial over data=8 .* its shape is \(4, 16, 24\)"),
    ):
        convert(jnp.zeros((4, *SHAPE)), {"data": SUM}, {})
