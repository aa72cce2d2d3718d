"""Gates of planning: settings, hooks and files that say nothing sensible are rejected by one clear sentence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from models import random_model, tiger
from pomdp_worlds import Known, Leaving, Tiger

from jaxpar.pomdp import (
    Despot,
    Exact,
    ParticleBelief,
    Particles,
    Pft,
    Pomcp,
    Pomcpow,
    Vopp,
    load_policy,
    load_pomdp,
    qmdp,
    save_policy,
    solve_exact,
)
from jaxpar.pomdp.planners.tree import DenseChildren, HashedChildren
from jaxpar.types import UsageError

PARAMS = Tiger().default_params


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Despot(default="left"), "default='left': no default policy; expected an action"),
        (lambda: Despot(default=-1), "default=-1: no default policy"),
        (lambda: Despot(default=True), "default=True: no default policy"),
        (lambda: Pft(keyed="yes"), "keyed='yes': unknown; expected True, False or None"),
        (lambda: Pomcpow(keyed=1), "keyed=1: unknown"),
        (lambda: Vopp(children="dense"), "children='dense': no table of children; expected Dense"),
        (lambda: Pomcp(children=DenseChildren), "no table of children"),
        (lambda: Pft(children=3), "children=3: no table of children"),
        (lambda: Despot(children="hashed"), "children='hashed': no table of children"),
        (lambda: Pomcp(max_nodes=2**40), "max_nodes=1099511627776 must be at least 1 and at most"),
        (lambda: Vopp(max_edges=2**31), "max_edges=2147483648 must be at least 1 and at most"),
        (lambda: Despot(max_particles=2**40), "max_particles=1099511627776 must be"),
        (lambda: ParticleBelief(rejuvenate=3), "rejuvenate=3: no hook; expected a function"),
    ],
    ids=str.split(
        "policy negative bool keyed keyed_pomcpow children class number despot nodes edges particles hook"
    ),
)
def test_useless_settings_are_rejected(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_legal_settings_are_not():
    assert Despot(default=0).default == 0
    assert Vopp(children=HashedChildren()).children == HashedChildren()
    assert Pft(keyed=False).keyed is False
    assert Pomcp(max_nodes=2**31 - 2).max_nodes == 2**31 - 2


def test_a_default_action_that_there_is_not_is_rejected_where_the_actions_are_known():
    planner = Despot(4, 2, max_depth=2, max_reward=10.0, default=99)
    with pytest.raises(
        UsageError, match="default=99: no default policy; expected an action, 0 to 2"
    ):
        planner.plan(jax.random.key(0), Tiger(), PARAMS, Known(jnp.asarray(0.5)))


def lost(key, prior, action, obs, posterior, depleted, env, params):
    """A hook that has other states, and no weight for any."""
    return Particles(
        jnp.full_like(posterior.states, 7), jnp.full_like(posterior.log_weights, -jnp.inf)
    )


def test_a_hook_without_weight_leaves_the_predicted_states():
    """Leaving without a likelihood weighs by rejection: an observation that none draws depletes the belief."""
    updater = ParticleBelief(8, rejuvenate=lost)
    env = Leaving()
    belief = updater.init(jax.random.key(0), env, PARAMS)
    after, found = updater.update(
        jax.random.key(1), belief, jnp.asarray(1), jnp.asarray(5), env, PARAMS
    )
    assert bool(found.depleted)
    assert after.states.tolist() == [1] * 8
    np.testing.assert_allclose(jnp.exp(after.log_weights).sum(), 1.0, rtol=1e-5)


def policy_of(num_states, vectors=6):
    rows = np.random.default_rng(0).normal(size=(vectors, num_states))
    value = jnp.zeros(())
    actions = jnp.arange(vectors, dtype=jnp.int32) % 2
    return Exact(value, value, value, jnp.asarray(rows), actions, False, 0)


@pytest.mark.parametrize(("written", "read"), [(2, 5), (2, 8), (3, 7), (5, 2), (2, 3), (1, 3)])
def test_a_policy_of_another_number_of_states_is_rejected(written, read, tmp_path):
    """Also where the words of its vectors would fill those of the model."""
    save_policy(policy_of(written), tmp_path / "x.alpha")
    with pytest.raises(UsageError, match="x.alpha, line "):
        load_policy(tmp_path / "x.alpha", random_model(states=read))


def test_a_policy_whose_vectors_go_over_several_lines_is_read():
    model = random_model(states=4)
    policy = load_policy("0\n1.0 2.0\n3.0\n4.0\n\n1\n5 6 7 8\n", model)
    assert policy.actions.tolist() == [0, 1]
    assert policy.alphas.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


MODEL = """discount: 0.5
values: reward
states: left right
actions: stay go
observations: dark bright
T: stay identity
T: go
0.0 1.0
1.0 0.0
O: * uniform
R: go : left : * : * 2.0
"""


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("left right", "start right", "line 3: 'start' cannot be a name among states"),
        ("left right", "left T", "line 3: 'T' cannot be a name among states"),
        (
            "observations: dark",
            "costs: 3\nobservations: dark",
            "line 5: 'costs' begins no statement",
        ),
        ("observations: dark bright\n", "", "line 9: observations must be given before O"),
        ("discount: 0.5", "discount: -0.5", r"line 1: the discount must be in \[0, 1\], not -0.5"),
    ],
    ids=["start", "statement", "costs", "observations", "discount"],
)
def test_mistakes_in_files_are_named_where_they_are(old, new, words):
    assert old in MODEL
    with pytest.raises(UsageError, match=words):
        load_pomdp(MODEL.replace(old, new, 1))


def test_a_file_without_observations_shows_the_state():
    text = MODEL.replace("observations: dark bright\n", "").replace("O: * uniform\n", "")
    model = load_pomdp(text)
    assert model.observations == model.states == ("left", "right")
    np.testing.assert_array_equal(model.observation, np.tile(np.eye(2), (2, 1, 1)))
    best = solve_exact(model, tol=1e-4)
    # Seen or not, one is left in half of the cases: 2 now and 2 in two steps, 2 / (1 - 0.25), or half a step later.
    np.testing.assert_allclose(best.value, (1 + 0.5) / 2 * 2 / 0.75, atol=1e-3)


@pytest.mark.parametrize("method", ["points", "alpha"])
def test_without_a_discount_the_next_reward_is_all(method):
    model = load_pomdp(MODEL.replace("discount: 0.5", "discount: 0"))
    assert float(model.discount) == 0
    best = solve_exact(model, method=method, tol=1e-4)
    np.testing.assert_allclose(best.value, 1.0, atol=1e-4)
    np.testing.assert_allclose(qmdp(model), [[0, 0], [2, 0]], atol=1e-5)
    action, info = Pomcp(64, 8, max_depth=2, leaf="zero").plan(
        jax.random.key(0),
        model.environment,
        model,
        ParticleBelief(64).init(jax.random.key(1), model.environment, model),
    )
    assert int(action) == 1
    np.testing.assert_allclose(info.values, [0, 1], atol=0.2)


def test_tiger_reads_as_before():
    assert float(tiger().discount) == pytest.approx(0.95)
