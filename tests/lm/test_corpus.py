"""Corpora: the split against a plain reading of its rule, the cache, every error."""

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from jaxpar.lm.text import corpus as corpus_module
from jaxpar.lm.text.corpus import DataConfig, open_corpus
from jaxpar.lm.text.tokenizer import Bpe, Bytes, train_bpe
from jaxpar.types import UsageError

WORDS = "alpha beta gamma delta naïve 日本 epsilon zeta".split()


def text_of(seed, words):
    rng = np.random.default_rng(seed)
    return "".join(
        str(rng.choice(WORDS)) + (" " if rng.random() < 0.9 else "\n") for _ in range(words)
    )


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "text"
    for i in range(60):
        path = root / f"d{i % 3}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text_of(i, 20 + 3 * i), encoding="utf-8")
    return root


@pytest.fixture
def ascii_file(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(text_of(0, 30_000).encode("ascii", "replace"))
    return path


def config_of(path, **changes):
    return DataConfig(path=str(path), **{"seq_len": 16, "batch_size": 8, **changes})


def everything(tokens):
    return tokens.read(0, len(tokens))


def slow_folder(root, fraction=0.1):
    """The two byte streams and the lists of documents, by a plain reading of the rule."""
    blobs = [path.read_bytes() for path in root.rglob("*.txt")]
    digests = sorted((hashlib.sha256(blob).digest(), blob) for blob in blobs)
    held = [blob for digest, blob in digests if int(digest[:8].hex(), 16) / 2**64 < fraction]
    return [blob for _, blob in digests if blob not in held], held


# ---------------------------------------------------------------- corpora and their split


def test_folder_equals_a_slow_reading(folder, tmp_path):
    corpus = open_corpus(config_of(folder), tmp_path / "cache")
    train, held = slow_folder(folder)
    assert bytes(everything(corpus.train).astype(np.uint8)) == b"".join(train)
    assert bytes(everything(corpus.validation).astype(np.uint8)) == b"".join(held)
    for tokens, blobs in ((corpus.train, train), (corpus.validation, held)):
        assert tokens.lengths.tolist() == [len(blob) for blob in blobs]
        assert tokens.begins.tolist() == np.cumsum([0, *map(len, blobs)])[:-1].tolist()
    digests = sorted(hashlib.sha256(blob).digest() for blob in train + held)
    assert corpus.hash == hashlib.sha256(b"".join(digests)).hexdigest()
    assert corpus.describe().startswith(
        f"corpus {corpus.hash[:12]}: {len(corpus.train):,} training and "
    )


@pytest.mark.parametrize("split", ["hash:0.2", "tail:0.2"])
@pytest.mark.parametrize(("bos", "eos"), [((0,), (1, 2)), ((0, 3), ()), ((), (1,)), ((), ())])
def test_files_of_a_folder_begin_and_end_as_lines_of_jsonl_do(folder, tmp_path, split, bos, eos):
    library = train_bpe(iter([text_of(0, 500)]), 300)._tokenizer
    tokenizer = Bpe(library, bos, eos)
    older = open_corpus(config_of(folder, split=split), tmp_path / "cache", tokenizer)
    config = config_of(folder, split=split, layout="packed")
    corpus = open_corpus(config, tmp_path / "cache", tokenizer)
    assert older.train.counts is None and older.hash == corpus.hash
    if not bos:
        assert corpus.train.counts is None

    wholes = []
    for tokens, plain in ((corpus.train, older.train), (corpus.validation, older.validation)):
        assert len(tokens.lengths) == len(plain.lengths)
        for before, after in zip(documents(plain), documents(tokens), strict=True):
            begins = after[: len(bos)] == list(bos)
            ends = not eos or after[-1:] == [eos[0]]
            wholes.append((begins, ends))
            inside = after[len(bos) * begins : len(after) - len(eos[:1]) * ends]
            assert inside == before
        counts = tokens.read_counts(0, len(tokens))
        assert (counts == 0).sum() == len(bos) * sum(
            document[: len(bos)] == list(bos) for document in documents(tokens)
        )
    # Of a file that a tail cuts, the first part begins and the second ends.
    cut = [(True, not eos), (not bos, True)] if split.startswith("tail") and (bos or eos) else []
    assert [ends for ends in wholes if ends != (True, True)] == [x for x in cut if not all(x)]


def test_what_older_runs_read_in_blocks_stays(tmp_path, monkeypatch):
    """Blocks of 16 KiB without a layout, and where a cache from before whole texts is there."""
    path = tmp_path / "one.txt"
    path.write_text("alpha\n\n\n  beta " * 6000, encoding="utf-8")
    tokenizer = train_bpe(iter(["alpha\n\n\n  beta " * 9]), 300)
    config = config_of(path, split="tail:0.1")
    packed = dataclasses.replace(config, layout="packed")
    older = everything(open_corpus(config, tmp_path / "cache", tokenizer).train)
    size = int(0.9 * path.stat().st_size)
    blocks = [text for _, text in corpus_module._blocks(str(path), 0, size, 2**14)]
    assert len(blocks) == 5
    apart = np.concatenate([tokenizer.encode(block.decode()) for block in blocks])
    assert older.tolist() == apart.tolist()

    before = everything(open_corpus(packed, tmp_path / "cache", tokenizer).train)
    assert before.tolist() == apart.tolist()  # an older run's cache, of the same key
    now = everything(open_corpus(packed, tmp_path / "other", tokenizer).train)
    assert now.tolist() == tokenizer.encode(path.read_bytes()[:size].decode()).tolist()
    assert len(now) < len(apart)
    for _ in range(2):
        again = open_corpus(config, tmp_path / "other", tokenizer).train
        assert everything(again).tolist() == apart.tolist()


def documents(tokens):
    pairs = zip(tokens.begins, tokens.lengths, strict=True)
    return [tokens.read(begin, size).tolist() for begin, size in pairs]


@pytest.mark.parametrize("split", ["hash:0.2", "tail:0.2"])
def test_names_and_order_of_files_do_not_matter_but_content_does(folder, tmp_path, split):
    before = open_corpus(config_of(folder, split=split), tmp_path / "cache")
    streams = everything(before.train), everything(before.validation)
    for i, path in enumerate(sorted(folder.rglob("*.txt"))):
        path.rename(folder / f"{uuid.UUID(int=i * 7919 % 61)}.other")
    after = open_corpus(config_of(folder, split=split), tmp_path / "cache")
    assert after.hash == before.hash
    assert (everything(after.train) == streams[0]).all() and (
        everything(after.validation) == streams[1]
    ).all()
    victim = next(folder.glob("*.other"))
    victim.write_bytes(victim.read_bytes().replace(b"a", b"o"))
    assert open_corpus(config_of(folder, split=split), tmp_path / "cache").hash != before.hash


def test_walk_skips_hidden_and_empty_files_and_survives_links(folder, tmp_path):
    plain = open_corpus(config_of(folder), tmp_path / "cache").hash
    (folder / ".hidden").write_text("no")
    (folder / ".git").mkdir()
    (folder / ".git" / "x").write_text("no")
    (folder / "empty").write_text("")
    (folder / "d0" / "up").symlink_to(folder)
    (folder / "self").symlink_to(folder / "self")
    (folder / "gone").symlink_to(folder / "nothing")
    os.mkfifo(folder / "pipe")
    assert open_corpus(config_of(folder), tmp_path / "cache").hash == plain
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "more.txt").write_text("more text through a link")
    (folder / "linked").symlink_to(outside)
    assert open_corpus(config_of(folder), tmp_path / "cache").hash != plain


