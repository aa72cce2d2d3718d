"""What learners have in common: their state, its initialisation, and an update from a rollout.

Example:
    from jaxpar import envs
    import jax
    import jax.numpy as jnp
    from jaxpar.rl import A2c, Network, train
    from jaxpar.rl.distributions import log_prob
    from jaxpar.rl.learner import actor_critic_update

    def reinforce_loss(weights, agent, batch, rates):  # returns alone say how good an action was; no critic is asked
        out = agent.apply(weights, batch.obs, batch.start, batch.carry, batch.action_mask)
        log_p = log_prob(agent.action_space, out.policy, batch.raw_action)
        ratio_error = jnp.max(jnp.abs(jnp.exp(log_p - batch.log_prob) - 1))
        return -jnp.mean(log_p * batch.target), {"ratio_error": ratio_error, "converged": jnp.float32(1)}

    class Reinforce(A2c):
        def step(self, key, state, inputs):
            return actor_critic_update(self, key, state, inputs, reinforce_loss)

    env, params = envs.make("CartPole-v1")
    state, info = train(Reinforce(env, Network(hidden=()), num_envs=2, num_steps=4), jax.random.key(0), params, 3)
    assert state.updates == 3 and jnp.all(info["ratio_error"] < 1e-5)
"""

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
    collect,
    done_and_weight,
    last_agent_done,
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
from jaxpar.rollout import EnvState, Policy, Reset, Trajectory, init
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
"""Names in states that older checkpoints have under another one, for `jaxpar.loop.Hooks.renamed`."""


@flax.struct.dataclass
class LearnerState:
    """The state of a learner.

    Attributes:
        weights: of its network.
        opt_state: of its optimizer.
        env_state: of its environments.
        agent_done: bool `[B, N]`, which agents have ended in an episode that goes on; None for a single agent.
        rates: float32 scalars; replace them to sweep.
        updates: int32 [], made so far.
        episode_stats: mean return and length of the last episodes, float32 [] each; NaN before the first.
        older: the weights before each of the last `lag` updates `[lag, ...]`, the oldest first; None without a lag.
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
    """What a learner trains: a policy with weights, `ActorCritic` or `ActionValues`; static and hashable."""

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
    """An `Algorithm` whose step is an update from a rollout, and whose inputs are the environment's parameters.

    `Ppo`, `A2c`, `Pqn` and `Dqn` are learners, frozen dataclasses whose fields are these and more.
    """

    @property
    def env(self) -> Environment | Adapter:
        """In which it learns."""
        ...

    @property
    def network(self) -> Network | Items:
        """Whose weights it learns."""
        ...

    @property
    def rates(self) -> PyTree:
        """Its numbers at first; those of a state can be swept."""
        ...

    @property
    def num_envs(self) -> int:
        """B."""
        ...

    @property
    def num_steps(self) -> int:
        """T, of a rollout."""
        ...

    @property
    def normalize_obs(self) -> bool:
        """Whether observations are standardised by running moments, which are part of the weights."""
        ...

    @property
    def normalize_returns(self) -> bool:
        """Whether rewards are divided by the running deviation of returns."""
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
        """Of the weights."""
        ...

    def agent(self, greedy: bool = False) -> Agent:
        """The policy; if greedy, it explores nothing."""
        ...

    def axes(self) -> PyTree:
        """Logical axes of the state, for a mesh."""
        ...


class MinibatchLearner(Learner[LearnerState], Protocol):
    """A learner that goes several times through each rollout in random parts: `Ppo`, `A2c` and `Pqn`."""

    @property
    def epochs(self) -> int:
        """Times that each rollout is gone through."""
        ...

    @property
    def minibatches(self) -> int:
        """Parts of a rollout."""
        ...

    @property
    def has_memory(self) -> bool:
        """Whether rollouts must stay whole, since the agent remembers."""
        ...


class ActorCriticLearner(MinibatchLearner, Protocol):
    """One whose agent is an `ActorCritic`: `Ppo` and `A2c`."""

    @property
    def lag(self) -> int:
        """Updates for which the weights that act are old."""
        ...

    @property
    def correct(self) -> bool:
        """Whether V-trace corrects for that."""
        ...


def check_learner(learner: Learner) -> None:
    """Refuses counts and rates that are not legal; rates that are traced are not checked."""
    check_fields(learner)
    check_fields(learner.rates, "rates.")
    if learner.normalize_obs:
        refuse_moments(learner.env, learner.network)


def refuse_moments(env: Environment | Adapter, network: Network | Items) -> None:
    """Refuses to standardise observations that have no mean, or whose place shall not matter."""
    if isinstance(network, Items):
        raise UsageError(
            "normalize_obs=True would scale items by their place; leave it False with Items."
        )
    check_obs(env.name, agent_obs_space(env))


def has_memory(network: Network | Items) -> bool:
    """Whether a learner's rollouts must stay whole."""
    return network.memory_layer() is not None


