import hashlib
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

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