def test_tail_of_one_file_is_nanogpts_split(ascii_file, tmp_path):
    corpus = open_corpus(config_of(ascii_file, split="tail:0.1"), tmp_path / "cache")
    raw = np.frombuffer(ascii_file.read_bytes(), np.uint8)
    cut = int(0.9 * len(raw))
    assert (everything(corpus.train) == raw[:cut]).all() and (
        everything(corpus.validation) == raw[cut:]
    ).all()
    assert len(corpus.train.starts) == len(corpus.validation.starts) == 1


def test_tail_of_a_folder_cuts_the_stream_once(folder, tmp_path):
    corpus = open_corpus(config_of(folder, split="tail:0.3"), tmp_path / "cache")
    raw = b"".join(slow_folder(folder, 0.0)[0])
    train = bytes(everything(corpus.train).astype(np.uint8))
    assert train + bytes(everything(corpus.validation).astype(np.uint8)) == raw
    assert 0 <= int(0.7 * len(raw)) - len(train) <= 4
    train.decode()  # not inside a character


def test_hash_split_of_one_file_is_by_blocks_in_place(ascii_file, tmp_path):
    corpus = open_corpus(config_of(ascii_file), tmp_path / "cache")
    raw, parts = ascii_file.read_bytes(), []
    for tokens, name in ((corpus.train, "train"), (corpus.validation, "validation")):
        text = bytes(everything(tokens).astype(np.uint8))
        spans = list(zip(tokens.starts.tolist(), tokens.lengths.tolist(), strict=True))
        assert text == b"".join(raw[a : a + n] for a, n in spans)
        parts += [(a, n, name) for a, n in spans]
    parts.sort()
    assert parts[0][0] == 0 and parts[-1][0] + parts[-1][1] == len(raw)  # disjoint, and they cover
    for (a, n, name), (b, _, other) in zip(parts, parts[1:], strict=False):
        assert a + n == b and name != other and raw[b - 1 : b] == b"\n"
    assert len(parts) > 4 and not list((tmp_path / "cache").rglob("tokens.bin"))
    assert 0.02 < len(corpus.validation) / len(raw) < 0.3


