"""A mixture of experts as the dense one says: layers, their weights, and what value and gradients must be."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from fast import jit
from tolerance import assert_close

from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.nn.experts import Experts, route
from jaxpar.nn.experts.layer import dense_mixture
from jaxpar.nn.experts.losses import balance_loss, bias_loss, information_gain, load, router_z_loss
from jaxpar.nn.mixer import Context

B, T, D, F, E = 8, 4, 8, 4, 4
# Sums of a token's experts and of a weight's tokens are taken in another order than in the dense mixture.
NEAR = {"float64": 1e-10, "float32": 1e-5}
PLAIN = Experts(F, E, 2)
CASES = {
    "softmax": PLAIN,
    "sigmoid, all losses, bias": Experts(
        F,
        E,
        2,
        "gelu",
        scores="sigmoid",
        z_loss=0.1,
        information_gain=0.3,
        bias=0.2,
        balance_loss=0.5,
        shared=1,
    ),
    "one, not normalised": Experts(F, E, 1, normalise=False),
    "all": Experts(F, E, E, shared=2),
    "capacity": Experts(F, E, 2, capacity=0.7),
    "capacity in groups": Experts(F, E, 2, capacity=0.7, capacity_group=2),
    "capacity for one": Experts(F, E, 2, capacity=1e-6),
    "capacity for all": Experts(F, E, 2, capacity=float(E)),
}
MESHES = {
    "expert4.data2": MeshSpec(data=2, expert=4),
    "expert2.fsdp2.tensor2": MeshSpec(fsdp=2, tensor=2, expert=2),
    "expert2.context2.tensor2": MeshSpec(context=2, tensor=2, expert=2),
}


def normal(*shape, seed=0, dtype="float64"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def params_of(layer, dtype="float64", skew=0.0):
    """Weights of a layer; with skew, of a router that sends all tokens to the last expert."""
    leaves = layer.leaves(D, 1.0, 1.0)
    params = {
        name: 0.5 * normal(*leaf.shape, seed=n, dtype=dtype)
        for n, (name, leaf) in enumerate(leaves.items())
    }
    if "b_router" in params:  # a large one would choose the same experts for all tokens
        params["b_router"] = 0.1 * params["b_router"]
    params["w_router"] = params["w_router"] + skew * (np.arange(E) == E - 1).astype(dtype)
    return params


def dropped_by_loop(expert, most):
    kept = np.zeros(expert.shape, bool)
    for row in range(len(expert)):
        taken = [0] * E
        for choice in range(expert.shape[2]):
            for token in range(expert.shape[1]):
                e = expert[row, token, choice]
                kept[row, token, choice] = taken[e] < most
                taken[e] += 1
    return kept


def plain(layer, params, x):
    """Outputs, the sum of the losses and what is told, of the dense mixture."""
    logits, k = x @ params["w_router"], layer.experts_per_token
    chosen = route(
        logits, k, scores=layer.scores, normalise=layer.normalise, bias=params.get("b_router")
    )
    loads = E * load(chosen.expert, E)
    told = {"expert_load": loads.max(), "expert_load_min": loads.min()}
    routing = chosen
    if layer.capacity:
        size = layer.capacity_group or T
        most = min(size, int(np.ceil(layer.capacity * size * k / E)))
        shape = jax.ShapeDtypeStruct((B * T // size, size, k), bool)
        groups = chosen.expert.reshape(shape.shape)
        kept = jax.pure_callback(
            lambda expert: dropped_by_loop(np.asarray(expert), most), shape, groups
        )
        kept = kept.reshape(chosen.expert.shape)
        routing = chosen._replace(weight=jnp.where(kept, chosen.weight, 0))
        told["dropped"] = 1 - kept.mean()
    extra = layer.balance_loss * balance_loss(
        chosen.scores, chosen.expert
    ) + layer.z_loss * router_z_loss(logits)
    if layer.information_gain:
        extra -= layer.information_gain * information_gain(
            chosen.scores / chosen.scores.sum(-1, keepdims=True)
        )
    if layer.bias:
        extra += layer.bias * bias_loss(params["b_router"], chosen.expert)
    y = dense_mixture(params, x, routing, layer.activation)
    if layer.shared:
        up = x @ params["w_shared_up"]
        gated = (
            jax.nn.silu(x @ params["w_shared_gate"]) * up
            if layer.activation == "swiglu"
            else jax.nn.gelu(up)
        )
        y += gated @ params["w_shared_down"]
    return y, extra, told


def sorted_form(layer, params, x):
    y, aux = layer.apply(params, x, Context(jnp.zeros(x.shape[:2], jnp.int32)))
    return y, sum(aux.losses.values()), {name: metric.value for name, metric in aux.metrics.items()}


def outcome(form, layer, params, x):
    """Value and gradients of outputs and losses."""

    def weighted(params, x):
        y, extra, told = form(layer, params, x)
        return (y * jnp.cos(jnp.arange(y.size, dtype=x.dtype)).reshape(y.shape)).sum() + extra, (
            y,
            extra,
            told,
        )

    return jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))(params, x)


def tokens(dtype="float64"):
    """Positive ones, so that a skew of the router's weights is one of its logits; the first of each row are ties."""
    x = np.abs(normal(B, T, D, dtype=dtype))
    x[:, 0] = 0
    return x


@functools.cache
def wanted(name, skew=0.0, dtype="float64"):
    layer = CASES[name]
    x = tokens(dtype) if skew else normal(B, T, D, dtype=dtype)
    return outcome(plain, layer, params_of(layer, dtype, skew), x)


def by_expert(outcome):
    """The same, each expert's gradients a leaf of its own: no small error of one hides behind the others' size."""
    value, (params, x) = outcome
    leaves = {
        f"{n}{e}": g[e]
        for n, g in params.items()
        if n[2:] in ("up", "gate", "down")
        for e in range(E)
    }
    return value, ({"router": [g for n, g in params.items() if "router" in n], **leaves}, x)


def axes_of(layer):
    return {name: leaf.axes for name, leaf in layer.leaves(D, 1.0, 1.0).items()}


def outcome_on(spec, transport, name, skew=0.0, dtype="float64", rules=None):
    """Value and gradients of a case, its weights and tokens split over devices."""
    layer = dataclasses.replace(CASES[name], transport=transport)
    x = tokens(dtype) if skew else normal(B, T, D, dtype=dtype)
    with use_mesh(make_mesh(spec), rules_from(rules)):
        params = shard(params_of(layer, dtype, skew), axes_of(layer))
        x = shard(x, ("batch", "seq", None))
        return jax.device_get(outcome(sorted_form, layer, params, x))


def assert_dense(got, name, skew=0.0, dtype="float64"):
    """Asserts that value and gradients equal the dense mixture's."""
    assert_close(by_expert(got), by_expert(jax.device_get(wanted(name, skew, dtype))), NEAR[dtype])