def init_learner(learner: Learner, key: PRNGKey, inputs: PyTree, lag: int = 0) -> LearnerState:
    """Draws weights and starts an episode in every environment; consumes `key`. A learner's `init`."""
    params = learner.env.default_params if inputs is None else inputs
    weights_key, envs_key = jax.random.split(key)
    agent = learner.agent()
    weights = agent.init(weights_key)
    if learner.normalize_obs:
        weights["moments"] = no_moments(check_obs(learner.env.name, agent_obs_space(learner.env)))
    agents = (learner.num_envs, agent.num_agents) if agent.num_agents else (learner.num_envs,)
    return LearnerState(
        weights=weights,
        opt_state=learner.optimizer.init(weights),
        agent_done=jnp.zeros((learner.num_envs, agent.num_agents), bool)
        if agent.num_agents
        else None,
        env_state=init(
            envs_key, learner.env, params, learner.num_envs, agent.first_carry(), prng=learner.prng
        ),
        rates=jax.tree.map(jnp.float32, learner.rates),
        updates=jnp.int32(0),
        episode_stats={name: jnp.float32(jnp.nan) for name in ("return_mean", "length_mean")},
        older=jax.tree.map(lambda x: jnp.broadcast_to(x, (lag, *x.shape)), weights)
        if lag
        else None,
        returns=Returns(jnp.zeros(agents), no_moments()) if learner.normalize_returns else None,
    )


def learner_axes(learner: Learner) -> PyTree:
    """Logical axes of the state: environments are split by the rule of "envs", the rest is on every device."""
    state = jax.eval_shape(lambda: learner.init(jax.random.key(0), None))

    def named(path, leaf):
        names = [
            entry.name if isinstance(entry, jax.tree_util.GetAttrKey) else None
            for entry in path[:2]
        ]
        split = (
            names in (["agent_done"], ["returns", "running"])
            or names[0] == "env_state"
            and names[1] not in ("first_carry", "step")
        )
        return (("envs",) if split else (None,)) + (None,) * (leaf.ndim - 1) if leaf.ndim else ()

    return jax.tree_util.tree_map_with_path(named, state)


