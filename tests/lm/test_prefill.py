"""Whole prompts at once: equal to token by token, by training's attention, and in memory that grows with T."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from flat_decoding import lm_generate as generate
from lm_configs import with_fields
from tolerance import EXACT_MATHS, assert_close
from traced import equations

from jaxpar.lm import Sampling, axes
from jaxpar.lm.params import abstract
from jaxpar.lm.sample import Decoder, empty_cache
from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.nn.attention import _splash, kernels
from jaxpar.types import UsageError

T, SLOTS, LENGTHS = 8, 12, np.array([8, 1, 3, 6])
TOKENS = tiny.tokens(batch=4, length=SLOTS)
MODELS = {
    "llama": tiny.LLAMA,
    "gpt2": with_fields(tiny.GPT2, tied=True, dropout=0.3, max_seq_len=SLOTS),
    "para_gru": with_fields(tiny.LLAMA, mixer="para_gru"),
}
LONG = with_fields(tiny.LLAMA, vocab_size=512, num_layers=1, num_heads=8)


def by_tokens(config, params):
    """The last logits and the cache of each row, its tokens fed one at a time."""
    rows = []
    for row, length in enumerate(LENGTHS):
        cache = empty_cache(config, 1, SLOTS)
        for t in range(length):
            logits, cache = tiny.extended(params, TOKENS[row : row + 1, t : t + 1], cache, config)
        rows.append((logits[0, 0], jax.tree.map(lambda x: x[0], cache)))
    return rows


@pytest.mark.parametrize("queries", [3, 256], ids=["in blocks", "at once"])
@pytest.mark.parametrize("name", MODELS)
def test_prompts_equal_one_token_after_the_other(name, queries, monkeypatch):
    monkeypatch.setattr(kernels, "QUERIES", queries)
    config = MODELS[name]
    params = tiny.params_of(config)
    read = jit(Decoder(config).prefill, static_argnums=3)
    logits, cache = read(params, TOKENS[:, :T], LENGTHS, SLOTS)
    assert logits.shape == (4, tiny.VOCAB)
    assert {x.shape[0] for x in jax.tree.leaves(cache)} == {4}
    for row, (want, state) in enumerate(by_tokens(config, params)):
        assert_close(logits[row], want, EXACT_MATHS["float32"])
        got = jax.tree.map(lambda x, row=row: x[row], cache)
        if (
            config.mixer.kind == "attention"
        ):  # what lies beyond the prompt is overwritten before it is seen
            got, state = (
                jax.tree.map(lambda x, n=LENGTHS[row]: x[:, :n] if x.ndim == 3 else x, tree)
                for tree in (got, state)
            )
        assert_close(got, state, EXACT_MATHS["float32"])


def test_a_prompt_longer_than_a_block_goes_on_as_the_whole_model_would():
    config, length, new = dataclasses.replace(LONG, num_layers=2), kernels.QUERIES + 44, 3
    params = tiny.params_of(config)
    prompt = np.random.default_rng(1).integers(0, 512, (2, length))
    sampling = Sampling(new, temperature=0.0)
    tokens, *_ = jit(generate, static_argnums=(3, 4))(
        jax.random.key(0),
        params,
        prompt,
        config,
        sampling,
        prompt_lengths=np.array([length, length - 30]),
    )
    want = np.asarray(tiny.logits(params, tokens, config)).argmax(-1)
    for row, first in enumerate((length, length - 30)):
        np.testing.assert_array_equal(
            tokens[row, first : first + new], want[row, first - 1 : first + new - 1]
        )


@pytest.mark.parametrize(("name", "slots"), [("llama", 12), ("gpt2", 20)])
def test_prompts_that_have_no_room_are_refused(name, slots):
    tokens = np.zeros((1, 13), np.int32)
    with pytest.raises(
        UsageError,
        match="prompts of 13 tokens are over the 12 that the cache and learned positions have",
    ):
        Decoder(MODELS[name]).prefill(tiny.params_of(MODELS[name]), tokens, np.array([13]), slots)


@pytest.mark.parametrize(
    "spec", [MeshSpec(data=2, context=2, tensor=2), MeshSpec(data=2, fsdp=2, tensor=2)]
)
def test_prompts_of_any_length_on_a_mesh(spec, monkeypatch):
    monkeypatch.setattr(kernels, "QUERIES", 3)
    config = with_fields(MODELS["llama"], num_kv_heads=4)
    params = tiny.params_of(config)
    run = jit(Decoder(config).prefill, static_argnums=3)
    want = run(params, TOKENS[:, :7], np.array([7, 1, 3, 6]), SLOTS)
    with use_mesh(make_mesh(spec)):
        got = run(shard(params, axes(config)), TOKENS[:, :7], np.array([7, 1, 3, 6]), SLOTS)
    assert_close(jax.device_get(got), jax.device_get(want), EXACT_MATHS["float32"])


# ---------------------------------------------------------------- memory


def traced(config, length, rows=1, **kinds):
    """The jaxpr of a prefill, and its arguments."""
    args = (
        abstract(config, config.dtype),
        jax.ShapeDtypeStruct((rows, length), np.int32),
        jnp.full((rows,), length),
    )
    return jax.make_jaxpr(lambda *args: Decoder(config).prefill(*args, length + 8))(
        *args
    ).jaxpr, args


def test_nothing_is_as_large_as_scores_of_all_pairs_or_logits_of_all_places():
    length = 4096
    jaxpr, args = traced(LONG, length)
    sizes = [
        var.aval.size
        for eqn in equations(jaxpr)
        for var in eqn.outvars
        if hasattr(var.aval, "size")
    ]
    assert (
        max(sizes) == LONG.attention.num_heads * kernels.QUERIES * length
    )  # the scores of a block
    assert jaxpr.outvars[0].aval.shape == (1, LONG.vocab_size)
    shapes = {
        var.aval.shape
        for eqn in equations(jaxpr)
        for var in eqn.outvars
        if hasattr(var.aval, "shape")
    }
    assert not [shape for shape in shapes if length in shape and LONG.vocab_size in shape]
    program = jit(lambda *args: Decoder(LONG).prefill(*args, length + 8)).lower(*args).compile()
    assert (
        program.memory_analysis().temp_size_in_bytes < LONG.attention.num_heads * length**2 * 4 / 5
    )  # a few blocks


# ---------------------------------------------------------------- kernels

WIDE = with_fields(LONG, head_dim=64, dtype="bfloat16")


@pytest.mark.parametrize("asked", ["auto", "cudnn", "splash"])
def test_a_tpu_reads_prompts_of_any_length_by_splash(asked, monkeypatch):
    monkeypatch.setattr(kernels, "platform", lambda: "tpu")
    jaxpr, _ = traced(with_fields(WIDE, attention=asked), 200)
    calls = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "pallas_call"]
    assert len(calls) == 1 and (8, 256, 64) in {var.aval.shape for var in calls[0].invars}
    assert not [e for e in equations(traced(with_fields(WIDE, attention="xla"), 200)[0])
                if e.primitive.name == "pallas_call"]  # fmt: skip


def test_a_gpu_reads_prompts_by_cudnn(monkeypatch):
    asked = []

    def kernel(q, k, v, **options):
        asked.append((q.shape, options["implementation"], options["is_causal"]))
        return q

    monkeypatch.setattr(kernels, "platform", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", kernel)
    traced(WIDE, 201)
    assert set(asked) == {((1, 201, 8, 64), "cudnn", True)}


def test_splash_fills_up_what_no_query_sees(monkeypatch):
    """The kernel itself, interpreted, at a length that it does not take."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    make = functools.partial(splash.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash, "make_splash_mha", make)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 130, 2, 64)), jnp.float32) for _ in range(3))
    want = kernels.attention(q, k, v, execution=kernels.AttentionExecution(impl="xla"))
    assert_close(_splash.forward(q, k, v), want, 1e-4)
