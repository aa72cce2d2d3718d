"""A market of generated prices in whole cents, and a majority of learners against each of them alone.

    python -m experiments.papers.trading                     # two CPU cores, two minutes
    python -m experiments.papers.trading updates=20 members=3 # half a minute, and learns little
    python -m experiments.papers.trading members=9
    python -m experiments.papers.trading updates=400
    python -m experiments.papers.trading members=1           # no majority: one learner twice

After the ensembles of the FinRL contests (Holzer et al. 2025, arXiv:2501.10709), with accounts that are exact: cash,
prices and fees are int32 cents, so that at every step

    cash + holdings . prices + fees paid = what was begun with + gains of prices on what was held

without a rounding. Members differ in their seeds alone and learn side by side; the ensemble does what most of them
would. Returns are shares of what was begun with.
"""

import dataclasses
import time
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete
from jaxpar.fields import AtLeast, Between, check_fields, field
from jaxpar.rl import Network, Ppo, PpoRates, Seeds, train
from jaxpar.rollout import NoReset, RolloutOptions, evaluate, init, random_policy, rollout
from jaxpar.types import Array, PRNGKey

from ..app import small_commands

CASH, PRICE = 1_000_000, 10_000  # cents to begin with, and the first price


@flax.struct.dataclass
class _Numbers:
    """Basis points of a trade's value that it costs, rounded up; days; how trends last, and what moves prices."""

    fee: Any = 10
    max_steps: Any = 60
    trend: Any = 0.9
    drift: Any = 0.01
    noise: Any = 0.01


@flax.struct.dataclass
class State:
    """Int32 cash, shares, prices, fees paid, what prices gained, time; the hidden trend, and the last eight moves."""

    cash: Array
    shares: Array
    price: Array
    fees: Array
    gained: Array
    trend: Array
    moves: Array
    time: Array


def wealth(state: State) -> Array:
    """Cash and what is held, in cents, int32 `[]`."""
    return state.cash + jnp.sum(state.shares * state.price)


def fee_of(value: Array, points: Array) -> Array:
    """`ceil(value points / 10,000)` without a product that overflows; int32."""
    return value // 10_000 * points + (value % 10_000 * points + 9_999) // 10_000


@dataclasses.dataclass(frozen=True)
class Market:
    """K assets whose hidden trends come and go; an action keeps all, or buys or sells a `lot` of one: 2 K + 1 in all.

    Prices stay within 1/16 and 16 times the first, so that no account can leave int32.
    """

    assets: int = field(2, Between(1, 8))
    lot: int = field(20, AtLeast(1))
    name = "Market"

    __post_init__ = check_fields

    @property
    def default_params(self) -> _Numbers:
        """Ten basis points, sixty days."""
        return _Numbers()

    def observation_space(self, params: _Numbers) -> Box:
        """Moves, in hundredths, and the shares of wealth in each asset."""
        return Box(-jnp.inf, jnp.inf, (9 * self.assets,))

    def action_space(self, params: _Numbers) -> Discrete:
        """Keep; buy each; sell each."""
        return Discrete(2 * self.assets + 1)

    def init(self, key: PRNGKey, params: _Numbers) -> State:
        """Cash alone; consumes `key`."""
        zero, k = jnp.int32(0), self.assets
        trend = params.drift * jax.random.normal(key, (k,))
        shares = jnp.zeros(k, jnp.int32)
        return State(
            jnp.int32(CASH), shares, shares + PRICE, zero, zero, trend, jnp.zeros((k, 8)), zero
        )

    def _trade(self, state: State, action: Array, params: _Numbers) -> tuple[Array, Array, Array]:
        """The change of shares `[K]`, what they cost in cents, and the fee; nothing where cash or shares lack."""
        which, buys = (action - 1) % self.assets, action <= self.assets
        here = (jnp.arange(self.assets) == which) & (action > 0)
        change = jnp.where(here, jnp.where(buys, self.lot, -self.lot), 0)
        cost = jnp.sum(change * state.price)
        fee = fee_of(abs(cost), jnp.asarray(params.fee, jnp.int32))
        able = jnp.all(state.shares + change >= 0) & (state.cash >= cost + fee)
        return jnp.where(able, change, 0), jnp.where(able, cost, 0), jnp.where(able, fee, 0)

    def transition(self, key: PRNGKey, state: State, action: Array, params: _Numbers) -> State:
        """Trades at today's prices, then prices move; consumes `key`."""
        change, cost, fee = self._trade(state, action, params)
        trend_key, move_key = jax.random.split(key)
        fresh = params.drift * jax.random.normal(trend_key, (self.assets,))
        trend = params.trend * state.trend + (1 - params.trend**2) ** 0.5 * fresh
        move = trend + params.noise * jax.random.normal(move_key, (self.assets,))
        price = jnp.round(state.price * jnp.exp(move)).astype(jnp.int32)
        price = jnp.clip(price, PRICE // 16, 16 * PRICE)
        shares = state.shares + change
        return State(
            state.cash - cost - fee, shares, price, state.fees + fee,
            state.gained + jnp.sum(shares * (price - state.price)), trend,
            jnp.concatenate([state.moves[:, 1:], move[:, None]], 1), state.time + 1,
        )  # fmt: skip

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: _Numbers) -> Array:
        """Deterministic."""
        held = state.shares * state.price / jnp.maximum(wealth(state), 1)
        return jnp.concatenate([100 * state.moves.reshape(-1), held])

    def reward(self, state: State, action: Array, next_state: State, params: _Numbers) -> Array:
        """The change of wealth, as a share of what was begun with."""
        return (wealth(next_state) - wealth(state)) / CASH

    def terminal(self, state: State, params: _Numbers) -> Array:
        """Never."""
        return jnp.zeros((), bool)

    def truncated(self, state: State, params: _Numbers) -> Array:
        """After the last day."""
        return state.time >= params.max_steps


