"""What every planner keeps, one row a planner; a new one is added to `ROWS` and nothing else."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

import envs
from jaxpar.pomdp import Despot, FixedReference, ParticleBelief, Pft, PlanInfo, Pomcp, Pomcpow, RootParallel, Vopp
from jaxpar.types import UsageError

ENV, PARAMS = envs.make("RockSample-2-2")
ACTIONS = ENV.action_space(PARAMS).n
ROWS = {
    "vopp": Vopp(8, 3, max_depth=3),
    "fixed-reference": FixedReference(8, 3, max_depth=3),
    "pomcp": Pomcp(8, 4, max_depth=3, leaf="heuristic"),
    "pft": Pft(8, 4, max_depth=3, num_particles=4, leaf="heuristic"),
    "pomcpow": Pomcpow(8, 4, max_depth=3, num_particles=4, leaf="heuristic"),
    "despot": Despot(8, 3, max_depth=3, default=1, upper="heuristic"),
    "root-parallel": RootParallel(Vopp(8, 3, max_depth=3), 2),
}
each_row = pytest.mark.parametrize("name", ROWS)


@functools.cache
def compiled(name):
    """The row's jitted plan, and its number of traces so far."""
    traces = []

    def plan(key, belief, params=PARAMS):
        traces.append(name)
        return ROWS[name].plan(key, ENV, params, belief)

    plan = jit(plan)
    return lambda key, belief, params=PARAMS: plan(key, belief, params), traces


@functools.cache
def belief():
    return ParticleBelief(16).init(jax.random.key(0), ENV, PARAMS)


@each_row
def test_is_a_hashable_value_with_the_planners_methods(name):
    planner = ROWS[name]
    assert hash(planner) == hash(type(planner)(**vars(planner))) and planner == type(planner)(**vars(planner))
    assert list(inspect.signature(planner.plan).parameters) == ["key", "env", "params", "belief"]
    until = list(inspect.signature(planner.plan_until).parameters)
    assert until == ["key", "env", "params", "belief", "deadline", "clock"]


@each_row
def test_plans_a_legal_action_and_reports_it_by_one_trace_to_the_bit(name):
    plan, traces = compiled(name)
    (action, info), again = plan(jax.random.key(1), belief()), plan(jax.random.key(1), belief())
    other = plan(jax.random.key(2), belief())
    assert len(traces) == 1
    assert all((a == b).all() for a, b in zip(*map(jax.tree.leaves, ((action, info), again)), strict=True))
    assert not all((a == b).all() for a, b in zip(*map(jax.tree.leaves, (info, other[1])), strict=True))
    assert isinstance(info, PlanInfo) and action.shape == () and action.dtype == jnp.int32
    mask = np.asarray(ENV.action_mask(jax.tree.map(lambda x: x[0], belief().states), PARAMS))
    assert info.legal.tolist() == mask.tolist() and mask[int(action)] and mask[int(other[0])]
    for field in ("values", "preferences", "policy", "visits", "legal"):
        assert getattr(info, field).shape == (ACTIONS,)
    for field in ("visits", "nodes", "edges", "depth", "iterations", "steps", "overflow", "invalid"):
        assert getattr(info, field).dtype == jnp.int32, field
    assert not np.asarray(info.visits)[~mask].any() and np.isneginf(np.asarray(info.values)[~mask]).all()
    np.testing.assert_allclose(float(info.policy.sum()), 1.0, rtol=1e-5)
    assert int(info.iterations) == ROWS[name].iterations and int(info.overflow) == int(info.invalid) == 0


@each_row
def test_a_terminal_root_is_told(name):
    left = belief().states.replace(place=jnp.full_like(belief().states.place, ENV.size))
    ended = dataclasses.replace(belief(), states=left)
    action, info = compiled(name)[0](jax.random.key(1), ended)
    assert float(info.ended) == 1 and int(info.steps) == 0 and 0 <= int(action) < ACTIONS
    with pytest.raises(UsageError, match="terminal"):
        ROWS[name].plan_until(jax.random.key(1), ENV, PARAMS, ended, 1e9)


@each_row
def test_rewards_that_are_not_finite_are_counted(name):
    action, info = compiled(name)[0](jax.random.key(1), belief(), PARAMS.replace(bad_reward=jnp.nan))
    assert int(info.invalid) > 0 and info.legal[action]
    assert np.isfinite(np.asarray(info.values)[info.legal]).all() and np.isfinite(float(info.value))


@pytest.mark.slow
@each_row
def test_vmapped_over_keys_is_a_loop(name):
    keys, known = jax.random.split(jax.random.key(0), 2), belief()  # made outside of the trace, for it is kept
    batch = jit(jax.vmap(lambda key: ROWS[name].plan(key, ENV, PARAMS, known)))(keys)
    for i, key in enumerate(keys):
        for a, b in zip(*map(jax.tree.leaves, (batch, compiled(name)[0](key, known))), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-4)
