"""The cube against cycles written down by hand, identities of its group, and spheres counted by others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from journey import travel

from envs.puzzles.rubiks_cube import (
    FACES,
    Params,
    RubiksCube,
    Scramble,
    cube_turns,
    given_cubes,
    misplaced,
)
from envs.puzzles.sliding_tile import Shuffle
from jaxpar.types import UsageError

# D. Singmaster's cycles: what lies at the first goes to the second, and so on; stickers of a face from 1 in rows.
CYCLES = {
    "U": "U1 U3 U9 U7, U2 U6 U8 U4, F1 L1 B1 R1, F2 L2 B2 R2, F3 L3 B3 R3",
    "R": "R1 R3 R9 R7, R2 R6 R8 R4, F3 U3 B7 D3, F6 U6 B4 D6, F9 U9 B1 D9",
    "F": "F1 F3 F9 F7, F2 F6 F8 F4, U7 R1 D3 L9, U8 R4 D2 L6, U9 R7 D1 L3",
    "D": "D1 D3 D9 D7, D2 D6 D8 D4, F7 R7 B7 L7, F8 R8 B8 L8, F9 R9 B9 L9",
    "L": "L1 L3 L9 L7, L2 L6 L8 L4, U1 F1 D1 B9, U4 F4 D4 B6, U7 F7 D7 B3",
    "B": "B1 B3 B9 B7, B2 B6 B8 B4, U1 L7 D9 R3, U2 L4 D8 R6, U3 L1 D7 R9",
}


def twin_turn(cube, face):
    """A dictionary from names of stickers to colours after one clockwise turn."""
    after = dict(cube)
    for cycle in CYCLES[face].split(", "):
        names = cycle.split()
        for start, end in zip(names, names[1:] + names[:1], strict=True):
            after[end] = cube[start]
    return after


def named(stickers):
    return {
        f"{face}{i + 1}": int(stickers[f * 9 + i]) for f, face in enumerate(FACES) for i in range(9)
    }


def unnamed(cube):
    return np.array([cube[f"{face}{i + 1}"] for face in FACES for i in range(9)])


def turn(text, size):
    """The permutation that a text of turns makes."""
    table, order = cube_turns(size, True), np.arange(6 * size**2)
    for name in text.split():
        order = order[table[3 * FACES.index(name[0]) + ["", "'", "2"].index(name[1:])]]
    return order


def order_of(permutation):
    power, count = permutation, 1
    while (power != np.arange(len(power))).any():
        power, count = power[permutation], count + 1
    return count


def spheres(table, depth):
    """How many cubes need exactly 0, 1, ... turns."""
    seen, edge, sizes = set(), {bytes(range(table.shape[1]))}, []
    for _ in range(depth + 1):
        seen |= edge
        sizes.append(len(edge))
        edge = {bytes(x) for one in edge for x in np.frombuffer(one, np.int8)[table]} - seen
    return sizes


def test_twin():
    env = RubiksCube(Scramble(moves=20))
    record = jax.tree.map(np.asarray, travel(jax.random.key(0), env, Params(max_steps=30), 300))
    for t in range(300):
        cube, action = named(record["before"].stickers[t].reshape(-1)), record["action"][t]
        for _ in range(3 if action % 2 else 1):
            cube = twin_turn(cube, FACES[action // 2])
        board, after = unnamed(cube), record["after"]
        np.testing.assert_array_equal(after.state.stickers[t].reshape(-1), board)
        wrong = sum(9 - np.bincount(board[9 * f : 9 * f + 9]).max() for f in range(6))
        assert after.state.wrong[t] == wrong and after.terminated[t] == (wrong == 0)
    assert record["done"].sum() >= 10


@pytest.mark.parametrize("size", [2, 3])
def test_the_group(size):
    """Known orders of elements; a turn undone, done four times, and three being one back."""
    for face in FACES:
        assert order_of(turn(face, size)) == 4 and order_of(turn(f"{face} {face}'", size)) == 1
        np.testing.assert_array_equal(turn(f"{face} {face}", size), turn(f"{face}2", size))
    assert order_of(turn("R U R' U'", size)) == 6
    assert order_of(turn("R U", size)) == (105 if size == 3 else 15)
    assert order_of(turn("R U'", size)) == (63 if size == 3 else 9)
    np.testing.assert_array_equal(cube_turns(size), cube_turns(size, True)[np.arange(18) % 3 != 2])
    if size == 3:
        assert (
            order_of(turn("U R2 F B R B2 R U2 L B2 R U' D' R2 F R' L B2 U2 F2", size)) == 2
        )  # the superflip


def test_spheres():
    """Sizes as counted by others: the cube of 3 in quarter and half turns, of 2 with one corner held."""
    assert spheres(cube_turns(3), 3) == [1, 12, 114, 1068]
    assert spheres(cube_turns(3, True), 2) == [1, 18, 243]
    held = [face * 2 + kind for face in (0, 1, 2) for kind in (0, 1)]
    assert spheres(cube_turns(2)[held], 6) == [1, 6, 27, 120, 534, 2256, 8969]
    held = [face * 3 + kind for face in (0, 1, 2) for kind in (0, 1, 2)]
    assert spheres(cube_turns(2, True)[held], 4) == [1, 9, 54, 321, 1847]


@pytest.mark.slow
def test_all_of_the_small_cube():
    """3,674,160 positions, 14 quarter turns or fewer; half a minute."""
    held = [face * 2 + kind for face in (0, 1, 2) for kind in (0, 1)]
    sizes = spheres(cube_turns(2)[held], 14)
    assert sizes[-2:] == [90_280, 276] and sum(sizes) == 3_674_160


@pytest.mark.parametrize("half_turns", [False, True])
def test_no_turn_of_a_scramble_undoes_the_last(half_turns):
    """Two turns are then two away, always and nowhere else, and come in many ways."""
    draw = jit(jax.vmap(Scramble(3, 2, half_turns)))
    cubes = np.asarray(draw(jax.random.split(jax.random.key(0), 400)).stickers).reshape(400, -1)
    table, start = cube_turns(3, half_turns), np.repeat(np.arange(6, dtype=np.int8), 9)
    near = {start.tobytes()} | {x.tobytes() for x in start[table]}
    two = {x.tobytes() for one in near for x in np.frombuffer(one, np.int8)[table]} - near
    drawn = {cube.tobytes() for cube in cubes}
    assert drawn <= two and len(drawn) > len(two) / 2
    assert min(int(misplaced(jnp.asarray(cube))) for cube in cubes[:20]) > 0


def test_solving_pays_one_either_way_and_being_cut_nothing():
    cubes, texts = given_cubes("R U F'"), ("F U' R'", "F U' U'")
    back = [
        [FACES.index(name[0]) * 2 + (name[1:] == "'") for name in text.split()] for text in texts
    ]
    for (solution, total), rewards in (
        (s, r) for s in zip(back, (1, 0), strict=True) for r in ("dense", "sparse")
    ):
        env, params, paid = RubiksCube(cubes, rewards=rewards), Params(max_steps=3), []
        state = env.init(jax.random.key(0), params)
        for action in solution:
            assert not env.terminal(state, params) and not env.truncated(state, params)
            before, state = (
                state,
                env.transition(jax.random.key(0), state, jnp.int32(action), params),
            )
            paid.append(float(env.reward(before, action, state, params)))
        assert abs(sum(paid) - total) < 1e-6 and bool(env.terminal(state, params)) == total
        assert rewards == "dense" or paid[:2] == [0, 0]
        assert bool(env.truncated(state, params))


def test_what_cannot_be_is_refused():
    with pytest.raises(UsageError, match="'X' is no turn of a cube"):
        given_cubes("R X")
    with pytest.raises(UsageError, match="leave the cube solved"):
        given_cubes("R R'")
    with pytest.raises(UsageError, match=r"takes a generator of .*Cube .*but Shuffle draws"):
        RubiksCube(Shuffle())
    with pytest.raises(UsageError, match="cubes of 2 or 3 layers, not 4"):
        RubiksCube(given_cubes("R", size=4))
