import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from playing import at, play
from twin_grid import SceneTwin
from twin_xland import XLandTwin

import envs
from envs.grid import rulesets, scene, tiles, xland
from envs.grid.rulesets import Ruleset, Tree
from envs.grid.xland import XLand
from jaxpar.env import step
from jaxpar.env.check import check_environment
from jaxpar.types import UsageError

CROWDED = XLand(size=6, tree=Tree(depth=1, prune=0.2, distractors=3, false_rules=3), num_tasks=50)
CRAMPED = XLand(size=5, tree=Tree.medium())
ROOMS = XLand(size=13, rooms=4, see_through=False, view=7, tree=Tree.medium(), num_tasks=10)


def replay(env, num_steps, trials=3, trial_steps=25):
    params = env.default_params.replace(trials=trials, trial_steps=trial_steps)
    (obs, state), _, record = play(env, params, num_steps)
    twin, seen = XLandTwin(state, trials, trial_steps), collections.Counter()
    assert int(obs["start"]) == 1
    for index in range(num_steps):
        now = at(record, index)
        assert now["mask"].tolist() == twin.scene.legal()
        reward, ended = twin.step(int(now["action"]))
        np.testing.assert_array_equal(
            now["made"].obs["image"], twin.scene.view(env.view, env.see_through)
        )
        assert int(now["made"].obs["start"]) == (twin.time == 0)
        assert now["made"].reward == pytest.approx(reward, abs=1e-6)
        assert bool(now["made"].terminated) == ended and not now["made"].truncated
        assert int(now["made"].state.trial) == twin.trial
        seen.update(won=reward > 0, ended=ended)
        if ended:
            seen.update(fired=twin.fired)
            twin = XLandTwin(now["state"], trials, trial_steps)
    return seen


@pytest.mark.parametrize(
    "env",
    [CROWDED, pytest.param(ROOMS, marks=pytest.mark.slow)],
    ids=lambda env: getattr(env, "name", None),
)
def test_the_twin_agrees_step_by_step(env):
    assert replay(env, 1000)["ended"]


@pytest.mark.slow
@pytest.mark.parametrize("env", [CROWDED, ROOMS], ids=lambda env: env.name)
def test_the_twin_agrees_over_a_hundred_thousand_steps(env):
    seen = replay(env, 100_000)
    assert seen["ended"] and (
        env is ROOMS or (seen["won"] and seen["fired"])
    )  # in rooms, luck does not suffice


def test_every_kind_of_rule_and_goal_agrees_in_clutter():
    """Few things, many rules, all of them near: nearly every step fires something."""
    things = rulesets.THINGS[np.array([0, 11])]
    env = XLand(size=6)
    params = env.default_params.replace(trial_steps=1000, trials=5)

    def one(key):
        keys = jax.random.split(key, 9)
        pick = lambda key, shape: jax.random.choice(key, jnp.asarray(things), shape)  # noqa: E731
        rules = jnp.concatenate(
            [jax.random.randint(keys[0], (2, 1), 0, 12).astype(jnp.uint8), pick(keys[1], (2, 3))],
            axis=1,
        )
        goal_kind = jax.random.choice(
            keys[2], jnp.asarray([*range(1, 12), 8, 9, 10, 11], jnp.uint8), (1,)
        )
        ruleset = Ruleset(
            rules, jnp.concatenate([goal_kind, pick(keys[3], (2,))]), pick(keys[4], (9,))
        )
        held = jnp.where(jax.random.bernoulli(keys[5]), pick(keys[6], ()), 0).astype(jnp.uint8)
        begin = env.place(keys[7], ruleset).replace(pocket=held)
        state = env.init_level(keys[8], xland.Level(ruleset=ruleset, scene=begin), params)
        mask = env.action_mask(state, params)
        action = jax.random.choice(
            keys[8], jnp.arange(6), p=mask * jnp.asarray([1, 1, 9, 9, 40, 1])
        )
        return state, action, step(key, env, state, action, params)

    num, seen = 3000, collections.Counter()
    state, action, made = jax.tree.map(
        np.asarray, jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(7), num))
    )
    for index in range(num):
        twin = XLandTwin(at(state, index), 5, 1000)
        reward, _ = twin.step(int(action[index]))
        seen.update(won=reward > 0, fired=twin.fired)
        if reward > 0:
            seen.update({twin.goal[0]: 1})
        assert made.reward[index] == pytest.approx(reward, abs=1e-6)
        after = at(made.state.scene, index)
        np.testing.assert_array_equal(np.asarray(twin.scene.grid) @ [16, 1], after.grid)
        assert int(after.pocket) == (
            twin.scene.held[0] * 16 + twin.scene.held[1] if twin.scene.held else 0
        )
    assert seen["fired"] > 100 and set(range(1, 12)) <= set(seen), seen


