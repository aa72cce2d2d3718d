"""Layers of a mixer alone, x + mixer(norm(x)), against a loop over them; and attention to which places are nothing."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit, noisy_params
from lm_configs import lm_config, with_fields
from tolerance import EXACT_MATHS, assert_close

from experiments import verify
from jaxpar.lm import apply, flops_per_token, num_params
from jaxpar.lm.params import leaves
from jaxpar.nn.mixer import Context

SIZES = dict(
    vocab_size=8, num_layers=2, embed_dim=8, num_heads=2, mlp_dim=0, dtype="float64", init_std=0.3
)
MODELS = {
    "standard": lm_config(**SIZES),
    "ladder": lm_config(**SIZES, residual="ladder", ladder_from=1, scan_layers=False, remat="full"),
}
TOLERANCE = EXACT_MATHS["float64"]
B, T, D = 2, 5, 8


def plain(config, params, x):
    """Every layer in turn; one of a ladder reads the sum without the term before."""
    stack, term = config.stack(), jnp.zeros_like(x)
    context = Context(jnp.broadcast_to(jnp.arange(T), (B, T)))
    for index in range(config.num_layers):
        layer = jax.tree.map(lambda leaf, at=index: leaf[at], params["layers"])
        ahead = config.residual.kind == "ladder" and index >= config.residual.ladder_from
        h = stack.norm.apply(layer["attn_norm"], x if ahead else x + term)
        out, _, _ = stack.mixer.apply(layer, h, None, context)
        x, term = x + term, out
    return stack.norm.apply(params["final_norm"], x + term)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_plain_loop(name, x64):
    config = MODELS[name]
    stack, params = config.stack(), noisy_params(config, np.float64)
    x, mix = np.random.default_rng(0).standard_normal((2, B, T, D))

    def both(run):
        return jit(
            jax.value_and_grad(lambda params, x: (run(params, x) * mix).sum(), argnums=(0, 1))
        )(params, x)

    got, want = (
        both(lambda params, x: stack.apply(params, x)[0]),
        both(functools.partial(plain, config)),
    )
    assert_close(got, want, TOLERANCE)


def test_it_is_streamed(x64):
    config = MODELS["standard"]
    stack, params = config.stack(), noisy_params(config, np.float64)
    x = np.random.default_rng(0).standard_normal((B, T, D))

    @jit
    def in_turn(params):
        first, cache, _ = stack.apply(params, x[:, :3], cache=stack.init_cache(B, T), fresh=True)
        held = stack.for_decoding(params)
        second, cache, _ = stack.apply(held, x[:, 3:4], cache=cache)
        return jnp.concatenate([first, second, stack.apply(held, x[:, 4:], cache=cache)[0]], 1)

    assert_close(in_turn(params), stack.apply(params, x)[0], TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_it_declares_nothing_of_an_mlp(name):
    config, whole = MODELS[name], with_fields(MODELS[name], mlp_dim=4)
    layers = leaves(config)["layers"]
    assert layers.keys() == {"attn_norm", "wq", "wk", "wv", "wo"}
    assert math.isclose(layers["wo"].init, 0.3 / math.sqrt(2)), "one branch a layer is added up"
    assert math.isclose(leaves(whole)["layers"]["w_down"].init, 0.3 / math.sqrt(4))
    assert num_params(whole) - num_params(config) == 2 * (3 * 4 * D + D)
    assert flops_per_token(whole, T) - flops_per_token(config, T) == 6 * 2 * 3 * 4 * D


@pytest.mark.parametrize("remat", ["full", pytest.param("none", marks=pytest.mark.slow)])  # 8 s
def test_on_a_mesh_it_is_what_it_is_on_one_device(remat):
    flags = "model.num_layers=2 model.embed_dim=16 model.attention.num_heads=2 model.mlp.dim=0 model.vocab_size=64"
    data = f"data.seq_len=8 data.batch_size=8 optimizer.name=adamw model.execution.remat={remat}"
    config = verify.compose(*flags.split(), *data.split(), "dtypes=[float64]", "topology=none")
    for row in verify.verify_lm(config, [verify.parse_layout("data2.fsdp2.tensor2")]):
        assert not row.refused and not row.breaches, row


def test_attention_without_positions_sees_a_set(x64):
    line = np.array([[1, 2, 3, 4, 5]])

    def last(positions, line):
        config = lm_config(**SIZES | dict(num_layers=1, mlp_dim=4), positions=positions)
        return apply(noisy_params(config, np.float64), line, config)[0, -1]

    other = line[:, [2, 0, 3, 1, 4]]
    assert_close(last("none", line), last("none", other), TOLERANCE)
    assert np.abs(last("rope", line) - last("rope", other)).max() > 1e-3
