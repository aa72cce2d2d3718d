"""Oracles for small models: exact values, bounds that meet, the iterated scheme swept over all beliefs."""

import dataclasses
import math
from typing import Literal

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jaxpar.env import Environment
from jaxpar.fields import AtLeast, check_fields, check_value, field
from jaxpar.pomdp.beliefs.belief import Belief
from jaxpar.pomdp.beliefs.exact_belief import chances_of
from jaxpar.pomdp.exact import _alpha, _points
from jaxpar.pomdp.exact.bounds import blind, check_discounted, fib
from jaxpar.pomdp.model import num_actions
from jaxpar.pomdp.planners.planner import PlanInfo
from jaxpar.pomdp.tabular import TabularPomdp
from jaxpar.types import Array, PRNGKey, PyTree, UsageError, concrete_values

__all__ = ["Exact", "Trials", "iterated_values", "reachable_beliefs", "solve_exact"]


SETTLED = 256
"""Most beliefs that are backed up again and again at once."""
SETTLE_EVERY = 10
"""Trials between."""


@flax.struct.dataclass
class Exact:
    """A solved model: its policy takes the action of the vector that is best at the belief.

    Attributes:
        value: the best value at the start, as far as it is known from below.
        lower: a bound of it that the policy attains (equal to `value`).
        upper: a bound of it from above.
        alphas: `[N, S]`; `max_i alpha_i·b` is at most V(b), and equal to it within `upper - lower` at the start.
        actions: int32 `[N]`, the first action of each vector's plan.
        converged: whether `upper - lower` is at most the tolerance.
        num_iterations: steps of value iteration, or trials.
    """

    value: Array
    lower: Array
    upper: Array
    alphas: Array
    actions: Array
    converged: bool = flax.struct.field(pytree_node=False)
    num_iterations: int = flax.struct.field(pytree_node=False)

    def values(self, beliefs: Array) -> Array:
        """`max_i alpha_i·b` of beliefs `[..., S]`."""
        return (beliefs @ self.alphas.T).max(-1)

    def action(self, belief: Array) -> Array:
        """The first action of the best vector at a belief `[S]`."""
        return self.actions[(self.alphas @ belief).argmax()]

    @property
    def discount(self) -> None:
        """None: that of the environment's parameters."""
        return None

    def plan(
        self, key: PRNGKey, env: Environment, params: PyTree, belief: Belief | Array
    ) -> tuple[Array, PlanInfo]:
        """The action of the best vector, as a planner gives it, so that `simulate` can play the policy.

        With `ExactBelief` it earns at least `lower`, if it was solved for an infinite horizon; of a finite one the
        first step is right, and later ones as if none had passed. The key is not used, and nothing is searched:
        `values` are the best of each action's own vectors, which bound Q from below, -inf where an action has none.

        Args:
            key: not used.
            env: an environment of the model.
            params: its parameters.
            belief: of `ExactBelief`, particles whose states are their numbers, or chances `[S]`.
        """
        count = num_actions(env, params)
        worth = self.alphas @ chances_of(belief, self.alphas.shape[1]).astype(self.alphas.dtype)
        values = (
            jnp.full((count,), -jnp.inf, worth.dtype)
            .at[self.actions]
            .max(worth)
            .astype(jnp.float32)
        )
        action, zero = self.actions[worth.argmax()].astype(jnp.int32), jnp.zeros((), jnp.int32)
        return action, PlanInfo(
            value=worth.max().astype(jnp.float32),
            values=values,
            preferences=values,
            policy=jax.nn.one_hot(action, count),
            entropy=jnp.zeros(()),
            visits=jnp.zeros((count,), jnp.int32),
            nodes=zero,
            edges=zero,
            depth=zero,
            iterations=zero,
            steps=zero,
            overflow=zero,
            invalid=zero,
            stranded=zero,
            ended=jnp.zeros(()),
            legal=jnp.ones((count,), bool),
        )


