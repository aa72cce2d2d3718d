"""Q-learning in many environments at once, without a replay buffer and without a target network."""

import dataclasses

import flax.struct
import jax

from jaxpar.env import Adapter, Environment
from jaxpar.fields import AtLeast, Between, Finite, OneOf, Positive, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.action_values import (
    ActionValues,
    QBatch,
    action_masks,
    epsilon_schedule,
    q_loss,
    team_trajectory,
)
from jaxpar.rl.collect import (
    carry_at_start,
    check_minibatches,
    done_and_weight,
    last_agent_done,
    update_episode_stats,
)
from jaxpar.rl.learner import (
    LearnerState,
    check_learner,
    has_memory,
    init_learner,
    learner_axes,
    mean_metrics,
    minibatch_updates,
)
from jaxpar.rl.network import Network
from jaxpar.rl.returns import lambda_returns, next_values
from jaxpar.rl.value_decomposition import DECOMPOSITIONS
from jaxpar.rollout import Reset, Trajectory, rollout
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar

__all__ = ["Pqn", "PqnRates", "lambda_targets"]


@flax.struct.dataclass
class PqnRates:
    """Numbers of PQN: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Attributes:
        learning_rate: of RAdam, at first.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of a step.
        q_lambda: lambda of the targets.
        epsilon_start: share of random actions, at first.
        epsilon_end: and in the end.
        epsilon_anneal: updates over which it gets there, in a line.
        max_grad_norm: gradients longer than this are shortened to it.
        reward_scale: what rewards are multiplied by before anything is learned from them.
    """

    learning_rate: Scalar = field(2.5e-4, Positive())
    anneal: Scalar = field(0.0, AtLeast(0))
    discount: Scalar = field(0.99, Between(0, 1))
    q_lambda: Scalar = field(0.95, Between(0, 1))
    epsilon_start: Scalar = field(1.0, Between(0, 1))
    epsilon_end: Scalar = field(0.05, Between(0, 1))
    epsilon_anneal: Scalar = field(50.0, AtLeast(0))
    max_grad_norm: Scalar = field(10.0, AtLeast(0))
    reward_scale: Scalar = field(1.0, Finite())


