"""The iterated reference scheme: its step against exact sweeps, its values, its reports, and closed loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from pomdp_worlds import Bayes, Known, Leaving, Tiger

from envs.pomdp.rocksample import RockSample
from jaxpar.pomdp import FixedReference, ParticleBelief, Vopp, simulate_many
from jaxpar.pomdp.planners import vopp
from jaxpar.pomdp.planners.tree import EMPTY, DenseChildren, empty_tree
from jaxpar.pomdp.planners.vopp import preference_step
from jaxpar.types import UsageError

TIGER, PARAMS = Tiger(), Tiger().default_params


@functools.partial(jax.jit, static_argnums=(0, 2))
def planned(planner, key, env, params, belief):
    return planner.plan(key, env, params, belief)


@pytest.mark.parametrize("eta", [0.2, 2.0])
def test_the_step_follows_the_exact_trajectory_on_tiger(eta):
    """All beliefs of Tiger (differences of readings, -14..14) swept at once; published to four digits."""
    difference = np.arange(-14, 15)
    right = 1 / (1 + (0.15 / 0.85) ** difference)
    heard_right = right * 0.85 + (1 - right) * 0.15
    rewards = np.stack([-np.ones(29), 10 - 110 * (1 - right), 10 - 110 * right], axis=1).astype(
        np.float32
    )
    psi, value = jnp.full((29, 3), jnp.inf), jnp.zeros(29)
    # Psi_0 = 0: one step with Q = 0 from there subtracts log(3)/eta, which is added back.
    psi, seen = jnp.zeros((29, 3)), {}
    value = jnp.full((29,), np.log(3) / eta)
    for k in range(1, 301):
        up, down = value[np.minimum(difference + 15, 28)], value[np.maximum(difference + 13, 0)]
        listen = heard_right * up + (1 - heard_right) * down
        future = jnp.stack([listen, jnp.full(29, value[14]), jnp.full(29, value[14])], axis=1)
        every, none = jnp.ones((29, 3), bool), jnp.zeros(29, int)
        psi, value = preference_step(psi, rewards + 0.95 * future, every, eta, jnp.zeros(29), none)
        seen[k] = float(value[14])
    want = {
        0.2: [-1.2731, 6.1974, 14.6085, 19.2397, 19.3714],
        2.0: [-1.0275, 6.0893, 14.7086, 19.2429, 19.3714],
    }
    np.testing.assert_allclose([seen[k] for k in (1, 10, 30, 100, 300)], want[eta], atol=1e-3)


def test_the_step_of_one_belief_by_hand():
    """Psi 5 and new; first preference 4; one more untried: L = log(e^5 + 2 e^4) before, and only what moves moves."""
    psi, values = jnp.asarray([[5.0, jnp.inf, jnp.inf]]), jnp.asarray([[7.0, 9.0, 0.0]])
    tried, first, untried = jnp.asarray([[True, True, False]]), jnp.asarray([4.0]), jnp.asarray([1])
    level = np.log(np.exp(5) + 2 * np.exp(4))
    got, value = preference_step(psi, values, tried, 1.0, first, untried)
    want = [5 + 7 - level, 4 + 9 - level]
    np.testing.assert_allclose(got[0], [*want, -np.inf], rtol=1e-6)
    np.testing.assert_allclose(value[0], np.log(np.exp(want).sum() + np.exp(4)), rtol=1e-6)
    moved, _ = preference_step(
        psi, values, tried, 1.0, first, untried, jnp.asarray([[False, True, False]])
    )
    np.testing.assert_allclose(moved[0], [5.0, want[1], -np.inf], rtol=1e-6)


def test_a_node_that_has_only_seen_a_bad_action_is_worth_its_guess():
    """Opening one door costs 45; the guess is 12, and two of three actions are still untried."""
    planner = Vopp(2, 2, max_depth=2, eta=1.0, unvisited="leaf")
    tree = empty_tree(3, 8, 8, DenseChildren(2))
    tree = dataclasses.replace(
        tree,
        edges=tree.edges.at[1, 2].set(0),
        node_visits=tree.node_visits.at[1].set(2),
        leaf_sum=tree.leaf_sum.at[1].set(24.0),
        leaf_visits=tree.leaf_visits.at[1].set(2),
        edge_visits=tree.edge_visits.at[0].set(1),
        reward_sum=tree.reward_sum.at[0].set(-45.0),
    )
    one, none = jnp.asarray([1]), jnp.asarray([EMPTY])
    tree = planner._back_up_nodes(tree, one, jnp.asarray([0]), none, 0.95, jnp.ones(8, bool))
    np.testing.assert_allclose(tree.weighted[1] / 2, 12 + np.log(2 / 3), atol=1e-5)


SHORT = Vopp(512, 60, max_depth=3, eta=0.1, leaf="zero")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sweep": "tree"},
        *(pytest.param({"unvisited": rule}, marks=pytest.mark.slow) for rule in ("mask", "paper")),
    ],
    ids=str,
)
def test_reaches_the_exact_value_of_three_steps_of_tiger(changes):
    planner = dataclasses.replace(SHORT, max_nodes=4096, **changes)
    action, info = planned(planner, jax.random.key(0), TIGER, PARAMS, Known(0.5))
    assert int(action) == 0 and int(info.overflow) == 0
    np.testing.assert_allclose(float(info.value), 2.3098, atol=0.25)
    np.testing.assert_allclose(float(info.values[0]), 2.3098, atol=0.25)


def test_root_value_with_the_optimum_as_leaf_is_near_the_optimum():
    """Four exact steps and then 19.3714 give 17.573: the optimum, less what the leaves' knowledge is worth."""
    planner = Vopp(512, 60, max_depth=4, eta=0.1)
    _, info = planned(planner, jax.random.key(1), TIGER, PARAMS.replace(leaf=19.371368), Known(0.5))
    np.testing.assert_allclose(float(info.value), 1.79554 + 0.95**4 * 19.371368, atol=0.3)
    assert abs(float(info.value) - 19.371368) < 2.2


