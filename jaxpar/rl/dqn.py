"""Q-learning from a replay buffer, with a target network."""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.fields import AtLeast, Between, Finite, OneOf, Positive, field
from jaxpar.optim import OptimizerConfig, annealed, make_optimizer
from jaxpar.rl.action_values import ActionValues, Lesson, epsilon_at, masks_of, of_team, q_loss
from jaxpar.rl.buffer import Buffer, add, empty, sample
from jaxpar.rl.collect import ended_by, latest, marks
from jaxpar.rl.learner import LearnerState, begun, check_learner, has_memory, learner_axes, summed_up
from jaxpar.rl.mixers import MIXERS
from jaxpar.rl.network import Network
from jaxpar.rl.returns import n_step_returns
from jaxpar.rollout import Chunked, Lanes, NextStep, Steps, unroll
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = ["Dqn", "DqnRates", "DqnState", "Experience", "experiences", "taught"]


@flax.struct.dataclass
class DqnRates:
    """Numbers of DQN: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Attributes:
        learning_rate: of Adam, at first.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of a step.
        epsilon: share of random actions, at first.
        last_epsilon: and in the end.
        explore: updates over which it gets there, in a line.
        target: how far the target network goes to the online one each time that it goes: 1 copies it (with
            `Dqn.target_period` gradients between), a small one averages (with a period of 1).
        max_grad_norm: gradients longer than this are shortened to it.
        reward_scale: what rewards are multiplied by before anything is learned from them.
    """

    learning_rate: Any = field(2.5e-4, Positive())
    anneal: Any = field(0.0, AtLeast(0))
    discount: Any = field(0.99, Between(0, 1))
    epsilon: Any = field(1.0, Between(0, 1))
    last_epsilon: Any = field(0.05, Between(0, 1))
    explore: Any = field(500.0, AtLeast(0))
    target: Any = field(1.0, Between(0, 1))
    max_grad_norm: Any = field(10.0, AtLeast(0))
    reward_scale: Any = field(1.0, Finite())


@flax.struct.dataclass
class Experience:
    """What happened in up to n steps; `[*L, (N), ...]`, numbers without N where a mixer makes agents a team.

    Attributes:
        obs: what was seen.
        drawn: what was done, int32.
        reward: discounted sum of the steps' rewards.
        discount: of the value of what they led to: 0 where the process terminated.
        next_obs: what they led to; the last observation of an episode that was truncated.
        next_mask: legal actions there, or None.
        weight: float32, 1 where it counts.
    """

    obs: PyTree
    drawn: Array
    reward: Array
    discount: Array
    next_obs: PyTree
    next_mask: Array | None
    weight: Array


@flax.struct.dataclass
class DqnState(LearnerState):
    """A learner's state, with its memory of the past.

    Attributes:
        target: weights of the target network.
        buffer: of `Experience` rows; on a mesh, whole on every device.
        gradients: int32 [], gradient steps made.
    """

    target: PyTree
    buffer: Buffer
    gradients: Array


