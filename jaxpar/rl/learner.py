"""What learners have in common: where they stand, how they begin, and an update from an unroll."""

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.fields import check_fields
from jaxpar.optim import annealed
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.collect import Batch, collect, ended_by, epochs, latest
from jaxpar.rollout import Lanes, begin
from jaxpar.types import Array, Info, PRNGKey, PyTree

__all__ = [
    "LearnerState",
    "actor_critic",
    "begun",
    "check_learner",
    "descended",
    "has_memory",
    "learned",
    "learner_axes",
    "summed_up",
]


@flax.struct.dataclass
class LearnerState:
    """Where a learner stands.

    Attributes:
        weights: of its network.
        opt_state: of its optimizer.
        lanes: its environments.
        gone: bool `[B, N]`, which of several agents have ended in an episode that goes on; None for a lone agent.
        rates: float32 scalars; replace them to sweep.
        updates: int32 [], made so far.
        known: how the last episodes went, float32 [] each.
    """

    weights: PyTree
    opt_state: PyTree
    lanes: Lanes
    gone: Array | None
    rates: PyTree
    updates: Array
    known: dict[str, Array]


def check_learner(learner: Any) -> None:
    """Refuses counts and rates by which nothing can be learned; rates that are traced are not looked at."""
    check_fields(learner)
    check_fields(learner.rates, "rates.")


def has_memory(learner: Any) -> bool:
    """Whether unrolls must stay whole; a property of learners."""
    return learner.network.remembers() is not None


def actor_critic(learner: Any, greedy: bool = False) -> ActorCritic:
    """The policy, for `jaxpar.rollout.unroll` and `evaluate`, with the weights of a state as its parameters."""
    return ActorCritic(learner.env, learner.network, learner.central, greedy)


def begun(learner: Any, key: PRNGKey, inputs: PyTree) -> LearnerState:
    """Draws weights and begins an episode in every lane; consumes `key`. A learner's `init`."""
    params = learner.env.default_params if inputs is None else inputs
    weights_key, lanes_key = jax.random.split(key)
    agent = learner.agent()
    weights = agent.init(weights_key)
    nothing_known = {name: jnp.float32(jnp.nan) for name in ("return_mean", "length_mean")}
    return LearnerState(
        weights=weights,
        opt_state=learner.optimizer.init(weights),
        gone=jnp.zeros((learner.num_lanes, agent.agents), bool) if agent.agents else None,
        lanes=begin(lanes_key, learner.env, params, learner.num_lanes, agent.first_carry(), draw=learner.draw),
        rates=jax.tree.map(jnp.float32, learner.rates),
        updates=jnp.int32(0),
        known=nothing_known,
    )


def learner_axes(learner: Any) -> Any:
    """Logical axes of the state: lanes are split by the rule of "envs", the rest is on every device."""
    state = jax.eval_shape(lambda: learner.init(jax.random.key(0), None))

    def named(path, leaf):
        names = [getattr(entry, "name", None) for entry in path[:2]]
        split = names == ["gone"] or names[0] == "lanes" and names[1] not in ("first_carry", "step")
        return (("envs",) if split else (None,)) + (None,) * (leaf.ndim - 1) if leaf.ndim else ()

    return jax.tree_util.tree_map_with_path(named, state)


def learned(
    learner: Any, key: PRNGKey, state: LearnerState, inputs: PyTree, loss: Callable
) -> tuple[LearnerState, Info]:
    """An update of an actor and its critic: an unroll, its advantages, and `loss` descended on its minibatches.

    Args:
        learner: with `agent()`, `env`, `num_steps`, `epochs`, `minibatches`, `has_memory`, `optimizer`, `draw` and
            `reset`.
        key: consumed.
        state: before.
        inputs: the environment's parameters, or None for the default ones.
        loss: `(weights, agent, batch, rates) -> (loss, info)`.
    """
    agent, rates = learner.agent(), state.rates
    params = learner.env.default_params if inputs is None else inputs
    act_key, deal_key = jax.random.split(key)
    lanes, batch, steps = collect(act_key, state.lanes, state.gone, agent, params, state.weights, rates,
                                  learner.num_steps, draw=learner.draw, reset=learner.reset)  # fmt: skip
    weights, opt_state, infos = descended(learner, deal_key, state, batch, functools.partial(loss, rates=rates))
    ratio_error = infos["ratio_error"][0, 0]
    info = summed_up(infos) | {"explained": _explained(batch), "ratio_error": ratio_error}
    info, known = latest(info, state.known, steps)
    return LearnerState(weights, opt_state, lanes, ended_by(steps), rates, state.updates + 1, known), info


def descended(
    learner: Any, key: PRNGKey, state: LearnerState, batch: PyTree, loss: Callable
) -> tuple[PyTree, PyTree, Info]:
    """Weights and optimizer's state after all epochs of a batch; and infos `[epochs, minibatches]`; consumes `key`.

    `loss` is `(weights, agent, minibatch) -> (loss, info)`; "grad_norm", "skipped" and "learning_rate" are added.
    """
    rates, agent, optimizer = state.rates, learner.agent(), learner.optimizer
    rate = annealed(rates.learning_rate, rates.anneal, state.updates)

    def update(carry, part):
        weights, opt_state = carry
        grads, info = jax.grad(loss, has_aux=True)(weights, agent, part)
        weights, opt_state, said = optimizer.update(grads, opt_state, weights, rate=rate, max_norm=rates.max_grad_norm)
        return (weights, opt_state), info | said

    (weights, opt_state), infos = epochs(
        key, (state.weights, state.opt_state), batch, update, learner.epochs, learner.minibatches, learner.has_memory
    )
    return weights, opt_state, infos


def summed_up(infos: Info) -> Info:
    """The mean of each metric over all updates; the least "converged"; and how many updates were "skipped"."""
    ends = {"converged": jnp.min(infos["converged"]), "skipped": jnp.sum(infos["skipped"])}
    return jax.tree.map(jnp.mean, infos) | ends


def _explained(batch: Batch) -> Array:
    """The share of the returns' variance that the values foresaw: 1 at best."""
    share = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)
    left, whole = batch.target - batch.value, batch.target - jnp.sum(share * batch.target)
    left = left - jnp.sum(share * left)
    return 1 - jnp.sum(share * left**2) / jnp.maximum(jnp.sum(share * whole**2), 1e-8)
