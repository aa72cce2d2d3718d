"""The same processors of Hugging Face's transformers, where it and torch are installed; by hand in CI's place.

`pip install torch transformers` beside the library, then `python -m pytest
tests/decode/test_process_peer.py`.
"""

import jax
import numpy as np
import pytest

from jaxpar.decode import Sampling, process
from jaxpar.decode.penalties import count_tokens

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers.generation.logits_process")

ROWS, V = 64, 5000
SAMPLINGS = {
    "temperature": Sampling(temperature=0.7),
    "top-k": Sampling(top_k=50),
    "top-p": Sampling(top_p=0.9),
    "top-p of all": Sampling(temperature=3.0, top_p=0.99),
    "min-p": Sampling(min_p=0.05),
    "repetition": Sampling(repetition_penalty=1.3),
    "together": Sampling(
        temperature=0.8, top_k=200, top_p=0.95, min_p=0.02, repetition_penalty=1.2
    ),
}


def peer(logits, tokens, bias, s):
    """In the order of `GenerationMixin._get_logits_processor`, transformers 5.23."""
    chain = [hf.SequenceBiasLogitsProcessor({(v,): float(b) for v, b in enumerate(bias) if b})]
    chain += (
        [hf.RepetitionPenaltyLogitsProcessor(s.repetition_penalty)]
        if s.repetition_penalty != 1
        else []
    )
    chain += [hf.TemperatureLogitsWarper(s.temperature)] if s.temperature != 1 else []
    chain += [hf.TopKLogitsWarper(s.top_k)] if s.top_k else []
    chain += [hf.TopPLogitsWarper(s.top_p)] if s.top_p < 1 else []
    chain += [hf.MinPLogitsWarper(s.min_p)] if s.min_p else []
    scores, rows = torch.tensor(logits), torch.tensor(tokens)
    for step in chain:
        scores = step(rows, scores)
    return scores.numpy()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_processors_equal_those_of_transformers(name):
    sampling, rng = SAMPLINGS[name], np.random.default_rng(0)
    # No two of a row are equal: ties go by token here and by the sort there.
    logits = np.stack([rng.permutation(V) for _ in range(ROWS)]).astype(np.float64)
    logits = (
        np.sqrt(2) * 2.5 * np.asarray(jax.scipy.special.erfinv((logits + 0.5) / V * 2 - 1))
    ).astype(np.float32)
    tokens = rng.integers(0, V, (ROWS, 30))
    bias = np.where(rng.random(V) < 0.01, 1.5, 0).astype(np.float32)
    counts = count_tokens(tokens, np.full(ROWS, 10), np.full(ROWS, 30), V)
    got = np.asarray(process(logits, sampling, counts=counts, bias=bias[None]))
    want = peer(logits, tokens, bias, sampling)
    differing = (np.isneginf(got) != np.isneginf(want)).sum()
    both = np.isfinite(got) & np.isfinite(want)
    error = np.abs(got[both] - want[both]).max()
    print(
        f"{name}: {both.sum() / ROWS:.1f} of {V} kept, {differing} of {ROWS * V} differ, logits to {error:.1e}"
    )
    assert differing == 0
    assert error < 2e-6
    assert 0 < both.sum() < ROWS * V or not (sampling.top_k or sampling.top_p < 1 or sampling.min_p)
