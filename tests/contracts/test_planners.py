"""What every planner keeps, one row a planner; a new one is added to `ROWS` and nothing else."""

import dataclasses
import functools
import inspect
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

import envs
from jaxpar.env import Discrete
from jaxpar.pomdp import (
    Despot,
    FixedReference,
    ParticleBelief,
    Pft,
    PlanInfo,
    Pomcp,
    Pomcpow,
    RootParallel,
    Vopp,
)
from jaxpar.pomdp.model import make_model, random_legal
from jaxpar.pomdp.planners import clock, planner
from jaxpar.pomdp.planners.leaves import HeuristicValues, leaf_values
from jaxpar.types import UsageError


def at_random(key, tree, simulations, legal):
    """A part: any legal action."""
    return random_legal(jax.random.uniform(key, simulations.node.shape), legal)


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
    "composed": dataclasses.replace(
        Pomcp(8, 4, max_depth=3).tree_search(), select=at_random, evaluate=HeuristicValues()
    ),
    "composed-particles": dataclasses.replace(
        Pft(8, 4, max_depth=3, num_particles=4, leaf="heuristic").tree_search(), select=at_random
    ),
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
    assert hash(planner) == hash(type(planner)(**vars(planner))) and planner == type(planner)(
        **vars(planner)
    )
    assert list(inspect.signature(planner.plan).parameters) == ["key", "env", "params", "belief"]
    until = list(inspect.signature(planner.plan_until).parameters)
    assert until == ["key", "env", "params", "belief", "deadline", "clock"]


@each_row
def test_plans_by_the_functions_that_all_planners_share(name):
    kind = type(ROWS[name])
    assert kind.plan is planner.plan and kind.search is planner.search
    assert kind.plan_until is clock.plan_until


@each_row
def test_plans_a_legal_action_and_reports_it_by_one_trace_to_the_bit(name):
    plan, traces = compiled(name)
    (action, info), again = plan(jax.random.key(1), belief()), plan(jax.random.key(1), belief())
    other = plan(jax.random.key(2), belief())
    assert len(traces) == 1
    assert all(
        (a == b).all() for a, b in zip(*map(jax.tree.leaves, ((action, info), again)), strict=True)
    )
    assert not all(
        (a == b).all() for a, b in zip(*map(jax.tree.leaves, (info, other[1])), strict=True)
    )
    assert isinstance(info, PlanInfo) and action.shape == () and action.dtype == jnp.int32
    mask = np.asarray(ENV.action_mask(jax.tree.map(lambda x: x[0], belief().states), PARAMS))
    assert info.legal.tolist() == mask.tolist() and mask[int(action)] and mask[int(other[0])]
    for field in ("values", "preferences", "policy", "visits", "legal"):
        assert getattr(info, field).shape == (ACTIONS,)
    for field in (
        "visits",
        "nodes",
        "edges",
        "depth",
        "iterations",
        "steps",
        "overflow",
        "invalid",
    ):
        assert getattr(info, field).dtype == jnp.int32, field
    assert (
        not np.asarray(info.visits)[~mask].any()
        and np.isneginf(np.asarray(info.values)[~mask]).all()
    )
    np.testing.assert_allclose(float(info.policy.sum()), 1.0, rtol=1e-5)
    assert (
        int(info.iterations) == ROWS[name].iterations
        and int(info.overflow) == int(info.invalid) == 0
    )


@each_row
def test_a_terminal_root_is_told(name):
    left = belief().states.replace(place=jnp.full_like(belief().states.place, ENV.size))
    ended = dataclasses.replace(belief(), states=left)
    action, info = compiled(name)[0](jax.random.key(1), ended)
    assert (
        float(info.ended) == 1
        and int(info.steps) == 0
        and 0 <= int(action) < ACTIONS
        and float(info.value) == 0
    )
    with pytest.raises(UsageError, match="terminal"):
        ROWS[name].plan_until(jax.random.key(1), ENV, PARAMS, ended, 1e9)


@pytest.mark.parametrize("bad", [jnp.nan, 3e38])
@each_row
def test_rewards_that_are_not_finite_are_counted(name, bad):
    """And those whose sums would not be."""
    action, info = compiled(name)[0](
        jax.random.key(1), belief(), PARAMS.replace(bad_reward=float(bad))
    )
    assert int(info.invalid) > 0 and info.legal[action]
    assert np.isfinite(np.asarray(info.values)[info.legal]).all() and np.isfinite(float(info.value))


