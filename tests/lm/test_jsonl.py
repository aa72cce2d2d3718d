"""JSONL to arrays: masks by hand, parts against one reading, kills, resident bytes, every refusal."""

import hashlib
import itertools
import json
import os
import signal
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from jaxpar.lm.text import corpus as corpus_module
from jaxpar.lm.text import shards
from jaxpar.lm.text.chat import open_template
from jaxpar.lm.text.corpus import DataConfig, open_corpus
from jaxpar.lm.text.data import Windows, sweep
from jaxpar.lm.text.examples import chat_ml, documents_of, encode_pieces
from jaxpar.lm.text.shards import tokenise
from jaxpar.lm.text.tokenizer import Bpe, Bytes, train_bpe
from jaxpar.types import UsageError

CHAT = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "yo"},
    {"role": "user", "content": "?"},
]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def lines(count, size=20):
    rng = np.random.default_rng(0)
    return [
        {"prompt": f"{i}?" * int(rng.integers(1, size)), "completion": f"ä{i}"}
        for i in range(count)
    ]


def config_of(path, **changes):
    return DataConfig(path=str(path), **{"seq_len": 16, "batch_size": 8, **changes})


def flags(line, template=chat_ml):
    """The text of a line, and the part of it that counts."""
    ((pieces, ends),) = documents_of(json.dumps(line).encode(), "x", template)
    ids, counts = encode_pieces(pieces, ends, Bytes())
    return bytes(ids.tolist()).decode(), bytes(ids[counts == 1].tolist()).decode()


def test_what_counts():
    assert flags({"text": "abc", "id": 3}) == ("abc", "abc")
    assert flags({"prompt": "ab", "completion": "c"}) == ("abc", "c")
    text, counted = flags({"messages": CHAT})
    assert text == chat_ml(CHAT, False) and counted == "yo<|im_end|>\n"


def test_beginnings_do_not_count_and_ends_do():
    class Ended(Bytes):
        bos_ids, eos_ids = (1,), (2, 3)

    ids, counts = encode_pieces([("a", False), ("b", True)], True, Ended())
    assert ids.tolist() == [1, 97, 98, 2] and counts.tolist() == [0, 0, 1, 1]


def test_a_folders_template(tmp_path):
    text = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    text += "{% if add_generation_prompt %}[assistant]{% endif %}"
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "chat_template": text})
    )
    assert flags({"messages": CHAT}, open_template(tmp_path)) == (
        "<s>[user]hi[assistant]yo[user]?",
        "yo",
    )
    bad = tmp_path / "bad.jinja"
    bad.write_text("{{ messages | length }}")
    with pytest.raises(UsageError, match="line 4: message 2 cannot be trained, as the chat"):
        documents_of(json.dumps({"messages": CHAT}).encode(), "line 4", open_template(bad))
    bad.write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(
        UsageError, match="line 5: the chat template cannot take these messages: .*unsafe"
    ):
        documents_of(json.dumps({"messages": CHAT}).encode(), "line 5", open_template(bad))
    bad.write_text("{% if %}")
    with pytest.raises(UsageError, match="line 6: the chat template is no Jinja"):
        documents_of(json.dumps({"messages": CHAT}).encode(), "line 6", open_template(bad))
    with pytest.raises(
        UsageError, match="has no chat template; legal are a file of Jinja text and a folder"
    ):
        open_template(tmp_path / "none")


def test_special_tokens_of_a_template_are_part_of_what_is_kept(tmp_path):
    """Two folders of one template and other tokens: the second run must not find the first's tokens."""
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT}] * 40)
    read = []
    for token in ("<s>", "<begin>"):
        folder = tmp_path / token
        folder.mkdir()
        text = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        settings = {"bos_token": token, "chat_template": text}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        corpus = open_corpus(
            config_of(path, template=str(folder), split="tail:0.5"), tmp_path / "cache"
        )
        read.append(bytes(corpus.train.read(0, len(token)).astype(np.uint8)).decode())
    assert read == ["<s>", "<begin>"]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a JSON object"),
        ('{"prompt": "a"}', "has the keys prompt; legal are"),
        ('{"text": "a", "messages": []}', "has the keys text, messages"),
        ('{"text": 3}', "has text=3; legal is a string"),
        ('{"messages": []}', "legal is a list of at least one"),
        ('{"messages": [{"role": "user"}]}', "legal are role and content"),
        (
            '{"messages": [{"role": "Assistant", "content": "a"}]}',
            "has the role 'Assistant'; legal are system, dev",
        ),
    ],
)
def test_a_broken_line_is_named_by_file_and_number(tmp_path, monkeypatch, line, says):
    monkeypatch.setattr(shards, "PART", 64)
    path = write(tmp_path / "a.jsonl", lines(9))
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(UsageError, match=r"a\.jsonl, line 11 ") as raised:
        open_corpus(config_of(path), tmp_path / "cache")
    assert says in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_of_which_nothing_counts_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "PART", 300)
    path = write(tmp_path / "a.jsonl", [{"messages": CHAT[:1]}] * 40)
    with pytest.raises(
        UsageError, match=r"nothing in .*a\.jsonl counts in the loss; legal are texts, completions"
    ):
        open_corpus(config_of(path), tmp_path / "cache")
    write(path, [{"messages": CHAT[:1]}] * 39 + [{"messages": CHAT}])
    assert open_corpus(
        config_of(path, split="tail:0.5"), tmp_path / "cache"
    ).validation.counts.any()


