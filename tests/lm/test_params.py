"""The declarations: shapes, axes, initial values and operation counts that follow from them."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from lm_configs import lm_config, with_fields
from traced import inner_jaxprs

from jaxpar.lm import apply, axes, flops_per_token, gpt2, init, llama, num_params
from jaxpar.lm.params import abstract, decay_mask, leaves

SMALL = lm_config(
    vocab_size=64,
    num_layers=3,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=48,
    init_std=0.05,
)
EVERYTHING = with_fields(SMALL, norm="layer", bias=True, positions="learned", max_seq_len=16)


def test_published_sizes():
    assert num_params(gpt2()) == 124_439_808
    assert num_params(llama()) == 1_235_814_400


@pytest.mark.parametrize(
    "config", [SMALL, EVERYTHING, gpt2(), llama()], ids=["small", "everything", "gpt2", "llama"]
)
def test_declaration_is_consistent(config):
    flat = jax.tree.leaves(leaves(config), is_leaf=lambda leaf: hasattr(leaf, "axes"))
    assert all(len(leaf.shape) == len(leaf.axes) for leaf in flat)
    assert [x.shape for x in jax.tree.leaves(abstract(config))] == [leaf.shape for leaf in flat]
    assert sum(math.prod(leaf.shape) for leaf in flat) == num_params(config)
    assert jax.tree.structure(
        axes(config), is_leaf=lambda a: isinstance(a, tuple)
    ) == jax.tree.structure(abstract(config))


def test_initial_values():
    params = jit(init, static_argnums=1)(jax.random.key(0), EVERYTHING)
    std = {"wo": 0.05 / math.sqrt(6), "w_down": 0.05 / math.sqrt(6)}
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = path[-1].key
        assert leaf.dtype == jnp.float32
        if name == "scale":
            assert (leaf == 1).all()
        elif name == "bias" or name.startswith("b"):
            assert (leaf == 0).all()
        else:
            want, spread = std.get(name, 0.05), 5 / math.sqrt(2 * leaf.size)
            assert abs(float(leaf.std()) / want - 1) < spread, name
            assert abs(float(leaf.mean())) < 5 * want / math.sqrt(leaf.size), name


def test_every_matrix_is_drawn_by_a_key_of_its_own():
    params = init(jax.random.key(0), SMALL)
    matrices = [
        x
        for x, weight in zip(*map(jax.tree.leaves, (params, decay_mask(SMALL))), strict=True)
        if weight
    ]
    starts = np.array([np.asarray(x).reshape(-1)[:8] / float(x.std()) for x in matrices])
    assert np.abs(starts[:, None] - starts[None])[np.triu_indices(len(starts), 1)].min(-1).max() > 0
    assert len({round(float(row[0]), 4) for row in starts}) == len(starts)


def test_a_new_parameter_changes_no_other():
    one, more = (
        init(jax.random.key(0), SMALL),
        init(jax.random.key(0), dataclasses.replace(SMALL, bias=True)),
    )
    for name, leaf in one["layers"].items():
        jax.tree.map(np.testing.assert_array_equal, leaf, more["layers"][name])


def test_hold_lowers_the_layers_matrices_only():
    params = EVERYTHING.stack().hold(init(jax.random.key(0), EVERYTHING))
    lowered = {
        path[-1].key
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if x.dtype == jnp.bfloat16
    }
    assert lowered == {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}


# ---------------------------------------------------------------- operations


def dot_operations(jaxpr):
    """Multiplications and additions of every dot product, those of a scan as often as it runs."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            total += (
                2
                * math.prod(eqn.outvars[0].aval.shape)
                * math.prod(eqn.invars[0].aval.shape[i] for i in contracted)
            )
        for inner in inner_jaxprs(eqn):
            total += dot_operations(inner) * eqn.params.get("length", 1)
    return total


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        EVERYTHING,
        with_fields(SMALL, tied=True, activation="gelu", head_dim=6, scan_layers=False),
    ],
    ids=["llama", "everything", "unrolled"],
)
def test_flops_equal_the_dot_products_of_the_program(config):
    """A training step is counted as three forward passes."""
    batch, length = 2, 16
    params, tokens = abstract(config), jax.ShapeDtypeStruct((batch, length), jnp.int32)
    forward = dot_operations(jax.make_jaxpr(lambda p, t: apply(p, t, config))(params, tokens).jaxpr)
    assert 3 * forward == flops_per_token(config, length) * batch * length


@pytest.mark.parametrize("length", [128, 1024])
def test_flops_equal_nanogpts_formula(length):
    """6 N + 12 L H Q T, with N all parameters but the positions."""
    config = gpt2()
    vectors = sum(
        math.prod(x.shape) for x in jax.tree.leaves(abstract(config)) if _is_vector(x, config)
    )
    counted = num_params(config) - config.max_seq_len * config.embed_dim
    scores = 12 * 12 * 12 * 64 * length
    # nanoGPT's N has the norms and biases in it, which multiply no matrix: 0.1 % of N.
    assert flops_per_token(config, length) == 6 * (counted - vectors) + scores
    assert flops_per_token(config, length) == pytest.approx(6 * counted + scores, rel=1e-3)
    assert flops_per_token(config, length, causal=True) == 6 * (counted - vectors) + scores / 2


def _is_vector(x, config):
    stacked = x.shape[0] == config.num_layers
    return len(x.shape) == 1 or (stacked and math.prod(x.shape[1:]) <= config.mlp.dim)