@pytest.mark.slow
def test_the_promises_of_an_environment():
    check_environment(CROWDED, CROWDED.default_params.replace(trials=2, trial_steps=8))


def test_trials_keep_the_task_and_begin_where_the_first_did_or_anywhere():
    for shuffle in (False, True):
        env = XLand(size=7, tree=Tree.small(), shuffle=shuffle)
        params = env.default_params.replace(trials=50, trial_steps=3)
        (_, state), _, record = play(env, params, 30)
        starts = record["state"].time == 0
        assert (
            starts.sum() == 10 and len(np.unique(record["state"].level.ruleset.goal, axis=0)) == 1
        )
        grids = record["state"].scene.grid[starts]
        if shuffle:
            assert len(np.unique(grids.reshape(10, -1), axis=0)) == 10
        else:
            np.testing.assert_array_equal(grids, np.broadcast_to(state.scene.grid, grids.shape))


def shortest(state):
    """The length of the shortest way to the goal, by breadth over everything that can be done, or None."""
    twin = XLandTwin(state, 1, 10**9)
    start = twin.scene

    def packed(scene):
        return scene.row, scene.column, scene.direction, scene.held, tuple(sum(scene.grid, []))

    frontier, known = collections.deque([(start, 0)]), {packed(start)}
    while frontier:
        body, depth = frontier.popleft()
        for action in range(5):
            twin.scene = object.__new__(SceneTwin)
            twin.scene.__dict__.update(body.__dict__, grid=[list(row) for row in body.grid])
            if twin.act(action):
                return depth + 1
            if (key := packed(twin.scene)) not in known:
                known.add(key)
                frontier.append((twin.scene, depth + 1))
    return None


def solve_all(num, depth):
    env = XLand(size=5, tree=Tree(depth=depth, distractors=0, prune=0.4), num_tasks=num)
    params, tasks = env.default_params, env.default_params.tasks
    lengths, tried = [], 0
    for index in range(num):
        if np.count_nonzero(tasks.objects[index]) > 3:  # more than a breadth-first search can hold
            continue
        tried += 1
        ruleset = jax.tree.map(lambda leaf, index=index: leaf[index], tasks)
        begin = env.place(jax.random.key(index), ruleset)
        state = env.init_level(jax.random.key(0), xland.Level(ruleset=ruleset, scene=begin), params)
        lengths.append(shortest(jax.tree.map(np.asarray, state)))
    return lengths


def test_every_generated_ruleset_can_be_solved():
    lengths = solve_all(12, 1)
    assert len(lengths) >= 8 and None not in lengths and max(lengths) > 8, lengths


@pytest.mark.slow
def test_every_generated_ruleset_of_two_levels_can_be_solved():
    lengths = solve_all(60, 2)
    assert len(lengths) >= 20 and None not in lengths and max(lengths) > 15, lengths


