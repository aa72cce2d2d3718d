"""Files by content: each kind gives the tokens of the same records as JSONL, every refusal is a sentence."""

import codecs
import gzip
import json
import sys
import types

import numpy as np
import pytest

from jaxpar.lm import evaluation
from jaxpar.lm.text import files, shards
from jaxpar.lm.text.chat import open_template
from jaxpar.lm.text.corpus import DataConfig, open_corpus
from jaxpar.lm.text.examples import documents_of
from jaxpar.lm.text.files import Source, kind_of, lines_of_source
from jaxpar.lm.text.tokenizer import Bpe, Bytes, train_bpe
from jaxpar.types import UsageError

TEXTS = [{"text": f"{i} naïve 日本 " * (1 + i % 7), "id": i} for i in range(60)]
ALPACA = [
    {"instruction": f"Add {i}.", "input": "" if i % 2 else "To 3.", "output": f"{i + 3}"}
    for i in range(40)
]
CHATS = [
    {
        "messages": [
            {
                "role": "user",
                "content": line["instruction"] + ("\n\nTo 3." if line["input"] else ""),
            },
            {"role": "assistant", "content": line["output"]},
        ]
    }
    for line in ALPACA
]


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def zstd(content):
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2  # two frames, as of files that were put one behind the other
    return b"".join(zstandard.compress(part) for part in (content[:half], content[half:]))


def opened(tmp_path, path, **changes):
    config = DataConfig(path=str(path), **{"seq_len": 16, "batch_size": 8, **changes})
    return open_corpus(config, tmp_path / "cache")


def written(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def streams(corpus):
    return [
        (tokens.read(0, len(tokens)).tolist(), tokens.read_counts(0, len(tokens)).tolist())
        for tokens in (corpus.train, corpus.validation)
    ]


def documents(corpus):
    """The documents as they are counted, whatever their order and side."""
    found = []
    for tokens in (corpus.train, corpus.validation):
        for begin, length in zip(tokens.begins.tolist(), tokens.lengths.tolist(), strict=True):
            ids, counts = tokens.read(begin, length), tokens.read_counts(begin, length)
            found.append((bytes(ids.tolist()), bytes(ids[counts == 1].tolist())))
    return sorted(found)


@pytest.mark.parametrize("part", [100, 2**20])
@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.JSONL", bytes),
        ("a.txt", bytes),
        ("a", bytes),
        ("a.jsonl.gz", gzip.compress),
        ("a.gz", gzip.compress),
        ("a.jsonl.zst", zstd),
    ],
)
def test_lines_are_lines_by_any_name_and_packing(
    tmp_path, monkeypatch, name, pack, part, tokenizer
):
    """Packed or not, one corpus to the bit: its parts, and so its hash, are the same."""
    monkeypatch.setattr(shards, "PART", part)
    content = lines(TEXTS).replace(b"\n", b"\n\n", 3)
    plain = opened(tmp_path, written(tmp_path / "plain.jsonl", content), tokenizer=tokenizer)
    other = opened(tmp_path, written(tmp_path / "o" / name, pack(content)), tokenizer=tokenizer)
    assert other.hash == plain.hash and other.tokenizer.identity == plain.tokenizer.identity
    assert streams(other) == streams(plain)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", json.dumps(TEXTS).encode()),
        ("a.json", json.dumps(TEXTS, indent=1, ensure_ascii=False).encode()),
        ("marked.json", codecs.BOM_UTF8 + json.dumps(TEXTS).encode()),
        ("several.json", b"\n".join(json.dumps(each, indent=2).encode() for each in TEXTS)),
        ("a.json.gz", gzip.compress(json.dumps(TEXTS).encode())),
    ],
    ids=["plain", "indented", "marked", "several", "packed"],
)
@pytest.mark.parametrize("block", [7, 2**20])
def test_arrays_are_their_records(tmp_path, monkeypatch, name, content, block):
    """Blocks of seven bytes cut characters, strings, numbers and escapes everywhere."""
    monkeypatch.setattr(files, "_BLOCK", block)
    path = written(tmp_path / name, content)
    source = Source(path=str(path), kind=kind_of(str(path)))
    assert [json.loads(line) for line in lines_of_source(source)] == TEXTS
    plain = opened(tmp_path, written(tmp_path / "plain.jsonl", lines(TEXTS)))
    assert streams(opened(tmp_path, path)) == streams(plain)


