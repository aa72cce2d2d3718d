"""Networks out and in: our own circle, neat-python's networks, Graphviz, formulas, pictures."""

import json
import math
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
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
    genomes = random_genomes(np.random.default_rng(0), config, 8)
    xs = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    want = calls(config, genomes, xs)
    for number in range(8):
        read, one = from_json(to_json(config, genomes, number), max_nodes=12)
        np.testing.assert_allclose(calls(read, one, xs)[:, 0], want[:, number], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["feedforward", "recurrent"])
def test_neat_python_gives_the_same_outputs(kind):
    pytest.importorskip("neat.activations")  # "neat" alone would be this folder
    import neat
    from neat.activations import ActivationFunctionSet
    from neat.aggregations import AggregationFunctionSet
    from neat.export import export_network_json

    acts, aggs = ActivationFunctionSet(), AggregationFunctionSet()
    config = config_of(kind)
    genomes = random_genomes(np.random.default_rng(2), config, 12)
    xs = np.random.default_rng(3).normal(size=(3, 3)).astype(np.float32)
    want = calls(config, genomes, xs)
    for number in range(12):
        document = json.loads(to_json(config, genomes, number))
        links = {node["id"]: [] for node in document["nodes"] if node["type"] != "input"}
        for c in document["connections"]:
            if c["enabled"]:
                links[c["to"]].append((c["from"], c["weight"]))
        nodes = {node["id"]: node for node in document["nodes"] if node["type"] != "input"}
        order, placed = [], set(document["topology"]["input_keys"])
        while len(order) < len(nodes):
            ready = [k for k in nodes if k not in placed and
                     (kind == "recurrent" or all(s in placed for s, _ in links[k]))]  # fmt: skip
            order += ready
            placed |= set(ready)
        evals = [
            (k, acts.get(nodes[k]["activation"]["name"]), aggs.get(nodes[k]["aggregation"]["name"]),
             nodes[k]["bias"], nodes[k]["response"], links[k])
            for k in order
        ]  # fmt: skip
        keys = document["topology"]["input_keys"], document["topology"]["output_keys"]
        kinds = {"feedforward": neat.nn.FeedForwardNetwork, "recurrent": neat.nn.RecurrentNetwork}
        theirs = kinds[kind](*keys, evals)
        got = [theirs.activate([float(v) for v in x]) for x in xs]
        np.testing.assert_allclose(want[:, number], got, rtol=2e-5, atol=2e-6)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it asks for the time in a deprecated way
            text = export_network_json(theirs)
        read, one = from_json(text)
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
