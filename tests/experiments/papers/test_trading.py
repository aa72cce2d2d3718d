"""The market's accounts balance to the cent, by a loop of Python's integers; majorities are counted."""

from fractions import Fraction
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
from fast import jit

from experiments.papers.trading import CASH, PRICE, Market, fee_of, majority, told, wealth
from jaxpar.env import check_environment


def test_the_book_balances_at_every_step_and_equals_integers_of_python():
    market = Market(3, 25)
    params = market.default_params.replace(fee=7, drift=0.05)
    rng, go = np.random.default_rng(0), jit(market.transition)
    state = market.init(jax.random.key(0), params)
    cash, shares, fees, gained, traded = CASH, [0, 0, 0], 0, 0, 0
    for step in range(400):
        action = int(rng.integers(0, 7))
        price = np.asarray(state.price).tolist()
        after = go(jax.random.key(step), state, jnp.int32(action), params)
        if action:
            which, sign = (action - 1) % 3, 1 if action <= 3 else -1
            cost = sign * 25 * price[which]
            fee = ceil(Fraction(abs(cost) * 7, 10_000))
            if shares[which] + sign * 25 >= 0 and cash >= cost + fee:
                cash, fees, traded = cash - cost - fee, fees + fee, traded + 1
                shares[which] += sign * 25
        new = np.asarray(after.price).tolist()
        gained += sum(count * (b - a) for count, a, b in zip(shares, price, new, strict=True))
        assert (int(after.cash), np.asarray(after.shares).tolist(), int(after.fees)) == (
            cash,
            shares,
            fees,
        )
        assert int(wealth(after)) + fees == CASH + gained == CASH + int(after.gained)
        assert min(new) >= PRICE // 16 and max(new) <= 16 * PRICE and cash >= 0
        state = after
    assert traded > 50 and fees > 0


def test_fees_are_rounded_up_and_never_overflow():
    values = np.array([0, 1, 9_999, 10_000, 10_001, 2**31 - 1])
    for points in (0, 1, 7, 100):
        want = [ceil(Fraction(int(value) * points, 10_000)) for value in values]
        np.testing.assert_array_equal(
            fee_of(jnp.asarray(values, jnp.int32), jnp.int32(points)), want
        )


def test_it_keeps_the_contract_and_a_majority_is_counted():
    check_environment(Market(), Market().default_params.replace(max_steps=4))
    assert (
        int(majority(jnp.array([2, 1, 2, 0]), 4)) == 2
        and int(majority(jnp.array([3, 1, 3, 1]), 4)) == 1
    )
    mean, ratio, fall = told(np.array([[0.5, 0.0], [-0.75, 0.0], [0.25, 0.1]]))
    np.testing.assert_allclose([mean, fall], [0.05, (1 - 0.75 / 1.5 + 0) / 2])
    assert ratio > 0
