"""Self-play: the pool is a list, rivals act by its weights, and its average nears an equilibrium."""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

import envs
from jaxpar.env import Box, Discrete
from jaxpar.rl import A2c, A2cRates, Against, Network, Ppo, SelfPlay
from jaxpar.rollout import init as start
from jaxpar.rollout import rollout
from jaxpar.types import UsageError

PAYOFF = np.array(
    [[0, -1, 2], [1, 0, -1], [-2, 1, 0]], np.float32
)  # rock, paper, scissors, where rock wins 2
BALANCED = np.array([1, 2, 1]) / 4  # whose payoff against any action is 0
NETWORK = Network(hidden=())


@flax.struct.dataclass
class Numbers:
    payoff: jax.Array


@flax.struct.dataclass
class Board:
    actions: jax.Array
    time: jax.Array


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One move of two players at once."""

    num_agents = 2
    name = "matrix"

    @property
    def default_params(self):
        return Numbers(jnp.asarray(PAYOFF))

    def observation_space(self, params):
        return Box(0.0, 1.0, (2, 1))

    def action_space(self, params):
        return Discrete(3, (2,))

    def init(self, key, params):
        return Board(jnp.zeros(2, jnp.int32), jnp.int32(0))

    def transition(self, key, state, action, params):
        return Board(action, state.time + 1)

    def observe(self, key, state, action, params):
        return jnp.ones((2, 1))

    def reward(self, state, action, next_state, params):
        first, second = next_state.actions
        return jnp.stack([params.payoff[first, second], params.payoff[second, first]])

    def terminal(self, state, params):
        return jnp.full(2, state.time > 0)


def learner_of(seat=0, **changes):
    given = dict(num_envs=4, num_steps=2, rates=A2cRates(learning_rate=0.1)) | changes
    return A2c(Against(Matrix(), NETWORK, seat), NETWORK, **given)


def test_the_pool_is_a_list_of_past_weights():
    play = SelfPlay(learner_of(), pool=3, period=2, newest=0.3)
    state = play.init(jax.random.key(0), None)
    learner, past, step = state.learner, [state.learner.weights], jit(play.step)
    alone, ages = jit(play.learner.step), []
    for n in range(9):
        key = jax.random.fold_in(jax.random.key(1), n)
        state, info = step(key, state, None)
        ages.append(int(info["rival"]))
        learn, draw = jax.random.split(key)
        which, who = jax.random.split(draw)
        age = int(jax.random.randint(who, (), 0, min(len(past), 3)))
        assert ages[-1] == (0 if jax.random.bernoulli(which, 0.3) else age)
        params = play.learner.env.default_params.replace(rival=past[-1 - ages[-1]])
        learner, _ = alone(learn, learner, params)
        if (n + 1) % 2 == 0:
            past.append(learner.weights)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6),
        state.learner.weights,
        learner.weights,
    )
    assert len(set(ages)) > 1 and int(state.filled) == len(past) == 5
    for n, weights in list(enumerate(past))[-3:]:
        kept = jax.tree.map(lambda x, n=n: x[n % 3], state.pool)
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), kept, weights
        )


@pytest.mark.parametrize("seat", [1, pytest.param(0, marks=pytest.mark.slow)])  # 3 s each
def test_rewards_are_the_payoffs_against_the_rivals_policy(seat):
    """A rival that always plays scissors; and one that is not given plays by chance."""
    learner = learner_of(seat)
    agent, env = learner.agent(), learner.env
    weights = agent.init(jax.random.key(0))
    head = weights["actor"]["heads"]["policy"]
    sure = jax.tree.map(jnp.zeros_like, head)
    sure = jax.tree.map(lambda x: x.at[2].set(50.0) if x.shape == (3,) else x, sure)
    weights["actor"]["heads"]["policy"] = sure
    chance = jax.tree.map(jnp.zeros_like, weights)
    for rival, want in ((weights, [0, 0, 1]), (None, [1 / 3] * 3)):
        params = env.default_params.replace(rival=rival)
        state = start(jax.random.key(2), env, params, 512, agent.first_carry())
        _, seen = jit(
            lambda state, params=params: rollout(
                jax.random.key(3), state, env, params, agent, chance, 4
            )
        )(state)
        action, reward = np.asarray(seen.action), np.asarray(seen.reward)
        for mine in range(3):
            of_mine = reward[action == mine]
            np.testing.assert_allclose(
                of_mine.mean(), PAYOFF[mine] @ want, atol=0 if rival else 0.2
            )


@pytest.mark.slow  # 30 s
def test_the_average_of_the_pool_nears_the_equilibrium():
    """What a best answer earns: 0.14 against the average of 2,000 updates, 0.56 against one of them, in the mean."""
    np.testing.assert_allclose(PAYOFF @ BALANCED, 0)
    learner = learner_of(
        rates=A2cRates(learning_rate=0.02, entropy_coef=0.2), num_envs=64, num_steps=1
    )
    play = SelfPlay(learner, pool=2000)
    keys = jax.random.split(jax.random.key(1), 2000)
    whole = jit(lambda state: jax.lax.scan(lambda s, key: play.step(key, s, None), state, keys))
    state, _ = whole(play.init(jax.random.key(0), None))
    obs, starts = jnp.ones((1, 1, 1)), jnp.ones((1, 1), bool)
    carry = jax.tree.map(lambda x: x[None], learner.agent().first_carry())
    logits = jax.vmap(
        lambda weights: learner.agent().apply(weights, obs, starts, carry).policy[0, 0]
    )(state.pool)
    policies = np.asarray(jax.nn.softmax(logits))
    of_average, of_each = (PAYOFF @ policies.mean(0)).max(), (policies @ PAYOFF.T).max(1).mean()
    assert of_average < 0.3 and of_each > 2 * of_average, (of_average, of_each)


def test_what_cannot_play_itself_is_told():
    with pytest.raises(
        UsageError, match="CartPole-v1 has one agent; self-play needs a game of two or more"
    ):
        Against(envs.make("CartPole-v1")[0])
    with pytest.raises(UsageError, match="seat=2 is none of matrix's; legal are 0 to 1"):
        Against(Matrix(), NETWORK, 2)
    with pytest.raises(UsageError, match="self-play draws them from one Discrete each"):
        Against(dataclasses.replace(envs.make("Spread-3")[0], continuous=True))
    with pytest.raises(UsageError, match="rivals carry no memory"):
        Against(Matrix(), Network(memory="gru"))
    with pytest.raises(
        UsageError, match=r"needs an env that is `Against\(game, network\)`, not CartPole"
    ):
        SelfPlay(Ppo(envs.make("CartPole-v1")[0]))
    with pytest.raises(UsageError, match="the learner and its rivals have the same weights"):
        SelfPlay(A2c(Against(Matrix(), NETWORK), Network(hidden=(8,))))
