"""NEAT: networks whose structure evolves, a whole population as tensors.

| file | in -> out | called by |
| --- | --- | --- |
| `config.py`, `functions.py` | sizes, rates, names of functions -> `NeatConfig`, formulas | all |
| `modes.py` | a mode -> `ModeRules`, in which the modes differ | the operators |
| `genome.py` | -> `Genomes`: `[G, N]` nodes, `[G, C]` connections, masks and identities | all |
| `graph.py` | edges `[G, C]` -> reachable sets, depth, as bits | `mutate.py`, `network.py` |
| `network.py` | `Genomes` -> `Networks`; inputs `[G, B, I]` -> outputs `[G, B, O]` | problems, users |
| `_kernels.py`, `_scalars.py` | on a GPU: networks, a step in numbers -> outputs, returns | two files below |
| `uniforms.py` | key, individuals' numbers -> uniform numbers | the operators |
| `crossover.py`, `mutate.py` | pairs of genomes -> children and their changes | `evolution.py` |
| `innovation.py` | changes of a generation `[G]` -> identities | `evolution.py` |
| `distance.py`, `species.py`, `reproduce.py` | genomes, fitness -> species, offspring, parents | `evolution.py` |
| `evolution.py` | state, fitness `[G]` -> the next generation | `jaxpar.loop`, users |
| `problems.py`, `episodes.py` | networks -> `Score`: on tables, in environments | experiments, users |
| `hyper.py`, `quadtree.py` | networks as CPPNs -> weights of a substrate, and where its nodes lie | users |
| `exchange.py`, `picture.py` | a genome <-> neat-python's JSON; -> DOT, formulas, PNG | experiments, users |
"""

from jaxpar._renamed import renamed
from jaxpar.neat.config import CANONICAL, FAST, NeatConfig, Rates
from jaxpar.neat.episodes import (
    Episodes,
    GeneralizationInputs,
    GeneralizationResult,
    GeneralizationTest,
    PlayOptions,
    PlayResult,
    act,
    io_sizes,
    play,
)
from jaxpar.neat.evolution import RENAMED, Neat, NeatState, Problem, Score
from jaxpar.neat.exchange import expressions, from_json, to_dot, to_json
from jaxpar.neat.genome import Genomes, check_genomes, initial
from jaxpar.neat.hyper import Substrate, grid, substrate_apply, substrate_weights
from jaxpar.neat.mutate import apply_edit, choose_edit, mutate, mutate_numbers
from jaxpar.neat.network import Networks, apply, express, init_carry, with_networks
from jaxpar.neat.picture import draw_network
from jaxpar.neat.problems import SubstrateTable, Table, multiplexer, xor
from jaxpar.neat.quadtree import Quadtree, discover, discovered_apply
from jaxpar.neat.uniforms import Uniforms

__all__ = [
    "CANONICAL",
    "FAST",
    "RENAMED",
    "Episodes",
    "GeneralizationInputs",
    "GeneralizationResult",
    "GeneralizationTest",
    "Genomes",
    "Neat",
    "NeatConfig",
    "NeatState",
    "Networks",
    "PlayOptions",
    "PlayResult",
    "Problem",
    "Quadtree",
    "Rates",
    "Score",
    "Substrate",
    "SubstrateTable",
    "Table",
    "Uniforms",
    "act",
    "apply",
    "apply_edit",
    "check_genomes",
    "choose_edit",
    "discover",
    "discovered_apply",
    "draw_network",
    "express",
    "expressions",
    "from_json",
    "grid",
    "init_carry",
    "initial",
    "io_sizes",
    "multiplexer",
    "mutate",
    "mutate_numbers",
    "play",
    "substrate_apply",
    "substrate_weights",
    "to_dot",
    "to_json",
    "with_networks",
    "xor",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
