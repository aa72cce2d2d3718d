"""ES-HyperNEAT's masks on grids against the paper's queues and recursion."""

import dataclasses

import jax
import numpy as np
import pytest
from fast import jit
from plain_neat import ACTIVATIONS, Network, random_genomes
from plain_quadtree import apply_networks
from plain_quadtree import discover as plainly

from jaxpar.neat import (
    Neat,
    NeatConfig,
    Quadtree,
    SubstrateTable,
    discover,
    discovered_apply,
    express,
    xor,
)
from jaxpar.types import UsageError

INPUTS, OUTPUTS = ((-1.0, -1.0), (0.0, -1.0), (1.0, -1.0)), ((0.0, 1.0), (0.5, 1.0))
PAINTERS = NeatConfig(5, 1, max_nodes=10, max_conns=24, activations=("sin", "tanh", "gauss"))


def cppns(count, seed=0):
    genomes = random_genomes(np.random.default_rng(seed), PAINTERS, count)
    # Stronger than the initial ones: patterns with detail.
    return dataclasses.replace(
        genomes, response=genomes.response + 1, activation=genomes.activation % 2
    )


@pytest.mark.parametrize(
    "tree, seed",
    [
        (Quadtree(INPUTS, OUTPUTS, band=0.1), 0),
        (Quadtree(INPUTS, OUTPUTS, initial_depth=1, max_depth=3, division=0.1, variance=0.05, band=0.0), 1),
        (Quadtree(INPUTS, OUTPUTS, initial_depth=1, max_depth=2, iterations=0, band=0.2), 2),
        (Quadtree(INPUTS, OUTPUTS, initial_depth=2, max_depth=2, iterations=3, band=0.4, sweeps=2), 3),
        pytest.param(
            Quadtree(INPUTS, OUTPUTS, initial_depth=1, max_depth=4, division=0.2, variance=0.1, iterations=2), 4,
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_points_and_weights_are_those_of_the_recursion(tree, seed, x64):
    count = 5
    genomes = jax.tree.map(
        lambda x: x.astype(np.float64) if x.dtype == np.float32 else x, cppns(count, seed)
    )
    x = np.random.default_rng(seed).normal(size=(count, 2, 3))

    @jit
    def run(genomes, x):
        found = discover(tree, express(PAINTERS, genomes))
        return found, discovered_apply(tree, found, x)

    found, y = run(genomes, x)
    places = [tuple(map(float, place)) for place in tree.places]
    assert len(places) == sum(4**depth for depth in range(1, tree.max_depth + 1))
    total, alive, refined = 0, 0, 0
    for p in range(count):
        net = Network(PAINTERS, genomes.rows(p))
        connections, hidden = plainly(
            tree, lambda *ends, net=net: max(-1.0, min(1.0, net([*ends, 1.0])[0]))
        )
        assert {place for place, on in zip(places, found.alive[p], strict=True) if on} == hidden
        parts = (
            (found.first, INPUTS, places),
            (found.inner, places, places),
            (found.last, places, OUTPUTS),
        )
        got = {
            (sources[s], targets[t]): float(matrix[p, t, s])
            for matrix, sources, targets in parts
            for t, s in np.argwhere(np.asarray(matrix[p]))
        }
        assert set(got) == set(connections)
        np.testing.assert_allclose(
            [got[c] for c in got], [connections[c] for c in got], rtol=1e-9, atol=1e-9
        )
        want = [
            apply_networks(tree, connections, hidden, ACTIVATIONS[tree.activation], row)
            for row in x[p]
        ]
        np.testing.assert_allclose(y[p], want, rtol=1e-6, atol=1e-6)
        total, alive = total + len(connections), alive + len(hidden)
        refined += len({abs(place[0]) for place in hidden} - {0.5}) > 0
    assert total > 30 and alive > 6 and (refined or tree.max_depth < 2), (
        "else this test would show little"
    )


def test_what_inputs_and_outputs_do_not_reach_is_gone():
    tree = Quadtree(INPUTS, OUTPUTS, band=2.0)  # no band is as deep
    found = jit(lambda genomes: discover(tree, express(PAINTERS, genomes)))(cppns(3))
    assert not any(np.asarray(leaf).any() for leaf in found)
    x = np.ones((3, 1, 3), np.float32)
    np.testing.assert_array_equal(
        discovered_apply(tree, found, x), np.full((3, 1, 2), 0.5, np.float32)
    )


@pytest.mark.slow
def test_painters_of_growing_networks_learn_exclusive_or():
    tree = Quadtree(INPUTS, OUTPUTS[:1], initial_depth=1, max_depth=2, band=0.1)
    config = NeatConfig(
        5, 1, population=64, max_nodes=12, max_conns=24, activations=("tanh", "sin", "gauss")
    )
    neat = Neat(config, SubstrateTable(tree))
    state, step = neat.init(jax.random.key(0), None), jit(neat.step)
    first = None
    for generation in range(40):
        state, info = step(jax.random.key(generation), state, xor())
        first = info["fitness_max"] if first is None else first
    assert state.solved or state.best > first


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(initial_depth=4), "between 1 and max_depth=3"),
        (dict(inputs=((0.0,),)), "two numbers"),
        (dict(variance=0.0), "variance=0.0 must be over 0"),
        (dict(iterations=-1), "iterations=-1"),
        (dict(activation="blub"), "activation='blub' is unknown"),
    ],
)
def test_mistakes_are_told(change, words):
    with pytest.raises(UsageError, match=words):
        Quadtree(**(dict(inputs=INPUTS, outputs=OUTPUTS) | change))


def test_painters_of_other_sizes_are_refused():
    config = NeatConfig(3, 1, max_nodes=6, max_conns=6)
    networks = express(config, random_genomes(np.random.default_rng(0), config, 2))
    with pytest.raises(UsageError, match="5 inputs and 1 output, not 3 and 1"):
        discover(Quadtree(INPUTS, OUTPUTS), networks)
