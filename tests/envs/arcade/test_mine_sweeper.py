import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from journey import assert_only_views_differ, assert_pictures, legal_action, steps_of, travel
from twin_mine_sweeper import MineSweeperTwin

import envs
from envs.arcade.mine_sweeper import SPRITES, TILE, VARIANTS, MineSweeper
from jaxpar.types import UsageError

SYMBOLS = ".+*012345678"


def read(image):
    """The board of characters that the pixels show, or the numbers."""
    if image.ndim == 2:
        return "".join(SYMBOLS[i] for i in image.ravel())
    n = image.shape[0] // TILE
    cells = (
        image.reshape(n, TILE, n, TILE, 3).transpose(0, 2, 1, 3, 4).reshape(n * n, 1, TILE, TILE, 3)
    )
    match = (cells == SPRITES[None]).all((2, 3, 4))
    assert (match.sum(1) == 1).all(), "a cell shows no sprite, or sprites look alike"
    return "".join(SYMBOLS[i] for i in match.argmax(1))


def any_action(key, env, state, params):
    """Open cells, too."""
    return env.action_space(params).sample(key)


def follow(env, num_steps, act=legal_action):
    ends, twin = 0, None
    for record in steps_of(env, env.default_params, num_steps, act=act):
        if record["start"]:
            twin = MineSweeperTwin(env.size, record["before"].mines.tolist(), env.observed)
            assert len(twin.mines) == env.num_mines and read(record["seen"]) == twin.board()
        if act is legal_action:
            assert twin.legal()[record["action"]]
        reward, over, cut = twin.step(int(record["action"]))
        after = record["after"]
        np.testing.assert_allclose(after.reward, reward, rtol=1e-6)
        assert (after.terminated, after.truncated) == (over, cut)
        assert read(after.obs) == twin.board()
        np.testing.assert_array_equal(~after.state.opened.reshape(-1), twin.legal())
        ends += record["done"]
    return ends


@pytest.mark.parametrize("observed", ["full", "numbers", "partial"])
def test_twin(observed):
    env = MineSweeper(4, 2, observed)
    assert follow(env, 1000) > 50


def test_twin_in_numbers():
    env = MineSweeper(4, 2, "full", pixels=False)
    space = env.observation_space(env.default_params)
    assert (space.shape, space.dtype, int(space.high)) == (
        (4, 4),
        np.int32,
        11,
    ) and env.name.endswith("-full-cells")
    assert follow(env, 1000) > 50


def test_twin_with_illegal_actions():
    assert follow(MineSweeper(3, 1), 1000, any_action) > 50


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_twin_for_long(name):
    assert envs.make(name)[0] == VARIANTS[name]()
    assert_pictures(VARIANTS[name]())
    assert follow(dataclasses.replace(VARIANTS[name](), first_safe=False), 100_000) > 5000


def test_full_and_partial_share_states_and_rewards():
    assert_only_views_differ(MineSweeper(4, 2, "full"), MineSweeper(4, 2, "partial"))


def test_the_mask_is_what_is_closed():
    env = MineSweeper(3, 2)
    state = env.init(jax.random.key(0), env.default_params)
    assert bool(env.action_mask(state, env.default_params).all())
    state = env.transition(jax.random.key(0), state, jnp.asarray(5), env.default_params)
    np.testing.assert_array_equal(env.action_mask(state, env.default_params), np.arange(9) != 5)


def test_masks_of_ten_thousand_boards():
    """Legal is what opens a cell: all actions are tried on every board."""
    env, rng, params = MineSweeper(3, 2), np.random.default_rng(0), MineSweeper().default_params
    state = env.init(jax.random.key(0), params)
    mines = rng.permuted(np.tile(np.arange(9) < 2, (10_000, 1)), axis=1).reshape(-1, 3, 3)
    opened = (rng.random((10_000, 3, 3)) < rng.random((10_000, 1, 1))) & ~mines

    def tried(mines, opened):
        here = state.replace(mines=mines, opened=opened)
        after = jax.vmap(lambda action: env.transition(jax.random.key(0), here, action, params))(
            jnp.arange(9)
        )
        opens = jnp.any(after.opened & ~opened[None], axis=(1, 2))
        return env.action_mask(here, params), opens, env.terminal(here, params)

    mask, opens, over = map(np.asarray, jax.jit(jax.vmap(tried))(mines, opened))
    assert over.any() and not over.all()
    np.testing.assert_array_equal(mask[~over], opens[~over])


