"""A mixture of experts equals the dense mixture, on any mesh, whatever the choices; drops are those of a loop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from mixtures import (
    CASES,
    NEAR,
    PLAIN,
    B,
    D,
    E,
    F,
    T,
    normal,
    outcome,
    params_of,
    plain,
    sorted_form,
    wanted,
)
from tolerance import assert_close

from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn.attention import Attention
from jaxpar.nn.experts import Experts, Routing
from jaxpar.nn.experts.grouped import grouped_matmul
from jaxpar.nn.experts.layer import dense_mixture
from jaxpar.nn.experts.route import expert_choice, route
from jaxpar.nn.mixer import Context, Rules
from jaxpar.nn.mlp import ACTIVATIONS
from jaxpar.nn.stack import Stack
from jaxpar.nn.weights.narrow import quantise
from jaxpar.types import UsageError


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_dense_mixture(name, x64):
    layer, x = CASES[name], normal(B, T, D)
    want = wanted(name)
    assert_close(outcome(sorted_form, layer, params_of(layer), x), want, NEAR["float64"])
    if name == "capacity":
        assert 0.05 < want[0][1][2]["dropped"] < 0.9


def test_it_is_the_dense_mixture_in_float32():
    x = normal(B, T, D, dtype="float32")
    args = PLAIN, params_of(PLAIN, "float32"), x
    assert_close(outcome(sorted_form, *args), outcome(plain, *args), NEAR["float32"])


def test_experts_that_get_nothing_have_no_gradient(x64):
    layer, params = CASES["one, not normalised"], params_of(PLAIN, skew=1.0)
    x = np.abs(normal(B, T, D))  # so that the skew is positive
    got = outcome(sorted_form, layer, params, x)
    assert_close(got, outcome(plain, layer, params, x), NEAR["float64"])
    assert got[0][1][2]["expert_load"] == E and got[0][1][2]["expert_load_min"] == 0
    grads = got[1][0]
    for name in ("w_up", "w_gate", "w_down"):
        assert not np.any(grads[name][: E - 1]) and np.all(grads[name][E - 1] != 0)


MESHES = {
    "data2.fsdp2.tensor2": MeshSpec(data=2, fsdp=2, tensor=2),
    "data2.expert4": MeshSpec(data=2, expert=4),
    "context2.tensor2.expert2": MeshSpec(context=2, tensor=2, expert=2),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["sigmoid, all losses, bias", "capacity"])
def test_no_mesh_changes_anything(name, mesh, x64):
    layer = CASES[name]
    if name == "capacity" and "context" in mesh:
        pytest.skip("refused, see below")
    axes = {name: leaf.axes for name, leaf in layer.leaves(D, 1.0, 1.0).items()}
    with use_mesh(make_mesh(MESHES[mesh])):
        got = outcome(
            sorted_form,
            layer,
            shard(params_of(layer), axes),
            shard(normal(B, T, D), ("batch", "seq", None)),
        )
        assert_close(jax.device_get(got), wanted(name), NEAR["float64"])


def test_noise_moves_choices_only_with_a_key():
    layer, x = dataclasses.replace(PLAIN, noise=5.0), normal(B, T, D, dtype="float32")
    params = params_of(layer, "float32")
    run = jit(lambda key: layer.apply(params, x, Context(jnp.zeros((B, T), jnp.int32), key=key))[0])
    assert np.array_equal(run(None), run(None)) and not np.array_equal(
        run(None), run(jax.random.key(0))
    )
    assert np.array_equal(run(jax.random.key(0)), run(jax.random.key(0)))
    assert not np.array_equal(run(jax.random.key(1)), run(jax.random.key(0)))


def test_experts_that_fail_are_masked(x64):
    """On a mesh, the dense mixture of those that answer, value and every gradient; without a key all do."""
    layer, key = dataclasses.replace(PLAIN, failures=0.6), jax.random.key(1)
    answers = jax.random.uniform(jax.random.fold_in(key, 1), (B, 1, E)) >= 0.6
    params, x = params_of(PLAIN), normal(B, T, D)

    def run(form, params, x):
        return jit(jax.value_and_grad(lambda p, x: jnp.sin(form(p, x)).sum(), (0, 1)))(params, x)

    def dense(params, x):
        chosen = route(x @ params["w_router"], 2)
        silent = ~jnp.take_along_axis(answers, chosen.expert.reshape(B, 1, -1), -1).reshape(B, T, 2)
        weight = jnp.where(silent, 0, chosen.weight)
        total = weight.sum(-1, keepdims=True)
        return dense_mixture(
            params, x, chosen._replace(weight=weight / jnp.where(total > 0, total, 1))
        )

    def sparse(params, x, key=key):
        return layer.apply(params, x, Context(jnp.zeros((B, T), jnp.int32), key=key))[0]

    axes = {name: leaf.axes for name, leaf in layer.leaves(D, 1.0, 1.0).items()}
    with use_mesh(make_mesh(MeshSpec(data=2, expert=4))):
        got = run(sparse, shard(params, axes), shard(x, ("batch", "seq", None)))
    assert 0.2 < answers.mean() < 0.6 and "random" in str(jax.make_jaxpr(sparse)(params, x))
    assert_close(jax.device_get(got), jax.device_get(run(dense, params, x)), NEAR["float64"])
    assert "random" not in str(jax.make_jaxpr(lambda *args: sparse(*args, key=None))(params, x))


def test_experts_that_choose_are_a_dense_mixture_too(x64):
    """The same rows, products and weighted sums, of as many tokens an expert."""
    params, x, most = params_of(PLAIN), normal(B * T, D), 5

    def by_rows(params, x):
        chosen = expert_choice(x @ params["w_router"], most)
        rows, sizes = x[chosen.token.reshape(-1)], jnp.full(E, most)
        inside = [grouped_matmul(rows, params[name], sizes) for name in ("w_gate", "w_up")]
        out = grouped_matmul(ACTIVATIONS["swiglu"](*inside), params["w_down"], sizes)
        return (
            jnp.zeros_like(x).at[chosen.token.reshape(-1)].add(out * chosen.weight.reshape(-1, 1))
        )

    def dense(params, x):
        chosen = expert_choice(x @ params["w_router"], most)
        weight = jnp.zeros((B * T, E)).at[chosen.token, jnp.arange(E)[:, None]].set(chosen.weight)
        every = jnp.broadcast_to(jnp.arange(E), (B * T, E))
        return dense_mixture(params, x, Routing(every, weight, chosen.scores))

    def run(form):
        return jit(jax.value_and_grad(lambda p, x: jnp.sin(form(p, x)).sum(), (0, 1)))(params, x)

    assert_close(run(by_rows), run(dense), NEAR["float64"])


def test_a_stack_tells_what_its_mixtures_do():
    stack = Stack(
        2,
        D,
        Attention(2, 2, 4),
        Experts(F, E, 2, capacity=0.5, z_loss=0.1),
        dtype="float32",
        init_std=0.5,
    )
    params, x = jit(stack.init)(jax.random.key(0)), normal(2, T, D, dtype="float32")
    _, _, aux = jit(stack.apply)(params, x)
    assert set(aux.losses) == {"balance_loss", "router_z_loss"}
    assert set(aux.metrics) == {"expert_load", "expert_load_min", "dropped"}
    assert (
        aux.losses["balance_loss"] >= 2 * 0.99 * 0.01 * 0.5
        and 0 <= aux.metrics["dropped"].value < 1
    )


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(experts_per_token=5), "experts_per_token=5 is over num_experts=4; legal are 1 to 4"),
        (dict(experts_per_token=0), "experts_per_token=0 must be at least 1"),
        (dict(experts_per_token=1), "experts_per_token=1 with normalise=True makes every weight 1"),
        (dict(capacity=0.0), "capacity=0.0 must be over 0, or None"),
        (dict(capacity=float("nan")), "capacity=nan must be a finite number, over 0, or None"),
        (dict(shared=-1), "shared=-1 must be at least 0"),
        (dict(noise=float("nan")), "noise=nan must be a finite number, at least 0"),
        (dict(balance_loss=-1.0), "balance_loss=-1.0 must be at least 0"),
        (dict(scores="tanh"), "scores='tanh' is unknown; legal are softmax, sigmoid"),
    ],
)
def test_mistakes_are_told(wrong, message):
    with pytest.raises(UsageError, match=message):
        Experts(F, E, **wrong)


def test_what_a_mixture_cannot_do_is_refused():
    x, context = np.ones((2, T, D), np.float32), Context(jnp.zeros((2, T), jnp.int32))
    params = params_of(PLAIN, "float32")
    with pytest.raises(UsageError, match="has no remat=blockwise"):
        PLAIN.apply(params, x, context._replace(rules=Rules(*context.rules[:2], blockwise=True)))
    with pytest.raises(
        UsageError,
        match="capacity_group=3 does not divide rows of 4 tokens; legal are 0 and divisors",
    ):
        dataclasses.replace(PLAIN, capacity=1.0, capacity_group=3).apply(params, x, context)
    with pytest.raises(UsageError, match="weights of experts are arrays"):
        PLAIN.apply(params | {"w_up": quantise(params["w_up"], 2)}, x, context)
    with (
        use_mesh(make_mesh(MeshSpec(context=2, data=4))),
        pytest.raises(UsageError, match="mesh.context splits"),
    ):
        jax.eval_shape(
            lambda x: CASES["capacity"].apply(params, x, context)[0], np.ones((4, T, D), np.float32)
        )
