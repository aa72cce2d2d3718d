"""Policy improvement by search: a tree search says what to do, and the network that leads it learns to say the same.

AlphaZero (Silver et al. 2018, Science 362) for one player, in environments whose model is their own step.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Discrete, Environment, is_adapter, reset, step
from jaxpar.fields import AtLeast, Between, Positive, check_fields, field
from jaxpar.mesh import constrain
from jaxpar.optim import OptimizerConfig, annealed, make_optimizer
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.features import agent_obs_space
from jaxpar.rl.guided_search import Guide, GuidedSearch, Searched, guide_of, legal_actions_at
from jaxpar.rl.items import Items
from jaxpar.rl.learner import has_memory, refuse_moments
from jaxpar.rl.moments import check_obs, no_moments, with_batch
from jaxpar.rl.network import Network
from jaxpar.rl.returns import lambda_returns
from jaxpar.types import Array, Info, PRNGKey, PyTree, Scalar, UsageError

__all__ = ["AlphaZero", "AlphaZeroRates"]


@flax.struct.dataclass
class AlphaZeroRates:
    """Numbers of `AlphaZero`: floats here, float32 scalars in a state, so that a sweep is a `vmap`.

    Attributes:
        learning_rate: of Adam, at first.
        anneal: updates over which it falls to 0 in a line; 0 keeps it.
        discount: of one step.
        td_lambda: lambda of the returns that values learn: 0 trusts the next search, 1 what was played.
        value_coef: weight of the value's loss.
        max_grad_norm: gradients longer than this are shortened to it.
    """

    learning_rate: Scalar = field(1e-3, Positive())
    anneal: Scalar = field(0.0, AtLeast(0))
    discount: Scalar = field(0.97, Between(0, 1))
    td_lambda: Scalar = field(0.9, Between(0, 1))
    value_coef: Scalar = field(1.0, AtLeast(0))
    max_grad_norm: Scalar = field(1.0, AtLeast(0))


@flax.struct.dataclass
class AlphaZeroState:
    """The state of `AlphaZero`.

    Attributes:
        weights: of its network, with "moments" where observations are standardised.
        opt_state: of its optimizer.
        rates: float32 scalars; replace them to sweep.
        updates: int32 [], made so far.
        episode_stats: mean return and length of the last update's episodes, float32 [] each; NaN before the first.
    """

    weights: PyTree
    opt_state: PyTree
    rates: PyTree
    updates: Array
    episode_stats: dict[str, Array]


@flax.struct.dataclass
class Decisions:
    """What M decisions teach.

    Attributes:
        obs: `[M, ...]`.
        legal: bool `[M, A]`.
        policy: float32 `[M, A]`, the shares of visits.
        target: float32 `[M]`, the return to learn.
        weight: float32 `[M]`, 1 before an episode's end and 0 after.
    """

    obs: PyTree
    legal: Array
    policy: Array
    target: Array
    weight: Array


@dataclasses.dataclass(frozen=True)
class AlphaZero:
    """Learns by search; an `Algorithm`, a step of it an update, its inputs the environment's parameters.

    An update begins `num_envs` episodes, plays each for at most `num_steps` decisions by a search each, drawing actions
    by their visits, and makes `epochs` passes over the decisions in `minibatches`. Episodes that end leave their lane
    idle until the update is over. Cost: `num_envs x num_steps x simulations` steps of environment and network.

    Attributes:
        env: an environment of one agent with `Discrete` actions (not an adapter: a search begins in any state).
        network: of policy and value, without a memory.
        search: how a decision is made.
        rates: numbers.
        num_envs: episodes an update.
        num_steps: decisions of each, at most.
        epochs: passes.
        minibatches: of a pass.
        normalize_obs: whether observations are standardised by their running mean and deviation, which are part of the
            weights: those before an update in all of it, in the search too.
    """

    env: Environment
    network: Network | Items = Network(hidden=(256, 256), activation="relu")
    search: GuidedSearch = GuidedSearch(noise=0.25)
    rates: AlphaZeroRates = AlphaZeroRates()
    num_envs: int = field(64, AtLeast(1))
    num_steps: int = field(16, AtLeast(1))
    epochs: int = field(2, AtLeast(1))
    minibatches: int = field(4, AtLeast(1))
    normalize_obs: bool = False

    optimizer = make_optimizer(OptimizerConfig(eps=1e-8, b2=0.999, weight_decay=0.0))

    def __post_init__(self):
        """Refuses what no search can be led in."""
        check_fields(self)
        check_fields(self.rates, "rates.")
        if self.normalize_obs:
            refuse_moments(self.env, self.network)
        if is_adapter(self.env):
            raise UsageError(
                f"{self.env.name} is an adapter; a search needs an environment's parts: learn by Ppo."
            )
        agent = self.agent()
        if (
            agent.num_agents
            or not isinstance(agent.action_space, Discrete)
            or agent.action_space.shape
        ):
            raise UsageError(
                f"{self.env.name} is not of one agent with Discrete actions, as a search needs."
            )
        if has_memory(self.network):
            raise UsageError("the network has a memory; a search needs memory='none'.")
        if self.num_envs * self.num_steps % self.minibatches:
            raise UsageError(
                f"num_envs x num_steps = {self.num_envs * self.num_steps} decisions do not divide into "
                f"minibatches={self.minibatches}."
            )

    def agent(self, greedy: bool = False) -> ActorCritic:
        """The network's own policy, without search."""
        return ActorCritic(self.env, self.network, greedy=greedy)

    def init(self, key: PRNGKey, inputs: PyTree) -> AlphaZeroState:
        """Draws weights; consumes `key`."""
        weights = self.agent().init(key)
        if self.normalize_obs:
            weights["moments"] = no_moments(check_obs(self.env.name, agent_obs_space(self.env)))
        return AlphaZeroState(
            weights,
            self.optimizer.init(weights),
            jax.tree.map(jnp.float32, self.rates),
            jnp.zeros((), jnp.int32),
            {name: jnp.float32(jnp.nan) for name in ("return_mean", "length_mean")},
        )

    def axes(self) -> PyTree:
        """Logical axes of the state, which is on every device whole: episodes begin and end within an update."""
        state = jax.eval_shape(lambda: self.init(jax.random.key(0), None))
        return jax.tree.map(lambda x: (None,) * x.ndim, state)

    def guide(self, weights: PyTree) -> Guide:
        """The network's policy and value at one observation."""
        return guide_of(self.agent(), weights)

    def decide(
        self, key: PRNGKey, weights: PyTree, state: PyTree, params: PyTree, rates: PyTree = None
    ) -> Searched:
        """Searches from one state; consumes `key`. Rates are the learner's unless a state's are given."""
        rates = self.rates if rates is None else rates
        return self.search(key, self.env, state, params, self.guide(weights), rates.discount)

    def play(
        self,
        key: PRNGKey,
        weights: PyTree,
        params: PyTree,
        greedy: bool = False,
        rates: PyTree = None,
    ) -> tuple[Decisions, Info]:
        """Plays `num_envs` episodes of at most `num_steps` decisions; consumes `key`.

        Args:
            key: consumed.
            weights: of the network.
            params: the environment's.
            greedy: whether the most visited action is taken instead of one drawn by visits.
            rates: the learner's unless a state's are given.

        Returns:
            Decisions `[num_envs x num_steps]`, and means over episodes: "return_mean", "length_mean", of decisions,
            "ended", which are terminal, and "solved", which are so by a step that pays.
        """
        rates = self.rates if rates is None else rates
        first_key, key = jax.random.split(key)
        obs, state = jax.vmap(lambda key: reset(key, self.env, params))(
            jax.random.split(first_key, self.num_envs)
        )
        obs, state = jax.tree.map(_along_envs, (obs, state))
        over = jax.vmap(lambda state: jnp.asarray(self.env.terminal(state, params), bool))(state)

        def one(key: PRNGKey, state: PyTree) -> tuple:
            search_key, draw_key, step_key = jax.random.split(key, 3)
            said = self.decide(search_key, weights, state, params, rates)
            drawn = jax.random.categorical(draw_key, jnp.log(said.visits.astype(jnp.float32)))
            action = jnp.argmax(said.visits) if greedy else drawn
            return (
                said,
                legal_actions_at(self.env, state, params),
                step(step_key, self.env, state, action, params),
            )

        def decision(carry: tuple, key: PRNGKey) -> tuple:
            state, obs, over = carry
            said, legal, after = jax.vmap(one)(jax.random.split(key, self.num_envs), state)
            row = (
                obs,
                legal,
                said.visits / self.search.simulations,
                said.value,
                after.reward,
                after.terminated,
                ~over,
            )
            return (after.state, after.obs, over | after.terminated | after.truncated), row

        (_, last, over), rows = jax.lax.scan(
            decision, (state, obs, over), jax.random.split(key, self.num_steps)
        )
        obs, legal, policy, value, reward, terminated, alive = rows
        _, last_value = jax.vmap(self.guide(weights))(last, jnp.ones_like(legal[0]))
        # Of an episode that is cut, the search of what it led to, which is not played, is the bootstrap.
        done = ~jnp.concatenate([alive[1:], jnp.ones_like(alive[:1])])
        following = jnp.concatenate([value[1:], last_value[None]])
        target = lambda_returns(
            reward, jnp.where(terminated, 0.0, following), done, rates.discount, rates.td_lambda
        )
        decisions = Decisions(obs, legal, policy, target, alive.astype(jnp.float32))
        info = {
            "return_mean": jnp.mean(jnp.sum(reward * alive, 0)),
            "ended": jnp.mean(jnp.any(terminated & alive, 0).astype(jnp.float32)),
            "solved": jnp.mean(jnp.any(terminated & alive & (reward > 0), 0).astype(jnp.float32)),
            "length_mean": jnp.mean(jnp.sum(alive, 0).astype(jnp.float32)),
        }
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), decisions), info

    def step(
        self, key: PRNGKey, state: AlphaZeroState, inputs: PyTree
    ) -> tuple[AlphaZeroState, Info]:
        """Plays and learns; consumes `key`. The info is that of `play`, of `search_loss` and of the optimizer."""
        play_key, key = jax.random.split(key)
        params, rates = self.env.default_params if inputs is None else inputs, state.rates
        decisions, info = self.play(play_key, state.weights, params, rates=rates)
        agent, rate = self.agent(), annealed(rates.learning_rate, rates.anneal, state.updates)

        def gradient(carry: tuple, rows: Decisions) -> tuple:
            weights, opt_state = carry
            grads, said = jax.grad(search_loss, has_aux=True)(
                weights, agent, rows, rates.value_coef
            )
            max_norm = rates.max_grad_norm
            weights, opt_state, told = self.optimizer.update(
                grads, opt_state, weights, rate=rate, max_norm=max_norm
            )
            return (weights, opt_state), said | told

        def epoch(carry: tuple, key: PRNGKey) -> tuple:
            order = jax.random.permutation(key, len(decisions.weight)).reshape(self.minibatches, -1)
            return jax.lax.scan(lambda carry, rows: gradient(carry, jax.tree.map(lambda x: x[rows], decisions)),
                                carry, order)  # fmt: skip

        first = state.weights, state.opt_state
        (weights, opt_state), said = jax.lax.scan(epoch, first, jax.random.split(key, self.epochs))
        if self.normalize_obs:
            weights = weights | {
                "moments": with_batch(state.weights["moments"], decisions.obs, decisions.weight)
            }
        stats = {name: info[name] for name in state.episode_stats}
        said = jax.tree.map(jnp.mean, said) | {
            "skipped": jnp.sum(said["skipped"]),
            "converged": jnp.float32(1),
        }
        return AlphaZeroState(weights, opt_state, rates, state.updates + 1, stats), info | said


def search_loss(
    weights: PyTree, agent: ActorCritic, rows: Decisions, value_coef: Scalar
) -> tuple[Array, Info]:
    """`-mean(sum_a policy log p) + value_coef mean((v - G)^2)`, means by `Decisions.weight`.

    Returns:
        The loss, and its parts "policy_loss" and "value_loss".
    """
    lead = jax.tree.map(lambda x: x[None], (rows.obs, rows.legal))
    out = agent.apply(weights, lead[0], jnp.zeros((1, len(rows.weight)), bool), {}, lead[1])
    share = rows.weight / jnp.maximum(jnp.sum(rows.weight), 1)
    log_p = jax.nn.log_softmax(out.policy[0])
    policy = -jnp.sum(share * jnp.sum(rows.policy * log_p, -1))
    value = jnp.sum(share * (out.value[0] - rows.target) ** 2)
    return policy + value_coef * value, {"policy_loss": policy, "value_loss": value}


def _along_envs(x: Array) -> Array:
    """Episodes of their own on every device."""
    return constrain(x, "envs", *(None,) * (x.ndim - 1))
