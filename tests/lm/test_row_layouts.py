"""Layouts against plain loops: every target once an epoch, the same rows on any hosts."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.lm.text import row_layouts
from jaxpar.lm.text.corpus import DataConfig, Tokens
from jaxpar.lm.text.data import Windows
from jaxpar.lm.text.mixture import layouts_of, open_with_layout, training_batches
from jaxpar.lm.text.row_layouts import DocumentRows, Stream, batches_of, first_fit, sweep_batches
from jaxpar.types import UsageError


def documents(lengths, seed=0, counted=0.5):
    """Documents with gaps between them on disk, in which token i of the stream is i."""
    rng = np.random.default_rng(seed)
    lengths = np.array(lengths, np.int64)
    gaps = rng.integers(0, 3, len(lengths))
    starts = np.cumsum(lengths + gaps) - lengths
    data = np.full(int((lengths + gaps).sum()), 10**6)
    counts = np.ones(len(data), np.uint8)
    number = 0
    for start, size in zip(starts, lengths, strict=True):
        data[start : start + size] = np.arange(number, number + size)
        counts[start : start + size] = rng.random(size) < counted
        number += size
    return Tokens(
        data=data, starts=starts, lengths=lengths, counts=None if counted == 1 else counts
    )


def words_of(tokens):
    """Documents as lists of (token, whether it counts)."""
    found = []
    for begin, size in zip(tokens.begins, tokens.lengths, strict=True):
        ids = tokens.read(begin, size).tolist()
        found.append(list(zip(ids, tokens.read_counts(begin, size).tolist(), strict=True)))
    return found


def epoch_of(batches, epoch=0):
    return batches.draw(epoch * batches.num_windows + np.arange(batches.num_windows))


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=40)


# ---------------------------------------------------------------- packed rows


def first_fit_twin(sizes, length):
    bins = []
    found = []
    for size in sizes:
        fits = [number for number, room in enumerate(bins) if room >= size]
        if not fits:
            bins.append(length)
            fits = [len(bins) - 1]
        bins[fits[0]] -= size
        found.append(fits[0])
    return found


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.lists(st.integers(1, 9), min_size=12, max_size=12), min_size=1, max_size=4)
)
def test_first_fit_decreasing_of_many_buffers_is_that_of_each(groups):
    sizes = -np.sort(-np.array(groups), 1)
    found = first_fit(sizes, 9)
    for row, of_row in zip(found.tolist(), sizes.tolist(), strict=True):
        assert row == first_fit_twin(of_row, 9)


def packed_twin(tokens, length):
    """The pieces of an epoch, as tuples of (token, target, weight, position)."""
    pieces = Counter()
    for document in words_of(tokens):
        for start in range(0, len(document) - 1, length):
            inside = document[start : start + length + 1]
            steps = zip(inside[:-1], inside[1:], strict=True)
            piece = tuple((a[0], b[0], b[1], i) for i, (a, b) in enumerate(steps))
            if any(step[2] for step in piece):
                pieces[piece] += 1
    return pieces


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    length=st.integers(1, 12),
    seed=st.integers(0, 9),
    counted=st.sampled_from([0.3, 1]),
    packed=st.booleans(),
)
def test_document_rows_equal_a_plain_loop(lengths, length, seed, counted, packed):
    tokens = documents(lengths, seed, counted)
    if not packed:
        length = max(length, max(lengths) - 1)
    twin = packed_twin(tokens, length)
    if not twin:
        with pytest.raises(UsageError, match="has a target that counts"):
            DocumentRows(tokens, length, 4, seed, packed)
        return
    rows = DocumentRows(tokens, length, 4, seed, packed)
    for epoch in (0, 3):
        batch = epoch_of(rows, epoch)
        found = Counter()
        for row in range(rows.num_windows):
            weights = batch["weights"][row]
            if not packed:
                assert set(batch) == {"tokens", "targets", "weights"}
                size = next(len(p) for p in twin if p[0][0] == batch["tokens"][row, 0])
                positions = np.arange(length)
                segments = np.where(positions < size, 1, 2)
            else:
                positions = batch["positions"][row]
                segments = batch["segments"][row]
            used = 0
            for segment in range(1, segments[-1] + 1):
                inside = segments == segment
                columns = (batch["tokens"][row], batch["targets"][row], weights, positions)
                piece = tuple(zip(*(column[inside].tolist() for column in columns), strict=True))
                if any(step[2] for step in piece):
                    found[piece] += 1
                    used += len(piece)
                else:  # what is empty, at the end alone
                    assert segment == segments[-1] and not batch["tokens"][row][inside].any()
            assert used <= length and (np.diff(segments) >= 0).all()
        assert found == twin
    if not packed:
        assert rows.num_windows == twin.total()


def test_rows_are_packed_by_first_fit_decreasing():
    rows = DocumentRows(documents([7, 3, 4, 6, 2, 5], counted=1), 8, 1, 0, packed=True)
    # Sizes 6 5 4 3 2 1 in rows of 8: 6+2, 5+3, 4+1.
    found = sorted(
        sorted(np.bincount(row[weights > 0]).tolist()[1:], reverse=True)
        for row, weights in zip(*(epoch_of(rows)[x] for x in ("segments", "weights")), strict=True)
    )
    assert found == [[4, 1], [5, 3], [6, 2]]


def test_buffers_are_bounded_and_full(monkeypatch):
    monkeypatch.setattr(row_layouts, "BUFFER", 16)
    monkeypatch.setattr(row_layouts, "_GROUPS", 2)
    monkeypatch.setattr(row_layouts, "_SPAN", 7)
    lengths = np.random.default_rng(0).integers(2, 60, 500)
    tokens = documents(lengths, counted=0.7)
    rows = DocumentRows(tokens, 64, 8, 0, packed=True)
    twin = packed_twin(tokens, 64)
    assert epoch_of(rows)["weights"].sum() == sum(step[2] for piece in twin for step in piece)
    whole = sum(len(piece) for piece in twin)
    assert whole / 64 <= rows.num_windows < whole / 64 / 0.85
    others = [DocumentRows(tokens, 64, 8, seed, packed=True) for seed in (0, 1)]
    same = [np.array_equal(rows(3)["tokens"], other(3)["tokens"]) for other in others]
    assert same == [True, False]


def test_an_epoch_is_in_another_order():
    rows = DocumentRows(documents([5] * 64, counted=1), 8, 8, 0, packed=True)
    first, second = (epoch_of(rows, epoch)["tokens"] for epoch in (0, 1))
    assert not np.array_equal(first, second)
    assert sorted(map(tuple, first)) == sorted(map(tuple, second))


# ---------------------------------------------------------------- streams


def stream_twin(tokens, length, pack, shift):
    """The windows of an epoch as lists of (token, target, weight, segment, position)."""
    flat = [
        (token, counts, number, index)
        for number, document in enumerate(words_of(tokens))
        for index, (token, counts) in enumerate(document)
    ]
    size = len(flat) - 1
    windows = []
    for window in range(-(-size // length)):
        row = []
        segment, position = 1, 0
        for t in range(length):
            place = (window * length + t + shift) % size
            token, target = flat[place], flat[place + 1]
            if t and (place == 0 or token[3] == 0):
                segment, position = segment + 1, 0
            weight = target[1] * (window * length + t < size)
            if pack:
                weight *= target[2] == token[2]
            row.append((token[0], target[0], weight, segment, position))
            position += 1
        windows.append(tuple(row))
    return windows


@settings(max_examples=60, deadline=None)
@given(
    lengths=LENGTHS,
    length=st.integers(1, 25),
    seed=st.integers(0, 9),
    counted=st.sampled_from([0.5, 1]),
    pack=st.booleans(),
)
def test_a_stream_equals_a_plain_loop(lengths, length, seed, counted, pack):
    tokens = documents(lengths if sum(lengths) > 1 else [2], seed, counted)
    stream = Stream(tokens, length, 3, seed, pack)
    size = len(tokens) - 1
    shifts = set()
    for epoch in (0, 1, 5):
        batch = epoch_of(stream, epoch)
        assert ("weights" in batch) == (pack or counted < 1 or size % length > 0)
        names = ["tokens", "targets"]
        if "weights" in batch:
            names.append("weights")
        if pack:
            names += ["segments", "positions"]
        found = sorted(
            tuple(zip(*(batch[name][row].tolist() for name in names), strict=True))
            for row in range(stream.num_windows)
        )
        shift = int(row_layouts.shifts_of(seed, np.array([epoch]), size)[0])
        twin = stream_twin(tokens, length, pack, shift)
        width = 5 if pack else len(names)
        assert found == sorted(tuple(step[:width] for step in row) for row in twin)
        shifts.add(shift)
    assert size < 20 or len(shifts) > 1


@pytest.mark.parametrize("pack", [False, True])
def test_every_token_but_the_first_is_a_target_once_an_epoch(pack):
    """5,000 tokens in rows of 2,048: windows that lie whole in the stream leave 18 % out."""
    tokens = documents([5000], counted=1)
    share = []
    for batches in (Windows(tokens, 2048, 1, 0, pack), Stream(tokens, 2048, 1, 0, pack)):
        for epoch in range(3):
            batch = epoch_of(batches, epoch)
            weights = batch.get("weights", np.ones(batch["targets"].shape))
            targets = batch["targets"][weights > 0]
            assert len(np.unique(targets)) == len(targets) and 0 not in targets
            share.append(len(targets) / 4999)
    assert share == [2048 / 4999] * 3 + [1] * 3


def test_a_stream_of_any_length_has_rows():
    for size in (2, 3, 9, 17, 18):
        stream = Stream(documents([size], counted=1), 8, 2, 0)
        batch = epoch_of(stream, 1)
        weights = batch.get("weights", np.ones(batch["targets"].shape))
        assert sorted(batch["targets"][weights > 0].tolist()) == list(range(1, size))
    with pytest.raises(UsageError, match="the stream has 1 tokens: there is no target"):
        Stream(documents([1], counted=1), 8, 2, 0)


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("layout", ["", "stream", "rows", "packed"])
def test_rows_are_pure_and_the_same_for_any_hosts(layout):
    tokens = documents(np.random.default_rng(1).integers(2, 30, 80))
    config = DataConfig(seq_len=32, batch_size=12, pack=True)
    batches = batches_of(tokens, layout, config, 3)
    again = batches_of(tokens, layout, config, 3)
    for step in (5, 0, 2**40):
        whole = batches(step)
        for num_hosts in (1, 3, 12):
            share = 12 // num_hosts
            parts = [again(step, slice(h * share, (h + 1) * share)) for h in range(num_hosts)]
            for name, value in whole.items():
                assert value.shape == (12, 32)
                assert (np.concatenate([part[name] for part in parts]) == value).all()
    half = batches_of(tokens, layout, DataConfig(seq_len=32, batch_size=6, pack=True), 3)
    joined = np.concatenate([half(8)["tokens"], half(9)["tokens"]])
    assert (joined == batches(4)["tokens"]).all()


@pytest.mark.parametrize("layout", ["stream", "rows", "packed"])
@pytest.mark.parametrize("counted", [0.5, 1])
def test_a_sweep_has_every_target_once(layout, counted):
    tokens = documents(np.random.default_rng(1).integers(2, 30, 80), counted=counted)
    config = DataConfig(seq_len=32, batch_size=12)
    swept = list(sweep_batches(batches_of(tokens, layout, config, 3)))
    assert all(batch["weights"].shape == (12, 32) for batch in swept)
    targets = np.concatenate([batch["targets"][batch["weights"] > 0] for batch in swept])
    counts = tokens.read_counts(0, len(tokens))
    counts[0 if layout == "stream" else tokens.begins] = 0
    assert sorted(targets.tolist()) == np.flatnonzero(counts).tolist()


def test_windows_are_swept_as_before():
    tokens = documents([40, 30], counted=1)
    batches = batches_of(tokens, "", DataConfig(seq_len=32, batch_size=2, pack=True), 0)
    swept = list(sweep_batches(batches))
    assert isinstance(batches, Windows) and set(swept[0]) == {"tokens", "targets", "weights"}
    assert sum(batch["weights"].sum() for batch in swept) == 69


def test_documents_that_do_not_fit():
    tokens = documents([4, 30, 5], counted=1)
    with pytest.raises(
        UsageError, match=r"data.seq_len=8: document 2 of its split has 30 tokens.*at least 29, or"
    ):
        DocumentRows(tokens, 8, 2, 0)
    rows = DocumentRows(tokens, 8, 2, 0, packed=True)
    assert rows.note == "1 of 3 documents are longer than data.seq_len=8 and are split"
    assert DocumentRows(tokens, 29, 2, 0).note == ""


def test_a_prompt_longer_than_the_row_is_named():
    """Its completion is trained, though without the prompt's beginning, and a note says so."""
    counts = np.zeros(34, np.uint8)
    counts[26:30] = 1
    counts[31:] = 1
    tokens = Tokens(np.arange(34), np.array([0, 30]), np.array([30, 4]), counts)
    rows = DocumentRows(tokens, 8, 1, 0, packed=True)
    batch = epoch_of(rows)
    assert sorted(batch["targets"][batch["weights"] > 0].tolist()) == [26, 27, 28, 29, 31, 32, 33]
    assert rows.note == (
        "1 of 2 documents are longer than data.seq_len=8 and are split; of 1 the first 8 tokens do "
        "not count and are left out"
    )


