"""Generation equals asking the whole model for one token after the other."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from flat_decoding import lm_generate as generate
from lm_configs import with_fields
from tolerance import EXACT_MATHS, assert_close

from jaxpar.decode import gumbel
from jaxpar.lm import Sampling, axes
from jaxpar.lm.sample import empty_cache, extend
from jaxpar.mesh import MeshSpec, make_mesh, place_rows, shard, use_mesh
from jaxpar.types import UsageError

VOCAB, PROMPT, NEW = tiny.VOCAB, 5, 7
MODELS = {
    "llama": with_fields(tiny.LLAMA, num_heads=8, num_kv_heads=4),  # for the devices below
    "gpt2": with_fields(tiny.GPT2, tied=True, dropout=0.3, max_seq_len=PROMPT + NEW),
}
each_model = pytest.mark.parametrize("name", MODELS)
sampled = jit(generate, static_argnums=(3, 4), static_argnames="num_samples")


@functools.cache
def params_of(name):
    return tiny.params_of(MODELS[name])


def whole_forward(name, tokens):
    return tiny.logits(params_of(name), tokens, MODELS[name])


def slow_filter(logits, sampling):
    """Temperature, top-k, then top-p, as lists of (symbol, probability) that may be drawn."""
    logits = np.asarray(logits, np.float64) / sampling.temperature
    ranked = sorted(range(len(logits)), key=lambda v: -logits[v])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    weights = {v: np.exp(logits[v] - logits[ranked[0]]) for v in ranked}
    total, kept, mass = sum(weights.values()), [], 0.0
    for v in ranked:
        kept.append(v)
        mass += weights[v] / total
        if mass >= sampling.top_p:
            break
    left = sum(weights[v] for v in kept)
    return {v: weights[v] / left for v in kept}


@jit
def draw(key, seed, place, logits):
    """The documented rule: noise by seed (the row's number), place and sample (0)."""
    return (logits + gumbel(key, seed, place, jnp.int32(0), VOCAB)).argmax()


def slow_generate(key, name, prompt, lengths, sampling):
    """Teacher forcing: every token from a forward pass over all before it, without a cache."""
    total = prompt.shape[1] + sampling.max_new_tokens
    out, ends = np.zeros((len(prompt), total), int), []
    for row, length in enumerate(lengths):
        tokens = list(prompt[row, :length])
        for _ in range(sampling.max_new_tokens):
            padded = jnp.array([tokens + [0] * (total - len(tokens))])
            logits = np.asarray(whole_forward(name, padded)[0, len(tokens) - 1])
            if sampling.temperature == 0:
                tokens.append(int(np.argmax(logits)))
            else:
                allowed = slow_filter(logits, sampling)
                logits = np.where(
                    np.isin(np.arange(VOCAB), list(allowed)), logits / sampling.temperature, -np.inf
                )
                place = jnp.int32(len(tokens))
                tokens.append(int(draw(key, jnp.int32(row), place, np.float32(logits))))
            if tokens[-1] == sampling.stop_token:
                break
        out[row, : len(tokens)] = tokens
        ends.append(len(tokens))
    return out, ends


def prompts(rows=4):
    return np.random.default_rng(3).integers(0, VOCAB, (rows, PROMPT))


@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        ("llama", Sampling(NEW, temperature=0.0)),
        pytest.param("gpt2", Sampling(NEW, temperature=0.0), marks=pytest.mark.slow),
        pytest.param("llama", Sampling(NEW, temperature=0.7), marks=pytest.mark.slow),
        ("gpt2", Sampling(NEW, temperature=0.7)),
        ("llama", Sampling(NEW, temperature=1.5, top_k=3)),
        ("llama", Sampling(NEW, top_p=0.6)),
        ("llama", Sampling(NEW, top_k=6, top_p=0.8)),
    ],
    ids=["greedy-llama", "greedy-gpt2", "sampled-llama", "sampled-gpt2", "top-k", "top-p", "both"],
)
def test_generate_equals_teacher_forcing(name, sampling):
    key, prompt, lengths = jax.random.key(7), prompts(), np.array([PROMPT, 1, 3, 4])
    tokens, ends, *_ = sampled(
        key, params_of(name), prompt, MODELS[name], sampling, prompt_lengths=lengths
    )
    want, want_ends = slow_generate(key, name, prompt, lengths, sampling)
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_array_equal(ends, want_ends)
    assert len(np.unique(want[:, PROMPT:])) > 3, "a model that repeats itself tests nothing"


