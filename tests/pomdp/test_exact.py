import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from models import baby, heavenhell, maze1d, maze4x3, random_model, shuttle, tiger

from jaxpar.pomdp import Trials, blind, fib, qmdp, solve_exact
from jaxpar.pomdp.exact._alpha import prune
from jaxpar.pomdp.exact.solver import iterated_values, reachable_beliefs
from jaxpar.types import UsageError

FINITE = [-1, -1.95, 2.3098, 1.79554, 2.7631, 4.42853, 4.58427, 5.32402, 6.42365, 6.69337]
TRAJECTORY = {
    0.2: [-1.2731, 6.1974, 14.6085, 19.2397, 19.3714],
    2.0: [-1.0275, 6.0893, 14.7086, 19.2429, 19.3714],
    10.0: [-1.0055, 6.1032, 14.7136, 19.2430, 19.3714],
}


def enumerated_value(model, horizon):
    """The value at the start by recursion over actions and observations, in plain Python."""
    T, Z, R = (
        np.asarray(x, float) for x in (model.transition, model.observation, model.expected_reward)
    )

    def value(belief, left):
        if left == 0:
            return 0.0
        best = -np.inf
        for a in range(len(T)):
            total = belief @ R[a]
            for o in range(Z.shape[-1]):
                joint = (belief @ T[a]) * Z[a, :, o]
                if joint.sum() > 0:
                    total += (
                        float(model.discount) * joint.sum() * value(joint / joint.sum(), left - 1)
                    )
            best = max(best, total)
        return best

    return value(np.asarray(model.start, float), horizon)


@pytest.mark.parametrize("horizon", range(1, 11))
def test_tiger_over_a_finite_horizon(horizon):
    assert float(solve_exact(tiger(), horizon).value) == pytest.approx(
        FINITE[horizon - 1], abs=1e-4
    )


@pytest.mark.parametrize(
    "horizon, value", [(20, 11.8796), *(pytest.param(h, v, marks=pytest.mark.slow) for h, v in
    [(50, 17.7598), (60, 18.4065), (100, 19.2474)])]
)  # fmt: skip
def test_tiger_over_a_long_horizon(horizon, value):
    assert float(solve_exact(tiger(), horizon).value) == pytest.approx(value, abs=1e-3)


@pytest.mark.parametrize(
    "model, value",
    [
        (tiger, 19.371368),
        (lambda: tiger(0.75), 1.933439),
        (baby, -16.3055),
        (maze1d, 1.26034),
        (shuttle, 32.8897),
        (maze4x3, 1.88988),
    ],
    ids=["tiger", "tiger.aaai", "baby", "1d", "shuttle", "4x3"],
)
def test_published_values_between_the_bounds(model, value, optimised):
    solved = solve_exact(model())
    assert solved.converged and solved.value == solved.lower
    assert float(solved.lower) - 1e-4 <= value <= float(solved.upper) + 1e-4
    assert float(solved.upper - solved.lower) <= 1e-3
    assert float(solved.values(model().start)) == pytest.approx(float(solved.lower), abs=1e-4)


def test_bounds_close_where_beliefs_lead_back_to_themselves(optimised):
    """Three steps to the priest, three back, four to heaven, and then anew: the bounds stood at 8.638 and 9.854."""
    solved = solve_exact(heavenhell(), max_iterations=20)
    value = 0.99**10 / (1 - 0.99**11)
    assert solved.converged and float(solved.upper - solved.lower) <= 1e-3
    assert float(solved.lower) - 1e-4 <= value <= float(solved.upper) + 1e-4


def test_two_methods_and_precisions_agree(x64):
    both = [solve_exact(tiger(), method=method, tol=1e-2) for method in ("alpha", "points")]
    for solved in both:
        assert solved.value.dtype == jnp.float64 and solved.converged
        assert float(solved.lower) - 1e-6 <= 19.371368 <= float(solved.upper) + 1e-6
    # The policy: open only when sure, and never listen then.
    for belief, action in [
        ([0.5, 0.5], 0),
        ([0.05, 0.95], 0),
        ([0.01, 0.99], 1),
        ([0.99, 0.01], 2),
    ]:
        assert [int(solved.action(jnp.asarray(belief))) for solved in both] == [action] * 2


@pytest.mark.parametrize("states, horizon", [(2, 4), (3, 4), (4, 3)])
def test_vectors_equal_an_enumeration_of_futures(states, horizon):
    model = random_model(states, states)
    solved = solve_exact(model, horizon)
    assert float(solved.value) == pytest.approx(enumerated_value(model, horizon), abs=1e-5)
    for seed in range(5):
        belief = np.random.default_rng(seed).dirichlet(np.ones(states))
        here = model.replace(start=jnp.asarray(belief, jnp.float32))
        assert float(solved.values(here.start)) == pytest.approx(
            enumerated_value(here, horizon), abs=1e-5
        )


def test_pruning_keeps_what_is_best_somewhere_and_nothing_else():
    rng = np.random.default_rng(0)
    for states in (2, 3):
        alphas = rng.normal(size=(60, states))
        alphas = np.concatenate([alphas, alphas[:10], alphas[:5] - 0.1])
        grid = [
            np.asarray(p) / 60 for p in itertools.product(range(61), repeat=states) if sum(p) == 60
        ]
        kept = prune(alphas)
        np.testing.assert_allclose((grid @ kept.T).max(1), (grid @ alphas.T).max(1), atol=1e-9)
        for i in range(len(kept)):
            without = np.delete(kept, i, axis=0)
            fine = rng.dirichlet(np.full(states, 0.7), 20_000)
            fine = np.concatenate([fine, np.eye(states)])
            gains = (fine @ kept.T).max(1) - (fine @ without.T).max(1)
            assert gains.max() > 0, "a vector that adds nothing stayed"


