"""Policy improvement by search: a tree search says what to do, and the network that leads it learns to say the same.

AlphaZero (Silver et al. 2018, Science 362) for one player, in environments whose model is their own step.
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Discrete, Environment, is_adapter, reset, step
from jaxpar.fields import AtLeast, Between, Positive, check_fields, field
from jaxpar.optim import OptimizerConfig, make_optimizer
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.guided_search import Guide, GuidedSearch, Searched, legal_actions_at
from jaxpar.rl.network import Network
from jaxpar.rl.returns import lambda_returns
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = ["AlphaZero"]


@flax.struct.dataclass
class AlphaZeroState:
    """Weights, the optimizer's state, and `updates`, int32 `[]`."""

    weights: PyTree
    opt_state: PyTree
    updates: Array


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
        learning_rate: of Adam.
        discount: of one step.
        trace: lambda of the returns that values learn: 0 trusts the next search, 1 what was played.
        value_coef: weight of the value's loss.
        num_envs: episodes an update.
        num_steps: decisions of each, at most.
        epochs: passes.
        minibatches: of a pass.
    """

    env: Environment
    network: Network = Network(hidden=(256, 256), activation="relu")
    search: GuidedSearch = GuidedSearch(noise=0.25)
    learning_rate: float = field(1e-3, Positive())
    discount: float = field(0.97, Between(0, 1))
    trace: float = field(0.9, Between(0, 1))
    value_coef: float = field(1.0, AtLeast(0))
    num_envs: int = field(64, AtLeast(1))
    num_steps: int = field(16, AtLeast(1))
    epochs: int = field(2, AtLeast(1))
    minibatches: int = field(4, AtLeast(1))

    optimizer = make_optimizer(OptimizerConfig(eps=1e-8, b2=0.999, weight_decay=0.0))

    def __post_init__(self):
        """Refuses what no search can be led in."""
        check_fields(self)
        if is_adapter(self.env):
            raise UsageError(f"{self.env.name} is an adapter; a search needs an environment's parts: learn by Ppo.")
        agent = self.agent()
        if agent.num_agents or not isinstance(agent.action_space, Discrete) or agent.action_space.shape:
            raise UsageError(f"{self.env.name} is not of one agent with Discrete actions, as a search needs.")
        if self.network.memory_layer() is not None:
            raise UsageError(f"the network has memory={self.network.memory!r}; a search needs memory='none'.")
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
        return AlphaZeroState(weights, self.optimizer.init(weights), jnp.zeros((), jnp.int32))

    def guide(self, weights: PyTree) -> Guide:
        """The network's policy and value at one observation."""
        agent = self.agent()

        def guess(obs: PyTree, legal: Array) -> tuple[Array, Array]:
            out = agent.apply(weights, _lead(obs), jnp.zeros((1, 1), bool), {}, _lead(legal))
            return jax.nn.softmax(out.policy[0, 0]) * legal, out.value[0, 0]

        return guess

    def decide(self, key: PRNGKey, weights: PyTree, state: PyTree, params: PyTree) -> Searched:
        """Searches from one state; consumes `key`."""
        return self.search(key, self.env, state, params, self.guide(weights), self.discount)

    def play(self, key: PRNGKey, weights: PyTree, params: PyTree, greedy: bool = False) -> tuple[Decisions, Info]:
        """Plays `num_envs` episodes of at most `num_steps` decisions; consumes `key`.

        Args:
            key: consumed.
            weights: of the network.
            params: the environment's.
            greedy: whether the most visited action is taken instead of one drawn by visits.

        Returns:
            Decisions `[num_envs x num_steps]`, and "return", "ended" (share of terminal episodes), "length".
        """
        first_key, key = jax.random.split(key)
        obs, state = jax.vmap(lambda key: reset(key, self.env, params))(jax.random.split(first_key, self.num_envs))
        over = jax.vmap(lambda state: jnp.asarray(self.env.terminal(state, params), bool))(state)

        def one(key: PRNGKey, state: PyTree) -> tuple:
            search_key, draw_key, step_key = jax.random.split(key, 3)
            said = self.decide(search_key, weights, state, params)
            drawn = jax.random.categorical(draw_key, jnp.log(said.visits.astype(jnp.float32)))
            action = jnp.argmax(said.visits) if greedy else drawn
            return said, legal_actions_at(self.env, state, params), step(step_key, self.env, state, action, params)

        def decision(carry: tuple, key: PRNGKey) -> tuple:
            state, obs, over = carry
            said, legal, after = jax.vmap(one)(jax.random.split(key, self.num_envs), state)
            row = (obs, legal, said.visits / self.search.simulations, said.value, after.reward, after.terminated, ~over)
            return (after.state, after.obs, over | after.terminated | after.truncated), row

        (_, last, over), rows = jax.lax.scan(decision, (state, obs, over), jax.random.split(key, self.num_steps))
        obs, legal, policy, value, reward, terminated, alive = rows
        _, last_value = jax.vmap(self.guide(weights))(last, jnp.ones_like(legal[0]))
        # Of an episode that is cut, the search of what it led to, which is not played, is the bootstrap.
        done = ~jnp.concatenate([alive[1:], jnp.ones_like(alive[:1])])
        following = jnp.concatenate([value[1:], last_value[None]])
        target = lambda_returns(reward, jnp.where(terminated, 0.0, following), done, self.discount, self.trace)
        decisions = Decisions(obs, legal, policy, target, alive.astype(jnp.float32))
        info = {
            "return": jnp.mean(jnp.sum(reward * alive, 0)),
            "ended": jnp.mean(jnp.any(terminated & alive, 0).astype(jnp.float32)),
            "solved": jnp.mean(jnp.any(terminated & alive & (reward > 0), 0).astype(jnp.float32)),
            "length": jnp.mean(jnp.sum(alive, 0).astype(jnp.float32)),
        }
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), decisions), info

    def step(self, key: PRNGKey, state: AlphaZeroState, inputs: PyTree) -> tuple[AlphaZeroState, Info]:
        """Plays and learns; consumes `key`. The info is that of `play` and `search_loss`."""
        play_key, key = jax.random.split(key)
        decisions, info = self.play(play_key, state.weights, inputs)
        agent, rate = self.agent(), jnp.float32(self.learning_rate)

        def gradient(carry: tuple, rows: Decisions) -> tuple:
            weights, opt_state = carry
            grads, said = jax.grad(search_loss, has_aux=True)(weights, agent, rows, self.value_coef)
            weights, opt_state, _ = self.optimizer.update(grads, opt_state, weights, rate=rate)
            return (weights, opt_state), said

        def epoch(carry: tuple, key: PRNGKey) -> tuple:
            order = jax.random.permutation(key, len(decisions.weight)).reshape(self.minibatches, -1)
            return jax.lax.scan(lambda carry, rows: gradient(carry, jax.tree.map(lambda x: x[rows], decisions)),
                                carry, order)  # fmt: skip

        learned, said = jax.lax.scan(epoch, (state.weights, state.opt_state), jax.random.split(key, self.epochs))
        said = jax.tree.map(jnp.mean, said)
        return AlphaZeroState(*learned, state.updates + 1), info | said


def search_loss(weights: PyTree, agent: ActorCritic, rows: Decisions, value_coef: float) -> tuple[Array, Info]:
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


def _lead(tree: PyTree) -> PyTree:
    """With axes of one step and one environment."""
    return jax.tree.map(lambda x: x[None, None], tree)
