"""2048 against a plain board, all rows of four, and the 2 x 2 board solved exactly."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import OPTIMISED, jit
from journey import travel

from envs.puzzles.tiles2048 import (
    Params,
    Start,
    State,
    Tiles2048,
    given_boards,
    legal_slides,
    slide_left,
)
from jaxpar.env.spaces import legal_sample
from jaxpar.types import UsageError


def plain_line(line):
    """One line moved to the left, and what it earns."""
    left, score = [], 0
    for tile in [tile for tile in line if tile]:
        if left and left[-1] == [tile, False]:
            left[-1] = [tile + 1, True]
            score += 2 ** (tile + 1)
        else:
            left.append([tile, False])
    return tuple([tile for tile, _ in left] + [0] * (len(line) - len(left))), score


def plain_move(board, action):
    """The board, a tuple of rows, after one move without a new tile, and what it earns."""
    lines = [tuple(line) for line in (zip(*board, strict=True) if action in (0, 2) else board)]
    lines = [line[::-1] if action in (1, 2) else line for line in lines]
    moved = [plain_line(line) for line in lines]
    lines = [line[::-1] if action in (1, 2) else line for line, _ in moved]
    return tuple(zip(*lines, strict=True)) if action in (0, 2) else tuple(lines), sum(
        score for _, score in moved
    )


def plain_moves(board):
    return [action for action in range(4) if plain_move(board, action)[0] != board]


def spawns(board):
    """Boards with one more tile, and their chances."""
    empty = [(r, c) for r, row in enumerate(board) for c, tile in enumerate(row) if not tile]
    for (r, c), (tile, chance) in itertools.product(empty, ((1, 0.9), (2, 0.1))):
        rows = [list(row) for row in board]
        rows[r][c] = tile
        yield tuple(map(tuple, rows)), chance / len(empty)


@functools.cache
def best(board):
    """The greatest expected score from a board, and its action: tiles only grow, so the recursion ends."""
    values = {}
    for action in plain_moves(board):
        moved, score = plain_move(board, action)
        values[action] = score + sum(chance * best(after)[0] for after, chance in spawns(moved))
    return max(((value, action) for action, value in values.items()), default=(0.0, 0))


def test_every_line_of_four():
    """All 18^4."""
    lines = np.stack(
        np.meshgrid(*[np.arange(18, dtype=np.int8)] * 4, indexing="ij"), axis=-1
    ).reshape(-1, 4)
    moved, score = map(np.asarray, jax.jit(slide_left, compiler_options=OPTIMISED)(lines))
    want = [plain_line(line) for line in lines.tolist()]
    np.testing.assert_array_equal(moved, [line for line, _ in want])
    np.testing.assert_array_equal(score, [earned for _, earned in want])


def test_twin():
    env = Tiles2048()
    record = jax.tree.map(np.asarray, travel(jax.random.key(4), env, Params(), 1000))
    before, after, total = record["before"], record["after"], 0
    for t in range(1000):
        board = tuple(map(tuple, before.tiles[t].tolist()))
        total = 0 if record["start"][t] else total
        moved, score = plain_move(board, int(record["action"][t]))
        total += score
        assert tuple(map(tuple, after.state.tiles[t].tolist())) in dict(spawns(moved))
        assert after.reward[t] == score and after.state.score[t] == total
        assert after.terminated[t] == (
            not plain_moves(tuple(map(tuple, after.state.tiles[t].tolist())))
        )
    assert record["done"].sum() > 3


def test_masks_on_ten_thousand_boards():
    rng = np.random.default_rng(0)
    boards = rng.integers(0, 5, (10_000, 3, 3)) * (rng.random((10_000, 3, 3)) < 0.8)
    masks = np.asarray(jit(jax.vmap(legal_slides))(boards.astype(np.int8)))
    want = [
        [action in plain_moves(board) for action in range(4)]
        for board in map(_rows, boards.tolist())
    ]
    np.testing.assert_array_equal(masks, want)
    assert 0 < masks.mean() < 1 and (~masks.any(1)).sum() > 5


def _rows(board):
    return tuple(map(tuple, board))


def _returns(env, act, lanes=1024, steps=64):
    """One episode of each lane: first boards, dense and sparse returns, whether all is over, scores."""
    sparse = dataclasses.replace(env, rewards="sparse")

    def one(key):
        first, *keys = jax.random.split(key, steps + 1)
        start = env.init(first, Params())

        def move(state, key):
            action = act(key, state)
            after = env.transition(key, state, action, Params())
            return after, [each.reward(state, action, after, Params()) for each in (env, sparse)]

        end, rewards = jax.lax.scan(move, start, jnp.stack(keys))
        return start.tiles, *map(jnp.sum, rewards), env.terminal(end, Params()), end.score

    return map(np.asarray, jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(1), lanes)))


@functools.cache
def _table():
    """The best action of every 2 x 2 board, by its number in base 6; tiles of more than 2^5 cannot be."""
    table = np.zeros(6**4, np.int32)
    for tiles in itertools.product(range(6), repeat=4):
        table[np.dot(tiles, 6 ** np.arange(4))] = best((tiles[:2], tiles[2:]))[1]
    return table


def test_the_two_by_two_board_is_solved():
    """The optimal policy earns the optimal value within five standard errors, and random play earns less."""
    env = Tiles2048(Start(2))

    def optimal(key, state):
        return jnp.asarray(_table())[jnp.sum(state.tiles.reshape(-1) * 6 ** np.arange(4))]

    def random(key, state):
        return legal_sample(key, env.action_space(Params()), legal_slides(state.tiles))

    starts, returns, sparse, over, score = _returns(env, optimal)
    values = np.array([best(_rows(start))[0] for start in starts.tolist()])
    assert over.all() and (returns == score).all() and (sparse == score).all()
    assert abs(np.mean(returns - values)) < 5 * np.std(returns - values) / 32
    _, worse, sparse, over, _ = _returns(env, random)
    assert (
        over.all()
        and (worse == sparse).all()
        and worse.mean() + 5 * worse.std() / 32 < values.mean()
    )


def test_new_tiles_are_uniform_and_a_tenth_are_fours():
    env = Tiles2048(given_boards([[2, 2], [0, 0]]))
    step = jit(
        jax.vmap(lambda key, state: env.transition(key, state, jnp.int32(3), Params()), (0, None))
    )
    state = env.init(jax.random.key(0), Params())
    tiles = np.asarray(step(jax.random.split(jax.random.key(1), 9000), state).tiles).reshape(-1, 4)
    assert (tiles[:, 0] == 2).all()
    counts = np.array([[(tiles[:, cell] == tile).sum() for cell in (1, 2, 3)] for tile in (1, 2)])
    want = np.array([[2700.0] * 3, [300.0] * 3])
    assert (
        counts.sum() == 9000 and np.sum((counts - want) ** 2 / want) < 25.7
    )  # chi-square, 5 degrees, p = 1e-4


def test_an_illegal_action_ends_and_costs():
    env = Tiles2048(given_boards([[2, 4], [4, 0]]))
    state = env.init(jax.random.key(0), Params())
    np.testing.assert_array_equal(env.action_mask(state, Params()), [False, True, True, False])
    after = env.transition(jax.random.key(0), state, jnp.int32(0), Params(illegal_cost=3.0))
    assert bool(after.illegal) and env.reward(state, 0, after, Params(illegal_cost=3.0)) == -3
    np.testing.assert_array_equal(after.tiles, state.tiles)
    again = env.transition(jax.random.key(0), after, jnp.int32(1), Params(illegal_cost=3.0))
    assert (
        env.reward(after, 1, again, Params(illegal_cost=3.0)) == 0
        and env.heuristic(after, Params()) == 0
    )


def test_what_cannot_be_played_is_refused():
    for boards, message in (
        ([[[2, 4], [4, 2]]], "no move changes"),
        ([[[2, 4, 8], [4, 2, 8]]], r"takes a board \[n, n\]"),
        ([[[2, 3], [4, 2]]], r"tiles are 0 or 2, 4, 8 ... 2\^5, not \[2, 3, 4\]"),
        ([[[2, 64], [4, 2]]], "tiles are 0 or 2"),
    ):
        with pytest.raises(UsageError, match=message):
            given_boards(*(np.array(board) for board in boards))
    with pytest.raises(UsageError, match="2048 takes a generator"):
        Tiles2048(State)
    with pytest.raises(UsageError, match="size=1 must be"):
        Start(1)
