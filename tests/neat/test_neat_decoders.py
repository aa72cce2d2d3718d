"""Networks that CPPNs give, on substrates and in the plane: they play and are scored as others are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from plain_neat import random_genomes

import envs
from jaxpar.env import reset, step
from jaxpar.loop import run_until
from jaxpar.neat import (
    Episodes,
    Neat,
    NeatConfig,
    Quadtree,
    Substrate,
    SubstrateTable,
    Table,
    act,
    discover,
    discovered_apply,
    express,
    substrate_apply,
    substrate_weights,
    xor,
)
from jaxpar.types import UsageError

CART, PARAMS = envs.make("CartPole-v1")
SIDE = tuple((-1 + k / 2, -1.0) for k in range(5))
DECODERS = {
    "substrate": Substrate((SIDE, tuple((x, 0.0) for x, _ in SIDE[:3]), ((0.0, 1.0),))),
    "quadtree": Quadtree(SIDE, ((0.0, 1.0),), initial_depth=1, max_depth=2, band=0.05),
}
CPPNS = NeatConfig(5, 1, population=4, max_nodes=8, max_conns=14, activations=("tanh", "sin"))


def cppns(count=4):
    genomes = random_genomes(np.random.default_rng(3), CPPNS, count, hidden=2, conns=12)
    return dataclasses.replace(genomes, response=genomes.response + 1)


def outputs(decoder, networks, x):
    """By the functions of each kind, `[G, B, O]`."""
    if isinstance(decoder, Substrate):
        return substrate_apply(decoder, substrate_weights(decoder, networks), x)
    return discovered_apply(decoder, discover(decoder, networks), x)


@pytest.mark.parametrize("name", DECODERS)
def test_decoded_networks_play_what_a_loop_plays(name):
    decoder, count, most = DECODERS[name], 4, 30
    key = jax.random.key(5)
    problem = Episodes(CART, 20.0, episodes=2, max_steps=most, decoder=decoder)
    genomes = cppns(count)
    score = jit(lambda genomes: problem(key, express(CPPNS, genomes), PARAMS))(genomes)

    @jit
    def one_step(number, key, obs, state):
        x = jnp.broadcast_to(jnp.append(obs, 1.0), (count, 1, 5))
        y = outputs(decoder, express(CPPNS, genomes), x)[number, 0]
        return step(key, CART, state, act(CART.action_space(PARAMS), y), PARAMS)

    lengths = []
    for g in range(count):
        for e in range(2):
            own = jax.random.fold_in(jax.random.fold_in(key, g), e)
            obs, state = reset(jax.random.fold_in(own, 0), CART, PARAMS)
            for t in range(1, most + 1):
                made = one_step(g, jax.random.fold_in(own, t), obs, state)
                obs, state = made.obs, made.state
                if made.terminated:
                    break
            lengths.append(t)
    means = np.mean(np.reshape(lengths, (count, 2)), 1)
    np.testing.assert_allclose(score.fitness, means)
    np.testing.assert_array_equal(score.solved, means >= 20)
    assert len(set(means)) > 1


@pytest.mark.parametrize("name", DECODERS)
def test_decoded_networks_are_scored_as_tables(name):
    decoder = DECODERS[name]
    table = {"inputs": jnp.eye(5), "targets": jnp.float32([[0], [1], [0], [1], [1]])}

    @jit
    def run(genomes):
        networks = express(CPPNS, genomes)
        key = jax.random.key(0)
        scores = (
            Table(decoder=decoder)(key, networks, table),
            SubstrateTable(decoder)(key, networks, table),
        )
        x = jnp.broadcast_to(table["inputs"], (4, 5, 5))
        return *scores, outputs(decoder, networks, x)

    score, other, y = jax.device_get(run(cppns()))
    error = np.abs(y - np.asarray(table["targets"]))
    np.testing.assert_allclose(score.fitness, np.maximum(5 - error.sum((1, 2)), 0) ** 2, rtol=1e-5)
    jax.tree.map(np.testing.assert_array_equal, score, other)
    with pytest.raises(UsageError, match=r"targets have the shape \(4, 1\); legal is \(5, 1\)"):
        Table(decoder=decoder)(
            jax.random.key(0), express(CPPNS, cppns()), {**table, "targets": xor()["targets"]}
        )


def test_a_substrate_of_another_size_is_refused():
    small = Substrate((SIDE[:4], ((0.0, 1.0),)))
    problem = Episodes(CART, 20.0, decoder=small)
    with pytest.raises(UsageError, match="4 inputs and 1 outputs; the environment takes 5 and 1"):
        problem(jax.random.key(0), express(CPPNS, cppns()), PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_cppns_learn_to_balance(name):
    config = dataclasses.replace(
        CPPNS, population=64, activations=("tanh", "sin", "gauss"), output_activation="tanh"
    )
    neat = Neat(config, Episodes(CART, 150.0, max_steps=150, decoder=DECODERS[name]))
    state = jit(neat.init)(jax.random.key(0), None)
    state, _ = jit(lambda s: run_until(neat, jax.random.key(1), s, PARAMS, 30))(state)
    print(f"{name}: {state.solved_after} evaluations, best {state.best}")
    assert state.solved
