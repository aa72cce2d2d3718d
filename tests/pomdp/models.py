"""Small published models, built from their definitions."""

import jax
import numpy as np

import envs
from jaxpar.pomdp import TabularPomdp, from_environment


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def tiger(discount=0.95):
    env, params = envs.make("Tiger")
    return from_environment(env, params.replace(discount=discount))


def baby():
    return from_environment(*envs.make("CryingBaby"))


def rows_of(num_columns, rows):
    """A matrix from a dictionary of its entries that are not zero, a row each."""
    matrix = np.zeros((len(rows), num_columns))
    for row, entries in enumerate(rows):
        for column, value in entries.items():
            matrix[row, column] = value
    return matrix


def maze1d():
    """Four cells in a line, the third the goal, from which one starts anew elsewhere; only the goal looks different."""
    anew = {0: 1 / 3, 1: 1 / 3, 2: 1 / 3}
    west = rows_of(4, [{0: 1}, {0: 1}, {3: 1}, anew])
    east = rows_of(4, [{1: 1}, {3: 1}, {2: 1}, anew])
    seen = rows_of(2, [{0: 1}, {0: 1}, {0: 1}, {1: 1}])
    reward = np.zeros((2, 4, 4))
    reward[:, :, 3] = 1
    return TabularPomdp.of(np.stack([west, east]), np.stack([seen, seen]), reward, None, 0.75)


def shuttle():
    """Chrisman (1992): carry supplies between two docks; least and most recently visited are told apart.

    States: docked in L, facing M from outside, space facing L, back to L, back to M, space facing
    M, facing L, docked in M. Actions: turn, forward, back up. Observations: L, M, docked in M,
    nothing, docked in L.
    """
    turn = rows_of(8, [{1: 1}, {4: 1}, {5: 1}, {6: 1}, {1: 1}, {2: 1}, {3: 1}, {1: 1}])
    forward = rows_of(8, [{4: 1}, {1: 1}, {1: 1}, {2: 1}, {5: 1}, {6: 1}, {6: 1}, {4: 1}])
    back = [
        {7: 1},
        {1: 0.4, 2: 0.3, 4: 0.3},
        {2: 0.1, 3: 0.8, 6: 0.1},
        {0: 0.7, 3: 0.3},
        {4: 0.3, 7: 0.7},
    ]
    back = rows_of(8, [*back, {1: 0.1, 4: 0.8, 5: 0.1}, {3: 0.3, 5: 0.3, 6: 0.4}, {7: 1}])
    seen = [{4: 1}, {1: 1}, {1: 0.7, 3: 0.3}, {3: 1}, {3: 1}, {0: 0.7, 3: 0.3}, {0: 1}, {2: 1}]
    reward = np.zeros((3, 8, 8))
    reward[1, 1, 1] = reward[1, 6, 6] = -3
    reward[2, 3, 0] = 10
    return TabularPomdp.of(
        np.stack([turn, forward, back]), np.stack([rows_of(5, seen)] * 3), reward, np.eye(8)[7]
    )


def random_model(seed=0, states=3, actions=2, observations=2, discount=0.9):
    rng = np.random.default_rng(seed)
    return TabularPomdp.of(
        rng.dirichlet(np.ones(states), (actions, states)),
        rng.dirichlet(np.ones(observations), (actions, states)),
        rng.normal(size=(actions, states)),
        rng.dirichlet(np.ones(states)),
        discount,
    )


def maze4x3():
    """Russell's 4 x 3 maze as Parr and Russell (1995) made a POMDP of it: one sees walls to the left and right.

    A move slips to either side with 0.1; after + or - one starts anew. The benchmark moves one
    slip, that of going east from the cell south of the wall's right neighbour, to the west in place
    of against the wall; its published value needs that.
    """
    cells = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 2), (1, 3), (2, 0), (2, 1), (2, 2), (2, 3)]
    moves, sides = [(-1, 0), (1, 0), (0, 1), (0, -1)], [(2, 3), (2, 3), (0, 1), (0, 1)]
    anew = np.full(11, 1 / 9)
    anew[[3, 6]] = 0
    transition = np.zeros((4, 11, 11))
    for action in range(4):
        for state, (row, column) in enumerate(cells):
            for made, chance in ((action, 0.8), *((side, 0.1) for side in sides[action])):
                to = row + moves[made][0], column + moves[made][1]
                transition[action, state, cells.index(to) if to in cells else state] += chance
    transition[:, [3, 6]] = anew
    transition[2, 9, [8, 9]] = 0.1, 0
    seen = np.eye(6)[[0, 2, 2, 4, 3, 0, 5, 0, 2, 2, 1]]  # left, right, neither, both, good, bad
    reward = np.full((4, 11), -0.04)
    reward[:, [3, 6]] = 1, -1
    return TabularPomdp.of(transition, np.stack([seen] * 4), reward, anew)


def heavenhell():
    """Geffner and Bonet (1998): one of two arms of a T ends in heaven, the other in hell; a priest at the foot knows.

    Cells 0 .. 9: the start, the trunk 1 and 2, the left arm 3 and 4, the right one 5 and 6, and 7,
    8, 9 to the priest below; twice, with heaven on the left and on the right. Each cell looks like
    itself but the priest's, who tells. From 4 and 6 one starts anew, for 1 or -1. Actions: north,
    south, east, west.
    """
    moves = {0: {0: 1, 1: 2, 7: 0}, 1: {1: 0, 2: 1, 0: 7}, 2: {3: 2, 4: 3, 2: 5, 5: 6, 7: 8, 8: 9}}
    moves[3] = {2: 3, 3: 4, 5: 2, 6: 5, 8: 7, 9: 8}
    start = np.zeros(20)
    start[[0, 10]] = 0.5
    transition, seen, reward = np.zeros((4, 20, 20)), np.zeros((20, 11)), np.zeros((4, 20))
    for side in (0, 10):
        for cell in range(10):
            seen[side + cell, cell if cell < 9 else 9 + (side > 0)] = 1
            for action in range(4):
                transition[action, side + cell, side + moves[action].get(cell, cell)] = 1
        transition[:, [side + 4, side + 6]] = start
        reward[:, [side + 4, side + 6]] = (1, -1) if side == 0 else (-1, 1)
    return TabularPomdp.of(transition, np.stack([seen] * 4), reward, start, 0.99)
