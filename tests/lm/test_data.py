"""Batches: the bijection, windows and sweeps against a slow reading of the stream."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.lm.text.data import Tokens, Windows, permuted, sweep
from jaxpar.types import UsageError


def stream(seed=0, size=1000, num_documents=50):
    """Tokens over documents cut at random, and the same thing as one flat array."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, 3 * size, dtype=np.uint8)
    lengths = np.diff(
        np.r_[0, np.sort(rng.choice(np.arange(1, size), num_documents - 1, replace=False)), size]
    )
    gaps = rng.integers(0, size // num_documents, num_documents)
    starts = np.cumsum(lengths + gaps) - lengths
    flat = np.concatenate([data[a : a + n] for a, n in zip(starts, lengths, strict=True)])
    return Tokens(data, starts, lengths), flat


# ---------------------------------------------------------------- the bijection


@settings(max_examples=150, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**50))
def test_permuted_is_a_bijection(size, seed, epoch):
    images = permuted(np.arange(size), size, seed, np.int64(epoch))
    assert images.dtype == np.int64 and (np.sort(images) == np.arange(size)).all()


def test_permuted_depends_on_seed_and_epoch_and_mixes():
    slots = np.arange(5000)
    first = permuted(slots, 5000, 0, np.int64(0))
    for seed, epoch in ((0, 1), (1, 0), (0, 2**40), (2**63, 0)):
        other = permuted(slots, 5000, seed, np.int64(epoch))
        assert (other == first).mean() < 0.01
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.1
    assert abs(np.corrcoef(slots, first)[0, 1]) < 0.1
    assert (np.diff(first) == 1).mean() < 0.01


def test_permuted_puts_each_slot_everywhere_equally_often():
    num_epochs = 20_000
    for size in (3, 5, 12):
        for slot in (0, size - 1):
            images = permuted(np.full(num_epochs, slot), size, 7, np.arange(num_epochs))
            counts = np.bincount(images, minlength=size)
            expected = num_epochs / size
            assert ((counts - expected) ** 2 / expected).sum() < 4 * size + 20


def test_permuted_of_huge_sizes_stays_inside_without_overflow():
    for size in (2**31 + 1, 2**47 - 1):
        slots = np.r_[np.arange(100), size - 1 - np.arange(100)]
        images = permuted(slots, size, 3, np.int64(2**40))
        assert len(set(images.tolist())) == 200 and images.min() >= 0 and images.max() < size


# ---------------------------------------------------------------- streams and windows


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 99),
    num_documents=st.integers(1, 40),
    length=st.integers(0, 200),
    data=st.data(),
)
def test_read_and_document_index_equal_the_flat_stream(seed, num_documents, length, data):
    tokens, flat = stream(seed, num_documents=num_documents)
    offsets = np.array(data.draw(st.lists(st.integers(0, 1000 - length), max_size=5)), np.int64)
    read, index = tokens.read(offsets, length), tokens.document_index(offsets, length)
    owner = np.cumsum(np.isin(np.arange(1000), tokens.begins)) - 1
    assert read.shape == index.shape == (len(offsets), length) and read.dtype == np.int32
    for row, offset in enumerate(offsets):
        assert (read[row] == flat[offset : offset + length]).all()
        assert (index[row] == owner[offset : offset + length]).all()
    assert (tokens.read(3, 100) == flat[3:103]).all() and len(tokens) == 1000


def test_read_refuses_places_outside():
    tokens, _ = stream()
    for offset, length in ((-1, 2), (999, 2), (np.array([0, 1000]), 1)):
        with pytest.raises(IndexError, match="outside a stream of 1000"):
            tokens.read(offset, length)


@pytest.mark.parametrize("size", [17, 32, 33, 34, 48, 49, 50, 64, 65, 1000])
def test_an_epoch_has_every_window_once_and_borders_move(size):
    tokens, _ = stream(size=size, num_documents=3)
    windows = Windows(tokens, 16, 1, seed=5)
    count, shifts = windows.num_windows, set()
    for epoch in range(40):
        starts = np.concatenate([windows.starts(epoch * count + slot) for slot in range(count)])
        shift = starts.min()
        shifts.add(int(shift))
        assert (np.sort(starts) == shift + 16 * np.arange(count)).all()
        assert starts.max() + 17 <= size and 0 <= shift < 16
    assert len(shifts) == 1 if size == 17 else len(shifts) > 1
    assert (count + 2) * 16 >= size - 1  # at most two windows' worth is left out
    if size == 1000:
        assert len(shifts) > 10


