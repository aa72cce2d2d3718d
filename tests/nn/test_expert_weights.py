"""Tokens of weight 0 move no loss, load or capacity of experts: only tokens that count matter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from mixtures import CASES, B, D, E, T, normal, params_of
from tolerance import assert_close

from jaxpar.experimental.attention_experts import AttentionExperts
from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn.attention import Attention
from jaxpar.nn.auxiliary import scalars
from jaxpar.nn.experts import route
from jaxpar.nn.experts.dispatch import capacity_rank, within_capacity
from jaxpar.nn.experts.losses import (
    balance_loss,
    bias_loss,
    information_gain,
    load,
    router_z_loss,
)
from jaxpar.nn.experts.sharded import TRANSPORTS, transport_for
from jaxpar.nn.mixer import Context

NEAR = 1e-12  # float64; sums in another order
COUNTED = np.array([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]] * 2, float)
"""Prompts of weight 0, answers, padding behind them, and rows of padding alone."""
IS_PADDING = np.array([[0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 1], [1, 1, 1, 1]] * 2, bool)
TRANSPORT_NAMES = [name for name in TRANSPORTS if name not in ("auto", "ragged")]


def routed(seed=0):
    logits = 2 * normal(B, T, E, seed=seed)
    return logits, route(jnp.asarray(logits), 2)


LOSSES = {
    "load": lambda logits, chosen, w: load(chosen.expert, E, jnp.float64, w),
    "balance": lambda logits, chosen, w: balance_loss(chosen.scores, chosen.expert, w),
    "z": lambda logits, chosen, w: router_z_loss(logits, w),
    "gain": lambda logits, chosen, w: information_gain(chosen.scores, weights=w),
    "bias": lambda logits, chosen, w: jax.grad(bias_loss)(jnp.zeros(E), chosen.expert, w),
}


def gain_of_classes(logits, chosen, w, classes=None):
    if classes is None:
        classes = jnp.arange(logits[..., 0].size) % 3
    return information_gain(chosen.scores, classes.reshape(logits.shape[:-1]), 3, weights=w)


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_that_of_the_tokens_that_count(name, x64):
    logits, chosen = routed()
    some = COUNTED != 0
    want = LOSSES[name](logits[some], jax.tree.map(lambda x: x[some], chosen), None)
    assert_close(LOSSES[name](logits, chosen, COUNTED), want, NEAR)
    plain = LOSSES[name](logits, chosen, None)
    assert np.abs(np.asarray(plain - want)).max() > 1e-5  # the loss of all tokens differs
    assert_close(LOSSES[name](logits, chosen, np.ones((B, T))), plain, NEAR)


@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_of_two_is_a_token_twice_and_signs_do_not_matter(name, x64):
    logits, chosen = routed()
    weights = np.random.default_rng(0).integers(0, 3, (B, T)).astype(float)
    flat = np.repeat(np.arange(B * T), weights.reshape(-1).astype(int))
    twice = jax.tree.map(lambda x: x.reshape(B * T, -1)[flat], chosen)
    want = LOSSES[name](logits.reshape(B * T, E)[flat], twice, None)
    assert_close(LOSSES[name](logits, chosen, weights), want, NEAR)
    signs = np.where(np.arange(T) % 2, 1.0, -1.0)[None]
    assert_close(LOSSES[name](logits, chosen, signs * weights), want, NEAR)


def test_gain_of_classes_is_that_of_the_tokens_that_count(x64):
    logits, chosen = routed()
    some = COUNTED != 0
    few = (jnp.arange(B * T) % 3)[some.reshape(-1)]
    want = gain_of_classes(logits[some], jax.tree.map(lambda x: x[some], chosen), None, few)
    assert_close(gain_of_classes(logits, chosen, COUNTED), want, NEAR)


@pytest.mark.parametrize("name", LOSSES)
def test_without_a_token_that_counts_a_loss_and_its_gradient_are_zero(name, x64):
    nothing = np.zeros((B, T))

    def of(logits):
        return LOSSES[name](logits, route(logits, 2), nothing).sum()

    value, gradient = jit(jax.value_and_grad(of))(jnp.asarray(routed()[0]))
    assert value == 0 and not np.asarray(gradient).any()


def keep_by_loop(expert, rank, most):
    kept = np.zeros(expert.shape, bool)
    for row in range(len(expert)):
        taken = [0] * E
        for turn in range(3):
            for choice in range(expert.shape[2]):
                for token in np.flatnonzero(rank[row] == turn):
                    e = expert[row, token, choice]
                    kept[row, token, choice] = taken[e] < most
                    taken[e] += 1
    return kept


def rank_of(weight, is_prompt):
    if weight:
        return 0
    if is_prompt:
        return 1
    return 2


@pytest.mark.parametrize("most", [1, 2, 3])
def test_slots_go_to_tokens_that_count_then_prompts_then_padding(most):
    rng = np.random.default_rng(most)
    experts = np.arange(E)[None].repeat(16, 0)
    expert = np.stack([rng.permuted(experts, axis=1)[:, :2] for _ in range(8)])
    weights = rng.integers(0, 2, (8, 16)) * np.where(rng.uniform(size=(8, 16)) < 0.5, 1.0, -0.5)
    weights[:, 12:] = 0
    weights[0] = 0
    rank = np.asarray(capacity_rank(jnp.asarray(weights)))
    last = [max(np.flatnonzero(row), default=-1) for row in weights]
    for row in range(8):
        want = [rank_of(w, t < last[row]) for t, w in enumerate(weights[row])]
        np.testing.assert_array_equal(rank[row], want)
    got = within_capacity(jnp.asarray(expert), E, most, jnp.asarray(rank))
    np.testing.assert_array_equal(got, keep_by_loop(expert, rank, most))
    assert not np.array_equal(got, within_capacity(jnp.asarray(expert), E, most))


def outcome(layer, params, x, weights):
    """Returns what counts of a layer's output, its losses and metrics, and all gradients."""
    context = Context(jnp.zeros(x.shape[:2], jnp.int32), weights=jnp.asarray(weights))

    def value(params, x):
        y, *_, aux = layer.apply(params, x, context)
        signs = jnp.cos(jnp.arange(y.size, dtype=x.dtype)).reshape(y.shape)
        counted = jnp.where(IS_PADDING[..., None], 0, y * signs).sum()
        return counted + sum(aux.losses.values()), (counted, scalars(aux))

    return jit(jax.value_and_grad(value, (0, 1), has_aux=True))(params, x)


