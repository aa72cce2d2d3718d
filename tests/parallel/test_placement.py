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
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.parallel.placement import Broadcast, Partial, Split, conversion, convert, specs
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
        convert_all = jax.jit(lambda xs: [convert(x, *pair) for x, pair in zip(xs, pairs, strict=True)])
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
        np.testing.assert_allclose(dense(y, target), dense(x, source), atol=2e-6, err_msg=f"{source} {target}")
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, specs(target, 2, mesh.shape)), y.ndim), (source, target)
        steps = conversion(source, target, SHAPE, np.float32, mesh.shape)
        declared += [(step.kind, step.axes, step.bytes) for step in steps if step.kind in COLLECTIVES]
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
