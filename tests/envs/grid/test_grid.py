import collections
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from playing import at, play
from twin_grid import GridTwin

import envs
from envs.grid import rooms, scene, tiles
from envs.grid.rooms import DoorKey, Empty, FourRooms, GridWorld, Memory, Params
from jaxpar.env import step
from jaxpar.types import UsageError

WORLDS = [
    GridWorld(Empty(5, random_start=True), view=3),
    GridWorld(DoorKey(5)),
    GridWorld(DoorKey(8), see_through=True),
    GridWorld(DoorKey(6), view=0),
    GridWorld(FourRooms(9), view=9),
    GridWorld(Memory(9, random_length=True), view=5),
]


def replay(env, num_steps, seed=0, max_steps=60):
    """Steps the twin beside the record, and counts what happened."""
    params = Params(max_steps=max_steps)
    (obs, state), _, record = play(env, params, num_steps, seed)
    twin, seen = GridTwin(state, env, max_steps), collections.Counter()
    np.testing.assert_array_equal(obs, twin.observe())
    for index in range(num_steps):
        now = at(record, index)
        assert now["mask"].tolist() == twin.legal()
        picture, reward, terminated, truncated = twin.step(int(now["action"]))
        np.testing.assert_array_equal(now["made"].obs, picture)
        assert now["made"].reward == pytest.approx(reward, abs=1e-6)
        assert (bool(now["made"].terminated), bool(now["made"].truncated)) == (
            terminated,
            truncated,
        )
        seen.update(
            ended=terminated, cut=truncated, won=reward > 0, held=twin.scene.held is not None
        )
        if terminated or truncated:
            twin = GridTwin(now["state"], env, max_steps)
    return seen


@pytest.mark.parametrize("env", WORLDS, ids=lambda env: env.name)
def test_the_twin_agrees_step_by_step(env):
    seen = replay(env, 1000)
    assert seen["cut"]


def test_tiles_have_the_numbers_that_observations_show():
    names = (
        "NOTHING FLOOR WALL GOAL KEY BALL SQUARE PYRAMID HEXAGON STAR LAVA OPEN CLOSED LOCKED AGENT"
    )
    assert [getattr(tiles, name) for name in names.split()] == list(range(15))


@pytest.mark.slow
@pytest.mark.parametrize("env", WORLDS, ids=lambda env: env.name)
def test_the_twin_agrees_over_a_hundred_thousand_steps(env):
    seen = replay(env, 100_000, seed=1, max_steps=400)
    assert seen["cut"] and (
        env.layout.size > 6 or seen["won"] and seen["ended"]
    )  # luck does not solve the larger
    assert bool(seen["held"]) == isinstance(env.layout, DoorKey)


def cluttered(key, size=9):
    """A map of anything anywhere, an agent inside it and anything in its pocket: states that no play reaches."""
    keys = jax.random.split(key, 5)
    things = jnp.asarray(
        [tiles.code(tile, colour) for tile in range(1, 14) for colour in (0, 5, 6)], jnp.uint8
    )
    floor = jnp.uint8(tiles.code(tiles.FLOOR))
    maps = jnp.where(jax.random.bernoulli(keys[0], 0.5, (size, size)), floor, 0)
    maps = jnp.where(maps == 0, jax.random.choice(keys[1], things, (size, size)), maps)
    row, column = jax.random.randint(keys[2], (2,), 1, size - 1)
    held = jnp.asarray([0, tiles.code(tiles.KEY, 5), tiles.code(tiles.STAR, 6)], jnp.uint8)
    edge = jnp.asarray(scene.room(size, size))
    maps = jnp.where(edge == floor, maps, edge)
    return scene.Scene(
        grid=maps,
        cell=row * size + column,
        direction=jax.random.randint(keys[3], (), 0, 4),
        pocket=jax.random.choice(keys[4], held),
    )


