"""Values that every planner can lean on: what seeing all would earn above, what one action for ever earns below."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxpar.pomdp.tabular import TabularPomdp
from jaxpar.types import Array, UsageError, concrete_values

__all__ = ["blind", "fib", "qmdp"]

MAX_SWEEPS = 100_000


def qmdp(model: TabularPomdp, *, tol: float = 1e-6) -> Array:
    """`Q[a, s]` of the model in which every state is seen: `max_a b·Q[a]` is an upper bound of V(b).

    Value iteration `Q = R + gamma T max_a Q`, down from the largest reward for ever, so that every sweep is a bound;
    until it is at most `tol` of the largest value too high, or rounding ends it. Cost A S^2 a sweep. Littman, Cassandra
    and Kaelbling (1995), "Learning policies for partially observable environments".
    """
    check_discounted(model)
    reward = model.expected_reward

    def sweep(q):
        return reward + model.discount * model.transition @ q.max(0)

    return _settled(
        sweep,
        jnp.broadcast_to(reward.max() / (1 - model.discount), reward.shape),
        model.discount,
        tol,
    )


def fib(model: TabularPomdp, *, tol: float = 1e-6) -> Array:
    """`Q[a, s]` of the fast informed bound, at most `qmdp`'s: `max_a b·Q[a]` is an upper bound of V(b).

    `Q[a, s] = R[a, s] + gamma sum_o max_b sum_s' T[a, s, s'] O[a, s', o] Q[b, s']`, iterated down from `qmdp` as there.
    Cost A^2 O S^2 a sweep. Hauskrecht (2000), "Value-function approximations for partially observable Markov decision
    processes".
    """
    reward = model.expected_reward

    def sweep(q):
        def of_action(transition, observation):
            joint = observation[None, :, :] * q[:, :, None]  # [B, S', O]
            return jnp.einsum("st,bto->bso", transition, joint).max(0).sum(-1)

        ahead = jax.lax.map(lambda pair: of_action(*pair), (model.transition, model.observation))
        return reward + model.discount * ahead

    return _settled(sweep, qmdp(model, tol=tol), model.discount, tol)


def blind(model: TabularPomdp) -> Array:
    """`alpha[a, s]`, the value of repeating action a for ever: `max_a b·alpha[a]` is a lower bound of V(b)."""
    check_discounted(model)
    eye = jnp.eye(model.start.shape[0], dtype=model.start.dtype)
    systems = eye[None] - model.discount * model.transition
    return jnp.linalg.solve(systems, model.expected_reward[..., None])[..., 0]


def _settled(sweep: Callable[[Array], Array], first: Array, discount: Array, tol: float) -> Array:
    """Sweeps down from an upper bound; taking the minimum makes rounding end in a fixed point, not in a cycle."""

    def going(carry):
        count, q, change = carry
        return (change > tol * (1 - discount) * jnp.abs(q).max()) & (count < MAX_SWEEPS)

    def once(carry):
        count, q, _ = carry
        following = jnp.minimum(q, sweep(q))
        return count + 1, following, (q - following).max()

    return jax.lax.while_loop(going, once, (0, first, jnp.asarray(jnp.inf, first.dtype)))[1]


def check_discounted(model: TabularPomdp) -> None:
    """Refuses a known discount of one or more, for which no value for ever is finite."""
    known = concrete_values(model.discount)
    if known is not None and known[0] >= 1:
        raise UsageError(
            "an infinite horizon needs a discount below one; give a horizon, or a smaller discount"
        )
