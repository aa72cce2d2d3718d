"""Networks out and in: our own circle, neat-python's networks, Graphviz, formulas, pictures."""

import dataclasses
import functools
import json
import math
import warnings

import jax
import jax.numpy as jnp
import neat
import numpy as np
import pytest
from fast import jit
from neat.activations import ActivationFunctionSet
from neat.aggregations import AggregationFunctionSet
from neat.ctrnn import CTRNNNodeEval
from neat.export import export_network_json
from plain_neat import ACTIVATIONS, AGGREGATIONS, Network, random_genomes

from jaxpar.neat import (
    NeatConfig,
    apply,
    draw_network,
    express,
    expressions,
    from_json,
    init_carry,
    to_dot,
    to_json,
)
from jaxpar.types import UsageError

NAMES = tuple(
    sorted(set(ACTIVATIONS) - {"steep_sigmoid", "exp", "inv", "log", "cube", "square", "selu"})
)


def config_of(kind="feedforward"):
    return NeatConfig(
        3,
        2,
        max_nodes=10,
        max_conns=20,
        kind=kind,
        activations=NAMES,
        aggregations=tuple(AGGREGATIONS),
    )


def calls(config, genomes, xs):
    return np.asarray(program(config, genomes, xs))


@functools.partial(jit, static_argnums=0)
def program(config, genomes, xs):
    networks = express(config, genomes)

    def step(carry, x):
        y, carry = apply(networks, carry, jnp.broadcast_to(x, (len(genomes.on), len(x))))
        return carry, y

    return jax.lax.scan(step, init_carry(networks), xs)[1]