@flax.struct.dataclass
class LessonParams:
    partial: Any = False
    noise: Any = 1
    discount: Any = 0.5


@dataclasses.dataclass(frozen=True)
class Lesson:
    """A hidden bit is told by the first observation, beside some noise, and asked for by the second action.

    Action 1 first costs 1; the right answer pays 10, the wrong one -10, and ends it. With
    `partial`, action 1 first pays 20, and is forbidden where the bit is 0. The guess is what is
    earned, and absurd where the episode has ended. States: the bit, and twice the number of steps.
    """

    name = "Lesson"

    def observation_space(self, params):
        return Discrete(64)

    def action_space(self, params):
        return Discrete(2)

    def init(self, key, params):
        return jax.random.bernoulli(key).astype(jnp.int32)

    def transition(self, key, state, action, params):
        return jnp.minimum(state + 2, 4 + state % 2)

    def observe(self, key, state, action, params):
        return 32 * (state % 2) + jax.random.randint(key, (), 0, params.noise)

    def log_likelihood(self, obs, state, action, next_state, params):
        return jnp.where(obs // 32 == next_state % 2, -jnp.log(1.0 * params.noise), -jnp.inf)

    def reward(self, state, action, next_state, params):
        answered = jnp.where(action == state % 2, 10.0, -10.0)
        first = jnp.where(params.partial, 20.0, -1.0) * action
        return jnp.where(state < 2, first, jnp.where(state < 4, answered, 0.0))

    def terminal(self, state, params):
        return state >= 4

    def heuristic(self, state, params):
        return jnp.where(state >= 4, 777.0, jnp.where(state < 2, 10 * params.discount, 10.0))

    def action_mask(self, state, params):
        forbidden = jnp.asarray(params.partial) & (state == 0)
        return jnp.stack([jnp.ones((), bool), ~forbidden])


LESSON = Lesson()
WIDE = {"num_simulations": 32, "iterations": 12}
LEARNED = {
    "vopp": Vopp(eta=1e3, max_depth=3, **WIDE),
    "fixed-reference": FixedReference(eta=1e3, max_depth=3, **WIDE),
    "pomcp": Pomcp(max_depth=3, leaf="heuristic", backup="best", exploration=5.0, **WIDE),
    "pft": Pft(
        max_depth=3, num_particles=4, leaf="heuristic", backup="best", exploration=5.0, **WIDE
    ),
    "pomcpow": Pomcpow(
        max_depth=3, num_particles=4, leaf="heuristic", backup="best", exploration=5.0, **WIDE
    ),
    "despot": Despot(32, 12, max_depth=3, default=0, upper="heuristic"),
    "root-parallel": RootParallel(Vopp(eta=1e3, max_depth=3, num_simulations=16, iterations=12), 2),
}


DEAR = ("fixed-reference", "root-parallel")  # compile for seconds, and are made of the others
each_learned = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in DEAR else name for name in LEARNED],
)


@functools.cache
def learned(name):
    known = ParticleBelief(32).init(jax.random.key(0), LESSON, LessonParams())
    return jit(lambda key, params: LEARNED[name].plan(key, LESSON, params, known))


@each_learned
def test_rewards_are_discounted_and_observations_used(name):
    """Five less what the first action costs: nothing else is left to chance, so values are exact, visits counted."""
    near = {
        "atol": 0.6 if name == "fixed-reference" else 0.05
    }  # whose nodes are worth a mean of what was tried there
    for discount in (0.5, 0.25):
        action, info = learned(name)(jax.random.key(1), LessonParams(discount=discount))
        np.testing.assert_allclose(
            info.values[0], 10 * discount, **near
        )  # the other is soon left alone
        np.testing.assert_allclose(info.value, 10 * discount, **near)
        np.testing.assert_allclose(getattr(info, "upper", info.value), info.value, atol=1e-3)
        assert (
            int(action) == 0 and int(info.invalid) == int(info.overflow) == int(info.stranded) == 0
        )
        assert int(info.depth) == 2, "nobody walks on where the episode has ended"
        visits = np.asarray(info.visits)
        assert (
            visits.min() >= 32 if name == "despot" else visits.sum() == 32 * 12 and visits.min() > 8
        )


