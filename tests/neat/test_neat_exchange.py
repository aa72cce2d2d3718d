"""Networks out and in: our own circle, neat-python's networks, Graphviz, formulas, pictures."""

import dataclasses
import json
import math
import warnings

import jax.numpy as jnp
import neat
import numpy as np
import pytest
from fast import jit
from neat.activations import ActivationFunctionSet
from neat.aggregations import AggregationFunctionSet
from neat.ctrnn import CTRNNNodeEval
from neat.export import export_network_json
from plain_neat import ACTIVATIONS, AGGREGATIONS, random_genomes

from jaxpar.neat import NeatConfig, apply, draw_network, express, expressions, from_json, start, to_dot, to_json
from jaxpar.types import UsageError

NAMES = tuple(sorted(set(ACTIVATIONS) - {"steep_sigmoid", "exp", "inv", "log", "cube", "square", "selu"}))


def config_of(kind="feedforward"):
    return NeatConfig(3, 2, max_nodes=10, max_conns=20, kind=kind, activations=NAMES, aggregations=tuple(AGGREGATIONS))


def calls(config, genomes, xs):
    networks = express(config, genomes)
    carry, ys = start(networks), []
    step = jit(apply)
    for x in xs:
        y, carry = step(networks, carry, jnp.broadcast_to(x, (len(genomes.on), len(x))))
        ys.append(y)
    return np.stack(ys)


@pytest.mark.parametrize("kind", ["feedforward", "recurrent", "ctrnn"])
def test_there_and_back(kind):
    config = config_of(kind)
    genomes = random_genomes(np.random.default_rng(0), config, 4)
    xs = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    want = calls(config, genomes, xs)
    for number in range(4):
        read, one = from_json(to_json(config, genomes, number), max_nodes=12)
        np.testing.assert_allclose(calls(read, one, xs)[:, 0], want[:, number], rtol=2e-5, atol=2e-6)


def their_nodes(document):
    """What neat-python's networks are made of, from a file: node -> its functions, bias, response and links."""
    acts, aggs = ActivationFunctionSet(), AggregationFunctionSet()
    links = {node["id"]: [] for node in document["nodes"] if node["type"] != "input"}
    for c in document["connections"]:
        if c["enabled"]:
            links[c["to"]].append((c["from"], c["weight"]))
    return {
        node["id"]: (acts.get(node["activation"]["name"]), aggs.get(node["aggregation"]["name"]), node["bias"],
                     node["response"], links[node["id"]])
        for node in document["nodes"] if node["type"] != "input"
    }  # fmt: skip


def exported(network):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for the time in a deprecated way
        return export_network_json(network)


@pytest.mark.parametrize("kind", ["feedforward", "recurrent"])
def test_neat_python_gives_the_same_outputs(kind):
    config = config_of(kind)
    genomes = random_genomes(np.random.default_rng(2), config, 6)
    xs = np.random.default_rng(3).normal(size=(3, 3)).astype(np.float32)
    want = calls(config, genomes, xs)
    for number in range(6):
        document = json.loads(to_json(config, genomes, number))
        nodes = their_nodes(document)
        order, placed = [], set(document["topology"]["input_keys"])
        while len(order) < len(nodes):
            ready = [k for k, node in nodes.items() if k not in placed and
                     (kind == "recurrent" or all(s in placed for s, _ in node[-1]))]  # fmt: skip
            order += ready
            placed |= set(ready)
        keys = document["topology"]["input_keys"], document["topology"]["output_keys"]
        kinds = {"feedforward": neat.nn.FeedForwardNetwork, "recurrent": neat.nn.RecurrentNetwork}
        theirs = kinds[kind](*keys, [(k, *nodes[k]) for k in order])
        got = [theirs.activate([float(v) for v in x]) for x in xs]
        np.testing.assert_allclose(want[:, number], got, rtol=2e-5, atol=2e-6)
        read, one = from_json(exported(theirs))
        np.testing.assert_allclose(calls(read, one, xs)[:, 0], got, rtol=2e-5, atol=2e-6)


