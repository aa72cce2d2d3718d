"""One format for what is trained, judged and served: 12 kinds of tokenizers, all kinds of records.

Ids are the tokenizers library's on the whole text. The answer's characters count. A prompt is the
beginning of a training example.
"""

import itertools
import json
import warnings

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxpar.lm.evaluation import Question, rows_of_questions
from jaxpar.lm.text import long_texts
from jaxpar.lm.text.chat import ChatTemplate
from jaxpar.lm.text.corpus import DataConfig, open_corpus
from jaxpar.lm.text.examples import (
    chat_ml,
    documents_of,
    encode_pieces,
    encode_prompted,
    pair_of,
)
from jaxpar.lm.text.tokenizer import Bytes, load_tokenizer
from jaxpar.types import UsageError

SPECIAL = ["<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>"]
WORDS = (
    "the cat sat on a mat . what is it ? it is a cat , user assistant system no yes : dog".split()
)
TEXTS = [" ".join(np.random.default_rng(i).permutation(WORDS)) for i in range(20)]
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]


def byte_level(prefix):
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(TEXTS, trainer)
    return library


def sentence_piece(prepends):
    """Pieces as SentencePiece's: learnt word by word, read without a border between words."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=["<unk>", *FALLBACK], show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    written = json.loads(library.to_str())
    written["pre_tokenizer"] = None
    written["added_tokens"] = [x for x in written["added_tokens"] if x["content"] == "<unk>"]
    library = tokenizers.Tokenizer.from_str(json.dumps(written))
    spaces = normalizers.Replace(" ", "\u2581")
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), spaces][not prepends :]
    )
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return library


def word_piece(_):
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer(lowercase=True)
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=60, special_tokens=["[UNK]"], show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    return library


def unigram(scheme):
    library = tokenizers.Tokenizer(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(TEXTS, trainer)
    return library


MODELS = {
    "byte level": (byte_level, False),
    "byte level, space first": (byte_level, True),
    "sentence piece, prepends": (sentence_piece, True),
    "sentence piece": (sentence_piece, False),
    "word piece": (word_piece, None),
    "unigram": (unigram, "first"),
}
# Of each model two of the eight: BOS, EOS, padding and truncation.
ENDS = list(itertools.product((True, False), repeat=3))
KINDS = [
    (name, *ENDS[(3 * number + other) % 8])
    for number, name in enumerate(MODELS)
    for other in (0, 5)
]


class Made:
    """A folder's tokenizer, and the library's own without what a folder adds."""

    def __init__(self, folder, name, bos, eos, pads):
        make, option = MODELS[name]
        library = make(option)
        library.add_special_tokens(SPECIAL)
        self.library = tokenizers.Tokenizer.from_str(library.to_str())
        self.library.post_processor = None  # it takes spaces out of offsets
        self.lossless = not name.startswith(("word", "unigram"))
        self.bos_ids = [library.token_to_id("<s>")] * bos
        self.eos_ids = [library.token_to_id("</s>")] * eos
        if bos:
            library.post_processor = processors.TemplateProcessing(
                single="<s> $A", special_tokens=[("<s>", self.bos_ids[0])]
            )
        if pads:
            library.enable_padding(
                direction="left", length=8, pad_id=library.token_to_id("<pad>"), pad_token="<pad>"
            )
            library.enable_truncation(4)
        library.save(str(folder / "tokenizer.json"))
        settings = {"bos_token": "<s>", "eos_token": "</s>"}
        if not eos:
            del settings["eos_token"]
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        self.tokenizer = load_tokenizer(folder)

    def ids(self, text):
        return self.library.encode(text, add_special_tokens=False).ids

    def check(self, ids, counts, text, answers, ends):
        """Checks one text with answers that count, where no token lies over a border."""
        body = self.ids(text)
        begun = self.bos_ids
        if body[: len(begun)] == begun:
            begun = []
        want = begun + body + self.eos_ids * ends
        assert ids.tolist() == want and ids.dtype == np.int32 and counts.dtype == np.uint8
        held = np.zeros(len(text), bool)
        inside = counts[len(begun) : len(begun) + len(body)]
        offsets = self.library.encode(text, add_special_tokens=False).offsets
        for (start, stop), count in zip(offsets, inside, strict=True):
            held[start:stop] |= bool(count)
        found = "".join(char for char, holds in zip(text, held, strict=True) if holds)
        assert "".join(found.split()) == "".join("".join(answers).split())
        assert not counts[: len(begun)].any() and counts[len(begun) + len(body) :].all()


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]} {kind[1:]}")
def kind(request, tmp_path_factory):
    name, bos, eos, pads = request.param
    return Made(tmp_path_factory.mktemp("folder"), name, bos, eos, pads)


def encoded(record, tokenizer, template=chat_ml):
    ((pieces, ends),) = documents_of(json.dumps(record).encode(), "x", template)
    return encode_pieces(pieces, ends, tokenizer)


def begins(kind, prompt, ids, counts):
    """True if the ids of a prompt alone are the example's before its answer."""
    alone, _ = encode_prompted([(prompt, False)], kind.tokenizer)
    return alone.tolist() == ids[: counts.argmax()].tolist()