@each_model
def test_what_lies_beyond_a_prompt_is_ignored(name):
    lengths, sampling = np.array([5, 1, 3, 4]), Sampling(NEW, temperature=0.7)
    beyond = np.arange(PROMPT) >= lengths[:, None]
    one, two = (
        sampled(
            jax.random.key(7), params_of(name), np.where(beyond, filler, prompts()), MODELS[name], sampling,
            prompt_lengths=lengths,
        )
        for filler in (0, VOCAB - 1)
    )  # fmt: skip
    jax.tree.map(np.testing.assert_array_equal, one, two)


@each_model
def test_stop_token_ends_a_row_and_no_other(name):
    key, prompt, lengths = jax.random.key(7), prompts(), np.array([5, 1, 3, 4])
    free, _ = slow_generate(key, name, prompt, lengths, Sampling(NEW))
    stop = int(free[0, PROMPT + 2])  # row 0 draws it at its third step at the latest
    sampling = Sampling(NEW, stop_token=stop)
    tokens, ends, *_ = sampled(
        key, params_of(name), prompt, MODELS[name], sampling, prompt_lengths=lengths
    )
    want, want_ends = slow_generate(key, name, prompt, lengths, sampling)
    np.testing.assert_array_equal(tokens, want)
    np.testing.assert_array_equal(ends, want_ends)
    assert ends[0] <= PROMPT + 3 and max(ends - lengths) > ends[0] - lengths[0], (
        "rows should end at different steps"
    )
    assert (np.asarray(tokens)[np.arange(PROMPT + NEW) >= np.asarray(ends)[:, None]] == 0).all()


def test_a_row_draws_the_same_whatever_the_others_are():
    prompt, args = prompts(), (MODELS["llama"], Sampling(NEW, temperature=0.7))
    key, params = jax.random.key(7), params_of("llama")
    whole, *_ = sampled(key, params, prompt, *args)
    prompt[1:] = 0
    other, *_ = sampled(key, params, prompt, *args, prompt_lengths=np.array([5, 2, 2, 2]))
    np.testing.assert_array_equal(whole[0], other[0])


@each_model
@pytest.mark.parametrize("chunks", [[12], [1] * 12, [4, 1, 1, 6]], ids=str)
def test_cache_equals_the_whole_forward(name, chunks):
    config, params = MODELS[name], params_of(name)
    tokens = np.random.default_rng(4).integers(0, VOCAB, (2, 12))
    cache, parts, start = empty_cache(config, 2, 12), [], 0
    for size in chunks:
        logits, cache = tiny.extended(params, tokens[:, start : start + size], cache, config)
        parts.append(logits)
        start += size
    assert_close(np.concatenate(parts, 1), whole_forward(name, tokens), EXACT_MATHS["float32"])


