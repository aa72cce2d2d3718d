"""Networks of whole populations against an interpreter that walks one graph, node by node."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from neat.activations import ActivationFunctionSet
from neat.aggregations import AggregationFunctionSet
from plain_neat import ACTIVATIONS, AGGREGATIONS, Network, random_genomes

from jaxpar.neat import (
    NeatConfig,
    apply,
    check_genomes,
    express,
    functions,
    init_carry,
    with_networks,
)
from jaxpar.neat.graph import sweeps
from jaxpar.neat.network import form_of
from jaxpar.types import UsageError

SMOOTH = ("tanh", "sigmoid", "gauss", "clamped", "hat", "abs")


def assert_near(got, want):
    """1e-6, relative where numbers are large."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert np.all(np.abs(got - want) <= 1e-6 * np.maximum(1, np.abs(want)) * 4), np.abs(
        got - want
    ).max()


def outputs(config, genomes, x, **how):
    """Three calls of all networks, `[T, G, B, O]`."""

    def run(genomes, x):
        networks = express(config, genomes, **how)
        carry, ys = init_carry(networks, x.shape[2]), []
        for row in x:
            y, carry = apply(networks, carry, row)
            ys.append(y)
        return jnp.stack(ys)

    return jit(run)(genomes, x)


def expected(config, genomes, x):
    found = np.zeros((*x.shape[:3], config.num_outputs))
    for p in range(x.shape[1]):
        for b in range(x.shape[2]):
            net = Network(config, genomes.rows(p))
            found[:, p, b] = [net(x[t, p, b]) for t in range(len(x))]
    return found


@pytest.mark.parametrize("kind", ["feedforward", "recurrent", "ctrnn"])
@pytest.mark.parametrize(
    "aggregations, form",
    [
        (("sum",), "matrix"),
        (("sum",), "edges"),
        (("sum", "mean", "product", "max", "min"), "edges"),
        (tuple(AGGREGATIONS), "matrix"),
    ],
)
def test_every_form_equals_the_interpreter(kind, aggregations, form):
    config = NeatConfig(
        3,
        2,
        max_nodes=12,
        max_conns=30,
        kind=kind,
        activations=SMOOTH,
        aggregations=aggregations,
        sub_steps=1 if kind == "feedforward" else 3,
    )
    rng = np.random.default_rng(0)
    genomes = random_genomes(rng, config, 40)
    check_genomes(config, genomes)
    x = rng.normal(size=(3, 40, 2, 3)).astype(np.float32)
    assert_near(outputs(config, genomes, x, form=form), expected(config, genomes, x))


@pytest.mark.parametrize("form", ["matrix", "edges"])
def test_what_cannot_overflow_needs_no_mask(form):
    config = NeatConfig(3, 2, max_nodes=12, max_conns=30, activations=("tanh", "steep_sigmoid"))
    rng = np.random.default_rng(1)
    genomes = random_genomes(rng, config, 30)
    assert jax.eval_shape(lambda genomes: express(config, genomes), genomes).mask is None
    for batch in (1, 9):
        x = rng.normal(size=(1, 30, batch, 3)).astype(np.float32)
        assert_near(outputs(config, genomes, x, form=form), expected(config, genomes, x))


def test_infinite_values_stay_on_their_paths():
    config = NeatConfig(1, 2, max_nodes=6, max_conns=6, activations=("inv", "identity"))
    genomes = random_genomes(np.random.default_rng(0), config, 1, hidden=0, conns=0)
    row = np.zeros((1, 6), np.int32)
    genomes = dataclasses.replace(
        genomes,
        source=row + [[0, 0, 0, 0, 0, 0]],
        target=row + [[1, 2, 0, 0, 0, 0]],
        weight=np.float32([[1, 1, 0, 0, 0, 0]]),
        on=row + [[1, 1, 0, 0, 0, 0]] > 0,
        enabled=row + [[1, 1, 0, 0, 0, 0]] > 0,
        bias=np.zeros((1, 6), np.float32),
        response=np.ones((1, 6), np.float32),
        activation=row + [[0, 0, 1, 0, 0, 0]],
    )
    y = np.asarray(outputs(config, genomes, np.full((1, 1, 1, 1), 1e-45, np.float32)))
    assert np.isinf(y[0, 0, 0, 0]) or y[0, 0, 0, 0] == 0  # a subnormal may count as 0
    assert abs(y[0, 0, 0, 1]) < 1e-30


