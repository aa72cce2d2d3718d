"""Self-play: a learner against its own past, of which a pool holds the weights."""

import dataclasses
from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Discrete, Environment, Space, capabilities, is_adapter
from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.rl.agent import ActorCritic
from jaxpar.rl.features import of_one_agent
from jaxpar.rl.guided_search import legal_actions_at
from jaxpar.rl.learner import ActorCriticLearner, LearnerState, has_memory
from jaxpar.rl.network import Network
from jaxpar.types import Array, Info, PRNGKey, PyTree, UsageError

__all__ = ["Against", "SelfPlay"]


@flax.struct.dataclass
class Match:
    """Numbers of `Against`.

    Attributes:
        env: parameters of the game.
        rival: weights by which all others act; None: they act by chance, over what their masks allow.
    """

    env: PyTree
    rival: PyTree = None


@flax.struct.dataclass
class Played:
    """A state of `Against`: of the game, and the actions `[N]` that led to it."""

    game: PyTree
    actions: Array


@dataclasses.dataclass(frozen=True)
class Against:
    """A game of several as an environment of one, whose others act by given weights; an `Environment`.

    Attributes:
        game: of N agents, all with the same actions.
        network: of the others, without a memory; its weights are the parameters' `rival`, those of `agent()`.
        seat: which agent plays; others take the rest.
    """

    game: Environment
    network: Network = Network()
    seat: int = field(0, AtLeast(0))

    def __post_init__(self) -> None:
        """Refuses games of one, seats that are not there, and rivals that remember."""
        check_fields(self)
        if is_adapter(self.game):
            raise UsageError(f"{self.game.name} is an adapter; self-play needs a game's parts.")
        count = capabilities(self.game).num_agents or 1
        if count < 2:
            raise UsageError(
                f"{self.game.name} has one agent; self-play needs a game of two or more."
            )
        if self.seat >= count:
            raise UsageError(
                f"seat={self.seat} is none of {self.game.name}'s; legal are 0 to {count - 1}."
            )
        actions = of_one_agent(self.game.action_space(self.game.default_params), count)
        if not isinstance(actions, Discrete) or actions.shape:
            raise UsageError(
                f"{self.game.name} takes actions of {actions}; self-play draws them from one Discrete each."
            )
        if has_memory(self.network):
            raise UsageError(
                "rivals carry no memory from step to step; give a network without one."
            )

    @property
    def name(self) -> str:
        """That of the game."""
        return f"{self.game.name} (self-play)"

    @property
    def default_params(self) -> Match:
        """The game's, and rivals who act by chance."""
        return Match(self.game.default_params)

    @property
    def _count(self) -> int:
        return capabilities(self.game).num_agents or 1

    def agent(self) -> ActorCritic:
        """The rivals' policy."""
        return ActorCritic(self, self.network)

    def observation_space(self, params: Match) -> Space:
        """Of one agent."""
        return of_one_agent(self.game.observation_space(params.env), self._count)

    def action_space(self, params: Match) -> Space:
        """Of one agent."""
        return of_one_agent(self.game.action_space(params.env), self._count)

    def init(self, key: PRNGKey, params: Match) -> Played:
        """Draws the game's first state; consumes `key`."""
        shape = self.game.action_space(params.env).sample(jax.random.key(0))
        return Played(self.game.init(key, params.env), jax.tree.map(jnp.zeros_like, shape))

    def transition(self, key: PRNGKey, state: Played, action: Array, params: Match) -> Played:
        """Draws the others' actions and the game's next state; consumes `key`."""
        see, act, move = jax.random.split(key, 3)
        actions = self._all_actions(see, act, state, params).at[self.seat].set(action)
        return Played(self.game.transition(move, state.game, actions, params.env), actions)

    def observe(self, key: PRNGKey, state: Played, action: Array | None, params: Match) -> PyTree:
        """Draws what this agent sees; consumes `key`."""
        seen = self.game.observe(
            key, state.game, None if action is None else state.actions, params.env
        )
        return jax.tree.map(lambda x: x[self.seat], seen)

    def reward(self, state: Played, action: Array, next_state: Played, params: Match) -> Array:
        """This agent's."""
        return self.game.reward(state.game, next_state.actions, next_state.game, params.env)[
            self.seat
        ]

    def terminal(self, state: Played, params: Match) -> Array:
        """Whether it has ended for this agent."""
        return self.game.terminal(state.game, params.env)[self.seat]

    def truncated(self, state: Played, params: Match) -> Array:
        """Whether it is cut for this agent."""
        cut = capabilities(self.game).truncated
        return jnp.zeros((), bool) if cut is None else cut(state.game, params.env)[self.seat]

    def action_mask(self, state: Played, params: Match) -> Array:
        """Bool `[A]`, this agent's legal actions."""
        return legal_actions_at(self.game, state.game, params.env)[self.seat]

    @property
    def render(self) -> Callable[[Played, Match], Array]:
        """The game's picture, `(state, params) -> uint8 [H, W, 3]`; an AttributeError where it has none."""
        picture = capabilities(self.game).render
        if picture is None:
            raise AttributeError(f"{self.game.name} has no render")
        return lambda state, params: picture(state.game, params.env)

    def _all_actions(self, see: PRNGKey, act: PRNGKey, state: Played, params: Match) -> Array:
        """What every agent does by the rivals' weights; of this agent's too, which is not asked for."""
        masks = legal_actions_at(self.game, state.game, params.env)
        keys = jax.random.split(act, self._count)
        if params.rival is None:
            logits = jnp.where(masks, 0.0, -jnp.inf)
            return jax.vmap(jax.random.categorical)(keys, logits).astype(state.actions.dtype)
        agent = self.agent()
        # What the last actions were, a rival is not told in the first step.
        seen = self.game.observe(see, state.game, state.actions, params.env)
        carry = agent.first_carry()
        drawn = jax.vmap(lambda key, obs, mask: agent(key, params.rival, obs, carry, mask)[0])(
            keys, seen, masks
        )
        return drawn.astype(state.actions.dtype)


