"""What cannot be planned is told: states without a legal action, beliefs without weight, bounds that have met."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from pomdp_worlds import Known, Leaving, Tiger

from jaxpar.pomdp import (
    Despot,
    ParticleBelief,
    Particles,
    Pft,
    Pomcp,
    Pomcpow,
    RootParallel,
    Vopp,
    simulate_many,
    summarize,
)
from jaxpar.types import UsageError

PARAMS = Tiger().default_params


@dataclasses.dataclass(frozen=True)
class Trap(Leaving):
    """From the second state on nothing is allowed; at first only action 1, which leads there."""

    def action_mask(self, state, params):
        return jnp.stack([jnp.zeros((), bool), state == 0])

    def log_likelihood(self, obs, state, action, next_state, params):
        return jnp.zeros(())


SMALL = {"max_depth": 3, "leaf": "zero"}
PLANNERS = {
    "vopp": Vopp(8, 3, max_nodes=64, **SMALL),
    "pomcp": Pomcp(8, 3, **SMALL),
    "pft": Pft(8, 3, num_particles=4, **SMALL),
    "pomcpow": Pomcpow(8, 3, num_particles=4, **SMALL),
    "root-parallel": RootParallel(Vopp(4, 3, max_nodes=64, **SMALL), 2),
    "despot": Despot(8, 3, max_depth=3, max_reward=10.0),
}
SLOW = {"pomcpow", "root-parallel", "pft"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in PLANNERS]
)
def test_states_without_an_action_and_beliefs_without_weight_are_counted(name):
    planner, env = PLANNERS[name], Trap()
    plan = jit(lambda key, belief: planner.plan(key, env, PARAMS, belief))
    belief = ParticleBelief(8).init(jax.random.key(0), env, PARAMS)
    action, info = plan(jax.random.key(0), belief)
    assert int(action) == 1 and info.legal.tolist() == [False, True]
    assert int(info.stranded) == (
        8 if name == "despot" else 16
    )  # all, in batches that go beyond the first step
    assert (
        int(info.steps) == (8 if name == "despot" else 24)
        and int(info.visits[0]) == int(info.overflow) == 0
    )
    lost = Particles(belief.states, jnp.full((8,), -jnp.inf))
    action, info = plan(jax.random.key(0), lost)
    assert int(action) == 1 and int(info.stranded) == (16 if name == "despot" else 40)
    with pytest.raises(UsageError, match="no particle left"):
        planner.plan_until(jax.random.key(0), env, PARAMS, lost, 0.0)


@pytest.mark.parametrize("name", ["pomcp", "despot"])
def test_what_a_belief_says_of_itself_is_counted(name):
    """Of any belief, by the attributes that it declares."""

    @dataclasses.dataclass(frozen=True)
    class Told:
        weightless: bool
        invalid: int

        def sample(self, key, num):
            return jnp.zeros((num,), jnp.int32)

    plan = jax.jit(
        lambda belief: PLANNERS[name].plan(jax.random.key(0), Leaving(), PARAMS, belief),
        static_argnums=0,
    )
    info = plan(Told(weightless=False, invalid=3))[1]
    assert int(info.invalid) == 3 and int(info.stranded) == 0
    info = plan(Told(weightless=True, invalid=0))[1]
    assert int(info.invalid) == 0 and int(info.stranded) == (8 if name == "despot" else 24)


@pytest.mark.slow
def test_episodes_sum_what_was_stranded():
    planner = PLANNERS["pomcp"]
    played = jit(lambda key: simulate_many(key, Trap(), PARAMS, planner, ParticleBelief(8), 2, 3))(
        jax.random.key(0)
    )
    assert (
        played.stranded.shape == (3, 2)
        and int(summarize(played).stranded) == int(played.stranded.sum()) > 0
    )


def test_despot_stops_when_its_bounds_meet():
    """Two steps of a tiger that is known to be on the left: the other door twice, and nothing else to find out."""
    planner = Despot(8, 50, max_depth=2, default=2, max_reward=10.0)
    action, info = planner.plan_until(
        jax.random.key(0), Tiger(), PARAMS, Known(jnp.asarray(0.0)), 1e12
    )
    assert int(action) == 2 and 0 < int(info.iterations) < 10
    np.testing.assert_allclose(info.value, info.upper, rtol=1e-5)


@pytest.mark.slow
def test_despot_stops_when_nothing_is_left_to_expand():
    full = Despot(8, 50, max_depth=4, default=0, max_reward=10.0, max_particles=8)
    info = full.plan_until(jax.random.key(0), Tiger(), PARAMS, Known(jnp.asarray(0.5)), 1e12)[1]
    whole = jit(lambda key: full.plan(key, Tiger(), PARAMS, Known(jnp.asarray(0.5))))(
        jax.random.key(0)
    )[1]
    assert (
        int(info.iterations) < 10
        and int(whole.iterations) == 50
        and int(whole.steps) == int(info.steps)
    )
    np.testing.assert_allclose(whole.value, info.value, rtol=1e-5)


@functools.cache
def short():
    return Vopp(8, 20, max_depth=3, leaf="zero", max_nodes=128)


@pytest.mark.parametrize("mask", [(False, True, True), (False, False, True)])
def test_a_deadline_too_short_gives_a_legal_action_and_says_so(mask):
    run = functools.partial(
        short().plan_until, jax.random.key(0), Tiger(mask=mask), PARAMS, Known(jnp.asarray(0.5))
    )
    action, info = run(-1.0)
    assert (
        mask[int(action)]
        and int(info.iterations) == int(info.steps) == 0
        and info.legal.tolist() == list(mask)
    )