THEIRS = ActivationFunctionSet().functions | {"steep_sigmoid": ACTIVATIONS["steep_sigmoid"]}


@functools.cache
def activated():
    """Arguments, and what each activation makes of them, by one program."""
    z = np.float32([-70, -13, -3.5, -1, -0.3, 0, 0.2, 0.9, 3.3, 12.5, 66])
    return z, jax.device_get(
        jit(lambda z: {name: f(z) for name, f in functions.ACTIVATIONS.items()})(z)
    )


@functools.cache
def aggregated():
    """Terms, a mask, and what each aggregation makes of them where it is the second of two, by one program."""
    rng = np.random.default_rng(0)
    terms, mask = (
        rng.normal(size=(40, 7)).astype(np.float32),
        rng.random((40, 7)) < np.linspace(0, 1, 40)[:, None],
    )
    names = {
        name: ("sum", name) if name != "sum" else ("sum",)
        for name in AggregationFunctionSet().functions
    }

    def program(terms, mask):
        choice = {name: jnp.full(40, len(pair) - 1) for name, pair in names.items()}
        return {
            name: functions.aggregate(pair, choice[name], terms, mask)
            for name, pair in names.items()
        }

    return terms, mask, jax.device_get(jit(program)(terms, mask))


@pytest.mark.parametrize("name", THEIRS)
def test_activations_are_neat_pythons(name):
    z, found = activated()
    for oracle in (THEIRS, ACTIVATIONS):
        want = [oracle[name](float(x)) for x in z]
        np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", AggregationFunctionSet().functions)
def test_aggregations_are_neat_pythons(name):
    theirs, (terms, mask, found) = AggregationFunctionSet().get(name), aggregated()
    want = [float(theirs([float(x) for x in row[on]])) for row, on in zip(terms, mask, strict=True)]
    assert not mask[0].any() and mask[-1].all()
    np.testing.assert_allclose(found[name], want, rtol=1e-5, atol=1e-6)


def test_names_are_all_there():
    assert set(functions.ACTIVATIONS) == set(ACTIVATIONS) == set(THEIRS)
    assert (
        set(functions.AGGREGATIONS) == set(AGGREGATIONS) == set(AggregationFunctionSet().functions)
    )


def test_padding_changes_nothing():
    small = NeatConfig(2, 1, max_nodes=7, max_conns=12)
    large = dataclasses.replace(small, max_nodes=19, max_conns=40, widths=())
    genomes = random_genomes(np.random.default_rng(3), small, 20)
    padded = jax.tree.map(
        lambda x: np.pad(x, ((0, 0), (0, (19 if x.shape[1] == 7 else 40) - x.shape[1]))), genomes
    )
    x = np.random.default_rng(4).normal(size=(1, 20, 2, 2)).astype(np.float32)
    np.testing.assert_array_equal(outputs(small, genomes, x), outputs(large, padded, x))