@flax.struct.dataclass
class SelfPlayState:
    """The state of `SelfPlay`.

    Attributes:
        learner: of the learner.
        pool: weights `[K, ...]`, of which the first `filled` are its past, in a ring.
        filled: int32 [], how many were ever put in, the first ones before any update.
    """

    learner: LearnerState
    pool: PyTree
    filled: Array

    @property
    def weights(self) -> PyTree:
        """The learner's."""
        return self.learner.weights


@dataclasses.dataclass(frozen=True)
class SelfPlay:
    """A learner whose rivals are drawn from its own past, one for each update; an `Algorithm`, a step of it an update.

    With `newest` 0 rivals are uniform over the pool: fictitious self-play by sampled weights (Heinrich, Lanctot and
    Silver 2015; neural in arXiv:1603.01121), which in a game of two with opposed rewards approaches an equilibrium on
    the pool's average, not in its last weights. With 1 the learner plays its own weights of the last `period` updates,
    which in games like rock, paper, scissors may go in circles. Costs what the learner does and K copies of weights.

    Attributes:
        learner: `Ppo` or `A2c`, in an `Against` with the same network.
        pool: K, how many past weights are kept.
        period: updates between two that are put in.
        newest: probability that the rival is the one put in last; else it is uniform over the pool.
    """

    learner: ActorCriticLearner
    pool: int = field(16, AtLeast(1))
    period: int = field(1, AtLeast(1))
    newest: float = field(0.0, Between(0, 1))

    def __post_init__(self) -> None:
        """Refuses learners that could not play themselves."""
        check_fields(self)
        env = self.learner.env
        if not isinstance(env, Against):
            raise UsageError(
                f"self-play needs an env that is `Against(game, network)`, not {type(env).__name__}."
            )
        if env.network != self.learner.network:
            raise UsageError(
                "the learner and its rivals have the same weights: give `Against` the learner's network."
            )

    def init(self, key: PRNGKey, inputs: PyTree) -> SelfPlayState:
        """Draws weights, whose copy is the first rival; consumes `key`. Inputs: the game's parameters, or None."""
        state = self.learner.init(key, self._match(inputs, None))
        pool = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (self.pool, *jnp.shape(x))), state.weights
        )
        return SelfPlayState(state, pool, jnp.int32(1))

    def step(
        self, key: PRNGKey, state: SelfPlayState, inputs: PyTree
    ) -> tuple[SelfPlayState, Info]:
        """Draws a rival and makes an update against it; consumes `key`.

        Returns:
            The state, and the learner's info with "rival", how many of those put in later than the rival there are.
        """
        learn, draw = jax.random.split(key)
        age = self._age(draw, state.filled)
        rival = jax.tree.map(lambda x: x[(state.filled - 1 - age) % self.pool], state.pool)
        learner, info = self.learner.step(learn, state.learner, self._match(inputs, rival))
        is_due = learner.updates % self.period == 0
        slot = state.filled % self.pool
        pool = jax.tree.map(
            lambda past, now: past.at[slot].set(jnp.where(is_due, now, past[slot])),
            state.pool,
            learner.weights,
        )
        return SelfPlayState(learner, pool, state.filled + is_due), info | {
            "rival": age.astype(jnp.float32)
        }

    def axes(self) -> PyTree:
        """Logical axes of the state: those of the learner, and of its weights with the pool in front."""
        axes = self.learner.axes()
        pool = jax.tree.map(
            lambda x: (None, *x), axes.weights, is_leaf=lambda x: isinstance(x, tuple)
        )
        return SelfPlayState(axes, pool, ())  # pyright: ignore[reportArgumentType] axes in place of an array

    def _age(self, key: PRNGKey, filled: Array) -> Array:
        """How old a rival is drawn, 0 for the newest."""
        which, who = jax.random.split(key)
        age = jax.random.randint(who, (), 0, jnp.minimum(filled, self.pool))
        return jnp.where(jax.random.bernoulli(which, self.newest), 0, age)

    def _match(self, inputs: PyTree, rival: PyTree) -> Match:
        """The parameters of a match."""
        game = self.learner.env.game  # pyright: ignore[reportAttributeAccessIssue]
        return Match(game.default_params if inputs is None else inputs, rival)
