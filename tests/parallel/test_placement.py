"""Every conversion between placements gives the dense value, by the collectives and bytes that the table says."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.parallel.placement import Broadcast, Partial, Split, conversion, convert, specs
from jaxpar.types import UsageError
from tests.distributed import hlo

SHAPE = (16, 24)
EACH = (Split(0), Split(1), Broadcast(), Partial("sum"), Partial("max"), Partial("min"))
SIZES = {"data": 2, "tensor": 4}
COLLECTIVES = {"all-gather", "all-to-all", "reduce-scatter", "all-reduce", "collective-permute"}


def placements(sizes, each=EACH):
    """Every placement over these axes, nesting orders included; mixed ops are not legal."""
    for order in itertools.permutations(sizes):
        for choice in itertools.product(each, repeat=len(order)):
            if list(order) == sorted(order) or len(set(choice)) < len(choice) and isinstance(choice[0], Split):
                if len({where.op for where in choice if isinstance(where, Partial)}) < 2:
                    yield dict(zip(order, choice, strict=True))


def value_of(placement, sizes, seed=0, dtype=np.float32):
    """A random array at rest, and its dense value by NumPy."""
    partial = [axis for axis, where in placement.items() if isinstance(where, Partial)]
    x = np.random.default_rng(seed).normal(size=(*(sizes[axis] for axis in partial), *SHAPE)).astype(dtype)
    op = placement[partial[0]].op if partial else "sum"
    return x, getattr(x, op)(axis=tuple(range(len(partial))), keepdims=False)


def dense(y, placement):
    partial = [where for where in placement.values() if isinstance(where, Partial)]
    return getattr(np.asarray(y), partial[0].op)(axis=tuple(range(len(partial)))) if partial else np.asarray(y)


def sent(collective):
    """Bytes a device sends, from the instruction alone: sizes of groups and shapes."""
    n, kind = collective.group, collective.kind
    size = 4 * sum(map(math.prod, collective.shapes))
    factor = {"all-gather": (n - 1) / n, "all-to-all": (n - 1) / n, "reduce-scatter": n - 1, "all-reduce": 2 * (n - 1) / n}
    return size * factor.get(kind, 1)


def compiled(pairs, mesh):
    """One program for many conversions, each of its own argument, and the arguments."""
    sizes = dict(mesh.shape)
    xs = [value_of(source, sizes, i)[0] for i, (source, _) in enumerate(pairs)]
    with use_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, specs(source, 2, sizes)))
            for x, (source, _) in zip(xs, pairs, strict=True)
        ]
        program = jax.jit(lambda xs: [convert(x, *pair) for x, pair in zip(xs, pairs, strict=True)])
        return program.lower(placed).compile(), placed


@pytest.mark.parametrize("source", EACH, ids=str)
def test_one_axis(source):
    mesh = make_mesh(MeshSpec(data=8))
    for target in EACH:
        pair = ({"data": source}, {"data": target})
        program, (x,) = compiled([pair], mesh)
        steps = conversion(*pair, SHAPE, np.float32, mesh.shape)
        np.testing.assert_allclose(dense(program([x])[0], pair[1]), value_of(pair[0], mesh.shape)[1], atol=1e-5)
        found = hlo.collectives(program.as_text(), mesh)
        print(source, target, [(s.kind, s.bytes) for s in steps], [c[:3] for c in found])
