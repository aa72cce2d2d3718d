"""Proximal policy optimisation, and with several agents IPPO and MAPPO."""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.collect import Batch, check_minibatches, collect, epochs, latest
from jaxpar.rl.distributions import entropy, log_prob
from jaxpar.rl.network import Network
from jaxpar.rl.optimizer import Optimizer
from jaxpar.rollout import Lanes, begin
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = ["LearnerState", "Ppo", "PpoRates", "ppo_loss"]


@flax.struct.dataclass
class PpoRates:
    """Numbers of PPO: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Attributes:
        learning_rate: of Adam, at first.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of a step.
        trace: lambda of the advantages.
        clip: how far the ratio, and the value, may usefully move from what they were.
        value: weight of the value's loss.
        entropy: weight of the policy's entropy.
        max_grad_norm: gradients longer than this are shortened to it.
        reward_scale: what rewards are multiplied by before anything is learned from them.
    """

    learning_rate: Any = 2.5e-4
    anneal: Any = 0.0
    discount: Any = 0.99
    trace: Any = 0.95
    clip: Any = 0.2
    value: Any = 0.5
    entropy: Any = 0.01
    max_grad_norm: Any = 0.5
    reward_scale: Any = 1.0


@flax.struct.dataclass
class LearnerState:
    """Where a learner stands.

    Attributes:
        weights: of its network.
        opt_state: of its optimizer.
        lanes: its environments.
        rates: float32 scalars; replace them to sweep.
        updates: int32 [], made so far.
        known: how the last episodes went, float32 [] each.
    """

    weights: PyTree
    opt_state: PyTree
    lanes: Lanes
    rates: PyTree
    updates: Array
    known: dict[str, Array]


@dataclasses.dataclass(frozen=True)
class Ppo:
    """Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347); an `Algorithm`, a step of it an update.

    An update walks `num_steps` steps in `num_lanes` environments, computes generalised advantages, and goes `epochs`
    times through them in `minibatches` parts. Its inputs are the environment's parameters, None for the default ones.
    With a memory, whole unrolls are trained on, all steps at once, from what the lanes remembered before them, with
    episodes' starts inside. Several agents share the network (IPPO); `central` gives them MAPPO's critic.

    Attributes:
        env: the environment or adapter.
        network: of policy and value.
        rates: numbers.
        num_lanes: B.
        num_steps: T, of an unroll.
        epochs: times that an unroll is gone through.
        minibatches: parts of an unroll; lanes are dealt to them where there is a memory, else single steps.
        central: whether the value reads all agents' observations.
        draw: as in `jaxpar.rollout.unroll`.
        reset: likewise; None for the exact default.
    """

    env: Any
    network: Network = Network()
    rates: PpoRates = PpoRates()
    num_lanes: int = 4
    num_steps: int = 128
    epochs: int = 4
    minibatches: int = 4
    central: bool = False
    draw: str = "batch"
    reset: Any = None

    def __post_init__(self):
        """Refuses what no learner can be."""
        for name in ("num_lanes", "num_steps", "epochs"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name}={getattr(self, name)} must be at least 1.")
        check_minibatches(self.num_steps, self.num_lanes, self.minibatches, self.has_memory)
        self.agent()

    @functools.cached_property
    def has_memory(self) -> bool:
        """Whether unrolls must stay whole."""
        return self.network.remembers() is not None

    def agent(self, greedy: bool = False) -> ActorCritic:
        """The policy, for `jaxpar.rollout.unroll` and `evaluate`, with the weights of a state as its parameters."""
        return ActorCritic(self.env, self.network, self.central, greedy)

    def init(self, key: PRNGKey, inputs: PyTree) -> LearnerState:
        """Draws weights and begins an episode in every lane; consumes `key`."""
        return begun(key, self, self._optimizer(), inputs)

    def step(self, key: PRNGKey, state: LearnerState, inputs: PyTree) -> tuple[LearnerState, Info]:
        """Makes an update; consumes `key`."""
        agent, rates, optimizer = self.agent(), state.rates, self._optimizer()
        params = self.env.default_params if inputs is None else inputs
        act_key, deal_key = jax.random.split(key)
        lanes, batch, steps = collect(act_key, state.lanes, agent, params, state.weights, rates, self.num_steps,
                                      draw=self.draw, reset=self.reset)  # fmt: skip
        rate = optimizer.annealed(rates, state.updates)

        def update(carry, part: Batch):
            weights, opt_state = carry
            grads, info = jax.grad(ppo_loss, has_aux=True)(weights, agent, part, rates)
            weights, opt_state, norm = optimizer.update(weights, opt_state, grads, rate, rates.max_grad_norm)
            return (weights, opt_state), info | {"grad_norm": norm}

        (weights, opt_state), infos = epochs(
            deal_key, (state.weights, state.opt_state), batch, update, self.epochs, self.minibatches, self.has_memory
        )
        first_ratio = infos["ratio_error"][0, 0]
        info = jax.tree.map(jnp.mean, infos) | {"ratio_error": first_ratio, "learning_rate": rate}
        info["converged"] = jnp.min(infos["converged"])
        info["explained"] = _explained(batch)
        info, known = latest(info, state.known, steps)
        return LearnerState(weights, opt_state, lanes, rates, state.updates + 1, known), info

    def axes(self) -> LearnerState:
        """Logical axes of the state: lanes are split by the rule of "envs", the rest is on every device."""
        return learner_axes(self)

    def _optimizer(self) -> Optimizer:
        return Optimizer("adam", eps=1e-5)


