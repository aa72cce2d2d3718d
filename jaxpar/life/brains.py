"""Brains: what turns what agents see into what they do, and what a child's differs in.

A world takes any `Brain`: functions of all agents at once, whose genomes are pytrees of leaves `[N, ...]`. `Lstm` is
the default; `Reflex` sees nothing and does what its genome says, for worlds whose outcome is known beforehand.
"""

import dataclasses
from typing import NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.life.bodies import NUM_ACTIONS
from jaxpar.nn import LSTM
from jaxpar.nn.leaf import Leaf, init_leaves
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Brain", "Jitter", "Lstm", "Reflex", "Sight", "sight_of_one"]


class Sight(NamedTuple):
    """What N agents see: float32, numbers of about 1.

    Attributes:
        ground: `[N, window^2 8]`, the terrain around.
        agents: `[N, K, 40]`: seen, energy, age, the way there 2, the last action 11, identity 8, own message 16.
        robots: `[N, L, 36]`: seen, energy, the way there 2, memory 16, program 16.
        own: `[N, 69]`: energy, age, last action 11, identity 8, own message 16, heard message 16, said 16.
    """

    ground: Array
    agents: Array
    robots: Array
    own: Array


def sight_of_one(window: int, agents: int, robots: int) -> Sight:
    """The shapes of what one agent sees, abstract."""
    return Sight(
        ground=_abstract_array((8 * window**2,)),
        agents=_abstract_array((agents, 40)),
        robots=_abstract_array((robots, 36)),
        own=_abstract_array((69,)),
    )


def _abstract_array(shape: tuple[int, ...]) -> Array:
    """Returns a float32 array that has no values."""
    return cast(Array, jax.ShapeDtypeStruct(shape, jnp.float32))


class Brain(Protocol):
    """What a world asks of brains; static, so a frozen dataclass."""

    def init(self, key: PRNGKey, sight: Sight, count: int) -> PyTree:
        """Draws the genomes of newcomers: leaves `[count, ...]`. `sight` is abstract, of one agent. Consumes `key`."""
        ...

    def rest(self, count: int) -> PyTree:
        """The memory of those just born: leaves `[count, ...]`."""
        ...

    def act(self, genomes: PyTree, carry: PyTree, sight: Sight) -> tuple[Array, PyTree]:
        """Outputs `[N, 44]` from -1 to 1, as `read_actions` reads them, and the next memory."""
        ...

    def mutate(self, key: PRNGKey, genomes: PyTree) -> PyTree:
        """The genomes of children, from those of their parents: leaves `[B, ...]`. Consumes `key`."""
        ...


@dataclasses.dataclass(frozen=True)
class Jitter:
    """Adds normal noise to every number of every leaf; each leaf has a key of its own.

    Attributes:
      std: Of the noise.
    """

    std: float = field(0.01, AtLeast(0))

    def __post_init__(self):
        """Refuses what no noise can be."""
        check_fields(self, "mutation.")

    def __call__(self, key: PRNGKey, genomes: PyTree) -> PyTree:
        """The genomes with noise; consumes `key`."""
        leaves, tree = jax.tree.flatten(genomes)
        keys = jax.random.split(key, max(len(leaves), 1))
        noisy = [
            x + self.std * jax.random.normal(k, x.shape, x.dtype)
            for k, x in zip(keys, leaves, strict=False)
        ]
        return tree.unflatten(noisy)


@dataclasses.dataclass(frozen=True)
class Reflex:
    """A genome of 44 numbers that are what its bearer does, whatever it sees.

    Attributes:
      mutation: Genomes of parents -> those of children.
      std: Of newcomers' numbers.
    """

    mutation: Jitter = Jitter(0.0)
    std: float = field(0.0, AtLeast(0))

    def __post_init__(self):
        """Refuses what no genome can be."""
        check_fields(self, "brain.")

    def init(self, key: PRNGKey, sight: Sight, count: int) -> Array:
        """Normal numbers `[count, 44]`. Consumes `key`."""
        del sight
        return self.std * jax.random.normal(key, (count, NUM_ACTIONS))

    def rest(self, count: int) -> tuple[()]:
        """Nothing."""
        del count
        return ()

    def act(self, genomes: Array, carry: tuple[()], sight: Sight) -> tuple[Array, tuple[()]]:
        """The genome itself."""
        del sight
        return genomes, carry

    def mutate(self, key: PRNGKey, genomes: Array) -> Array:
        """As `mutation` does. Consumes `key`."""
        return self.mutation(key, genomes)