@pytest.mark.parametrize(
    "value",
    [12345.5, 'a\\u00e4"', True, None, [1], {"a": "😀"}, -1e-30],
    ids=["float", "text", "flag", "null", "list", "object", "small"],
)
def test_values_cut_anywhere_are_whole(monkeypatch, value):
    monkeypatch.setattr(files, "_BLOCK", 1)
    content = json.dumps([{"v": value}, {"w": [value]}]).encode()
    for size in range(1, 12):
        blocks = (content[i : i + size] for i in range(0, len(content), size))
        assert list(files._values("a", blocks)) == [{"v": value}, {"w": [value]}]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("alpaca.json", json.dumps(ALPACA).encode()),
        ("alpaca.jsonl", lines(ALPACA)),
        ("alpaca.jsonl.gz", gzip.compress(lines(ALPACA))),
    ],
    ids=["array", "lines", "packed"],
)
def test_instructions_are_conversations(tmp_path, name, content):
    """Only what is answered counts, by the same template as any conversation."""
    found = documents(opened(tmp_path, written(tmp_path / name, content)))
    assert found == documents(opened(tmp_path, written(tmp_path / "chats.jsonl", lines(CHATS))))
    asked = b"<|im_start|>user\nAdd 4.\n\nTo 3.<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n"
    assert (asked, b"7<|im_end|>\n") in found


def test_an_instruction_without_an_answer_is_named(tmp_path):
    for name, content in (
        ("a.json", json.dumps([*ALPACA, {"instruction": "a", "output": None}]).encode()),
        ("a.jsonl", lines([*ALPACA, {"instruction": "a", "output": None}])),
    ):
        with pytest.raises(UsageError, match=r"41 has output=None; legal is a string"):
            opened(tmp_path, written(tmp_path / name, content))


def table_of(records):
    pyarrow = pytest.importorskip("pyarrow")
    return pyarrow.Table.from_pylist(records)


def write_table(path, table, rows=9):
    import pyarrow.ipc
    import pyarrow.parquet

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=rows)
        return path
    make = pyarrow.ipc.new_file if path.suffix == ".arrow" else pyarrow.ipc.new_stream
    with make(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "stream"])
@pytest.mark.parametrize("records", [TEXTS, CHATS, ALPACA], ids=["texts", "chats", "alpaca"])
def test_tables_are_their_rows(tmp_path, suffix, records):
    path = write_table(tmp_path / f"a.{suffix}", table_of(records))
    plain = written(tmp_path / "plain.jsonl", lines(records))
    assert documents(opened(tmp_path, path)) == documents(opened(tmp_path, plain))
    assert kind_of(str(path)).form == ("parquet" if suffix == "parquet" else "arrow")
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(UsageError, match=r"is damaged or ends early"):
        opened(tmp_path, path)


def test_columns_that_are_not_known_are_not_read(tmp_path):
    table = table_of([{"label": i, "sentence": "a"} for i in range(9)])
    path = write_table(tmp_path / "a.parquet", table)
    with pytest.raises(
        UsageError, match=r"a\.parquet has records with the keys label, sentence; legal"
    ):
        opened(tmp_path, path)


def test_a_folder_of_shards_is_its_records_in_order_of_names(tmp_path):
    folder = tmp_path / "données à moi"
    written(folder / "0.jsonl", lines(TEXTS[:20]))
    written(folder / "1.json", json.dumps(TEXTS[20:40]).encode())
    written(folder / "2.jsonl.gz", gzip.compress(lines(TEXTS[40:])))
    written(folder / "README.md", b"# What this is\n")
    written(folder / "dataset_info.json", b'{"features": {}}')
    said = []
    config = DataConfig(path=str(folder), seq_len=16, split="tail:0.2")
    corpus = open_corpus(config, tmp_path / "cache", say=said.append)
    plain = opened(tmp_path, written(tmp_path / "a.jsonl", lines(TEXTS)), split="tail:0.2")
    assert streams(corpus) == streams(plain)
    assert said[0].startswith("2 files beside the records of ")
    again = open_corpus(config, tmp_path / "cache", say=said.append)
    assert again.hash == corpus.hash and len(said) == 4  # nothing is tokenised twice
    written(folder / "notes.txt", b"some text\n")
    with pytest.raises(
        UsageError, match=r"0\.jsonl has records and .*notes\.txt is text; expected one"
    ):
        opened(tmp_path, folder)


