"""Beliefs for particular models: rocks one by one, and maps that a filter may have lost."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxpar.envs.pomdp.mars import Mars
from jaxpar.envs.pomdp.navigation import Navigation
from jaxpar.envs.pomdp.rocksample import GOOD, NOTHING, SAMPLE, RockSample

from jaxpar.env import Environment
from jaxpar.pomdp import BeliefUpdater, Evidence, ExactBelief, ParticleBelief, Particles
from jaxpar.types import Array, PRNGKey, PyTree, UsageError


@flax.struct.dataclass
class Rocks:
    """What is known of rocks: the rovers' places, and each rock's own chance of being good, float32 `[k]`."""

    state: PyTree
    good: Array
    env: Mars | RockSample = flax.struct.field(pytree_node=False)
    weightless, invalid = False, 0  # there are no weights to lose

    def sample(self, key: PRNGKey, num: int) -> PyTree:
        """`num` states; consumes `key`."""
        drawn = jax.random.uniform(key, (num, self.good.shape[0])) < self.good[None]
        return jax.vmap(lambda good: self.env.with_rocks(self.state, good))(drawn)


@dataclasses.dataclass(frozen=True)
class RockBelief:
    """The exact belief of RockSample and of MARS: rocks are independent and stay so, for each reading is of one rock.

    Particles would have to cover all 2^k maps; this is k numbers, and as an update k multiplications.
    """

    def init(self, key: PRNGKey, env: Environment, params: PyTree) -> Rocks:
        """Every rock is good with equal odds; draws a start only for the places in it."""
        if not isinstance(env, Mars | RockSample):
            raise UsageError(f"belief.kind=rocks is for RockSample and MARS, not for {env.name}.")
        return Rocks(env.init(key, params), jnp.full((env.num_rocks,), 0.5), env)

    def update(
        self,
        key: PRNGKey,
        belief: Rocks,
        action: Array,
        obs: Array,
        env: Environment,
        params: PyTree,
    ) -> tuple[Rocks, Evidence]:
        """Bayes' rule, rover by rover; draws nothing."""
        rovers = 2 if isinstance(env, Mars) else 1
        acts = jnp.stack(
            [
                action // (5 + env.num_rocks) ** i % (5 + env.num_rocks)
                for i in reversed(range(rovers))
            ]
        )
        seen = jnp.stack([obs // 3**i % 3 for i in reversed(range(rovers))])
        places = belief.state.place.reshape(rovers, 2).astype(jnp.int32)
        rocks, numbers, good, evidence = (
            jnp.asarray(env.map),
            jnp.arange(env.num_rocks),
            belief.good,
            jnp.zeros(()),
        )
        for act, place in zip(acts, places, strict=True):
            under = jnp.all(rocks == place[None], axis=1)
            good = jnp.where(under & (act == SAMPLE), 0.0, good)
        for act, place, reading in zip(acts, places, seen, strict=True):
            silent = (act <= SAMPLE) | (place[0] >= env.size)
            rock = jnp.clip(act - SAMPLE - 1, 0, env.num_rocks - 1)
            distance = jnp.linalg.norm((rocks[rock] - place).astype(jnp.float32))
            accuracy = 0.5 * (1 + 2.0 ** (-distance / params.half_efficiency))
            chance = jnp.where(
                reading == GOOD, accuracy, 1 - accuracy
            )  # of this reading, were the rock good
            whole = good[rock] * chance + (1 - good[rock]) * (1 - chance)
            whole = jnp.where(silent == (reading == NOTHING), jnp.where(silent, 1.0, whole), 0.0)
            posterior = good[rock] * chance / jnp.where(whole > 0, whole, 1.0)
            good = jnp.where((numbers == rock) & ~silent & (whole > 0), posterior, good)
            evidence = evidence + jnp.log(whole)
        state = env.transition(key, belief.state, action, params)
        never = jnp.zeros((), bool)
        return Rocks(state, good, env), Evidence(
            evidence, jnp.asarray(jnp.inf), ~jnp.isfinite(evidence), never
        )


@dataclasses.dataclass(frozen=True)
class Flips:
    """A rejuvenation hook for maps: after each update every unknown cell of every particle changes with this chance."""

    chance: float

    def __call__(
        self, key: PRNGKey, prior: Particles, action: Array, obs: Array, posterior: Particles, depleted: Array,
        env: Environment, params: PyTree,
    ) -> Particles:  # fmt: skip
        """Returns the posterior with flipped cells; consumes `key`."""
        keys = jax.random.split(key, posterior.log_weights.shape[0])
        flipped = jax.vmap(lambda key, state: env.flipped(key, state, self.chance))(
            keys, posterior.states
        )
        return Particles(flipped, posterior.log_weights)


BELIEF: dict[str, Any] = {
    "kind": "particles",
    "num_particles": 1000,
    "resample_below": 0.5,
    "flips": 0.0,
}
"""What the flags of a belief are where they are not given."""


def make_updater(
    env: Environment,
    kind: str = "particles",
    num_particles: int = 1000,
    resample_below: float = 0.5,
    flips: float = 0.0,
) -> BeliefUpdater:
    """Returns the belief updater of the flags; UsageError where it does not fit the environment."""
    if kind == "rocks":
        return RockBelief()
    if kind == "exact":
        return ExactBelief()
    if kind != "particles":
        raise UsageError(f"belief.kind={kind!r} is unknown; legal are particles, exact, rocks.")
    if flips and not isinstance(env, Navigation):
        raise UsageError(f"belief.flips is for maps of Navigation, not for {env.name}.")
    if not 0 <= flips < 0.5:
        raise UsageError(f"belief.flips={flips} is a small chance, from 0 to 0.5.")
    return ParticleBelief(num_particles, resample_below, Flips(flips) if flips else None)