@dataclasses.dataclass(frozen=True)
class Lstm:
    """Entities attend to each other, oneself to them; beside the ground this goes through an LSTM to 44 outputs.

    Attributes:
      hidden: Units of the LSTM.
      width: Of each embedding.
      heads: Of attention among entities; they divide `width`.
      mutation: Genomes of parents -> those of children.
    """

    hidden: int = field(64, AtLeast(1))
    width: int = field(32, AtLeast(1))
    heads: int = field(4, AtLeast(1))
    mutation: Jitter = Jitter()

    def __post_init__(self):
        """Refuses sizes that do not fit together."""
        check_fields(self, "brain.")
        if self.width % self.heads:
            raise UsageError(
                f"brain.width={self.width} must be a multiple of brain.heads={self.heads}."
            )

    def leaves(self, sight: Sight) -> PyTree:
        """Declares one genome."""
        wide = self.width

        def dense(name: str, rows: int, columns: int) -> dict[str, Leaf]:
            weight = Leaf((rows, columns), (None, None), rows**-0.5)
            return {name: weight, f"{name}_bias": Leaf((columns,), (None,), "zeros")}

        found = dense("head", self.hidden, NUM_ACTIONS) | {
            "lstm": LSTM(self.hidden).leaves(3 * wide)
        }
        for name, seen in zip(Sight._fields, sight, strict=True):
            found |= dense(name, seen.shape[-1], wide)
        for name in ("among", "towards"):
            found |= {
                f"{name}_{part}": Leaf((wide, wide), (None, None), wide**-0.5)
                for part in ("q", "k", "v")
            }
        return found

    def init(self, key: PRNGKey, sight: Sight, count: int) -> PyTree:
        """Draws `count` genomes. Consumes `key`."""
        leaves = self.leaves(sight)
        return jax.vmap(lambda k: init_leaves(k, leaves))(jax.random.split(key, count))

    def rest(self, count: int) -> tuple[Array, Array]:
        """Zeros."""
        return LSTM(self.hidden).initial((count,))

    def act(
        self, genomes: PyTree, carry: tuple[Array, Array], sight: Sight
    ) -> tuple[Array, tuple[Array, Array]]:
        """Each agent by its own genome. Cost: 2 operations a number of the genome."""
        return jax.vmap(self._one)(genomes, carry, sight)

    def mutate(self, key: PRNGKey, genomes: PyTree) -> PyTree:
        """As `mutation` does. Consumes `key`."""
        return self.mutation(key, genomes)

    def _one(
        self, p: PyTree, carry: tuple[Array, Array], sight: Sight
    ) -> tuple[Array, tuple[Array, Array]]:
        ground, agents, robots, own = (
            jnp.tanh(seen @ p[name] + p[f"{name}_bias"]) if seen.ndim == 1 else
            jnp.tanh(seen @ p[name] + p[f"{name}_bias"][None])
            for name, seen in zip(Sight._fields, sight, strict=True)
        )  # fmt: skip
        entities = jnp.concatenate((agents, robots))
        seen = (jnp.concatenate((sight.agents[:, 0], sight.robots[:, 0])) > 0)[None, None]
        entities = entities + self._attend(p, "among", entities, entities, seen)
        around = self._attend(p, "towards", own[None], entities, seen)[0]
        cell = LSTM(self.hidden)
        x = jnp.concatenate((own, around, ground))
        carry = cell.step(p["lstm"], carry, cell.input_projections(p["lstm"], x))
        return jnp.tanh(cell.output(p["lstm"], carry) @ p["head"] + p["head_bias"]), carry

    def _attend(self, p: PyTree, name: str, queries: Array, entities: Array, seen: Array) -> Array:
        """Attention over the entities that are seen; zeros where none is."""
        split = lambda x: x.reshape(len(x), self.heads, -1)  # noqa: E731
        q, k, v = (
            split(queries @ p[f"{name}_q"]),
            split(entities @ p[f"{name}_k"]),
            split(entities @ p[f"{name}_v"]),
        )
        scores = jnp.where(seen, jnp.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5, -1e30)
        share = jnp.where(seen, jnp.exp(scores - jnp.max(scores, -1, keepdims=True)), 0)
        share = share / jnp.maximum(jnp.sum(share, -1, keepdims=True), 1e-30)
        return jnp.einsum("hqk,khd->qhd", share, v).reshape(len(queries), -1)