# ---------------------------------------------------------------- what a run takes


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def chats(count, size=60):
    rng = np.random.default_rng(0)
    return [
        {
            "messages": [
                {"role": "user", "content": "q" * int(rng.integers(1, size))},
                {"role": "assistant", "content": "a" * int(rng.integers(1, size))},
            ]
        }
        for _ in range(count)
    ]


def test_the_usual_layout_is_that_of_the_data(tmp_path):
    text = tmp_path / "text"
    text.write_text("word\n" * 4000)
    talk = write(tmp_path / "a.jsonl", chats(200))
    done = write(tmp_path / "b.jsonl", [{"prompt": f"{i}?", "completion": "x"} for i in range(200)])
    plain = write(tmp_path / "c.jsonl", [{"text": f"{i}" * 9} for i in range(200)])
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    pairs = write(tmp_path / "d.jsonl", [pair | {"prompt": f"{i}"} for i in range(50)])
    for path, expected in (
        (text, "stream"),
        (talk, "packed"),
        (done, "packed"),
        (plain, "stream"),
        (f"mix:1*{talk}+2*{done}", "packed"),
        (f"mix:1*{talk}+2*{plain}", "packed+stream"),
    ):
        config = DataConfig(str(path), seq_len=64, batch_size=6, split="tail:0.1")
        assert open_with_layout(config, tmp_path / "cache")[1].layout == expected
    config = DataConfig(str(pairs), seq_len=64, batch_size=6, pairs=True)
    corpora, config = open_with_layout(config, tmp_path / "cache")
    assert config.layout == "rows"
    assert training_batches(corpora, config, 0)(0)["rejected_tokens"].shape == (6, 64)


