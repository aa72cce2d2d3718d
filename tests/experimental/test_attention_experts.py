"""A mixture of attention heads is the dense one: every expert's heads of every token, masked; and streamed alike."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

from jaxpar.experimental.attention_experts import AttentionExperts
from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn.attention import Attention
from jaxpar.nn.experts import Experts, route
from jaxpar.nn.experts.losses import balance_loss, load
from jaxpar.nn.mixer import Context
from jaxpar.nn.position import Rope
from jaxpar.nn.stack import Stack
from jaxpar.types import UsageError

B, T, D, E, K, H, G = 4, 4, 8, 4, 6, 4, 2
PLAIN = Attention(H, G, K)
LAYER = AttentionExperts(PLAIN, E, 2, balance_loss=0.3)


def params_of(layer, skew=0.0):
    rng, leaves = np.random.default_rng(0), layer.leaves(D, 1.0, 1.0)
    params = {name: 0.5 * rng.standard_normal(leaf.shape) for name, leaf in leaves.items()}
    params["w_heads"] = params["w_heads"] + skew * (np.arange(E) == 1)
    return params


def dense(layer, params, x):
    """Of each expert the whole attention, with its own queries and results."""
    chosen = route(x @ params["w_heads"], layer.experts_per_token, normalise=layer.normalise)
    weight = jnp.einsum(
        "btk,btke->bte", chosen.weight, jax.nn.one_hot(chosen.expert, E, dtype=x.dtype)
    )
    q = jnp.einsum("btd,edm->btem", x, params["wq"])
    q = q.reshape(*x.shape[:2], E, layer.heads.num_heads, K)
    keys, values = (
        jnp.repeat(
            jnp.einsum("btd,dgk->btgk", x, params[name]),
            layer.heads.num_heads // layer.heads.num_kv_heads,
            2,
        )
        for name in ("wk", "wv")
    )
    scores = jnp.einsum("btehk,bshk->behts", q, keys) / np.sqrt(K)
    seen = jnp.arange(x.shape[1])[:, None] >= jnp.arange(x.shape[1])[None]
    share = jax.nn.softmax(jnp.where(seen[None, None, None], scores, -jnp.inf))
    out = jnp.einsum("behts,bshk->btehk", share, values).reshape(*x.shape[:2], E, -1)
    y = jnp.einsum("bte,btem,emd->btd", weight, out, params["wo"])
    return (
        y,
        layer.balance_loss * balance_loss(chosen.scores, chosen.expert),
        E * load(chosen.expert, E).max(),
    )


def sparse(layer, params, x):
    y, _, aux = layer.apply(
        params, x, None, Context(jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2]))
    )
    return y, sum(aux.losses.values(), 0.0), aux.metrics["heads_load"].value


def outcome(form, layer, params, x):
    def value(params, x):
        y, extra, most = form(layer, params, x)
        return (y * jnp.cos(jnp.arange(y.size, dtype=x.dtype)).reshape(y.shape)).sum() + extra, (
            y,
            extra,
            most,
        )

    return jax.device_get(jit(jax.value_and_grad(value, (0, 1), has_aux=True))(params, x))


def tokens():
    return np.random.default_rng(1).standard_normal((B, T, D))


@pytest.mark.parametrize(
    "layer, mesh, skew",
    [
        (LAYER, MeshSpec(data=2, expert=2, tensor=2), 0.0),
        pytest.param(
            LAYER, MeshSpec(fsdp=2, context=2, tensor=2), 0.0, marks=pytest.mark.slow
        ),  # 5 s each
        pytest.param(
            dataclasses.replace(LAYER, experts_per_token=E), None, 0.0, marks=pytest.mark.slow
        ),
        pytest.param(
            AttentionExperts(PLAIN, E, 1, normalise=False), None, 30.0, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_it_is_the_dense_mixture(layer, mesh, skew, x64):
    """Value and every gradient; of one expert a token and all on one, those of the others are exactly 0."""
    params, x = params_of(layer, skew), np.abs(tokens()) if skew else tokens()
    want = outcome(dense, layer, params, x)
    if mesh is None:
        got = outcome(sparse, layer, params, x)
    else:
        axes = {name: leaf.axes for name, leaf in layer.leaves(D, 1.0, 1.0).items()}
        with use_mesh(make_mesh(mesh)):
            got = outcome(sparse, layer, shard(params, axes), shard(x, ("batch", "seq", None)))
    assert_close(got, want, EXACT_MATHS["float64"])
    if skew:
        assert got[0][1][2] == E
        assert not np.any(np.delete(got[1][0]["wq"], 1, 0)) and not np.any(
            np.delete(got[1][0]["wo"], 1, 0)
        )


def test_it_stands_in_a_stack_and_streams():
    """Rotated, beside experts in the mlp's place: both tell their loads, and tokens one by one are the whole row."""
    mixer = AttentionExperts(Attention(H, G, K, positions=Rope()), E, 2)
    stack = Stack(2, D, mixer, Experts(4, E, 2), dtype="float32", init_std=0.5)
    params, x = jit(stack.init)(jax.random.key(0)), tokens().astype(np.float32)
    whole, _, aux = jit(stack.apply)(params, x)
    assert {"balance_loss", "heads_balance_loss"} == set(aux.losses) and 1 <= aux.metrics[
        "heads_load"
    ].value <= E
    run = jit(lambda x, cache: stack.apply(params, x, cache=cache)[:2])
    cache, parts = stack.init_cache(B, T), []
    for token in range(T):
        y, cache = run(x[:, token : token + 1], cache)
        parts.append(y)
    assert_close(np.concatenate(parts, 1), np.asarray(whole), 5 * EXACT_MATHS["float32"])


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(experts_per_token=5), "experts_per_token=5 is over num_experts=4; legal are 1 to 4"),
        (dict(experts_per_token=1), "experts_per_token=1 with normalise=True makes every weight 1"),
        (dict(heads=Attention(2, 1, 4, bias=True)), "neither bias=True nor a qk_norm"),
    ],
)
def test_mistakes_are_told(wrong, message):
    with pytest.raises(UsageError, match=message):
        AttentionExperts(**(dict(heads=PLAIN, num_experts=E) | wrong))
