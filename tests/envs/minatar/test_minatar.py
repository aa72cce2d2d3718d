"""MinAtar's games beside gymnax's, from equal keys; where gymnax deviates from MinAtar, beside MinAtar's rule."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from journey import assert_pictures

import envs
from envs.minatar.asterix import SLOTS
from envs.minatar.console import VARIANTS


def aimed(name, state, action):
    """Random actions, but for those that lead far into a game: meet the ball, go up, shoot."""
    if name == "MinBreakout":
        x = jnp.clip(
            state.x + jnp.where((state.direction == 1) | (state.direction == 2), 1, -1), 0, 9
        )
        return jnp.where(
            state.time % 60 > 52, action, 2 * (x > state.paddle) + 1 * (x < state.paddle)
        )
    if name == "MinFreeway":
        return jnp.where(state.time % 50 == 49, action, 1)
    if name == "MinSpaceInvaders":
        column = jnp.argmax(jnp.any(state.aliens, 0))
        hunt = jnp.where(column < state.x, 1, jnp.where(column > state.x, 2, 3))
        return jnp.where(state.time % 5 == 0, 3, jnp.where(action == 0, hunt, action))
    return action


def as_gymnax(state, theirs):
    """Asterix's state in gymnax's form."""
    entity = jnp.stack(
        [state.columns, jnp.arange(1, SLOTS + 1), 1 * state.right, 1 * state.gold, 1 * state.there],
        1,
    )
    return theirs.replace(
        player_x=state.x, player_y=state.y, entities=entity * state.there[:, None], time=state.time, terminal=False,
        spawn_speed=state.spawn_interval, spawn_timer=state.spawn_timer, move_speed=state.move_interval,
        move_timer=state.move_timer, ramp_timer=state.ramp_timer, ramp_index=state.ramps,
    )  # fmt: skip


def overlooked(key, state):
    """Whether gymnax finds no row for what comes, though it would come."""
    order = jax.random.permutation(jax.random.split(key, 3)[2], SLOTS)
    return (state.spawn_timer == 0) & jnp.all(state.there[order[1:]])


def late(name, number, state, theirs):
    """A start near the end of a level, which few would reach."""
    match name:
        case "MinBreakout":
            inside = number == 3  # of the wall, where the ball meets bricks in two steps on end
            bricks, y = (
                jnp.zeros((3, 10), bool).at[2, 3:5].set(True) | inside,
                jnp.where(inside, 2, 3),
            )
            theirs = theirs.replace(
                brick_map=jnp.pad(1.0 * bricks, ((1, 6), (0, 0))), ball_y=y, last_y=y
            )
            return state.replace(bricks=bricks, y=y, last_y=y), theirs
        case "MinSpaceInvaders":
            wave = jnp.zeros((10, 10), bool).at[2, 4].set(True)
            return state.replace(aliens=wave), theirs.replace(alien_map=1.0 * wave)
        case "MinAsterix":
            hard = {"spawn_interval": 2, "move_interval": 2, "ramp_timer": 1, "ramps": 1}
            return state.replace(**{name: jnp.int32(value) for name, value in hard.items()}), theirs
    return state, theirs


def beside(name, num_steps, num_envs):
    """What both say at each step: of ours and gymnax's `(obs, reward, over)`, our states, and whether gymnax failed."""
    env, params = envs.make(name)
    peer = gymnax.make(f"{name[3:]}-MinAtar")[0]
    peer_params = peer.default_params.replace(max_steps_in_episode=10**6)

    def begin(key, number):
        both = env.init(key, params), peer.reset_env(key, peer_params)[1]
        return jax.tree.map(
            lambda a, b: jnp.where(number % 2 == 1, a, b), late(name, number, *both), both
        )

    def one(key, states, number):
        state, theirs = states
        act_key, step_key, reset_key = jax.random.split(key, 3)
        action = aimed(name, state, env.action_space(params).sample(act_key))
        theirs = as_gymnax(state, theirs) if name == "MinAsterix" else theirs
        seen, theirs, reward, over, _ = peer.step_env(step_key, theirs, action, peer_params)
        after = env.transition(step_key, state, action, params)
        mine = (
            env.observe(step_key, after, action, params),
            env.reward(state, action, after, params),
            after.over,
        )
        skipped = overlooked(step_key, state) if name == "MinAsterix" else jnp.zeros((), bool)
        ends = jnp.where(
            name == "MinAsterix", False, after.over
        )  # played on, for the harder end of the game
        again = begin(reset_key, number)
        following = jax.tree.map(
            lambda a, b: jnp.where(ends, a, b).astype(jnp.asarray(b).dtype), again, (after, theirs)
        )
        return following, (mine, (seen, reward, over), after, skipped)

    numbers, said = jnp.arange(num_envs), []
    begin_all, step_all = jit(jax.vmap(begin)), jit(jax.vmap(one))
    states = begin_all(jax.random.split(jax.random.key(0), num_envs), numbers)
    for place in range(
        num_steps
    ):  # a loop that is compiled copies all that it has recorded, each step
        states, now = step_all(
            jax.random.split(jax.random.key(1 + place), num_envs), states, numbers
        )
        said.append(jax.device_get(now))
    return jax.tree.map(lambda *leaves: np.stack(leaves), *said)


