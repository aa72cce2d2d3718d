"""Moves of Countdown: pairs of exact fractions in int32, reduced; what would overflow is not legal."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.types import Array

__all__ = ["apply_move", "legal_moves", "moves"]

MOST = 2**31 - 1
ADD, MULTIPLY, SUBTRACT, DIVIDE = range(4)


def moves(num_numbers: int) -> np.ndarray:
    """What actions are, int32 `[A, 3]`: i, j, and 0 to 3 for + * - /; A = 3 N (N - 1).

    For every i < j, in this order: i + j, i * j, i - j, j - i, i / j, j / i.
    """
    i, j = np.triu_indices(num_numbers, 1)
    kinds = (
        (i, j, ADD),
        (i, j, MULTIPLY),
        (i, j, SUBTRACT),
        (j, i, SUBTRACT),
        (i, j, DIVIDE),
        (j, i, DIVIDE),
    )
    return np.concatenate(
        [np.stack([a, b, np.full_like(a, op)], axis=1) for a, b, op in kinds]
    ).astype(np.int32)


def legal_moves(num: Array, den: Array, left: Array, rules: str, most: int = MOST) -> Array:
    """Which actions are legal, bool `[A]`; `most` bounds all that is computed on the way."""
    i, j = np.triu_indices(num.shape[0], 1)
    a, b, c, d = num[i], den[i], num[j], den[j]
    room = most // jnp.maximum(jnp.abs(num), 1)  # x y <= most where x <= most // y
    product = jnp.abs(a) <= room[j]
    if rules == "rational":
        low_room = most // den
        bottom, left_fits, right_fits = (
            b <= low_room[j],
            jnp.abs(a) <= low_room[j],
            jnp.abs(c) <= low_room[i],
        )
        x, y, both = a * d, c * b, bottom & left_fits & right_fits
        product &= bottom
        forth = left_fits & (b <= room[j]) & (c != 0)
        back = right_fits & (d <= room[i]) & (a != 0)
    else:
        x, y, both = a, c, jnp.ones(len(i), bool)
        forth = (c != 0) & (jax.lax.rem(a, jnp.where(c == 0, 1, c)) == 0)
        back = (a != 0) & (jax.lax.rem(c, jnp.where(a == 0, 1, a)) == 0)
    summed, less, more = (
        both & _fits(x, y, most),
        both & _fits(x, -y, most),
        both & _fits(-x, y, most),
    )
    if rules == "natural":
        less, more = less & (x > y), more & (y > x)
    return jnp.concatenate([summed, product, less, more, forth, back]) & jnp.tile(
        left[i] & left[j], 6
    )


def _fits(x: Array, y: Array, most: int) -> Array:
    """Whether |x + y| <= most, where both are of at most that size, without computing it."""
    return jnp.where(x > 0, y <= most - jnp.maximum(x, 0), -y <= most + jnp.minimum(x, 0))


def apply_move(num: Array, den: Array, move: Array, rules: str) -> tuple[Array, Array]:
    """The result of a legal move int32 `[3]`, reduced: numerator and denominator int32 `[]`."""
    a, b, c, d = num[move[0]], den[move[0]], num[move[1]], den[move[1]]
    if rules != "rational":
        divided = jax.lax.div(a, jnp.where(c == 0, 1, c))
        return jnp.stack([a + c, a * c, a - c, divided])[move[2]], jnp.ones_like(b)
    top = jnp.stack([a * d + c * b, a * c, a * d - c * b, jnp.where(c < 0, -a, a) * d])[move[2]]
    low = jnp.where(move[2] == DIVIDE, b * jnp.abs(c), b * d)
    divisor = jnp.maximum(_gcd(jnp.abs(top), jnp.maximum(low, 1)), 1)
    return jax.lax.div(top, divisor), jax.lax.div(low, divisor)


def _gcd(x: Array, y: Array) -> Array:
    """The greatest common divisor of x >= 0 and y > 0, int32; Euclid's 46 steps at most, none that is waited for."""

    def once(_: int, pair: tuple[Array, Array]) -> tuple[Array, Array]:
        x, y = pair
        return jnp.where(y == 0, x, y), jnp.where(y == 0, 0, jax.lax.rem(x, jnp.maximum(y, 1)))

    return jax.lax.fori_loop(0, 46, once, (x, y), unroll=True)[0]
