"""NEAT: networks whose structure evolves, a whole population as tensors.

| file | in -> out | called by |
| --- | --- | --- |
| `config.py`, `functions.py` | sizes, rates, names of functions -> `NeatConfig`, formulas | all |
| `genome.py` | -> `Genomes`: `[P, N]` nodes, `[P, C]` connections, masks and identities | all |
| `graph.py` | edges `[P, C]` -> reachable sets, depth, as bits | `mutate.py`, `network.py` |
| `network.py` | `Genomes` -> `Networks`; inputs `[P, B, I]` -> outputs `[P, B, O]` | problems, users |
| `_kernels.py`, `_numbers.py` | on a GPU: networks, a step in numbers -> outputs, returns | two files below |
| `draws.py` | key, individuals' numbers -> uniform numbers | the operators |
| `crossover.py`, `mutate.py` | pairs of genomes -> children and their changes | `search.py` |
| `innovation.py` | changes of a generation `[P]` -> identities | `search.py` |
| `distance.py`, `species.py`, `reproduce.py` | genomes, fitness -> species, offspring, parents | `search.py` |
| `search.py` | state, fitness `[P]` -> the next generation | `jaxpar.loop`, users |
| `problems.py`, `episodes.py` | networks -> `Score`: on tables, in environments | experiments, users |
| `hyper.py`, `quadtree.py` | networks as painters -> weights of a substrate, and where its nodes lie | users |
| `exchange.py`, `picture.py` | a genome <-> neat-python's JSON; -> DOT, formulas, PNG | experiments, users |
"""

from jaxpar.neat.config import CANONICAL, FAST, NeatConfig, Rates
from jaxpar.neat.episodes import Episodes, Exam, Examined, Played, Trials, ends_of, play
from jaxpar.neat.exchange import expressions, from_json, to_dot, to_json
from jaxpar.neat.genome import Genomes, check_genomes
from jaxpar.neat.hyper import Painted, Substrate, grid, paint, substrate_apply
from jaxpar.neat.network import Networks, apply, express, start, with_networks
from jaxpar.neat.picture import draw_network
from jaxpar.neat.problems import Table, multiplexer, xor
from jaxpar.neat.quadtree import Discovered, Quadtree, discover, discovered_apply
from jaxpar.neat.search import Neat, NeatState, Problem, Score

__all__ = [
    "CANONICAL",
    "FAST",
    "Discovered",
    "Episodes",
    "Exam",
    "Examined",
    "Genomes",
    "Neat",
    "NeatConfig",
    "NeatState",
    "Networks",
    "Painted",
    "Played",
    "Problem",
    "Quadtree",
    "Rates",
    "Score",
    "Substrate",
    "Table",
    "Trials",
    "apply",
    "check_genomes",
    "discover",
    "discovered_apply",
    "draw_network",
    "ends_of",
    "express",
    "expressions",
    "from_json",
    "grid",
    "multiplexer",
    "paint",
    "play",
    "start",
    "substrate_apply",
    "to_dot",
    "to_json",
    "with_networks",
    "xor",
]
