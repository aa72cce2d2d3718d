"""Joints of planners: root rules, guesses without room, counts over batches, keys that are shared."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from plain_pft import Line, LineParams
from pomdp_worlds import Known, Tiger

from jaxpar.env import Discrete
from jaxpar.pomdp import (
    Despot,
    ParticleBelief,
    Particles,
    Pft,
    Pomcp,
    Pomcpow,
    RootParallel,
    Vopp,
)
from jaxpar.pomdp.simulate import standard_error

PARAMS = Tiger().default_params.replace(discount=0.5)


@dataclasses.dataclass(frozen=True)
class Chain:
    """A line of steps that pay 1 each, without noise; the guess of every state is 7.

    States that have ended are negative, and their mask allows nothing.
    """

    num_actions: int = 1
    name = "Chain"

    def observation_space(self, params):
        return Discrete(1)

    def action_space(self, params):
        return Discrete(self.num_actions)

    def init(self, key, params):
        return jnp.zeros((), jnp.int32)

    def transition(self, key, state, action, params):
        return state + 1

    def observe(self, key, state, action, params):
        return jnp.zeros((), jnp.int32)

    def log_likelihood(self, obs, state, action, next_state, params):
        return jnp.zeros(())

    def reward(self, state, action, next_state, params):
        return jnp.ones(()) + action

    def terminal(self, state, params):
        return state < 0

    def heuristic(self, state, params):
        return jnp.asarray(7.0)

    def action_mask(self, state, params):
        return jnp.broadcast_to(state >= 0, (self.num_actions,))


def partly_ended(count=64, ended=10):
    """Particles of which the first `ended` are over."""
    states = jnp.where(jnp.arange(count) < ended, -5, 0).astype(jnp.int32)
    return Particles(states, jnp.full((count,), -jnp.log(count)))


SMALL = {"max_depth": 3, "leaf": "heuristic"}
PLANNERS = {
    "vopp": Vopp(16, 4, max_nodes=64, **SMALL),
    "pomcp": Pomcp(16, 4, **SMALL),
    "pft": Pft(16, 4, num_particles=4, **SMALL),
    "pomcpow": Pomcpow(16, 4, num_particles=4, **SMALL),
    "despot": Despot(16, 4, max_depth=3, max_reward=2.0),
    "root-parallel": RootParallel(Vopp(16, 4, max_nodes=64, **SMALL), 2),
}


@pytest.mark.parametrize("name", PLANNERS)
def test_the_clock_and_a_fixed_budget_agree_where_some_states_have_ended(name):
    planner = PLANNERS[name]
    env = Chain(num_actions=2)
    belief = partly_ended()
    action, info = planner.plan_until(jax.random.key(0), env, PARAMS, belief, 1e12)
    fixed, report = jit(lambda key: planner.plan(key, env, PARAMS, belief))(jax.random.key(0))
    assert int(action) == int(fixed) == 1
    assert info.legal.tolist() == report.legal.tolist() == [True, True]
    assert np.isfinite(float(info.value))
    if name != "despot":  # which ends where its bounds have met
        np.testing.assert_allclose(info.value, report.value, rtol=1e-5)
        assert info.visits.tolist() == report.visits.tolist()


@pytest.mark.parametrize("name", ["vopp", "pomcp", "pft", "pomcpow"])
def test_the_root_counts_simulations_that_go_on(name):
    planner = PLANNERS[name]
    belief = partly_ended(ended=32)
    found = jit(lambda key: planner.search(key, Chain(2), PARAMS, belief))(jax.random.key(0))
    assert int(found.tree.node_visits[0]) == 16 * 4 // 2 == int(found.drawn - found.ended)


CROWDED = {
    "mean": Pomcp(1, 3, max_depth=3, max_nodes=2, max_edges=9, leaf="heuristic"),
    "best": Pomcp(1, 3, max_depth=3, max_nodes=2, max_edges=9, leaf="heuristic", backup="best"),
    "vopp": Vopp(1, 3, max_depth=3, max_nodes=2, max_edges=9),
    "pomcpow": Pomcpow(
        1, 3, max_depth=3, max_nodes=2, max_edges=9, num_particles=2, leaf="heuristic"
    ),
}


@pytest.mark.parametrize("name", CROWDED)
def test_a_guess_beyond_the_last_node_is_discounted_once_a_step(name):
    """One node has room below the root, so the second and third simulation stop on an edge below it.

    What they are worth from there is 1 + 7/2 = 4.5, and from the root 1 + 4.5/2 = 3.25.
    """
    planner = CROWDED[name]
    belief = partly_ended(ended=0)
    found = jit(lambda key: planner.search(key, Chain(), PARAMS, belief))(jax.random.key(0))
    tree = found.tree
    assert int(tree.overflow) == 2
    assert int(tree.num_nodes) == 2
    below = int(tree.edges[1, 0])
    np.testing.assert_allclose(tree.value[below], 4.5, rtol=1e-6)
    whole = {"mean": (4.5 + 2 * 3.25) / 3, "pomcpow": (4.5 + 2 * 3.25) / 3}.get(name, 3.25)
    np.testing.assert_allclose(tree.value[int(tree.edges[0, 0])], whole, rtol=1e-6)


@dataclasses.dataclass(frozen=True)
class Split(Chain):
    """States 0 and 1 of which the second forbids action 1."""

    def transition(self, key, state, action, params):
        return state

    def action_mask(self, state, params):
        return jnp.stack([jnp.ones((), bool), state == 0])


def of_one_simulation(name):
    if name == "trees":
        return RootParallel(of_one_simulation("pomcp"), 2)
    return dataclasses.replace(PLANNERS[name], num_simulations=1, iterations=12, max_depth=1)


@pytest.mark.parametrize("name", ["vopp", "pomcp", "pft", "pomcpow", "trees"])
def test_an_action_is_illegal_at_the_root_where_any_batch_drew_a_state_without_it(name):
    """One simulation a batch: half of the keys end with a state that allows both actions."""
    planner = of_one_simulation(name)
    belief = Particles(jnp.arange(2, dtype=jnp.int32), jnp.full((2,), -jnp.log(2.0)))
    keys = jax.random.split(jax.random.key(0), 8)
    plan = jit(jax.vmap(lambda key: planner.plan(key, Split(2), PARAMS, belief)))
    actions, infos = plan(keys)
    assert actions.tolist() == [0] * 8
    assert infos.legal.tolist() == [[True, False]] * 8
    np.testing.assert_allclose(infos.policy, [[1.0, 0.0]] * 8)


def test_root_draws_of_one_simulation_reach_every_action():
    """Evenly spread draws begin at a random point: else a single one is 0, and takes the first action always."""
    planner = Vopp(1, 24, max_depth=1, leaf="zero", eta=0.01, max_nodes=64)
    plan = jit(lambda key: planner.plan(key, Tiger(), PARAMS, Known(jnp.asarray(0.5))))
    visits = plan(jax.random.key(0))[1].visits
    assert min(visits.tolist()) > 0


@dataclasses.dataclass(frozen=True)
class Blurred(Line):
    """The likelihood of whoever stands below 0 is no number."""

    def log_likelihood(self, obs, state, action, next_state, params):
        seen = super().log_likelihood(obs, state, action, next_state, params)
        return jnp.where(next_state < 0, jnp.nan, seen)


@pytest.mark.parametrize("kind", [Pft, Pomcpow])
def test_likelihoods_that_are_no_numbers_are_counted_once(kind):
    planner = kind(8, 6, max_depth=3, num_particles=8, leaf="zero")
    belief = ParticleBelief(64).init(jax.random.key(7), Line(), LineParams())
    found = jit(lambda key: planner.search(key, Blurred(), LineParams(), belief))(jax.random.key(0))
    assert int(found.tree.invalid) == int(found.beliefs.invalid) > 0


@dataclasses.dataclass(frozen=True)
class Coin(Chain):
    """A guess of a coin that the step itself throws: right in half of all steps, whoever guesses."""

    def transition(self, key, state, action, params):
        return jax.random.bernoulli(key).astype(jnp.int32)

    def reward(self, state, action, next_state, params):
        return (action == next_state).astype(jnp.float32)


def guess(key, state, params):
    """Guesses the coin by the key of the step's transition, were it the step's key."""
    return jax.random.bernoulli(jax.random.split(key)[0]).astype(jnp.int32)


def test_the_default_policy_and_the_step_of_a_scenario_have_keys_of_their_own():
    """One key for both would have the guess always right."""
    planner = Despot(400, 1, max_depth=1, max_reward=1.0, default=guess)
    belief = partly_ended(ended=0)
    found = jit(lambda key: planner.search(key, Coin(2), PARAMS, belief))(jax.random.key(0))
    default = float(found.born[0, 1])
    assert abs(default - 0.5) < 5 * 0.5 / np.sqrt(400)


def test_the_standard_error_is_that_of_a_mean():
    """Of 1 and 3 the variance is 2, and that of their mean 1."""
    np.testing.assert_allclose(standard_error(jnp.asarray([1.0, 3.0])), 1.0, rtol=1e-6)
    assert np.isnan(standard_error(jnp.asarray([1.0])))
