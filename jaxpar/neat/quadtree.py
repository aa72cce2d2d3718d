"""ES-HyperNEAT: an evolved network, the CPPN, gives a larger one, whose nodes lie where the CPPN has detail.

The paper grows a quadtree from every node, divides it where weights differ, and connects to the points of its bands.
The deepest tree is fixed here, so every tree is a stack of grids, 2 x 2, 4 x 4, ...: CPPNs see all points of a tree
at once, recursion becomes masks from grid to grid, and the points are the H places that a hidden node can have. The
network that is found runs as dense matrix products, with zeros for what is not there.

Reference: S. Risi and K. Stanley, "An enhanced hypercube-based encoding for evolving the placement, density, and
connectivity of neurons", Artificial Life 18(4), 2012; its algorithms 1 to 3.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, OneOf, Positive, check_fields, field
from jaxpar.neat.functions import ACTIVATIONS
from jaxpar.neat.hyper import Layer
from jaxpar.neat.network import Networks, evaluate_rows
from jaxpar.types import Array, UsageError

__all__ = ["Discovered", "Quadtree", "discover", "discovered_apply"]


@dataclasses.dataclass(frozen=True)
class Quadtree:
    """What is given of a substrate in the square [-1, 1] x [-1, 1], and how nodes are looked for.

    Attributes:
        inputs: coordinates (x, y) of the input nodes; a CPPN has 5 inputs (x1, y1, x2, y2 and a constant) and one
            output, clipped to [-1, 1].
        outputs: likewise, of the output nodes.
        initial_depth: trees are divided everywhere into 2^depth x 2^depth points.
        max_depth: and at most this often. A CPPN is asked about 4/3 4^max_depth points from each of as many nodes.
        division: a point at the initial depth or below is divided if the variance among it and its siblings is larger.
        variance: a connection to a point stands for its whole region if the variance of the leaves in it is smaller.
        band: a point is connected if its weight differs by more from both neighbours along an axis.
        iterations: rounds in which the hidden nodes found last look for more.
        largest: the CPPN's output 1 makes this weight.
        activation: of hidden and output nodes.
        sweeps: how often all hidden nodes are computed in a call; 0 means iterations + 1, which lets inputs reach the
            nodes found last.
    """

    inputs: Layer
    outputs: Layer
    initial_depth: int = field(2, AtLeast(1))
    max_depth: int = field(3, AtLeast(1))
    division: float = field(0.03, AtLeast(0))
    variance: float = field(0.03, Positive())
    band: float = field(0.3, AtLeast(0))
    iterations: int = field(1, AtLeast(0))
    largest: float = field(3.0, Positive())
    activation: str = field("sigmoid", OneOf(ACTIVATIONS))
    sweeps: int = field(0, AtLeast(0))

    def __post_init__(self):
        """Refuses places outside the plane and trees that cannot be."""
        check_fields(self)
        if (
            not self.inputs
            or not self.outputs
            or {len(place) for place in (*self.inputs, *self.outputs)} != {2}
        ):
            raise UsageError("a quadtree has inputs and outputs at places of two numbers each.")
        if self.initial_depth > self.max_depth:
            raise UsageError(
                f"initial_depth={self.initial_depth} must lie between 1 and max_depth={self.max_depth}."
            )

    @property
    def places(self) -> np.ndarray:
        """Coordinates of the hidden nodes that there can be, `[H, 2]`, grid after grid, the coarsest first."""
        return np.concatenate([_grid(depth, 0) for depth in range(1, self.max_depth + 1)])

    @property
    def io_sizes(self) -> tuple[int, int]:
        """Numbers of inputs and of outputs."""
        return len(self.inputs), len(self.outputs)

    def decode(self, networks: Networks) -> "Discovered":
        """Returns the networks that G CPPNs give, as `discover`."""
        return discover(self, networks)

    def apply_decoded(self, decoded: "Discovered", x: Array) -> Array:
        """Returns outputs `[G, B, outputs]` of decoded networks for `[G, B, inputs]`."""
        return discovered_apply(self, decoded, x)


class Discovered(NamedTuple):
    """G networks among the same H places of `Quadtree.places`; 0 is no connection.

    Attributes:
        alive: bool `[G, H]`, the hidden nodes that lie on a way from an input to an output.
        first: float32 `[G, H, inputs]`.
        inner: float32 `[G, H, H]`, to (second axis) from (last).
        last: float32 `[G, outputs, H]`.
    """

    alive: Array
    first: Array
    inner: Array
    last: Array


def discover(quadtree: Quadtree, networks: Networks) -> Discovered:
    """The nodes and connections that G CPPNs give.

    Cost: G (inputs + outputs + H) quadtrees of about 4/3 4^max_depth calls, however few nodes there are in the end.

    Raises:
        UsageError: the CPPNs have not 5 inputs and one output.
    """
    if (networks.config.num_inputs, networks.config.num_outputs) != (5, 1):
        raise UsageError(f"a quadtree's CPPNs have 5 inputs and 1 output, not {networks.config.num_inputs} and "
                         f"{networks.config.num_outputs}.")  # fmt: skip

    def connections(ends, outgoing: bool):
        """Connections of each end with each place: bool and float32 `[G, ends, H]`."""
        ends = jnp.asarray(ends, networks.bias.dtype)
        found = jax.lax.map(
            lambda end: _connected(quadtree, networks, end, outgoing), ends, batch_size=8
        )
        return tuple(jnp.moveaxis(x, 0, 1) for x in found)

    first_on, first = connections(quadtree.inputs, True)
    inner_on, inner = connections(quadtree.places, True)
    last_on, last = connections(quadtree.outputs, False)
    nodes, explored = jnp.any(first_on, 1), jnp.zeros_like(first_on[:, 0])
    for _ in range(quadtree.iterations):
        nodes, explored = nodes | _reached(inner_on, nodes), nodes
    inner_on &= explored[:, :, None]
    alive = nodes & jnp.any(last_on, 1)
    alive = jax.lax.while_loop(
        lambda carry: carry[1],
        lambda carry: _grow(carry[0], nodes & _reached(inner_on.mT, carry[0])),
        (alive, jnp.bool_(True)),
    )[0]
    both = alive[:, :, None] & alive[:, None]
    return Discovered(
        alive,
        jnp.where(first_on & alive[:, None], first, 0).mT,
        jnp.where(inner_on & both, inner, 0).mT,
        jnp.where(last_on & alive[:, None], last, 0),
    )


def discovered_apply(quadtree: Quadtree, found: Discovered, x: Array) -> Array:
    """Runs G networks, `[G, B, inputs]` -> `[G, B, outputs]`: all hidden nodes from 0, `sweeps` times, then outputs."""
    act, there = ACTIVATIONS[quadtree.activation], found.alive[:, None]

    def product(matrix, values):
        return jnp.einsum("pts,pbs->pbt", matrix, values, precision="highest")

    fed = product(found.first, x)
    hidden = jnp.zeros_like(fed)
    for _ in range(quadtree.sweeps or quadtree.iterations + 1):
        hidden = jnp.where(there, act(fed + product(found.inner, hidden)), 0)
    return act(product(found.last, hidden))


def _grid(depth: int, border: int) -> np.ndarray:
    """Coordinates of the 2^depth x 2^depth points at a depth, `[., 2]`, with `border` more all around."""
    count = 2**depth
    axis = (2 * np.arange(-border, count + border) + 1) / count - 1
    return np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)


def _connected(
    quadtree: Quadtree, networks: Networks, end: Array, outgoing: bool
) -> tuple[Array, Array]:
    """Which places the tree of one end connects it with, and the weights: bool and float32 `[G, H]`."""
    depths = range(1, quadtree.max_depth + 1)
    points = jnp.asarray(np.concatenate([_grid(depth, 1) for depth in depths]), end.dtype)
    ends = jnp.broadcast_to(end, points.shape)
    pair = [ends, points] if outgoing else [points, ends]
    rows = jnp.concatenate([*pair, jnp.ones((len(points), 1), end.dtype)], 1)
    out = jnp.clip(evaluate_rows(networks, rows)[..., 0], -1, 1)
    parts = jnp.split(out, np.cumsum([(2**depth + 2) ** 2 for depth in depths])[:-1], 1)
    grids = [
        part.reshape(len(out), 2**depth + 2, -1) for depth, part in zip(depths, parts, strict=True)
    ]
    inside = [grid[:, 1:-1, 1:-1] for grid in grids]
    shown = _expressed(quadtree, grids, _variances(quadtree, inside))
    on, weight = (
        jnp.concatenate([x.reshape(len(out), -1) for x in part], 1) for part in (shown, inside)
    )
    return on, quadtree.largest * weight


def _variances(quadtree: Quadtree, inside: list[Array]) -> list[Array]:
    """The variance of the leaves below every point, 0 for a leaf; algorithm 1, then bottom up."""
    divided = [jnp.ones((len(inside[0]), 1, 1), bool)]
    for depth, grid in enumerate(inside[:-1], 1):
        among = jnp.var(_families(grid), (2, 4))
        varies = depth < quadtree.initial_depth or among > quadtree.division
        divided.append(_for_children(divided[-1] & varies))
    count, mean, square = jnp.ones_like(inside[-1]), inside[-1], jnp.zeros_like(inside[-1])
    found = [square]
    for grid, is_divided in zip(inside[-2::-1], divided[:0:-1], strict=True):
        counts, means, squares = (_families(x) for x in (count, mean, square))
        count = jnp.sum(counts, (2, 4))
        mean = jnp.sum(counts * means, (2, 4)) / count
        square = jnp.sum(squares + counts * (means - mean[:, :, None, :, None]) ** 2, (2, 4))
        count, mean, square = (
            jnp.where(is_divided, x, leaf) for x, leaf in ((count, 1), (mean, grid), (square, 0))
        )
        found.append(square / count)
    return found[::-1]


def _expressed(quadtree: Quadtree, grids: list[Array], variances: list[Array]) -> list[Array]:
    """Which points are connected, top down; algorithm 2. A point's neighbours are those of its grid."""
    shown, looks = [], jnp.ones_like(variances[0], bool)
    for grid, variance in zip(grids, variances, strict=True):
        centre = grid[:, 1:-1, 1:-1]
        across = [jnp.abs(centre - grid[:, at, 1:-1]) for at in (slice(0, -2), slice(2, None))]
        along = [jnp.abs(centre - grid[:, 1:-1, at]) for at in (slice(0, -2), slice(2, None))]
        band = jnp.maximum(jnp.minimum(*across), jnp.minimum(*along))
        goes_on = looks & (variance >= quadtree.variance)
        shown.append(looks & ~goes_on & (band > quadtree.band))
        looks = _for_children(goes_on)
    return shown


def _families(grid: Array) -> Array:
    """A grid by parents: `[G, n, 2, n, 2]`, siblings on axes 2 and 4."""
    half = grid.shape[1] // 2
    return grid.reshape(len(grid), half, 2, half, 2)


def _for_children(grid: Array) -> Array:
    return jnp.repeat(jnp.repeat(grid, 2, 1), 2, 2)


def _reached(on: Array, nodes: Array) -> Array:
    """Where connections `[G, from, to]` lead from nodes `[G, from]`."""
    return jnp.any(on & nodes[:, :, None], 1)


def _grow(nodes: Array, more: Array) -> tuple[Array, Array]:
    return nodes | more, jnp.any(more & ~nodes)