def agrees(name, num_steps, num_envs):
    mine, theirs, states, skipped = beside(name, num_steps, num_envs)
    for one, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(one[~skipped], other[~skipped])
    assert mine[1].sum() > 1 and (name == "MinFreeway" or mine[2].sum() > 1)
    match name:
        case "MinBreakout":
            assert (np.diff(states.bricks.sum((2, 3)), axis=0) > 10).any(), (
                "all bricks were broken, and came again"
            )
        case "MinSpaceInvaders":
            assert states.move_interval.min() < 12, "a second wave came"
        case "MinAsterix":
            assert (
                states.move_interval.min() == 1 == states.spawn_interval.min() and skipped.sum() > 5
            )
            assert (~skipped).mean() > 0.5


@pytest.mark.parametrize(
    "name", [n if n != "MinFreeway" else pytest.param(n, marks=pytest.mark.slow) for n in VARIANTS]
)
def test_it_equals_gymnax_step_by_step(name):
    agrees(name, 200, 8)


@pytest.mark.slow  # 30 s
@pytest.mark.parametrize("name", VARIANTS)
def test_it_equals_gymnax_for_long(name):
    agrees(name, 3000, 16)


def test_asterix_takes_a_free_row_where_gymnax_overlooks_it():
    env, params = envs.make("MinAsterix")
    key = jax.random.key(3)
    peer = gymnax.make("Asterix-MinAtar")[0]
    first = int(jax.random.permutation(jax.random.split(key, 3)[2], SLOTS)[0])

    @jit
    @jax.vmap
    def both(there):
        state = env.init(key, params).replace(
            there=there, spawn_timer=jnp.int32(0), columns=jnp.full(SLOTS, 4)
        )
        state = state.replace(y=jnp.int32(1))
        theirs = as_gymnax(state, peer.reset_env(key, peer.default_params)[1])
        theirs = peer.step_env(key, theirs, 0, peer.default_params)[1]
        return overlooked(key, state), env.transition(key, state, 0, params), theirs.entities[:, 4]

    there = np.stack([np.ones(SLOTS, bool), np.arange(SLOTS) != first])
    skipped, after, theirs = jax.device_get(both(there))
    assert (
        skipped.all()
        and after.there.sum(1).tolist() == [8, 8]
        and (after.columns[there] == 4).all()
    )
    assert theirs.sum(1).tolist() == [7, 6], "gymnax loses one each time"


@pytest.mark.slow  # 10 s
@pytest.mark.parametrize("name", VARIANTS)
def test_pictures(name):
    assert_pictures(envs.make(name)[0])
