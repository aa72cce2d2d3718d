"""The plan that lends tokens is that of a loop, keeps every token, and loads no device more than it must."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

from jaxpar.nn.experts.sharded import least_loaded
from jaxpar.types import UsageError


def slow_plan(counts, shares, alpha, min_chunk, tolerated, slots):
    """Expert by expert, and chunk by chunk to the device that then has most room."""
    num_experts = len(counts)
    mean = math.ceil(sum(counts) / shares)
    cap, tolerated = (mean * round(1000 * factor) // 1000 for factor in (alpha, tolerated))
    plan = np.zeros((num_experts, shares), int)
    for expert, count in enumerate(counts):
        plan[expert, expert * shares // num_experts] = count
    load, lent = plan.sum(0), np.zeros(shares, int)
    if load.max() < tolerated:
        return plan
    for expert in sorted(range(num_experts), key=lambda expert: -counts[expert]):
        home = expert * shares // num_experts
        over = min(max(load[home] - cap, 0), counts[expert])
        if over < min_chunk and over < counts[expert]:
            continue
        while over:
            legal = [
                d
                for d in range(shares)
                if d != home and load[d] < cap and (slots is None or lent[d] < slots)
            ]
            if not legal:
                break
            device = min(legal, key=lambda d: load[d])
            chunk = min(over, max(cap - load[device], min_chunk))
            if over - chunk < min_chunk:
                chunk = over
            plan[expert, device] += chunk
            plan[expert, home] -= chunk
            load[device] += chunk
            load[home] -= chunk
            lent[device] += 1
            over -= chunk
    return plan


def skews(num_experts, number, seed):
    """Counts from all alike to all tokens of one expert; experts without any; sums from none to thousands."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.ones(num_experts), number) ** rng.uniform(0, 6, (number, 1))
    counts = rng.integers(0, 5000, (number, 1)) * shares / shares.sum(1, keepdims=True)
    return np.where(rng.random(counts.shape) < 0.1, 0, counts).astype(np.int32)


def lent_of(plan):
    """How many experts of others each device has."""
    num_experts, shares = plan.shape
    return (
        (plan > 0) & (np.arange(num_experts)[:, None] * shares // num_experts != np.arange(shares))
    ).sum(0)


CASES = {
    "any number": (16, 8, dict(alpha=1.1, min_chunk=1, tolerated=1.0, slots=None)),
    "as published": (32, 8, dict(alpha=1.1, min_chunk=16, tolerated=1.3, slots=None)),
    "chunks": (12, 3, dict(alpha=1.0, min_chunk=40, tolerated=1.0, slots=None)),
    "slots": (24, 4, dict(alpha=1.25, min_chunk=8, tolerated=1.3, slots=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_that_of_a_loop_and_keeps_what_it_says(name):
    num_experts, shares, options = CASES[name]
    every = skews(num_experts, 250, len(name))
    every[0], every[1], every[2] = 0, 7, np.eye(num_experts)[-1] * 4096
    plans = np.asarray(jit(jax.vmap(lambda counts: least_loaded(counts, shares, **options)))(every))
    moved = 0
    for counts, plan in zip(every, plans, strict=True):
        np.testing.assert_array_equal(plan, slow_plan(counts.tolist(), shares, **options))
        np.testing.assert_array_equal(plan.sum(1), counts)
        mean, plain = math.ceil(counts.sum() / shares), counts.reshape(shares, -1).sum(1).max()
        most = plan.sum(0).max()
        cap, tolerated = (
            mean * round(1000 * options[key]) // 1000 for key in ("alpha", "tolerated")
        )
        assert plan.min() >= 0
        if options["slots"] is None:  # all that goes over is less than two chunks, or is tolerated
            assert most <= max(cap + 2 * (options["min_chunk"] - 1), tolerated - 1)
        else:
            assert lent_of(plan).max() <= options["slots"] and most <= max(
                plain, cap + 2 * (options["min_chunk"] - 1)
            )
        lent = (np.arange(num_experts)[:, None] * shares // num_experts != np.arange(shares)) & (
            plan > 0
        )
        assert (plan >= np.minimum(counts, options["min_chunk"])[:, None])[lent].all()
        moved += lent.any()
    assert moved > 100


def test_95_of_100_tokens_on_four_experts_of_one_device():
    """The published case: plain expert parallelism loads that device with 7.65 means; slots for two are enough."""
    rest = np.full(124, 40_000)
    counts = np.concatenate([np.full(4, rest.sum() * 19 // 4), rest])
    plain = counts.reshape(8, 16).sum(1)
    plan = np.asarray(
        jit(functools.partial(least_loaded, shares=8, min_chunk=1024, slots=2))(jnp.asarray(counts))
    )
    assert 7.6 < plain.max() / plain.mean() < 7.7 and plan.sum(0).max() <= 1.11 * plain.mean()
    assert lent_of(plan).max() <= 2


def test_counts_of_hundreds_of_millions_do_not_overflow():
    counts = np.array([2**29, 0, 2**28, 2**28], np.int32)
    plan = jit(lambda counts: least_loaded(counts, 4))(counts)
    assert np.asarray(plan).sum(0).max() <= 1.1 * 2**28 and (plan.sum(1) == counts).all()


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(shares=3), "4 experts do not divide over 3 devices; legal are divisors of 4"),
        (dict(alpha=0.9), "alpha=0.9 must be at least 1"),
        (dict(min_chunk=0), "min_chunk=0 must be at least 1"),
        (dict(tolerated=float("nan")), "tolerated=nan must be a finite number, at least 1"),
        (dict(slots=-1), "slots=-1 must be at least 0"),
    ],
)
def test_mistakes_are_told(wrong, message):
    with pytest.raises(UsageError, match=message):
        least_loaded(jnp.ones(4, jnp.int32), **(dict(shares=2) | wrong))
