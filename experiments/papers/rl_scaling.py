"""Fits sigmoids of return against compute to runs of PPO, and foretells their ends from their first halves.

    python -m experiments.papers.rl_scaling                  # two CPU cores, eight minutes: ten groups of seeds
    python -m experiments.papers.rl_scaling environments=[CartPole-v1] groups=1
    python -m experiments.papers.rl_scaling updates=400      # longer runs, whose halves say more
    python -m experiments.papers.rl_scaling environments=[Acrobot-v1,2048-3x3] groups=4
    python -m experiments.papers.rl_scaling updates=100 groups=1

The curve of ScaleRL (Khatri et al. 2025, arXiv:2510.13786), with compute C in environment steps:

    R(C) = R0 + (A - R0) / (1 + (C_mid / C)^B)

R0 and A enter linearly, so for each (C_mid, B) of a grid they are least squares of two unknowns, and the best cell is
refined by finer grids around it: no start is needed, and no descent. Intervals are of residual bootstraps.
"""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np

from jaxpar import envs
from jaxpar.fields import AtLeast, Each, OneOf, field
from jaxpar.rl import Network, Ppo, PpoRates, train
from jaxpar.types import UsageError

from ..app import small_commands

ENVS = ("CartPole-v1", "Acrobot-v1", "Catch-bsuite", "MountainCar-v0", "2048-3x3")


class Curve(NamedTuple):
    """A fit: `start` R0, `limit` A, `middle` C_mid and `steepness` B."""

    start: float
    limit: float
    middle: float
    steepness: float

    def __call__(self, compute: np.ndarray) -> np.ndarray:
        """R(C)."""
        return self.start + (self.limit - self.start) * share(compute, self.middle, self.steepness)


def share(compute: np.ndarray, middle: np.ndarray, steepness: np.ndarray) -> np.ndarray:
    """`1 / (1 + (C_mid / C)^B)`, from 0 to 1; arguments broadcast."""
    return 1 / (1 + np.exp(steepness * (np.log(middle) - np.log(compute))))


def fit(compute: np.ndarray, returns: np.ndarray, rounds: int = 6, size: int = 24) -> Curve:
    """The least squares curve of returns `[T]` at compute `[T]`.

    C_mid is from the least compute to a thousandfold of the greatest, B from 0.2 to 10, both by logarithms; A is at
    most four spans of the returns away from them, since a curve that has not bent has any limit.

    Raises:
      UsageError: Fewer than five points, compute that is not over 0, or numbers that are not finite.
    """
    compute, returns = np.asarray(compute, float), np.asarray(returns, float)
    if len(compute) < 5 or compute.min() <= 0 or not np.isfinite(returns).all():
        raise UsageError(
            f"a curve takes five or more finite returns at compute over 0, not {len(compute)} of them."
        )
    low = np.log([compute.min(), 0.2])
    high = np.log([1e3 * compute.max(), 10.0])
    span, best = max(np.ptp(returns), 1e-9), (np.inf, None)
    for _ in range(rounds):
        middles, steeps = (np.exp(np.linspace(a, b, size)) for a, b in zip(low, high, strict=True))
        x = share(compute, middles[:, None, None], steeps[None, :, None])  # [size, size, T]
        centred = x - x.mean(-1, keepdims=True)
        slope = (centred @ (returns - returns.mean())) / np.maximum((centred**2).sum(-1), 1e-12)
        start = returns.mean() - slope * x.mean(-1)
        error = ((start[..., None] + slope[..., None] * x - returns) ** 2).sum(-1)
        limit = start + slope
        far = np.maximum(limit - returns.max(), returns.min() - limit) > 4 * span
        error = np.where(far, np.inf, error)
        i, j = np.unravel_index(np.argmin(error), error.shape)
        if error[i, j] <= best[0]:
            best = error[i, j], Curve(start[i, j], limit[i, j], middles[i], steeps[j])
        width = 2 * (high - low) / (size - 1)
        centre = np.log([best[1].middle, best[1].steepness]) if best[1] else (low + high) / 2
        low, high = centre - width, centre + width
    return best[1]


def foretold(
    compute: np.ndarray,
    returns: np.ndarray,
    at: float,
    draws: int = 200,
    level: float = 0.9,
    seed: int = 0,
) -> tuple[float, float, float]:
    """What the fit says at compute `at`, and the ends of the interval of an observation there.

    The interval is of refits to the fit plus residuals drawn in runs of five neighbours, which go together, plus one
    residual more; residuals are made larger by the freedom that four numbers take.
    """
    rng, curve, count = np.random.default_rng(seed), fit(compute, returns), len(returns)
    residual = (returns - curve(compute)) * np.sqrt(count / max(count - 4, 1))
    length, said = min(5, count), []
    for _ in range(draws):
        starts = rng.integers(0, count - length + 1, -(-count // length))
        drawn = np.concatenate([residual[s : s + length] for s in starts])[:count]
        said.append(
            fit(compute, curve(compute) + drawn, rounds=3, size=16)(np.array(at))
            + rng.choice(residual)
        )
    low, high = np.quantile(said, [(1 - level) / 2, (1 + level) / 2])
    return float(curve(np.array(at))), float(low), float(high)


def learned(name: str, group: int, updates: int, seeds: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Compute `[T]` and the mean return over a group of seeds `[T]`, in twenty stretches of a run without annealing."""
    env, params = envs.make(name)
    ppo = Ppo(
        env, Network(hidden=(64, 64)), PpoRates(learning_rate=1e-3), num_envs=16, num_steps=64
    )
    keys = jax.random.split(jax.random.key(group), seeds)
    returns = jax.jit(jax.vmap(lambda key: train(ppo, key, params, updates)[1]["return_mean"]))(
        keys
    )
    stretches = np.array_split(np.nanmean(np.asarray(returns), 0), 20)
    ends = np.cumsum([len(part) for part in stretches])
    return ends * 16.0 * 64, np.array([np.nanmean(part) for part in stretches])


@dataclasses.dataclass(frozen=True)
class Config(small_commands.SmallConfig):
    """What it trains and fits.

    Attributes:
      updates: Of PPO in each run.
      groups: Of seeds, in each environment.
      environments: By name.
    """

    updates: int = field(200, AtLeast(8))
    groups: int = field(2, AtLeast(1))
    environments: list[str] = field(legal=Each(OneOf(ENVS)), default_factory=lambda: list(ENVS))


def execute(config: Config) -> None:
    """Prints how each group ended, and what its first half foretold."""
    inside = []
    for name in config.environments:
        for group in range(config.groups):
            compute, returns = learned(name, group, config.updates)
            half = len(compute) // 2
            guess, low, high = foretold(compute[:half], returns[:half], compute[-1])
            inside.append(low <= returns[-1] <= high)
            print(f"{name:16} group {group}: {returns[-1]:8.2f} came, {guess:8.2f} was foretold, 90 % from "
                  f"{low:.2f} to {high:.2f}", flush=True)  # fmt: skip
    print(f"{sum(inside)} of {len(inside)} ends lie in the interval of their first half")


if __name__ == "__main__":
    small_commands.launch("rl_scaling", Config, execute)