def test_seeing_the_mines_returns_one():
    def act(key, env, state, params):
        return jnp.argmin((state.opened | state.mines).reshape(-1)).astype(jnp.int32)

    env = MineSweeper(4, 2)
    record = travel(jax.random.key(1), env, env.default_params, 140, act)
    np.testing.assert_array_equal(np.flatnonzero(record["done"]), np.arange(13, 140, 14))
    np.testing.assert_allclose(
        np.asarray(record["after"].reward).reshape(10, 14).sum(1), 1, rtol=1e-5
    )


def test_random_play_returns_what_chance_gives():
    """1 / (m + 1) - (1 - 1 / C(n^2, m)) / 2 within 5 standard errors: the order of opening is a random permutation."""
    env, returns = MineSweeper(4, 2), []
    for seed in range(8):
        record = travel(jax.random.key(seed), env, env.default_params, 1000)
        ends = np.flatnonzero(record["done"])
        total = np.cumsum(np.asarray(record["after"].reward, np.float64))[ends]
        returns.append(np.diff(total, prepend=0))
    returns = np.concatenate(returns)
    want = 1 / 3 - (1 - 1 / math.comb(16, 2)) / 2
    assert abs(returns.mean() - want) < 5 * returns.std() / np.sqrt(len(returns))


def test_levels_are_uniform():
    env = MineSweeper(2, 2)
    draw = jax.jit(jax.vmap(lambda key: env.sample_level(key, env.default_params)))
    levels = np.asarray(draw(jax.random.split(jax.random.key(0), 6000))).reshape(6000, 4) @ [
        1,
        2,
        4,
        8,
    ]
    counts = np.unique(levels, return_counts=True)[1]
    assert (
        len(counts) == 6 and np.sum((counts - 1000) ** 2 / 1000) < 25.7
    )  # chi-square, 5 degrees, p = 1e-4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((4, 16), "takes 1 to 15 mines .* not 16"),
        ((4, 0), "num_mines=0 must be at least 1"),
        ((4, 2, "half"), "observed='half' is unknown; legal are full, numbers, partial"),
    ],
)
def test_impossible_boards_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        MineSweeper(*fields)


def around(cell, size):
    row, column = divmod(cell, size)
    return {
        r * size + c
        for r in range(max(row - 1, 0), min(row + 2, size))
        for c in range(max(column - 1, 0), min(column + 2, size))
    }


@functools.cache
def best(size, layouts, opened):
    """The value of a belief, mines at one of `layouts` with equal chances, and the cell to open; closed cells only."""
    cells, values = set(range(size**2)), {}
    safe = size**2 - len(layouts[0])
    for cell in sorted(cells - opened):
        seen, value = {}, 0.0
        for mines in layouts:
            if cell in mines:
                value -= 0.5
            else:
                seen.setdefault(len(mines & around(cell, size)), []).append(mines)
        for left in seen.values():
            after = opened | {cell}
            value += len(left) * (
                1 / safe + (best(size, tuple(left), after)[0] if len(after) < safe else 0.0)
            )
        values[cell] = value / len(layouts)
    cell = max(values, key=values.get)
    return values[cell], cell


