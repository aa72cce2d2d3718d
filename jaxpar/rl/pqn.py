"""Q-learning in many environments at once, without a replay buffer and without a target network."""

import dataclasses
from typing import Any

import flax.struct
import jax

from jaxpar.fields import AtLeast, Between, Finite, OneOf, Positive, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.action_values import ActionValues, Lesson, epsilon_at, masks_of, of_team, q_loss
from jaxpar.rl.collect import carried, check_minibatches, ended_by, latest, marks
from jaxpar.rl.learner import LearnerState, begun, check_learner, descended, has_memory, learner_axes, summed_up
from jaxpar.rl.mixers import MIXERS
from jaxpar.rl.network import Network
from jaxpar.rl.returns import lambda_returns, next_values
from jaxpar.rollout import Steps, unroll
from jaxpar.types import Array, Info, PRNGKey, PyTree

__all__ = ["Pqn", "PqnRates", "lambda_targets"]


@flax.struct.dataclass
class PqnRates:
    """Numbers of PQN: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Attributes:
        learning_rate: of RAdam, at first.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of a step.
        trace: lambda of the targets.
        epsilon: share of random actions, at first.
        last_epsilon: and in the end.
        explore: updates over which it gets there, in a line.
        max_grad_norm: gradients longer than this are shortened to it.
        reward_scale: what rewards are multiplied by before anything is learned from them.
    """

    learning_rate: Any = field(2.5e-4, Positive())
    anneal: Any = field(0.0, AtLeast(0))
    discount: Any = field(0.99, Between(0, 1))
    trace: Any = field(0.95, Between(0, 1))
    epsilon: Any = field(1.0, Between(0, 1))
    last_epsilon: Any = field(0.05, Between(0, 1))
    explore: Any = field(50.0, AtLeast(0))
    max_grad_norm: Any = field(10.0, AtLeast(0))
    reward_scale: Any = field(1.0, Finite())


@dataclasses.dataclass(frozen=True)
class Pqn:
    """Parallelised Q-learning (Gallici et al. 2024, arXiv:2407.04811, algorithm 1); an `Algorithm`, a step an update.

    An update walks `num_steps` steps in `num_lanes` environments, computes lambda-returns of the best legal actions'
    values, and goes `epochs` times through them in `minibatches` parts. Layer norms in the network keep this stable.
    Its inputs are the environment's parameters, None for the default ones. With a memory, whole unrolls are trained on,
    all steps at once, from what the lanes remembered before them, with episodes' starts inside. Several agents share
    the network; a mixer teaches it the team's mean reward (VDN, QMIX) instead of each agent's own.

    Attributes:
        env: the environment or adapter, with actions `Discrete`.
        network: of the values.
        rates: numbers.
        num_lanes: B.
        num_steps: T, of an unroll.
        epochs: times that an unroll is gone through.
        minibatches: parts of an unroll; lanes are dealt to them where there is a memory, else single steps.
        mixer: "none", "vdn" or "qmix".
        mixer_size: hidden units of QMIX.
        draw: as in `jaxpar.rollout.unroll`.
        reset: likewise; None for the exact default.
    """

    env: Any
    network: Network = Network(hidden=(128, 128), activation="relu", layer_norm=True)
    rates: PqnRates = PqnRates()
    num_lanes: int = field(32, AtLeast(1))
    num_steps: int = field(64, AtLeast(1))
    epochs: int = field(4, AtLeast(1))
    minibatches: int = field(16, AtLeast(1))
    mixer: str = field("none", OneOf(MIXERS))
    mixer_size: int = field(32, AtLeast(1))
    draw: str = "lane"
    reset: Any = None

    optimizer = make_optimizer(OptimizerConfig("radam", eps=1e-8, b2=0.999, weight_decay=0.0))
    init, axes, has_memory = begun, learner_axes, property(has_memory)

    def __post_init__(self):
        """Refuses what no learner can be."""
        check_learner(self)
        check_minibatches(self.num_steps, self.num_lanes, self.minibatches, self.has_memory)
        self.agent()

    def agent(self, greedy: bool = False) -> ActionValues:
        """The policy; if greedy, with the weights of a state as its parameters, else with `(weights, epsilon)`."""
        return ActionValues(self.env, self.network, self.mixer, self.mixer_size, greedy)

    def step(self, key: PRNGKey, state: LearnerState, inputs: PyTree) -> tuple[LearnerState, Info]:
        """Makes an update; consumes `key`."""
        agent, rates = self.agent(), state.rates
        params = self.env.default_params if inputs is None else inputs
        act_key, deal_key = jax.random.split(key)
        acting = state.weights, epsilon_at(rates, state.updates)
        lanes, steps = unroll(act_key, state.lanes, self.env, params, agent, acting, self.num_steps, value=agent.value,
                              draw=self.draw, reset=self.reset)  # fmt: skip
        masks = masks_of(self.env, lanes.state, params)
        last = jax.vmap(agent.value, (None, 0, 0, 0))(acting, lanes.obs, carried(lanes), masks)
        lesson = lambda_targets(agent, steps, last, state.lanes.carry, rates, state.gone)
        weights, opt_state, infos = descended(self, deal_key, state, lesson, q_loss)
        info, known = latest(summed_up(infos) | {"epsilon": acting[1]}, state.known, steps)
        return LearnerState(weights, opt_state, lanes, ended_by(steps), rates, state.updates + 1, known), info


def lambda_targets(
    agent: ActionValues, steps: Steps, last_value: Array, carry: PyTree, rates: Any, gone: Array | None = None
) -> Lesson:
    """Steps with what they teach: Q(lambda) targets (Gallici et al. 2024) by one scan.

        G[t] = r[t] + discount ((1 - trace) max_a Q(s[t + 1], a) + trace G[t + 1])

    with the maximum over legal actions, by the weights that acted, in place of both where a truncation or the unroll
    ends the trajectory, and 0 where the process terminated.

    Args:
        agent: who walked.
        steps: `[T, B]`, with the policy's extras.
        last_value: of what follows them `[B]`, or `[B, N]` agents.
        carry: what lanes remembered before.
        rates: with `discount`, `trace` and `reward_scale`.
        gone: as of `marks`; a mixer's team has nobody leave.
    """
    value = steps.extras["value"]
    steps = of_team(agent, steps)
    cut, weight = marks(steps, gone if agent.mixer == "none" else None)
    last_value = last_value if agent.mixer == "none" else last_value[..., 0]
    following = next_values(value, last_value, cut, steps.bootstrap)
    target = lambda_returns(steps.reward * rates.reward_scale, following, cut, rates.discount, rates.trace)
    return Lesson(steps.obs, steps.start, steps.extras["drawn"], target, weight, carry)
