"""The guided search against a tree of Python objects, and learning by it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

import envs
from envs.puzzles.countdown import Countdown
from envs.puzzles.knapsack import Knapsack, given
from envs.puzzles.sokoban import Sokoban
from envs.puzzles.sokoban_levels import given_levels
from jaxpar.env import Box, capabilities, reset, step
from jaxpar.rl import AlphaZero, AlphaZeroRates, GuidedSearch, Items, Network
from jaxpar.types import UsageError

ROOM = given_levels("#####\n#@$.#\n#   #\n#####")
TINY = Network(hidden=(8,))
DISCOUNT = 0.9
RATES = AlphaZeroRates(discount=DISCOUNT)


@dataclasses.dataclass(frozen=True)
class Floats:
    """An environment whose observations are numbers, which have a mean."""

    env: Sokoban

    def observation_space(self, params):
        return Box(-jnp.inf, jnp.inf, self.env.observation_space(params).shape)

    def observe(self, key, state, action, params):
        return self.env.observe(key, state, action, params).astype(jnp.float32)

    def __getattr__(self, name):
        return getattr(self.env, name)


class Node:
    """A node of the twin, with its edges as dictionaries by action."""

    def __init__(self, state, ended, value, prior):
        self.state, self.ended, self.value, self.prior = state, ended, value, prior
        self.below, self.reward, self.visits, self.total = (
            {},
            {},
            dict.fromkeys(prior, 0),
            dict.fromkeys(prior, 0.0),
        )


def twin(search, key, env, state, params, guide):
    """The same search, one simulation and one node at a time."""
    root_key, key = jax.random.split(key)
    observe_key = jax.random.split(root_key)[0]
    mask_of = capabilities(env).action_mask or (
        lambda state, params: jnp.ones(env.action_space(params).n, bool)
    )
    once, mask_of = (
        jit(lambda key, state, action: step(key, env, state, action, params)),
        jit(mask_of),
    )
    guide = jit(guide)

    def made(state, obs, terminated, truncated):
        legal = mask_of(state, params)
        prior, value = guide(obs, legal)
        prior = {a: float(prior[a]) for a in range(len(prior)) if legal[a]}
        return Node(
            state, bool(terminated or truncated), 0.0 if terminated else float(value), prior
        )

    root = made(state, env.observe(observe_key, state, None, params), False, False)
    low, high = math.inf, -math.inf
    for i in range(search.simulations):
        node, path = root, []
        while True:
            scores = {}
            for a, prior in node.prior.items():
                q = node.total[a] / node.visits[a] if node.visits[a] else node.value
                q = (
                    min(max((q - low) / (high - low), 0), 1)
                    if high - low > 1e-5 * (1 + abs(low) + abs(high))
                    else 0.0
                )
                bonus = (
                    search.exploration
                    * prior
                    * math.sqrt(1 + sum(node.visits.values()))
                    / (1 + node.visits[a])
                )
                scores[a] = q + bonus
            action = max(scores, key=lambda a: (scores[a], -a))
            path.append((node, action))
            if action not in node.below:
                said = once(jax.random.fold_in(key, i + 1), node.state, action)
                node.below[action] = made(said.state, said.obs, said.terminated, said.truncated)
                node.reward[action] = float(said.reward)
                node = node.below[action]
                break
            node = node.below[action]
            if node.ended:
                break
        earned = node.value
        for above, action in reversed(path):
            earned = above.reward[action] + DISCOUNT * earned
            above.visits[action] += 1
            above.total[action] += earned
            mean = above.total[action] / above.visits[action]
            low, high = min(low, mean), max(high, mean)
    return root


@pytest.mark.parametrize(
    "env", [Sokoban(ROOM, rewards="dense"), envs.make("2048-2x2")[0]], ids=["sokoban", "2048"]
)
def test_a_tree_of_objects_agrees(env):
    params = env.default_params
    learner = AlphaZero(env, TINY, GuidedSearch(24), RATES)
    weights = jit(learner.init)(jax.random.key(1), params).weights
    state = env.init(jax.random.key(2), params)
    said = jit(learner.decide)(jax.random.key(3), weights, state, params)
    root = twin(learner.search, jax.random.key(3), env, state, params, learner.guide(weights))
    visits = np.array([root.visits.get(a, 0) for a in range(len(said.visits))])
    np.testing.assert_array_equal(said.visits, visits)
    q = [root.total[a] / root.visits[a] if root.visits.get(a) else 0.0 for a in range(len(visits))]
    np.testing.assert_allclose(said.q, q, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        said.value, (root.value + sum(root.total.values())) / 25, rtol=1e-5, atol=1e-5
    )


def test_masks_ends_and_noise():
    env = Sokoban(ROOM)
    params = env.default_params
    learner = AlphaZero(env, TINY, GuidedSearch(16, noise=0.5), RATES)
    state = env.init(jax.random.key(0), params)
    guide = lambda obs, legal: (legal / jnp.sum(legal), jnp.float32(7))  # noqa: E731
    said = learner.search(jax.random.key(1), env, state, params, guide, DISCOUNT)
    assert np.sum(said.visits) == 16
    np.testing.assert_array_equal(said.visits[~env.action_mask(state, params)], 0)
    np.testing.assert_allclose(
        said.q[1], 1.0
    )  # right solves it: a reward of 1, and nothing after the end


def test_targets_are_the_loop_s():
    """Of episodes that go on, that are cut, and that end, whose lanes go on without them until the update is over."""
    env = Sokoban(ROOM)
    params = dataclasses.replace(env.default_params, max_steps=2)
    learner = AlphaZero(
        env, TINY, GuidedSearch(3), AlphaZeroRates(td_lambda=0.7), 12, 4, minibatches=1
    )
    weights = jit(learner.init)(jax.random.key(0), params).weights
    # A sweep's rates are those of the state: other ones than the learner's own.
    other = dataclasses.replace(learner, rates=AlphaZeroRates(discount=0.5, td_lambda=0.1))
    decisions, _ = jit(other.play)(jax.random.key(1), weights, params, rates=learner.rates)
    seen = jax.tree.map(lambda x: np.asarray(x).reshape(4, 12, *x.shape[1:]), decisions)

    first_key, key = jax.random.split(jax.random.key(1))
    search, go = (
        jit(learner.decide),
        jit(lambda key, state, action: step(key, env, state, action, params)),
    )
    guide, kinds = jit(learner.guide(weights)), set()
    keys = [jax.random.split(each, 12) for each in jax.random.split(key, 4)]
    for lane in range(12):
        obs, state = reset(jax.random.split(first_key, 12)[lane], env, params)
        values, rewards, end = [], [], ""
        while len(rewards) < 4 and not end:
            search_key, draw_key, step_key = jax.random.split(keys[len(rewards)][lane], 3)
            said = search(search_key, weights, state, params)
            action = jax.random.categorical(draw_key, jnp.log(said.visits.astype(jnp.float32)))
            after = go(step_key, state, action)
            values.append(float(said.value))
            rewards.append(float(after.reward))
            state, end = (
                after.state,
                "ends" if after.terminated else "cut" if after.truncated else "",
            )
        kinds.add(end)
        beyond = 0.0 if end == "ends" else float(
            search(jax.random.split(keys[len(rewards)][lane], 3)[0], weights, state, params).value
            if len(rewards) < 4 else guide(after.obs, env.action_mask(state, params))[1]
        )  # fmt: skip
        target = beyond
        for t in reversed(range(len(rewards))):
            ahead = target if t == len(rewards) - 1 else 0.3 * values[t + 1] + 0.7 * target
            target = rewards[t] + learner.rates.discount * ahead
            np.testing.assert_allclose(seen.target[t, lane], target, rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(seen.weight[:, lane], np.arange(4) < len(rewards))
    assert kinds == {"ends", "cut"}


def test_moments_are_those_of_the_decisions_and_lead_the_next_search():
    env = Sokoban(ROOM)
    learner = AlphaZero(
        Floats(env), TINY, GuidedSearch(2), num_envs=4, num_steps=3, normalize_obs=True
    )
    params, state = env.default_params, learner.init(jax.random.key(0), env.default_params)
    play_key = jax.random.split(jax.random.key(1))[0]
    decisions, _ = jit(learner.play)(play_key, state.weights, params)
    after, _ = jit(learner.step)(jax.random.key(1), state, params)
    ones = jnp.ones(4, bool)
    seen = np.asarray(decisions.obs, np.float64)[np.asarray(decisions.weight) > 0]
    moments = after.weights["moments"]
    np.testing.assert_allclose(moments.mean, seen.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(moments.variance, seen.var(0), rtol=1e-4, atol=1e-6)
    plain = AlphaZero(Floats(env), TINY, GuidedSearch(2))
    scaled = np.clip((seen[0] - seen.mean(0)) / np.sqrt(seen.var(0) + 1e-6), -10, 10)
    said = jit(learner.guide(after.weights))(jnp.float32(seen[0]), ones)
    bare = {name: x for name, x in after.weights.items() if name != "moments"}
    want = jit(plain.guide(bare))(jnp.float32(scaled), ones)
    for x, y in zip(said, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


def test_items_in_another_order_are_searched_alike():
    """A sack of three: visits move with the items, as what the network says does."""
    sack = (0.2, 0.5, 0.9), (0.7, 0.3, 0.5), 1.0
    order = np.array([2, 0, 1])
    moved = tuple(np.array(sack[0])[order].tolist()), tuple(np.array(sack[1])[order].tolist()), 1.0
    weights, found = None, []
    for problem in (sack, moved):
        env = Knapsack(given(problem))
        learner = AlphaZero(env, Items(8, 2, 1), GuidedSearch(20))
        weights = (
            jit(learner.init)(jax.random.key(0), env.default_params).weights
            if weights is None
            else weights
        )
        state = env.init(jax.random.key(0), env.default_params)
        found.append(jit(learner.decide)(jax.random.key(1), weights, state, env.default_params))
    np.testing.assert_array_equal(np.asarray(found[0].visits)[order], found[1].visits)
    np.testing.assert_allclose(found[0].value, found[1].value, rtol=1e-5)
    assert len(set(np.asarray(found[0].visits).tolist())) > 1


@pytest.mark.slow  # 12 s
def test_it_learns_what_the_search_says():
    env = Sokoban(ROOM)
    learner = AlphaZero(
        env, TINY, GuidedSearch(8, noise=0.25), AlphaZeroRates(0.01), num_envs=8, num_steps=4
    )
    update = jit(learner.step)
    params, state = env.default_params, learner.init(jax.random.key(0), env.default_params)
    state, first = update(jax.random.key(1), state, params)
    for i in range(20):
        state, info = update(jax.random.key(2 + i), state, params)
    assert (
        info["policy_loss"] < 0.7 * first["policy_loss"]
        and info["value_loss"] < 0.1 * first["value_loss"]
    )
    level = env.init(jax.random.key(0), params)
    obs = env.observe(jax.random.key(0), level, None, params)
    prior, value = learner.guide(state.weights)(obs, env.action_mask(level, params))
    assert np.argmax(prior) == 1 and abs(value - 1) < 0.2


def test_refused():
    with pytest.raises(UsageError, match="memory='none'"):
        AlphaZero(Countdown(), Network(memory="para_gru"))
    with pytest.raises(UsageError, match="Discrete"):
        AlphaZero(envs.make("Pendulum-v1")[0])
    with pytest.raises(UsageError, match="minibatches=3"):
        dataclasses.replace(AlphaZero(Countdown()), minibatches=3)