@pytest.mark.parametrize("name", CASES)
def test_padding_moves_nothing(name, x64):
    layer = CASES[name]
    params = params_of(layer)
    x = normal(B, T, D)
    other = np.where(IS_PADDING[..., None], normal(B, T, D, seed=7), x)
    want, got = (outcome(layer, params, each, COUNTED) for each in (x, other))
    assert_close(got, want, NEAR)
    assert not np.asarray(got[1][1])[IS_PADDING].any()


@pytest.mark.parametrize("name", ["capacity", "sigmoid, all losses, bias"])
@pytest.mark.parametrize("transport", TRANSPORT_NAMES)
def test_padding_moves_nothing_by_any_transport(transport, name, x64):
    layer = dataclasses.replace(CASES[name], transport=transport_for(transport))
    params = params_of(layer)
    x = normal(B, T, D)
    other = np.where(IS_PADDING[..., None], normal(B, T, D, seed=7), x)
    want = outcome(CASES[name], params, x, COUNTED)
    axes = {key: leaf.axes for key, leaf in layer.leaves(D, 1.0, 1.0).items()}
    with use_mesh(make_mesh(MeshSpec(expert=4, data=2))):
        split = shard(other, ("batch", "seq", None))
        got = jax.device_get(outcome(layer, shard(params, axes), split, COUNTED))
    assert_close(got, want, 1e-10)  # as `mixtures.NEAR`: experts' sums are in another order


def test_dropped_choices_are_of_tokens_that_count(x64):
    layer = CASES["capacity for one"]
    _, (_, told) = outcome(layer, params_of(layer), normal(B, T, D), COUNTED)[0]
    expert = route(jnp.asarray(normal(B, T, D) @ params_of(layer)["w_router"]), 2).expert
    kept = keep_by_loop(np.asarray(expert), np.asarray(capacity_rank(jnp.asarray(COUNTED))), 1)
    np.testing.assert_allclose(told["dropped"], 1 - kept[COUNTED != 0].mean(), rtol=1e-12)


def test_experts_of_attention_count_alike(x64):
    layer = AttentionExperts(Attention(2, 1, 4), E, 2, balance_loss=0.3)
    leaves = layer.leaves(D, 1.0, 1.0)
    params = {}
    for n, (name, leaf) in enumerate(leaves.items()):
        params[name] = jnp.asarray(0.5 * normal(*leaf.shape, seed=n))
    x = normal(B, T, D)
    context = Context(jnp.broadcast_to(jnp.arange(T), (B, T)), weights=jnp.asarray(COUNTED))
    chosen = route(jnp.asarray(x @ params["w_heads"]), 2)
    _, _, aux = layer.apply(params, jnp.asarray(x), None, context)
    want = 0.3 * balance_loss(chosen.scores, chosen.expert, COUNTED)
    assert_close(aux.losses["heads_balance_loss"], want, NEAR)
    most = E * load(chosen.expert, E, jnp.float64, COUNTED).max()
    assert_close(aux.metrics["heads_load"].value, most, NEAR)