def test_a_mixture_of_layouts(tmp_path):
    talk = write(tmp_path / "a.jsonl", chats(300))
    text = tmp_path / "b"
    text.write_text("b" * 20_000)
    path = f"mix:1*{talk}+2*{text}"
    config = DataConfig(path, seq_len=64, batch_size=6, split="tail:0.1")
    corpora, config = open_with_layout(config, tmp_path / "cache")
    batches = training_batches(corpora, config, 0)
    for step in range(4):
        batch = batches(step)
        assert set(batch) == {"tokens", "targets", "weights", "segments", "positions"}
        is_text = (batch["tokens"] == ord("b")).all(1)
        assert is_text.sum() == 4
        assert (batch["segments"][is_text] == 1).all()
        assert (batch["positions"][is_text] == np.arange(64)).all()
        assert (batch["segments"][~is_text].max(1) > 1).any()
        for rows in (slice(0, 1), slice(3, 6)):
            part = batches(step, rows)
            assert set(part) == set(batch)
            assert all((part[name] == batch[name][rows]).all() for name in batch)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"layout": "pack"},
            "data.layout='pack': 'pack' is no layout; expected stream, rows, packed",
        ),
        ({"layout": "rows+"}, "'' is no layout"),
        ({"layout": "packed", "pairs": True}, "data.layout=packed: a pair is two rows"),
    ],
)
def test_layouts_that_are_none(changes, sentence):
    with pytest.raises(UsageError, match=sentence):
        DataConfig(**changes)