def test_cache_rows_may_stand_at_different_places():
    """What a row is told to forget is overwritten before it is seen."""
    config, params = MODELS["llama"], params_of("llama")
    tokens = np.random.default_rng(4).integers(0, VOCAB, (2, 12))
    _, cache = tiny.extended(params, tokens[:, :6], empty_cache(config, 2, 12), config)
    rest = np.stack(
        [tokens[0, 6:9], tokens[1, 3:6][::-1]]
    )  # row 1 goes back to place 3 and on with other tokens
    cache = cache.replace(seen=jnp.array([6, 3], jnp.int32))
    logits, _ = tiny.extended(params, rest, cache, config)
    went = np.stack([tokens[0, :9], np.r_[tokens[1, :3], rest[1], 0, 0, 0]])
    want = whole_forward("llama", went)
    assert_close(logits[0], want[0, 6:9], EXACT_MATHS["float32"])
    assert_close(logits[1], want[1, 3:6], EXACT_MATHS["float32"])


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1),
        pytest.param(Sampling(1, top_k=4), marks=pytest.mark.slow),
        Sampling(1, 2.0, 8, 0.8),
    ],
    ids=["all", "top-k", "together"],
)
def test_frequencies_are_the_probabilities(sampling):
    rows = 5000
    prompt = np.broadcast_to(prompts(1), (rows, PROMPT))
    tokens, *_ = sampled(
        jax.random.key(11),
        params_of("llama"),
        prompt,
        MODELS["llama"],
        sampling,
        seeds=np.arange(rows),
    )
    counts = np.bincount(np.asarray(tokens)[:, PROMPT], minlength=VOCAB)
    allowed = slow_filter(whole_forward("llama", prompt[:1])[0, -1], sampling)
    probabilities = np.array([allowed.get(v, 0.0) for v in range(VOCAB)])
    assert (counts[probabilities == 0] == 0).all()
    drawn = probabilities > 0
    deviation = (counts - rows * probabilities)[drawn] / np.sqrt(
        rows * probabilities * (1 - probabilities)
    )[drawn]
    assert np.abs(deviation).max() < 5.5
    square = (
        deviation**2 * (1 - probabilities[drawn])
    ).sum()  # chi-squared with this many degrees of freedom:
    freedom = drawn.sum() - 1
    assert square < freedom + 5 * np.sqrt(2 * freedom) + 10
    assert freedom >= 3


@pytest.mark.parametrize(
    ("sizes", "num_samples"), [((2, 2, 2), 1), ((2, 1, 4), 2)], ids=["weights split", "samples"]
)
def test_sharded_generate_equals_one_device(sizes, num_samples):
    config, params, prompt = MODELS["llama"], params_of("llama"), prompts()
    static, lengths = (
        (config, Sampling(NEW, temperature=1.5, top_k=3)),
        {"prompt_lengths": np.array([5, 1, 3, 4])},
    )
    samples = {"num_samples": num_samples} if num_samples > 1 else {}
    want = sampled(jax.random.key(7), params, prompt, *static, **lengths, **samples)
    with use_mesh(make_mesh(MeshSpec(*sizes), jax.devices())):
        args = (
            jax.random.key(7),
            shard(params, axes(config)),
            place_rows(lambda rows: prompt[rows], len(prompt)),
        )
        program = sampled.lower(*args, *static, **lengths, **samples).compile()
        got = program(*args, **lengths)
    jax.tree.map(np.testing.assert_array_equal, got[:2], want[:2])
    assert_close(got.log_probs, want.log_probs, EXACT_MATHS["float32"])
    if (
        sizes[1] == 1
    ):  # no weight is split; keys and values, new ones and the cache's, have four axes and more
        gathered = re.findall(r"= f32\[([\d,]*)\][^=]* all-gather", program.as_text())
        assert gathered and not [shape for shape in gathered if shape.count(",") > 2], gathered


def test_sharded_cache_equals_one_device_float64(x64):
    config = tiny.exact(MODELS["llama"])
    params = tiny.params_of(config)
    tokens = np.random.default_rng(4).integers(0, VOCAB, (4, 6))

    def run(params, tokens):
        return extend(params, tokens, empty_cache(config, 4, 8), config)

    want = jit(run)(params, tokens)
    with use_mesh(make_mesh(MeshSpec(2, 2, 2), jax.devices())):
        logits, cache = jit(run)(
            shard(params, axes(config)), place_rows(lambda rows: tokens[rows], 4)
        )
        keys = cache.layers[0].keys
        assert keys.sharding.shard_shape(keys.shape) == (1, 2, 8, 4)
    assert_close((logits, cache), want, EXACT_MATHS["float64"])


def test_mistakes_are_told():
    with pytest.raises(
        UsageError, match="5 prompt and 8 new tokens are over the model's 12 positions"
    ):
        generate(jax.random.key(0), params_of("gpt2"), prompts(), MODELS["gpt2"], Sampling(8))
