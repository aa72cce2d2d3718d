"""Tables, episodes in slots that are refilled, and substrates: each against its loop."""

import json

import jax
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
    PlayOptions,
    Score,
    Substrate,
    SubstrateTable,
    Table,
    apply,
    express,
    from_json,
    grid,
    init_carry,
    io_sizes,
    multiplexer,
    play,
    substrate_apply,
    substrate_weights,
    xor,
)
from jaxpar.neat.episodes import act
from jaxpar.types import UsageError

# Op by op they are dozens of programs each.
expressed = jit(express, static_argnums=0)
applied = jit(lambda networks, x: apply(networks, (), x)[0])


def networks_for(env, params, count, kind="feedforward"):
    config = NeatConfig(*io_sizes(env, params, True), max_nodes=9, max_conns=16, kind=kind)
    return expressed(config, random_genomes(np.random.default_rng(0), config, count))


def test_the_papers_fitness():
    config = NeatConfig(3, 1, max_nodes=6, max_conns=6)
    networks = expressed(config, random_genomes(np.random.default_rng(0), config, 5))
    data = xor()
    score = jit(Table())(jax.random.key(0), networks, data)
    y = applied(networks, np.broadcast_to(data["inputs"], (5, 4, 3)))
    error = np.abs(np.asarray(y) - np.asarray(data["targets"]))[..., 0]
    np.testing.assert_allclose(score.fitness, (4 - error.sum(1)) ** 2, rtol=1e-5)
    np.testing.assert_array_equal(score.solved, (error < 0.5).all(1))
    with pytest.raises(UsageError, match="measure='cubed'"):
        Table("cubed")


def gate(sub_steps, kind="recurrent"):
    """A network with one hidden node that computes exclusive or once that has settled."""
    inputs, hidden, output = (-1, -2, -3), 1, 0
    into = {hidden: (8, 8, -12), output: (8, 8, -4)}
    document = {
        "format_version": "1.0",
        "network_type": kind,
        "topology": {"input_keys": inputs, "output_keys": [output]},
        "nodes": [
            {"id": node, "type": "hidden", "activation": {"name": "steep_sigmoid"},
             "aggregation": {"name": "sum"}, "bias": 0.0, "response": 1.0}
            for node in (output, hidden)
        ],
        "connections": [
            {"from": one, "to": node, "weight": float(weight)}
            for node, weights in into.items()
            for one, weight in zip(inputs, weights, strict=True)
        ] + [{"from": hidden, "to": output, "weight": -16.0}],
    }  # fmt: skip
    return express(*from_json(json.dumps(document), sub_steps=sub_steps))


@pytest.mark.parametrize("kind", ["recurrent", "ctrnn"])
def test_networks_with_memory_settle_on_tables(kind):
    """A step from zero memory reaches no hidden node, two do; so one is refused."""
    score = jit(Table())
    with pytest.raises(UsageError, match=f"sub_steps=1: from zero memory, one step of a {kind}"):
        Table()(jax.random.key(0), gate(1, kind), xor())
    assert score(jax.random.key(0), gate(60, kind), xor()).solved.all()
    with pytest.raises(UsageError, match="sub_steps=1: from zero"):
        substrate_weights(Substrate((grid(2), grid(1))), gate(1, kind))
    if kind == "recurrent":
        plain = score(jax.random.key(0), gate(1, "feedforward"), xor())
        np.testing.assert_allclose(
            score(jax.random.key(0), gate(2), xor()).fitness, plain.fitness, rtol=1e-6
        )


def test_the_multiplexer_is_a_multiplexer():
    data = multiplexer(2)
    for row, target in zip(np.asarray(data["inputs"]), np.asarray(data["targets"]), strict=True):
        assert row[2 + int(2 * row[0] + row[1])] == target[0] and row[6] == 1
    assert len(data["inputs"]) == 64


@pytest.mark.parametrize(
    "name, kind, num_envs",
    [
        ("CartPole-v1", "feedforward", 4),
        ("CartPole-v1", "feedforward", 100),
        ("DoublePole-NoVelocities", "recurrent", 1),
        pytest.param("CartPole-v1", "feedforward", 1, marks=pytest.mark.slow),
        pytest.param("DoublePole-NoVelocities", "recurrent", 4, marks=pytest.mark.slow),
        pytest.param("DoublePole-NoVelocities", "recurrent", 100, marks=pytest.mark.slow),
    ],
)
def test_slots_play_what_a_loop_plays(name, kind, num_envs):
    env, params = envs.make(name)
    networks = networks_for(env, params, 3, kind)
    key = jax.random.key(7)
    played = jit(lambda key: play(key, networks, env, params, 2, num_envs, 25))(key)
    one_step = jit(lambda *a: step(a[0], env, a[1], a[2], params))
    one_call = jit(apply)
    begun = jit(lambda key: reset(key, env, params))
    played = jax.device_get(played)
    actions = jit(lambda y: act(env.action_space(params), y))
    for p in range(3):
        for e in range(2):
            own = jax.random.fold_in(jax.random.fold_in(key, p), e)
            obs, state = begun(jax.random.fold_in(own, 0))
            carry, total = init_carry(networks), 0.0
            for t in range(1, 26):
                x = np.append(obs, np.float32(1))
                y, carry = one_call(networks, carry, np.broadcast_to(x, (3, len(x))))
                made = one_step(jax.random.fold_in(own, t), state, actions(np.asarray(y)[p]))
                obs, state, total = made.obs, made.state, total + float(made.reward)
                if made.terminated or made.truncated:
                    break
            assert (played.lengths[p, e], played.returns[p, e]) == (
                t,
                pytest.approx(total, rel=1e-5),
            )
    assert played.lengths.sum() <= played.env_steps < 2 * played.lengths.sum()