@dataclasses.dataclass(frozen=True)
class Dqn:
    """Deep Q-learning (Mnih et al. 2015, doi:10.1038/nature14236, algorithm 1); an `Algorithm`, a step of it an update.

    An update walks `num_steps` steps in `num_lanes` environments, keeps them in a ring of `capacity` experiences on the
    device, and makes `gradients` gradient steps on batches drawn from it. Finished lanes spend a step on their last
    observation (`NextStep`), so that what a step led to is always what is seen next; those steps are not kept. Several
    agents share the network; with a mixer they are taught the team's mean reward (VDN, QMIX).

    Attributes:
        env: the environment or adapter, with actions `Discrete`.
        network: of the values, without a memory.
        rates: numbers.
        num_lanes: B.
        num_steps: T, of an unroll.
        gradients: gradient steps after each.
        batch_size: experiences a gradient step.
        capacity: experiences that are kept.
        warmup: experiences before anything is learned.
        n_step: rewards that a target sums, fewer where an episode or the unroll ends.
        double: whether the online network chooses the action that the target network values (van Hasselt et al. 2016,
            arXiv:1509.06461, eq. 4).
        target_period: gradient steps between moves of the target network.
        mixer: "none", "vdn" or "qmix".
        mixer_size: hidden units of QMIX.
        draw: as in `jaxpar.rollout.unroll`.
        reset: where new episodes begin: `NextStep`'s `by`; None for the exact default.
    """

    env: Any
    network: Network = Network(hidden=(120, 84), activation="relu", layer_norm=True)
    rates: DqnRates = DqnRates()
    num_lanes: int = field(8, AtLeast(1))
    num_steps: int = field(16, AtLeast(1))
    gradients: int = field(16, AtLeast(1))
    batch_size: int = field(128, AtLeast(1))
    capacity: int = field(65536, AtLeast(1))
    warmup: int = field(4096, AtLeast(0))
    n_step: int = field(3, AtLeast(1))
    double: bool = True
    target_period: int = field(100, AtLeast(1))
    mixer: str = field("none", OneOf(MIXERS))
    mixer_size: int = field(32, AtLeast(1))
    draw: str = "lane"
    reset: Any = None

    optimizer = make_optimizer(OptimizerConfig(eps=1e-8, b2=0.999, weight_decay=0.0))
    axes = learner_axes

    def __post_init__(self):
        """Refuses what no learner can be."""
        check_learner(self)
        least = max(self.num_lanes * self.num_steps, self.warmup)
        if self.capacity < least:
            raise UsageError(
                f"capacity={self.capacity} is too small: it must hold an update's {self.num_lanes * self.num_steps} "
                f"steps and the warmup={self.warmup}; the least is {least}."
            )
        if has_memory(self):
            raise UsageError(
                f"memory={self.network.memory!r} has no place in a buffer of single experiences: give memory='none', "
                "or learn with Pqn."
            )
        self.agent()

    def agent(self, greedy: bool = False) -> ActionValues:
        """The policy; if greedy, with the weights of a state as its parameters, else with `(weights, epsilon)`."""
        return ActionValues(self.env, self.network, self.mixer, self.mixer_size, greedy)

    def init(self, key: PRNGKey, inputs: PyTree) -> DqnState:
        """Draws weights and begins an episode in every lane; consumes `key`."""
        first = begun(self, key, inputs)
        params = self.env.default_params if inputs is None else inputs
        acting = first.weights, jnp.float32(1)
        found = jax.eval_shape(lambda key: self._walk(key, first, acting, params)[2], key)
        row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), found)
        return DqnState(
            **vars(first),
            target=jax.tree.map(jnp.copy, first.weights),
            buffer=empty(row, self.capacity),
            gradients=jnp.int32(0),
        )

    def step(self, key: PRNGKey, state: DqnState, inputs: PyTree) -> tuple[DqnState, Info]:
        """Makes an update; consumes `key`. Until something is learned, what is known of learning is NaN."""
        params = self.env.default_params if inputs is None else inputs
        act_key, learn_key = jax.random.split(key)
        epsilon = epsilon_at(state.rates, state.updates)
        lanes, steps, found = self._walk(act_key, state, (state.weights, epsilon), params)
        found = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)
        keep = jnp.any(found.weight.reshape(len(found.weight), -1) > 0, -1)
        buffer = add(state.buffer, found, keep)
        rate = annealed(state.rates.learning_rate, state.rates.anneal, state.updates)
        learned = state.weights, state.opt_state, state.target, state.gradients

        def gradient(learned, key):
            return self._gradient(learned, sample(key, buffer, self.batch_size), state.rates, rate)

        keys = jax.random.split(learn_key, self.gradients)
        unknown = jax.eval_shape(gradient, learned, keys[0])[1]
        idle = {"converged": 1.0, "skipped": 0.0}
        waiting = {name: jnp.full(self.gradients, idle.get(name, jnp.nan)) for name in unknown}
        (weights, opt_state, target, gradients), infos = jax.lax.cond(
            buffer.size >= self.warmup, lambda: jax.lax.scan(gradient, learned, keys), lambda: (learned, waiting)
        )
        info = summed_up(infos) | {"learning_rate": rate, "epsilon": epsilon}
        info["stored"] = buffer.size.astype(jnp.float32)
        info, known = latest(info, state.known, steps)
        now = dataclasses.replace(
            state,
            weights=weights,
            opt_state=opt_state,
            target=target,
            gradients=gradients,
            buffer=buffer,
            lanes=lanes,
            gone=ended_by(steps),
            updates=state.updates + 1,
            known=known,
        )
        return now, info

    def _walk(self, key, state, acting, params) -> tuple[Lanes, Steps, Experience]:
        agent, reset = self.agent(), NextStep(Chunked() if self.reset is None else self.reset)
        lanes, steps = unroll(key, state.lanes, self.env, params, agent, acting, self.num_steps, draw=self.draw,
                              reset=reset)  # fmt: skip
        masks = masks_of(self.env, lanes.state, params)
        found = experiences(agent, steps, lanes.obs, masks, state.rates, self.n_step, state.gone)
        return lanes, steps, found

    def _gradient(self, learned, rows: Experience, rates, rate) -> tuple[tuple, Info]:
        agent, optimizer = self.agent(), self.optimizer
        weights, opt_state, target, gradients = learned
        lesson = taught(agent, weights, target, rows, self.double)
        grads, info = jax.grad(q_loss, has_aux=True)(weights, agent, lesson)
        weights, opt_state, said = optimizer.update(grads, opt_state, weights, rate=rate, max_norm=rates.max_grad_norm)
        gradients = gradients + 1
        share = jnp.where(gradients % self.target_period == 0, rates.target, 0.0)
        target = jax.tree.map(lambda old, new: (1 - share) * old + share * new, target, weights)
        return (weights, opt_state, target, gradients), info | said