@pytest.mark.parametrize("kind", ["feedforward", "recurrent", "ctrnn"])
def test_there_and_back(kind):
    config = config_of(kind)
    genomes = random_genomes(np.random.default_rng(0), config, 4)
    xs = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    want = calls(config, genomes, xs)
    for number in range(4):
        read, one = from_json(to_json(config, genomes, number), max_nodes=12)
        np.testing.assert_allclose(
            calls(read, one, xs)[:, 0], want[:, number], rtol=2e-5, atol=2e-6
        )


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

    So time constants are given to it for which Euler's step is the exact one, and its buffers are
    made equal.
    """
    config = dataclasses.replace(config_of("ctrnn"), time_step=0.2, sub_steps=2)
    genomes = random_genomes(np.random.default_rng(5), config, 6)
    xs = np.random.default_rng(6).normal(size=(3, 3)).astype(np.float32)
    want = calls(config, genomes, xs)
    for number in range(6):
        document = json.loads(to_json(config, genomes, number))
        keys = document["topology"]["input_keys"], document["topology"]["output_keys"]
        tau = {
            node["id"]: node["time_constant"]
            for node in document["nodes"]
            if node["type"] != "input"
        }
        euler = {key: 0.2 / -math.expm1(-0.2 / value) for key, value in tau.items()}
        files, stepped = (
            neat.ctrnn.CTRNN(
                *keys,
                {k: CTRNNNodeEval(times[k], *rest) for k, rest in their_nodes(document).items()},
            )
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
    "kind, form", [("feedforward", "matrix"), ("feedforward", "edges"), ("ctrnn", "edges")]
)
def test_files_are_read_in_double_precision(kind, form, x64):
    config = NeatConfig(3, 2, max_nodes=8, max_conns=14, kind=kind, activations=("tanh", "lelu"),
                        aggregations=("sum", "mean", "max"))  # fmt: skip
    document = json.loads(
        to_json(config, random_genomes(np.random.default_rng(1), config, 1, hidden=3, conns=12))
    )
    document["connections"][0]["weight"], document["nodes"][0]["bias"] = 1 / 3, 1e-40
    read, one = from_json(json.dumps(document))
    assert one.weight[0, 0] == 1 / 3 and one.bias[0, 3] == 1e-40
    xs = np.random.default_rng(2).normal(size=(3, 3))

    def outputs(genomes):
        networks = jit(lambda genomes: express(read, genomes, form=form))(genomes)
        carry, ys, step = jax.device_get(init_carry(networks)), [], jit(apply)
        for x in xs:
            y, carry = step(networks, carry, x[None])
            ys.append(y)
        return np.stack(ys)[:, 0]

    plain = Network(read, one.rows(0))
    np.testing.assert_allclose(outputs(one), [plain(x) for x in xs], rtol=1e-12)
    # Genomes that were made without it are computed in what they hold.
    single = jax.tree.map(lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, one)
    assert outputs(single).dtype == np.float32
    np.testing.assert_allclose(outputs(single), outputs(one), rtol=1e-4)
    document["connections"][0]["weight"] = 1e39
    assert from_json(json.dumps(document))[1].weight[0, 0] == 1e39
    with jax.enable_x64(False), pytest.raises(UsageError, match="no finite number"):
        from_json(json.dumps(document))


def leaky(slope):
    return lambda z: jnp.where(z > 0, z, slope * z)


def test_activations_of_ones_own_are_computed_and_known_by_their_functions(monkeypatch):
    genomes, x = None, np.float32([0.3, -0.8, 0.5])
    names, calls = ("tanh", "leaky"), jit(lambda networks, x: apply(networks, (), x)[0])
    first, second = (("leaky", leaky(0.001)),), [["leaky", leaky(0.5)]]
    found = []
    for slope, own in ((0.001, first), (0.5, [tuple(pair) for pair in second]), (0.001, first)):
        config = NeatConfig(
            3, 2, max_nodes=10, max_conns=20, activations=names, own_activations=own
        )
        if genomes is None:
            genomes = random_genomes(np.random.default_rng(0), config, 6)
        monkeypatch.setitem(ACTIVATIONS, "leaky", lambda z, slope=slope: z if z > 0 else slope * z)
        networks = jit(lambda genomes, config=config: express(config, genomes))(genomes)
        found.append(np.asarray(calls(networks, np.broadcast_to(x, (6, 3)))))
        want = [Network(config, genomes.rows(p))(x) for p in range(6)]
        np.testing.assert_allclose(found[-1], want, rtol=1e-5, atol=1e-6)
        assert networks.mask is not None  # it may overflow
    assert calls._cache_size() == 2 and np.abs(found[0] - found[1]).max() > 1e-2
    assert hash(config) == hash(dataclasses.replace(config, own_activations=first))


def test_files_name_activations_of_ones_own():
    own = (("leaky", leaky(0.001)), ("wave", jnp.sin))
    config = NeatConfig(
        3, 2, max_nodes=10, max_conns=20, activations=("leaky", "tanh"), own_activations=own
    )
    genomes = random_genomes(np.random.default_rng(0), config, 2)
    text = to_json(config, genomes, 1)
    functions = [
        node["activation"] for node in json.loads(text)["nodes"] if node["type"] != "input"
    ]
    assert {"name": "leaky", "custom": True} in functions and {
        "name": "tanh",
        "custom": False,
    } in functions
    xs = np.random.default_rng(1).normal(size=(2, 3)).astype(np.float32)
    read, one = from_json(text, own_activations=list(own))
    assert set(read.activations) == {"leaky", "tanh"} and "leaky(" in str(expressions(read, one))
    np.testing.assert_allclose(
        calls(read, one, xs)[:, 0], calls(config, genomes, xs)[:, 1], rtol=2e-5, atol=2e-6
    )
    for given in ((), own[1:]):
        with pytest.raises(
            UsageError,
            match="activation 'leaky' is unknown; legal are .*, and what own_activations=",
        ):
            from_json(text, own_activations=given)


@pytest.mark.parametrize("own, words", [
    ("leaky", "legal is a tuple of pairs"), ((jnp.sin,), "legal is a tuple of pairs"),
    (((1, jnp.sin),), "1 is no name"), ((("my sin", jnp.sin),), "'my sin' is no name"),
    ((("tanh", jnp.sin),), "'tanh' is the name of another"),
    ((("a", jnp.sin), ("a", jnp.cos)), "'a' is the name of another"), ((("a", "sin"),), "hashable functions"),
    ((("a", jnp.sum),), "a number from each number"), ((("a", lambda z: (z, z)),), "a number from each number"),
    ((("a", lambda: 0),), "takes no array of float32 numbers"), ((("a", lambda z: z > 0),), "a number from each"),
])  # fmt: skip
def test_what_is_no_activation_is_refused(own, words):
    for refuses in (
        lambda: NeatConfig(3, 1, own_activations=own),
        lambda: from_json("{}", own_activations=own),
    ):
        with pytest.raises(UsageError, match=words) as raised:
            refuses()
        assert str(raised.value).endswith(".") and "\n" not in str(raised.value)


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
    document = json.loads(
        to_json(config, random_genomes(np.random.default_rng(0), config, 1, conns=10))
    )
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
    config = NeatConfig(
        2, 2, max_nodes=8, max_conns=14, activations=("tanh", "sigmoid"), evolved=("bias",)
    )
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
