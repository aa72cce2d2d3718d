"""What agents read and how they draw: features by the space, densities by their formulas, masks, several agents."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

import envs
from jaxpar.env import Box, Discrete, Fields, MultiDiscrete
from jaxpar.rl import A2c, ActionValues, ActorCritic, Dqn, Network, Ppo, Pqn
from jaxpar.rl.distributions import entropy, log_prob, masked, mode, sample_action, scale_action
from jaxpar.rl.features import feature_shape, features, of_one_agent
from jaxpar.rl.learner import Agent, Learner, MinibatchLearner
from jaxpar.types import UsageError

SPACES = {
    "choice": (Discrete(3), (3,)),
    "choices": (MultiDiscrete((2, 3)), (5,)),
    "numbers": (Box(-1.0, 1.0, (2, 3)), (6,)),
    "tiles": (Box(0, 3, (2, 2, 2), jnp.uint8), (2, 2, 8)),
    "pixels": (Box(0, 255, (4, 5, 3), jnp.uint8), (4, 5, 3)),
    "fields": (Fields.of(image=Box(0, 3, (2, 2), jnp.int32), start=Discrete(2)), (18,)),
}


@pytest.mark.parametrize("name", SPACES)
def test_features_have_their_shape_and_tell_observations_apart(name):
    space, shape = SPACES[name]
    assert feature_shape(space) == shape
    one, other = (space.sample(jax.random.key(seed)) for seed in (0, 3))
    batch = jax.tree.map(lambda a, b: jnp.stack([a, b])[:, None], one, other)
    x = features(space, batch)
    assert x.shape == (2, 1, *shape) and x.dtype == jnp.float32
    assert np.abs(x).max() <= 1 and np.abs(x[0] - x[1]).max() > 0


def test_bytes_are_shares_and_few_values_are_names():
    assert features(
        Box(0, 255, (1, 1, 1), jnp.uint8), jnp.full((1, 1, 1), 51, jnp.uint8)
    ).item() == pytest.approx(0.2)
    np.testing.assert_array_equal(features(Box(2, 5, (2,), jnp.int32), jnp.array([3, 5]))[None].ravel(),
                                  [0, 1, 0, 0, 0, 0, 0, 1])  # fmt: skip


def test_densities_of_choices_by_enumeration():
    space = MultiDiscrete((2, 3))
    head = masked(space, jax.random.normal(jax.random.key(0), (6,)), None)
    everything = jnp.array(list(itertools.product(range(2), range(3))), jnp.int32)
    log_p = jax.vmap(lambda a: log_prob(space, head, a))(everything)
    np.testing.assert_allclose(np.exp(log_p).sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(entropy(space, head), -(np.exp(log_p) * log_p).sum(), rtol=1e-6)
    np.testing.assert_array_equal(mode(space, head), everything[np.argmax(log_p)])


def test_illegal_choices_are_never_drawn_and_count_for_nothing():
    space, mask = Discrete(4), jnp.array([True, False, True, False])
    head = masked(space, jnp.array([0.0, 9.0, 1.0, 9.0]), mask)
    drawn = jax.vmap(lambda key: sample_action(key, space, head))(
        jax.random.split(jax.random.key(0), 200)
    )
    assert set(np.asarray(drawn).tolist()) == {0, 2} and mode(space, head) == 2
    alone = jnp.array([0.0, 1.0])
    np.testing.assert_allclose(entropy(space, head), entropy(Discrete(2), alone), rtol=1e-6)
    slope = jax.grad(lambda x: entropy(space, masked(space, x, mask)))(
        jnp.array([0.0, 9.0, 1.0, 9.0])
    )
    assert np.isfinite(slope).all() and slope[1] == slope[3] == 0


def test_a_box_is_spanned_by_one_and_densities_are_normal():
    space = Box(-2.0, 6.0, (2,))
    np.testing.assert_allclose(
        scale_action(space, jnp.array([[-1.0, 0.5], [0.0, 3.0]])), [[-2, 4], [2, 6]]
    )
    head, x = jnp.array([0.5, -1.0, np.log(2.0), np.log(0.5)]), jnp.array([1.5, -1.5])
    wanted = sum(
        -0.5 * ((a - m) / s) ** 2 - np.log(s * np.sqrt(2 * np.pi))
        for a, m, s in ((1.5, 0.5, 2), (-1.5, -1, 0.5))
    )
    np.testing.assert_allclose(log_prob(space, head, x), wanted, rtol=1e-6)
    np.testing.assert_allclose(entropy(space, head), np.log(2 * np.pi * np.e * 2 * 0.5), rtol=1e-6)


def test_one_agent_of_many():
    assert of_one_agent(Discrete(5, (3,)), 3) == Discrete(5)
    assert of_one_agent(Box(((0.0, 1.0),) * 3, 2.0, (3, 2)), 3) == Box((0.0, 1.0), 2.0, (2,))
    assert of_one_agent(Discrete(5), 0) == Discrete(5)


def test_a_central_critic_sees_all_and_an_actor_itself_alone():
    env, params = envs.make("Spread-3")
    agent = ActorCritic(env, Network(hidden=(8,)), central=True)
    weights = jit(agent.init)(jax.random.key(0))
    obs = jax.random.normal(jax.random.key(1), env.observation_space(params).shape)[None, None]
    starts, carry = jnp.zeros((1, 1), bool), jax.tree.map(lambda c: c[None], agent.first_carry())

    def said(obs):
        return agent.apply(weights, obs, starts, carry)

    moved = obs.at[0, 0, 2].add(1.0)
    before, after = said(obs), said(moved)
    assert before.value.shape == (1, 1, 3)
    np.testing.assert_array_equal(before.policy[0, 0, :2], after.policy[0, 0, :2])
    assert np.abs(before.policy[0, 0, 2] - after.policy[0, 0, 2]).max() > 0
    assert np.abs(before.value - after.value).min() > 0
    # It is told which agent is asked, so that equal sights need not be worth the same.
    alike = said(jnp.broadcast_to(obs[:, :, :1], obs.shape)).value[0, 0]
    assert len(np.unique(alike)) == 3


def test_no_policy_acts_where_actions_are_of_another_kind():
    env, _ = envs.make("CartPole-v1")

    class Odd(type(env)):
        def action_space(self, params):
            return Fields.of(a=Discrete(2))

    with pytest.raises(UsageError, match="learners act by Discrete, MultiDiscrete or float Box"):
        ActorCritic(Odd(), Network())


@pytest.mark.parametrize("kind", [Ppo, A2c, Pqn, Dqn], ids=lambda kind: kind.__name__)
def test_learners_have_what_the_protocols_name(kind):
    learner = kind(envs.make("CartPole-v1")[0])
    asked = {*vars(Learner), *(() if kind is Dqn else vars(MinibatchLearner))}
    assert {"env", "optimizer", "axes", "agent", *(() if kind is Dqn else ["has_memory"])} <= asked
    assert all(hasattr(learner, name) for name in asked if not name.startswith("_"))
    for agent in (learner.agent(), learner.agent(greedy=True)):
        assert (
            isinstance(agent, ActionValues if kind in (Pqn, Dqn) else ActorCritic)
            and hash(agent) is not None
        )
        assert all(hasattr(agent, name) for name in vars(Agent) if not name.startswith("_"))
