"""One genome in other people's forms: neat-python's network files, Graphviz, a formula."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.neat.config import KINDS, NeatConfig
from jaxpar.neat.functions import ACTIVATIONS, AGGREGATIONS, Activation, check_own
from jaxpar.neat.genome import Genomes, check_genomes
from jaxpar.types import PyTree, UsageError

__all__ = [
    "FORMAT_VERSION",
    "expressions",
    "from_json",
    "node_label",
    "select_genome",
    "to_dot",
    "to_json",
]

Json = Any
"""What `json` reads and writes: anything, until its parts are asked for by name."""

FORMAT_VERSION = "1.0"
_OURS = {"steep_sigmoid"}


def select_genome(genomes: Genomes, number: int = 0) -> PyTree:
    """One genome, fields `[N]` and `[C]`, as NumPy arrays."""
    if not 0 <= number < len(genomes.on):
        raise UsageError(f"there is no genome {number}; there are {len(genomes.on)}.")
    return jax.tree.map(lambda x: np.asarray(x)[number], genomes)


def to_json(
    config: NeatConfig,
    genomes: Genomes,
    number: int = 0,
    *,
    metadata: Mapping[str, Json] | None = None,
) -> str:
    """A genome's network in neat-python's exported-network format, version 1.0.

    Inputs are -1, -2, ..., outputs 0, 1, ..., hidden nodes their identity minus the number of inputs. Disabled
    connections are written as such. `metadata` is copied: "fitness", "generation", ... An activation of one's own is
    written by its name; `from_json` is given the function.
    """
    one, ends = select_genome(genomes, number), config.num_inputs
    assert config.activations is not None
    custom = _OURS | set(dict(config.own_activations))

    def key(slot):
        return -1 - int(slot) if slot < ends else int(one.node_id[slot]) - ends

    def node(slot):
        activation = config.activations[one.activation[slot]]  # pyright: ignore
        row = {
            "id": key(slot),
            "type": "output" if slot < config.num_io else "hidden",
            "activation": {"name": activation, "custom": activation in custom},
            "aggregation": {"name": config.aggregations[one.aggregation[slot]], "custom": False},
            "bias": float(one.bias[slot]),
            "response": float(one.response[slot]),
        }
        return row | (
            {"time_constant": float(one.time_constant[slot])} if config.kind == "ctrnn" else {}
        )

    plain = {
        "activation": {"name": "identity", "custom": False},
        "aggregation": {"name": "none", "custom": False},
    }
    inputs = [
        {"id": key(slot), "type": "input", **plain, "bias": 0.0, "response": 1.0}
        for slot in range(ends)
    ]
    connections = [
        {"from": key(one.source[c]), "to": key(one.target[c]), "weight": float(one.weight[c]),
         "enabled": bool(one.enabled[c])}
        for c in np.flatnonzero(one.on)
    ]  # fmt: skip
    document = {
        "format_version": FORMAT_VERSION,
        "network_type": config.kind,
        "metadata": dict(metadata or {}),
        "topology": {
            "num_inputs": ends,
            "num_outputs": config.num_outputs,
            "input_keys": [key(slot) for slot in range(ends)],
            "output_keys": list(range(config.num_outputs)),
        },
        "nodes": [node(slot) for slot in np.flatnonzero(one.node_on) if slot >= ends] + inputs,
        "connections": connections,
    }
    return json.dumps(document, indent=2)


def from_json(
    text: str, *, max_nodes: int = 0, max_conns: int = 0, own_activations: Sequence[tuple[str, Activation]] = (),
    **changes: Json,
) -> tuple[NeatConfig, Genomes]:  # fmt: skip
    """Reads a network in neat-python's exported-network format: its configuration and one genome, `[1]`.

    Marks and identities are new, in the order of the file. A node that is named by connections alone, as neat-python
    writes recurrent nodes without inputs, is one that stays 0. Numbers are of JAX's default precision, so float64 where
    `jax_enable_x64` is set.

    Args:
        text: the document.
        max_nodes: N, at least what the network has.
        max_conns: C, likewise.
        own_activations: pairs (name, function), for the names of the file that are none of `jaxpar.neat.functions`.
        changes: more fields of `NeatConfig`, such as `population`.

    Raises:
        UsageError: it is no such document, or names a function that is neither there nor given.
    """
    check_own(own_activations)
    try:
        document = json.loads(text)
        return _read(
            document, max_nodes, max_conns, {"own_activations": tuple(own_activations), **changes}
        )
    except json.JSONDecodeError as error:
        raise UsageError(f"this is no JSON: {error}.") from None
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"this is no network in neat-python's format {FORMAT_VERSION}: {error!r}."
        ) from None


def _read(
    document: Json, max_nodes: int, max_conns: int, changes: dict[str, Json]
) -> tuple[NeatConfig, Genomes]:
    version, kind = str(document["format_version"]), document["network_type"]
    if version.split(".")[0] != "1" or kind not in KINDS:
        raise UsageError(f"a network of type {kind!r} in format {version} cannot be read; legal are "
                         f"{', '.join(KINDS)} in 1.x.")  # fmt: skip
    inputs, outputs = document["topology"]["input_keys"], document["topology"]["output_keys"]
    rows, connections = (
        [node for node in document["nodes"] if node["type"] != "input"],
        document["connections"],
    )
    _check_numbers(rows, connections)
    _check_names([*inputs, *outputs], [node["id"] for node in rows], inputs)
    nodes = {node["id"]: node for node in rows}
    silent = {
        "activation": {"name": "identity"},
        "aggregation": {"name": "sum"},
        "bias": 0.0,
        "response": 1.0,
    }
    for end in [*outputs, *(c["from"] for c in connections), *(c["to"] for c in connections)]:
        if end not in inputs:
            nodes.setdefault(end, silent)
    slots = {
        key: slot
        for slot, key in enumerate(
            [*inputs, *outputs, *(key for key in nodes if key not in outputs)]
        )
    }
    names = {
        "activations": _names(
            nodes.values(), "activation", (*ACTIVATIONS, *dict(changes["own_activations"]))
        ),
        "aggregations": _names(nodes.values(), "aggregation", AGGREGATIONS),
    }
    fields: dict[str, Json] = {"kind": kind, "initial": "none", "population": 1, **names, **changes}
    config = NeatConfig(len(inputs), len(outputs), max_nodes=max(max_nodes, len(slots)),
                        max_conns=max(max_conns, len(connections), 1), **fields)  # fmt: skip
    nodes_of = (1, config.max_nodes)
    real = jnp.result_type(float)  # as of genomes that were evolved: float64 under x64
    arrays: dict[str, PyTree] = {
        name: np.zeros(nodes_of, real) for name in ("bias", "response", "time_constant")
    }
    arrays |= {
        name: np.zeros(nodes_of, np.int32) for name in ("node_id", "activation", "aggregation")
    }
    slot = np.arange(config.max_nodes)[None]
    arrays |= {
        "node_on": slot < len(slots),
        "node_id": np.where(slot < len(slots), slot, 0).astype(np.int32),
    }
    for key, node in nodes.items():
        at = 0, slots[key]
        arrays["activation"][at] = names["activations"].index(node["activation"]["name"])
        arrays["aggregation"][at] = names["aggregations"].index(node["aggregation"]["name"])
        for name in ("bias", "response", "time_constant"):
            arrays[name][at] = node.get(name, 1.0)  # only a time constant may be missing
    columns = {"source": [slots[c["from"]] for c in connections], "target": [slots[c["to"]] for c in connections],
               "weight": [c["weight"] for c in connections], "innovation": range(len(connections)),
               "enabled": [c.get("enabled", True) for c in connections], "on": [True] * len(connections)}  # fmt: skip
    kinds = {"weight": real, "enabled": bool, "on": bool}
    for name, column in columns.items():
        arrays[name] = np.zeros((1, config.max_conns), kinds.get(name, np.int32))
        arrays[name][0, : len(connections)] = list(column)
    genomes = Genomes(**arrays)
    check_genomes(config, genomes)
    return config, genomes


def _check_numbers(nodes: list[Json], connections: list[Json]) -> None:
    """Refuses what is no number, before NumPy makes one of it."""
    named = [
        (f"node {node['id']}", name, node[name]) for node in nodes for name in ("bias", "response")
    ]
    named += [
        (f"node {node['id']}", "time_constant", node.get("time_constant", 1.0)) for node in nodes
    ]
    named += [
        (f"the edge from {c['from']} to {c['to']}", "weight", c["weight"]) for c in connections
    ]
    real = jnp.finfo(jnp.result_type(float))
    largest, smallest = float(real.max), float(real.tiny)
    for owner, name, value in named:
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not abs(value) < largest
        ):
            raise UsageError(f"{owner} has the {name} {value!r}, which is no finite number.")
        if name == "time_constant" and value < smallest:
            raise UsageError(f"{owner} has the {name} {value!r}; legal are seconds above 0.")
    for c in connections:
        if not isinstance(c.get("enabled", True), bool):
            raise UsageError(f"the edge from {c['from']} to {c['to']} has enabled={c['enabled']!r}; legal are true and "
                             "false.")  # fmt: skip


def _check_names(ends: list[Json], computed: list[Json], inputs: list[Json]) -> None:
    """Refuses two nodes of one name."""
    for names in (ends, computed, [*inputs, *computed]):
        twice = [name for place, name in enumerate(names) if name in names[:place]]
        if twice:
            raise UsageError(f"the node {twice[0]!r} is there twice.")


def _names(nodes: Iterable[Json], field: str, known: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(node[field]["name"] for node in nodes))
    for name in found:
        if name not in known:
            own = ", and what own_activations= gives" if field == "activation" else ""
            raise UsageError(f"{field} {name!r} is unknown; legal are {', '.join(known)}{own}.")
    return found


def node_label(config: NeatConfig, one: PyTree, slot: int) -> str:
    """x0, x1, ... for inputs, y0, ... for outputs, h and the identity for hidden nodes."""
    if slot < config.num_inputs:
        return f"x{slot}"
    return f"y{slot - config.num_inputs}" if slot < config.num_io else f"h{int(one.node_id[slot])}"


def to_dot(config: NeatConfig, genomes: Genomes, number: int = 0) -> str:
    """The graph in Graphviz's language: inputs x, hidden nodes h, outputs y; disabled connections dashed."""
    one = select_genome(genomes, number)
    assert config.activations is not None
    lines = ["digraph network {", "  rankdir=LR;"]
    for slot in map(int, np.flatnonzero(one.node_on)):
        name, is_input = node_label(config, one, slot), slot < config.num_inputs
        text = name if is_input else f"{name}\\n{config.activations[one.activation[slot]]}"
        lines.append(f'  {name} [shape={"box" if is_input else "circle"}, label="{text}"];')
    for c in np.flatnonzero(one.on):
        ends = [node_label(config, one, slot) for slot in (one.source[c], one.target[c])]
        style = "solid" if one.enabled[c] else "dashed"
        lines.append(f'  {ends[0]} -> {ends[1]} [label="{one.weight[c]:.3g}", style={style}];')
    return "\n".join([*lines, "}"]) + "\n"


