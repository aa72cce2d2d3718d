"""Whole episodes of belief, planner and environment in one scan, and many of them at once."""

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.env import Environment, capabilities, reset, step
from jaxpar.mesh import mesh_axes, partition
from jaxpar.pomdp.beliefs.belief import BeliefUpdater
from jaxpar.pomdp.model import discount_of
from jaxpar.pomdp.planners.planner import Planner
from jaxpar.types import Array, PRNGKey, PyTree, Scalar, UsageError, concrete_values

__all__ = [
    "DishonestValues",
    "Episode",
    "Summary",
    "dishonesty",
    "simulate",
    "simulate_many",
    "standard_error",
    "summarize",
]


class Episode(NamedTuple):
    """One episode of at most T steps; entries `[T]` after its end are 0 and not `live`.

    Attributes:
        discounted_return: float32, from discount^0.
        length: int32, steps made.
        states: the state before each step, `[T, ...]`.
        obs: the observation after it, `[T, ...]`.
        action: int32 `[T]`.
        reward: float32 `[T]`.
        live: bool `[T]`, the step was made.
        illegal: bool `[T]`, the environment's mask did not allow the action.
        log_evidence: float32 `[T]`, of the observation under the belief.
        ess: float32 `[T]`, effective sample size.
        depleted: bool `[T]`, no particle explained the observation.
        unweighed: int32 `[T]`, particles whose likelihood was no number.
        value: float32 `[T]`, the planner's value of the belief.
        entropy: float32 `[T]`, of the root policy.
        nodes: int32 `[T]`, of the tree.
        overflow: int32 `[T]`, steps that found no room in the tree.
        invalid: int32 `[T]`, rewards or leaf values that were not finite while planning.
        stranded: int32 `[T]`, simulations without a legal action, or of a belief without weight.
        left: float32, what the planner still promised, discounted to the start, where the episode was cut; else 0.
    """

    discounted_return: Array
    length: Array
    states: PyTree
    obs: PyTree
    action: Array
    reward: Array
    live: Array
    illegal: Array
    log_evidence: Array
    ess: Array
    depleted: Array
    unweighed: Array
    value: Array
    entropy: Array
    nodes: Array
    overflow: Array
    invalid: Array
    stranded: Array
    left: Array


class Summary(NamedTuple):
    """Statistics over E episodes, scalars.

    Attributes:
        mean: of the discounted returns.
        error: its standard error.
        length: mean number of steps.
        promised: mean of the planner's values of the first beliefs.
        optimism: promised less returned, and less what the planner still promised where an episode was cut: near 0 if
            values are honest. Above it, leaf values promise what is not earned (or the planner lacks simulations).
        optimism_error: its standard error.
        depleted: share of steps whose observation no particle explained.
        unweighed: particles whose likelihood was no number, in all.
        overflow: mean over steps of simulation steps without room.
        invalid: rewards or leaf values that were not finite, in all.
        stranded: simulations without a legal action, in all.
        illegal: illegal actions, in all.
    """

    mean: Array
    error: Array
    length: Array
    promised: Array
    optimism: Array
    optimism_error: Array
    depleted: Array
    unweighed: Array
    overflow: Array
    invalid: Array
    stranded: Array
    illegal: Array


class DishonestValues(UserWarning):
    """A planner promised far more than its episodes returned."""


def simulate(
    key: PRNGKey, env: Environment, params: PyTree, planner: Planner, updater: BeliefUpdater, num_steps: int, *,
    discount: Scalar | None = None,
) -> Episode:  # fmt: skip
    """One episode, planned at every step: a pure function, one `lax.scan`.

    Args:
        key: consumed; split for the start, the belief, and for each step's plan, move and update.
        env: the environment.
        params: its parameters; `params.discount` is used unless `discount` is given.
        planner: what chooses the actions.
        updater: what makes the beliefs, as `ParticleBelief`.
        num_steps: T.
        discount: of the return that is reported; None takes the planner's, then the parameters'.
    """
    if num_steps < 1:
        raise UsageError(f"an episode needs num_steps >= 1, not {num_steps}")
    discount = discount_of(params, planner.discount if discount is None else discount)
    start_key, belief_key, steps_key = jax.random.split(key, 3)
    _, state = reset(start_key, env, params)
    belief = updater.init(belief_key, env, params)
    mask = capabilities(env).action_mask

    def advance(carry: tuple, key: PRNGKey) -> tuple:
        state, belief, live = carry
        plan_key, step_key, update_key = jax.random.split(key, 3)
        action, info = planner.plan(plan_key, env, params, belief)
        legal = jnp.ones((), bool) if mask is None else mask(state, params)[action]
        following = step(step_key, env, state, action, params)
        updated, evidence = updater.update(update_key, belief, action, following.obs, env, params)
        on = live & ~following.terminated & ~following.truncated
        row = {
            "states": state,
            "obs": following.obs,
            "action": action,
            "reward": following.reward,
            "illegal": ~legal,
            "log_evidence": jnp.where(on, evidence.log_evidence, 0.0),
            "ess": jnp.where(on, evidence.ess, 0.0),
            "depleted": on & evidence.depleted,
            "unweighed": jnp.where(on, jnp.asarray(evidence.invalid, jnp.int32), 0),
            "value": info.value,
            "entropy": info.entropy,
            "nodes": info.nodes,
            "overflow": info.overflow,
            "invalid": info.invalid,
            "stranded": info.stranded,
        }
        row = jax.tree.map(lambda x: jnp.where(live, x, jnp.zeros_like(x)), row)
        belief = jax.tree.map(lambda new, old: jnp.where(on, new, old), updated, belief)
        return (following.state, belief, on), (live, row)

    alive = ~jnp.asarray(env.terminal(state, params), bool)
    (_, _, cut), (live, rows) = jax.lax.scan(
        advance, (state, belief, alive), jax.random.split(steps_key, num_steps)
    )
    weights = jnp.asarray(discount, jnp.float32) ** jnp.arange(num_steps)
    # The value before the last step, less what that step earned: no belief after it is planned for.
    left = jnp.where(cut, weights[-1] * (rows["value"][-1] - rows["reward"][-1]), 0.0)
    return Episode(
        discounted_return=jnp.sum(rows["reward"] * weights),
        length=jnp.sum(live, dtype=jnp.int32),
        live=live,
        left=left,
        **rows,
    )


