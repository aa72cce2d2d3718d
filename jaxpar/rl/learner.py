"""State, protocols, initialisation and updates that learners share.

Functions here take the learner first, so that a learner has them as methods: `axes = learner_axes`.

Example:
    from jaxpar import envs
    import jax
    import jax.numpy as jnp
    from jaxpar.rl import A2c, Network, train
    from jaxpar.rl.distributions import log_prob
    from jaxpar.rl.learner import actor_critic_update

    # Returns alone say how good an action was: there is no critic.
    def reinforce_loss(weights, agent, batch, rates):
        out = agent.apply(weights, batch.obs, batch.start, batch.carry, batch.action_mask)
        log_p = log_prob(agent.action_space, out.policy, batch.raw_action)
        ratio_error = jnp.max(jnp.abs(jnp.exp(log_p - batch.log_prob) - 1))
        info = {"ratio_error": ratio_error, "converged": jnp.float32(1)}
        return -jnp.mean(log_p * batch.target), info

    class Reinforce(A2c):
        def step(self, key, state, inputs):
            return actor_critic_update(self, key, state, inputs, reinforce_loss)

    env, params = envs.make("CartPole-v1")
    learner = Reinforce(env, Network(hidden=()), num_envs=2, num_steps=4)
    state, info = train(learner, jax.random.key(0), params, 3)
    assert state.updates == 3 and jnp.all(info["ratio_error"] < 1e-5)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Protocol, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Adapter, Environment
from jaxpar.fields import check_fields
from jaxpar.optim import Optimizer, annealed
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.collect import (
    Batch,
    RolloutStart,
    RolloutWeights,
    check_minibatches,
    collect,
    done_and_weight,
    last_agent_done,
    normalized_weights,
    scan_minibatches,
    update_episode_stats,
)
from jaxpar.rl.features import agent_obs_space
from jaxpar.rl.items import Items
from jaxpar.rl.moments import (
    Returns,
    check_obs,
    no_moments,
    reward_factor,
    seen_returns,
    with_batch,
)
from jaxpar.rl.network import Network
from jaxpar.rollout import EnvState, Policy, Reset, RolloutOptions, Trajectory, init
from jaxpar.types import Algorithm, Array, Info, PRNGKey, PyTree, UsageError

__all__ = [
    "RENAMED",
    "ActorCriticLearner",
    "Agent",
    "Learner",
    "LearnerState",
    "MinibatchLearner",
    "actor_critic_update",
    "check_learner",
    "check_minibatch_learner",
    "env_params",
    "finish_update",
    "has_memory",
    "init_learner",
    "learner_axes",
    "mean_metrics",
    "minibatch_updates",
    "refuse_moments",
    "seen",
]


RENAMED = {
    "env_state": "lanes",
    "agent_done": "gone",
    "episode_stats": "known",
    "decomposition": "mixer",
    "target_weights": "target",
    "gradient_steps": "gradients",
    "buffer/rows/action": "buffer/rows/drawn",
    "rates/gae_lambda": "rates/trace",
    "rates/q_lambda": "rates/trace",
    "rates/value_coef": "rates/value",
    "rates/entropy_coef": "rates/entropy",
    "rates/epsilon_start": "rates/epsilon",
    "rates/epsilon_end": "rates/last_epsilon",
    "rates/epsilon_anneal": "rates/explore",
    "rates/tau": "rates/target",
}
"""Older names in checkpoints by those of today, for `jaxpar.loop.Hooks.renamed`."""


@flax.struct.dataclass
class LearnerState:
    """The state of a learner.

    Attributes:
        weights: of its network.
        opt_state: of its optimizer.
        env_state: of its environments.
        agent_done: bool `[B, N]`, agents that have ended before their episode; None for a single
            agent.
        rates: float32 scalars; replace them to sweep.
        updates: int32 [], made so far.
        episode_stats: mean return and length of the last episodes, float32 [] each; NaN before the
            first.
        older: the weights before each of the last `lag` updates `[lag, ...]`, the oldest first;
            None without a lag.
        returns: by which rewards are scaled; None where they are not.
    """

    weights: PyTree
    opt_state: PyTree
    env_state: EnvState
    agent_done: Array | None
    rates: PyTree
    updates: Array
    episode_stats: dict[str, Array]
    older: PyTree = flax.struct.field(default=None, kw_only=True)
    returns: Returns | None = flax.struct.field(default=None, kw_only=True)


LearnerStateT = TypeVar("LearnerStateT", bound=LearnerState)


class Agent(Policy, Protocol):
    """A policy with weights that a learner trains: `ActorCritic`, `ActionValues` or `TwinCritics`.

    It is static and hashable.
    """

    @property
    def num_agents(self) -> int:
        """N, of several agents that share the weights; 0 for a single one."""
        ...

    def init(self, key: PRNGKey) -> PyTree:
        """Draws the weights; consumes `key`."""
        ...

    def first_carry(self) -> PyTree:
        """The carry of one environment when an episode starts."""
        ...


class Learner(Algorithm[LearnerStateT], Protocol[LearnerStateT]):
    """An `Algorithm` with an update from a rollout as its step.

    Learners are frozen dataclasses with these fields and more. Inputs are the environment's
    parameters, or None for the default ones.
    """

    @property
    def env(self) -> Environment | Adapter:
        """The environment or adapter."""
        ...

    @property
    def network(self) -> Network | Items:
        """The network, or the one by which several are shaped."""
        ...

    @property
    def rates(self) -> PyTree:
        """Numbers at first; those of a state can be swept."""
        ...

    @property
    def num_envs(self) -> int:
        """B, environments that run at once."""
        ...

    @property
    def num_steps(self) -> int:
        """T, steps of a rollout in each environment."""
        ...

    @property
    def normalize_obs(self) -> bool:
        """True if observations are standardised by their running mean and deviation.

        These moments are part of the weights. An update uses those before it in all of its steps,
        and evaluation does not move them.
        """
        ...

    @property
    def normalize_returns(self) -> bool:
        """True if rewards are divided by the running deviation of their discounted sums."""
        ...

    @property
    def prng(self) -> str:
        """As in `jaxpar.rollout.rollout`."""
        ...

    @property
    def reset(self) -> Reset | None:
        """Likewise; None for the exact default."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer of the weights."""
        ...

    def agent(self, greedy: bool = False) -> Agent:
        """The policy; if greedy, it explores nothing."""
        ...

    def axes(self) -> PyTree:
        """Logical axes of the state, for a mesh."""
        ...