def test_neat_pythons_continuous_networks_give_the_same_outputs():
    """By the rule of its 2.1; its 2.0 steps by forward Euler, from a buffer of the step before the last.

    So time constants are given to it for which Euler's step is the exact one, and its buffers are made equal.
    """
    config = dataclasses.replace(config_of("ctrnn"), time_step=0.2, sub_steps=2)
    genomes = random_genomes(np.random.default_rng(5), config, 6)
    xs = np.random.default_rng(6).normal(size=(3, 3)).astype(np.float32)
    want = calls(config, genomes, xs)
    for number in range(6):
        document = json.loads(to_json(config, genomes, number))
        keys = document["topology"]["input_keys"], document["topology"]["output_keys"]
        tau = {node["id"]: node["time_constant"] for node in document["nodes"] if node["type"] != "input"}
        euler = {key: 0.2 / -math.expm1(-0.2 / value) for key, value in tau.items()}
        files, stepped = (
            neat.ctrnn.CTRNN(*keys, {k: CTRNNNodeEval(times[k], *rest) for k, rest in their_nodes(document).items()})
            for times in (tau, euler)
        )
        got = []
        for x in xs:
            for _ in range(config.sub_steps):
                stepped.time_seconds = 0.0  # sums of 0.2 would make steps of rounding errors
                stepped.advance([float(v) for v in x], 0.2, 0.2)
                for key, value in dict(stepped.values[stepped.active]).items():
                    stepped.set_node_value(key, value)
            got.append([stepped.values[0][key] for key in keys[1]])
        np.testing.assert_allclose(want[:, number], got, rtol=2e-5, atol=2e-6)
        read, one = from_json(exported(files), time_step=0.2, sub_steps=2)
        np.testing.assert_allclose(calls(read, one, xs)[:, 0], got, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "no JSON"),
        ("[]", "no network"),
        ("{}", "no network"),
        ('{"format_version": "2.0", "network_type": "feedforward"}', "cannot be read"),
        ('{"format_version": "1.0", "network_type": "iznn"}', "cannot be read"),
    ],
)
def test_malformed_documents_are_refused(text, words):
    with pytest.raises(UsageError, match=words):
        from_json(text)


def test_wrong_networks_are_refused():
    config = config_of()
    document = json.loads(to_json(config, random_genomes(np.random.default_rng(0), config, 1, conns=10)))
    wrong = document | {"connections": document["connections"] + document["connections"][:1]}
    with pytest.raises(UsageError, match="edge twice"):
        from_json(json.dumps(wrong))
    loop = [{"from": 0, "to": 1, "weight": 1.0}, {"from": 1, "to": 0, "weight": 1.0}]
    with pytest.raises(UsageError, match="cycle"):
        from_json(json.dumps(document | {"connections": loop}))
    document["nodes"][0]["activation"]["name"] = "blub"
    with pytest.raises(UsageError, match="'blub' is unknown"):
        from_json(json.dumps(document))


def test_formulas_compute_the_outputs():
    config = NeatConfig(2, 2, max_nodes=8, max_conns=14, activations=("tanh", "sigmoid"), evolved=("bias",))
    genomes = random_genomes(np.random.default_rng(4), config, 10)
    x = np.float32([0.3, -0.8])
    want = calls(config, genomes, x[None])[0]
    functions = {"tanh": ACTIVATIONS["tanh"], "sigmoid": ACTIVATIONS["sigmoid"]}
    for number in range(10):
        values = {"x0": float(x[0]), "x1": float(x[1])}
        for name, text in expressions(config, genomes, number).items():
            values[name] = eval(text, {"math": math, **functions}, values)
        np.testing.assert_allclose([values["y0"], values["y1"]], want[number], rtol=1e-4, atol=1e-5)
    assert r"\mathrm{" in expressions(config, genomes, 0, latex=True)["y0"]


def test_graphviz_names_every_gene():
    config = config_of()
    genomes = random_genomes(np.random.default_rng(0), config, 1, hidden=3, conns=9)
    text = to_dot(config, genomes)
    assert text.count("->") == 9 and text.count("dashed") == 9 - genomes.enabled.sum()
    assert text.count("shape=box") == 3 and text.count("shape=circle") == genomes.node_on.sum() - 3


def test_a_network_is_drawn(tmp_path):
    config = config_of("recurrent")
    genomes = random_genomes(np.random.default_rng(0), config, 2, conns=9)
    draw_network(config, genomes, tmp_path / "network.png", number=1)
    assert (tmp_path / "network.png").read_bytes().startswith(b"\x89PNG")
