"""The networks of learners: an encoder, a memory, and heads."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, Each, OneOf, check_fields, field
from jaxpar.nn.stack import Stack
from jaxpar.rl.board import BoardConv, check_board
from jaxpar.rl.memory import Memory, memory_of
from jaxpar.solve.problem import Method
from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["Network", "Outputs"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "tanh": jnp.tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


class Outputs(NamedTuple):
    """Outputs of a network for T steps of B environments.

    Attributes:
        heads: by name `[T, B, width]`.
        carry: of the memory after the last step.
        converged: bool [], whether the memory's solver did.
    """

    heads: dict[str, Array]
    carry: PyTree
    converged: Array


@dataclasses.dataclass(frozen=True)
class Network:
    """Features -> encoder, shared -> memory -> layers of each head -> heads; static and hashable.

    Weights start orthogonal with gain sqrt(2), of heads as asked for, and biases at 0.

    Attributes:
        encoder: widths of dense layers before the memory, shared by all heads.
        hidden: widths of dense layers of each head, after it.
        activation: "tanh", "relu" or "silu", after each layer.
        conv: channels of 3 x 3 convolutions that read boards `[H, W, C]`, before the encoder, each from inside its
            edge; without any, boards are read flat.
        layer_norm: whether layers are normalised before their activation.
        memory: "none", a name of `MEMORIES`, or a `Memory`.
        memory_size: its units.
        method: how its recurrence is solved.
    """

    encoder: tuple[int, ...] = field((), Each(AtLeast(1)))
    hidden: tuple[int, ...] = field((64, 64), Each(AtLeast(1)))
    activation: str = field("tanh", OneOf(ACTIVATIONS))
    conv: tuple[int, ...] = field((), Each(AtLeast(1)))
    layer_norm: bool = False
    memory: str | Memory | Stack = "none"
    memory_size: int = field(64, AtLeast(1))
    method: Method | None = None

    def __post_init__(self):
        """Refuses what no network can be."""
        check_fields(self)
        self.memory_layer()

    def memory_layer(self) -> Memory | None:
        """The memory, None without one."""
        return memory_of(self.memory, self.memory_size, self.method)

    def init(
        self, key: PRNGKey, shape: tuple[int, ...], heads: Mapping[str, tuple[int, float]]
    ) -> PyTree:
        """Draws the parameters; consumes `key`.

        Args:
            key: consumed.
            shape: of the features of a step, `[F]` or `[H, W, C]`.
            heads: width and gain of each.

        Raises:
            UsageError: there are convolutions, and no board for them.
        """
        check_board(self.conv, shape)
        layers_key, memory_key = jax.random.split(key)
        x: PyTree = jnp.zeros((1, *shape))
        params: dict[str, PyTree] = {"encoder": self._encoder().init(layers_key, x)}
        x = self._encoder().apply(params["encoder"], x)
        if memory := self.memory_layer():
            params["memory"] = memory.init(memory_key, x.shape[-1])
            start = jnp.ones((1, 1), bool)
            x = jax.eval_shape(memory.apply, params["memory"], x[None], start, memory.initial(1))[0]
            x = jnp.zeros(x.shape[1:])
        params["heads"] = {
            name: _head(self, width, gain).init(layers_key, x)
            for name, (width, gain) in sorted(heads.items())
        }
        layers = {name: params[name] for name in ("encoder", "heads")}
        return params | drawn(layers_key, layers)

    def initial(self, batch: int) -> PyTree:
        """The memory's carry before a first step; without leaves where there is none."""
        memory = self.memory_layer()
        return memory.initial(batch) if memory else {}

    def apply(self, params: PyTree, xs: Array, starts: Array, carry: PyTree) -> Outputs:
        """Heads `[T, B, width]` of features `[T, B, ...]`; `starts [T, B]`, and `carry` from before the first step."""
        x: PyTree = self._encoder().apply(params["encoder"], xs)
        converged = jnp.ones((), bool)
        if memory := self.memory_layer():
            x, carry, converged = memory.apply(params["memory"], x, starts, carry)
        heads = {}
        for name, weights in params["heads"].items():
            width = weights["params"]["out"]["bias"].shape[-1]
            heads[name] = _head(self, width, 1.0).apply(weights, x)
        return Outputs(heads, carry, converged)

    def _encoder(self) -> "_Layers":
        return _Layers(
            self.encoder, ACTIVATIONS[self.activation], self.layer_norm, self.conv, flat=True
        )