def actor_critic_update(
    learner: ActorCriticLearner,
    key: PRNGKey,
    state: LearnerState,
    inputs: PyTree,
    loss: Callable,
    too_far: Callable[[Info], Array] | None = None,
) -> tuple[LearnerState, Info]:
    """An update of an actor and its critic: a rollout, its advantages, and gradient steps on its minibatches.

    With a lag the weights of that many updates ago act. If corrected, all else is by the weights before the update; if
    not, what was drawn is learned from as if it had just been. Moments are those before the update in all of it, and
    see its rollout afterwards.

    Args:
        learner: `Ppo`, `A2c`, or one like them.
        key: consumed.
        state: before.
        inputs: the environment's parameters, or None for the default ones.
        loss: `(weights, agent, batch, rates) -> (loss, info)`.
        too_far: as in `minibatch_updates`.
    """
    agent, rates = learner.agent(), state.rates
    assert isinstance(agent, ActorCritic)
    params = learner.env.default_params if inputs is None else inputs
    act_key, deal_key = jax.random.split(key)
    judge, behaviour, older = state.weights, None, state.older
    if older is not None:
        oldest = jax.tree.map(lambda x: x[0], older)
        judge, behaviour = (judge, oldest) if learner.correct else (oldest, None)
        older = jax.tree.map(
            lambda old, now: jnp.concatenate([old[1:], now[None]]), older, state.weights
        )
    scaled = rates.replace(reward_scale=rates.reward_scale * reward_factor(state.returns))
    env_state, batch, trajectory = collect(act_key, state.env_state, state.agent_done, agent, params, judge, scaled,
                                           learner.num_steps, prng=learner.prng, reset=learner.reset,
                                           behaviour=behaviour)  # fmt: skip
    weights, opt_state, infos = minibatch_updates(
        learner, deal_key, state, batch, functools.partial(loss, rates=rates), too_far
    )
    # Of the first minibatch alone: there the weights are those that acted, and every ratio should be 1.
    ratio_error = infos["ratio_error"][0, 0]
    info = mean_metrics(infos) | {
        "explained_variance": _explained_variance(batch),
        "ratio_error": ratio_error,
    }
    info, stats = update_episode_stats(info, state.episode_stats, trajectory)
    weights, returns = seen(learner, state, weights, trajectory)
    done = last_agent_done(trajectory)
    return LearnerState(
        weights,
        opt_state,
        env_state,
        done,
        rates,
        state.updates + 1,
        stats,
        older=older,
        returns=returns,
    ), info


def seen(
    learner: Learner, state: LearnerState, weights: PyTree, trajectory: Trajectory
) -> tuple[PyTree, Returns | None]:
    """The weights and the returns with moments that have seen a trajectory, where they have any."""
    done, weight = done_and_weight(trajectory, state.agent_done)
    if learner.normalize_obs:
        weights = weights | {
            "moments": with_batch(state.weights["moments"], trajectory.obs, weight)
        }
    if state.returns is None:
        return weights, None
    return weights, seen_returns(
        state.returns, trajectory.reward, done, weight, state.rates.discount
    )


def minibatch_updates(
    learner: MinibatchLearner,
    key: PRNGKey,
    state: LearnerState,
    batch: PyTree,
    loss: Callable,
    too_far: Callable[[Info], Array] | None = None,
) -> tuple[PyTree, PyTree, Info]:
    """Makes the gradient steps of all epochs on minibatches of a batch; consumes `key`.

    `loss` is `(weights, agent, minibatch) -> (loss, info)`. From the first minibatch on whose info is `too_far`, no
    step is made; what is left is computed all the same, since a scan has one length.

    Returns:
        The weights, the optimizer's state, and infos `[epochs, minibatches]`, with "grad_norm", "skipped" and
        "learning_rate" added to those of `loss`, and with `too_far` "stopped", 1 where no step was made for it.
    """
    rates, agent, optimizer = state.rates, learner.agent(), learner.optimizer
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
    """The mean of each metric over all updates; the least "converged"; and how many updates were "skipped"."""
    reduced = {"converged": jnp.min(infos["converged"]), "skipped": jnp.sum(infos["skipped"])}
    return jax.tree.map(jnp.mean, infos) | reduced


def _explained_variance(batch: Batch) -> Array:
    """`1 - Var(target - value) / Var(target)`, by the weights of the batch: 1 at best, 0 for a constant value."""
    share = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)
    error, centred = batch.target - batch.value, batch.target - jnp.sum(share * batch.target)
    error = error - jnp.sum(share * error)
    # Targets of one value alone have no variance to explain: 1 - 0 / 1e-8 there, and no NaN.
    return 1 - jnp.sum(share * error**2) / jnp.maximum(jnp.sum(share * centred**2), 1e-8)