def test_a_folder_of_texts_may_hold_settings_in_json(tmp_path):
    folder = tmp_path / "code"
    written(folder / "a.py", b"x = 1\n" * 99)
    written(folder / "package.json", b'{"name": "a"}\n')
    said = []
    config = DataConfig(path=str(folder), seq_len=16, split="tail:0.2")
    corpus = open_corpus(config, tmp_path / "cache", say=said.append)
    assert len(corpus.train) + len(corpus.validation) == 99 * 6 + 14
    assert said[0].startswith("1 files are read as text though they are JSON, such as ")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize("pack", [gzip.compress, zstd, lambda text: codecs.BOM_UTF8 + text])
def test_text_is_unpacked_and_has_no_mark(tmp_path, pack, tokenizer):
    text = "naïve 日本 text\n".encode() * 400
    plain = opened(
        tmp_path, written(tmp_path / "a.txt", text), tokenizer=tokenizer, split="tail:0.2"
    )
    path = written(tmp_path / "packed.txt", pack(text))
    other = opened(tmp_path, path, tokenizer=tokenizer, split="tail:0.2")
    assert other.hash == plain.hash and streams(other) == streams(plain)
    assert streams(opened(tmp_path, path, tokenizer=tokenizer, split="tail:0.2")) == streams(
        plain
    )  # as it was kept


def test_lines_with_a_mark_are_read(tmp_path):
    path = written(tmp_path / "a.jsonl", codecs.BOM_UTF8 + lines(TEXTS))
    plain = written(tmp_path / "b.jsonl", lines(TEXTS))
    assert documents(opened(tmp_path, path)) == documents(opened(tmp_path, plain))


def test_what_an_older_cache_holds_of_a_file_goes_on(tmp_path, monkeypatch):
    """A run that trained on the bytes of an array resumes on them."""
    path = written(tmp_path / "a.json", json.dumps(TEXTS).encode())
    with monkeypatch.context() as older:
        older.setattr("jaxpar.lm.text.corpus._open_sources", lambda *_: ())
        before = opened(tmp_path, path, split="tail:0.2")
    assert bytes(before.train.read(0, 9).tolist()) == b'[{"text":'
    assert streams(opened(tmp_path, path, split="tail:0.2")) == streams(before)