def plain(path, fraction=0.1):
    """The two streams by a plain reading of the rule: ids and counts."""
    out = ([], [], [], [])
    for line in path.read_text().splitlines():
        held = int(hashlib.sha256(line.encode()).hexdigest()[:16], 16) < fraction * 2**64
        value = json.loads(line)
        prompt, completion = value["prompt"].encode(), value["completion"].encode()
        out[2 * held].extend(prompt + completion)
        out[2 * held + 1].extend([0] * len(prompt) + [1] * len(completion))
    return [np.array(part) for part in out]


def test_each_line_is_in_one_part(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"ab\n\n  \nc\n" + b"defgh" * 4 + b"\n\ni")
    size = path.stat().st_size
    for part in range(1, size + 1):
        found = [
            line
            for start in range(0, size, part)
            for line in shards.lines_of(path, start, start + part)
        ]
        assert found == [(0, b"ab\n"), (7, b"c\n"), (9, b"defgh" * 4 + b"\n"), (31, b"i")]


@pytest.mark.parametrize("part", [500, 2**20])
def test_parts_join_to_one_reading(tmp_path, monkeypatch, part):
    monkeypatch.setattr(shards, "PART", part)
    path = write(tmp_path / "a.jsonl", lines(100))
    corpus = open_corpus(config_of(path), tmp_path / "cache")
    ids, counts, held_ids, held_counts = plain(path)
    for stream, want, weights in (
        (corpus.train, ids, counts),
        (corpus.validation, held_ids, held_counts),
    ):
        assert (stream.read(0, len(stream)) == want).all() and (
            stream.read_counts(0, len(stream)) == weights
        ).all()
    (batch,) = list(sweep(corpus.validation, len(held_ids), 1))
    assert batch["weights"].sum() == held_counts[1:].sum()


def test_windows_weigh_targets(tmp_path):
    corpus = open_corpus(config_of(write(tmp_path / "a.jsonl", lines(100))), tmp_path / "cache")
    flat, counts = (
        corpus.train.read(0, len(corpus.train)),
        corpus.train.read_counts(0, len(corpus.train)),
    )
    for pack in (False, True):
        windows = Windows(corpus.train, 16, 8, 0, pack)
        batch, starts = windows(3), windows.starts(3)
        for row, start in enumerate(starts):
            want = counts[start + 1 : start + 17].copy()
            assert (batch["targets"][row] == flat[start + 1 : start + 17]).all()
            if pack:
                want[np.isin(np.arange(start + 1, start + 17), corpus.train.begins)] = 0
            assert (batch["weights"][row] == want).all()


def killed_at_the_fourth_part(path, out):
    """Runs in a child: tokenises, and is killed while the fourth part is being written."""
    done = []

    def lines_of(*part):
        for number, line in enumerate(shards_lines(*part)):
            if len(done) == 3 and number:
                os.kill(os.getpid(), signal.SIGKILL)
            yield line
        done.append(part)

    shards_lines, shards.lines_of = shards.lines_of, lines_of
    tokenise(str(path), out, Bytes(), chat_ml, ("hash", 0.1))


def test_a_kill_keeps_the_parts_and_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "PART", 300)
    path = write(tmp_path / "a.jsonl", lines(60))
    (tmp_path / "cut").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # JAX warns of forks; the child does not use it, and a new process takes 6 s
        child = os.fork()
    if not child:
        try:
            killed_at_the_fourth_part(path, tmp_path / "cut" / "x")
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    said = []
    tokenise(str(path), tmp_path / "cut" / "x", Bytes(), chat_ml, ("hash", 0.1), say=said.append)
    assert said[0].startswith("3 of ") and len(said) == int(said[0].split()[2]) - 3 + 1
    tokenise(str(path), tmp_path / "whole", Bytes(), chat_ml, ("hash", 0.1))
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "cut" / "x" / file.name).read_bytes()
    assert sorted(each.name for each in (tmp_path / "cut").iterdir()) == ["x"]