class MinibatchLearner(Learner[LearnerState], Protocol):
    """A learner that goes through each rollout in random parts: `Ppo`, `A2c` and `Pqn`."""

    @property
    def epochs(self) -> int:
        """Passes over each rollout."""
        ...

    @property
    def minibatches(self) -> int:
        """Parts of a rollout: of whole environments with a memory, else of single steps."""
        ...

    @property
    def has_memory(self) -> bool:
        """True if rollouts must stay whole, since the agent remembers."""
        ...


class ActorCriticLearner(MinibatchLearner, Protocol):
    """A learner with an `ActorCritic` as its agent: `Ppo` and `A2c`."""

    @property
    def central(self) -> bool:
        """True if the value reads all agents' observations."""
        ...

    @property
    def lag(self) -> int:
        """Age in updates of the weights that act, as of actors that run apart from a learner."""
        ...

    @property
    def correct(self) -> bool:
        """True if V-trace corrects for the lag."""
        ...


def check_learner(learner: Learner) -> None:
    """Rejects counts and rates that are not legal; rates that are traced are not checked."""
    check_fields(learner)
    check_fields(learner.rates, "rates.")
    if learner.normalize_obs:
        refuse_moments(learner.env, learner.network)


def check_minibatch_learner(learner: MinibatchLearner) -> None:
    """Rejects fields that are not legal, uneven minibatches, and environments of other agents."""
    check_learner(learner)
    check_minibatches(learner.num_steps, learner.num_envs, learner.minibatches, learner.has_memory)
    learner.agent()


def refuse_moments(env: Environment | Adapter, network: Network | Items) -> None:
    """Rejects moments of observations without a mean, and of items, which have no order."""
    if isinstance(network, Items):
        raise UsageError(
            "normalize_obs=True would scale items by their place; leave it False with Items."
        )
    check_obs(env.name, agent_obs_space(env))


def has_memory(network: Network | Items) -> bool:
    """Returns True if rollouts with this network must stay whole."""
    return network.memory_layer() is not None


def env_params(learner: Learner, inputs: PyTree) -> PyTree:
    """Returns the environment's parameters that inputs are, or the default ones for None."""
    if inputs is None:
        return learner.env.default_params
    return inputs