def test_documents_have_one_layout():
    with pytest.raises(
        UsageError, match=r"data.layout=rows\+packed: .* one layout; expected stream"
    ):
        batches_of(documents([4, 5]), "rows+packed", DataConfig(seq_len=8), 0)


def test_layouts_of_sources():
    assert layouts_of("", 2) == ["", ""] and layouts_of("rows", 2) == ["rows", "rows"]
    assert layouts_of("rows+stream", 2) == ["rows", "stream"]
    with pytest.raises(UsageError, match="there are 2 layouts for 3 sources; expected one"):
        layouts_of("rows+stream", 3)


def cut_shares(batches, owners, begins, counted):
    """Shares of counted targets behind a beginning that was cut off, and without any prompt token.

    Args:
      batches: Rows whose tokens are numbers of the stream.
      owners: Document of each token.
      begins: First token of each document.
      counted: First token of each that counts.
    """
    batch = batches.draw(np.arange(4 * batches.num_windows))
    total = cut = bare = 0
    for tokens, targets, weights in zip(
        batch["tokens"], batch["targets"], batch["weights"], strict=True
    ):
        first = np.full(len(begins), len(owners))
        np.minimum.at(first, owners[tokens], tokens)
        documents = owners[targets[weights > 0]]
        total += len(documents)
        cut += (first[documents] > begins[documents]).sum()
        bare += (first[documents] >= counted[documents]).sum()
    return cut / total, bare / total


BEFORE = [0.34, 0.20]


def test_chats_keep_their_beginnings():
    """Rows of 512 tokens: the figures that docs/lm.md gives."""
    rng = np.random.default_rng(0)
    prompts = rng.integers(20, 120, 400)
    answers = np.minimum(rng.geometric(1 / 130, 400), 380)
    lengths = prompts + answers
    begins = np.cumsum(lengths) - lengths
    owners = np.repeat(np.arange(400), lengths)
    counts = (np.arange(len(owners)) - begins[owners] >= prompts[owners]).astype(np.uint8)
    tokens = Tokens(np.arange(len(owners)), begins, lengths, counts)
    counted = begins + prompts
    before = cut_shares(Windows(tokens, 512, 1, 0), owners, begins, counted)
    after = cut_shares(DocumentRows(tokens, 512, 1, 0, packed=True), owners, begins, counted)
    assert after == (0, 0)
    assert np.round(before, 2).tolist() == BEFORE