@pytest.mark.slow  # two processes import jax: 10 s
def test_processes_make_the_same_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "PART", 300)
    path = write(tmp_path / "a.jsonl", lines(60))
    for workers in (1, 2):
        tokenise(str(path), tmp_path / str(workers), Bytes(), chat_ml, ("tail", 0.1), workers)
    for file in (tmp_path / "1").iterdir():
        assert file.read_bytes() == (tmp_path / "2" / file.name).read_bytes()


def resident(folder):
    """Bytes of the folder's arrays that lie in this process's memory."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            inside = str(folder) in line
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_drawing_batches_does_not_read_the_whole(tmp_path):
    size = 256 * 2**20  # sparse: holes of zeros, so that no disk is written
    for name in ("tokens", "counts"):
        with (tmp_path / f"{name}.npy").open("wb") as file:
            header = {"descr": "|u1", "fortran_order": False, "shape": (size,)}
            np.lib.format.write_array_header_1_0(file, header)
            file.truncate(file.tell() + size)
    np.save(tmp_path / "lengths.npy", np.full(1024, size // 1024))
    begin = time.process_time()
    corpus = open_corpus(config_of(tmp_path, split="tail:0.1", pack=True), tmp_path / "cache")
    windows = Windows(corpus.train, 16, 8, 0, True)
    assert windows(0)["weights"].sum() == 0  # the counts are holes too
    assert 0 < resident(tmp_path) < size // 16 and time.process_time() - begin < 5


def test_arrays_of_others(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    corpus = open_corpus(config_of(path, split="tail:0.2"), tmp_path / "cache")
    assert corpus.train.read(0, 80).tolist() == list(range(80)) and len(corpus.validation) == 20
    for bad, says in (
        (np.arange(100) + 200, "has the token 299 at position 99; legal are 0 to 255"),
        (np.zeros(100), r"is float64 \[100\]"),
        (np.array([{}] * 9), "is not an array of NumPy's"),
    ):
        np.save(path, bad)
        with pytest.raises(UsageError, match=says):
            open_corpus(config_of(path, split="tail:0.2"), tmp_path / "cache")
    folder = tmp_path / "f"
    folder.mkdir()
    np.save(folder / "tokens.npy", np.arange(100, dtype=np.uint8))
    with pytest.raises(UsageError, match="lacks tokens.npy or lengths.npy"):
        open_corpus(config_of(folder), tmp_path / "cache")
    np.save(folder / "lengths.npy", np.full(9, 11))
    with pytest.raises(UsageError, match="sum to 99; legal is 100, its tokens"):
        open_corpus(config_of(folder), tmp_path / "cache")
    np.save(folder / "lengths.npy", np.full(10, 10))
    corpus = open_corpus(config_of(folder, split="tail:0.2"), tmp_path / "cache")
    assert len(corpus.train) == 80 and corpus.train.counts is None


@pytest.mark.parametrize("token", [-1, 70_000, 65_536])
def test_a_token_outside_is_found_anywhere_and_read_once(tmp_path, monkeypatch, token):
    """65,536 is the first symbol out of range, at an index behind the first 2^21."""
    monkeypatch.setattr(shards, "_COPY", 1000)
    symbols = train_bpe(iter(["a b c"]), 260)
    symbols.vocab_size = 65_536
    path = tmp_path / "a.npy"
    tokens = np.full(100_000, 65_535, np.int32)
    config = config_of(path, split="tail:0.2")
    np.save(path, tokens)
    assert len(open_corpus(config, tmp_path / "cache", symbols).train) == 80_000
    tokens[98_765] = token
    np.save(path, tokens)
    says = rf"a.npy has the token {token} at position 98765; legal are 0 to 65535"
    for _ in range(2):
        with pytest.raises(UsageError, match=says):
            open_corpus(config, tmp_path / "cache", symbols)
        monkeypatch.setattr(shards, "_read_extremes", None)  # the second time it is known


def test_pairs_of_the_same_tokens_are_named(tmp_path):
    class Lower(Bytes):
        def encode(self, text):
            return super().encode(text.lower())

    pair = {"prompt": "a", "chosen": "Yes", "rejected": "No"}
    path = write(tmp_path / "a.jsonl", [pair, pair, pair | {"rejected": "yes"}])
    config = config_of(path, pairs=True, split="tail:0.5")
    with pytest.raises(UsageError, match=r"a.jsonl, line 3: .* are the same tokens; expected"):
        open_corpus(config, tmp_path / "cache", Lower())
    write(path, [pair, pair | {"rejected": "yesno"}])
    assert open_corpus(config, tmp_path / "cache", Lower()).train.lengths.tolist() == [4, 3]


def test_an_empty_completion_is_named_unless_its_end_counts(tmp_path):
    class Ended(Bytes):
        eos_ids = (0,)

    done = {"prompt": "a", "completion": "b"}
    path = write(tmp_path / "a.jsonl", [done, done, done | {"completion": ""}])
    config = config_of(path, split="tail:0.5", layout="packed")
    with pytest.raises(UsageError, match=r"a.jsonl, line 3 has a completion without a token"):
        open_corpus(config, tmp_path / "cache")
    corpus = open_corpus(config, tmp_path / "other", Ended())
    assert corpus.validation.read_counts(0, 5).tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "text", "folder"])
def test_the_cache_is_of_the_content_where_size_and_time_agree(tmp_path, monkeypatch, kind, large):
    if large:
        monkeypatch.setattr(corpus_module, "_HASHED", 0)
    path = tmp_path / ("a.jsonl" if kind == "jsonl" else "a")
    file = path
    if kind == "folder":
        path.mkdir()
        (path / "y").write_text("constant" * 9)
        file = path / "x"
    tokenizer = train_bpe(iter(["ab"]), 257)
    digested = []
    digest_of = corpus_module._digest_of
    monkeypatch.setattr(corpus_module, "_digest_of", lambda x: digested.append(x) or digest_of(x))

    def read(letter):
        """The training text with this letter in it, and how often content was read for it."""
        line = json.dumps({"text": letter * 9}) if kind == "jsonl" else letter * 18
        file.write_text((line + "\n") * 20)
        os.utime(file, ns=(10**18, 10**18))
        return reading()

    def reading():
        before = len(digested)
        config = config_of(path, split="tail:0.1")
        corpus = open_corpus(config, tmp_path / "cache", tokenizer)
        found = tokenizer.decode(corpus.train.read(0, len(corpus.train)))
        return {letter for letter in "QZ" if letter in found}, len(digested) - before

    reads = 0 if large else 1
    assert read("Q") == ({"Q"}, reads) and reading() == ({"Q"}, 0)
    assert read("Z") == ({"Z"}, reads) and reading() == ({"Z"}, 0)
    os.chmod(file, 0o600)  # new numbers, the same content
    before = set((tmp_path / "cache").iterdir())
    assert reading() == ({"Z"}, reads)
    assert large or set((tmp_path / "cache").iterdir()) == before
    assert read("Q") == ({"Q"}, reads)


@pytest.mark.parametrize("kind", ["texts", "completions", "chats", "pairs"])
@pytest.mark.parametrize("before", list(itertools.product([(), (258,), (258, 259)], [(), (259,)])))
def test_the_cache_is_of_the_ends_of_the_tokenizer(tmp_path, monkeypatch, kind, before):
    """Tokenizers of one file differ in BOS and EOS; an older cache serves its own alone."""
    library = train_bpe(iter(["ab ab"]), 258)._tokenizer
    library.add_special_tokens(["<s>", "</s>"])
    record = {
        "texts": {"text": "ab a"},
        "completions": {"prompt": "ab", "completion": " a"},
        "chats": {"messages": [{"role": "assistant", "content": "ab"}]},
        "pairs": {"prompt": "ab", "chosen": " a", "rejected": " b"},
    }[kind]
    path = tmp_path / "a.jsonl"
    path.write_text((json.dumps(record) + "\n") * 40)
    config = DataConfig(
        path=str(path), seq_len=4, split="tail:0.4", pairs=kind == "pairs", layout="rows"
    )

    def first(bos, eos, cache):
        tokens = open_corpus(config, cache, Bpe(library, bos, eos)).train
        return tokens.read(0, int(tokens.lengths[0])).tolist()

    with monkeypatch.context() as older:  # its key says nothing of the ends
        older.setattr(corpus_module, "_serves", lambda *_: True)
        begun = first(*before, tmp_path / "cache")
    with monkeypatch.context() as again:
        again.setattr(corpus_module, "tokenise", None)
        assert first(*before, tmp_path / "cache") == begun
    for _ in range(2):
        for bos, eos in itertools.product([(), (258,), (258, 259)], [(), (259,)]):
            alone = first(bos, eos, tmp_path / f"alone {bos} {eos}")
            assert first(bos, eos, tmp_path / "cache") == alone
            assert alone[: len(bos)] == list(bos)
            assert alone[-1:] == list(eos) or not eos or kind == "chats"


@pytest.mark.parametrize("pairs", [True, False])
def test_lines_are_counted_for_errors_alone(tmp_path, monkeypatch, pairs):
    """Or each line would read the file again up to it."""
    monkeypatch.setattr(shards, "place_of", None)
    records = [
        {"text": "a"},
        {"prompt": "a", "completion": "b"},
        {"messages": [{"role": "user", "content": "a"}]},
    ]
    if pairs:
        records = [{"prompt": "a", "chosen": "b", "rejected": "c"}]
    path = write(tmp_path / "a.jsonl", records * 40)
    config = DataConfig(path=str(path), seq_len=4, split="tail:0.4", pairs=pairs)
    assert len(open_corpus(config, tmp_path / "cache").train)