def test_pruning_keeps_all_tangents_of_a_bowl():
    """Each is best around its own point alone, where few samples fall: programs must find the rest."""
    points = np.random.default_rng(0).dirichlet(np.ones(3), 120)
    tangents = 2 * points - (points**2).sum(1, keepdims=True)
    below = tangents[:20] - 0.2
    assert len(prune(np.concatenate([below, tangents]))) == len(tangents)


@pytest.mark.parametrize("model", [tiger, baby, maze1d, lambda: random_model(1)])
def test_bounds_enclose_and_are_ordered(model):
    model = model()
    solved = solve_exact(model, tol=1e-2)
    rng = np.random.default_rng(0)
    beliefs = rng.dirichlet(np.ones(len(model.states)), 50).astype(np.float32)
    low, informed, seeing = (
        (beliefs @ np.asarray(jit(bound)(model)).T).max(1) for bound in (blind, fib, qmdp)
    )
    value = np.asarray(solved.values(jnp.asarray(beliefs)))
    assert (
        (low <= value + 1e-2).all()
        and (value <= informed + 1e-3).all()
        and (informed <= seeing + 1e-3).all()
    )


def test_fast_informed_bound_of_tiger_in_closed_form():
    # Open the right door for 10, then know nothing and listen: L = -1 + 0.95 F and F = 10 + 0.95 L. A published test
    # has 87.18847, which is within its solver's stopping tolerance of this.
    listen = (-1 + 0.95 * 10) / (1 - 0.95**2)
    free = 10 + 0.95 * listen
    expected = [[listen, listen], [free - 110, free], [free, free - 110]]
    informed, seeing = (np.asarray(jit(bound)(tiger())) for bound in (fib, qmdp))
    np.testing.assert_allclose(informed, expected, atol=1e-3)
    np.testing.assert_allclose(seeing, [[189, 189], [90, 200], [200, 90]], atol=1e-3)
    assert informed[0, 0] == pytest.approx(87.18847, abs=1e-2)


@pytest.mark.parametrize("eta", TRAJECTORY)
def test_iterated_scheme_on_tiger(eta):
    values = iterated_values(tiger(), eta, 300)
    np.testing.assert_allclose(
        values[jnp.asarray([1, 10, 30, 100, 300]) - 1, 0], TRAJECTORY[eta], atol=1e-3
    )


def test_iterated_scheme_equals_plain_loops(x64):
    model, eta, steps = tiger(), 0.7, 6
    T, Z, R = (np.asarray(x) for x in (model.transition, model.observation, model.expected_reward))
    beliefs = reachable_beliefs(model)
    assert (beliefs[0] == np.asarray(model.start)).all() and len(beliefs) < 40
    psi = np.zeros((len(beliefs), 3))
    for _ in range(steps):
        value = np.log(np.exp(eta * psi).sum(1)) / eta
        new = psi - value[:, None] + beliefs @ R.T
        for i, belief in enumerate(beliefs):
            for a, o in itertools.product(range(3), range(2)):
                joint = (belief @ T[a]) * Z[a, :, o]
                nearest = np.abs(beliefs - joint / joint.sum()).max(1).argmin()
                new[i, a] += 0.95 * joint.sum() * value[nearest]
        psi = new
    np.testing.assert_allclose(
        iterated_values(model, eta, steps)[-1], np.log(np.exp(eta * psi).sum(1)) / eta
    )


def test_an_early_end_is_said_and_the_bounds_still_hold():
    solved = solve_exact(tiger(), max_iterations=1)
    assert not solved.converged and float(solved.lower) < 19.371368 < float(solved.upper)


def test_same_key_same_bits():
    first, second = (solve_exact(baby(), key=jax.random.key(3)) for _ in range(2))
    jax.tree.map(np.testing.assert_array_equal, first, second)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: solve_exact(tiger(), 0), "horizon must be at least one"),
        (lambda: solve_exact(tiger(), method="sarsop"), "method must be 'points' or 'alpha'"),
        (lambda: solve_exact(tiger(), tol=0.0), "tol must be above zero"),
        (lambda: solve_exact(tiger(), trials=Trials(depth=0)), "depth=0 must be at least 1"),
        (
            lambda: solve_exact(tiger(), trials=Trials(num_paths=-1)),
            "num_paths=-1 must be at least 1",
        ),
        (lambda: solve_exact(tiger(), max_iterations=0), "max_iterations=0 must be at least 1"),
        (lambda: solve_exact(tiger(1.0)), "infinite horizon needs a discount below one"),
        (lambda: solve_exact(random_model(), 5, max_vectors=3), "more than max_vectors = 3"),
        (lambda: iterated_values(tiger(), 0.0, 3), "eta must be above zero"),
        (
            lambda: iterated_values(tiger(), 1.0, 3, np.asarray([[0.5, 0.5], [0.85, 0.15]])),
            "not closed",
        ),
        (lambda: reachable_beliefs(random_model(), max_beliefs=50), "more than max_beliefs = 50"),
    ],
)
def test_mistakes_are_told(call, message):
    with pytest.raises(UsageError, match=message):
        call()


def test_a_discount_of_one_needs_a_horizon():
    assert float(solve_exact(tiger(1.0), 1).value) == pytest.approx(-1)