@dataclasses.dataclass(frozen=True)
class Pqn:
    """Parallelised Q-learning (Gallici et al. 2024, arXiv:2407.04811, algorithm 1); an `Algorithm`, a step an update.

    An update makes `num_steps` steps in each of `num_envs` environments, computes lambda-returns of the best legal
    actions' values, and goes `epochs` times through them in `minibatches` parts. Layer norms in the network keep this
    stable. Its inputs are the environment's parameters, None for the default ones. With a memory, whole rollouts are
    trained on, all steps at once, from the carry before them, with episodes' starts inside. Several agents share the
    network; a decomposition teaches it the team's mean reward (VDN, QMIX) instead of each agent's own.

    Attributes:
        env: the environment or adapter, with actions `Discrete`.
        network: of the values.
        rates: numbers.
        num_envs: B.
        num_steps: T, of a rollout.
        epochs: passes over each rollout.
        minibatches: parts of a rollout: of whole environments where there is a memory, else of single steps.
        decomposition: "none", "vdn" or "qmix".
        decomposition_size: hidden units of QMIX's mixing network.
        prng: as in `jaxpar.rollout.rollout`.
        reset: likewise; None for the exact default.
    """

    env: Environment | Adapter
    network: Network = Network(hidden=(128, 128), activation="relu", layer_norm=True)
    rates: PqnRates = PqnRates()
    num_envs: int = field(32, AtLeast(1))
    num_steps: int = field(64, AtLeast(1))
    epochs: int = field(4, AtLeast(1))
    minibatches: int = field(16, AtLeast(1))
    decomposition: str = field("none", OneOf(DECOMPOSITIONS))
    decomposition_size: int = field(32, AtLeast(1))
    prng: str = "env"
    reset: Reset | None = None
    normalize_obs = False
    normalize_returns = False

    optimizer = make_optimizer(OptimizerConfig("radam", eps=1e-8, b2=0.999, weight_decay=0.0))

    def __post_init__(self):
        """Refuses what no learner can be."""
        check_learner(self)
        check_minibatches(self.num_steps, self.num_envs, self.minibatches, self.has_memory)
        self.agent()

    @property
    def has_memory(self) -> bool:
        """Whether rollouts must stay whole."""
        return has_memory(self.network)

    def agent(self, greedy: bool = False) -> ActionValues:
        """The policy; if greedy, with the weights of a state as its parameters, else with `(weights, epsilon)`."""
        return ActionValues(
            self.env, self.network, self.decomposition, self.decomposition_size, greedy
        )

    def init(self, key: PRNGKey, inputs: PyTree) -> LearnerState:
        """Draws weights and starts an episode in every environment; consumes `key`."""
        return init_learner(self, key, inputs)

    def step(self, key: PRNGKey, state: LearnerState, inputs: PyTree) -> tuple[LearnerState, Info]:
        """Makes an update; consumes `key`."""
        agent, rates = self.agent(), state.rates
        params = self.env.default_params if inputs is None else inputs
        act_key, deal_key = jax.random.split(key)
        acting = state.weights, epsilon_schedule(rates, state.updates)
        env_state, trajectory = rollout(act_key, state.env_state, self.env, params, agent, acting, self.num_steps,
                                        value=agent.value, prng=self.prng, reset=self.reset)  # fmt: skip
        masks = action_masks(self.env, env_state.state, params)
        last = jax.vmap(agent.value, (None, 0, 0, 0))(
            acting, env_state.obs, carry_at_start(env_state), masks
        )
        batch = lambda_targets(
            agent, trajectory, last, state.env_state.carry, rates, state.agent_done
        )
        weights, opt_state, infos = minibatch_updates(self, deal_key, state, batch, q_loss)
        info = mean_metrics(infos) | {"epsilon": acting[1]}
        info, stats = update_episode_stats(info, state.episode_stats, trajectory)
        done = last_agent_done(trajectory)
        return LearnerState(
            weights, opt_state, env_state, done, rates, state.updates + 1, stats
        ), info

    def axes(self) -> PyTree:
        """Logical axes of the state; see `learner_axes`."""
        return learner_axes(self)


def lambda_targets(
    agent: ActionValues,
    trajectory: Trajectory,
    last_value: Array,
    carry: PyTree,
    rates: PyTree,
    agent_done: Array | None = None,
) -> QBatch:
    """A trajectory with Q(lambda) targets (Gallici et al. 2024), by one scan.

        G[t] = r[t] + discount ((1 - q_lambda) max_a Q(s[t + 1], a) + q_lambda G[t + 1])

    with the maximum over legal actions, by the weights that acted, in place of both where a truncation or the rollout
    ends the trajectory, and 0 where the process terminated.

    Args:
        agent: whose policy acted.
        trajectory: `[T, B]`, with the policy's extras.
        last_value: of the observation after it `[B]`, or `[B, N]` agents.
        carry: the policy's `[B, ...]` before the first step.
        rates: with `discount`, `q_lambda` and `reward_scale`.
        agent_done: as in `done_and_weight`; ignored where a decomposition makes agents a team, which ends as one.
    """
    value = trajectory.extras["value"]
    trajectory = team_trajectory(agent, trajectory)
    done, weight = done_and_weight(
        trajectory, agent_done if agent.decomposition == "none" else None
    )
    last_value = last_value if agent.decomposition == "none" else last_value[..., 0]
    following = next_values(value, last_value, done, trajectory.bootstrap)
    target = lambda_returns(
        trajectory.reward * rates.reward_scale, following, done, rates.discount, rates.q_lambda
    )
    return QBatch(
        trajectory.obs, trajectory.start, trajectory.extras["raw_action"], target, weight, carry
    )