def _head(network: Network, width: int, gain: float) -> "_Layers":
    return _Layers(
        network.hidden, ACTIVATIONS[network.activation], network.layer_norm, (), False, width, gain
    )


class _Layers(linen.Module):
    widths: tuple[int, ...]
    activation: Callable[[Array], Array]
    layer_norm: bool
    conv: tuple[int, ...] = ()
    flat: bool = False
    out: int = 0
    gain: float = 1.0

    @linen.compact
    def __call__(self, x: Array) -> Array:
        rank = 3 if self.flat and x.ndim in (4, 5) else 1
        lead, x = x.shape[: x.ndim - rank], x.reshape(-1, *x.shape[x.ndim - rank :])
        for place, channels in enumerate(self.conv):
            x = self._active(BoardConv(channels, with_gain(math.sqrt(2)), name=f"Conv_{place}")(x))
        x = x.reshape(len(x), -1)
        for width in self.widths:
            x = self._active(linen.Dense(width, kernel_init=with_gain(math.sqrt(2)))(x))
        if self.out:
            x = linen.Dense(self.out, kernel_init=with_gain(self.gain), name="out")(x)
        return x.reshape(*lead, -1)

    def _active(self, x: Array) -> Array:
        return self.activation(linen.LayerNorm()(x) if self.layer_norm else x)


def with_gain(gain: float) -> Callable[..., Array]:
    """An initialiser of kernels for `drawn`: the gain alone, everywhere."""
    return linen.initializers.constant(gain)


def drawn(key: PRNGKey, gains: PyTree) -> PyTree:
    """Draws the kernels of layers, evenly among all with orthonormal columns, or rows where these are fewer.

    All of them by one Gram-Schmidt, each padded with zeros to the largest sides: a loop for every kernel took a quarter
    of the time that a small learner takes to compile. Each row is made orthogonal twice (once is not enough in
    float32). Not by LAPACK's QR: two of those in a batch, as under `vmap` over seeds, deadlock over their threads on
    CPUs (jaxlib 0.10).

    Args:
        key: consumed.
        gains: parameters as first made: what multiplies a kernel `[..., n]` in place of it, and vectors, which stay.
    """
    leaves, structure = jax.tree.flatten(gains)
    sides = [sorted((x.size // x.shape[-1], x.shape[-1])) if x.ndim > 1 else (0, 0) for x in leaves]
    width, height = (max(side) for side in zip(*sides, strict=True))
    if not width:
        return gains
    kernels = [place for place, x in enumerate(leaves) if x.ndim > 1]
    least, most = np.array([sides[place] for place in kernels]).T
    exists = (np.arange(width) < least[:, None])[..., None] & (np.arange(height) < most[:, None])[
        :, None
    ]
    normal = jnp.where(exists, jax.random.normal(key, exists.shape), 0)

    def orthonormal(rows, place):
        row = normal[:, place]
        for _ in range(2):
            row = row - jnp.einsum("kw,kwh->kh", jnp.einsum("kwh,kh->kw", rows, row), rows)
        norm = jnp.linalg.norm(row, axis=-1, keepdims=True)
        return rows.at[:, place].set(
            row / jnp.where(norm > 0, norm, 1)
        ), None  # rows of padding stay 0

    rows, _ = jax.lax.scan(orthonormal, jnp.zeros_like(normal), jnp.arange(width))
    for number, place in enumerate(kernels):
        gain, one = leaves[place], rows[number, : least[number], : most[number]]
        leaves[place] = gain * (one if gain.shape[-1] == most[number] else one.T).reshape(
            gain.shape
        )
    return jax.tree.unflatten(structure, leaves)
