"""Sliding tiles against plain lists, and all 181,440 boards of the 8-puzzle."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from journey import travel

from envs.puzzles.rubiks_cube import Scramble
from envs.puzzles.sliding_tile import (
    Params,
    Shuffle,
    SlidingTile,
    Tiles,
    farthest,
    given_tiles,
    manhattan,
    slides,
)
from jaxpar.types import UsageError


def plain_moves(tiles, size):
    """Boards by action, where there is one."""
    gap = tiles.index(0)
    row, column = divmod(gap, size)
    for action, (down, right) in enumerate(((-1, 0), (0, 1), (1, 0), (0, -1))):
        if 0 <= row + down < size and 0 <= column + right < size:
            target, moved = (row + down) * size + column + right, list(tiles)
            moved[gap], moved[target] = moved[target], 0
            yield action, tuple(moved)


def plain_distance(tiles, size):
    places = ((divmod(i, size), divmod(tile - 1, size)) for i, tile in enumerate(tiles) if tile)
    return sum(abs(r - x) + abs(c - y) for (r, c), (x, y) in places)


def depths(size):
    """Moves to the solved board from every board that has a way to it."""
    start = (*range(1, size**2), 0)
    found, edge = {start: 0}, [start]
    for depth in itertools.count(1):
        edge = {after for board in edge for _, after in plain_moves(board, size)} - found.keys()
        if not edge:
            return found
        found |= dict.fromkeys(edge, depth)


@pytest.mark.parametrize("rewards", ["dense", "sparse"])
def test_twin(rewards):
    """Step by step; what an episode pays is what it ends with."""
    env, params = SlidingTile(Shuffle(2), rewards=rewards), Params(max_steps=20)
    record = jax.tree.map(np.asarray, travel(jax.random.key(0), env, params, 500))
    before, after, total, ends = record["before"], record["after"], 0.0, set()
    for t in range(500):
        board, steps = (
            tuple(before.tiles[t].reshape(-1).tolist()),
            0 if record["start"][t] else steps,
        )
        total = 0.0 if record["start"][t] else total
        want = dict(plain_moves(board, 2))[int(record["action"][t])]
        assert tuple(after.state.tiles[t].reshape(-1).tolist()) == want
        assert after.state.wrong[t] == plain_distance(want, 2)
        total, steps, solved = total + after.reward[t], steps + 1, want == (1, 2, 3, 0)
        assert (after.terminated[t], after.truncated[t]) == (solved, steps == 20)
        if record["done"][t]:
            assert abs(total - solved) < 1e-6
            ends.add(solved)
        else:
            assert rewards == "dense" or after.reward[t] == 0
    assert ends == {True, False}


def test_masks_on_ten_thousand_boards():
    env, rng = SlidingTile(), np.random.default_rng(0)
    boards = rng.permuted(np.tile(np.arange(9, dtype=np.int8), (10_000, 1)), axis=1)
    level = Tiles(boards.reshape(-1, 3, 3))

    def one(level):
        state = env.init_level(jax.random.key(0), level, Params())
        return env.action_mask(state, Params()), state.wrong

    masks, wrong = map(np.asarray, jit(jax.vmap(one))(level))
    moves = [dict(plain_moves(board, 3)) for board in map(tuple, boards.tolist())]
    np.testing.assert_array_equal(
        masks, [[action in legal for action in range(4)] for legal in moves]
    )
    np.testing.assert_array_equal(wrong, [plain_distance(board, 3) for board in boards.tolist()])
    assert wrong.max() <= farthest(3)


def test_shuffles_can_be_solved_and_are_uniform():
    """On 2 x 2 boards eleven orders are left, and on 3 x 3 and 4 x 4 ones the parity is right."""
    ways = depths(2)
    assert len(ways) == 12 and max(ways.values()) == 6
    draw = jit(jax.vmap(Shuffle(2)))
    boards = np.asarray(draw(jax.random.split(jax.random.key(0), 6000)).tiles).reshape(-1, 4)
    found, counts = np.unique(boards, axis=0, return_counts=True)
    assert {tuple(board) for board in found.tolist()} == ways.keys() - {(1, 2, 3, 0)}
    near = np.array([ways[tuple(board)] == 1 for board in found.tolist()])
    want = np.where((found == [1, 0, 3, 2]).all(1), 1000.0, 500.0)  # the solved board is moved up
    assert (
        near.sum() == 2 and np.sum((counts - want) ** 2 / want) < 35.6
    )  # chi-square, 10 degrees, p = 1e-4
    for size in (3, 4):
        for key in jax.random.split(jax.random.key(1), 10):
            tiles = np.asarray(Shuffle(size)(key).tiles).reshape(-1)
            order, swaps = tiles.copy(), 0
            for i in range(size**2):  # sorted by exchanges: each changes the parity
                goal = (i + 1) % size**2
                if order[i] != goal:
                    j = int(np.flatnonzero(order == goal)[0])
                    order[[i, j]], swaps = order[[j, i]], swaps + 1
            row, column = divmod(int(np.argmin(tiles)), size)
            assert swaps % 2 == (2 * size - 2 - row - column) % 2


@pytest.mark.slow
def test_all_of_the_eight_puzzle():
    """181,440 boards, 31 moves or fewer, two that need all; Manhattan never says more than is needed. Ten seconds."""
    ways = depths(3)
    assert (
        len(ways) == 181_440
        and max(ways.values()) == 31
        and sum(d == 31 for d in ways.values()) == 2
    )
    boards = np.array(list(ways), np.int8)
    guess = np.asarray(jax.jit(jax.vmap(manhattan))(boards))
    assert (guess <= list(ways.values())).all() and (guess[1:] > 0).all() and guess[0] == 0


def test_the_first_spheres_of_the_eight_puzzle():
    """1, 2, 4, 8, 16, 20, 39, 62, 116, 152, 286 boards, by our table of moves."""
    edge, seen, sizes = {bytes([1, 2, 3, 4, 5, 6, 7, 8, 0])}, set(), []
    for _ in range(11):
        sizes.append(len(edge))
        seen |= edge
        after = set()
        for board in edge:
            gap = board.index(0)
            for target in slides(3)[gap]:
                if target >= 0:
                    moved = bytearray(board)
                    moved[gap], moved[target] = moved[target], 0
                    after.add(bytes(moved))
        edge = after - seen
    assert sizes == [1, 2, 4, 8, 16, 20, 39, 62, 116, 152, 286]


def test_an_illegal_action_ends_and_costs():
    env, params = SlidingTile(given_tiles([[1, 2], [0, 3]])), Params(illegal_cost=2.0)
    state = env.init(jax.random.key(0), params)
    np.testing.assert_array_equal(env.action_mask(state, params), [True, True, False, False])
    after = env.transition(jax.random.key(0), state, jnp.int32(3), params)
    assert env.terminal(after, params) and env.reward(state, 3, after, params) == -2
    again = env.transition(jax.random.key(0), after, jnp.int32(1), params)
    assert env.reward(after, 1, again, params) == 0 and env.heuristic(after, params) == 0
    np.testing.assert_array_equal(again.tiles, state.tiles)


@pytest.mark.parametrize(
    ("board", "message"),
    [
        ([[2, 1], [3, 0]], "no moves solve"),
        ([[1, 2], [3, 0]], "are in order"),
        ([[1, 2, 3], [4, 5, 0]], r"a board \[n, n\] of the numbers 0 to"),
        ([[1, 1], [3, 0]], r"a board \[n, n\] of the numbers 0 to"),
    ],
)
def test_what_cannot_be_solved_is_refused(board, message):
    with pytest.raises(UsageError, match=message):
        given_tiles(np.array(board))


def test_other_generators_are_refused():
    with pytest.raises(UsageError, match="takes a generator of .*Tiles .*but Scramble draws"):
        SlidingTile(Scramble())