def expressions(
    config: NeatConfig, genomes: Genomes, number: int = 0, *, latex: bool = False
) -> dict[str, str]:
    """Each computed node as a formula of others, in the order of evaluation; only what outputs depend on.

    Plain text reads as Python and SymPy do, given the functions: `{"h7": "tanh(0.5 + 1.2*x0)", "y0": ...}`. Of a
    recurrent network, names on the right are values of the step before.
    """
    one = select_genome(genomes, number)
    assert config.activations is not None
    live = np.flatnonzero(one.on & one.enabled)
    into = {int(n): [c for c in live if one.target[c] == n] for n in np.flatnonzero(one.node_on)}
    found: dict[str, str] = {}
    visited: set[int] = set()

    def visit(slot: int) -> None:
        if slot < config.num_inputs or slot in visited:
            return
        visited.add(slot)
        for c in into[slot]:
            visit(int(one.source[c]))
        found[node_label(config, one, slot)] = _formula(config, one, slot, into[slot], latex)

    for output in range(config.num_inputs, config.num_io):
        visit(output)
    return found


def _formula(
    config: NeatConfig, one: PyTree, slot: int, genes: Sequence[np.integer], latex: bool
) -> str:
    def name(at):
        label = node_label(config, one, at)
        return f"{label[0]}_{{{label[1:]}}}" if latex else label

    times = r" \, " if latex else "*"
    terms = [f"{one.weight[c]:.6g}{times}{name(int(one.source[c]))}" for c in genes]
    aggregation = config.aggregations[one.aggregation[slot]]
    activation = config.activations[one.activation[slot]]  # pyright: ignore
    if latex:
        activation, aggregation = (
            rf"\mathrm{{{word.replace('_', ' ')}}}" for word in (activation, aggregation)
        )
    plain = aggregation in ("sum", r"\mathrm{sum}")
    inside = " + ".join(terms) or "0"
    total = (
        f"({inside})"
        if plain and len(terms) > 1
        else inside
        if plain
        else f"{aggregation}({', '.join(terms)})"
    )
    response = "" if one.response[slot] == 1 else f"{one.response[slot]:.6g}{times}"
    text = f"{activation}({one.bias[slot]:.6g} + {response}{total})"
    return text.replace("+ -", "- ")