def test_moving_a_block_keeps_its_split(tmp_path):
    """The split of a block depends on its bytes, not on its position."""
    lines = [f"{i:04d}" + "x" * 4092 + "\n" for i in range(40)]  # one block each
    held = {}
    for name, order in (("a", lines), ("b", lines[::-1])):
        (tmp_path / name).write_text("".join(order))
        corpus = open_corpus(config_of(tmp_path / name, split="hash:0.4"), tmp_path / "cache")
        held[name] = set(
            bytes(everything(corpus.validation).astype(np.uint8)).decode().splitlines()
        )
    assert held["a"] == held["b"] and 5 < len(held["a"]) < 30


def test_default_corpus_is_the_standard_library_without_tests(tmp_path):
    files = [Path(name) for name, *_ in corpus_module.files_at("")]
    library = Path(os.__file__).resolve().parent
    assert library / "os.py" in files and library / "json" / "decoder.py" in files
    assert {path.suffix for path in files} == {".py"}
    parts = {part for path in files for part in path.relative_to(library).parts[:-1]}
    assert not parts & {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
    }
    corpus = open_corpus(DataConfig(), tmp_path)
    assert len(corpus.train) > 10 * len(corpus.validation) / 3 > 10**6


@pytest.mark.parametrize("split", ["hash:0.3", "tail:0.3"])
def test_bpe_corpora_decode_to_the_text(folder, tmp_path, split):
    corpus = open_corpus(config_of(folder, tokenizer="bpe:280", split=split), tmp_path / "cache")
    raw = open_corpus(config_of(folder, split=split), tmp_path / "cache")
    assert corpus.hash == raw.hash and corpus.tokenizer.vocab_size == 280
    assert corpus.train.data.dtype == np.uint16 and raw.train.data.dtype == np.uint8
    for tokens, plain in ((corpus.train, raw.train), (corpus.validation, raw.validation)):
        text = bytes(everything(plain).astype(np.uint8)).decode()
        assert corpus.tokenizer.decode(everything(tokens)) == text
        assert len(tokens.lengths) == len(plain.lengths)
    if split.startswith("hash"):  # only training text may shape the vocabulary
        texts = (blob.decode() for blob in slow_folder(folder, 0.3)[0])
        assert corpus.tokenizer.identity == train_bpe(texts, 280).identity


def test_blocks_never_cut_a_character(tmp_path):
    text = "é日🙂" * 9000  # 81 kB without a newline
    path = tmp_path / "one.txt"
    for pad in range(4):
        path.write_text("x" * pad + text, encoding="utf-8")
        config = config_of(path, tokenizer="bpe:260", split="tail:0.37")
        corpus = open_corpus(config, tmp_path / "cache")
        decode = corpus.tokenizer.decode
        assert (
            decode(everything(corpus.train)) + decode(everything(corpus.validation))
            == "x" * pad + text
        )


def test_a_given_tokenizer_replaces_the_configured_one(folder, tmp_path):
    tokenizer = train_bpe(iter(["other words"]), 260)
    corpus = open_corpus(config_of(folder), tmp_path / "cache", tokenizer)
    assert corpus.tokenizer is tokenizer and corpus.train.data.dtype == np.uint16
    assert corpus.hash == open_corpus(config_of(folder), tmp_path / "cache").hash


