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
    action_values_agent,
    epsilon_schedule,
    last_values,
    q_loss,
    team_steps,
)
from jaxpar.rl.learner import (
    LearnerState,
    check_minibatch_learner,
    env_params,
    finish_update,
    has_memory,
    init_learner,
    learner_axes,
    minibatch_updates,
)
from jaxpar.rl.network import Network
from jaxpar.rl.returns import lambda_returns, next_values
from jaxpar.rl.value_decomposition import DECOMPOSITIONS
from jaxpar.rollout import Reset, RolloutOptions, Trajectory, rollout
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar

__all__ = ["Pqn", "PqnRates", "lambda_targets"]


@flax.struct.dataclass
class PqnRates:
    """Numbers of PQN: those of `PpoRates`, and some of its own.

    Attributes:
        q_lambda: lambda of the targets.
        epsilon_start: share of random actions, at first.
        epsilon_end: share in the end.
        epsilon_anneal: updates over which it gets there, in a line.
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
    """Parallelised Q-learning (Gallici et al. 2024, arXiv:2407.04811, algorithm 1); an `Algorithm`.

    An update makes `num_steps` steps in each of `num_envs` environments, computes lambda-returns of
    the best legal actions' values, and goes `epochs` times through them in `minibatches` parts.
    Layer norms in the network keep this stable. With a memory, whole rollouts are trained on, all
    steps at once, from the carry before them, with episodes' starts inside. Several agents share
    the network; a decomposition teaches it the team's mean reward (VDN, QMIX) instead of each
    agent's own. Fields are those of `MinibatchLearner` and `QLearner`.
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

    __post_init__ = check_minibatch_learner
    agent = action_values_agent
    init = init_learner
    axes = learner_axes

    @property
    def has_memory(self) -> bool:
        """True if rollouts must stay whole."""
        return has_memory(self.network)

    def step(self, key: PRNGKey, state: LearnerState, inputs: PyTree) -> tuple[LearnerState, Info]:
        """Makes an update; consumes `key`."""
        agent = self.agent()
        rates = state.rates
        params = env_params(self, inputs)
        act_key, deal_key = jax.random.split(key)

        epsilon = epsilon_schedule(rates, state.updates)
        acting = state.weights, epsilon
        options = RolloutOptions(reset=self.reset, prng=self.prng, value=agent.value)
        env_state, trajectory = rollout(
            act_key,
            state.env_state,
            self.env,
            params,
            agent,
            acting,
            self.num_steps,
            options,
        )
        last_value = last_values(agent, acting, env_state, params)
        batch = lambda_targets(
            agent, trajectory, last_value, state.env_state.carry, rates, state.agent_done
        )

        weights, opt_state, infos = minibatch_updates(self, deal_key, state, batch, q_loss)
        state, info = finish_update(self, state, env_state, trajectory, weights, opt_state, infos)
        return state, info | {"epsilon": epsilon}


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

    with the maximum over legal actions, by the weights that acted, instead of both where a
    truncation or the rollout ends the trajectory, and 0 where the process terminated.

    Args:
        agent: the policy that acted.
        trajectory: `[T, B]`, with the policy's extras.
        last_value: of the observation after it `[B]`, or `[B, N]` agents.
        carry: the policy's `[B, ...]` before the first step.
        rates: with `discount`, `q_lambda` and `reward_scale`.
        agent_done: as in `done_and_weight`; ignored where a decomposition makes agents a team,
            which ends as one.
    """
    value = trajectory.extras["value"]
    trajectory, done, weight = team_steps(agent, trajectory, agent_done)
    if agent.decomposition != "none":
        last_value = last_value[..., 0]
    following = next_values(value, last_value, done, trajectory.bootstrap)
    reward = trajectory.reward * rates.reward_scale
    target = lambda_returns(reward, following, done, rates.discount, rates.q_lambda)
    return QBatch(
        obs=trajectory.obs,
        start=trajectory.start,
        action=trajectory.extras["raw_action"],
        target=target,
        weight=weight,
        carry=carry,
    )