@pytest.mark.parametrize("name", ["pomcp", "pft"])
def test_an_exchanged_evaluation_values_the_leaves(name):
    """One step deep: what it earns, and half of what the part says of every leaf."""

    def four(key, model, states, actions, live):
        return jnp.full(live.shape, 4.0)

    search = dataclasses.replace(LEARNED[name].tree_search(), evaluate=four, iterations=1)
    known = ParticleBelief(32).init(jax.random.key(0), LESSON, LessonParams())
    _, info = jit(lambda key: search.plan(key, LESSON, LessonParams(), known))(jax.random.key(1))
    np.testing.assert_allclose(info.values, [2.0, 1.0], rtol=1e-5)


@pytest.mark.parametrize("name", ["composed", "composed-particles"])
def test_an_exchanged_selection_has_a_key_of_its_own_in_each_batch(name):
    """Were it one key, every batch would take the same actions at the root, and visits be multiples of the batches."""
    _, info = compiled(name)[0](jax.random.key(1), belief())
    assert (np.asarray(info.visits) % ROWS[name].iterations).any()


@dataclasses.dataclass(frozen=True)
class Endless(Lesson):
    """The lesson without an end; with `partial`, only action 0 is legal."""

    def terminal(self, state, params):
        return jnp.zeros((), bool)

    def action_mask(self, state, params):
        return jnp.stack([jnp.ones((), bool), ~jnp.asarray(params.partial)])


@pytest.mark.parametrize(
    "of", [Pomcp, functools.partial(Pft, num_particles=4)], ids=["pomcp", "pft"]
)
def test_each_level_has_keys_of_its_own(of):
    """One simulation a batch: were a batch's key the same at all levels, it would do and see there what it did above.

    So each level would have 4 nodes, of two hidden bits and two actions, or two noises; there are
    4, then 8, then 16.
    """
    search = dataclasses.replace(
        of(1, 80, max_depth=3, leaf="zero").tree_search(), select=at_random
    )
    known = ParticleBelief(32).init(jax.random.key(0), LESSON, LessonParams())
    plan = jit(lambda params: search.plan(jax.random.key(1), Endless(), params, known)[1].nodes)
    for what, params in {
        "select": LessonParams(),
        "step": LessonParams(partial=True, noise=2),
    }.items():
        assert int(plan(params)) > 1 + 3 * 4, what


def test_leaf_values_of_what_has_ended_or_cannot_be_added_are_0():
    def odd(key, model, states, actions, live):
        return jnp.asarray([4.0, 4.0, jnp.nan, 1e30, jnp.nan])

    live = jnp.asarray([True, False, True, True, False])
    none = jnp.full((5,), -1)
    model = make_model(LESSON, LessonParams(), 1.0)
    values, wrong = leaf_values(jax.random.key(0), odd, model, none, none, live)
    assert values.tolist() == [4.0, 0.0, 0.0, 0.0, 0.0] and wrong.tolist() == [
        False,
        False,
        True,
        True,
        False,
    ]


@each_learned
def test_each_simulation_has_a_key_of_its_own(name):
    """Were those of a batch to share one, it would see two observations an action: at most 49 nodes in all."""
    _, info = learned(name)(jax.random.key(1), LessonParams(noise=32))
    assert int(info.nodes) > {"despot": 30, "root-parallel": 80}.get(name, 49)
    if name == "root-parallel":  # two trees of one key are equal, and all their sums even
        assert any(int(x) % 2 for x in (info.nodes, info.edges, info.steps, *info.visits))


@each_learned
def test_an_action_that_some_states_forbid_is_not_returned(name):
    """Though it is tried in the others, and the better one there."""
    action, info = learned(name)(jax.random.key(2), LessonParams(partial=True))
    assert int(action) == 0 and info.legal.tolist() == [True, False]
    assert float(info.value) < 6 and (
        name in ("pomcp", "pft", "pomcpow") or float(info.policy[0]) > 0.99
    )


@pytest.mark.slow
@each_row
def test_vmapped_over_keys_is_a_loop(name):
    keys, known = (
        jax.random.split(jax.random.key(0), 2),
        belief(),
    )  # made outside of the trace, for it is kept
    batch = jit(jax.vmap(lambda key: ROWS[name].plan(key, ENV, PARAMS, known)))(keys)
    for i, key in enumerate(keys):
        for a, b in zip(*map(jax.tree.leaves, (batch, compiled(name)[0](key, known))), strict=True):
            np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-4)
