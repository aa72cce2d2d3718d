import jax
import jax.numpy as jnp
import numpy as np
import pytest
from journey import assert_only_views_differ, assert_pictures, legal_action, steps_of, travel
from twin_brick_breaker import BrickBreakerTwin

import envs
from envs.arcade.brick_breaker import HEIGHT, SPRITES, TILE, VARIANTS, WIDTH, BrickBreaker, aim
from jaxpar.types import UsageError

SYMBOLS = [mark + dot for dot in (" ", ".") for mark in (" ", "1", "2", "3", "=", "o", "~")]


def read(image):
    """The board of characters that the pixels show."""
    cells = (
        image.reshape(HEIGHT, TILE, WIDTH, TILE, 3)
        .transpose(0, 2, 1, 3, 4)
        .reshape(-1, 1, TILE, TILE, 3)
    )
    match = (cells == SPRITES[None]).all((2, 3, 4))
    assert (match.sum(1) == 1).all(), "a cell shows no sprite, or sprites look alike"
    return "".join(SYMBOLS[i] for i in match.argmax(1))


def catch(key, env, state, params):
    """Meets the ball with a random cell of the paddle: walks under its next column, offset where there is time."""
    column = state.x
    falling = (state.dy > 0) & (state.y >= HEIGHT - 3)
    offset = jax.random.randint(key, (), -1, 2)
    _, next_x, *_ = aim(state)
    target = jnp.clip(jnp.where(falling, next_x + offset, column), 0, WIDTH - 1)
    return (jnp.sign(target - state.paddle) + 1).astype(jnp.int32)


def follow(env, num_steps, act, max_steps=1000):
    ends, twin = 0, None
    for record in steps_of(
        env, env.default_params.replace(max_steps=max_steps), num_steps, act=act
    ):
        before, after = record["before"], record["after"]
        if record["start"]:
            twin = BrickBreakerTwin(
                int(before.x), int(before.dx), env.observed == "full", max_steps
            )
            assert read(record["seen"]) == twin.board()
        reward, over, cut = twin.step(int(record["action"]))
        np.testing.assert_allclose(after.reward, reward, rtol=1e-6)
        assert (after.terminated, after.truncated) == (over, cut)
        if not over:  # a lost ball aims below the board
            assert read(after.obs) == twin.board()
        assert (
            int(after.state.y),
            int(after.state.x),
        ) == twin.ball and after.state.bricks.sum() == len(twin.bricks)
        ends += record["done"]
    return ends


@pytest.mark.parametrize("observed", ["full", "partial"])
def test_twin(observed):
    env = BrickBreaker(observed)
    assert follow(env, 1000, legal_action) > 20


def test_twin_in_long_games():
    assert follow(BrickBreaker(), 2000, catch, max_steps=450) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("act", [legal_action, catch])
@pytest.mark.parametrize("name", VARIANTS)
def test_twin_for_long(name, act):
    assert envs.make(name)[0] == VARIANTS[name]()
    assert_pictures(VARIANTS[name]())
    assert follow(VARIANTS[name](), 100_000, act) > 100


def test_full_and_partial_share_states_and_rewards():
    assert_only_views_differ(BrickBreaker("full"), BrickBreaker("partial"))


def test_the_ball_can_always_be_met_and_all_bricks_return_one():
    """A paddle that follows the ball loses none of 8 games, and clears the wall of each within their 1,000 steps."""
    env = BrickBreaker()
    for seed in range(8):
        record = travel(jax.random.key(seed), env, env.default_params, 1000, catch)
        end = np.flatnonzero(record["done"])[0]
        assert bool(record["after"].terminated[end])
        np.testing.assert_allclose(np.sum(record["after"].reward[: end + 1]), 1.0, rtol=1e-5)


def test_the_full_view_tells_states_apart():
    """Markov: equal pictures go on with equal pictures, whatever the action."""
    env, params = BrickBreaker(), BrickBreaker().default_params
    seen = {}
    for record in steps_of(env, params, 4000, act=catch):
        if not record["done"]:
            now = (record["seen"].tobytes(), int(record["action"]))
            assert (
                seen.setdefault(now, record["after"].obs.tobytes()) == record["after"].obs.tobytes()
            )


def test_the_curtain_hides_the_ball_only_behind_it():
    env = BrickBreaker("partial")
    state = env.init(jax.random.key(0), env.default_params)
    see = jax.jit(lambda y: env.observe(jax.random.key(0), state.replace(y=y), None, None))
    for y in range(HEIGHT):
        picture = read(np.asarray(see(y)))
        assert ("o" in picture) == (y not in (6, 7, 8))


def test_an_unknown_view_is_refused():
    with pytest.raises(UsageError, match="observed='foggy' is unknown; legal are full, partial"):
        BrickBreaker("foggy")