def init_learner(learner: Learner, key: PRNGKey, inputs: PyTree) -> LearnerState:
    """Draws weights and starts an episode in every environment; consumes `key`."""
    params = env_params(learner, inputs)
    weights_key, envs_key = jax.random.split(key)

    agent = learner.agent()
    weights = agent.init(weights_key)
    if learner.normalize_obs:
        weights["moments"] = no_moments(check_obs(learner.env.name, agent_obs_space(learner.env)))

    each_agent = (learner.num_envs,)
    agent_done = None
    if agent.num_agents:
        each_agent = (learner.num_envs, agent.num_agents)
        agent_done = jnp.zeros(each_agent, bool)

    returns = None
    if learner.normalize_returns:
        returns = Returns(running=jnp.zeros(each_agent), moments=no_moments())

    return LearnerState(
        weights=weights,
        opt_state=learner.optimizer.init(weights),
        env_state=init(
            envs_key, learner.env, params, learner.num_envs, agent.first_carry(), prng=learner.prng
        ),
        agent_done=agent_done,
        rates=jax.tree.map(jnp.float32, learner.rates),
        updates=jnp.int32(0),
        episode_stats={name: jnp.float32(jnp.nan) for name in ("return_mean", "length_mean")},
        returns=returns,
    )


def learner_axes(learner: Learner) -> PyTree:
    """Logical axes of the state: environments are split by the rule "envs", the rest is whole."""
    state = jax.eval_shape(lambda: learner.init(jax.random.key(0), None))

    def name_axes(path, leaf):
        names = [
            entry.name if isinstance(entry, jax.tree_util.GetAttrKey) else None
            for entry in path[:2]
        ]
        if not leaf.ndim:
            return ()
        is_split = names in (["agent_done"], ["returns", "running"])
        if names[0] == "env_state":
            is_split = names[1] not in ("first_carry", "step")
        first = "envs" if is_split else None
        return (first,) + (None,) * (leaf.ndim - 1)

    return jax.tree_util.tree_map_with_path(name_axes, state)


def actor_critic_update(
    learner: ActorCriticLearner,
    key: PRNGKey,
    state: LearnerState,
    inputs: PyTree,
    loss: Callable,
    too_far: Callable[[Info], Array] | None = None,
) -> tuple[LearnerState, Info]:
    """Updates an actor and its critic by a rollout, its advantages, and steps on its minibatches.

    With a lag the weights of that many updates ago act. If corrected, all else is by the weights
    before the update; if not, what was drawn is learned from as if it had just been. Moments are
    those before the update in all of it, and include its rollout afterwards.

    Args:
        learner: `Ppo`, `A2c`, or one like them.
        key: consumed.
        state: before.
        inputs: the environment's parameters, or None for the default ones.
        loss: `(weights, agent, batch, rates) -> (loss, info)`.
        too_far: as in `minibatch_updates`.
    """
    agent = learner.agent()
    assert isinstance(agent, ActorCritic)
    rates = state.rates
    params = env_params(learner, inputs)
    act_key, deal_key = jax.random.split(key)

    # The critic's weights value the rollout; `behaviour` acts in it where that is another's.
    critic = state.weights
    behaviour = None
    older = state.older
    if older is not None:
        oldest = jax.tree.map(lambda x: x[0], older)
        if learner.correct:
            behaviour = oldest
        else:
            critic = oldest
        older = jax.tree.map(
            lambda old, now: jnp.concatenate([old[1:], now[None]]), older, state.weights
        )

    scaled = rates.replace(reward_scale=rates.reward_scale * reward_factor(state.returns))
    env_state, batch, trajectory = collect(
        act_key,
        RolloutStart(env_state=state.env_state, agent_done=state.agent_done),
        agent,
        params,
        RolloutWeights(learned=critic, behaviour=behaviour),
        scaled,
        learner.num_steps,
        RolloutOptions(reset=learner.reset, prng=learner.prng),
    )
    weights, opt_state, infos = minibatch_updates(
        learner, deal_key, state, batch, functools.partial(loss, rates=rates), too_far
    )
    state = dataclasses.replace(state, older=older)
    state, info = finish_update(learner, state, env_state, trajectory, weights, opt_state, infos)
    return state, info | {
        "explained_variance": _explained_variance(batch),
        # Of the first minibatch alone: there the weights are those that acted, and every ratio
        # should be 1.
        "ratio_error": infos["ratio_error"][0, 0],
    }


