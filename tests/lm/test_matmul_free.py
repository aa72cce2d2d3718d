"""The MatMul-free language model: `model.mixer.kind=hgrn model.weights=ternary`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import lm_config, with_fields
from tolerance import assert_close

from experiments import verify
from jaxpar.lm import Sampling, flops_per_token, generate, num_params, to_hf
from jaxpar.lm.sample import empty_cache
from jaxpar.nn.mixers import Hgrn
from jaxpar.nn.weights.ternary import PackedTernary
from jaxpar.types import UsageError

T = 6
SMALL = with_fields(tiny.exact(tiny.LLAMA), mixer="hgrn", weights="ternary")


def tokens(rows=2):
    return tiny.tokens(batch=rows, length=T)


def test_steps_from_packed_weights_are_the_whole_sequence(x64):
    """Sums of integers in both, so that no rounding falls on another side: 1e-12."""
    params = tiny.params_of(SMALL)
    small = jit(SMALL.stack().for_decoding)(params)
    assert isinstance(small["layers"][0]["mixer"]["wf"], PackedTernary) and isinstance(
        small["layers"][1]["w_down"], PackedTernary
    )
    cache, parts = empty_cache(SMALL, 1, T), []
    for t in range(T):
        logits, cache = tiny.extended(small, tokens(1)[:, t : t + 1], cache, SMALL)
        parts.append(logits)
    assert_close(np.concatenate(parts, 1), tiny.logits(params, tokens(), SMALL)[:1], 1e-12)
    assert sum(leaf.size for leaf in jax.tree.leaves(cache.layers)) == 2 * SMALL.mixer.dim


@pytest.mark.slow  # 5 s
def test_generation_is_what_the_whole_model_says(x64):
    params = tiny.params_of(SMALL)
    draw = jit(generate, static_argnums=(3, 4))
    out, *_ = draw(jax.random.key(0), params, tokens()[:, :3], SMALL, Sampling(3, temperature=0))
    said = tiny.logits(params, out, SMALL)
    np.testing.assert_array_equal(out[:, 3:], np.asarray(said.argmax(-1))[:, 2:5])


def test_it_learns_without_rounding_what_is_trained():
    config = dataclasses.replace(SMALL, dtype="bfloat16")
    params = tiny.params_of(dataclasses.replace(SMALL, dtype="float32"))
    batch = tiny.batch_of(length=T - 1)
    first, grads = tiny.loss_and_gradient(params, batch, config)
    assert all(x.dtype == jnp.float32 and np.abs(x).max() > 0 for x in jax.tree.leaves(grads))
    for _ in range(10):
        _, grads = tiny.loss_and_gradient(params, batch, config)
        params = jax.tree.map(lambda p, g: p - 0.05 * g, params, grads)
    assert tiny.loss_and_gradient(params, batch, config)[0] < first - 0.1


def test_it_is_as_large_as_attention_would_be():
    big = lm_config(embed_dim=256, num_heads=8, num_kv_heads=2, mlp_dim=512)
    ours = with_fields(big, mixer="hgrn", weights="ternary")
    assert abs(num_params(ours) / num_params(big) - 1) < 0.02
    assert ours.stack().mixer == Hgrn(160) and ours.stack().weights == "ternary"
    assert flops_per_token(ours, 4096) == flops_per_token(ours, 16)
    assert with_fields(big, mixer="hgrn", mixer_dim=64).stack().mixer.size == 64


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    ["mixer=hgrn", "mixer=hgrn weights=ternary", "num_kv_heads=2 weights=ternary remat=full"],
)
def test_on_a_mesh_it_is_what_it_is_on_one_device(flags):
    """Loss, gradients and steps in double precision, and no collective that is not declared (15 s each)."""
    small = "num_layers=2 embed_dim=32 mlp_dim=32 vocab_size=64".split()
    config = verify.compose(
        *(f"model.{flag}" for flag in (*small, *flags.split())), "data.seq_len=8", "data.batch_size=8",
        "dtypes=[float64]", "topology=none",
    )  # fmt: skip
    for row in verify.verify_lm(config, [verify.parse_layout("data2.fsdp2.tensor2")]):
        assert not row.refused and not row.breaches, row


def test_what_cannot_be_is_refused(tmp_path):
    full = with_fields(SMALL, mixer="attention", mixer_dim=0)
    with pytest.raises(UsageError, match="no folder can hold a model with weights=ternary"):
        to_hf(None, full, tmp_path / "out")
    with pytest.raises(
        UsageError, match="model.weights='binary' is unknown; legal are full, ternary"
    ):
        dataclasses.replace(SMALL, weights="binary")
    with pytest.raises(UsageError, match="experts have no ternary weights; take weights=full"):
        with_fields(SMALL, num_experts=4)
