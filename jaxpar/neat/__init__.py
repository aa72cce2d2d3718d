"""NEAT: networks whose structure evolves, a whole population as tensors."""

from jaxpar.neat.config import CANONICAL, FAST, NeatConfig, Rates
from jaxpar.neat.genome import Genomes, check_genomes
from jaxpar.neat.network import Networks, apply, express, start, with_networks
from jaxpar.neat.problems import Table, multiplexer, xor
from jaxpar.neat.search import Neat, NeatState, Problem, Score

__all__ = [
    "CANONICAL",
    "FAST",
    "Genomes",
    "Neat",
    "NeatConfig",
    "NeatState",
    "Networks",
    "Problem",
    "Rates",
    "Score",
    "Table",
    "apply",
    "check_genomes",
    "express",
    "multiplexer",
    "start",
    "with_networks",
    "xor",
]
