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

ROPE_SCALINGS = ("llama3", "linear", "yarn", "dynamic")


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions, maybe of a share of a head, with scaling of all wavelengths or, as Llama 3, of the long ones.

    Frequency i is theta^(-2i/K) (arXiv:2104.09864, eq. 15). With `factor` s > 1, wavelengths over original/low are
    divided by s, those under original/high are kept, and those between are blended linearly in original/wavelength
    (Llama 3.1's "llama3" rule).

    "yarn" (arXiv:2309.00071) has the same two bounds, alpha = low and beta = high. It blends linearly in the index i,
    as the paper's code and transformers do, between the whole numbers around the indices that make beta and alpha
    turns in `original_len` tokens. Rotated numbers are multiplied by `score_scale`, so scores grow by its square.

    "dynamic" (the same paper, NTK-aware) keeps all wavelengths up to `original_len` tokens. The base for a longer text
    of L tokens is theta (s L / original_len - s + 1)^(R / (R - 2)). L is the largest position of a row in one call,
    plus 1. Keys in a cache keep the base that they were rotated with, as in transformers.

    Attributes:
      theta: Base of the wavelengths.
      factor: s; 1 switches the scaling off.
      scaling: "llama3", "yarn", "dynamic", or "linear" for all wavelengths divided by s (arXiv:2306.15595).
      low_freq_factor: Wavelengths over `original_len / this` are divided in full.
      high_freq_factor: Wavelengths under `original_len / this` are kept.
      score_scale: Factor of what is rotated, by "yarn" alone; 0 for the paper's 0.1 ln(s) + 1.
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
    score_scale: float = field(0.0, AtLeast(0))

    def __post_init__(self):
        """Refuses wavelengths that are both kept and divided."""
        check_fields(self)
        if (
            self.factor != 1
            and self.scaling in ("llama3", "yarn")
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

    @property
    def depends_on_length(self) -> bool:
        """Returns whether the frequencies of a token depend on the length of its text."""
        return self.scaling == "dynamic" and self.factor != 1

    def frequencies(self, head_dim: int, dtype: DTypeLike = jnp.float32) -> Float[Array, "R/2"]:
        """Returns the frequencies in radians a token of the R numbers that are rotated, rounded once to `dtype`.

        Those of "dynamic" are of texts of up to `original_len` tokens.
        """
        width = self.width(head_dim)
        freq = self.theta ** (-np.arange(0, width, 2) / width)
        if self.factor != 1.0 and self.scaling == "linear":
            freq = freq / self.factor
        elif self.factor != 1.0 and self.scaling in ("llama3", "yarn"):
            keep = self._kept(freq, width)
            freq = freq * (keep + (1 - keep) / self.factor)
        return jnp.asarray(freq, dtype)

    def _kept(self, freq: np.ndarray, width: int) -> np.ndarray:
        """Returns the share of each frequency that is kept, from 0 to 1, float64 [R/2]."""
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.scaling == "llama3":
            turns = self.original_len * freq / (2 * math.pi)
            return np.clip((turns - low) / (high - low), 0.0, 1.0)

        def index(turns: float) -> float:
            """Returns the index of the frequency that makes so many turns."""
            wavelength = self.original_len / turns
            return width * math.log(wavelength / (2 * math.pi)) / (2 * math.log(self.theta))

        first = max(math.floor(index(high)), 0)
        last = float(min(math.ceil(index(low)), width - 1))
        if last == first:
            last += 0.001  # a step instead of a ramp
        return 1 - np.clip((np.arange(width // 2) - first) / (last - first), 0.0, 1.0)

    def scale(self) -> float:
        """Returns the factor of what is rotated."""
        if self.scaling != "yarn" or self.factor == 1:
            return 1.0
        return self.score_scale or 0.1 * math.log(self.factor) + 1

    def _angles(
        self, positions: Int[Array, "B T"], head_dim: int, dtype: DTypeLike
    ) -> Float[Array, "B T 1 R/2"]:
        """Returns the angles of tokens in radians."""
        freq = self.frequencies(head_dim, dtype)[None, None, None, :]
        if self.depends_on_length:
            width = self.width(head_dim)
            length = jnp.max(positions, axis=1, keepdims=True)[:, :, None, None] + 1
            longer = jnp.maximum(length, self.original_len).astype(dtype) / self.original_len
            stretch = self.factor * longer - (self.factor - 1)
            # theta^(-2i/R) of a base times stretch^(R/(R-2)); of R = 2 there is i = 0 alone, which nothing changes.
            power = jnp.asarray(np.arange(0, width, 2) / max(width - 2, 1), dtype)
            freq = freq * stretch ** -power[None, None, None, :]
        return positions[:, :, None, None].astype(dtype) * freq

    def cosines_and_sines(
        self, positions: Int[Array, "B T"], head_dim: int, dtype: DTypeLike = jnp.float32
    ) -> tuple[Float[Array, "B T 1 R/2"], Float[Array, "B T 1 R/2"]]:
        """Returns what the pairs of a head are rotated by, times the factor `scale`."""
        angle = self._angles(positions, head_dim, dtype)
        scale = self.scale()
        cos = jnp.cos(angle)
        sin = jnp.sin(angle)
        if scale != 1:
            cos = cos * scale
            sin = sin * scale
        return cos, sin

    def rotate(
        self, x: Float[Array, "B T H K"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T H K"]:
        """Rotates the pair (x[i], x[i + R/2]) by positions * frequency[i] radians, the pairing of Llama's weights."""
        cos, sin = self.cosines_and_sines(positions, x.shape[-1], wide_dtype(x))
        return self._rotate_pairs(x, cos, sin)

    def shift(
        self, x: Float[Array, "B T H K"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T H K"]:
        """Rotates again by more positions what is rotated; the factor `scale` stays in it once."""
        if self.depends_on_length:
            raise UsageError(
                "scaling=dynamic: rotated keys cannot be shifted, their base depends on the "
                f"length; expected another of {', '.join(ROPE_SCALINGS)}."
            )
        angle = self._angles(positions, x.shape[-1], wide_dtype(x))
        return self._rotate_pairs(x, jnp.cos(angle), jnp.sin(angle))

    def _rotate_pairs(self, x: Array, cos: Array, sin: Array) -> Array:
        """Rotates the first R numbers of each head [B, T, H, K]; the others stay."""
        width = self.width(x.shape[-1])
        a, b = jnp.split(x[..., :width].astype(cos.dtype), 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)
        if width == x.shape[-1]:
            return rotated
        return jnp.concatenate([rotated, x[..., width:]], axis=-1)


@dataclasses.dataclass(frozen=True)
class Alibi:
    """Attention with linear biases: a score falls by m times the distance, m = 2^(-8 i / H) in head i = 1 .. H.

    Press et al. 2022 (arXiv:2108.12409), section 3. Only distances matter, so it goes with caches of a window.
    """

    def slopes(self, num_heads: int) -> Float[Array, " H"]:
        """Returns m of each head."""
        return 2.0 ** (-8 * (1 + jnp.arange(num_heads, dtype=jnp.float32)) / num_heads)
