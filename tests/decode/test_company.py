"""In single precision a row's tokens are its own, but where two tokens' scores are as near as rounding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from flat_decoding import generate

from jaxpar.decode import CopyDraft, Sampling, gumbel
from jaxpar.lm import Decoder

VOCAB, LENGTH, NEW, SAMPLES, ULPS = 32, 6, 40, 2, 8
CONFIG = dataclasses.replace(tiny.LLAMA, vocab_size=VOCAB, num_layers=1)
PROMPT, LENGTHS = (
    np.random.default_rng(5).integers(0, VOCAB, (4, LENGTH)),
    np.array([LENGTH, 1, 3, 4]),
)
SEEDS, KEY = np.array([0, 3, 3, 1]), jax.random.key(3)
drawn = jit(generate, static_argnames=("model", "sampling", "draft", "num_samples", "block"))
noise = jit(gumbel, static_argnums=4)


@functools.cache
def twins():
    """A model that has not learned, whose tokens come in pairs of one logit but for rounding."""
    params, rng = tiny.params_of(CONFIG), np.random.default_rng(1)
    head = np.array(params["head"])
    head[VOCAB // 2 :] = head[: VOCAB // 2] * (
        1 + 1e-6 * rng.standard_normal(head[: VOCAB // 2].shape)
    )
    return params | {"head": jnp.asarray(head)}


def run(temperature, rows):
    """Texts [row, sample, S], and passes."""
    out = drawn(
        KEY, twins(), PROMPT[rows], Decoder(CONFIG), Sampling(NEW, temperature), prompt_lengths=LENGTHS[rows],
        seeds=SEEDS[rows], num_samples=SAMPLES, draft=CopyDraft(3, 2), block=4,
    )  # fmt: skip
    return np.asarray(out.tokens).reshape(len(rows), SAMPLES, -1), np.asarray(out.passes)


@pytest.mark.parametrize(
    "temperature",
    [pytest.param(0.0, id="greedy", marks=pytest.mark.slow), pytest.param(1.0, id="sampled")],
)
def test_tokens_are_those_of_the_slow_oracle_but_for_near_ties(temperature):
    """Each token given the text before it; the oracle has no cache and no batch."""
    texts, passes = run(temperature, range(4))
    near, apart, differences = 0, 0, []
    for row, sample in np.ndindex(texts.shape[:2]):
        text, places = texts[row, sample], np.arange(LENGTHS[row], LENGTHS[row] + NEW)
        scores = np.asarray(tiny.logits(twins(), text[None], CONFIG))[0, places - 1]
        if temperature:
            seed, number = (np.full(NEW, x, np.int32) for x in (SEEDS[row], sample))
            scores = scores + np.asarray(noise(KEY, seed, places.astype(np.int32), number, VOCAB))
        best, second = np.sort(scores, axis=1)[:, :-3:-1].T
        margin = (best - second) / np.spacing(np.abs(best))
        near, apart = near + (margin < ULPS).sum(), apart + (margin >= ULPS).sum()
        lost = (best - scores[np.arange(NEW), text[places]]) / np.spacing(np.abs(best))
        differences += lost[scores.argmax(1) != text[places]].tolist()
    assert np.max(differences, initial=0) < ULPS, differences
    assert len(differences) <= near and apart > 50 and (near > 50 or temperature)
    assert passes.mean() < NEW - 2, "no draft was ever kept"


def test_tokens_depend_on_no_company_and_no_place():
    """Samples and drafts of rows that are re-ordered, one of them there twice."""
    order = [2, 0, 2, 1]
    (texts, _), (moved, _) = run(1.0, range(4)), run(1.0, order)
    np.testing.assert_array_equal(moved, texts[order])
    assert len({tuple(text) for text in texts.reshape(-1, texts.shape[-1])}) == 4 * SAMPLES
