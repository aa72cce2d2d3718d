"""Placements are the best of all on small cases, and change no output; transitions are those of a loop."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import assert_close

from jaxpar.nn.attention import Attention
from jaxpar.nn.experts import Experts
from jaxpar.nn.experts.sharded import (
    chosen_experts,
    count_crossings,
    count_transitions,
    place,
    place_experts,
    reorder_experts,
)
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.stack import Stack
from jaxpar.types import UsageError

L, D, E = 3, 8, 4
STACK = Stack(L, D, Attention(1, 1, 4), Experts(4, E, 2, bias=0.1), dtype="float64", init_std=0.5)


def fewest(counts, shares):
    """Of all placements of all layers."""
    first = sorted(range(counts.shape[1]), key=lambda e: e % shares)
    legal = sorted({tuple(e % shares for e in order) for order in itertools.permutations(first)})
    return min(
        count_crossings(counts, np.array(each))
        for each in itertools.product(legal, repeat=len(counts) + 1)
    )


@pytest.mark.parametrize(
    "layers, num_experts, shares", [(3, 4, 2), (2, 6, 2), (2, 4, 4), (4, 4, 2)]
)
def test_it_is_the_best_of_all(layers, num_experts, shares, monkeypatch):
    """Both the chain and the search, which larger cases take."""
    for seed in range(5):
        counts = np.random.default_rng(seed).integers(0, 20, (layers - 1, num_experts, num_experts))
        want = fewest(counts, shares)
        for most in (3000, 0):
            monkeypatch.setattr(place, "MOST_PLACEMENTS", most)
            got = place_experts(counts, shares)
            assert count_crossings(counts, got) == want
            assert all(
                np.bincount(row, minlength=shares).tolist() == [num_experts // shares] * shares
                for row in got
            )


def test_hidden_groups_are_found():
    """Experts of one group follow each other in every layer, under another number in each."""
    rng, size = np.random.default_rng(0), 32
    groups = np.array([rng.permutation(np.repeat(np.arange(4), size // 4)) for _ in range(6)])
    counts = 50 * (groups[:-1, :, None] == groups[1:, None, :]) + rng.integers(
        0, 20, (5, size, size)
    )
    assert count_crossings(counts, place_experts(counts, 4)) <= count_crossings(counts, groups)


def test_transitions_are_those_of_a_loop():
    expert = np.random.default_rng(0).integers(0, 3, (3, 2, 5, 2))
    want = np.zeros((2, 3, 3), int)
    for layer, row, token in np.ndindex(2, 2, 5):
        for e, f in itertools.product(expert[layer, row, token], expert[layer + 1, row, token]):
            want[layer, e, f] += 1
    got = count_transitions(expert, 3)
    np.testing.assert_array_equal(got, want)
    placement = np.array([[0, 0, 1], [0, 1, 1], [1, 0, 0]])
    by_loop = sum(
        int(got[pair, e, f])
        for pair, e, f in np.ndindex(2, 3, 3)
        if placement[pair, e] != placement[pair + 1, f]
    )
    assert count_crossings(got, placement) == by_loop > 0


def test_a_placement_changes_nothing(x64):
    """Outputs, losses, and gradients, which come in the order of the experts; choices are told as they lie."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + 0.1 * rng.standard_normal(x.shape), STACK.init(jax.random.key(0))
    )
    x, mix = rng.standard_normal((2, 5, D)), rng.standard_normal((2, 5, D))
    placement = np.array([[1, 0, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]])

    def value(params, x):
        y, _, aux = STACK.apply(params, x)
        return (y * mix).sum() + sum(aux.losses.values()), y

    run = jit(jax.value_and_grad(value, (0, 1), has_aux=True))
    chosen = jit(lambda params, x: chosen_experts(STACK, params, x))
    (loss, y), (dparams, dx) = run(params, x)
    other = reorder_experts(STACK, params, placement)
    got = run(other, x)
    assert not np.array_equal(other["layers"]["w_up"], params["layers"]["w_up"])
    assert_close(got, ((loss, y), (reorder_experts(STACK, dparams, placement), dx)), 1e-12)
    order = np.argsort(placement, axis=1, kind="stable")
    before, after = np.asarray(chosen(params, x)), np.asarray(chosen(other, x))
    assert before.shape == (L, 2, 5, 2) and len(set(before.reshape(-1).tolist())) == E
    np.testing.assert_array_equal(order[np.arange(L)[:, None, None, None], after], before)


def test_mistakes_are_told():
    with pytest.raises(
        UsageError, match="4 experts do not divide over 3 devices; legal are divisors of 4"
    ):
        place_experts(np.zeros((1, 4, 4), int), 3)
    with pytest.raises(UsageError, match=r"a placement \(2, 4\) is not of 3 layers of 4 experts"):
        reorder_experts(STACK, {"layers": {}}, np.zeros((2, 4), int))
    with pytest.raises(UsageError, match="the stack has Mlp where Experts would be"):
        chosen_experts(Stack(1, D, Attention(1, 1, 4), Mlp(4)), {}, jnp.ones((1, 1, D)))
