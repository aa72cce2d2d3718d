"""What tells attention where tokens are: rotary positions, and slopes that favour what is near."""

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxpar.fields import AtLeast, Positive, check_fields, field
from jaxpar.nn.norm import wide_dtype
from jaxpar.types import UsageError

__all__ = ["Alibi", "Rope"]


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions, with Llama 3's scaling of the long wavelengths.

    Frequency i is theta^(-2i/K) (arXiv:2104.09864, eq. 15). With `factor` s > 1, wavelengths over original/low are
    divided by s, those under original/high are kept, and those between are blended linearly in original/wavelength
    (Llama 3.1's "llama3" rule).

    Attributes:
      theta: Base of the wavelengths.
      factor: s; 1 switches the scaling off.
      low_freq_factor: Wavelengths over `original_len / this` are divided in full.
      high_freq_factor: Wavelengths under `original_len / this` are kept.
      original_len: Context length before scaling, in tokens.
    """

    theta: float = field(10000.0, Positive())
    factor: float = field(1.0, AtLeast(1))
    low_freq_factor: float = field(1.0, Positive())
    high_freq_factor: float = field(4.0, Positive())
    original_len: int = field(8192, AtLeast(1))

    def __post_init__(self):
        """Refuses wavelengths that are both kept and divided."""
        check_fields(self)
        if self.factor != 1 and not self.low_freq_factor < self.high_freq_factor:
            raise UsageError(
                f"high_freq_factor={self.high_freq_factor} must be over low_freq_factor={self.low_freq_factor}."
            )

    def frequencies(self, head_dim: int) -> Float[Array, "K/2"]:
        """Returns the frequencies in radians a token; `head_dim` is even."""
        index = jnp.arange(0, head_dim, 2, dtype=jnp.float32)
        freq = self.theta ** (-index / head_dim)
        if self.factor == 1.0:
            return freq
        turns = self.original_len * freq / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        keep = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return freq * (keep + (1 - keep) / self.factor)

    def rotate(self, x: Float[Array, "B T H K"], positions: Int[Array, "B T"]) -> Float[Array, "B T H K"]:
        """Rotates the pair (x[i], x[i + K/2]) by positions * frequency[i] radians, the pairing of Llama's weights."""
        wide, freq = wide_dtype(x), self.frequencies(x.shape[-1])
        angle = positions[:, :, None, None].astype(wide) * freq[None, None, None, :].astype(wide)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        a, b = jnp.split(x.astype(wide), 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class Alibi:
    """Attention with linear biases: a score falls by m times the distance, m = 2^(-8 i / H) in head i = 1 .. H.

    Press et al. 2022 (arXiv:2108.12409), section 3. Only distances matter, so it goes with caches of a window.
    """

    def slopes(self, num_heads: int) -> Float[Array, " H"]:
        """Returns m of each head."""
        return 2.0 ** (-8 * (1 + jnp.arange(num_heads, dtype=jnp.float32)) / num_heads)
