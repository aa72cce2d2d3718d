"""What tells attention where tokens are: rotary positions, and slopes that favour what is near."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxpar.fields import AtLeast, Between, OneOf, Positive, check_fields, field
from jaxpar.nn.norm import wide_dtype
from jaxpar.types import UsageError

__all__ = ["ROPE_SCALINGS", "Alibi", "Rope"]

ROPE_SCALINGS = ("llama3", "linear")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions, maybe of a share of a head, with scaling of all wavelengths or, as Llama 3, of the long ones.

    Frequency i is theta^(-2i/K) (arXiv:2104.09864, eq. 15). With `factor` s > 1, wavelengths over original/low are
    divided by s, those under original/high are kept, and those between are blended linearly in original/wavelength
    (Llama 3.1's "llama3" rule).

    Attributes:
      theta: Base of the wavelengths.
      factor: s; 1 switches the scaling off.
      scaling: "llama3", or "linear" for all wavelengths divided by s (arXiv:2306.15595).
      low_freq_factor: Wavelengths over `original_len / this` are divided in full.
      high_freq_factor: Wavelengths under `original_len / this` are kept.
      original_len: Context length before scaling, in tokens.
      share: Of a head's K numbers that are rotated: the first int(share K), by the frequencies of a head of that width.
    """

    theta: float = field(10000.0, Positive())
    factor: float = field(1.0, AtLeast(1))
    low_freq_factor: float = field(1.0, Positive())
    high_freq_factor: float = field(4.0, Positive())
    original_len: int = field(8192, AtLeast(1))
    scaling: str = field("llama3", OneOf(ROPE_SCALINGS))
    share: float = field(1.0, Between(0, 1, "(]"))

    def __post_init__(self):
        """Refuses wavelengths that are both kept and divided."""
        check_fields(self)
        if (
            self.factor != 1
            and self.scaling == "llama3"
            and not self.low_freq_factor < self.high_freq_factor
        ):
            raise UsageError(
                f"high_freq_factor={self.high_freq_factor} must be over low_freq_factor={self.low_freq_factor}."
            )

    def width(self, head_dim: int) -> int:
        """Returns how many numbers of a head are rotated, which is even."""
        width = int(head_dim * self.share)
        if width % 2 or not width:
            raise UsageError(
                f"share={self.share:g} of head_dim={head_dim} rotates {width} numbers; legal are even ones."
            )
        return width

    def frequencies(self, head_dim: int, dtype: DTypeLike = jnp.float32) -> Float[Array, "R/2"]:
        """Returns the frequencies in radians a token of the R numbers that are rotated, rounded once to `dtype`."""
        width = self.width(head_dim)
        freq = self.theta ** (-np.arange(0, width, 2) / width)
        if self.factor != 1.0 and self.scaling == "linear":
            freq = freq / self.factor
        elif self.factor != 1.0:
            turns = self.original_len * freq / (2 * math.pi)
            low, high = self.low_freq_factor, self.high_freq_factor
            keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
            freq = freq * (keep + (1 - keep) / self.factor)
        return jnp.asarray(freq, dtype)

    def rotate(
        self, x: Float[Array, "B T H K"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T H K"]:
        """Rotates the pair (x[i], x[i + R/2]) by positions * frequency[i] radians, the pairing of Llama's weights."""
        wide, width = wide_dtype(x), self.width(x.shape[-1])
        freq = self.frequencies(x.shape[-1], wide)
        angle = positions[:, :, None, None].astype(wide) * freq[None, None, None, :]
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        a, b = jnp.split(x[..., :width].astype(wide), 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
        return (
            turned if width == x.shape[-1] else jnp.concatenate([turned, x[..., width:]], axis=-1)
        )


@dataclasses.dataclass(frozen=True)
class Alibi:
    """Attention with linear biases: a score falls by m times the distance, m = 2^(-8 i / H) in head i = 1 .. H.

    Press et al. 2022 (arXiv:2108.12409), section 3. Only distances matter, so it goes with caches of a window.
    """

    def slopes(self, num_heads: int) -> Float[Array, " H"]:
        """Returns m of each head."""
        return 2.0 ** (-8 * (1 + jnp.arange(num_heads, dtype=jnp.float32)) / num_heads)
