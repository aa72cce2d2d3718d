"""Plans of chains of products: what each may skip, what the cheapest is, and that carrying it out is right."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxpar.aot import hlo
from jaxpar.aot.placement import Broadcast, Partial, Split, conversion
from jaxpar.experimental.placement_conversion import convert, specs
from jaxpar.experimental.product_chain import MATMUL_PLACEMENTS, matmul_placements, place_chain
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError

TOKENS, WIDTH, HIDDEN = 16, 32, 128
SIZES = {"data": 2, "tensor": 4}
COLUMNS, ROWS = {"tensor": Split(1)}, {"tensor": Split(0)}


def mlp(first, second, x=None, target=None, sizes=SIZES, **options):
    weights = [((WIDTH, HIDDEN), first), ((HIDDEN, WIDTH), second)]
    return place_chain(
        ((TOKENS, WIDTH), x or {}), weights, target or {}, "float32", sizes, **options
    )


def kinds(steps):
    return [step.kind for step in steps]


def product(a, b, x, w):
    """x @ w, each device multiplying what it has: arrays at rest in, an array at rest out."""
    out = matmul_placements(a, b)
    mesh = jax.sharding.get_abstract_mesh()
    partial = sum(isinstance(where, Partial) for where in out.values())

    def body(x, w):
        y = x.reshape(x.shape[-2:]) @ w.reshape(w.shape[-2:])
        return y.reshape((1,) * partial + y.shape)

    in_specs = (specs(a, 2, mesh.shape), specs(b, 2, mesh.shape))
    return jax.shard_map(body, in_specs=in_specs, out_specs=specs(out, 2, mesh.shape))(x, w), out


@pytest.mark.parametrize(("a", "b"), MATMUL_PLACEMENTS, ids=str)
def test_the_table_of_products(a, b):
    """Each row computes the product without a collective."""
    mesh = make_mesh(MeshSpec(data=8))
    rng = np.random.default_rng(0)
    a, b = {"data": a}, {"data": b}

    def at_rest(placement):
        lead = [8] if placement["data"] == Partial() else []
        x = rng.normal(size=(*lead, 16, 16)).astype(np.float32)
        return jax.device_put(x, NamedSharding(mesh, specs(placement, 2, mesh.shape)))

    def dense(x):
        return np.asarray(x).sum(0) if x.ndim == 3 else np.asarray(x)

    with use_mesh(mesh):
        x, w = at_rest(a), at_rest(b)
        program = jax.jit(lambda x, w: product(a, b, x, w)[0]).lower(x, w).compile()
        np.testing.assert_allclose(dense(program(x, w)), dense(x) @ dense(w), rtol=1e-4, atol=1e-4)
    assert not hlo.collectives(program.as_text(), mesh)


def test_megatron_is_found():
    """Of all ways to cut both weights of an MLP, columns then rows sends least: one all-reduce at the end."""
    chains = {
        pair: mlp(*(COLUMNS if cut else ROWS for cut in pair))
        for pair in itertools.product((True, False), repeat=2)
    }
    best = min(chains, key=lambda pair: chains[pair].bytes)
    assert best == (True, False)
    first, second, end = chains[best].stages
    assert not first.steps and not second.steps and kinds(end.steps) == ["all-reduce"]
    assert chains[best].bytes == 2 * 3 / 4 * TOKENS * WIDTH * 4
    assert sorted(chain.bytes for chain in chains.values())[1] > chains[best].bytes


def test_sequence_parallelism_is_found():
    """With the activations split between blocks: gather before, reduce-scatter after, the bytes of one all-reduce."""
    chain = mlp(COLUMNS, ROWS, x={"tensor": Split(0)}, target={"tensor": Split(0)})
    first, second, end = chain.stages
    assert [kinds(stage.steps) for stage in (first, second, end)] == [
        ["all-gather"],
        [],
        ["reduce-scatter"],
    ]
    assert chain.bytes == mlp(COLUMNS, ROWS).bytes


def test_zero_three_is_found():
    """Weights split over the axis of the batch are gathered, not the larger activations."""
    weights = [((16, 16), {"data": Split(0)})] * 2
    chain = place_chain(
        ((1024, 16), {"data": Split(0)}), weights, {"data": Split(0)}, "float32", SIZES
    )
    assert [kinds(stage.weight_steps) for stage in chain.stages] == [
        ["all-gather"],
        ["all-gather"],
        [],
    ]
    assert not any(stage.steps for stage in chain.stages)


def test_partial_sums_pass_a_product_but_no_function():
    args = (
        ((8, 64), {"tensor": Split(1)}),
        [((64, 64), {"tensor": Split(0)}), ((64, 4), {})],
        {},
        "float32",
        SIZES,
    )
    held, passed = place_chain(*args), place_chain(*args, linear=True)
    assert passed.bytes < held.bytes
    assert passed.stages[1].x == {"tensor": Partial("sum")} and kinds(passed.stages[2].steps) == [
        "all-reduce"
    ]


@pytest.mark.parametrize(
    "target",
    [{}, *(pytest.param({axis: Split(0)}, marks=pytest.mark.slow) for axis in ("data", "tensor"))],
    ids=str,
)
def test_a_plan_is_the_cheapest_and_computes_the_chain(target):
    """Against every choice of operands, added up by hand; then carried out."""
    x, first, second = (
        {"data": Split(0)},
        {"data": Split(0), "tensor": Split(1)},
        {"tensor": Split(0)},
    )
    chain = mlp(first, second, x, target)

    def price(source, goal, shape):
        return sum(step.bytes for step in conversion(source, goal, shape, "float32", SIZES))

    rows, costs = list(MATMUL_PLACEMENTS), []
    for (p, q), (r, s) in itertools.product(itertools.product(rows, repeat=2), repeat=2):
        (a, b), (c, d) = (
            ({"data": p[i], "tensor": q[i]} for i in (0, 1)),
            ({"data": r[i], "tensor": s[i]} for i in (0, 1)),
        )
        if Partial() in c.values():
            continue
        hidden, out = matmul_placements(a, b), matmul_placements(c, d)
        costs.append(
            price(x, a, (TOKENS, WIDTH)) + price(first, b, (WIDTH, HIDDEN)) + price(hidden, c, (TOKENS, HIDDEN))
            + price(second, d, (HIDDEN, WIDTH)) + price(out, target, (TOKENS, WIDTH))
        )  # fmt: skip
    assert chain.bytes <= min(costs) + 1e-6

    rng = np.random.default_rng(0)
    arrays = [
        rng.normal(size=shape).astype(np.float32)
        for shape in ((TOKENS, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    ]

    def execute(value, *weights):
        here = x
        for number, (stage, w, rest) in enumerate(
            zip(chain.stages, weights, (first, second), strict=False)
        ):
            value, w = convert(value, here, stage.x), convert(w, rest, stage.w)
            value, here = product(stage.x, stage.w, jax.nn.relu(value) if number else value, w)
        return convert(value, here, chain.stages[-1].x)

    with use_mesh(make_mesh(MeshSpec(**SIZES))):
        y = jax.jit(execute)(*map(jnp.asarray, arrays))
    np.testing.assert_allclose(
        y, np.maximum(arrays[0] @ arrays[1], 0) @ arrays[2], rtol=1e-4, atol=1e-3
    )


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (
            lambda: matmul_placements(ROWS, COLUMNS),
            r"tensor: Split\(dim=0\) @ Split\(dim=1\) needs a conversion first",
        ),
        (
            lambda: matmul_placements(
                {"a": Split(1), "b": Split(1)}, {"b": Split(0), "a": Split(0)}
            ),
            r"another order by each operand: \['a', 'b'\] and \['b', 'a'\]",
        ),
        (
            lambda: place_chain(((8, 8), {}), [((4, 8), {})], {}, "float32", SIZES),
            r"weight 0 of shape \(4, 8\) cannot follow an activation of shape \(8, 8\)",
        ),
        (
            lambda: place_chain(
                ((8, 6), {"tensor": Split(1)}), [((6, 8), {})], {}, "float32", SIZES
            ),
            "dimension 1 of size 6 does not divide over tensor=4; the nearest legal sizes are 4 or 8",
        ),
    ],
)
def test_errors(call, sentence):
    with pytest.raises(UsageError, match=sentence):
        call()


def test_broadcast_is_what_is_not_named():
    assert matmul_placements({"data": Split(0)}, {}) == {"data": Split(0)}
    assert matmul_placements({}, {"data": Broadcast()}) == {"data": Broadcast()}
