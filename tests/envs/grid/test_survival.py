import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from playing import at, play
from twin_survival import SurvivalTwin

import envs
from envs.grid import survival, terrain
from envs.grid.survival import Params, Survival
from jaxpar.types import UsageError

SMALL = Survival(size=16, view=7)
# A quick day, many creatures: everything happens within a thousand random steps.
BUSY = Params(
    max_steps=400, day=60, food_every=40, drink_every=30, cow_rate=60, zombie_rate=20, night_rate=90
)


def replay(env, params, num_steps, seed=0, rich=False):
    (obs, state), keys, record = play(env, params, num_steps, seed)
    drawn = jax.tree.map(np.asarray, jax.jit(jax.vmap(drawn_in_step))(keys))
    twin, seen = SurvivalTwin(state, params), collections.Counter()
    for index in range(num_steps):
        now = at(record, index)
        assert now["mask"].tolist() == [twin.legal(action) for action in range(16)]
        reward, died = twin.step(int(now["action"]), at(drawn, index))
        image, status = twin.observe(env.view)
        np.testing.assert_array_equal(now["made"].obs["image"], image)
        np.testing.assert_array_equal(now["made"].obs["status"], status)
        assert now["made"].reward == pytest.approx(reward, abs=1e-5)
        assert (bool(now["made"].terminated), bool(now["made"].truncated)) == (
            died,
            twin.time >= params.max_steps,
        )
        seen.update(died=died, slept=twin.asleep, dark=twin.tenth() >= 6)
        if now["made"].terminated or now["made"].truncated:
            seen.update(survival.ACHIEVEMENTS[index] for index in twin.done)
            np.testing.assert_array_equal(np.asarray(twin.ground), now["made"].state.terrain)
            twin = SurvivalTwin(now["state"], params)
    return seen


def drawn_in_step(key):
    """What `jaxpar.env.step` hands to the transition, cut as it is cut there."""
    return survival.noise(jax.random.split(key)[0])


class Provided(Survival):
    """Begins with goods in hand, so that random play builds and crafts."""

    def init(self, key, params):
        state = super().init(key, params)
        return state.replace(inventory=jnp.asarray([9, 9, 5, 5, 0, 1, 0, 0, 0, 0, 0], jnp.int32))


@pytest.mark.parametrize(
    "env",
    [pytest.param(SMALL, marks=pytest.mark.slow), Provided(size=16, view=5)],
    ids=["bare", "provided"],
)
def test_the_twin_agrees_step_by_step(env):
    seen = replay(env, BUSY, 1000)
    assert seen["died"] and seen["slept"] and seen["dark"], seen


@pytest.mark.slow
@pytest.mark.parametrize("env", [SMALL, Provided(size=16, view=5)], ids=["bare", "provided"])
def test_the_twin_agrees_over_a_hundred_thousand_steps(env):
    seen = replay(env, BUSY, 100_000, seed=1)
    assert {"wood", "eat", "drink", "died"} <= set(seen), seen
    if env is not SMALL:  # a wooden pickaxe is among what was provided
        assert set(survival.ACHIEVEMENTS) - {"wooden_pickaxe", "diamond"} <= set(seen), seen


@pytest.mark.slow
def test_stone_fills_water_but_not_the_edge_of_the_map():
    state = SMALL.init(jax.random.key(0), SMALL.default_params)
    state = state.replace(
        terrain=jnp.full((16, 16), terrain.WATER, jnp.uint8), inventory=state.inventory.at[1].set(1)
    )
    for cell, legal in (
        (5 * 16 + 14, [False, True, True, True]),
        (16 + 1, [True, True, False, False]),
    ):
        facing = [state.replace(cell=jnp.int32(cell), facing=jnp.int32(side)) for side in range(4)]
        assert [bool(SMALL.action_mask(turned, None)[7]) for turned in facing] == legal


def flood(ground, start):
    """The cells that one can walk to, and those beside them."""
    size, reached, frontier, beside = len(ground), set(), [divmod(int(start), len(ground))], set()
    while frontier:
        row, column = frontier.pop()
        if (row, column) in reached:
            continue
        reached.add((row, column))
        for cell in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)):
            beside.add(cell)
            if all(0 <= x < size for x in cell) and ground[cell] in terrain.WALKABLE:
                frontier.append(cell)
    return reached, beside


@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.slow) for size in (16, 32)])
def test_every_island_can_be_lived_on(size):
    grounds, starts = jax.jit(jax.vmap(lambda key: terrain.draw(key, size)))(
        jax.random.split(jax.random.key(0), 100)
    )
    grounds, areas = np.asarray(grounds), []
    for ground, start in zip(grounds, np.asarray(starts), strict=True):
        assert (ground[[0, -1]] == terrain.WATER).all() and (
            ground[:, [0, -1]] == terrain.WATER
        ).all()
        assert ground.reshape(-1)[start] == terrain.GRASS
        reached, beside = flood(ground, start)
        kinds = {int(ground[cell]) for cell in beside}
        assert {terrain.TREE, terrain.WATER, terrain.STONE} <= kinds
        assert {terrain.COAL, terrain.IRON, terrain.DIAMOND} <= set(np.unique(ground).tolist())
        areas.append(len(reached) / size**2)
    assert np.mean(areas) > 0.2
    assert len(np.unique(grounds.reshape(100, -1), axis=0)) == 100


def test_components_are_those_of_a_flood():
    masks = np.asarray(jax.random.bernoulli(jax.random.key(0), 0.6, (20, 12, 12)))
    labels = np.asarray(jax.jit(jax.vmap(terrain.components))(jnp.asarray(masks)))
    for mask, label in zip(masks, labels, strict=True):
        assert ((label == -1) == ~mask).all()
        ground = np.where(mask, terrain.GRASS, terrain.WATER)
        for start in np.flatnonzero(mask):
            reached, _ = flood(ground, start)
            part = {tuple(cell) for cell in np.argwhere(label == label.reshape(-1)[start])}
            assert part == reached and label.reshape(-1)[start] == max(
                row * 12 + column for row, column in part
            )


def test_a_reset_costs_a_hundred_steps():
    """In operations that XLA counts; loops count once, so the flood is not even in it."""
    env, params = envs.make("Survival")
    key = jax.random.key(0)
    state = jax.eval_shape(env.init, key, params)
    init = jax.jit(env.init).lower(key, params).compile().cost_analysis()["flops"]
    step = (
        jax.jit(env.transition)
        .lower(key, state, jnp.int32(0), params)
        .compile()
        .cost_analysis()["flops"]
    )
    assert init > 100 * step, (init, step)


def test_the_picture_shows_the_island():
    params = SMALL.default_params
    state = SMALL.init(jax.random.key(1), params)
    picture = np.asarray(jax.jit(SMALL.render)(state, params))
    assert picture.shape == (128, 128, 3) and picture.dtype == np.uint8
    row, column = divmod(int(state.cell), 16)
    np.testing.assert_array_equal(
        picture[8 * row : 8 * row + 8, 8 * column : 8 * column + 8], survival.SPRITES[15]
    )
    np.testing.assert_array_equal(picture[:8, :8], survival.SPRITES[terrain.WATER])
    assert len(np.unique(survival.SPRITES.reshape(len(survival.SPRITES), -1), axis=0)) == len(
        survival.SPRITES
    )


@pytest.mark.parametrize(
    ("make", "says"),
    [(lambda: Survival(size=8), "at least 16"), (lambda: Survival(view=6), "odd number of cells")],
)
def test_sizes_that_make_no_sense_are_refused(make, says):
    with pytest.raises(UsageError, match=says):
        make()
