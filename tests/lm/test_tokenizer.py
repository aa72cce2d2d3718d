import hashlib
import json
import pickle

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jaxpar.lm.text.tokenizer import Bpe, Bytes, load_tokenizer, train_bpe, vocab_size_of
from jaxpar.types import UsageError

TEXTS = [
    "the cat sat on the mat\n" * 20,
    "a naïve façade, 日本語 and 🙂\n" * 5,
    "def f(x):\n    return x + 1\n" * 9,
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(iter(TEXTS), 300)


@given(text=st.text())
def test_bytes_round_trip_and_are_utf8(text):
    text = text.encode("utf-8", "replace").decode()
    ids = Bytes().encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == list(text.encode())
    assert Bytes().decode(ids) == text


def test_bytes_of_a_command_line_survive_and_broken_utf8_is_shown():
    assert Bytes().encode(b"a\xff".decode("utf-8", "surrogateescape")).tolist() == [97, 255]
    assert Bytes().decode([97, 255]) == "a\ufffd"
    with pytest.raises(ValueError):
        Bytes().decode([256])


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bpe_round_trips_any_text(bpe, text):
    ids = bpe.encode(text)
    assert ids.dtype == np.int32 and (ids < bpe.vocab_size).all()
    assert bpe.decode(ids) == text


@settings(max_examples=50)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_of_tokens_are_those_of_the_text(bpe, text):
    for tokenizer in (bpe, Bytes()):
        table = tokenizer.token_bytes()
        assert len(table) == tokenizer.vocab_size
        assert b"".join(table[token] for token in tokenizer.encode(text)) == text.encode()


def test_bytes_of_tokens_of_sentencepiece_and_of_special_ones():
    pieces = {"<0xE6>": 0, "\u2581a": 1, "b": 2, "<unk>": 3}
    made = tokenizers.Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    parts = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    made.decoder = decoders.Sequence(parts)
    made.add_special_tokens(["<s>"])
    made.add_tokens(["END"])
    assert Bpe(made).token_bytes() == [b"\xe6", b" a", b"b", b"<unk>", None, b"END"]
    made.decoder = decoders.WordPiece()
    with pytest.raises(UsageError, match="not known where a tokenizer's decoder is WordPiece"):
        Bpe(made).token_bytes()


def test_bpe_is_deterministic_and_depends_on_its_texts(bpe):
    again, other = train_bpe(iter(TEXTS), 300), train_bpe(iter(TEXTS[:1]), 300)
    assert again.identity == bpe.identity and (again.encode(TEXTS[1]) == bpe.encode(TEXTS[1])).all()
    assert other.identity != bpe.identity
    assert bpe.vocab_size == 300 and len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 3


def test_save_and_load_keep_identity_whatever_the_formatting(bpe, tmp_path):
    bpe.save(tmp_path / "tokenizer.json")
    for place in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(place)
        assert loaded.identity == bpe.identity and loaded.vocab_size == 300
        assert (loaded.encode("the mat") == bpe.encode("the mat")).all()
    compact = json.dumps(json.loads((tmp_path / "tokenizer.json").read_text()))
    (tmp_path / "tokenizer.json").write_text(compact)
    assert load_tokenizer(tmp_path).identity == bpe.identity
    assert bpe.identity.startswith("bpe:") and len(bpe.identity) == 4 + len(
        hashlib.sha256().hexdigest()
    )


def test_special_tokens_are_not_added_and_gaps_in_ids_count():
    library = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 7, "<s>": 9}, unk_token="a"))
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 9)]
    )
    assert library.encode("b").ids == [9, 7]
    assert Bpe(library).encode("b").tolist() == [7] and Bpe(library).vocab_size == 10


def test_load_refuses_what_is_not_a_tokenizer(tmp_path):
    with pytest.raises(
        UsageError, match="there is no tokenizer file .*give a tokenizer.json or a folder"
    ):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="is not a tokenizer of the tokenizers library"):
        load_tokenizer(tmp_path)


def test_specifications():
    assert [vocab_size_of(spec) for spec in ("bytes", "bpe:257", "bpe:200000")] == [
        256,
        257,
        200_000,
    ]
    for spec in (
        "",
        "byte",
        "bpe",
        "bpe:",
        "bpe:256",
        "bpe:200001",
        "bpe:1e3",
        "bpe:-300",
        "bpe:0300",
        "bytes:1",
    ):
        with pytest.raises(UsageError, match="'bytes' or 'bpe:N' with N in 257..200000"):
            vocab_size_of(spec)


def _trimmed():
    """A byte-level tokenizer with trimmed offsets and a special token."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=alphabet, show_progress=False, special_tokens=["<s>"]
    )
    library.train_from_iterator(["the cat the cat"] * 3, trainer)
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    return library


def test_spans_hold_the_characters_of_each_token():
    text = "the cat\u00e9 \U0001f642<s> the\n"
    tokenizer = Bpe(_trimmed())
    ids, starts, stops = tokenizer.encode_spans(text)
    assert (ids == tokenizer.encode(text)).all() and starts.dtype == np.int64
    assert (tokenizer.encode_offsets(text)[1] == starts).all()
    alone = [tokenizer.decode(ids[[i]]) for i in range(len(ids))]
    assert alone[0] == "the" and " the" in alone and "<s>" in alone
    for token, start, stop in zip(alone, starts, stops, strict=True):
        assert "\ufffd" in token or text[start:stop] == token
    assert (starts[1:] >= starts[:-1]).all() and stops[-1] == len(text)


def test_spans_of_bytes():
    text = b"a\xff".decode("utf-8", "surrogateescape") + "\u00e9\u20ac\U0001f642b"
    ids, starts, stops = Bytes().encode_spans(text)
    assert starts.tolist() == [0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5] and (stops == starts + 1).all()
    assert (Bytes().encode_offsets(text)[0] == ids).all() and len(ids) == 12


def test_special_tokens_stay_text_where_they_are_not_asked_for():
    tokenizer = Bpe(_trimmed())
    special = tokenizer.encode("<s>")
    assert len(tokenizer.encode("<s>", special_tokens=False)) == 3  # the copy is there
    for made in (tokenizer, pickle.loads(pickle.dumps(tokenizer))):
        text = made.encode("the<s>", special_tokens=False)
        assert len(special) == 1 and special[0] not in text and made.decode(text) == "the<s>"
        assert (made.encode_offsets("the<s>", special_tokens=False)[0] == text).all()
        assert made.encode("the<s>")[-1] == special[0]  # the copy changed nothing


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_and_padding_of_the_file_are_left_out(side, tmp_path):
    """As transformers saves those of its last call, and ignores both on plain calls."""
    library = _trimmed()
    plain = Bpe(_trimmed())
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", library.token_to_id("<s>"))]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    whole = load_tokenizer(tmp_path)
    library.enable_truncation(4)
    library.enable_padding(direction=side, length=9, pad_id=5, pad_token="%")
    library.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    text = "the cat " * 50
    assert len(loaded.encode(text)) > 50
    assert (loaded.encode(text) == plain.encode(text)).all() and loaded.encode("the").size == 1
    assert (loaded.encode_spans(text)[0] == plain.encode(text)).all()
    assert loaded.bos_ids == (library.token_to_id("<s>"),) and loaded.identity == whole.identity
    assert library.truncation is not None and library.padding is not None


def test_half_of_a_surrogate_pair_is_refused():
    for tokenizer in (Bpe(_trimmed()), Bytes()):
        for encode in (tokenizer.encode, tokenizer.encode_spans):
            with pytest.raises(UsageError, match="'.ud800' at character 1; legal is text"):
                encode("a\ud800")
