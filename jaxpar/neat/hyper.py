"""HyperNEAT: an evolved network, the CPPN, gives the weights of a larger one from its nodes' coordinates.

Every pair of nodes of neighbouring layers is a row of coordinates; all networks of a population see all rows at once,
and the substrate then runs as dense matrix products.

Reference: K. Stanley, D. D'Ambrosio and J. Gauci, "A hypercube-based encoding for evolving large-scale neural
networks", Artificial Life 15(2), 2009.
"""

import dataclasses
from typing import Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar.fields import Between, OneOf, Positive, check_fields, field
from jaxpar.neat.functions import ACTIVATIONS
from jaxpar.neat.network import Networks, evaluate_rows
from jaxpar.types import Array, PyTree, UsageError

__all__ = [
    "CppnDecoder",
    "DecodedNetworks",
    "Substrate",
    "decode_networks",
    "grid",
    "substrate_apply",
    "substrate_weights",
]

Layer = tuple[tuple[float, ...], ...]


def grid(*sizes: int) -> Layer:
    """Evenly spread coordinates in [-1, 1] along each axis; a single place is 0."""
    axes = [np.linspace(-1, 1, size) if size > 1 else np.zeros(1) for size in sizes]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(sizes))
    return tuple(tuple(map(float, point)) for point in points)


@dataclasses.dataclass(frozen=True)
class Substrate:
    """Layers of nodes at places; each layer feeds the next, whole.

    Attributes:
        layers: for each layer, its nodes' coordinates, all of D numbers; a CPPN has 2 D + 1 inputs (with a constant)
            and one output.
        threshold: weaker outputs of the CPPN make no connection; under 1, the largest output.
        largest: the CPPN's output 1 makes this weight.
        activation: of every node behind the first layer.
    """

    layers: tuple[Layer, ...]
    threshold: float = field(0.2, Between(0, 1, "[)"))
    largest: float = field(3.0, Positive())
    activation: str = field("sigmoid", OneOf(ACTIVATIONS))

    def __post_init__(self):
        """Refuses layers that do not fit together."""
        check_fields(self)
        dims = {len(place) for layer in self.layers for place in layer}
        if len(self.layers) < 2 or len(dims) != 1:
            raise UsageError(
                f"a substrate has two layers or more, of places in one space, not of {sorted(dims)} numbers."
            )

    @property
    def num_inputs(self) -> int:
        """What a CPPN needs: both ends' coordinates and a constant."""
        return 2 * len(self.layers[0][0]) + 1

    def rows(self, layer: int) -> np.ndarray:
        """The CPPN's inputs for the connections into layer + 1: `[targets * sources, 2 D + 1]`."""
        sources, targets = np.asarray(self.layers[layer]), np.asarray(self.layers[layer + 1])
        pairs = [np.repeat(targets, len(sources), 0), np.tile(sources, (len(targets), 1))]
        return np.concatenate([pairs[1], pairs[0], np.ones((len(pairs[0]), 1))], 1)

    @property
    def io_sizes(self) -> tuple[int, int]:
        """Numbers of nodes in the first and in the last layer."""
        return len(self.layers[0]), len(self.layers[-1])

    def decode(self, networks: Networks) -> tuple[Array, ...]:
        """Returns the weights that G CPPNs give, as `substrate_weights`."""
        return substrate_weights(self, networks)

    def apply_decoded(self, decoded: tuple[Array, ...], x: Array) -> Array:
        """Returns outputs `[G, B, outputs]` of decoded networks for `[G, B, inputs]`."""
        return substrate_apply(self, decoded, x)


class CppnDecoder(Protocol):
    """A network from a CPPN: `Substrate`, whose nodes are given, and `Quadtree`, whose nodes are found."""

    @property
    def io_sizes(self) -> tuple[int, int]:
        """Numbers of inputs and of outputs."""
        ...

    def decode(self, networks: Networks) -> PyTree:
        """Returns what G CPPNs give, in arrays with a leading axis G."""
        ...

    def apply_decoded(self, decoded: PyTree, x: Array) -> Array:
        """Returns outputs `[G, B, outputs]` of decoded networks for `[G, B, inputs]`."""
        ...


@flax.struct.dataclass
class DecodedNetworks:
    """Networks that G CPPNs give, as `jaxpar.neat.network.Players`; they have no memory.

    Attributes:
        index: int32 `[G]`, numbers of the genomes.
        decoded: result of the decoder's `decode`.
        decoder: static.
    """

    index: Array
    decoded: PyTree
    decoder: CppnDecoder = flax.struct.field(pytree_node=False)

    @property
    def io_sizes(self) -> tuple[int, int]:
        """Numbers of inputs and of outputs."""
        return self.decoder.io_sizes

    @property
    def dtype(self) -> DTypeLike:
        """Type of all numbers."""
        return jnp.result_type(*jax.tree.leaves(self.decoded))

    def init_carry(self, *batch: int) -> PyTree:
        """Returns `()`."""
        del batch
        return ()

    def apply(self, carry: PyTree, x: Array) -> tuple[Array, PyTree]:
        """Returns outputs `[G, O]` or `[G, B, O]` for `[G, I]` or `[G, B, I]`, and `carry`."""
        if x.ndim == 3:
            return self.decoder.apply_decoded(self.decoded, x), carry
        return self.decoder.apply_decoded(self.decoded, x[:, None])[:, 0], carry


def decode_networks(decoder: CppnDecoder, networks: Networks) -> DecodedNetworks:
    """Returns the networks that G CPPNs give."""
    decoded = decoder.decode(networks)
    return DecodedNetworks(index=networks.index, decoded=decoded, decoder=decoder)


def substrate_weights(substrate: Substrate, networks: Networks) -> tuple[Array, ...]:
    """The weights that G CPPNs give, one array a layer, `[G, targets, sources]`.

    An output o, clipped to [-1, 1], weaker than the threshold t gives 0, else sign(o) (abs(o) - t) / (1 - t) times the
    largest weight.
    """
    weights = []
    for layer in range(len(substrate.layers) - 1):
        rows = jnp.asarray(substrate.rows(layer), networks.bias.dtype)
        out = jnp.clip(evaluate_rows(networks, rows)[..., 0], -1, 1)
        strength = jnp.maximum(jnp.abs(out) - substrate.threshold, 0) / (1 - substrate.threshold)
        shape = (len(out), len(substrate.layers[layer + 1]), len(substrate.layers[layer]))
        weights.append((substrate.largest * jnp.sign(out) * strength).reshape(shape))
    return tuple(weights)


def substrate_apply(substrate: Substrate, weights: tuple[Array, ...], x: Array) -> Array:
    """Runs G substrates: `[G, B, inputs]` -> `[G, B, outputs]`, a product a layer."""
    for matrix in weights:
        x = ACTIVATIONS[substrate.activation](
            jnp.einsum("pts,pbs->pbt", matrix, x, precision="highest")
        )
    return x