def test_batches_are_pure_and_the_same_for_any_hosts():
    tokens, _ = stream()
    windows, again = (
        Windows(tokens, 16, 24, seed=1, pack=True),
        Windows(tokens, 16, 24, seed=1, pack=True),
    )
    batches = {step: windows(step) for step in (5, 0, 2**40, 3)}
    for step, whole in batches.items():
        for num_hosts in (1, 2, 3, 8, 24):
            share = 24 // num_hosts
            parts = [again(step, slice(h * share, (h + 1) * share)) for h in range(num_hosts)]
            for name, value in whole.items():
                assert (np.concatenate([part[name] for part in parts]) == value).all()
        scattered = again(step, np.array([7, 2, 23]))
        assert (scattered["tokens"] == whole["tokens"][[7, 2, 23]]).all()
    assert not (batches[0]["tokens"] == batches[3]["tokens"]).all()
    assert not (Windows(tokens, 16, 24, seed=2)(0)["tokens"] == batches[0]["tokens"]).all()


def test_resuming_and_rebatching_draw_the_same_samples():
    tokens, _ = stream()
    small, large = Windows(tokens, 16, 6, seed=1), Windows(tokens, 16, 12, seed=1)
    assert (np.concatenate([small.starts(8), small.starts(9)]) == large.starts(4)).all()


def test_targets_are_the_tokens_one_later():
    tokens, flat = stream()
    windows = Windows(tokens, 16, 100, seed=1)
    batch = windows(3)
    assert set(batch) == {"tokens", "targets"}
    assert all(value.dtype == np.int32 and value.shape == (100, 16) for value in batch.values())
    for row, start in enumerate(windows.starts(3)):
        assert (batch["tokens"][row] == flat[start : start + 16]).all()
        assert (batch["targets"][row] == flat[start + 1 : start + 17]).all()


def test_packed_batches_equal_a_slow_walk():
    tokens, _ = stream()
    begins = set(np.cumsum([0, *tokens.lengths])[:-1].tolist())
    windows = Windows(tokens, 32, 50, seed=4, pack=True)
    batch = windows(2)
    assert (
        batch["weights"].dtype == np.float32
        and batch["segments"].dtype == batch["positions"].dtype == np.int32
    )
    assert batch["segments"].max() > 2 and batch["weights"].min() == 0
    for row, start in enumerate(windows.starts(2).tolist()):
        segment, position = 1, 0
        for t in range(32):
            if t and start + t in begins:
                segment, position = segment + 1, 0
            assert batch["segments"][row, t] == segment
            assert batch["positions"][row, t] == position
            assert batch["weights"][row, t] == (start + t + 1 not in begins)
            position += 1


@settings(max_examples=40, deadline=None)
@given(size=st.integers(2, 300), seq_len=st.integers(1, 20), batch_size=st.integers(1, 5))
def test_sweep_has_every_target_once_in_order(size, seq_len, batch_size):
    rng = np.random.default_rng(size)
    flat = rng.integers(0, 256, size, dtype=np.uint8)
    tokens = Tokens(flat, np.array([0]), np.array([size]))
    batches = list(sweep(tokens, seq_len, batch_size))
    joined = {
        name: np.concatenate([batch[name].ravel() for batch in batches]) for name in batches[0]
    }
    assert all(
        value.shape == (batch_size, seq_len) for batch in batches for value in batch.values()
    )
    assert batches[0]["weights"].dtype == np.float32 and batches[0]["tokens"].dtype == np.int32
    assert (joined["weights"] == (np.arange(len(joined["weights"])) < size - 1)).all()
    assert (joined["tokens"][: size - 1] == flat[:-1]).all() and (
        joined["targets"][: size - 1] == flat[1:]
    ).all()
    assert not joined["tokens"][size - 1 :].any() and not joined["targets"][size - 1 :].any()
    assert len(batches) == -(-(size - 1) // (seq_len * batch_size))


def test_a_stream_shorter_than_a_window_is_refused():
    with pytest.raises(UsageError, match="the stream has 16 tokens but one window needs 17"):
        Windows(stream(size=16, num_documents=2)[0], 16, 1, 0)