def majority(actions: Array, num_actions: int) -> Array:
    """What most of `[S]` do; of equals the first action."""
    return jnp.argmax(jnp.sum(jax.nn.one_hot(actions, num_actions), 0))


def days(market: Market, policy: Any, weights: Any, episodes: int, carry: Any = ()) -> np.ndarray:
    """Rewards `[days, episodes]` of a policy."""
    start = init(jax.random.key(1), market, _Numbers(), episodes, carry)

    @jax.jit
    def rewards(start, weights):
        key = jax.random.key(2)
        options = RolloutOptions(reset=NoReset())
        return rollout(key, start, market, _Numbers(), policy, weights, 60, options)[1].reward

    return np.asarray(rewards(start, weights), np.float64)


def told(rewards: np.ndarray) -> tuple[float, float, float]:
    """The mean return, the mean Sharpe ratio of a day, and the mean greatest fall from a peak."""
    path = 1 + np.cumsum(rewards, 0)
    fall = 1 - path / np.maximum.accumulate(np.maximum(path, 1), 0)
    return (
        float(rewards.sum(0).mean()),
        float(rewards.mean() / rewards.std()),
        float(fall.max(0).mean()),
    )


def steps_per_second(market: Market, lanes: int, steps: int) -> float:
    """Of random play, every reward summed."""
    play = jax.jit(lambda key: jnp.sum(evaluate(key, market, _Numbers(), random_policy(market), _Numbers(), lanes,
                                                steps).returns))  # fmt: skip
    play(jax.random.key(0)).block_until_ready()
    began = time.perf_counter()
    play(jax.random.key(1)).block_until_ready()
    return lanes * steps / (time.perf_counter() - began)


@dataclasses.dataclass(frozen=True)
class Config(small_commands.SmallConfig):
    """What it trains.

    Attributes:
      updates: Of PPO.
      members: Learners of the majority, which differ in their seeds; an odd number has fewest ties.
    """

    updates: int = field(150, AtLeast(1))
    members: int = field(5, AtLeast(1))


def execute(config: Config) -> None:
    """Trains the members, judges each and their majority, and tells what lanes are worth."""
    market = Market()
    rates = PpoRates(
        learning_rate=1e-3, discount=0.95, reward_scale=20.0, anneal=float(config.updates)
    )
    ppo = Ppo(market, Network(hidden=(64, 64)), rates, num_envs=64, num_steps=60)
    members, agent = Seeds(ppo, config.members, _Numbers()), ppo.agent(greedy=True)
    state, _ = jax.jit(lambda key: train(members, key, _Numbers(), config.updates))(
        jax.random.key(0)
    )

    def ensemble(key, weights, obs, carry):
        actions = jax.vmap(lambda one: agent(key, one, obs, agent.first_carry())[0])(weights)
        return majority(actions, 2 * market.assets + 1).astype(jnp.int32), carry

    players = {
        f"member {i}": (agent, jax.tree.map(lambda x, i=i: x[i], state.weights))
        for i in range(config.members)
    }
    for name, (policy, weights) in (players | {"majority": (ensemble, state.weights)}).items():
        mean, sharpe, fall = told(days(market, policy, weights, 512, agent.first_carry()))
        print(
            f"{name} return {mean:.4f}, Sharpe ratio of a day {sharpe:.3f}, greatest fall {fall:.4f}",
            flush=True,
        )
    one, many = steps_per_second(market, 1, 600), steps_per_second(market, 2048, 60)
    print(
        f"steps/s  {one:,.0f} with one lane, {many:,.0f} with 2,048, {many / one:.0f} times as many"
    )


if __name__ == "__main__":
    small_commands.launch("trading", Config, execute)
