"""Beliefs: what is known of the state, as weighted particles or as a Gaussian.

There are two kinds of things. A `Belief` is the value, a pytree from which states can be sampled; it is all that a
planner sees. A `BeliefUpdater` is the filter, a frozen dataclass that makes the first belief and the next one;
`simulate` asks it after every step. A new belief is one of each; they need no base class.

Example:
    import dataclasses
    import jax
    from jaxpar import envs
    import jax.numpy as jnp
    from jaxpar.pomdp import Evidence, Pomcp, from_environment, simulate

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Doors:                                      # the new belief: where a tiger is, as one number
        right: jax.Array
        weightless, invalid = False, 0

        def sample(self, key, num):
            return jax.random.bernoulli(key, self.right, (num,)).astype(jnp.int32)

    class Listener:                                   # its updater: Bayes' rule, anew behind a door that was opened
        def init(self, key, env, params):
            return Doors(jnp.asarray(0.5))

        def update(self, key, belief, action, obs, env, params):
            odds = belief.right / (1 - belief.right) * jnp.where(obs == 1, 0.85 / 0.15, 0.15 / 0.85)
            right = jnp.where(action == 0, odds / (1 + odds), 0.5)
            return Doors(right), Evidence(jnp.zeros(()), jnp.inf, False, False)

    model = from_environment(*envs.make("Tiger"))     # whose states are 0 and 1
    planner = Pomcp(4, 8, max_depth=3, leaf="zero")
    episode = simulate(jax.random.key(0), model.environment, model, planner, Listener(), 4)
    assert int(episode.length) == 4 and not episode.stranded.any()
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Environment, capabilities
from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.types import Array, PRNGKey, PyTree, UsageError, concrete_values

__all__ = [
    "Belief",
    "BeliefUpdater",
    "Evidence",
    "Gaussian",
    "KalmanBelief",
    "ParticleBelief",
    "Particles",
    "is_weight",
    "systematic",
]


class Belief(Protocol):
    """What is known of the state: a pytree of arrays from which states can be sampled."""

    @property
    def weightless(self) -> Array | bool:
        """Whether nothing has any weight, bool; samples then mean nothing, and planners count them as stranded."""
        ...

    @property
    def invalid(self) -> Array | int:
        """How many weights are no numbers, int32; planners count them as invalid."""
        ...

    def sample(self, key: PRNGKey, num: int) -> PyTree:
        """`num` states, `[num, ...]`; consumes `key`."""
        ...


B = TypeVar("B", bound=Belief)


class BeliefUpdater(Protocol[B]):
    """A filter: a hashable object that makes the first belief, and the next one after an action and an observation."""

    def init(self, key: PRNGKey, env: Environment, params: PyTree) -> B:
        """The belief before anything is seen; consumes `key`."""
        ...

    def update(
        self, key: PRNGKey, belief: B, action: Array, obs: PyTree, env: Environment, params: PyTree
    ) -> tuple[B, "Evidence"]:
        """The belief after `action` and `obs`, while the episode goes on; consumes `key`."""
        ...


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
        """Whether no particle has any weight, bool."""
        return ~jnp.any(jnp.isfinite(self.log_weights))

    @property
    def invalid(self) -> Array:
        """How many weights are no numbers, int32."""
        return jnp.sum(~is_weight(self.log_weights), dtype=jnp.int32)

    def sample(self, key: PRNGKey, num: int) -> PyTree:
        """`num` states with replacement, by systematic resampling, so that their noise is low; consumes `key`.

        Raises:
            UsageError: no particle has any weight (seen outside transformations only).
        """
        known = concrete_values(self.log_weights)
        if known is not None and not np.isfinite(known[0]).any():
            raise UsageError(
                "the belief has no particle left with any weight; give it a rejuvenation hook"
            )
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
    # The largest weight is 1, so that none overflows; -1e30 keeps -inf less -inf, which is NaN, out of it.
    weights = jnp.exp(log_weights - jnp.maximum(jnp.max(log_weights), -1e30))
    total = jnp.cumsum(weights)
    points = (jnp.arange(num) + jax.random.uniform(key)) / num * total[-1]
    # A point that rounding moves onto the total would fall behind the last weight, onto one that is 0.
    last = jnp.max(jnp.where(weights > 0, jnp.arange(weights.shape[0]), 0))
    return jnp.minimum(jnp.searchsorted(total, points, side="right"), last).astype(jnp.int32)


Rejuvenate = Callable[
    [PRNGKey, Particles, Array, PyTree, Particles, Array, Environment, PyTree], Particles
]
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
    States that a hook offers without any weight are left out: the prediction has its own.

    Attributes:
        num_particles: P.
        resample_below: resample when the effective sample size falls below this share of P, in [0, 1].
        rejuvenate: hook that may replace the posterior after each update; it receives whether the belief is depleted.
    """

    num_particles: int = field(1000, AtLeast(1))
    resample_below: float = field(0.5, Between(0, 1))
    rejuvenate: Rejuvenate | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rejuvenate is not None and not callable(self.rejuvenate):
            raise UsageError(
                f"rejuvenate={self.rejuvenate!r}: no hook; expected a function, see Rejuvenate, or None."
            )

    def init(self, key: PRNGKey, env: Environment, params: PyTree) -> Particles:
        """Equal weights on draws of `env.init`; consumes `key`."""
        keys = jax.random.split(key, self.num_particles)
        states = jax.vmap(lambda key: env.init(key, params))(keys)
        order = _side_by_side(states)
        states = jax.tree.map(lambda x: x[order], states)
        return Particles(
            states, jnp.full((self.num_particles,), -math.log(self.num_particles), jnp.float32)
        )

    def update(
        self,
        key: PRNGKey,
        belief: Particles,
        action: Array,
        obs: PyTree,
        env: Environment,
        params: PyTree,
    ) -> tuple[Particles, Evidence]:
        """The belief after `action` and `obs`; consumes `key`. Costs P transitions, one sort and one cumulative sum."""
        move, pick, hook = jax.random.split(key, 3)
        keys = jax.random.split(move, self.num_particles)
        states, likelihood = jax.vmap(
            lambda key, state: _move(key, env, params, state, action, obs)
        )(keys, belief.states)
        joint, invalid = _weighed(belief.log_weights + likelihood)
        evidence = jax.nn.logsumexp(joint)
        depleted = ~jnp.isfinite(evidence)
        ended = jax.vmap(lambda state: env.terminal(state, params))(states)
        before = _weighed(belief.log_weights)[0]
        predicted = _normalised(jnp.where(ended, -jnp.inf, before), before)
        posterior = Particles(
            states, jnp.where(depleted, -jnp.inf, joint - jnp.where(depleted, 0.0, evidence))
        )
        if self.rejuvenate is not None:
            posterior = self.rejuvenate(hook, belief, action, obs, posterior, depleted, env, params)
            offered, more = _weighed(posterior.log_weights)
            invalid = invalid + more
            # The prediction's weights belong to the states that were predicted, not to the hook's.
            has_weight = jnp.any(jnp.isfinite(offered))
            kept = jax.tree.map(
                lambda new, old: jnp.where(has_weight, new, old), posterior.states, states
            )
            posterior = Particles(kept, offered)
        order = _side_by_side(posterior.states)
        posterior, predicted = jax.tree.map(lambda x: x[order], (posterior, predicted))
        weights = _normalised(posterior.log_weights, predicted)
        ess = jnp.exp(-jax.nn.logsumexp(2 * weights))
        resampled = ess < self.resample_below * self.num_particles
        chosen = jnp.where(
            resampled,
            systematic(pick, weights, self.num_particles),
            jnp.arange(self.num_particles, dtype=jnp.int32),
        )
        equal = jnp.full_like(weights, -math.log(self.num_particles))
        kept = jax.tree.map(lambda x: x[chosen], posterior.states)
        found = Evidence(
            log_evidence=evidence,
            ess=ess,
            depleted=depleted,
            resampled=resampled,
            invalid=invalid,
        )
        return Particles(kept, jnp.where(resampled, equal, weights)), found


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
    # Each word is mixed with a constant of its own and all are summed, so that rows of equal bits have equal hashes.
    salt = np.random.default_rng(0).integers(0, 2**32, (1, words.shape[1]), np.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        words = (words ^ salt ^ (words >> shift)) * jnp.uint32(factor)
    return jnp.argsort(jnp.sum(words ^ (words >> 16), 1, dtype=jnp.uint32)).astype(jnp.int32)


def _normalised(log_weights: Array, otherwise: Array) -> Array:
    """Log weights that sum to one, or `otherwise` where there is none."""
    total = jax.nn.logsumexp(log_weights)
    return jnp.where(
        jnp.isfinite(total), log_weights - jnp.where(jnp.isfinite(total), total, 0.0), otherwise
    )


def _move(
    key: PRNGKey, env: Environment, params: PyTree, state: PyTree, action: Array, obs: PyTree
) -> tuple[PyTree, Array]:
    """The next state of one particle, and how likely it makes `obs`: log-likelihood, or 0 or -inf by rejection."""
    move, see = jax.random.split(key)
    following, able = env.transition(move, state, action, params), capabilities(env)
    if able.log_likelihood is not None:
        likelihood = able.log_likelihood(obs, state, action, following, params)
    else:
        drawn, obs_key = env.observe(see, following, action, params), able.obs_key
        name = (lambda x: x) if obs_key is None else (lambda x: obs_key(x, params))
        same = [
            jnp.all(a == b)
            for a, b in zip(jax.tree.leaves(name(drawn)), jax.tree.leaves(name(obs)), strict=True)
        ]
        likelihood = jnp.where(jnp.stack(same).all(), 0.0, -jnp.inf)
    return following, jnp.where(
        env.terminal(following, params), -jnp.inf, jnp.asarray(likelihood, jnp.float32)
    )


@flax.struct.dataclass
class Gaussian:
    """A normal belief over states that are vectors: mean `[S]`, covariance `[S, S]`."""

    mean: Array
    covariance: Array

    @property
    def weightless(self) -> bool:
        """False: a density has weight everywhere."""
        return False

    @property
    def invalid(self) -> int:
        """0: there are no weights."""
        return 0

    def sample(self, key: PRNGKey, num: int) -> Array:
        """`num` independent states `[num, S]`; consumes `key`."""
        return jax.random.multivariate_normal(
            key, self.mean, self.covariance, (num,), self.mean.dtype
        )


@dataclasses.dataclass(frozen=True)
class KalmanBelief:
    """The Kalman filter, exact for linear models with Gaussian noise; states and observations are vectors.

    The environment offers `linear_gaussian(action, params) -> (F [S, S], u [S], Q [S, S], H [O, S], R [O, O])`, for
    `s' = F s + u + N(0, Q)` and `o = H s' + N(0, R)`, and `gaussian_start(params) -> (mean [S], covariance [S, S])`.
    The covariance is updated in Joseph's form, which keeps it symmetric and positive. An observation without a density
    (a NaN in it) leaves the prediction, and is reported as depleted and invalid.
    """

    def init(self, key: PRNGKey, env: Environment, params: PyTree) -> Gaussian:
        """The environment's start; draws nothing."""
        able = capabilities(env)
        if able.gaussian_start is None:
            raise UsageError(
                f"a Kalman belief needs gaussian_start of the environment, and {env.name} has none"
            )
        if able.linear_gaussian is None:
            raise UsageError(
                f"a Kalman belief needs linear_gaussian of the environment, and {env.name} has none"
            )
        mean, covariance = able.gaussian_start(params)
        return Gaussian(mean=mean, covariance=covariance)

    def update(
        self,
        key: PRNGKey,
        belief: Gaussian,
        action: Array,
        obs: Array,
        env: Environment,
        params: PyTree,
    ) -> tuple[Gaussian, Evidence]:
        """One prediction and one correction; draws nothing. Costs one O x O Cholesky factor."""
        linear_gaussian = capabilities(env).linear_gaussian
        if linear_gaussian is None:
            raise UsageError(
                f"a Kalman belief needs linear_gaussian of the environment, and {env.name} has none"
            )
        forward, drift, noise, seen, blur = linear_gaussian(action, params)
        mean = forward @ belief.mean + drift
        covariance = forward @ belief.covariance @ forward.T + noise
        surprise = obs - seen @ mean
        spread = seen @ covariance @ seen.T + blur
        factor = jax.scipy.linalg.cho_factor(spread, lower=True)
        gain = jax.scipy.linalg.cho_solve(factor, seen @ covariance).T
        keep = jnp.eye(mean.shape[0], dtype=mean.dtype) - gain @ seen
        learned = Gaussian(
            mean=mean + gain @ surprise,
            covariance=keep @ covariance @ keep.T + gain @ blur @ gain.T,
        )
        log_det = 2 * jnp.sum(jnp.log(jnp.diag(factor[0])))
        distance = surprise @ jax.scipy.linalg.cho_solve(factor, surprise)
        evidence = -0.5 * (distance + log_det + surprise.shape[0] * math.log(2 * math.pi))
        lost = ~jnp.isfinite(evidence)
        never = jnp.zeros((), bool)
        predicted = Gaussian(mean=mean, covariance=covariance)
        posterior = jax.tree.map(lambda new, old: jnp.where(lost, old, new), learned, predicted)
        found = Evidence(
            log_evidence=evidence,
            ess=jnp.asarray(jnp.inf),
            depleted=lost,
            resampled=never,
            invalid=lost.astype(jnp.int32),
        )
        return posterior, found
