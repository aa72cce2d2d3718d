"""Episodes and root-parallel trees on one, two and eight devices, and what merging makes of several trees."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import transfers_in
from fast import jit
from pomdp_worlds import Bayes, Known, Tiger

from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.pomdp import Despot, Pft, Pomcp, RootParallel, Vopp, simulate_many
from jaxpar.pomdp.planners.root_parallel import merged
from jaxpar.types import UsageError

ENV, PARAMS = Tiger(), Tiger().default_params
SLOW = ((2, None), (2, 2), (8, 2))
VOPP = Vopp(16, 4, max_depth=3, eta=1.0, leaf="zero", max_nodes=128)


def mesh(count):
    return use_mesh(make_mesh(MeshSpec(data=-1), devices=jax.devices()[:count]))


def assert_alike(one, many, exactly=False):
    for (path, a), b in zip(
        jax.tree.leaves_with_path(jax.device_get(one)), jax.tree.leaves(many), strict=True
    ):
        if exactly or not np.issubdtype(a.dtype, np.floating):
            assert (a == np.asarray(b)).all(), path
        else:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4, err_msg=str(path))


@functools.partial(jit, static_argnums=(3, 4))
def played(key, params, eta, episodes, batch):
    planner = Vopp(16, 4, max_depth=3, eta=eta, leaf="zero", max_nodes=128)
    return simulate_many(key, ENV, params, planner, Bayes(), 5, episodes, batch=batch)


@pytest.mark.parametrize(
    "count, batch", [(8, None), *[pytest.param(*p, marks=pytest.mark.slow) for p in SLOW]]
)
def test_episodes_are_the_same_on_several_devices_which_do_not_talk(count, batch):
    ask = (jax.random.key(3), PARAMS, 1.0)
    one = played(*ask, 16, batch)
    assert len(np.unique(one.action)) > 1
    with mesh(count):
        program = played.lower(*ask, 16, batch).compile()
        several = program(*ask)
    assert len(several.action.sharding.device_set) == count
    assert_alike(one, several, exactly=batch is not None)
    assert not transfers_in(program.as_text())


def test_what_does_not_divide_is_refused():
    with mesh(8):
        with pytest.raises(
            UsageError, match="num_episodes: .* size 12 does not divide over data=8"
        ):
            simulate_many(jax.random.key(0), ENV, PARAMS, VOPP, Bayes(), 5, 12)
        with pytest.raises(UsageError, match="trees: .* size 4 does not divide over data=8"):
            RootParallel(VOPP, 4).plan(jax.random.key(0), ENV, PARAMS, Known(0.5))


@functools.partial(jit, static_argnums=0)
def planned(planner, key, params, belief):
    return planner.plan(key, ENV, params, belief)


@pytest.mark.parametrize(
    "kind, counts", [("vopp", (8,)), pytest.param("pomcp", (2, 8), marks=pytest.mark.slow)]
)
def test_trees_are_the_same_on_several_devices_and_merge_as_a_plain_loop_does(kind, counts):
    single = VOPP if kind == "vopp" else Pomcp(4, 8, max_depth=3, exploration=30.0, leaf="zero")
    planner, key, belief = RootParallel(single, 8), jax.random.key(5), Known(jnp.asarray(0.4))
    action, info = planned(planner, key, PARAMS, belief)
    for count in counts:
        with mesh(count):
            assert_alike((action, info), planned(planner, key, PARAMS, belief))
    infos = [planned(single, key, PARAMS, belief)[1] for key in jax.random.split(key, 8)]
    visits = np.stack([info.visits for info in infos])
    assert info.visits.tolist() == visits.sum(0).tolist() and int(info.nodes) == sum(
        int(i.nodes) for i in infos
    )
    values, wanted = np.stack([info.values for info in infos]), []
    for a in range(3):
        found = [n * q for n, q in zip(visits[:, a], values[:, a], strict=True) if n]
        wanted.append(sum(found) / visits[:, a].sum())
    np.testing.assert_allclose(info.values, wanted, rtol=1e-4)
    order = info.preferences if kind == "vopp" else info.values
    assert int(action) == int(np.argmax(order)) and int(info.iterations) == single.iterations


def test_an_action_that_some_trees_never_tried_counts_by_those_that_did():
    rows = {
        "visits": [[2, 0, 1], [6, 0, 0]],
        "values": [[1.0, -np.inf, 9.0], [5.0, -np.inf, -np.inf]],
    }
    info = planned(VOPP, jax.random.key(0), PARAMS, Known(jnp.asarray(0.5)))[1]
    infos = jax.tree.map(lambda x: jnp.stack([x, x]), info).replace(
        visits=jnp.asarray(rows["visits"]), values=jnp.asarray(rows["values"])
    )
    action, got = merged(infos, "values", jnp.asarray([True, True, True]))
    assert got.values.tolist() == [4.0, -np.inf, 9.0] and int(action) == 2
    action, got = merged(infos, "values", jnp.asarray([True, True, False]))
    assert int(action) == 0 and float(got.value) == 4.0
    action, _ = merged(infos, "values", jnp.asarray([False, True, False]))
    assert int(action) == 1


@pytest.mark.slow
def test_more_trees_are_less_noisy():
    """The root's value over 64 keys: eight independent trees leave an eighth of the variance."""
    single = Vopp(32, 8, max_depth=4, eta=1.0, leaf="zero", max_nodes=512)

    def spread(planner):
        keys = jax.random.split(jax.random.key(0), 64)
        return float(
            jnp.var(
                jax.jit(jax.vmap(lambda key: planner.plan(key, ENV, PARAMS, Known(0.5))[1].value))(
                    keys
                )
            )
        )

    assert 0.06 < spread(RootParallel(single, 8)) / spread(single) < 0.25


@pytest.mark.slow
def test_episodes_of_root_parallel_trees_on_a_mesh():
    """Both axes are the same devices': these are the episodes', and each device grows all trees of its own."""
    planner = RootParallel(VOPP, 2)
    play = jit(lambda key: simulate_many(key, ENV, PARAMS, planner, Bayes(), 2, 8))
    one = play(jax.random.key(1))
    with mesh(8):
        assert_alike(one, play(jax.random.key(1)))


@pytest.mark.parametrize(
    "kind, count", [("vopp", 1), pytest.param("pft", 8, marks=pytest.mark.slow)]
)
def test_deadlines_of_several_trees(kind, count):
    ticks = itertools.count()
    env = Tiger(mask=(False, True, True))
    planner = RootParallel(
        VOPP if kind == "vopp" else Pft(8, 6, max_depth=3, num_particles=4, leaf="zero"), 8
    )
    run = functools.partial(
        planner.plan_until, jax.random.key(0), env, PARAMS, Known(jnp.asarray(0.5))
    )
    with mesh(count):
        action, info = run(-1.0)
        assert (
            int(action) == 1
            and int(info.iterations) == 0
            and info.legal.tolist() == [False, True, True]
        )
        action, info = run(6.5, clock=lambda: float(next(ticks)))
        assert int(info.iterations) == 3 and int(action) in (1, 2)
        assert int(info.visits.sum()) == planner.num_simulations * 3
        _, whole = run(1e12)
    plan = jit(lambda key, belief: planner.plan(key, env, PARAMS, belief))
    assert_alike(whole, plan(jax.random.key(0), Known(jnp.asarray(0.5)))[1])


def test_bad_trees_are_refused():
    with pytest.raises(UsageError, match="trees=0 must be at least 1"):
        RootParallel(VOPP, 0)
    with pytest.raises(UsageError, match="Despot's roots cannot be merged"):
        RootParallel(Despot(4))
