"""The whole model: what sees what, and that ways to compute it change nothing but cost."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import LAYOUT, assert_close
from traced import count_products

from jaxpar.lm import apply, loss, model
from jaxpar.lm.sample import empty_cache, extend
from jaxpar.nn import TokenInfo
from jaxpar.nn.auxiliary import NOTHING
from jaxpar.nn.block import ResidualBlock
from jaxpar.types import UsageError

T = 7
MODELS = {"llama": tiny.LLAMA, "gpt2": tiny.GPT2}
each_model = pytest.mark.parametrize("name", MODELS)


# ---------------------------------------------------------------- causality


def influence(forward, params):
    """Returns [T, T]: the size of d logits[t] / d embedded token s, with every place holding a token of its own."""
    tokens = np.arange(T)[None]
    mix = np.random.default_rng(0).standard_normal(tiny.VOCAB).astype(np.float32)

    def mixed(table):
        return forward(params | {"embedding": table}, tokens)[0] @ mix

    return np.linalg.norm(jit(jax.jacrev(mixed))(params["embedding"])[:, :T], axis=-1)


@each_model
def test_no_place_sees_what_comes_later(name):
    params = tiny.params_of(MODELS[name])
    seen = influence(lambda p, tokens: apply(p, tokens, MODELS[name]), params)
    np.testing.assert_array_equal(seen != 0, np.tril(np.ones((T, T), bool)))


@each_model
def test_no_place_sees_what_comes_later_in_the_cache(name):
    def in_chunks(params, tokens):
        cache, out = empty_cache(MODELS[name], 1, T), []
        for first, last in ((0, 3), (3, 4), (4, T)):
            logits, cache = extend(params, tokens[:, first:last], cache, MODELS[name])
            out.append(logits)
        return jnp.concatenate(out, 1)

    seen = influence(in_chunks, tiny.params_of(MODELS[name]))
    np.testing.assert_array_equal(seen != 0, np.tril(np.ones((T, T), bool)))


@each_model
def test_no_document_sees_another(name):
    segments, positions = np.array([[0, 0, 0, 1, 1, 2, 2]]), np.array([[0, 1, 2, 0, 1, 0, 1]])
    params = tiny.params_of(MODELS[name])
    info = TokenInfo(segments=segments, positions=positions)
    packed = functools.partial(apply, config=MODELS[name], info=info)
    seen = influence(packed, params)
    np.testing.assert_array_equal(seen != 0, np.tril(segments[0][:, None] == segments[0][None, :]))
    # And each document gets what it gets alone.
    tokens = np.arange(T)[None]
    ends = ((0, 3), (3, 5), (5, 7))
    alone = [tiny.logits(params, tokens[:, a:b], MODELS[name]) for a, b in ends]
    assert_close(jit(packed)(params, tokens), np.concatenate(alone, 1), 2e-6)


def test_older_arguments_of_apply_are_fields_of_info(x64):
    config = MODELS["llama"]
    params = tiny.params_of(config)
    segments = np.array([[0, 0, 0, 1, 1, 2, 2]])
    positions = np.array([[0, 1, 2, 0, 1, 0, 1]])
    tokens = np.arange(T)[None]
    info = TokenInfo(segments=segments, positions=positions)
    want = jit(lambda params: apply(params, tokens, config, info))(params)

    def older(params):
        return apply(params, tokens, config, segments=segments, positions=positions)

    sentence = r"apply\(segments, positions\) is now \(info.segments, info.positions\);"
    with pytest.warns(FutureWarning, match=sentence) as record:
        got = jit(older)(params)
    assert len(record) == 1 and record[0].filename == __file__
    np.testing.assert_array_equal(got, want)
    with pytest.raises(TypeError, match=r"apply\(\) got an unexpected keyword argument 'starts'"):
        apply(params, tokens, config, starts=positions == 0)


# ---------------------------------------------------------------- ways to compute


FUSION = LAYOUT["float32"]  # the same operations, fused otherwise: only the order of sums differs


@functools.cache
def value_and_gradient(name, remat, scan_layers):
    config = with_fields(MODELS[name], remat=remat, scan_layers=scan_layers, dropout=0.2)
    key = jax.random.key(5)
    run = jit(jax.value_and_grad(lambda p: loss(p, tiny.batch_of(), config, dropout_key=key)))
    return jax.device_get(run(tiny.params_of(config)))


@pytest.mark.parametrize(
    ("remat", "scan_layers"),
    [(remat, True) for remat in ("dots", "names", "full", "offload")]
    + [(remat, False) for remat in ("none", "names")],
)
def test_remat_and_unrolling_change_nothing(remat, scan_layers):
    assert_close(
        value_and_gradient("llama", remat, scan_layers),
        value_and_gradient("llama", "none", True),
        FUSION,
    )


def test_unrolling_changes_nothing_with_biases():
    assert_close(
        value_and_gradient("gpt2", "full", False), value_and_gradient("gpt2", "none", True), FUSION
    )


def test_remat_recomputes_what_it_says():
    """ "full" repeats the layer's products, "names" and "dots" those of attention's scores, "none" none of them."""
    params = tiny.params_of(MODELS["llama"])

    def count(remat):
        config = with_fields(MODELS["llama"], remat=remat)
        gradient = jax.grad(lambda p: loss(p, tiny.batch_of(), config))
        return count_products(jax.make_jaxpr(gradient)(params).jaxpr)

    none, names, full = count("none"), count("names"), count("full")
    assert count("dots") in (none, none + 1, none + 2)
    assert none <= names < full
    assert (
        full - none >= 7
    )  # q, k, v, scores, mixing, gate, up; the last product of each branch is not needed


# ---------------------------------------------------------------- dropout


def test_every_layer_and_the_embedding_have_keys_of_their_own(monkeypatch):
    keys = []

    def spy(block, layer, x, context, cache, **options):
        keys.append(jax.random.key_data(context.key))
        return x, None, NOTHING

    def spy_dropout(x, rate, key):
        keys.append(jax.random.key_data(key))
        return x

    monkeypatch.setattr(ResidualBlock, "apply", spy)
    monkeypatch.setattr(model, "dropout", spy_dropout)
    config = with_fields(MODELS["llama"], dropout=0.5, num_layers=3, scan_layers=False)
    apply(tiny.params_of(config), tiny.tokens(), config, dropout_key=jax.random.key(1))
    assert len(keys) == 4 and len({tuple(np.asarray(key)) for key in keys}) == 4


def test_dropout_is_off_without_key_or_rate():
    off = tiny.GPT2
    on = dataclasses.replace(off, dropout=0.5)
    logits_of = functools.partial(tiny.logits, tiny.params_of(off), tiny.tokens())
    plain = logits_of(off)
    np.testing.assert_array_equal(logits_of(on), plain)
    np.testing.assert_array_equal(logits_of(off, dropout_key=jax.random.key(0)), plain)
    dropped = logits_of(on, dropout_key=jax.random.key(0))
    assert np.abs(dropped - plain).max() > 0.1
    assert (dropped != logits_of(on, dropout_key=jax.random.key(1))).any()


# ---------------------------------------------------------------- dtypes and mistakes


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_features_in_the_models_dtype_logits_in_float32(dtype):
    config = dataclasses.replace(MODELS["llama"], dtype=dtype)
    params = tiny.params_of(MODELS["llama"])
    tokens = tiny.tokens()
    assert model.hidden(params, tokens, config)[0].dtype == dtype
    logits = tiny.logits(params, tokens, config)
    assert logits.dtype == jnp.float32
    # A float32 model differs from it by the rounding of its activations: some 30 roundings in a row here.
    want = tiny.logits(params, tokens, MODELS["llama"])
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 0.0}[dtype]
    assert_close(logits, want, 4 * math.sqrt(30) * unit)


def test_too_long_for_learned_positions():
    with pytest.raises(UsageError, match="sequences of 9 tokens are over model.max_seq_len=8"):
        apply(tiny.params_of(MODELS["gpt2"]), np.zeros((1, 9), int), MODELS["gpt2"])