def finish_update(
    learner: Learner[LearnerStateT],
    state: LearnerStateT,
    env_state: EnvState,
    trajectory: Trajectory,
    weights: PyTree,
    opt_state: PyTree,
    infos: Info,
) -> tuple[LearnerStateT, Info]:
    """Returns the state after an update, and its metrics: of learning, and of episodes that ended.

    Args:
        learner: any.
        state: before.
        env_state: of the environments after the rollout.
        trajectory: of the rollout.
        weights: after the gradient steps.
        opt_state: likewise.
        infos: of the gradient steps.
    """
    info, stats = update_episode_stats(mean_metrics(infos), state.episode_stats, trajectory)
    weights, returns = seen(learner, state, weights, trajectory)
    state = dataclasses.replace(
        state,
        weights=weights,
        opt_state=opt_state,
        env_state=env_state,
        agent_done=last_agent_done(trajectory),
        updates=state.updates + 1,
        episode_stats=stats,
        returns=returns,
    )
    return state, info


def seen(
    learner: Learner, state: LearnerState, weights: PyTree, trajectory: Trajectory
) -> tuple[PyTree, Returns | None]:
    """Adds a trajectory to the moments of the weights and of the returns, where they have any."""
    done, weight = done_and_weight(trajectory, state.agent_done)
    if learner.normalize_obs:
        moments = with_batch(state.weights["moments"], trajectory.obs, weight)
        weights = weights | {"moments": moments}
    if state.returns is None:
        return weights, None
    discount = state.rates.discount
    return weights, seen_returns(state.returns, trajectory.reward, done, weight, discount)


def minibatch_updates(
    learner: MinibatchLearner,
    key: PRNGKey,
    state: LearnerState,
    batch: PyTree,
    loss: Callable,
    too_far: Callable[[Info], Array] | None = None,
) -> tuple[PyTree, PyTree, Info]:
    """Makes the gradient steps of all epochs on minibatches of a batch; consumes `key`.

    `loss` is `(weights, agent, minibatch) -> (loss, info)`. From the first minibatch on whose info
    is `too_far`, no step is made; the rest is computed all the same, since a scan has one length.

    Returns:
        The weights, the optimizer's state, and infos `[epochs, minibatches]`.

        To the infos of `loss` are added "grad_norm", "skipped" and "learning_rate", and with
        `too_far` "stopped", 1 where no step was made for it.
    """
    rates = state.rates
    agent = learner.agent()
    optimizer = learner.optimizer
    rate = annealed(rates.learning_rate, rates.anneal, state.updates)
    joined = optimizer.joined(state.weights, state.opt_state)

    def update(carry, minibatch):
        weights, opt_state, stopped = carry
        grads, info = jax.grad(
            lambda joint: loss(joined.part(joint), agent, minibatch), has_aux=True
        )(weights)
        *moved, optimizer_info = optimizer.update(
            grads, opt_state, weights, rate=rate, max_norm=rates.max_grad_norm
        )
        if too_far is not None:
            stopped |= too_far(info)
            kept = weights, opt_state
            moved = jax.tree.map(lambda new, old: jnp.where(stopped, old, new), tuple(moved), kept)
            info |= {"stopped": stopped.astype(jnp.float32)}
        return (*moved, stopped), info | optimizer_info

    first = joined.params, joined.state, jnp.bool_(False)
    (weights, opt_state, _), infos = scan_minibatches(
        key, first, batch, update, learner.epochs, learner.minibatches, learner.has_memory
    )
    return joined.part(weights), joined.part_state(opt_state), infos


def mean_metrics(infos: Info) -> Info:
    """The mean of each metric over all updates; the least "converged", and the sum of "skipped"."""
    reduced = {"converged": jnp.min(infos["converged"]), "skipped": jnp.sum(infos["skipped"])}
    return jax.tree.map(jnp.mean, infos) | reduced


def _explained_variance(batch: Batch) -> Array:
    """`1 - Var(target - value) / Var(target)`, by the weights of the batch.

    It is 1 at best, 0 for a constant value.
    """
    share = normalized_weights(batch.weight)
    error = batch.target - batch.value
    centred = batch.target - jnp.sum(share * batch.target)
    error = error - jnp.sum(share * error)
    # Targets of one value alone have no variance to explain: 1 - 0 / 1e-8 there, and no NaN.
    return 1 - jnp.sum(share * error**2) / jnp.maximum(jnp.sum(share * centred**2), 1e-8)