def test_documents_without_tokens_are_left_out(folder, tmp_path):
    class Picky:
        vocab_size, identity, decode = 256, "picky", Bytes().decode
        bos_ids = eos_ids = ()

        def encode(self, text):
            return Bytes().encode(text if len(text) % 3 else "")

    corpus = open_corpus(config_of(folder, split="hash:0.3"), tmp_path / "cache", Picky())
    for tokens, blobs in zip(
        (corpus.train, corpus.validation), slow_folder(folder, 0.3), strict=True
    ):
        kept = [blob for blob in blobs if len(blob.decode()) % 3]
        assert len(kept) < len(blobs) and tokens.lengths.tolist() == [len(blob) for blob in kept]
        assert bytes(everything(tokens).astype(np.uint8)) == b"".join(kept)


# ---------------------------------------------------------------- the cache


def snapshot(cache):
    files = [path for path in sorted(cache.rglob("*")) if path.is_file()]
    return {path: path.stat().st_mtime_ns for path in files if path.suffix != ".source"}


def entries(cache):
    """The folders of a cache, without the records of their sources."""
    return [path for path in cache.iterdir() if path.suffix != ".source"]


def test_cache_is_reused_until_the_source_changes(folder, tmp_path, monkeypatch):
    config, cache = config_of(folder, tokenizer="bpe:300"), tmp_path / "cache"
    first = open_corpus(config, cache)
    files = snapshot(cache)
    assert {path.name for path in files} == {"corpus.json", "tokens.bin", "tokenizer.json"}
    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_build", None)  # a second open has no business there
        again = open_corpus(dataclasses.replace(config, seq_len=8, batch_size=2), cache)
    assert snapshot(cache) == files and again.hash == first.hash
    assert again.tokenizer.identity == first.tokenizer.identity
    assert (everything(again.train) == everything(first.train)).all()
    record = json.loads(next(cache.rglob("corpus.json")).read_text())
    assert (
        record["tokens"] == len(first.train) + len(first.validation)
        and record["hash"] == first.hash
    )

    os.utime(next(folder.rglob("*.txt")), ns=(1, 1))
    assert open_corpus(config, cache).hash == first.hash and len(snapshot(cache)) == 6
    (folder / "new.txt").write_text("one more document")
    assert open_corpus(config, cache).hash != first.hash