@dataclasses.dataclass(frozen=True)
class Trials:
    """Size of a trial of `solve_exact`: beliefs that are reached and backed up together.

    Attributes:
        num_paths: paths, side by side.
        depth: steps of a path, at most.
    """

    num_paths: int = field(4, AtLeast(1))
    depth: int = field(32, AtLeast(1))

    def __post_init__(self) -> None:
        check_fields(self)


def solve_exact(
    model: TabularPomdp,
    horizon: int | None = None,
    *,
    method: Literal["points", "alpha"] = "points",
    tol: float = 1e-3,
    max_iterations: int = 1000,
    max_vectors: int = 100_000,
    trials: Trials = Trials(),
    key: PRNGKey | None = None,
) -> Exact:
    """The value of a finite model, and vectors that attain it.

    A finite horizon is solved exactly, by value iteration with alpha vectors in float64 on the host, from a terminal
    value of zero. An infinite one is solved by trials between two bounds (`method="points"`), or by value iteration
    from the blind policies' values until the contraction makes what is left less than `tol` (`method="alpha"`, for a
    handful of states). The trials compute in the dtype of the model: float64 where x64 is enabled; in float32 the
    bounds hold up to rounding, about `1e-6 / (1 - gamma)` of the largest value, and `tol` should not be below that.

    Args:
        model: the model, concrete.
        horizon: steps to go; None for ever, with a discount below one.
        method: for an infinite horizon.
        tol: the gap between the bounds at the start at which to stop.
        max_iterations: trials, after which the bounds are returned as they are (`converged=False`).
        max_vectors: of an alpha set before it is pruned.
        trials: their size.
        key: consumed by the trials; `jax.random.key(0)` if None.

    Raises:
        UsageError: no such method or horizon, too many vectors; without a horizon, a discount of
            one, or a trace around the call.
    """
    if method not in ("points", "alpha"):
        raise UsageError(f"method must be 'points' or 'alpha', not {method!r}")
    if horizon is not None and horizon < 1:
        raise UsageError(f"the horizon must be at least one step, or None for ever, not {horizon}")
    if not tol > 0:
        raise UsageError(f"tol must be above zero, not {tol}")
    for name, value in (("max_iterations", max_iterations), ("max_vectors", max_vectors)):
        check_value(name, value, AtLeast(1), int)
    # An array that is made here is a tracer wherever a program is traced.
    if horizon is None and concrete_values(jnp.zeros(())) is None:
        raise UsageError("without a horizon, solve_exact reads results: call it outside of jit.")
    if horizon is None and method == "points":
        if key is None:
            key = jax.random.key(0)
        return _by_trials(key, model, tol, max_iterations, trials)
    return _by_vectors(model, horizon, tol, max_vectors)


def _by_vectors(model: TabularPomdp, horizon: int | None, tol: float, max_vectors: int) -> Exact:
    transition = np.asarray(model.transition, np.float64)
    observation = np.asarray(model.observation, np.float64)
    reward = np.asarray(model.reward, np.float64)
    if reward.ndim == 3:
        reward = (transition * reward).sum(-1)
    discount, start = float(model.discount), np.asarray(model.start, np.float64)
    if horizon is None:
        alphas = np.asarray(blind(model), np.float64)
        corners = np.asarray(fib(model), np.float64).max(0)
        gap = (corners - alphas).max(1).min()
        steps = 1
        if gap > 0 and discount > 0:  # without a discount one step is all
            steps = max(1, math.ceil(math.log(max(gap / tol, 1)) / -math.log(discount)))
    else:
        alphas, gap, steps = np.zeros((1, len(start))), 0.0, horizon
    actions = np.zeros(len(alphas), np.int32)
    for _ in range(steps):
        alphas, actions = _alpha.backup(
            transition, observation, reward, discount, alphas, max_vectors
        )
    value = (alphas @ start).max()
    left = discount**steps * max(gap, 0.0)
    lower, upper, alphas = (
        jnp.asarray(x, model.start.dtype) for x in (value, value + left, alphas)
    )
    return Exact(lower, lower, upper, alphas, jnp.asarray(actions), bool(left <= tol), steps)