@pytest.mark.parametrize("tree", [Tree(), Tree.small(), Tree.medium(), Tree.high()])
def test_rulesets_are_trees_from_the_goal_to_the_objects(tree):
    drawn = jax.tree.map(np.asarray, rulesets.generate(jax.random.key(1), tree, 200))
    depths = set()
    for rules, goal, objects in zip(drawn.rules, drawn.goal, drawn.objects, strict=True):
        made = {int(c): (int(kind), int(a), int(b)) for kind, a, b, c in rules if kind}
        floor = [int(thing) for thing in objects if thing]
        assert len(set(floor)) == len(floor)
        needed = []

        def unroll(thing, made=made, floor=floor, needed=needed):
            needed.append(thing)
            if thing not in made:
                assert thing in floor, "a thing that neither lies there nor is made"
                return 0
            kind, a, b = made[thing]
            assert (b != 0) == (kind >= 7)
            return 1 + max(unroll(x) for x in (a, b) if x)

        depths.add(max(unroll(int(x)) for x in goal[1:] if x))
        assert len(set(needed)) == len(needed), "a thing is needed twice"
        assert len([x for x in floor if x not in needed]) == tree.distractors
        false = [inputs for c, inputs in made.items() if c not in needed]
        assert len(false) == tree.false_rules
        assert all({a, b} & set(floor) - set(needed) for _, a, b in false), (
            "a false rule without a distractor"
        )
    assert max(depths) == tree.depth


def test_rulesets_differ_and_come_back_from_a_file(tmp_path):
    drawn = rulesets.distinct(jax.random.key(0), Tree(kinds=(1,), distractors=0), 60)
    assert len(np.unique(np.asarray(drawn.goal), axis=0)) == 60
    with pytest.raises(UsageError, match="gives only about 60 different rulesets, not 61"):
        rulesets.distinct(jax.random.key(0), Tree(kinds=(1,), distractors=0), 61)
    path = tmp_path / "small.npz"
    drawn = rulesets.distinct(jax.random.key(0), Tree.small(), 50)
    rulesets.save_benchmark(path, drawn)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), drawn, rulesets.load_benchmark(path))
    )


@pytest.mark.slow
def test_many_tasks_are_one_batch():
    """Parameters with one task each, vmapped, give what each gives alone."""
    env = XLand(size=7, tree=Tree.small(), num_tasks=4)
    params = env.default_params
    alone = jax.tree.map(lambda leaf: leaf[:, None], params.tasks)
    many = jax.vmap(lambda tasks: env.init(jax.random.key(3), params.replace(tasks=tasks)))(alone)
    for index in range(4):
        one = env.init(
            jax.random.key(3),
            params.replace(tasks=jax.tree.map(lambda leaf, i=index: leaf[i], alone)),
        )
        assert jax.tree.all(jax.tree.map(lambda a, b, i=index: bool((a[i] == b).all()), many, one))
        np.testing.assert_array_equal(one.level.ruleset.goal, params.tasks.goal[index])
    other = env.mutate_level(jax.random.key(5), one.level, params)
    assert not np.array_equal(other.scene.grid, one.level.scene.grid)
    assert sorted(np.asarray(other.scene.grid).ravel()) == sorted(
        np.asarray(one.level.scene.grid).ravel()
    )


@pytest.mark.parametrize(("rooms", "size"), [(2, 9), (4, 9), (9, 16)])
def test_rooms_are_joined(rooms, size):
    env = XLand(size=size, rooms=rooms)
    for seed in range(5):
        grid = np.asarray(
            env.place(
                jax.random.key(seed),
                rulesets.sample_ruleset(jax.random.key(seed), env.default_params.tasks),
            ).grid
        )
        assert np.count_nonzero(grid >> 4 == tiles.CLOSED) == {2: 1, 4: 4, 9: 12}[rooms]
        open_cells = {tuple(cell) for cell in np.argwhere(grid >> 4 != tiles.WALL)}
        reached, frontier = set(), [next(iter(open_cells))]
        while frontier:
            row, column = frontier.pop()
            if (row, column) in open_cells - reached:
                reached.add((row, column))
                frontier += [
                    (row + 1, column),
                    (row - 1, column),
                    (row, column + 1),
                    (row, column - 1),
                ]
        assert reached == open_cells
        assert len(open_cells) - {2: 1, 4: 4, 9: 12}[rooms] == env.num_floor


def damaged(**changes):
    arrays = {
        name: np.array(getattr(rulesets.generate(jax.random.key(0), Tree.small(), 3), name))
        for name in ("rules", "goal", "objects")
    }
    for name, change in changes.items():
        arrays[name] = change(arrays[name])
    return {name: array for name, array in arrays.items() if array is not None}


