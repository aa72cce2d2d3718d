"""A point-based solver with a lower and an upper bound, in batches of trials.

A trial follows a path from the start as heuristic search does (HSVI2: Smith and Simmons, 2005; SARSOP: Kurniawati, Hsu
and Lee, 2008): the action that the upper bound likes best, then the observation whose belief leaves most of the gap
open. Here many paths go at once, the first by that rule and the others by draws in proportion to it; then all beliefs
of a depth are backed up as one batch, deepest first. The lower bound is a set of alpha vectors. The upper bound is the
sawtooth over beliefs with known bounds and the corners, and never above the fast informed bound.

Sets live in arrays of fixed capacity, valid up to a count, which double on the host; each doubling compiles once.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxpar.pomdp.exact.bounds import blind, fib
from jaxpar.pomdp.tabular import TabularPomdp
from jaxpar.types import Array, PRNGKey

MAX_SWEEPS = 2000
"""Most repeated backups of one set of beliefs."""

Carry = TypeVar("Carry")


class Bounds(NamedTuple):
    """Both bounds: alpha vectors `[N, S]` and actions `[N]`; corners `[S]`, points `[M, S]` and their values `[M]`.

    The first `num_alphas` vectors and `num_points` points count. `informed` is `fib`'s `[A, S]`.
    """

    alphas: Array
    actions: Array
    num_alphas: Array
    corners: Array
    points: Array
    values: Array
    num_points: Array
    informed: Array


def first_bounds(model: TabularPomdp, capacity: int) -> Bounds:
    """Blind policies below, the fast informed bound above; the start is the first point."""
    alphas, informed = blind(model), fib(model)
    count, num_states = alphas.shape
    float_dtype = alphas.dtype
    return Bounds(
        jnp.zeros((capacity, num_states), float_dtype).at[:count].set(alphas),
        jnp.zeros(capacity, jnp.int32).at[:count].set(jnp.arange(count, dtype=jnp.int32)),
        jnp.asarray(count, jnp.int32),
        informed.max(0),
        jnp.zeros((capacity, num_states), float_dtype),
        jnp.zeros(capacity, float_dtype),
        jnp.asarray(0, jnp.int32),
        informed,
    )


def grown(bounds: Bounds, capacity: int) -> Bounds:
    """The same bounds with room for `capacity` vectors and points."""

    def padded(x):
        return jnp.pad(x, [(0, capacity - x.shape[0])] + [(0, 0)] * (x.ndim - 1))

    return bounds._replace(
        alphas=padded(bounds.alphas),
        actions=padded(bounds.actions),
        points=padded(bounds.points),
        values=padded(bounds.values),
    )


def lower_at(bounds: Bounds, measures: Array) -> tuple[Array, Array]:
    """`max_i alpha_i·b` and the index, for beliefs or unnormalised measures `[..., S]`."""
    valid = jnp.arange(bounds.alphas.shape[0]) < bounds.num_alphas
    scores = jnp.where(valid, measures @ bounds.alphas.T, -jnp.inf)
    return scores.max(-1), scores.argmax(-1)


def upper_at(bounds: Bounds, measures: Array) -> Array:
    """The sawtooth and the fast informed bound at `[..., S]`, homogeneous in the measure; one at a time in memory."""
    flat = measures.reshape(-1, measures.shape[-1])
    valid = jnp.arange(bounds.points.shape[0]) < bounds.num_points
    drops = jnp.where(valid, jnp.minimum(bounds.values - bounds.points @ bounds.corners, 0), 0)

    def one(measure):
        share = jnp.where(valid, _shares(bounds.points, measure), 0)
        return jnp.minimum(
            measure @ bounds.corners + (share * drops).min(), (bounds.informed @ measure).max()
        )

    batch = max(1, 2**24 // bounds.points.size)
    return jax.lax.map(one, flat, batch_size=batch).reshape(measures.shape[:-1])


def _shares(points: Array, measure: Array) -> Array:
    """The largest multiple of each point `[M, S]` that fits under a measure `[S]`."""
    held = points > 0
    inverse = 1 / jnp.where(
        held, points, 1
    )  # outside the loop over measures: products there are cheaper
    return jnp.where(held, measure[None] * inverse, jnp.inf).min(-1)


def successors(model: TabularPomdp, beliefs: Array) -> Array:
    """`p(s', o | b, a)`, `[K, A, O, S]` for beliefs `[K, S]`."""
    predicted = jnp.einsum("ks,ast->kat", beliefs, model.transition)
    return jnp.einsum("kat,ato->kaot", predicted, model.observation)


def _upper_q(
    model: TabularPomdp, bounds: Bounds, beliefs: Array, joint: Array
) -> tuple[Array, Array]:
    """`[K, A]` upper bounds of Q, and the part `[K, A, O]` of each observation in it."""
    parts = upper_at(bounds, joint)
    return beliefs @ model.expected_reward.T + model.discount * parts.sum(-1), parts


def _vectors(
    model: TabularPomdp, bounds: Bounds, joint: Array, beliefs: Array
) -> tuple[Array, Array]:
    """New vectors `[K, S]` at beliefs `[K, S]` with their `successors`, and their actions `[K]`."""
    best = bounds.alphas[lower_at(bounds, joint)[1]]  # [K, A, O, S']
    ahead = jnp.einsum("ato,kaot->kat", model.observation, best)
    vectors = model.expected_reward[None] + model.discount * jnp.einsum(
        "ast,kat->kas", model.transition, ahead
    )
    actions = jnp.einsum("kas,ks->ka", vectors, beliefs).argmax(-1)
    return vectors[jnp.arange(len(beliefs)), actions], actions.astype(jnp.int32)


def _backed_up(model: TabularPomdp, bounds: Bounds, beliefs: Array) -> tuple[Array, Array, Array]:
    """New vectors `[K, S]`, their actions `[K]` and new upper values `[K]` at beliefs `[K, S]`."""
    joint = successors(model, beliefs)
    vectors, actions = _vectors(model, bounds, joint, beliefs)
    return vectors, actions, _upper_q(model, bounds, beliefs, joint)[0].max(-1)


def _follow_paths(
    key: PRNGKey, model: TabularPomdp, bounds: Bounds, tol: Array, num_paths: int, depth: int
) -> Array:
    """The beliefs of the paths, `[depth, K, S]`; a path whose gap is closed repeats its last."""

    def one(beliefs, inputs):
        key, level = inputs
        joint = successors(model, beliefs)
        q, parts = _upper_q(model, bounds, beliefs, joint)
        paths, actions = jnp.arange(num_paths), q.argmax(-1)
        mine, chance = joint[paths, actions], joint[paths, actions].sum(-1)
        gaps = parts[paths, actions] - lower_at(bounds, mine)[0]
        excess = gaps - chance * tol * model.discount ** -(level + 1)
        noise = jax.random.gumbel(key, excess.shape, excess.dtype).at[0].set(0)
        obs = (jnp.log(jnp.maximum(excess, jnp.finfo(excess.dtype).tiny)) + noise).argmax(-1)
        ahead, evidence = mine[paths, obs], chance[paths, obs]
        goes_on = (excess[paths, obs] > 0) & (evidence > 0)
        following = jnp.where(
            goes_on[:, None], ahead / jnp.where(goes_on, evidence, 1)[:, None], beliefs
        )
        return following, beliefs

    first = jnp.broadcast_to(model.start, (num_paths, len(model.start)))
    levels = jnp.arange(depth).astype(first.dtype)
    return jax.lax.scan(one, first, (jax.random.split(key, depth), levels))[1]


def consistent_bounds(
    model: TabularPomdp, bounds: Bounds, beliefs: Array, tol: Array
) -> tuple[Bounds, Array]:
    """Both bounds made consistent at some beliefs `[B, S]`, and `[lower, upper]` at the start.

    A trial backs up each belief of a path once. Where actions lead back to a belief, at once or in a circle (bumping
    into a wall, going to and fro, starting anew), beliefs vouch for each other, and a trial closes their gap by a
    factor of gamma and no more. So backups are repeated here, of these beliefs alone, until none changes a value by
    `tol (1 - gamma) / 4`; each is a bound. What other points say is asked once; a sweep costs `B A O` times `B`.
    Needs room for B more vectors and points.
    """
    enough, joint = 0.25 * tol * (1 - model.discount), successors(model, beliefs)
    rewards = beliefs @ model.expected_reward.T
    known, straight, own = upper_at(bounds, joint), joint @ bounds.corners, beliefs @ bounds.corners

    def of_belief(measures: Array) -> Array:
        return jax.vmap(lambda one: _shares(beliefs, one))(measures.reshape(-1, beliefs.shape[-1]))

    shares = jax.lax.map(of_belief, joint).reshape(*joint.shape[:-1], len(beliefs))

    def lowered(values: Array) -> Array:
        drops = jnp.minimum(values - own, 0)
        parts = jnp.minimum(known, straight + (shares * drops[None, None, None]).min(-1))
        return jnp.minimum(values, (rewards + model.discount * parts.sum(-1)).max(-1))

    def raised(carry: tuple) -> tuple:
        vectors, actions = carry
        count = jnp.asarray(len(vectors), jnp.int32)
        own = bounds._replace(alphas=vectors, actions=actions, num_alphas=count)
        new, chosen = _vectors(model, own, joint, beliefs)
        better = (new * beliefs).sum(-1) > (vectors * beliefs).sum(-1)
        return jnp.where(better[:, None], new, vectors), jnp.where(better, chosen, actions)

    values = _repeated(lowered, upper_at(bounds, beliefs), lambda values: values, enough)
    best = lower_at(bounds, beliefs)[1]
    vectors, actions = _repeated(
        raised,
        (bounds.alphas[best], bounds.actions[best]),
        lambda carry: (carry[0] * beliefs).sum(-1),
        enough,
    )
    bounds = _added(bounds, vectors, actions, beliefs, values)
    start = model.start[None]
    return bounds, jnp.stack([lower_at(bounds, start)[0][0], upper_at(bounds, start)[0]])


def _repeated(sweep: Callable, first: Carry, value_of: Callable, enough: Array) -> Carry:
    """`sweep` from `first` until no value changes by more than `enough`, at most `MAX_SWEEPS` times."""

    def going(carry: tuple) -> Array:
        count, _, change = carry
        return (change > enough) & (count < MAX_SWEEPS)

    def once(carry: tuple) -> tuple:
        count, state, _ = carry
        following = sweep(state)
        return count + 1, following, jnp.abs(value_of(following) - value_of(state)).max()

    return jax.lax.while_loop(
        going, once, (jnp.zeros((), jnp.int32), first, jnp.asarray(jnp.inf, enough.dtype))
    )[1]


def _added(bounds: Bounds, vectors: Array, actions: Array, beliefs: Array, values: Array) -> Bounds:
    """The bounds with K more vectors and points, and lower corners where a point is one."""
    at, here, zero = bounds.num_alphas, bounds.num_points, jnp.zeros((), jnp.int32)
    at_corner, place = (
        jnp.where(beliefs == 1, values[:, None], jnp.inf).min(0),
        jax.lax.dynamic_update_slice,
    )
    return bounds._replace(
        alphas=place(bounds.alphas, vectors, (at, zero)),
        actions=place(bounds.actions, actions, (at,)),
        num_alphas=at + len(vectors),
        corners=jnp.minimum(bounds.corners, at_corner),
        points=place(bounds.points, beliefs, (here, zero)),
        values=place(bounds.values, values, (here,)),
        num_points=here + len(vectors),
    )


def trial(
    key: PRNGKey, model: TabularPomdp, bounds: Bounds, tol: Array, num_paths: int, depth: int
) -> tuple[Bounds, Array]:
    """One trial of `num_paths` paths of at most `depth` steps, and its backups; consumes `key`.

    Needs room for `num_paths * depth` more vectors and points. Cost a depth: `K A O` beliefs times the `N` vectors and
    the `M` points. Returns the new bounds and `[lower, upper]` at the start.
    """
    beliefs = _follow_paths(key, model, bounds, tol, num_paths, depth)

    def one(bounds, beliefs):
        vectors, actions, uppers = _backed_up(model, bounds, beliefs)
        return _added(bounds, vectors, actions, beliefs, uppers), None

    bounds = jax.lax.scan(one, bounds, beliefs, reverse=True)[0]
    start = model.start[None]
    return bounds, jnp.stack([lower_at(bounds, start)[0][0], upper_at(bounds, start)[0]])


def pruned(bounds: Bounds) -> Bounds:
    """Without points whose value others give already, and vectors that are best at no remaining point or corner."""
    num = bounds.points.shape[0]
    valid = jnp.arange(num) < bounds.num_points
    drops = bounds.values - bounds.points @ bounds.corners

    def redundant(inputs):
        index, point, value = inputs
        shares = jnp.where(valid, _shares(bounds.points, point), 0)
        others = point @ bounds.corners + shares * jnp.minimum(drops, 0)
        # Two points that give each other's value: the later one goes.
        better = (others < value) | ((others <= value) & (jnp.arange(num) < index))
        return jnp.any(valid & better & (jnp.arange(num) != index)) | (
            value >= point @ bounds.corners
        )

    batch = max(1, 2**24 // bounds.points.size)
    gone = jax.lax.map(redundant, (jnp.arange(num), bounds.points, bounds.values), batch_size=batch)
    kept_points = valid & ~gone
    eye = jnp.eye(len(bounds.corners), dtype=bounds.points.dtype)
    witnesses = jnp.concatenate([bounds.points, eye])
    counts = jnp.concatenate([valid, jnp.ones(len(eye), bool)])
    winners = lower_at(bounds, witnesses)[1]
    kept_alphas = jnp.zeros(num, bool).at[winners].max(counts)
    by_point, by_alpha = (jnp.argsort(~kept, stable=True) for kept in (kept_points, kept_alphas))
    return bounds._replace(
        alphas=bounds.alphas[by_alpha],
        actions=bounds.actions[by_alpha],
        num_alphas=kept_alphas.sum(dtype=jnp.int32),
        points=bounds.points[by_point],
        values=bounds.values[by_point],
        num_points=kept_points.sum(dtype=jnp.int32),
    )
