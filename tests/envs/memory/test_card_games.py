import jax
import jax.numpy as jnp
import numpy as np
import pytest
from journey import assert_pictures, steps_of, travel
from twin_memory import AutoencodeTwin, CountTwin, RepeatTwin

import envs
from envs.memory.card_games import (
    VARIANTS,
    Autoencode,
    CountRecall,
    RepeatFirst,
    RepeatPrevious,
    deal,
)
from jaxpar.types import UsageError

SHORT = {
    "first": RepeatFirst(12, 3),
    "previous": RepeatPrevious(12, 5, 3),
    "in sight": RepeatPrevious(8, 1),
    "count": CountRecall(12, 3),
    "autoencode": Autoencode(8),
}


def twin_of(env):
    match env:
        case RepeatFirst():
            return RepeatTwin(env.num_cards, env.num_kinds)
        case RepeatPrevious():
            return RepeatTwin(env.num_cards, env.num_kinds, env.k)
        case CountRecall():
            return CountTwin(env.num_cards, env.num_kinds)
    return AutoencodeTwin(env.num_cards, env.num_kinds)


def follow(env, num_steps):
    """The twin is told the observations, and everything else must follow from them."""
    twin, ends = twin_of(env), 0
    for record in steps_of(env, env.default_params, num_steps):
        if record["start"]:
            twin.begin(record["seen"].tolist())
        assert record["seen"].tolist() == twin.seen()
        reward, over = twin.step(int(record["action"]), record["after"].obs.tolist())
        after = record["after"]
        assert after.obs.tolist() == twin.seen()
        np.testing.assert_allclose(after.reward, reward, rtol=1e-6)
        assert after.terminated == over and not after.truncated
        if over:
            assert twin.deck_is_fair()
            ends += 1
    return ends


def perfect(key, env, state, params):
    """The answer, read from the state."""
    match env:
        case RepeatFirst():
            return state.first
        case RepeatPrevious():
            return env.sought(state)
        case CountRecall():
            return state.counts[state.query]
    return state.cards[env.turn(state)].astype(jnp.int32)


def length(env):
    return 2 * env.num_cards - 1 if isinstance(env, Autoencode) else env.num_cards - 1


@pytest.mark.parametrize("env", SHORT.values(), ids=SHORT)
def test_twin(env):
    assert follow(env, 1000) == 1000 // length(env)


def test_variants_have_names():
    for name, make in VARIANTS.items():
        assert envs.make(name)[0] == make()


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_twin_for_long(name):
    assert_pictures(VARIANTS[name]())
    assert follow(VARIANTS[name](), 100_000) >= 50


@pytest.mark.parametrize("env", SHORT.values(), ids=SHORT)
def test_perfect_play_returns_one(env):
    params = env.default_params.replace(best_return=3.0)
    record = travel(jax.random.key(1), env, params, length(env), perfect)
    np.testing.assert_array_equal(np.flatnonzero(record["done"]), [length(env) - 1])
    np.testing.assert_allclose(np.sum(record["after"].reward), 3.0, rtol=1e-5)


@pytest.mark.parametrize("env", SHORT.values(), ids=SHORT)
def test_random_play_returns_what_chance_gives(env):
    """2 / A - 1 within 5 standard errors, the answers being independent: -0.5 with four suits."""
    rewards, params = [], env.default_params
    for seed in range(4):
        record = travel(jax.random.key(seed), env, params, 1000)
        whole = np.flatnonzero(record["done"])[-1] + 1
        rewards.append(np.asarray(record["after"].reward)[:whole].reshape(-1, length(env)))
    rewards = np.concatenate(rewards)
    chance = 1 / env.action_space(params).n
    error = 2 * np.sqrt(chance * (1 - chance) / np.count_nonzero(rewards))
    assert abs(rewards.sum(1).mean() - (2 * chance - 1)) < 5 * error


def test_deal_is_uniform_over_what_is_left():
    left = jnp.array([3, 0, 1, 4])
    cards, rest = jax.jit(jax.vmap(lambda key: deal(key, left)))(
        jax.random.split(jax.random.key(0), 4000)
    )
    share = np.bincount(cards, minlength=4) / 4000
    np.testing.assert_allclose(share, np.array([3, 0, 1, 4]) / 8, atol=0.04)
    assert share[1] == 0
    np.testing.assert_array_equal(rest, np.array(left) - np.eye(4, dtype=int)[cards])


def test_no_state_tells_the_next_card():
    """The same state goes on differently with other keys: no deck is hidden in it."""
    for env in (SHORT["previous"], SHORT["autoencode"]):
        state = env.init(jax.random.key(0), env.default_params)

        def following(key, env=env, state=state):
            after = env.transition(key, state, jnp.zeros((), jnp.int32), env.default_params)
            return env.observe(key, after, None, env.default_params)

        seen = jax.jit(jax.vmap(following))(jax.random.split(jax.random.key(1), 16))
        assert len(np.unique(seen, axis=0)) > 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RepeatFirst(10, 4), "RepeatFirst needs .* not 10 cards of 4 kinds"),
        (lambda: CountRecall(52, 1), "num_kinds=1 must be at least 2"),
        (lambda: RepeatPrevious(8, 8), "k = 1 to 7 cards, not 8"),
        (lambda: RepeatPrevious(8, 0), "k=0 must be at least 1"),
        (lambda: Autoencode(256, 128), "num_kinds=128 must be at least 2 and at most 127"),
    ],
)
def test_impossible_decks_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()