def begun(key: PRNGKey, learner: Any, optimizer: Optimizer, inputs: PyTree) -> LearnerState:
    """The first state of a learner with `agent()`, `env`, `num_lanes`, `draw` and `rates`; consumes `key`."""
    params = learner.env.default_params if inputs is None else inputs
    weights_key, lanes_key = jax.random.split(key)
    agent = learner.agent()
    weights = agent.init(weights_key)
    nothing_known = {name: jnp.float32(jnp.nan) for name in ("return_mean", "length_mean")}
    return LearnerState(
        weights=weights,
        opt_state=optimizer.init(weights),
        lanes=begin(lanes_key, learner.env, params, learner.num_lanes, agent.first_carry(), draw=learner.draw),
        rates=jax.tree.map(jnp.float32, learner.rates),
        updates=jnp.int32(0),
        known=nothing_known,
    )


def learner_axes(learner: Any) -> Any:
    """Logical axes of a learner's state."""
    state = jax.eval_shape(lambda: learner.init(jax.random.key(0), None))

    def named(path, leaf):
        names = [getattr(entry, "name", None) for entry in path[:2]]
        split = names[0] == "lanes" and names[1] not in ("first_carry", "step")
        return (("envs",) if split else (None,)) + (None,) * (leaf.ndim - 1) if leaf.ndim else ()

    return jax.tree_util.tree_map_with_path(named, state)


def ppo_loss(weights: PyTree, agent: ActorCritic, batch: Batch, rates: PpoRates) -> tuple[Array, Info]:
    """The clipped surrogate (eq. 7), the clipped value loss, and the entropy, of a batch; means over what counts.

        ratio = exp(log_prob - old)    L = mean(-min(ratio A, clip(ratio, 1 - c, 1 + c) A))
        V = mean(max((v - G)^2, (old_v + clip(v - old_v, -c, c) - G)^2)) / 2
        loss = L + value V - entropy H

    with advantages A of mean 0 and deviation 1 in the batch.

    Returns:
        The loss, and of its parts: "policy_loss", "value_loss", "entropy", "approx_kl" (mean of ratio - 1 - log ratio),
        "clipped" (share of ratios beyond the clip), "ratio_error" (largest |ratio - 1|), "converged".
    """
    said = agent.answers(weights, batch.obs, batch.start, batch.carry, batch.action_mask)
    share = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)

    def mean(x):
        return jnp.sum(share * x)

    centred = batch.advantage - mean(batch.advantage)
    advantage = centred / (jnp.sqrt(mean(centred**2)) + 1e-8)
    log_ratio = log_prob(agent.space, said.policy, batch.drawn) - batch.log_prob
    ratio = jnp.exp(log_ratio)
    policy = -mean(jnp.minimum(ratio * advantage, jnp.clip(ratio, 1 - rates.clip, 1 + rates.clip) * advantage))
    near = batch.value + jnp.clip(said.value - batch.value, -rates.clip, rates.clip)
    value = 0.5 * mean(jnp.maximum((said.value - batch.target) ** 2, (near - batch.target) ** 2))
    spread = mean(entropy(agent.space, said.policy))
    info = {
        "policy_loss": policy,
        "value_loss": value,
        "entropy": spread,
        "approx_kl": mean(ratio - 1 - log_ratio),
        "clipped": mean((jnp.abs(ratio - 1) > rates.clip).astype(jnp.float32)),
        "ratio_error": jnp.max(batch.weight * jnp.abs(ratio - 1)),
        "converged": said.converged.astype(jnp.float32),
    }
    return policy + rates.value * value - rates.entropy * spread, info


def _explained(batch: Batch) -> Array:
    """The share of the returns' variance that the values foresaw: 1 at best."""
    share = batch.weight / jnp.maximum(jnp.sum(batch.weight), 1)
    left, whole = batch.target - batch.value, batch.target - jnp.sum(share * batch.target)
    left = left - jnp.sum(share * left)
    return 1 - jnp.sum(share * left**2) / jnp.maximum(jnp.sum(share * whole**2), 1e-8)