def experiences(
    agent: ActionValues,
    steps: Steps,
    last_obs: PyTree,
    last_mask: Array | None,
    rates: Any,
    num_steps: int,
    gone: Array | None = None,
) -> Experience:
    """What each step of an unroll led to within `num_steps` steps, fewer where an episode or the unroll ends.

        reward = r[t] + discount r[t + 1] + ... + discount^(m - 1) r[t + m - 1],    next_obs = obs[t + m]

    Args:
        agent: who walked.
        steps: `[T, B]`, walked with `NextStep`: what a step led to is what the next one saw, also at an episode's end.
        last_obs: what is seen after them `[B, ...]`.
        last_mask: legal actions there, or None.
        rates: with `discount` and `reward_scale`.
        num_steps: n.
        gone: as of `marks`; a mixer's team has nobody leave.
    """
    obs, drawn, mask = steps.obs, steps.extras["drawn"], steps.extras.get("action_mask")
    steps = of_team(agent, steps)
    cut, weight = marks(steps, gone if agent.mixer == "none" else None)
    nothing, going = jnp.zeros_like(steps.reward), (~steps.terminated).astype(jnp.float32)
    reward = n_step_returns(steps.reward * rates.reward_scale, nothing, cut, rates.discount, num_steps)
    discount = n_step_returns(nothing, going, cut, rates.discount, num_steps)
    after = jnp.broadcast_to(jnp.arange(1.0, len(cut) + 1).reshape(-1, *[1] * (cut.ndim - 1)), cut.shape)
    # By agent: one that was cut alone was led to what it saw then, not to what others have still to see.
    led_to = n_step_returns(jnp.zeros_like(after), after, cut, 1.0, num_steps).astype(jnp.int32)

    def then(x, last):
        return jnp.concatenate([x, last[None]])[led_to, *jnp.indices(cut.shape, sparse=True)[1:]]

    next_mask = None if mask is None else then(mask, last_mask)
    return Experience(obs, drawn, reward, discount, jax.tree.map(then, obs, last_obs), next_mask, weight)


def taught(agent: ActionValues, weights: PyTree, target: PyTree, rows: Experience, double: bool) -> Lesson:
    """Experiences `[M]` with their targets, as a lesson `[1, M]`.

        target = reward + discount Q'(s', argmax_a Q''(s', a))

    over legal actions, with Q' by the `target` weights, and Q'' by the online ones if `double`, else by `target` too.
    """
    start = jnp.zeros((1, *rows.weight.shape[:1]), bool)
    rows = jax.tree.map(lambda x: x[None], rows)
    carry = jax.tree.map(lambda x: jnp.broadcast_to(x, (start.size, *x.shape)), agent.first_carry())
    valued = agent.estimates(target, rows.next_obs, start, carry, rows.next_mask).q
    chosen = agent.estimates(weights, rows.next_obs, start, carry, rows.next_mask).q if double else valued
    best = jnp.take_along_axis(valued, jnp.argmax(chosen, -1)[..., None], -1)[..., 0]
    value = agent.joined(target, rows.next_obs, best)
    return Lesson(rows.obs, start, rows.drawn, rows.reward + rows.discount * value, rows.weight, carry)