def test_an_interrupted_build_is_never_taken_for_whole(folder, tmp_path, monkeypatch):
    config, cache = config_of(folder), tmp_path / "cache"
    whole = everything(open_corpus(config, tmp_path / "other").train)

    def crash(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # an exception tidies up
        patch.setattr(os, "fsync", crash)
        with pytest.raises(KeyboardInterrupt):
            open_corpus(config, cache)
    assert not entries(cache)
    with monkeypatch.context() as patch:  # a kill does not
        patch.setattr(os, "fsync", crash)
        patch.setattr(corpus_module.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            open_corpus(config, cache)
    (left,) = entries(cache)
    (left / "tokens.bin").write_bytes(b"half")
    assert (everything(open_corpus(config, cache).train) == whole).all()
    assert (left / "tokens.bin").read_bytes() == b"half"


def test_two_processes_may_build_the_same_cache(folder, tmp_path, monkeypatch):
    config, cache = config_of(folder), tmp_path / "cache"
    read, nested = corpus_module._content_and_pieces, []

    def read_while_another_builds(*args):
        if not nested:
            nested.append(True)
            nested.append(open_corpus(config, cache))
        return read(*args)

    monkeypatch.setattr(corpus_module, "_content_and_pieces", read_while_another_builds)
    mine = open_corpus(config, cache)
    assert (everything(mine.train) == everything(nested[1].train)).all()
    assert len(entries(cache)) == 1


def test_no_file_stays_open(folder, tmp_path):
    here = (
        len(os.listdir("/proc/self/fd"))
        if os.path.isdir("/proc/self/fd")
        else pytest.skip("needs /proc")
    )
    for tokenizer in ("bytes", "bpe:300"):
        open_corpus(config_of(folder, tokenizer=tokenizer), tmp_path / "cache")
    assert len(os.listdir("/proc/self/fd")) == here


@pytest.mark.slow
def test_a_big_file_needs_little_memory(tmp_path):
    with (tmp_path / "big").open("wb") as file:
        file.truncate(3 * 2**30)
    program = f"""
import resource
from jaxpar.lm.text.data import DataConfig, Windows, open_corpus
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
corpus = open_corpus(DataConfig({str(tmp_path / "big")!r}, split="tail:0.1"), {str(tmp_path / "cache")!r})
assert len(corpus.train) == int(0.9 * 3 * 2**30)
assert len(corpus.train) + len(corpus.validation) == 3 * 2**30
print(peak() - before)  # before drawing, which maps shared pages of the file that the kernel may drop
assert not Windows(corpus.train, 1024, 512, 0)(2**40)["tokens"].any()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300 * 1024


# ---------------------------------------------------------------- every error is one sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"tokenizer": "words"},
            "tokenizer must be 'bytes' or 'bpe:N' with N in 257..200000, not 'words'",
        ),
        ({"split": "hash"}, "split must be 'hash:f' or 'tail:f' with 0 < f < 1, not 'hash'"),
        ({"split": "tail:0.0"}, "split must be"),
        ({"split": "tail:1.0"}, "split must be"),
        ({"split": "tail:nan"}, "split must be"),
        ({"split": "random:0.1"}, "split must be"),
        ({"seq_len": 0}, "data.seq_len=0 must be at least 1"),
        ({"batch_size": -1}, "data.batch_size=-1 must be at least 1"),
    ],
)
def test_bad_configurations(changes, sentence):
    with pytest.raises(UsageError) as caught:
        config_of("", **changes)
    assert str(caught.value).startswith(sentence)


def refusal(config, cache):
    with pytest.raises(UsageError) as caught:
        open_corpus(config, cache)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_missing_and_empty_sources(tmp_path):
    cache, empty = tmp_path / "cache", tmp_path / "empty"
    assert refusal(config_of(tmp_path / "no"), cache).endswith("no' is neither a file nor a folder")
    assert (
        refusal(config_of("/dev/null"), cache)
        == "data path '/dev/null' is neither a file nor a folder"
    )
    empty.mkdir()
    (empty / ".hidden").write_text("text")
    (empty / "blank").write_text("")
    for path in (empty, empty / "blank"):
        assert refusal(config_of(path), cache).startswith(f"{path} holds no text")
    assert not cache.exists()


def test_text_that_is_not_utf8(folder, tmp_path):
    bad = folder / "bad.txt"
    bad.write_bytes(b"good\n" * 20_000 + b"\xff\n")  # behind what tells its kind
    for tokenizer in ("bytes", "bpe:300"):
        sentence = refusal(config_of(folder, tokenizer=tokenizer), tmp_path / "cache")
        assert sentence == (
            f"{bad} is not UTF-8 at byte 100000, but perhaps Latin-1; expected UTF-8, "
            f"convert it: iconv -f LATIN1 -t UTF-8 {bad} > utf8.txt."
        )
        assert not entries(tmp_path / "cache")


def test_too_little_text(tmp_path):
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * 100)
    enough = config_of(path, seq_len=9, split="tail:0.1")
    open_corpus(enough, tmp_path / "cache")
    sentence = refusal(dataclasses.replace(enough, seq_len=10), tmp_path / "cache")
    assert sentence == (
        "the corpus has 100 tokens, 10 of them in the validation split, but one window needs 11; "
        "lower seq_len=10, change split='tail:0.1' or add text"
    )
    sentence = refusal(dataclasses.replace(enough, split="hash:0.9999"), tmp_path / "cache")
    assert "100 tokens, 0 of them in the training split" in sentence


def test_cache_that_cannot_be_written(folder, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    cache = tmp_path / "file" / "cache"
    assert (
        refusal(config_of(folder), cache)
        == f"the cache folder {cache} cannot be written: Not a directory"
    )

    def refuse(self, *_, **__):
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    cache = tmp_path / "cache"
    sentence = f"the cache folder {cache} cannot be written: Read-only file system"
    assert refusal(config_of(folder), cache) == sentence


def test_source_that_cannot_be_read(folder, tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", refuse)
    sentence = f"{folder} cannot be opened; change its permissions or data path"
    assert refusal(config_of(folder), tmp_path / "cache") == sentence


def test_source_that_shrinks_meanwhile(folder, tmp_path, monkeypatch):
    files = corpus_module.files_at(str(folder))
    longer = [(name, size + 1, mtime) for name, size, mtime in files]
    monkeypatch.setattr(corpus_module, "files_at", lambda path: longer)
    assert "became shorter while it was read" in refusal(config_of(folder), tmp_path / "cache")
