"""Connector against agents that move one after the other, and generated boards by the ways that made them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from journey import record

from envs.puzzles.connector import Connector, Params, State
from envs.puzzles.connector_boards import RandomWalks, connect, given_wires
from envs.puzzles.rubiks_cube import Scramble
from jaxpar.types import UsageError

MOVES = ((0, 0), (-1, 0), (0, 1), (1, 0), (0, -1))


def plain_target(owner, heads, targets, agent, action):
    """The cell that a legal action leads to, or None."""
    size, head = len(owner), heads[agent]
    if action == 0:
        return head
    row, column = head // size + MOVES[action][0], head % size + MOVES[action][1]
    inside, cell = 0 <= row < size and 0 <= column < size, row * size + column
    taken = head == targets[agent] or not inside or owner[row][column]
    return (
        None
        if taken or any(cell == other for j, other in enumerate(targets) if j != agent)
        else cell
    )


def plain_step(owner, heads, targets, actions):
    """All move in turn; who finds the cell taken stays."""
    owner, heads = [list(row) for row in owner], list(heads)
    for agent, action in enumerate(actions):
        cell = plain_target(owner, heads, targets, agent, action)
        if action and cell is not None:
            heads[agent], owner[cell // len(owner)][cell % len(owner)] = cell, agent + 1
    return owner, heads


def test_twin():
    """Paths, ends and rewards of three agents who often want the same cell; both kinds of rewards sum to the same."""
    env, params = Connector(RandomWalks(4, 3, 4)), Params(max_steps=12)
    _, states, masks, actions, moved = record(env, params, 60, 8)
    ends, met = 0, 0
    for b in range(8):
        total = np.zeros(3)
        for t in range(60):
            owner, heads, targets = (
                np.asarray(x[t, b]).tolist() for x in (states.owner, states.heads, states.targets)
            )
            legal = [
                [plain_target(owner, heads, targets, i, a) is not None for a in range(5)]
                for i in range(3)
            ]
            assert masks[t, b].tolist() == legal
            after, places = plain_step(owner, heads, targets, actions[t, b].tolist())
            assert (
                moved.state.owner[t, b].tolist() == after
                and moved.state.heads[t, b].tolist() == places
            )
            met += sum(
                a > 0 and old == new
                for a, old, new in zip(actions[t, b], heads, places, strict=True)
            )
            total = total * (states.time[t, b] > 0) + moved.reward[t, b]
            np.testing.assert_allclose(total, np.equal(places, targets) / 3, atol=1e-6)
            stuck = all(
                plain_target(after, places, targets, i, a) is None
                for i in range(3)
                for a in range(1, 5)
            )
            assert (moved.terminated[t, b] == stuck).all()
            assert (moved.truncated[t, b] == (states.time[t, b] == 11)).all()
            ends += stuck
    assert ends > 10 and met > 3
    sparse, last = Connector(env.generator, "sparse"), moved.terminated | moved.truncated
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (states, actions, moved.state))
    paid = np.asarray(jit(jax.vmap(lambda s, a, n: sparse.reward(s, a, n, params)))(*flat)).reshape(
        60, 8, 3
    )
    want = (moved.state.heads == moved.state.targets) / 3
    np.testing.assert_allclose(paid, np.where(last, want, 0), atol=1e-6)


def test_masks_on_ten_thousand_boards():
    rng = np.random.default_rng(0)
    env, params, count = Connector(given_wires("a..\n.bA\nB..", searched=0)), Params(), 10_000
    owner = (rng.integers(1, 3, (count, 9)) * (rng.random((count, 9)) < 0.4)).astype(np.int8)
    cells = rng.permuted(np.tile(np.arange(9, dtype=np.int32), (count, 1)), axis=1)
    heads, targets = (
        cells[:, :2],
        np.where(rng.random((count, 1)) < 0.9, cells[:, 2:4], cells[:, :2]),
    )
    states = State(
        owner.reshape(-1, 3, 3),
        heads,
        targets,
        np.zeros((count, 2), bool),
        np.zeros(count, np.int32),
    )
    masks = np.asarray(jit(jax.vmap(lambda state: env.action_mask(state, params)))(states))
    boards = zip(states.owner.tolist(), heads.tolist(), targets.tolist(), strict=True)
    want = [
        [[plain_target(*board, i, a) is not None for a in range(5)] for i in range(2)]
        for board in boards
    ]
    np.testing.assert_array_equal(masks, want)


def test_what_walked_is_a_solution():
    """Replayed by the environment, the ways of the generator are legal, join all, are connected and disjoint."""
    walks, params = RandomWalks(6, 4, 8), Params()
    env = Connector(walks)

    def replay(key):
        level, actions = walks.attempt(key)
        start = env.init_level(key, level, params)

        def one(state, action):
            after = env.transition(key, state, action, params)
            return after, (after.heads, env.reward(state, action, after, params))

        end, (heads, rewards) = jax.lax.scan(one, start, actions)
        return level, end, jnp.concatenate([level.starts[None], heads]), rewards.sum(0)

    level, end, heads, paid = jax.tree.map(
        np.asarray, jit(jax.vmap(replay))(jax.random.split(jax.random.key(0), 200))
    )
    assert not end.illegal.any() and (end.heads == level.targets).all()
    moved = (level.starts != level.targets).all(1)
    assert moved.mean() > 0.8
    np.testing.assert_allclose(paid[moved], 1 / 4)
    for b in range(200):
        ways = [list(dict.fromkeys(heads[b, :, i].tolist())) for i in range(4)]
        cells = [cell for way in ways for cell in way]
        assert len(cells) == len(set(cells)) and (end.owner[b] > 0).sum() == len(cells)
        for way in ways:
            for one, two in zip(way, way[1:], strict=False):
                assert abs(one // 6 - two // 6) + abs(one % 6 - two % 6) == 1
        assert (
            b >= 20 or connect(6, level.starts[b].tolist(), level.targets[b].tolist(), 10**5) != []
        )
    drawn = jax.tree.map(np.asarray, jit(jax.vmap(walks))(jax.random.split(jax.random.key(1), 200)))
    assert (drawn.starts != drawn.targets).all()


def test_the_first_gets_the_cell_and_illegal_actions_end():
    board = given_wires("a.b\n...\nA.B")
    for rewards in ("dense", "sparse"):
        env, params = Connector(board, rewards), Params(illegal_cost=2.0)
        state = env.init(jax.random.key(0), params)
        both = env.transition(jax.random.key(0), state, jnp.array([2, 4]), params)
        np.testing.assert_array_equal(both.heads, [1, 2])
        wrong = env.transition(jax.random.key(0), both, jnp.array([1, 3]), params)
        assert bool(env.terminal(wrong, params).all()) and env.heuristic(wrong, params) == 0
        np.testing.assert_array_equal(env.reward(both, jnp.array([1, 3]), wrong, params), [-2, 0])
        np.testing.assert_array_equal(wrong.heads, both.heads)
        again = env.transition(jax.random.key(0), wrong, jnp.array([0, 3]), params)
        np.testing.assert_array_equal(env.reward(wrong, jnp.array([0, 3]), again, params), [0, 0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ab\nBA", "no paths that do not cross"),
        ("a.\n.A.", "takes square boards"),
        ("ab\n.A", "every letter once small and once capital"),
        ("..\n..", "every letter once small"),
    ],
)
def test_bad_boards_are_refused(text, message):
    with pytest.raises(UsageError, match=message):
        given_wires(text)


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="puts 1 to 4 agents on a board of size 4, not 5"):
        RandomWalks(4, 5)
    with pytest.raises(UsageError, match="takes a generator of .*Wires .*but Scramble draws"):
        Connector(Scramble())
