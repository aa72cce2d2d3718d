"""Sokoban against a plain set of boxes, and generated levels against breadth-first search."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from journey import travel

from envs.puzzles.rubiks_cube import Scramble
from envs.puzzles.sokoban import Params, Sokoban
from envs.puzzles.sokoban_levels import ReversePlay, Room, given_levels, neighbours, solve
from jaxpar.types import UsageError

MOVES = ((-1, 0), (0, 1), (1, 0), (0, -1))
ONE = """
#######
#@ $ .#
#######
"""
TWO = """
#######
#.$@$.#
#     #
#######
"""

THREE = """
#####
#@  #
# $.#
#   ##
# $. #
######
"""


def plain_step(walls, boxes, player, action):
    """The boxes and the player after a move, or None; sets of pairs."""
    down, right = MOVES[action]
    one, two = (player[0] + down, player[1] + right), (player[0] + 2 * down, player[1] + 2 * right)
    if one in walls or (one in boxes and (two in walls or two in boxes)):
        return None
    return (boxes - {one} | {two} if one in boxes else boxes), one


def plain(room):
    """Walls with the rim outside, boxes, goals and player as pairs."""
    walls = {
        tuple(cell - 1)
        for cell in np.argwhere(np.pad(np.asarray(room.walls), 1, constant_values=True))
    }
    boxes, goals = (
        {tuple(cell) for cell in np.argwhere(np.asarray(grid))} for grid in (room.boxes, room.goals)
    )
    return walls, boxes, goals, divmod(int(room.player), room.walls.shape[1])


@pytest.mark.parametrize("rewards", ["dense", "sparse"])
def test_twin(rewards):
    """Step by step; what an episode pays is what it ends with."""
    env, params = Sokoban(given_levels(ONE, TWO, THREE), rewards=rewards), Params(max_steps=40)
    record = jax.tree.map(np.asarray, travel(jax.random.key(0), env, params, 1000))
    after, ends, total = record["after"], set(), 0.0
    for t in range(1000):
        walls, boxes, goals, player = plain(
            jax.tree.map(lambda leaf, t=t: leaf[t], record["before"])
        )
        total, steps = (0.0, 0) if record["start"][t] else (total, steps)
        boxes, player = plain_step(walls, boxes, player, int(record["action"][t]))
        state = jax.tree.map(lambda leaf, t=t: leaf[t], after.state)
        assert plain(state)[1] == boxes and plain(state)[3] == player
        total, steps, solved = total + after.reward[t], steps + 1, boxes == goals
        assert (after.terminated[t], after.truncated[t]) == (solved, steps == 40)
        np.testing.assert_array_equal(np.argwhere(after.obs[t, :, :, 2]), sorted(boxes))
        if record["done"][t]:
            assert abs(total - solved) < 1e-6
            ends.add(solved)
    assert ends == {True, False}


def test_masks_in_ten_thousand_rooms():
    rng = np.random.default_rng(0)
    walls = rng.random((10_000, 4, 5)) < 0.3
    boxes = ~walls & (rng.random((10_000, 4, 5)) < 0.4)
    player = rng.integers(0, 20, 10_000).astype(np.int32)
    rooms, env = Room(walls, boxes, boxes, player), Sokoban(given_levels(ONE))

    def one(room):
        return env.action_mask(env.init_level(jax.random.key(0), room, Params()), Params())

    masks = np.asarray(jit(jax.vmap(one))(rooms))
    solid = np.pad(walls, ((0, 0), (2, 2), (2, 2)), constant_values=True).tolist()
    stones = np.pad(boxes, ((0, 0), (2, 2), (2, 2))).tolist()
    for i, (wall, box) in enumerate(zip(solid, stones, strict=True)):
        (row, column), want = divmod(int(player[i]), 5), []
        for down, right in MOVES:
            (r, c), (r2, c2) = ((row + 2 + k * down, column + 2 + k * right) for k in (1, 2))
            want.append(not wall[r][c] and not (box[r][c] and (wall[r2][c2] or box[r2][c2])))
        assert masks[i].tolist() == want
    assert 0.2 < masks.mean() < 0.8


def check_levels(generator, count):
    rooms = jax.tree.map(
        np.asarray, jit(jax.vmap(generator))(jax.random.split(jax.random.key(0), count))
    )
    lengths = []
    for i in range(count):
        room = jax.tree.map(lambda leaf, i=i: leaf[i], rooms)
        assert room.boxes.sum() == room.goals.sum() == generator.boxes
        assert (
            not (room.walls & (room.boxes | room.goals)).any()
            and room.walls.all(0).sum() <= generator.size
        )
        assert room.walls[[0, -1]].all() and room.walls[:, [0, -1]].all()
        assert not room.walls.flat[room.player] and not room.boxes.flat[room.player]
        moves, (walls, boxes, goals, player) = solve(room), plain(room)
        lengths.append(len(moves))
        for move in moves:  # the search knows the same rules as the plain game
            boxes, player = plain_step(walls, boxes, player, move)
        assert boxes == goals and moves
    return np.array(lengths)


def test_generated_levels_have_solutions():
    lengths = check_levels(ReversePlay(7, 1, 40, 40), 100)
    assert len(np.unique(lengths)) > 5 and np.median(lengths) > 3


@pytest.mark.slow
def test_a_thousand_levels_have_solutions():
    """A minute or two."""
    lengths = check_levels(ReversePlay(), 1000)
    assert np.median(lengths) > 8


def test_given_levels():
    one, two = given_levels(ONE).levels()[0], given_levels(ONE, TWO).levels()[1]
    assert one.walls.shape == (3, 7) and two.walls.shape == (4, 7) and solve(one) == [1, 1, 1]
    assert two.boxes.sum() == two.goals.sum() == 2 and two.player == 7 + 3 and len(solve(two)) == 3
    walls, boxes, goals, player = plain(two)
    for move in solve(two):
        boxes, player = plain_step(walls, boxes, player, move)
    assert boxes == goals
    assert solve(two, searched=1) is None
    np.testing.assert_array_equal(
        neighbours(2, 2), [[4, 1, 2, 4], [4, 4, 3, 0], [0, 3, 4, 4], [1, 4, 4, 2], [4] * 4]
    )


def test_an_illegal_action_ends_and_costs():
    for rewards in ("dense", "sparse"):
        env, params = (
            Sokoban(given_levels("#@$ .$.#", searched=0), rewards=rewards),
            Params(illegal_cost=2.0),
        )
        state, paid = env.init(jax.random.key(0), params), 0.0
        np.testing.assert_array_equal(env.action_mask(state, params), [False, True, False, False])
        for action in (1, 1, 1, 2):  # the third would push two boxes
            before, state = (
                state,
                env.transition(jax.random.key(0), state, jnp.int32(action), params),
            )
            paid += float(env.reward(before, action, state, params))
        assert (
            paid == -2
            and env.terminal(state, params)
            and state.time == 2
            and env.heuristic(state, params) == 0
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("#@$.%#", "not with '%'"),
        ("#@$.@#", "this one has 2 players, 1 boxes, 1 goals and 0 there"),
        ("#@$..#", "1 boxes, 2 goals"),
        ("#@ *#", "1 boxes, 1 goals and 1 there"),
        ("#$@.#", "has no solution"),
        ("", "0 players, 0 boxes"),
    ],
)
def test_bad_levels_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        given_levels(text)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="puts 1 to 2 boxes into a room of size 5, not 3"):
        ReversePlay(5, 3)
    with pytest.raises(UsageError, match="takes a generator of .*Room .*but Scramble draws"):
        Sokoban(Scramble())