def _by_trials(
    key: PRNGKey, model: TabularPomdp, tol: float, max_iterations: int, trials: Trials
) -> Exact:
    num_paths = trials.num_paths
    depth = trials.depth
    most = max(num_paths * depth, SETTLED)
    capacity = 2 ** math.ceil(math.log2(2 * most + len(model.actions)))
    check_discounted(model)  # in a program its value is not known
    bounds, ends, done, number = _first(model, capacity), (-np.inf, np.inf), False, 0
    seen: dict[bytes, np.ndarray] = {}
    while not done and number < max_iterations:
        before = int(bounds.num_points)
        bounds, made = _trial(
            jax.random.fold_in(key, number), model, bounds, 0.5 * tol, num_paths, depth
        )
        ends, number = np.asarray(made), number + 1
        _see(
            seen, np.asarray(bounds.points)[before : int(bounds.num_points)]
        )  # slices of arrays of JAX's compile
        bounds, capacity = _fitted(bounds, capacity, most)
        if number % SETTLE_EVERY == 0 and ends[1] - ends[0] > tol:
            bounds, made = _settle(
                model,
                bounds,
                jnp.asarray(_latest(seen, model)),
                jnp.asarray(tol, model.start.dtype),
            )
            ends = np.asarray(made)
            bounds, capacity = _fitted(bounds, capacity, most)
        done = bool(ends[1] - ends[0] <= tol)
    lower, upper = (jnp.asarray(end, model.start.dtype) for end in ends)
    bounds = _pruned(bounds)
    count = int(bounds.num_alphas)
    return Exact(lower, lower, upper, bounds.alphas[:count], bounds.actions[:count], done, number)


def _fitted(bounds: _points.Bounds, capacity: int, most: int) -> tuple[_points.Bounds, int]:
    """The bounds with room for `most` more vectors and points, and their capacity."""
    while max(int(bounds.num_alphas), int(bounds.num_points)) > capacity - most:
        bounds = _pruned(bounds)
        if max(int(bounds.num_alphas), int(bounds.num_points)) > capacity // 2:
            capacity *= 2
            bounds = _points.grown(bounds, capacity)
    return bounds, capacity


def _see(seen: dict[bytes, np.ndarray], beliefs: np.ndarray) -> None:
    """Puts beliefs at the end of those seen, each once."""
    for belief in beliefs:
        name = np.round(belief, 6).tobytes()
        seen.pop(name, None)
        seen[name] = belief