@pytest.mark.slow
def test_the_fixed_reference_solves_another_problem():
    """Exactly: the soft value of rewards -1, -45, -45 under a uniform reference."""
    planner = FixedReference(4096, 4, max_depth=1, eta=0.05, leaf="zero")
    _, info = planned(planner, jax.random.key(0), TIGER, PARAMS, Known(0.5))
    want = np.log(np.mean(np.exp(0.05 * np.asarray(info.values)))) / 0.05
    np.testing.assert_allclose(float(info.value), want, rtol=1e-5)
    assert want < -10
    _, iterated = planned(
        Vopp(4096, 100, max_depth=1, eta=0.05, leaf="zero"),
        *(jax.random.key(0), TIGER, PARAMS, Known(0.5)),
    )
    np.testing.assert_allclose(float(iterated.value), -1.0, atol=0.01)


def test_simulations_that_end_early_have_no_future():
    env = Leaving()
    belief = ParticleBelief(8).init(jax.random.key(0), env, PARAMS)
    planner = Vopp(512, 8, max_depth=3, eta=0.05, leaf="zero")
    _, info = planned(planner, jax.random.key(0), env, PARAMS, belief)
    np.testing.assert_allclose(info.values, [4.75, 9.5], atol=0.4)


def test_small_capacities_are_counted_and_still_plan():
    tight = dataclasses.replace(SHORT, max_depth=5, max_nodes=20)
    action, info = planned(tight, jax.random.key(0), TIGER, PARAMS, Known(0.5))
    assert int(info.overflow) > 0 and int(info.nodes) == 20 and int(info.edges) <= 20
    assert int(action) == 0 and np.isfinite(float(info.value))


def test_deadlines():
    ticks = iter(range(1000))
    planner = Vopp(16, 50, max_depth=3)
    run = functools.partial(
        planner.plan_until, jax.random.key(0), Tiger(mask=(False, True, True)), PARAMS, Known(0.5)
    )
    action, info = run(-1.0)
    assert int(action) == 1 and int(info.iterations) == 0
    _, info = run(
        10.5, clock=lambda: float(next(ticks))
    )  # each batch takes one tick, and looking another
    assert int(info.iterations) == 5
    action, whole = run(1e12)
    assert int(whole.iterations) == 50


@pytest.mark.parametrize(
    "fields, match",
    [
        ({"num_simulations": 0}, "num_simulations"),
        ({"eta": 0.0}, "eta"),
        ({"leaf": "guess"}, "leaf='guess' is unknown"),
        ({"unvisited": "no"}, "unvisited='no' is unknown"),
        ({"sweep": "no"}, "sweep='no' is unknown"),
    ],
)
def test_bad_fields_are_refused(fields, match):
    with pytest.raises(UsageError, match=match):
        Vopp(**fields)


def test_bad_discounts_and_missing_heuristics_are_refused():
    with pytest.raises(UsageError, match="discount"):
        Vopp(8, 2, discount=1.5).plan(jax.random.key(0), TIGER, PARAMS, Known(0.5))
    with pytest.raises(UsageError, match="no heuristic"):
        Vopp(8, 2).plan(jax.random.key(0), Leaving(), PARAMS, Known(0.5))


