"""Tokens from a sequence of numbers by causal convolutions, with activations or in spikes; streamed as well."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import contract
from jaxpar.nn.mixers.spikes import integrate_and_fire

__all__ = ["ConvEmbedding", "ConvState"]

AXES = (None, None, "embed")


class ConvState(NamedTuple):
    """What the convolutions keep of what came before.

    Attributes:
      lines: Of each convolution its last k - 1 inputs, [B, k - 1, C] and then [B, k - 1, D].
      potentials: Of each convolution that spikes, [B, D], in float32 at least.
    """

    lines: tuple[Array, ...]
    potentials: tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class ConvEmbedding:
    """LMUFormer's embedding (arXiv:2402.04882, section 3): n convolutions of k taps, and one that tells places.

        z_l[t] = act(sum_j w_l[k - 1 - j] z_{l-1}[t - j] + b_l), l = 1 .. n, z_0 = x,
        y[t] = z_n[t] + sum_j w_{n+1}[k - 1 - j] z_n[t - j]

    act is a rectifier, or spikes of leaky integrate-and-fire units that see the bracket as a current. The paper's taps
    lie around a token; these end with it, so that the network streams, and biases stand for its batch norms.

    Attributes:
      size: D.
      num_convs: n.
      taps: k.
      spiking: Whether units spike, step by step.
      beta: What a step leaves of a spiking unit's potential.
    """

    size: int = field(legal=AtLeast(1))
    num_convs: int = field(4, AtLeast(1))
    taps: int = field(3, AtLeast(2))
    spiking: bool = False
    beta: float = field(0.9, Between(0, 1))

    __post_init__ = check_fields

    def _widths(self, inputs: int) -> list[int]:
        return [inputs, *[self.size] * self.num_convs]

    def leaves(self, inputs: int) -> dict[str, Leaf]:
        """Declares w_1 [k, C, D], w_2 .. w_{n+1} [k, D, D] and b_1 .. b_n [D] for inputs of C numbers."""
        leaves = {}
        for number, width in enumerate(self._widths(inputs), 1):
            leaves[f"w_{number}"] = Leaf(
                (self.taps, width, self.size), AXES, math.sqrt(2 / self.taps / width)
            )
            leaves[f"b_{number}"] = Leaf((self.size,), (None,), "zeros")
        del leaves[f"b_{self.num_convs + 1}"]
        return leaves

    def init_state(self, batch: int, inputs: int, dtype: DTypeLike) -> ConvState:
        """Returns the state before the first step: zeros."""
        lines = tuple(
            jnp.zeros((batch, self.taps - 1, width), dtype) for width in self._widths(inputs)
        )
        wide = jnp.promote_types(dtype, jnp.float32)
        return ConvState(
            lines, tuple(jnp.zeros((batch, self.size), wide) for _ in lines[1:] if self.spiking)
        )

    def apply(
        self, params: dict, x: Float[Array, "B T C"], state: ConvState | None = None
    ) -> tuple[Float[Array, "B T D"], ConvState]:
        """Returns tokens, and the state after the last step, to go on from.

        Cost, a token: 2 k D (C + n D) operations and as much memory as k copies of what a convolution reads.
        """
        length = x.shape[1]
        before = self.init_state(x.shape[0], x.shape[2], x.dtype) if state is None else state
        lines, potentials = [], []
        for number, last in enumerate(before.lines, 1):
            lines.append(jnp.concatenate([last, x], 1))
            near = jnp.stack([lines[-1][:, j : j + length] for j in range(self.taps)], 2)
            y = contract(
                "btjc,jcd->btd", near, params[f"w_{number}"], AXES, bias=params.get(f"b_{number}")
            )
            if number > self.num_convs:
                x = x + y
            elif self.spiking:
                currents = y.astype(before.potentials[number - 1].dtype)
                fired, after = integrate_and_fire(
                    currents, before.potentials[number - 1], beta=self.beta
                )
                potentials.append(after[:, -1])
                x = fired.astype(y.dtype)
            else:
                x = jax.nn.relu(y)
        return x, ConvState(tuple(line[:, length:] for line in lines), tuple(potentials))