@pytest.mark.parametrize("view", [3, pytest.param(7, marks=pytest.mark.slow), 11])
def test_light_and_hands_agree_in_any_clutter(view):
    env = GridWorld(Empty(9), view=view)
    params = env.default_params

    def one(key):
        place_key, act_key = jax.random.split(key)
        level = rooms.Level(scene=cluttered(place_key), win=jnp.int32(-1), lose=jnp.int32(-1))
        state = rooms.State(level=level, time=jnp.int32(0))
        action = jax.random.randint(act_key, (), 0, 6)
        return (
            state,
            action,
            env.action_mask(state, params),
            step(act_key, env, state, action, params),
        )

    num = 200
    state, action, mask, made = jax.tree.map(
        np.asarray, jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(3), num))
    )
    for index in range(num):
        twin = GridTwin(at(state, index), env, params.max_steps)
        assert mask[index].tolist() == twin.legal()
        picture, *_ = twin.step(int(action[index]))
        np.testing.assert_array_equal(made.obs[index], picture)
        after = at(made.state.level.scene, index)
        np.testing.assert_array_equal(np.asarray(twin.scene.grid) @ [16, 1], after.grid)
    assert np.any(made.obs[..., 0] == tiles.NOTHING), "nothing was ever hidden"


def solution(env, state):
    """The length of the shortest way to win, by breadth, or None."""
    twin = GridTwin(state, env, 10**9)

    def packed(twin):
        scene = twin.scene
        return scene.row, scene.column, scene.direction, scene.held, tuple(map(tuple, scene.grid))

    frontier, known = collections.deque([(twin, 0)]), {packed(twin)}
    while frontier:
        twin, depth = frontier.popleft()
        for action in range(6):
            following = GridTwin(state, env, 10**9)
            following.scene.__dict__.update(
                twin.scene.__dict__, grid=[list(row) for row in twin.scene.grid]
            )
            _, reward, ended, _ = following.step(action)
            if reward > 0:
                return depth + 1
            if not ended and packed(following) not in known:
                known.add(packed(following))
                frontier.append((following, depth + 1))
    return None


@pytest.mark.parametrize(
    "env",
    [GridWorld(DoorKey(5), view=0), GridWorld(FourRooms(9), view=0), GridWorld(Memory(7), view=0)],
    ids=str,
)
def test_every_level_can_be_solved(env):
    states = jax.jit(jax.vmap(lambda key: env.init(key, env.default_params)))(
        jax.random.split(jax.random.key(0), 12)
    )
    lengths = [solution(env, at(jax.tree.map(np.asarray, states), index)) for index in range(12)]
    assert None not in lengths
    assert len(set(lengths)) > 2, "the levels are all alike"


def test_the_levels_of_doorkey_are_uniform():
    levels = jax.jit(jax.vmap(DoorKey(5).sample))(jax.random.split(jax.random.key(0), 4096))
    maps, cells, directions = (
        np.asarray(leaf) for leaf in (levels.scene.grid, levels.scene.cell, levels.scene.direction)
    )
    doors = np.argmax((maps >> 4 == tiles.LOCKED).reshape(4096, -1), axis=1)
    things = np.argmax((maps >> 4 == tiles.KEY).reshape(4096, -1), axis=1)
    starts = collections.Counter(
        zip(*(x.tolist() for x in (doors, things, cells, directions)), strict=True)
    )
    # One column of 3 cells left of the wall: 2 doors, 3 keys, 2 agents, 4 directions.
    assert len(starts) == 48
    expected = 4096 / 48
    assert (
        sum((count - expected) ** 2 / expected for count in starts.values()) < 95
    )  # chi-square, 47 degrees, p = 4e-5


def test_a_mutation_changes_at_most_one_inner_cell_and_never_those_that_matter():
    env = GridWorld(DoorKey(6))
    params = env.default_params
    level = env.sample_level(jax.random.key(0), params)
    keys = jax.random.split(jax.random.key(1), 64)
    others = jax.jit(jax.vmap(lambda key: env.mutate_level(key, level, params)))(keys)
    before, after = np.asarray(level.scene.grid), np.asarray(others.scene.grid)
    changed = after != before
    assert set(np.unique(changed.sum((1, 2)))) == {0, 1}
    edges = np.ones_like(before, bool)
    edges[1:-1, 1:-1] = False
    special = (
        edges
        | (np.arange(36).reshape(6, 6) == int(level.scene.cell))
        | ~np.isin(before >> 4, (tiles.FLOOR, tiles.WALL))
    )
    assert not changed[:, special].any()
    assert {int(before[row, column]) >> 4 for _, row, column in np.argwhere(changed)} == {
        tiles.FLOOR,
        tiles.WALL,
    }
    state = env.init_level(jax.random.key(2), at(others, 5), params)
    np.testing.assert_array_equal(state.level.scene.grid, after[5])