def with_value(index, value):
    def change(array):
        array[index] = value
        return array

    return change


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"goal": lambda array: None}, "must hold rules, goal, objects, not objects, rules"),
        ({"goal": lambda array: array.astype(int)}, "goal must be uint8 of rank 2, not int64"),
        ({"goal": lambda array: array[:2]}, "3 rules, 2 goals and 3 objects must be as many"),
        ({"rules": lambda array: array[..., :3]}, "rules have 4 and goals 3 columns, not 3 and 3"),
        ({"rules": with_value((1, 0, 0), 12)}, "task 1 has a kind of rule above 11"),
        ({"goal": with_value((2, 0), 0)}, "task 2 has a goal whose kind is not 1 to 11"),
        (
            {"rules": with_value((1, 0), (1, 33, 0, 97))},
            "task 1 has a rule about what cannot be picked up",
        ),
        (
            {"rules": with_value((1, 0), (1, 97, 0, 33))},
            "task 1 has a rule that makes what cannot be picked up",
        ),
        ({"goal": with_value(0, (7, 97, 33))}, "task 0 has a goal about what cannot be picked up"),
        ({"objects": with_value((2, 0), 20)}, "task 2 has an object that cannot be picked up"),
    ],
)
def test_malformed_benchmarks_are_refused(tmp_path, changes, says):
    path = tmp_path / "bad.npz"
    np.savez(path, **damaged(**changes))
    with pytest.raises(UsageError, match=says):
        rulesets.load_benchmark(path)


def test_files_that_are_no_benchmarks_are_refused(tmp_path):
    text, cut, bare = tmp_path / "text.npz", tmp_path / "cut.npz", tmp_path / "bare.npz"
    text.write_text("rules")
    rulesets.save_benchmark(cut, rulesets.generate(jax.random.key(0), Tree.small(), 3))
    cut.write_bytes(cut.read_bytes()[:200])
    with open(bare, "wb") as file:
        np.save(file, np.zeros(3))
    for path in (text, cut, bare, tmp_path / "nowhere.npz"):
        with pytest.raises(UsageError, match=f"{path.name} is not a benchmark"):
            rulesets.load_benchmark(path)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: XLand(rooms=3), "layouts of 1, 2, 4 and 9 rooms, not of 3"),
        (lambda: XLand(rooms=9, size=9), "9 rooms need a size of at least 13, not 9"),
        (lambda: XLand(view=4), "odd number of cells"),
        (lambda: Tree(kinds=(0,)), "kinds=.* must be at least 1 and at most 11"),
        (lambda: Tree(prune=2.0), "prune=2.0 must be at least 0 and at most 1"),
        (lambda: Tree(distractors=0, false_rules=1), "distractors, of which this tree has none"),
        (lambda: Tree(depth=5), "needs 129 different things, and there are 60"),
        (lambda: Tree(depth=-1), "depth=-1 must be at least 0"),
        (
            lambda: CRAMPED.init(jax.random.key(0), CRAMPED.default_params),
            "9 cells of floor, too few for 10 objects",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()


def test_the_picture_shows_map_goal_and_rules():
    env, params = envs.make("XLand-R1-9x9-Small")
    state = env.init(jax.random.key(0), params)
    picture = np.asarray(jax.jit(env.render)(state, params))
    rules = np.asarray(state.level.ruleset.rules)
    assert picture.shape == (8 * (9 + 1 + len(rules)), 72, 3)
    np.testing.assert_array_equal(
        picture[72:80, 8:16], tiles.SPRITES[int(state.level.ruleset.goal[1])]
    )
    agent = tiles.code(tiles.AGENT, int(state.scene.direction))
    row, column = divmod(int(state.scene.cell), 9)
    np.testing.assert_array_equal(
        picture[8 * row : 8 * row + 8, 8 * column : 8 * column + 8], tiles.SPRITES[agent]
    )
    assert scene.ACTIONS[scene.PUT] == "put"