@pytest.mark.parametrize("num_mines", [1, 2])
def test_the_best_value_by_enumeration_of_beliefs_is_reached(num_mines):
    """Played from what "numbers" shows, over all layouts, the best policy returns the value, dense or sparse."""
    env, params = MineSweeper(3, num_mines, "numbers"), MineSweeper().default_params
    sparse = dataclasses.replace(env, rewards="sparse")
    layouts = tuple(frozenset(mines) for mines in itertools.combinations(range(9), num_mines))
    mines = np.array(
        [[[3 * r + c in each for c in range(3)] for r in range(3)] for each in layouts]
    )
    key = jax.random.key(0)

    @jax.jit
    @jax.vmap
    def move(state, action):
        after = env.transition(key, state, action, params)
        rewards = [each.reward(state, action, after, params) for each in (env, sparse)]
        return (
            after,
            jnp.stack(rewards),
            env.observe(key, after, action, params),
            env.terminal(after, params),
        )

    states = jax.vmap(lambda level: env.init_level(key, level, params))(mines)
    beliefs, opened, over = (
        [layouts] * len(layouts),
        [frozenset()] * len(layouts),
        np.zeros(len(layouts), bool),
    )
    total = np.zeros((len(layouts), 2))
    while not over.all():
        actions = np.array(
            [
                0 if end else best(3, b, o)[1]
                for end, b, o in zip(over, beliefs, opened, strict=True)
            ]
        )
        states, rewards, obs, ends = move(states, actions.astype(np.int32))
        total += rewards  # a state that is over pays nothing
        for i in np.flatnonzero(~(over | np.asarray(ends))):
            opened[i] |= {int(actions[i])}
            shown = read(np.asarray(obs[i]))
            assert "+" not in shown and "*" not in shown
            number, near = int(shown[actions[i]]), around(int(actions[i]), 3)
            beliefs[i] = tuple(
                m for m in beliefs[i] if actions[i] not in m and len(m & near) == number
            )
        over = np.asarray(ends)
    value = best(3, layouts, frozenset())[0]
    np.testing.assert_allclose(total.mean(0), value, rtol=1e-5)
    chance = 1 / (num_mines + 1) - (1 - 1 / math.comb(9, num_mines)) / 2
    assert chance < value < 1, "better than random play, worse than seeing the mines"


def test_the_first_cell_is_safe():
    """The mines are then uniform over the other cells, and as many as they were."""
    env, params = MineSweeper(2, 2, first_safe=True), MineSweeper().default_params

    @jax.jit
    @jax.vmap
    def first_two(key):
        start_key, *keys = jax.random.split(key, 3)
        start = env.init(start_key, params)
        first = env.transition(keys[0], start, jnp.int32(1), params)
        second = env.transition(keys[1], first, jnp.int32(0), params)
        return (
            start.mines,
            first.mines,
            env.reward(start, jnp.int32(1), first, params),
            second.mines,
        )

    start, mines, reward, later = map(
        np.asarray, first_two(jax.random.split(jax.random.key(0), 6000))
    )
    assert not mines[:, 0, 1].any() and (mines.sum((1, 2)) == 2).all() and (reward == 0.5).all()
    kept = ~start[:, 0, 1]
    np.testing.assert_array_equal(mines[kept], start[kept])
    np.testing.assert_array_equal(later, mines)
    counts = np.unique(mines.reshape(-1, 4) @ [1, 2, 4, 8], return_counts=True)[1]
    assert (
        len(counts) == 3 and np.sum((counts - 2000) ** 2 / 2000) < 18.5
    )  # chi-square, 2 degrees, p = 1e-4


def test_sparse_rewards_sum_to_dense_ones_with_illegal_actions_too():
    dense, params = MineSweeper(3, 1), MineSweeper().default_params
    record = travel(jax.random.key(3), dense, params, 500, any_action)
    sparse = dataclasses.replace(dense, rewards="sparse")
    states = record["before"], record["action"], record["after"].state
    paid = np.asarray(jax.jit(jax.vmap(lambda s, a, n: sparse.reward(s, a, n, params)))(*states))
    ends = np.flatnonzero(record["done"])
    sums = [
        np.diff(np.cumsum(np.asarray(each, np.float64))[ends], prepend=0)
        for each in (paid, record["after"].reward)
    ]
    np.testing.assert_allclose(*sums, atol=1e-5)
    assert (paid[~np.asarray(record["done"])] == 0).all() and len(ends) > 50