@pytest.mark.parametrize("eta", [1.0, pytest.param(5.0, marks=pytest.mark.slow)])
def test_decisions_on_tiger_are_those_of_the_optimum(eta):
    """At the beliefs of the optimal policy (0, 1 and 2 readings apart) with nothing known of the leaves."""
    planner = Vopp(64, 16, max_depth=10, eta=eta, leaf="zero", max_nodes=4096)
    plans = jax.jit(
        jax.vmap(lambda key, right: planner.plan(key, TIGER, PARAMS, Known(right))[0], (0, None))
    )
    for apart, best in ((0, 0), (1, 0), (2, 1)):
        right = jnp.float32(1 / (1 + (0.15 / 0.85) ** apart))
        actions = np.asarray(plans(jax.random.split(jax.random.key(20 + apart), 100), right))
        assert (actions == best).mean() >= 0.97, (apart, np.bincount(actions))


def exact_regrets():
    """What each action of Tiger loses against the optimum, `[29, 3]`, by the difference of readings -14..14."""
    difference = np.arange(-14, 15)
    right = 1 / (1 + (0.15 / 0.85) ** difference)
    heard_right = right * 0.85 + (1 - right) * 0.15
    opened = np.stack([10 - 110 * (1 - right), 10 - 110 * right], axis=1)
    value = np.zeros(29)
    for _ in range(2000):
        up, down = value[np.minimum(difference + 15, 28)], value[np.maximum(difference + 13, 0)]
        listen = -1 + 0.95 * (heard_right * up + (1 - heard_right) * down)
        every = np.concatenate([listen[:, None], opened + 0.95 * value[14]], axis=1)
        value = every.max(1)
    np.testing.assert_allclose(value[14], 19.371368, atol=1e-5)
    return value[:, None] - every


def lost_on_tiger(key, planner, num_episodes, num_steps, batch):
    """The mean of what episodes of Tiger lose against the optimum, discounted, and its standard error.

    By the performance difference lemma the closed loop returns the optimum less the sum of the
    regrets on its way, whose spread is a hundred times less than that of the returns: episodes as
    these cannot be told from 200,000 that are judged by what they earned.
    """
    run = jax.jit(
        lambda key: simulate_many(
            key, TIGER, PARAMS, planner, Bayes(), num_steps, num_episodes, batch=batch
        )
    )
    episodes, regrets, lost = run(key), exact_regrets(), []
    for actions, readings in zip(
        np.asarray(episodes.action), np.asarray(episodes.obs), strict=True
    ):
        apart, total = 0, 0.0
        for t, (action, reading) in enumerate(zip(actions, readings, strict=True)):
            total += 0.95**t * regrets[np.clip(apart, -14, 14) + 14, action]
            apart = apart + (1 if reading == 1 else -1) if action == 0 else 0
        lost.append(total)
    return np.mean(lost), np.std(lost, ddof=1) / len(lost) ** 0.5


@pytest.mark.slow
def test_closed_loop_on_tiger():
    planner = Vopp(64, 16, max_depth=10, eta=1.0, leaf="zero", max_nodes=2048)
    lost, error = lost_on_tiger(jax.random.key(11), planner, 16, 40, None)
    assert lost < 0.1, (lost, error)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_closed_loop_on_tiger_is_within_a_fifth_of_the_optimum(seed):
    """Sixty steps; what comes later is worth at most 19.4 * 0.95^60 = 0.9, of which it loses the same share."""
    planner = Vopp(64, 16, max_depth=10, eta=1.0, leaf="zero", max_nodes=4096)
    lost, error = lost_on_tiger(jax.random.key(seed), planner, 400, 60, 100)
    assert lost + 3 * error < 0.2, (lost, error)


# ---------------------------------------------------------------- long rows


@pytest.mark.parametrize("unvisited, at_once", [("leaf", 3), ("mask", None)])
def test_rows_that_lanes_share_give_the_same_tree_to_the_bit(monkeypatch, unvisited, at_once):
    env = RockSample(4, 3)
    belief = ParticleBelief(64).init(jax.random.key(0), env, env.default_params)
    planner = Vopp(48, 6, eta=1.0, max_nodes=30, unvisited=unvisited)

    def searched():
        search = lambda key: planner.search(key, env, env.default_params, belief)  # noqa: E731
        key = jax.random.key(1)
        return (
            jit(search)(key)
            if at_once is None
            else jit(jax.vmap(search))(jax.random.split(key, at_once))
        )

    whole = searched()
    monkeypatch.setattr(vopp, "row_block", lambda num_actions, count: 5)
    shared = searched()
    assert (whole.tree.overflow > 0).all(), "some lanes find no room"
    jax.tree.map(np.testing.assert_array_equal, shared, whole)


def test_only_long_rows_are_shared():
    assert (
        vopp.row_block(64, 9000) == 9000
        and vopp.row_block(1024, 9000) == 512
        and vopp.row_block(2**20, 9000) == 1
    )