TEXT = "Größe\n" * 200
BAD = {
    "latin.txt": (
        TEXT.encode("latin-1"),
        "is not UTF-8 at byte 2, but perhaps Latin-1; expected UTF-8, convert it: iconv -f LATIN1 -t",
    ),
    "latin.jsonl": (b'{"text": "Gr\xf6\xdfe"}\n', "is not UTF-8 at byte 12, but perhaps Latin-1"),
    "utf16.txt": (
        TEXT.encode("utf-16"),
        "is UTF-16; expected UTF-8, convert it: iconv -f UTF-16 -t UTF-8 ",
    ),
    "utf16.jsonl": (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), "is UTF-16; expected"),
    "bare.txt": (TEXT.encode("utf-16-le"), "is UTF-16LE; expected UTF-8"),
    "utf32.txt": (TEXT.encode("utf-32"), "is UTF-32; expected UTF-8"),
    "a.zip": (b"PK\x03\x04" + bytes(99), "is a ZIP archive; expected text in UTF-8, JSON, parquet"),
    "a.pdf": (b"%PDF-1.7\n" + b"text " * 99, "is a PDF; expected"),
    "a.bin": (bytes(range(256)) * 9, "is binary; expected"),
    "no zeros": (bytes(range(1, 256)) * 9, "is binary; expected"),
    "array": (
        b"\x93NUMPY\x01\0" + bytes(99),
        "is an array of NumPy's, which needs a name that ends in .npy",
    ),
    "cut.gz": (gzip.compress(lines(TEXTS))[:-40], "is damaged or ends early: "),
    "wrong.gz": (gzip.compress(TEXT.encode())[:-8] + bytes(8), "is damaged or ends early: CRC"),
    "twice.gz": (gzip.compress(gzip.compress(b"a")), "is compressed twice"),
    "none.gz": (gzip.compress(b""), "holds no text; expected a file that is not empty"),
    "keys.json": (
        b'[{"question": "a", "answer": "b"}]',
        f"has records with the keys question, answer; {files.LEGAL}.",
    ),
    "keys.txt": (
        b'{"question": "a"}\n{"question": "b"}\n',
        "has records with the keys question; legal are",
    ),
    "object.json": (
        json.dumps({"data": TEXTS}, indent=2).encode(),
        "has records with the keys data; legal are",
    ),
    "strings.json": (b'["a", "b"]', "is not JSON that holds objects; legal are"),
    "broken.json": (b"{'text': 1}", "is not JSON that holds objects; legal are"),
    "ends.json": (json.dumps(TEXTS).encode()[:-50], "record 60 cannot be read as JSON"),
    "comma.json": (
        json.dumps(TEXTS).replace("}, ", "} ", 1).encode(),
        "record 2 cannot be read as JSON: a comma is missing before '{'",
    ),
    "open.json": (
        json.dumps(TEXTS).encode()[:-1],
        "record 61 cannot be read as JSON: the file ends before its array",
    ),
    "mixed.json": (json.dumps([*TEXTS, 3]).encode(), "record 61 is not a JSON object; legal are"),
    "late.json": (b'[{"text": "a"}, {"text": "' + b"a" * 99 + b'\xff"}]', "is not UTF-8"),
    "turn.json": (
        b'[{"text": "a"}, {"text": 3}]',
        "turn.json, record 2 has text=3; legal is a string",
    ),
    "turn.jsonl.gz": (
        gzip.compress(b'{"text": "a"}\n\n{"text": 3}\n'),
        "turn.jsonl.gz, line 3 has text=3",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_one_sentence(tmp_path, name):
    content, sentence = BAD[name]
    path = written(tmp_path / name, content)
    for tokenizer in ("bytes", "bpe:300"):
        with pytest.raises(UsageError) as raised:
            opened(tmp_path, path, tokenizer=tokenizer)
        assert str(path) in str(raised.value) and sentence in str(raised.value)
        assert "\n" not in str(raised.value) and len(str(raised.value)) < 500


def test_a_frame_of_zstd_that_is_cut_is_refused(tmp_path):
    path = written(tmp_path / "a.jsonl.zst", zstd(lines(TEXTS))[:-3])
    with pytest.raises(UsageError, match=r"is damaged or ends early: a frame of zstd is cut"):
        opened(tmp_path, path)


@pytest.mark.parametrize(
    ("magic", "module", "extra"),
    [
        (b"PAR1", "pyarrow", "arrow"),
        (b"ARROW1", "pyarrow", "arrow"),
        (b"\x28\xb5\x2f\xfd", "zstandard", "zstd"),
    ],
    ids=["parquet", "arrow", "zstd"],
)
def test_what_is_not_installed_is_named(tmp_path, monkeypatch, magic, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    path = written(tmp_path / "a", magic + bytes(99))
    with pytest.raises(UsageError, match=rf"a needs {module}; pip install 'jaxpar\[{extra}\]'"):
        opened(tmp_path, path)


def test_text_that_begins_like_json_stays_text(tmp_path):
    for number, text in enumerate((b"[Verse 1]\n", b"{% if a %}\n", b"{{ a }}\n", b"[1] a note\n")):
        corpus = opened(tmp_path, written(tmp_path / f"{number}.txt", text * 99), split="tail:0.2")
        assert len(corpus.train) + len(corpus.validation) == len(text) * 99


def test_pairs_of_any_kind(tmp_path):
    pairs = [{"prompt": "a", "chosen": f"b{i}", "rejected": "c"} for i in range(40)]
    path = written(tmp_path / "pairs.json", json.dumps(pairs).encode())
    plain = written(tmp_path / "pairs.jsonl", lines(pairs))
    found = [streams(opened(tmp_path, each, pairs=True)) for each in (path, plain)]
    assert found[0] == found[1]
    with pytest.raises(UsageError, match=r"has no pairs; expected records"):
        opened(tmp_path, written(tmp_path / "a.txt", b"text\n" * 99), pairs=True)


def test_parts_of_packed_lines_are_those_of_the_plain_file(tmp_path, monkeypatch):
    content = b'{"text": "a"}\n' + b"\n" * 3 + b'{"text": "bcdefgh"}\n{"text": "i"}'
    plain = str(written(tmp_path / "a.jsonl", content))
    packed = Source(
        path=str(written(tmp_path / "a.gz", gzip.compress(content))),
        kind=files.Kind("lines", "gzip"),
    )
    for part in range(1, len(content) + 2):
        monkeypatch.setattr(shards, "PART", part)
        found = [
            [
                [line for _, line in job.lines()]
                for job in shards._parts(source, None, None, 0, False)
            ]
            for source in (packed, Source(path=plain, kind=files.Kind("lines")))
        ]
        assert found[0] == found[1]


def test_memory_is_bounded_by_a_record_and_a_block(tmp_path, monkeypatch):
    """An array of one line is never held whole, nor is a block read again and again for a long record."""
    monkeypatch.setattr(files, "_BLOCK", 2**12)
    longest = []
    path = written(tmp_path / "a.json", json.dumps(TEXTS * 40 + [{"text": "a" * 2**20}]).encode())

    def blocks():
        with path.open("rb") as file:
            while block := file.read(2**12):
                longest.append(len(block))
                yield block

    values = files._values(str(path), blocks())
    assert next(values) == TEXTS[0] and len(longest) == 1
    assert sum(1 for _ in values) == 60 * 40


def test_processes_get_what_no_file_gives_them(tmp_path, monkeypatch):
    """Parts are handed over a few at a time, in order."""
    monkeypatch.setattr(shards, "PART", 200)
    ahead = []

    class Pool:
        def __init__(self, workers, context):
            self.left = []

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def submit(self, call, job):
            ahead.append(job)
            return types.SimpleNamespace(result=lambda: call(job))

        def shutdown(self, cancel_futures):
            pass

    def wait(running, return_when):
        assert len(running) <= 6
        first = min(running, key=lambda each: ahead.index(each.result.__closure__[1].cell_contents))
        return {first}, running - {first}

    class Hashed(types.SimpleNamespace):
        __hash__ = object.__hash__

    monkeypatch.setattr(types, "SimpleNamespace", Hashed)
    monkeypatch.setattr(shards.concurrent.futures, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(shards.concurrent.futures, "wait", wait)
    packed = written(tmp_path / "a.jsonl.gz", gzip.compress(lines(TEXTS)))
    plain = written(tmp_path / "a.jsonl", lines(TEXTS))
    many = opened(tmp_path, packed, workers=3)
    assert len(ahead) > 9
    assert np.array_equal(streams(many)[0], streams(opened(tmp_path, plain, workers=1))[0])


# ---------------------------------------------------------------- evaluation and tables

TOOLS = [
    CHATS[i] | {"tools": [{"name": f"add{i}", "parameters": {"a": {"type": "number"}}}]}
    for i in range(30)
]
TEMPLATE = """{{ tools | tojson }}{% for m in messages %}
{% if m.role == 'assistant' %}={% endif %}{{ m.content }};{% endfor %}
{% if add_generation_prompt %}={% endif %}"""


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "tools.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def texts_of(tmp_path, make):
    """A folder of texts."""
    for i in range(20):
        written(tmp_path / "texts" / f"{i}.txt", make(f"{i} naïve 日本\n".encode() * (1 + i % 3)))
    return tmp_path / "texts"


def shards_of(tmp_path):
    written(tmp_path / "shards" / "README.md", b"# What this is\n")
    written(tmp_path / "shards" / "0.jsonl", lines(CHATS[:20]))
    written(tmp_path / "shards" / "1.json.gz", gzip.compress(json.dumps(CHATS[20:]).encode()))
    return tmp_path / "shards"


KINDS = {
    "lines": lambda path: written(path / "a.jsonl", lines(TEXTS)),
    "marked": lambda path: written(path / "a.JSONL", codecs.BOM_UTF8 + lines(TEXTS)),
    "gzip": lambda path: written(path / "a.jsonl.gz", gzip.compress(lines(TEXTS))),
    "zstd": lambda path: written(path / "a.zst", zstd(lines(CHATS))),
    "array": lambda path: written(path / "a.json", json.dumps(TEXTS, indent=1).encode()),
    "alpaca": lambda path: written(path / "a.json", json.dumps(ALPACA).encode()),
    "alpaca lines": lambda path: written(path / "a.jsonl", lines(ALPACA)),
    "parquet": lambda path: write_table(path / "a.parquet", table_of(CHATS)),
    "arrow": lambda path: write_table(path / "a.arrow", table_of(ALPACA)),
    "shards": shards_of,
    "texts": lambda path: texts_of(path, bytes),
    "packed texts": lambda path: texts_of(path, gzip.compress),
    "tools": lambda path: written(path / "a.jsonl", lines(TOOLS)),
    "tools of tables": lambda path: write_table(path / "a.parquet", table_of(TOOLS)),
}


@pytest.mark.parametrize("special_tokens", [True, False])
@pytest.mark.parametrize("name", list(KINDS))
def test_evaluation_reads_what_training_reads(tmp_path, template, name, special_tokens):
    library = train_bpe(iter(["naïve 日本"]), 260)._tokenizer
    library.add_special_tokens(["naïve", "<s>", "</s>"])
    begun = Bpe(library, (library.token_to_id("<s>"),), (library.token_to_id("</s>"),))
    path = KINDS[name](tmp_path)
    options = {"special_tokens": special_tokens}
    config = DataConfig(
        path=str(path), seq_len=8, layout="packed", template=template, split="hash:0.3", **options
    )
    corpus = open_corpus(config, tmp_path / "cache", begun)
    trained = []
    for tokens in (corpus.train, corpus.validation):
        for span in zip(tokens.begins, tokens.lengths, strict=True):
            trained.append((tokens.read(*span).tolist(), tokens.read_counts(*span).tolist()))
    rows = evaluation.read_documents(path, begun, template, **options)
    assert sorted((ids.tolist(), counts.tolist()) for ids, counts in rows) == sorted(trained)


def test_evaluation_reads_a_single_text_as_a_stream(tmp_path):
    path = written(tmp_path / "a.txt.gz", gzip.compress(codecs.BOM_UTF8 + "é b".encode()))
    begun = type("Begun", (Bytes,), {"bos_ids": (1,), "eos_ids": (2,)})()
    ((ids, counts),) = evaluation.read_documents(path, begun)
    assert ids.tolist() == list("é b".encode()) and counts.tolist() == [1] * 4
    with pytest.raises(UsageError, match="tokens.npy has tokens; expected texts or records"):
        evaluation.read_documents(written(tmp_path / "tokens.npy", b"\x93NUMPY"), begun)
    written(tmp_path / "b.txt", b"ab\xff")
    with pytest.raises(UsageError, match="b.txt is not UTF-8 at byte 2"):
        evaluation.read_documents(tmp_path / "b.txt", begun)


@pytest.mark.parametrize("kind", ["lines", "gzip", "zstd", "array", "parquet", "arrow", "folder"])
def test_questions_and_answers_of_any_kind(tmp_path, kind):
    questions = [
        {"prompt": f"{i}+1=", "choices": [f"{i}", f"{i + 1}"], "answer": 1} for i in range(5)
    ]
    answers = [{"prompt": f"{i}+1=", "answer": f"{i + 1}"} for i in range(5)]
    for records, read in (
        (questions, evaluation.read_questions),
        (answers, evaluation.read_answers),
    ):
        if kind in ("parquet", "arrow"):
            path = write_table(tmp_path / f"a.{kind}", table_of(records))
        elif kind == "folder":
            written(tmp_path / "f" / "0.jsonl", lines(records[:2]))
            written(tmp_path / "f" / "1.json", json.dumps(records[2:]).encode())
            path = written(tmp_path / "f" / "README.md", b"# What this is\n").parent
        else:
            make = {"lines": bytes, "gzip": gzip.compress, "zstd": zstd}.get(kind)
            content = json.dumps(records).encode()
            if make:
                content = make(lines(records))
            path = written(tmp_path / f"a.{kind}", content)
        found = read(path)
        assert [each.prompt for each in found] == [record["prompt"] for record in records]
        assert found[-1].answer == records[-1]["answer"]
        assert found[-1].where.endswith(("line 5", "record 5", "1.json, record 3"))
    with pytest.raises(UsageError, match=r"b.txt is text; legal are \{\"prompt\", \"answer\"\}"):
        evaluation.read_answers(written(tmp_path / "b.txt", b"some text\n"))


@pytest.mark.parametrize("as_text", [False, True])
def test_tools_of_a_table_reach_the_template(tmp_path, template, as_text):
    records = TOOLS
    if as_text:  # as tables have tools of different parameters
        records = [each | {"tools": json.dumps(each["tools"])} for each in TOOLS]
    path = write_table(tmp_path / "a.parquet", table_of(records))
    found = documents(opened(tmp_path, path, template=template))
    plain = written(tmp_path / "plain.jsonl", lines(TOOLS))
    assert found == documents(opened(tmp_path, plain, template=template))
    assert all(f'"name": "add{i}"'.encode() in b"".join(x for x, _ in found) for i in range(30))


@pytest.mark.parametrize("tools", ["add", '{"name": "add"}', [1], 3])
def test_tools_that_are_none_are_named(template, tools):
    line = json.dumps(CHATS[0] | {"tools": tools}).encode()
    with pytest.raises(
        UsageError, match="line 1 has tools=.*; legal are a list of objects, in JSON"
    ):
        documents_of(line, "line 1", open_template(template))