def test_older_arguments_of_play_are_options():
    env, params = envs.make("CartPole-v1")
    networks = networks_for(env, params, 3, "feedforward")
    arguments = (jax.random.key(7), networks, env, params, 2, 4, 5)
    options = PlayOptions(constant=True, compacts=False)
    newer = jit(lambda key: play(key, *arguments[1:], options))(arguments[0])
    sentence = r"play\(constant, compacts\) is now \(options.constant, options.compacts\);"
    with pytest.warns(FutureWarning, match=sentence) as record:
        older = play(*arguments, constant=True, compacts=False)
    assert record[0].filename == __file__
    jax.tree.map(np.testing.assert_array_equal, older, newer)
    with pytest.raises(TypeError, match=r"play\(\) got an unexpected keyword argument 'lanes'"):
        play(*arguments, lanes=3)


def test_an_unfit_action_space_is_refused():
    env, params = envs.make("Foraging-8x8-2p-2f")
    with pytest.raises(UsageError, match="Discrete numbers or Boxes"):
        io_sizes(env, params, True)


@pytest.mark.slow
def test_cart_pole_is_solved():
    env, params = envs.make("CartPole-v1")
    config = NeatConfig(
        *io_sizes(env, params, True), population=32, max_nodes=10, max_conns=16, widths=(10,)
    )
    neat = Neat(config, Episodes(env, goal=150.0, max_steps=150))
    state = jit(neat.init)(jax.random.key(0), None)
    state, _ = jit(lambda s: run_until(neat, jax.random.key(1), s, params, 15))(state)
    assert state.solved and state.solved_after <= 32 * 15 and state.best >= 150


def test_painted_weights_are_the_painters_outputs():
    substrate = Substrate((grid(3), grid(2), grid(1)), threshold=0.3, largest=2.0)
    config = NeatConfig(
        substrate.num_inputs, 1, max_nodes=8, max_conns=12, activations=("tanh", "gauss")
    )
    networks = expressed(config, random_genomes(np.random.default_rng(0), config, 4))
    weights = jax.device_get(jit(lambda networks: substrate_weights(substrate, networks))(networks))
    assert [w.shape for w in weights] == [(4, 2, 3), (4, 1, 2)]
    for layer, matrix in enumerate(weights):
        for t, target in enumerate(substrate.layers[layer + 1]):
            for s, source in enumerate(substrate.layers[layer]):
                x = np.broadcast_to(np.float32([*source, *target, 1.0]), (4, 3))
                out = np.clip(np.asarray(applied(networks, x))[:, 0], -1, 1)
                want = 2 * np.sign(out) * np.maximum(np.abs(out) - 0.3, 0) / 0.7
                np.testing.assert_allclose(matrix[:, t, s], want, atol=1e-5)
    x = np.random.default_rng(1).normal(size=(4, 5, 3)).astype(np.float32)
    want = x.astype(np.float64)
    for matrix in weights:
        want = 1 / (
            1 + np.exp(-5 * np.einsum("pts,pbs->pbt", np.asarray(matrix, np.float64), want))
        )
    found = jit(lambda weights, x: substrate_apply(substrate, weights, x))(weights, x)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_substrates_are_scored_as_tables():
    substrate = Substrate((grid(3), grid(4), grid(1)))
    neat = Neat(
        NeatConfig(3, 1, population=12, max_nodes=8, max_conns=10, activations=("tanh", "sin")),
        SubstrateTable(substrate),
    )
    state = jit(neat.init)(jax.random.key(0), None)
    after, info = jit(neat.step)(jax.random.key(1), state, xor())
    assert 0 <= info["fitness_max"] <= 16 and after.evaluations == 12
    assert isinstance(
        SubstrateTable(substrate)(jax.random.key(0), neat.express(state.genomes), xor()), Score
    )
    with pytest.raises(UsageError, match="two layers"):
        Substrate((grid(3),))


def test_a_substrate_without_any_weight_is_refused():
    with pytest.raises(UsageError, match="threshold=1.0 must be at least 0 and under 1"):
        Substrate((grid(3), grid(1)), threshold=1.0)