def test_the_picture_shows_the_map():
    env = GridWorld(DoorKey(5))
    params = env.default_params
    states = jax.vmap(lambda key: env.init(key, params))(jax.random.split(jax.random.key(0), 3))
    pictures = jax.jit(jax.vmap(lambda state: env.render(state, params)))(states)
    assert pictures.shape == (3, 40, 40, 3) and pictures.dtype == jnp.uint8
    for picture, state in zip(np.asarray(pictures), (at(states, i) for i in range(3)), strict=True):
        codes = np.asarray(scene.whole(state.level.scene))
        for row in range(5):
            for column in range(5):
                tile = picture[8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
                np.testing.assert_array_equal(tile, tiles.SPRITES[codes[row, column]])
    drawn = tiles.SPRITES.reshape(256, -1)[
        [tiles.code(tile, tiles.YELLOW) for tile in range(1, 14)]
    ]
    assert len(np.unique(drawn, axis=0)) == 13, "two tiles look alike"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Memory(8), "odd size, not 8"),
        (lambda: DoorKey(4), "size=4 must be at least 5"),
        (
            lambda: GridWorld(view=4),
            "odd number of cells from 3 to 31, or 0 for the whole map, not 4",
        ),
    ],
)
def test_sizes_that_make_no_sense_are_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()


NAMES = {
    "DoorKey": "DoorKeyEnv",
    "Memory": "MemoryEnv",
    "FourRooms": "FourRoomsEnv",
    "Empty": "EmptyEnv",
}
OBJECTS = {
    1: 1,
    2: 2,
    5: 4,
    6: 5,
    8: 3,
    9: 10,
}  # MiniGrid's numbers of empty, wall, key, ball, goal, lava
COLOURS = (1, 2, 3, 4, 5, 6)


def converted(cells):
    """MiniGrid's (object, colour, state), column first, as our (tile, colour), row first."""
    made = np.zeros((*cells.shape[:2][::-1], 2), np.uint8)
    for i, j in np.ndindex(*cells.shape[:2]):
        thing, colour, state = (int(number) for number in cells[i, j])
        if thing == 4:
            made[j, i] = (11 + state, COLOURS[colour])
        elif thing:
            made[j, i] = (OBJECTS[thing], 0 if thing == 1 else COLOURS[colour])
    return made


@pytest.mark.skipif(
    importlib.util.find_spec("minigrid") is None, reason="minigrid is not installed"
)
@pytest.mark.parametrize(
    "name", ["DoorKey-5x5", "DoorKey-8x8", "Memory-S9", "Empty-8x8", "FourRooms"]
)
def test_the_package_minigrid_agrees_step_by_step(name):
    import minigrid.envs

    env, _ = envs.make(name)
    layout = env.layout
    sizes = {} if name == "FourRooms" else {"size": layout.size}
    theirs = getattr(minigrid.envs, NAMES[layout.name])(**sizes)
    stepped = jax.jit(
        lambda state, action: step(jax.random.key(0), env, state, action, env.default_params)
    )
    rng = np.random.default_rng(0)
    for episode in range(10):
        seen, _ = theirs.reset(seed=episode)
        codes = converted(theirs.grid.encode()) @ np.array([16, 1], np.uint8)
        x, y = theirs.agent_pos
        size, lose = layout.size, getattr(theirs, "failure_pos", None)
        goals = np.argwhere(codes >> 4 == tiles.GOAL)[:, ::-1].tolist()
        win = goals[0] if goals else theirs.success_pos
        level = rooms.level_of(
            codes,
            y * size + x,
            theirs.agent_dir,
            win[1] * size + win[0],
            -1 if lose is None else lose[1] * size + lose[0],
        )
        state = env.init_level(jax.random.key(0), level, env.default_params)
        np.testing.assert_array_equal(
            env.observe(jax.random.key(0), state, None, env.default_params),
            converted(seen["image"]),
        )
        for _ in range(400):
            legal = np.flatnonzero(env.action_mask(state, env.default_params))
            action = int(rng.choice(legal)) if rng.random() < 0.8 else int(rng.integers(6))
            made = stepped(state, action)
            seen, reward, terminated, truncated, _ = theirs.step(action)
            np.testing.assert_array_equal(made.obs, converted(seen["image"]))
            assert float(made.reward) == pytest.approx(reward, abs=1e-6)
            assert (bool(made.terminated), bool(made.truncated)) == (terminated, truncated)
            state = made.state
            if terminated or truncated:
                break