def test_the_smallest_width_is_chosen():
    config = NeatConfig(2, 1, max_nodes=30, max_conns=20, widths=(4, 8, 30))
    rng = np.random.default_rng(5)
    genomes = random_genomes(rng, config, 10)
    x = rng.normal(size=(10, 2)).astype(np.float32)

    def use(networks, x):
        return apply(networks, (), x)[0], jnp.int32(networks.width)

    chosen_for = jit(lambda g, x: with_networks(config, g, lambda networks: use(networks, x)))
    for last, width in ((3, 4), (4, 4), (5, 8), (8, 8), (9, 30)):
        cut = genomes.node_on & (np.arange(30) < last)
        live = np.take_along_axis(cut, genomes.source, 1) & np.take_along_axis(
            cut, genomes.target, 1
        )
        fits = dataclasses.replace(
            genomes, node_on=cut, on=genomes.on & live, enabled=genomes.enabled & live
        )
        fits = dataclasses.replace(fits, node_on=fits.node_on | (np.arange(30) == last - 1))
        y, chosen = chosen_for(fits, x)
        assert chosen == width
        assert_near(y, expected(config, fits, x[None, :, None])[0, :, 0])


def test_deep_networks_are_computed_to_the_end():
    config = NeatConfig(1, 1, max_nodes=40, max_conns=40, activations=("identity",), evolved=())
    chain = [0, *range(2, 40), 1]
    genomes = random_genomes(np.random.default_rng(0), config, 1, hidden=38, conns=0)
    pairs = np.int32([*zip(chain, chain[1:], strict=False)])
    genomes = dataclasses.replace(
        genomes,
        source=np.pad(pairs[:, 0], (0, 1))[None],
        target=np.pad(pairs[:, 1], (0, 1))[None],
        weight=np.pad(np.full(39, 1.1, np.float32), (0, 1))[None],
        on=np.arange(40)[None] < 39,
        enabled=np.arange(40)[None] < 39,
        bias=np.zeros((1, 40), np.float32),
        response=np.ones((1, 40), np.float32),
    )
    assert (
        jit(sweeps, static_argnums=(3, 4))(genomes.source, genomes.target, genomes.on, 40, 1) == 39
    )
    for form in ("matrix", "edges"):
        y = np.asarray(outputs(config, genomes, np.ones((1, 1, 1, 1), np.float32), form=form))
        np.testing.assert_allclose(y[0, 0, 0, 0], 1.1**39, rtol=1e-5)


def test_thin_networks_are_lists_of_edges():
    thin = NeatConfig(2, 1, max_nodes=256, max_conns=300)
    assert form_of(thin, 256) == "edges" and form_of(thin, 16) == "matrix"
    assert form_of(dataclasses.replace(thin, aggregations=("median",)), 256) == "matrix"


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(max_nodes=3), "at least 4"),
        (dict(max_conns=2), "at least 3"),
        (dict(activations=("sigmoid", "blub")), "'blub' is no activation"),
        (dict(aggregations=("average",)), "'average' is no aggregation"),
        (dict(mode="slow"), "legal are fast, canonical"),
        (dict(population=0), "population=0"),
        (dict(widths=(50, 16)), "ascend"),
        (dict(output_activation="tanh"), "not among"),
        (dict(evolved=("weight",)), "no attribute"),
        (dict(evolved=("bias", "bias")), "evolved=.*'bias' is repeated"),
        (dict(activations=("tanh", "sin", "tanh")), "activations=.*'tanh' is repeated"),
        (dict(aggregations=("sum", "sum")), "aggregations=.*'sum' is repeated"),
        (dict(sub_steps=2), "sub_steps=2: a feedforward network is computed to its end"),
    ],
)
def test_mistakes_are_told(change, words):
    with pytest.raises(UsageError, match=words):
        NeatConfig(3, 1, **change)


def test_wrong_inputs_are_refused():
    config = NeatConfig(3, 1, max_nodes=6, max_conns=6)
    networks = jit(lambda genomes: express(config, genomes))(
        random_genomes(np.random.default_rng(0), config, 2)
    )
    with pytest.raises(UsageError, match="legal are"):
        apply(networks, (), jnp.zeros((2, 4)))
    with pytest.raises(UsageError, match="matrix"):
        express(dataclasses.replace(config, aggregations=("median",)), networks, form="edges")
