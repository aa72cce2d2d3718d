"""The networks of learners: an encoder, a memory, and heads."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import flax.linen as linen
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxpar.fields import AtLeast, Each, OneOf, check_fields, field
from jaxpar.nn.stack import Stack
from jaxpar.rl.board import BoardConv, check_board
from jaxpar.rl.memory import Memory, memory_of
from jaxpar.solve.problem import Method
from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["Network", "Outputs"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"tanh": jnp.tanh, "relu": jax.nn.relu, "silu": jax.nn.silu}


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

    def init(self, key: PRNGKey, shape: tuple[int, ...], heads: Mapping[str, tuple[int, float]]) -> PyTree:
        """Draws the parameters; consumes `key`.

        Args:
            key: consumed.
            shape: of the features of a step, `[F]` or `[H, W, C]`.
            heads: width and gain of each.

        Raises:
            UsageError: there are convolutions, and no board for them.
        """
        check_board(self.conv, shape)
        encoder_key, memory_key, heads_key = jax.random.split(key, 3)
        x: PyTree = jnp.zeros((1, *shape))
        params: dict[str, PyTree] = {"encoder": self._encoder().init(encoder_key, x)}
        x = self._encoder().apply(params["encoder"], x)
        if memory := self.memory_layer():
            params["memory"] = memory.init(memory_key, x.shape[-1])
            start = jnp.ones((1, 1), bool)
            x = jax.eval_shape(memory.apply, params["memory"], x[None], start, memory.initial(1))[0]
            x = jnp.zeros(x.shape[1:])
        params["heads"] = {
            name: _head(self, width, gain).init(jax.random.fold_in(heads_key, place), x)
            for place, (name, (width, gain)) in enumerate(sorted(heads.items()))
        }
        return params

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
        return _Layers(self.encoder, ACTIVATIONS[self.activation], self.layer_norm, self.conv, flat=True)


def _head(network: Network, width: int, gain: float) -> "_Layers":
    return _Layers(network.hidden, ACTIVATIONS[network.activation], network.layer_norm, (), False, width, gain)


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
            x = self._active(BoardConv(channels, orthogonal(math.sqrt(2)), name=f"Conv_{place}")(x))
        x = x.reshape(len(x), -1)
        for width in self.widths:
            x = self._active(linen.Dense(width, kernel_init=orthogonal(math.sqrt(2)))(x))
        if self.out:
            x = linen.Dense(self.out, kernel_init=orthogonal(self.gain), name="out")(x)
        return x.reshape(*lead, -1)

    def _active(self, x: Array) -> Array:
        return self.activation(linen.LayerNorm()(x) if self.layer_norm else x)


def orthogonal(gain: float) -> Callable[..., Array]:
    """Draws orthonormal columns, or rows where these are fewer, times `gain`, evenly among all such matrices.

    By Gram-Schmidt, each column twice (once is not orthogonal enough in float32), and not by LAPACK's QR: two of those
    in a batch, as under `vmap` over seeds, deadlock over their threads on CPUs (jaxlib 0.10).
    """

    def init(key: PRNGKey, shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> Array:
        width, height = sorted((math.prod(shape[:-1]), shape[-1]))
        drawn = jax.random.normal(key, (width, height), dtype)

        def orthonormal(rows, place):
            row = drawn[place]
            for _ in range(2):
                row = row - (rows @ row) @ rows
            return rows.at[place].set(row / jnp.linalg.norm(row)), None

        rows, _ = jax.lax.scan(orthonormal, jnp.zeros_like(drawn), jnp.arange(width))
        return gain * (rows if shape[-1] == height else rows.T).reshape(shape)

    return init