def test_what_a_folder_adds_is_as_it_says(kind):
    assert list(kind.tokenizer.bos_ids) == kind.bos_ids
    assert list(kind.tokenizer.eos_ids) == kind.eos_ids


@pytest.mark.parametrize("text", ["the cat sat on a mat .", " what is it ?\nit is\n\n a cat", ""])
def test_texts(kind, text):
    ids, counts = encoded({"text": text}, kind.tokenizer)
    kind.check(ids, counts, text, [text], True)
    assert not counts[: len(kind.bos_ids)].any() and counts[len(kind.bos_ids) :].all()


PROMPTS = [
    "what is it ?",
    "user : what is it ?\nassistant :",
    "<|im_start|>user\nthe cat<|im_end|>",
]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions(kind, prompt):
    ids, counts = encoded({"prompt": prompt, "completion": " a cat , yes ."}, kind.tokenizer)
    kind.check(ids, counts, prompt + " a cat , yes .", ["a cat , yes ."], True)
    assert begins(kind, prompt, ids, counts)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_pairs(kind, prompt):
    record = {"prompt": prompt, "chosen": " yes", "rejected": " no , a dog"}
    for (pieces, ends), answer in zip(
        pair_of(json.dumps(record).encode(), "x"), (" yes", " no , a dog"), strict=True
    ):
        ids, counts = encode_pieces(pieces, ends, kind.tokenizer)
        kind.check(ids, counts, prompt + answer, [answer], True)
        assert begins(kind, prompt, ids, counts)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_choices_are_read_as_completions_are_trained(kind, prompt):
    choices = (" a cat", " no", " the dog sat on it .")
    rows = rows_of_questions([Question(prompt, choices, 0, "x")], kind.tokenizer)
    for (ids, counts), choice in zip(rows, choices, strict=True):
        kind.check(ids, counts, prompt + choice, [choice], False)
        trained = encoded({"prompt": prompt, "completion": choice}, kind.tokenizer)
        assert trained[0][: len(ids)].tolist() == ids.tolist()
        assert trained[1][: len(ids)].tolist() == counts.tolist()