def _latest(seen: dict[bytes, np.ndarray], model: TabularPomdp) -> np.ndarray:
    """The corners, if they are few, and the latest beliefs, `[B, S]` with B of few sizes (each compiles once)."""
    num_states, dtype = len(model.states), np.asarray(model.start).dtype
    corners = list(np.eye(num_states, dtype=dtype)) if num_states <= SETTLED // 2 else []
    rows = [*corners, *list(seen.values())[-(SETTLED - len(corners)) :]]
    size = next(size for size in (SETTLED // 16, SETTLED // 4, SETTLED) if size >= len(rows))
    return np.stack([*rows, *[rows[-1]] * (size - len(rows))])


_first = jax.jit(_points.first_bounds, static_argnames="capacity")
_trial = jax.jit(_points.trial, static_argnames=("num_paths", "depth"))
_settle = jax.jit(_points.consistent_bounds)
_pruned = jax.jit(_points.pruned)


def reachable_beliefs(
    model: TabularPomdp, *, merge: float = 1e-9, max_beliefs: int = 4096
) -> np.ndarray:
    """All beliefs that some sequence of actions and observations leads to, float64 `[N, S]`, the start first.

    Breadth first on the host; beliefs whose entries all differ by at most `merge` are one.

    Raises:
        UsageError: there are more than `max_beliefs`.
    """
    transition, observation = (
        np.asarray(x, np.float64) for x in (model.transition, model.observation)
    )
    found = [np.asarray(model.start, np.float64)]
    at = 0
    while at < len(found):
        for belief in _following(found[at], transition, observation)[0]:
            if np.abs(np.stack(found) - belief).max(1).min() > merge:
                found.append(belief)
        if len(found) > max_beliefs:
            raise UsageError(
                f"more than max_beliefs = {max_beliefs} beliefs can be reached; merge more or use bounds"
            )
        at += 1
    return np.stack(found)


def iterated_values(
    model: TabularPomdp, eta: float, num_iterations: int, beliefs: ArrayLike | None = None
) -> Array:
    """`V_k = L_eta Psi_k` at every reachable belief, of the iterated reference scheme swept exactly.

    `Psi_{k+1}(b, a) = Psi_k(b, a) - L_eta Psi_k(b) + R(b, a) + gamma sum_o P(o | a, b) L_eta Psi_k(b')` from
    `Psi_0 = 0`, with `L_eta x = log(sum_a exp(eta x_a)) / eta`: what a planner with unlimited samples would compute.
    V_k tends to V. Kim and Kurniawati (2025), PORPP, after dynamic policy programming. Float64 where x64 is enabled.

    Args:
        model: the model, concrete.
        eta: temperature, above zero; large means a weak penalty.
        num_iterations: k goes from 1 to this.
        beliefs: `[N, S]`, closed: every successor is among them within 1e-6; `reachable_beliefs(model)` if None.

    Returns:
        `[num_iterations, N]`.

    Raises:
        UsageError: the beliefs are not closed, or eta is not above zero.
    """
    if not eta > 0:
        raise UsageError(f"eta must be above zero, not {eta}")
    beliefs = reachable_beliefs(model) if beliefs is None else np.asarray(beliefs, np.float64)
    places, chances = _graph(model, beliefs)
    dtype = model.start.dtype
    reward = jnp.asarray(beliefs @ np.asarray(model.expected_reward, np.float64).T, dtype)
    places, chances = jnp.asarray(places), jnp.asarray(chances, dtype)

    def sweep(psi, _):
        value = jax.nn.logsumexp(eta * psi, axis=-1) / eta
        psi = psi - value[:, None] + reward + model.discount * (chances * value[places]).sum(-1)
        return psi, jax.nn.logsumexp(eta * psi, axis=-1) / eta

    return jax.lax.scan(sweep, jnp.zeros_like(reward), length=num_iterations)[1]


def _graph(model: TabularPomdp, beliefs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which belief follows, int32 `[N, A, O]`, and with what chance."""
    transition, observation = (
        np.asarray(x, np.float64) for x in (model.transition, model.observation)
    )
    shape = len(beliefs), transition.shape[0], observation.shape[-1]
    places, chances = np.zeros(shape, np.int32), np.zeros(shape)
    for i, belief in enumerate(beliefs):
        following, chance = _following(belief, transition, observation)
        distances = np.abs(following[:, None] - beliefs[None]).max(-1)
        if (distances.min(1) > 1e-6).any():
            raise UsageError(
                f"the beliefs are not closed: a successor of number {i} is none of them"
            )
        places[i][chance > 0], chances[i] = distances.argmin(1), chance
    return places, chances


def _following(
    belief: np.ndarray, transition: np.ndarray, observation: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The successors with a positive chance, `[n, S]` in order of action and observation, and all chances `[A, O]`."""
    joint = np.einsum("s,ast,ato->aot", belief, transition, observation)
    chance = joint.sum(-1)
    return joint[chance > 0] / chance[chance > 0][:, None], chance
