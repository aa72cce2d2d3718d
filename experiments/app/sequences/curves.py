"""Digits of one dimension, generated: short curves, moved, scaled, sheared and under smooth noise (no data needed).

The task is that of MNIST-1D (Greydanus and Kobak, arXiv:2011.14439); curves, sizes of changes and code are our own.
"""

import numpy as np

__all__ = ["LENGTH", "PENS", "digits_1d"]

PENS = (
    (0, -3, -5, -5, -5, -3, 0, 3, 5, 5, 3, 0),
    (-4, -1, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4),
    (-4, -1, 3, 5, 5, 3, 0, -3, -5, -2, 2, 5),
    (-4, 1, 4, 5, 3, 0, 0, 4, 5, 4, 1, -4),
    (2, 0, -2, -4, -5, -1, 3, 5, 2, 2, 2, 2),
    (5, 0, -4, -4, -4, -1, 3, 5, 5, 3, -1, -4),
    (4, 1, -2, -4, -5, -5, -3, 1, 4, 4, 1, -3),
    (-5, -2, 2, 5, 4, 3, 2, 1, 0, -1, -2, -3),
    (4, 0, -4, -3, 1, 4, 4, 0, -4, -4, 0, 4),
    (4, 0, -4, -4, -1, 3, 4, 4, 3, 2, 1, 0),
)
"""How far to the right a pen is at twelve times while it writes 0, 1, ... 9."""
LENGTH = 40
SCALE, SLOPE, NOISE, WIDTH = (
    (0.6, 1.4),
    0.6,
    0.4,
    2.0,
)  # the noise's standard deviation, and its steps of correlation


def digits_1d(rng: np.random.Generator, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Draws curves of pens in [-1, 1], of each digit equally many but for a rest of one.

    A curve lies somewhere in silence of 40 steps, by a factor larger or smaller. A ramp of up to 0.6 at both ends, of
    either sign, is added to all steps, and so is white noise that was smoothed by a Gaussian.

    Args:
      rng: Of everything drawn: the same state, the same curves.
      count: Of the curves, N.

    Returns:
      Curves [N, 40] and digits [N].
    """
    labels = rng.permutation(np.arange(count) % len(PENS))
    pens, out = np.array(PENS)[labels] / 5.0, np.zeros((count, LENGTH))
    places = rng.integers(0, LENGTH - pens.shape[1] + 1, (count, 1)) + np.arange(pens.shape[1])
    np.put_along_axis(out, places, pens * rng.uniform(*SCALE, (count, 1)), 1)
    ramps = rng.uniform(-SLOPE, SLOPE, (count, 1)) * np.linspace(-1, 1, LENGTH)
    steps = np.arange(LENGTH)
    smooth = np.exp(-0.5 * ((steps[:, None] - steps) / WIDTH) ** 2)
    smooth /= np.sqrt(
        (smooth**2).sum(1, keepdims=True)
    )  # so that every step's noise has the same deviation
    return out + ramps + NOISE * rng.standard_normal(out.shape) @ smooth.T, labels