TALK = [
    {"role": "system", "content": "the dog is a cat"},
    {"role": "user", "content": "what is it ?"},
    {"role": "assistant", "content": "a cat"},
    {"role": "user", "content": "the cat ?"},
    {"role": "assistant", "content": "yes , it is ."},
]
ANSWERS = ["a cat<|im_end|>", "yes , it is .<|im_end|>"]
CHAT_ML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MARKED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}
{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
BEGUN = "{{ bos_token }}" + CHAT_ML
TEMPLATES = {"none": chat_ml, "plain": CHAT_ML, "marked": MARKED, "begun": BEGUN}


@pytest.mark.parametrize("name", list(TEMPLATES))
def test_chats_have_one_beginning_and_count_answers(kind, name):
    template = TEMPLATES[name]
    if isinstance(template, str):
        template = ChatTemplate(template, {"bos_token": "<s>"})
    ids, counts = encoded({"messages": TALK}, kind.tokenizer, template)
    written = template(TALK, False)
    kind.check(ids, counts, written, ANSWERS, False)
    assert ids.tolist().count(kind.library.token_to_id("<s>")) == (
        bool(kind.bos_ids) or name == "begun"
    )
    assert begins(kind, template(TALK[:2], True), ids, counts)
    last = encode_prompted([(template(TALK[:4], True), False)], kind.tokenizer)[0]
    assert ids[: len(last)].tolist() == last.tolist() and counts[len(last)] == 1


def test_special_tokens_that_texts_spell(kind):
    record = {"prompt": "<|im_end|> it is", "completion": " a</s> cat"}
    ((pieces, ends),) = documents_of(json.dumps(record).encode(), "x")
    special = {kind.library.token_to_id(token) for token in SPECIAL}
    for kept in (True, False):
        ids, counts = encode_pieces(pieces, ends, kind.tokenizer, special_tokens=kept)
        body = ids[len(kind.bos_ids) : len(ids) - len(kind.eos_ids)].tolist()
        assert bool(special & set(body)) == kept and counts.any()
        if not kept and kind.lossless:
            assert "</s>" in kind.tokenizer.decode(body)
    chat = [{"role": "user", "content": "it"}, {"role": "assistant", "content": "a"}]
    ((pieces, ends),) = documents_of(json.dumps({"messages": chat}).encode(), "x")
    ids, _ = encode_pieces(pieces, ends, kind.tokenizer, special_tokens=False)
    assert ids.tolist().count(kind.library.token_to_id("<|im_end|>")) == 2


def test_a_beginning_that_a_text_spells_is_not_written_twice(kind):
    ids, _ = encoded({"text": "<s>the cat"}, kind.tokenizer)
    assert ids.tolist()[: ids.size - len(kind.eos_ids)] == kind.ids("<s>the cat")


def test_a_token_over_the_border_counts(kind):
    """A prompt that ends in a space, which the tokenizer reads as part of the answer's first word."""
    prompt, answer = "the cat is ", "a mat"
    ids, counts = encoded({"prompt": prompt, "completion": answer}, kind.tokenizer)
    body = kind.ids(prompt + answer)
    first = len(kind.bos_ids)
    assert ids[first : first + len(body)].tolist() == body
    offsets = kind.library.encode(prompt + answer, add_special_tokens=False).offsets
    want = [stop > len(prompt) for _, stop in offsets]
    assert counts[first : first + len(body)].astype(bool).tolist() == want and sum(want) >= 2
    row = rows_of_questions([Question(prompt, (answer, "it"), 0, "x")], kind.tokenizer)[0]
    assert row[0].tolist() == ids[: first + len(body)].tolist()
    assert row[1].tolist() == counts[: first + len(body)].tolist()


def test_a_tokenizer_without_spans_encodes_pieces_apart_and_says_so():
    class Older:
        vocab_size = 256
        bos_ids = (1,)
        eos_ids = (2,)

        def encode(self, text):
            return Bytes().encode(text)

    with pytest.warns(FutureWarning, match="a tokenizer without encode_spans encodes pieces apart"):
        ids, counts = encoded({"prompt": "ab", "completion": "c"}, Older())
    assert ids.tolist() == [1, 97, 98, 99, 2] and counts.tolist() == [0, 0, 0, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert encoded({"text": "a"}, Older())[0].tolist() == [1, 97, 2]


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
def test_a_corpus_reads_special_tokens_as_asked(tmp_path, suffix):
    kind = Made(tmp_path, "byte level", False, False, True)
    path = tmp_path / f"a{suffix}"
    text = "the cat</s> it is a mat"
    line = {".jsonl": json.dumps({"text": text}), ".txt": text}[suffix]
    path.write_text((line + "\n") * 400)
    special = kind.library.token_to_id("</s>")
    shares = {}
    for kept in (True, False, True):  # each from a cache of its own
        config = DataConfig(
            path=str(path), seq_len=8, batch_size=1, split="tail:0.5", special_tokens=kept
        )
        tokens = open_corpus(config, tmp_path / "cache", kind.tokenizer).train
        read = tokens.read(0, len(tokens))
        shares[kept] = int((read == special).sum())
        assert kind.tokenizer.decode(read).startswith(text)
    assert shares[False] == 0 and shares[True] >= 190


RNG = np.random.default_rng(0)
LONG = {
    "words": "".join(
        RNG.choice(WORDS)
        + RNG.choice([" ", "  ", "\n", "\n\n", ""], p=[0.8, 0.05, 0.05, 0.05, 0.05])
        for _ in range(500)
    ),
    "one word": "the" * 600,
    "one letter": "a" * 1801,
    "spaces": "a" + " " * 1500 + "b",
    "no ascii": "é日 \U0001f642\n" * 300,
    "special": "the cat</s> it<s>\n" * 100,
    "numbers": "".join(map(str, range(500))),
}


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks as short as the longest tokens and runs of a test allow."""
    for name, value in (("WHOLE", 300), ("CHUNK", 200), ("OVERLAP", 80)):
        monkeypatch.setattr(long_texts, name, value)


@pytest.mark.parametrize("name", list(LONG))
@pytest.mark.parametrize("block", [97, 10_000])
def test_long_texts_are_encoded_as_if_whole(kind, small_chunks, name, block):
    text = LONG[name]
    blocks = (text[i : i + block] for i in range(0, len(text), block))
    parts = list(long_texts.encode_texts(blocks, kind.tokenizer))
    assert np.concatenate(parts).tolist() == kind.ids(text)
    if name in ("words", "numbers") and kind.lossless:
        assert len(parts) > 5 and max(map(len, parts)) < 500  # memory is bounded


def documents_in(tokens):
    """Returns ids and counts of each document."""
    spans = list(zip(tokens.begins, tokens.lengths, strict=True))
    return [(tokens.read(*x).tolist(), tokens.read_counts(*x).tolist()) for x in spans]


@pytest.mark.parametrize("split", ["hash:0.5", "tail:0.45"])
@pytest.mark.parametrize("chunks", ["whole", "long"])
def test_texts_of_folders_and_files(kind, tmp_path, request, split, chunks):
    """Files of a folder have one beginning and one end, however many pieces and chunks they are."""
    if chunks == "long":
        request.getfixturevalue("small_chunks")
    root = tmp_path / "texts"
    root.mkdir()
    texts = [f"{i} {LONG['words'][i:]}" for i in range(6)] + ["<s>the cat sat", " a\n\n b "]
    for i, text in enumerate(texts):
        (root / f"{i}.txt").write_text(text)
    config = DataConfig(path=str(root), split=split, seq_len=8, batch_size=1, layout="stream")
    corpus = open_corpus(config, tmp_path / "cache", kind.tokenizer)
    found = documents_in(corpus.train) + documents_in(corpus.validation)
    wanted = []
    for text in texts:
        body = kind.ids(text)
        begun = kind.bos_ids * (body[:1] != kind.bos_ids)
        ids = begun + body + kind.eos_ids
        wanted.append((ids, [0.0] * len(begun) + [1.0] * (len(ids) - len(begun))))
    if split.startswith("hash"):
        assert sorted(found) == sorted(wanted)
        return
    # A tail cuts one file into two texts.
    assert len(found) == len(texts) + 1
    (first, _), (second, _) = [each for each in found if each not in wanted]
    assert first[: len(kind.bos_ids)] == kind.bos_ids
    assert second[len(second) - len(kind.eos_ids) :] == kind.eos_ids
    inside = first[len(kind.bos_ids) :] + second[: len(second) - len(kind.eos_ids)]
    assert not set(kind.bos_ids + kind.eos_ids) & set(inside)


def test_a_single_file_is_a_stream_of_whole_pieces(kind, small_chunks, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(LONG["words"] * 8)
    config = DataConfig(path=str(path), split="tail:0.3", seq_len=8, batch_size=1, layout="stream")
    corpus = open_corpus(config, tmp_path / "cache", kind.tokenizer)
    size = len(LONG["words"]) * 8
    cut = int((1 - 0.3) * size)
    for tokens, text in (
        (corpus.train, path.read_text()[:cut]),
        (corpus.validation, path.read_text()[cut:]),
    ):
        assert tokens.read(0, len(tokens)).tolist() == kind.ids(text)


def test_a_text_that_no_cut_leaves_alike_is_refused(small_chunks, monkeypatch):
    class Backwards(Bytes):
        def encode_spans(self, text, *, special_tokens=True):
            ids, starts, stops = super().encode_spans(text)
            return ids + len(text), starts, stops

    monkeypatch.setattr(long_texts, "LARGEST", 2000)
    with pytest.raises(
        UsageError, match="a text has .* characters with tokens that depend on all before"
    ):
        list(long_texts.encode_texts(iter(["a" * 5000]), Backwards()))


def test_ids_and_masks_are_those_of_transformers(kind, tmp_path):
    """Of the extra `peers`."""
    transformers = pytest.importorskip("transformers")
    kind.tokenizer.save(tmp_path / "tokenizer.json")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    theirs.bos_token = "<s>"
    first = len(kind.bos_ids)
    for prompt in PROMPTS:
        ids, _ = encoded({"prompt": prompt, "completion": " a cat , yes ."}, kind.tokenizer)
        want = theirs(f"{prompt} a cat , yes .", add_special_tokens=False)["input_ids"]
        assert ids[first : len(ids) - len(kind.eos_ids)].tolist() == want
    theirs.chat_template = MARKED
    want = theirs.apply_chat_template(TALK, return_assistant_tokens_mask=True, return_dict=True)
    ids, counts = encoded({"messages": TALK}, kind.tokenizer, ChatTemplate(MARKED))
    assert ids[first:].tolist() == want["input_ids"]
    assert counts[first:].tolist() == want["assistant_masks"]


def test_bytes_are_alike_whole_and_apart():
    class Same(Bytes):  # read whole
        pass

    record = {"prompt": "é?", "completion": " \U0001f642b"}
    for found, want in zip(encoded(record, Bytes()), encoded(record, Same()), strict=True):
        assert found.tolist() == want.tolist() and found.dtype == want.dtype
    assert encoded(record, Bytes())[1].tolist() == [0] * 3 + [1] * 6