def simulate_many(
    key: PRNGKey,
    env: Environment,
    params: PyTree,
    planner: Planner,
    updater: BeliefUpdater,
    num_steps: int,
    num_episodes: int,
    *,
    batch: int | None = None,
) -> Episode:
    """`num_episodes` independent episodes: `simulate` under `vmap`, in turns of `batch` where memory asks for it.

    On the ambient mesh (`jaxpar.mesh.use_mesh`) episodes are split by the rule of "envs", and each device plays its own
    without communication. Every leaf has a leading axis of episodes. Episode i has the key `fold_in(key, i)`,
    whatever the devices and `batch`; with a `batch` that divides each device's share its bits are the same, too, as
    the same program then plays it. Returns have the planner's discount, or else that of the parameters; returns with
    another are sums of `reward`.

    Raises:
        UsageError: for a number of episodes that the devices do not divide.
    """

    def one(key: PRNGKey) -> Episode:
        return simulate(key, env, params, planner, updater, num_steps)

    def played(keys: PRNGKey) -> Episode:
        return jax.vmap(one)(keys) if batch is None else jax.lax.map(one, keys, batch_size=batch)

    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num_episodes))
    if mesh_axes("envs"):
        split = partition(("envs",), (num_episodes,), "num_episodes")
        played = jax.shard_map(played, in_specs=split, out_specs=split, check_vma=False)
    return played(keys)


def summarize(episodes: Episode) -> Summary:
    """The mean return with its standard error, what was promised, and what went wrong, over E leading `episodes`.

    Warns with `DishonestValues` where `dishonesty` has something to say (outside transformations only).
    """
    returns = episodes.discounted_return
    steps = jnp.maximum(jnp.sum(episodes.length), 1)
    promised = episodes.value[:, 0]
    optimism = promised - returns - episodes.left
    summary = Summary(
        mean=jnp.mean(returns),
        error=standard_error(returns),
        length=jnp.mean(episodes.length),
        promised=jnp.mean(promised),
        optimism=jnp.mean(optimism),
        optimism_error=standard_error(optimism),
        depleted=jnp.sum(episodes.depleted) / steps,
        unweighed=jnp.sum(episodes.unweighed),
        overflow=jnp.sum(episodes.overflow) / steps,
        invalid=jnp.sum(episodes.invalid),
        stranded=jnp.sum(episodes.stranded),
        illegal=jnp.sum(episodes.illegal),
    )
    known = concrete_values(summary.optimism, summary.optimism_error, summary.promised)
    if known is not None and (why := dishonesty(*known)):
        warnings.warn(why, DishonestValues, stacklevel=2)
    return summary


def standard_error(values: Array) -> Array:
    """Of the mean of `[E]` independent values; NaN of a single one."""
    return jnp.std(values, ddof=1) / jnp.sqrt(values.shape[0])


def dishonesty(optimism: Scalar, error: Scalar, promised: Scalar) -> str:
    """Sentence on start values of a planner far above what was earned; empty where they are not.

    Far is beyond 4 standard errors, and beyond a twentieth of what was promised, however many the episodes. A promise
    below what is earned is no warning: `Despot` returns lower bounds, and means of UCB1 hold what exploring cost.
    """
    optimism = float(optimism)
    error = float(error)
    promised = float(promised)
    if not optimism > max(4 * error, 0.05 * abs(promised)):  # not of a NaN, either
        return ""
    return (
        f"the planner promised {promised:.4g} at the start, {optimism:.3g} ± {error:.2g} (standard error) more than "
        "was earned: leaf values (heuristic, rollouts) that no policy reaches, nodes with too few states each to be a "
        "belief (expand_after), or too few simulations"
    )
