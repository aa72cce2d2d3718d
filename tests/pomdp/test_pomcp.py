"""POMCP with virtual visits: its choices against the greedy loop, its values against exact ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pomdp_worlds import Known, Leaving, Tiger

from envs.pomdp.rocksample import RockSample
from jaxpar.pomdp import ParticleBelief, Pomcp
from jaxpar.pomdp.planners.pomcp import add_returns, ranks, virtual_choice
from jaxpar.pomdp.planners.simulations import Path
from jaxpar.pomdp.planners.tree import EMPTY, DenseChildren, empty_tree
from jaxpar.types import UsageError


def greedy(count, values, visits, legal, total, scale):
    """UCB1 one virtual visit after another, in float64."""
    visits, chosen = visits.astype(float).copy(), []
    for _ in range(count):
        with np.errstate(divide="ignore"):
            bound = np.where(legal, values + scale * np.sqrt(np.log(total) / visits), -np.inf)
        chosen.append(int(bound.argmax()))
        visits[chosen[-1]] += 1
    return np.bincount(chosen, minlength=len(values))


@pytest.mark.parametrize("seed", range(4))
def test_virtual_visits_are_those_of_the_greedy_loop(seed):
    rng = np.random.default_rng(seed)
    count, values = 40, rng.normal(size=7).astype(np.float32)
    visits, legal = rng.integers(0, 9, 7), rng.random(7) < 0.8
    legal[0] = True
    rows = [np.broadcast_to(x, (count, 7)) for x in (values, visits, legal)]
    got = virtual_choice(jnp.arange(count), *map(jnp.asarray, rows), jnp.full((count,), 30.0), 2.0)
    assert (
        np.bincount(got, minlength=7).tolist()
        == greedy(count, values, visits, legal, 30.0, 2.0).tolist()
    )


def test_ranks_count_earlier_equals():
    assert ranks(jnp.asarray([3, 1, 3, 3, 1, 0])).tolist() == [0, 0, 1, 2, 1, 0]


def test_short_horizons_of_tiger_and_an_early_end():
    env, params = Tiger(), Tiger().default_params
    planner = Pomcp(16, 600, max_depth=3, exploration=40.0, leaf="zero")
    action, info = jax.jit(planner.plan, static_argnums=1)(
        jax.random.key(0), env, params, Known(0.5)
    )
    assert int(action) == 0 and int(info.overflow) == 0 and int(info.visits.sum()) == 16 * 600
    np.testing.assert_allclose(float(info.value), 2.3098, atol=0.6)
    belief = ParticleBelief(8).init(jax.random.key(0), Leaving(), params)
    planner = Pomcp(16, 200, max_depth=3, exploration=60.0, leaf="zero")
    action, info = jax.jit(planner.plan, static_argnums=1)(
        jax.random.key(0), Leaving(), params, belief
    )
    assert int(action) == 1
    np.testing.assert_allclose(info.values, [4.75, 9.5], atol=0.5)


def test_means_are_those_of_the_simulations_and_do_not_depend_on_the_back_end():
    env = RockSample(3, 2)
    belief = ParticleBelief(32).init(jax.random.key(1), env, env.default_params)
    plan = jax.jit(
        lambda planner, key: planner.plan(key, env, env.default_params, belief), static_argnums=0
    )
    _, dense = plan(Pomcp(8, 20, rollout_depth=5), jax.random.key(0))
    from jaxpar.pomdp.planners.tree import HashedChildren

    _, hashed = plan(
        dataclasses.replace(Pomcp(8, 20, rollout_depth=5), children=HashedChildren()),
        jax.random.key(0),
    )
    np.testing.assert_allclose(dense.values, hashed.values, rtol=1e-5)
    assert dense.visits.tolist() == hashed.visits.tolist() and int(dense.nodes) == int(hashed.nodes)
    assert (np.asarray(dense.visits) > 0).tolist() == np.asarray(dense.legal).tolist()


def test_returns_are_discounted_at_every_level():
    """Rewards 1, 2, 4 and a guess of 8, at a discount of a half: 4 + 4, 2 + 4, 1 + 3."""
    children = DenseChildren(1)
    tree = empty_tree(2, 8, 8, children)
    rewards, once = jnp.asarray([1.0, 2, 4, 0, 0, 0, 0, 0]), tree.edge_visits.at[:3].set(1)
    tree = dataclasses.replace(tree, edge_visits=once, reward_sum=rewards)
    column = lambda *values: jnp.asarray(values)[:, None]  # noqa: E731
    path = Path(
        column(0, 1, 2, 3), column(0, 1, 2, EMPTY), column(1.0, 2.0, 4.0, 0.0), jnp.asarray([8.0])
    )
    tree = add_returns(tree, children, path, jnp.asarray(3), 0.5)
    np.testing.assert_allclose(tree.value[:3], [4, 6, 8])


def test_bad_sizes_are_refused():
    with pytest.raises(UsageError, match="is unknown; legal are"):
        Pomcp(leaf="guess")
    with pytest.raises(UsageError, match="num_simulations"):
        Pomcp(num_simulations=0)


def chances_below(planner, params):
    """How often 48 plans open the right door of `Tiger` at the beliefs after two, three and four equal hints."""
    env = Tiger()
    odds = (0.85 / 0.15) ** np.arange(2, 5)
    keys = jax.random.split(jax.random.key(0), 48)
    plan = jax.jit(
        jax.vmap(lambda key, right: planner.plan(key, env, params, Known(right))[0], (0, None))
    )
    return [
        float(np.mean(np.asarray(plan(keys, jnp.asarray(p / (1 + p), jnp.float32))) == 1))
        for p in odds
    ]


@pytest.mark.slow
def test_means_hesitate_before_the_door_and_the_best_does_not():
    """Means of UCB1 include the tigers that exploring met, mostly in the parts that are searched most."""
    params = Tiger().default_params.replace(leaf=19.371368)
    planner = Pomcp(16, 64, max_depth=4, exploration=30.0, leaf="heuristic", backup="best")
    assert min(chances_below(planner, params)) > 0.8
    assert min(chances_below(dataclasses.replace(planner, backup="mean"), params)) < 0.7
