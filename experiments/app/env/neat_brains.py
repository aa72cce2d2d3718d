"""NEAT's networks as brains of a world: what joins `jaxpar.neat` to `jaxpar.life`, which do not know each other."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.life import ACTION_WIDTHS, Sight, action_slice, join_actions
from jaxpar.neat import Genomes, NeatConfig, Rates, express, initial
from jaxpar.neat import apply as apply_networks
from jaxpar.neat import mutate as mutate_genomes
from jaxpar.types import Array, PRNGKey

NUM_INPUTS = 18
"""One, energy, age, the energy of 9 cells, and of the nearest agent and robot whether it is there, and the way."""
ACTED = tuple(name for name in ACTION_WIDTHS if name not in ("own", "message"))
"""Actions that have outputs; such brains say nothing."""
SPOKEN = sum(ACTION_WIDTHS[name] for name in ACTED)
"""Outputs."""


@dataclasses.dataclass(frozen=True)
class NeatBrain:
    """Recurrent networks whose structure mutates; children have one parent, so identities need not agree.

    Attributes:
      max_nodes: Capacity of a genome, inputs and outputs included.
      max_conns: Capacity of a genome.
      std: Of a changed weight's step.
    """

    max_nodes: int = field(48, AtLeast(NUM_INPUTS + SPOKEN))
    max_conns: int = field(256, AtLeast(NUM_INPUTS * SPOKEN))
    std: float = field(0.1, Between(0, 10))

    def __post_init__(self):
        """Refuses capacities that do not hold the first networks."""
        check_fields(self, "brain.")

    @property
    def config(self) -> NeatConfig:
        """What NEAT's functions ask for; the population's size is that of their arguments."""
        rates = Rates(weight_power=self.std, weight_replace=0.02, node_power=self.std)
        return NeatConfig(
            NUM_INPUTS,
            SPOKEN,
            1,
            self.max_nodes,
            self.max_conns,
            kind="recurrent",
            activations=("tanh",),
            rates=rates,
        )

    def init(self, key: PRNGKey, sight: Sight, count: int) -> Genomes:
        """Networks that connect every input with every output, of random weights. Consumes `key`."""
        del sight
        weights, biases = (
            jax.random.normal(k, (count, size)) * NUM_INPUTS**-0.5
            for k, size in zip(jax.random.split(key), (self.max_conns, self.max_nodes), strict=True)
        )
        return initial(self.config, weights, biases)

    def rest(self, count: int) -> Array:
        """Zeros `[count, nodes]`."""
        return jnp.zeros((count, self.max_nodes))

    def act(self, genomes: Genomes, carry: Array, sight: Sight) -> tuple[Array, Array]:
        """A step of every network: outputs `[N, 44]`, of which messages are 0."""
        outputs, carry = apply_networks(express(self.config, genomes), carry, _inputs(sight))
        parts = {name: outputs[:, action_slice(name, ACTED)] for name in ACTED}
        return join_actions(parts), carry

    def mutate(self, key: PRNGKey, genomes: Genomes) -> Genomes:
        """Changes numbers, or at most one change of structure a child. Consumes `key`."""
        return mutate_genomes(key, self.config, genomes)


def _inputs(sight: Sight) -> Array:
    count, cells = len(sight.ground), sight.ground.shape[1] // 8
    width = round(cells**0.5)
    energy = sight.ground.reshape(count, width, width, 8)[..., 0]
    energy = jnp.pad(
        energy, ((0, 0), (1, 1), (1, 1))
    )  # of a window of 1, what lies around is unseen
    middle = energy[:, width // 2 : width // 2 + 3, width // 2 : width // 2 + 3].reshape(count, 9)
    agent, robot = sight.agents[:, 0], sight.robots[:, 0]
    one = jnp.ones((count, 1))
    parts = (
        one,
        sight.own[:, :2],
        middle,
        agent[:, :1],
        agent[:, 3:5],
        robot[:, :1],
        robot[:, 2:4],
    )
    return jnp.concatenate(parts, 1)
