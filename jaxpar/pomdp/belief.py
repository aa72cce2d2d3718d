"""Beliefs: what is known of the state, as weighted particles or as a Gaussian.

A belief model is a frozen dataclass with `init(key, env, params) -> belief` and
`update(key, belief, action, obs, env, params) -> (belief, Evidence)`; a belief is a pytree with
`draw(key, num) -> states [num, ...]`. Planners need `draw` only, `jaxpar.pomdp.simulate` all three; anything with these
three methods, such as a factored belief of one's own, works in both.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.pomdp.model import is_traced
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Evidence", "Gaussian", "KalmanBelief", "ParticleBelief", "Particles", "is_weight", "systematic"]


class Evidence(NamedTuple):
    """What an update says of itself, scalars.

    Attributes:
        log_evidence: float32, log p(obs | history, action); -inf where no state explains the observation.
        ess: float32, the effective sample size before any resampling (`inf` for exact beliefs).
        depleted: bool, no state of the belief explained the observation.
        resampled: bool.
        invalid: int32, particles whose weight was no number (NaN, or infinite), and which were left out; above 0 the
            likelihood is broken, and what the others say is kept.
    """

    log_evidence: Array
    ess: Array
    depleted: Array
    resampled: Array
    invalid: Array | int = 0


@flax.struct.dataclass
class Particles:
    """States `[P, ...]` with normalised log weights, float32 `[P]`; a weight that is no number counts as none."""

    states: PyTree
    log_weights: Array

    @property
    def weightless(self) -> Array:
        """Whether no particle has any weight, bool; draws then mean nothing, and planners count them as stranded."""
        return ~jnp.any(jnp.isfinite(self.log_weights))

    @property
    def invalid(self) -> Array:
        """How many weights are no numbers, int32; planners count them as invalid."""
        return jnp.sum(~is_weight(self.log_weights), dtype=jnp.int32)

    def draw(self, key: PRNGKey, num: int) -> PyTree:
        """`num` states with replacement, by systematic resampling, so that their noise is low; consumes `key`.

        Raises:
            UsageError: no particle has any weight (seen outside transformations only).
        """
        if not is_traced(self.log_weights) and not np.isfinite(np.asarray(self.log_weights)).any():
            raise UsageError("the belief has no particle left with any weight; give it a rejuvenation hook")
        chosen = systematic(key, self.log_weights, num)
        return jax.tree.map(lambda x: x[chosen], self.states)


def is_weight(log_weights: Array) -> Array:
    """Whether these are logarithms of weights, bool: finite or minus infinity."""
    return log_weights < jnp.inf  # false of NaN


def systematic(key: PRNGKey, log_weights: Array, num: int) -> Array:
    """Systematic resampling: int32 `[num]` indices, index i floor(num w_i) or one more times; consumes `key`.

    Low weights cannot be drawn by rounding: the last index is the last one with a positive weight. What is no weight is
    never drawn. With no weight at all the indices are all 0. Costs one cumulative sum and one search.
    """
    log_weights = jnp.where(is_weight(log_weights), log_weights, -jnp.inf)
    weights = jnp.exp(log_weights - jnp.maximum(jnp.max(log_weights), -1e30))
    total = jnp.cumsum(weights)
    points = (jnp.arange(num) + jax.random.uniform(key)) / num * total[-1]
    last = jnp.max(jnp.where(weights > 0, jnp.arange(weights.shape[0]), 0))
    return jnp.minimum(jnp.searchsorted(total, points, side="right"), last).astype(jnp.int32)


Rejuvenate = Callable[[PRNGKey, Particles, Array, PyTree, Particles, Array, Any, PyTree], Particles]
"""`(key, prior, action, obs, posterior, depleted, env, params) -> Particles`, called after every update."""


@dataclasses.dataclass(frozen=True)
class ParticleBelief:
    """A bootstrap filter: particles move by the environment's own dynamics and are weighted by the likelihood.

    Where the environment has no `log_likelihood`, a particle survives if the observation that it draws has the key of
    the real one (rejection, as in POMCP). Particles that have ended are given no weight, as an update is only asked
    for while the episode goes on.

    Equal states lie side by side, so that systematic draws take each as often as it weighs, and a planner can give
    every action its fair share of each.

    A particle whose likelihood is no number (NaN, or infinite) is left out and counted in `Evidence.invalid`; the
    others are weighted as if it had not been there.

    When no particle explains the observation the belief is *depleted*: `Evidence.depleted` says so, and unless
    `rejuvenate` offers weight, the belief is the prediction, as if nothing had been seen; it is never reset silently.

    Attributes:
        num_particles: P.
        resample_below: resample when the effective sample size falls below this share of P, in [0, 1].
        rejuvenate: hook that may replace the posterior after each update; it is told whether the belief is depleted.
    """

    num_particles: int = field(1000, AtLeast(1))
    resample_below: float = field(0.5, Between(0, 1))
    rejuvenate: Rejuvenate | None = None

    __post_init__ = check_fields

    def init(self, key: PRNGKey, env: Any, params: PyTree) -> Particles:
        """Equal weights on draws of `env.init`; consumes `key`."""
        keys = jax.random.split(key, self.num_particles)
        states = jax.vmap(lambda key: env.init(key, params))(keys)
        order = _side_by_side(states)
        states = jax.tree.map(lambda x: x[order], states)
        return Particles(states, jnp.full((self.num_particles,), -math.log(self.num_particles), jnp.float32))

    def update(
        self, key: PRNGKey, belief: Particles, action: Array, obs: PyTree, env: Any, params: PyTree
    ) -> tuple[Particles, Evidence]:
        """The belief after `action` and `obs`; consumes `key`. Costs P transitions, one sort and one cumulative sum."""
        move, pick, hook = jax.random.split(key, 3)
        keys = jax.random.split(move, self.num_particles)
        states, likelihood = jax.vmap(lambda key, state: _move(key, env, params, state, action, obs))(
            keys, belief.states
        )
        joint, invalid = _weighed(belief.log_weights + likelihood)
        evidence = jax.nn.logsumexp(joint)
        depleted = ~jnp.isfinite(evidence)
        ended = jax.vmap(lambda state: env.terminal(state, params))(states)
        before = _weighed(belief.log_weights)[0]
        predicted = _normalised(jnp.where(ended, -jnp.inf, before), before)
        posterior = Particles(states, jnp.where(depleted, -jnp.inf, joint - jnp.where(depleted, 0.0, evidence)))
        if self.rejuvenate is not None:
            posterior = self.rejuvenate(hook, belief, action, obs, posterior, depleted, env, params)
            offered, more = _weighed(posterior.log_weights)
            posterior, invalid = Particles(posterior.states, offered), invalid + more
        order = _side_by_side(posterior.states)
        posterior, predicted = jax.tree.map(lambda x: x[order], (posterior, predicted))
        weights = _normalised(posterior.log_weights, predicted)
        ess = jnp.exp(-jax.nn.logsumexp(2 * weights))
        resampled = ess < self.resample_below * self.num_particles
        chosen = jnp.where(
            resampled, systematic(pick, weights, self.num_particles), jnp.arange(self.num_particles, dtype=jnp.int32)
        )
        equal = jnp.full_like(weights, -math.log(self.num_particles))
        kept = jax.tree.map(lambda x: x[chosen], posterior.states)
        told = Evidence(evidence, ess, depleted, resampled, invalid)
        return Particles(kept, jnp.where(resampled, equal, weights)), told


def _weighed(log_weights: Array) -> tuple[Array, Array]:
    """Log weights `[P]` with minus infinity for what is none, and how many those are, int32."""
    good = is_weight(log_weights)
    return jnp.where(good, log_weights, -jnp.inf), jnp.sum(~good, dtype=jnp.int32)


def _side_by_side(states: PyTree) -> Array:
    """An order of P states in which equal ones follow each other, by a hash of their bits: int32 `[P]`."""
    rows = []
    for x in jax.tree.leaves(states):
        word = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
        bits = x if x.dtype == bool else jax.lax.bitcast_convert_type(x, word)
        rows.append(bits.reshape(len(x), -1).astype(jnp.uint32))
    words = jnp.concatenate(rows, 1)
    salt = np.random.default_rng(0).integers(0, 2**32, (1, words.shape[1]), np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ salt ^ (words >> shift)) * jnp.uint32(factor)
    return jnp.argsort(jnp.sum(words ^ (words >> 16), 1, dtype=jnp.uint32)).astype(jnp.int32)


def _normalised(log_weights: Array, otherwise: Array) -> Array:
    """Log weights that sum to one, or `otherwise` where there is none."""
    total = jax.nn.logsumexp(log_weights)
    return jnp.where(jnp.isfinite(total), log_weights - jnp.where(jnp.isfinite(total), total, 0.0), otherwise)


def _move(key: PRNGKey, env: Any, params: PyTree, state: PyTree, action: Array, obs: PyTree) -> tuple[PyTree, Array]:
    move, see = jax.random.split(key)
    following = env.transition(move, state, action, params)
    if hasattr(env, "log_likelihood"):
        likelihood = env.log_likelihood(obs, state, action, following, params)
    else:
        drawn = env.observe(see, following, action, params)
        name = (lambda x: env.obs_key(x, params)) if hasattr(env, "obs_key") else (lambda x: x)
        same = [jnp.all(a == b) for a, b in zip(jax.tree.leaves(name(drawn)), jax.tree.leaves(name(obs)), strict=True)]
        likelihood = jnp.where(jnp.stack(same).all(), 0.0, -jnp.inf)
    return following, jnp.where(env.terminal(following, params), -jnp.inf, jnp.asarray(likelihood, jnp.float32))


@flax.struct.dataclass
class Gaussian:
    """A normal belief over states that are vectors: mean `[S]`, covariance `[S, S]`."""

    mean: Array
    covariance: Array

    def draw(self, key: PRNGKey, num: int) -> Array:
        """`num` independent states `[num, S]`; consumes `key`."""
        return jax.random.multivariate_normal(key, self.mean, self.covariance, (num,), self.mean.dtype)


@dataclasses.dataclass(frozen=True)
class KalmanBelief:
    """The Kalman filter, exact for linear models with Gaussian noise; states and observations are vectors.

    The environment offers `linear_gaussian(action, params) -> (F [S, S], u [S], Q [S, S], H [O, S], R [O, O])`, for
    `s' = F s + u + N(0, Q)` and `o = H s' + N(0, R)`, and `gaussian_start(params) -> (mean [S], covariance [S, S])`.
    The covariance is updated in Joseph's form, which keeps it symmetric and positive. An observation without a density
    (a NaN in it) leaves the prediction, and is told as depleted and invalid.
    """

    def init(self, key: PRNGKey, env: Any, params: PyTree) -> Gaussian:
        """The environment's start; draws nothing."""
        for part in ("gaussian_start", "linear_gaussian"):
            if not hasattr(env, part):
                raise UsageError(f"a Kalman belief needs {part} of the environment, and {env.name} has none")
        return Gaussian(*env.gaussian_start(params))

    def update(
        self, key: PRNGKey, belief: Gaussian, action: Array, obs: Array, env: Any, params: PyTree
    ) -> tuple[Gaussian, Evidence]:
        """One prediction and one correction; draws nothing. Costs one O x O Cholesky factor."""
        forward, drift, noise, seen, blur = env.linear_gaussian(action, params)
        mean = forward @ belief.mean + drift
        covariance = forward @ belief.covariance @ forward.T + noise
        surprise, spread = obs - seen @ mean, seen @ covariance @ seen.T + blur
        factor = jax.scipy.linalg.cho_factor(spread, lower=True)
        gain = jax.scipy.linalg.cho_solve(factor, seen @ covariance).T
        keep = jnp.eye(mean.shape[0], dtype=mean.dtype) - gain @ seen
        learned = Gaussian(mean + gain @ surprise, keep @ covariance @ keep.T + gain @ blur @ gain.T)
        log_det = 2 * jnp.sum(jnp.log(jnp.diag(factor[0])))
        distance = surprise @ jax.scipy.linalg.cho_solve(factor, surprise)
        evidence = -0.5 * (distance + log_det + surprise.shape[0] * math.log(2 * math.pi))
        lost, never = ~jnp.isfinite(evidence), jnp.zeros((), bool)
        posterior = jax.tree.map(lambda new, old: jnp.where(lost, old, new), learned, Gaussian(mean, covariance))
        return posterior, Evidence(evidence, jnp.asarray(jnp.inf), lost, never, lost.astype(jnp.int32))
