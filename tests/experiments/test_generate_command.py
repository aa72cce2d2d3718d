"""Files of prompts to files of texts: each line is what the slow loop says, whatever its company, draft or history."""

import fcntl
import hashlib
import json
import re
import shlex
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from fast import jit, noisy_params
from gguf_writing import write_gguf
from jax.errors import JaxRuntimeError
from lm_configs import lm_config

from experiments import generate
from experiments.app.lm import completions, prompt_batches, text_codec
from experiments.app.lm.requests import Request, read_requests
from experiments.app.mistakes import CONF
from jaxpar.decode import (
    Beams,
    CopyDraft,
    JacobiDraft,
    LookaheadDraft,
    ModelDraft,
    NoDraft,
    Sampling,
    gumbel,
    process,
)
from jaxpar.lm import Decoder, apply, from_hf, to_hf
from jaxpar.lm.text.chat import ChatTemplate
from jaxpar.lm.text.tokenizer import Bytes, load_tokenizer, train_bpe
from jaxpar.types import UsageError

NEW, LENGTH = 6, 24
MODEL = dict(num_layers=1, embed_dim=32, num_heads=2, mlp_dim=32, dtype="float32")
PROMPTS = [("alpha beta", 0), ("gamma", 5), ("alpha beta gamma delta", 2**32 - 1)]
FAST = f"cpu_devices=8 dtype=float32 sampling.max_new_tokens={NEW}".split()


def hf_folder(path, vocab_size, text="alpha beta gamma delta " * 40, **changes):
    """Writes a Hugging Face folder with fewer symbols in its tokenizer than in its model."""
    config = lm_config(vocab_size=vocab_size, **MODEL | changes)
    path.parent.mkdir(exist_ok=True)
    train_bpe(iter([text]), 270).save(path.with_suffix(".json"))
    to_hf(noisy_params(config), config, path, tokenizer=path.with_suffix(".json"))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return hf_folder(tmp_path_factory.mktemp("models") / "model", 320)


@pytest.fixture(scope="module")
def oracle(folder):
    """`oracle(prompt, seed, sample)` is the slow loop: every token from a pass over all before it."""
    config, params = from_hf(folder, dtype="float32")
    tokenizer, sampling = load_tokenizer(folder), Sampling(NEW, temperature=0.8)
    logits = jit(lambda tokens: apply(params, tokens, config))

    def draw(prompt, seed, sample):
        text = tokenizer.encode(prompt).tolist()
        new, log_probs = [], []
        for _ in range(NEW):
            row = logits(np.pad(text, (0, LENGTH - len(text)))[None])[0, len(text) - 1]
            place = jnp.uint32(seed), jnp.int32(len(text)), jnp.int32(sample)
            new.append(
                int(
                    (
                        process(row, sampling)
                        + gumbel(jax.random.key(0), *place, config.vocab_size)
                    ).argmax()
                )
            )
            log_probs.append(float(jax.nn.log_softmax(row)[new[-1]]))
            text.append(new[-1])
        return new, log_probs

    return draw


@pytest.fixture
def ask(main, tmp_path, folder):
    """`ask(*flags)` continues prompts into `texts.jsonl`, and returns its lines in order of names."""

    def call(*flags, prompts=PROMPTS, out="texts.jsonl"):
        lines = [json.dumps({"prompt": prompt, "seed": seed}) for prompt, seed in prompts]
        (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n")
        said = main(
            f"hf={folder}", "prompts=prompts.jsonl", f"out={out}", *FAST, *flags, of="generate"
        )
        assert said.code == 0, said
        return read(tmp_path / out)

    return call


@pytest.fixture
def asked(monkeypatch):
    """What `draw` is asked for, while texts are the letters from that of the prompt's length, seed and sample on."""
    calls = []

    def draw(key, params, prompts, model, sampling, decoding, **options):
        number = len(np.unique(prompts.tokens, axis=0))
        shape = {"rows": prompts.tokens.shape, "prompts": number}
        fields = {name: getattr(decoding, name) for name in decoding.__dataclass_fields__}
        asked_seeds = {"model": model, "seeds": np.asarray(prompts.seeds)}
        calls.append(shape | fields | options | asked_seeds)
        num_samples = decoding.num_samples
        rows = np.repeat(np.asarray(prompts.tokens), num_samples, 0)
        ends = np.repeat(np.asarray(prompts.lengths), num_samples)
        seeds = np.repeat(np.asarray(prompts.seeds), num_samples)
        start = 64 + ends + seeds % 7 + np.arange(len(rows)) % num_samples
        tokens = np.pad(rows, ((0, 0), (0, sampling.max_new_tokens)))
        for number in range(sampling.max_new_tokens):
            tokens[np.arange(len(rows)), ends + number] = start + number
        passes = np.full(len(rows), sampling.max_new_tokens - 1)
        return (
            tokens,
            ends + sampling.max_new_tokens,
            np.full((len(rows), sampling.max_new_tokens), -0.5),
            passes,
        )

    monkeypatch.setattr(prompt_batches, "draw", draw)
    return calls


def read(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return sorted(lines, key=lambda line: (line["prompt"], line["seed"], line["sample"]))


def names(prompts, num_samples):
    return sorted((*prompt, sample) for prompt in prompts for sample in range(num_samples))


def test_lines_are_those_of_the_slow_loop_whatever_company_draft_and_mesh(ask, oracle, folder):
    tokenizer = load_tokenizer(folder)
    runs = {
        "shared": ["batch_size=3", "num_samples=2"],
        "alone": ["batch_size=1", "draft=copy", "draft_length=2"],
        "split": ["batch_size=4", "mesh.data=4", "mesh.context=2", "rules.slots=context"],
    }
    for run, flags in runs.items():
        lines = ask(*flags, out=f"{run}.jsonl")
        assert [(line["prompt"], line["seed"], line["sample"]) for line in lines] == names(
            PROMPTS, 1 + (run == "shared")
        )
        for line in lines:
            tokens, log_probs = oracle(line["prompt"], line["seed"], line["sample"])
            assert (line["tokens"], line["finish_reason"], line["id"]) == (
                tokens,
                "length",
                None,
            ), run
            assert line["passes"] <= NEW - 1 and (line["passes"] == NEW - 1 or run == "alone")
            np.testing.assert_allclose(line["log_probs"], log_probs, atol=1e-4)
            assert line["text"] == tokenizer.decode(
                [token for token in tokens if token < tokenizer.vocab_size]
            )
    used = [token for line in lines for token in line["tokens"]]
    assert max(used) >= tokenizer.vocab_size > min(used), (
        "or a vocabulary that was rounded up would not be tested"
    )


def test_prompts_of_like_lengths_share_a_program(ask, asked):
    ask("batch_size=3", prompts=[("alpha " * n + "!", 0) for n in (1, 2, 3, 30, 4, 5)])
    assert [call["rows"] for call in asked] == [(3, 16), (2, 16), (1, 64)]
    asked.clear()
    ask(
        "batch_size=8",
        prompts=[("alpha " * n + "!", 0) for n in (1, 2, 3, 30, 4, 5)],
        out="more.jsonl",
    )
    assert [(call["rows"], call["prompts"]) for call in asked] == [((8, 16), 5), ((1, 64), 1)]


def test_what_is_there_is_neither_drawn_again_nor_touched(ask, asked, tmp_path):
    first, path = ask("batch_size=2", prompts=PROMPTS[:2]), tmp_path / "texts.jsonl"
    whole = path.read_bytes()
    assert ask(prompts=PROMPTS[:2]) == first and path.read_bytes() == whole and len(asked) == 1
    path.write_bytes(whole[:-20])  # killed while it wrote the last line
    kept = whole[: whole[:-20].rindex(b"\n") + 1]
    more = [PROMPTS[0], *PROMPTS]  # one of them twice: two texts that are the same
    lines = ask("num_samples=2", prompts=more)
    assert path.read_bytes().startswith(kept) and path.read_bytes().endswith(b"}\n")
    assert [(line["prompt"], line["seed"], line["sample"]) for line in lines] == names(more, 2)
    assert all(line in lines for line in first)
    path.write_bytes(path.read_bytes()[:-1])  # whole but for its end
    assert (
        ask("num_samples=2", prompts=more) == lines
        and len(asked) == 2
        and path.read_bytes().endswith(b"}\n")
    )
    lines = ask("num_samples=2", prompts=[*more, ("new", 0)])
    assert len(lines) == 10 and asked[-1]["rows"] == (1, 16), "of the others nothing was missing"
    assert (
        ask("num_samples=2", "draft=copy", prompts=PROMPTS[:1]) == lines
    )  # a draft changes no token
    assert "rejection" not in path.with_name("texts.jsonl.flags").read_text()


@pytest.mark.parametrize(
    "flags, sentence",
    [
        (
            "sampling.top_k=7",
            "has lines of sampling.top_k=0, and these would be of sampling.top_k=7",
        ),
        ("seed=1", "of seed=0, and these would be of seed=1"),
        ("rule=rejection", "of rule='coupled', and these would be of rule='rejection'"),
        ("stop=[a]", "of stop=[], and these would be of stop=['a']"),
        ("dtype=bfloat16", "of dtype='float32', and these would be of dtype='bfloat16'"),
        ("resume=false", "has lines, which resume=false does not go on with"),
        ("out=foreign.jsonl", "line 2 of out=foreign.jsonl is none that this command has written"),
        ("out=orphan.jsonl", "has lines, and no orphan.jsonl.flags says by which flags"),
        ("out=held.jsonl", "out=held.jsonl is in use by another run"),
        ("out=.", "out=. is no file"),
        ("out=prompts.jsonl", "out=prompts.jsonl is the file of prompts"),
    ],
)
def test_lines_of_others_are_left_alone(main, folder, tmp_path, flags, sentence):
    line = json.dumps({"prompt": "", "seed": 0, "id": None, "sample": 0}) + "\n"
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "alpha"}\n')
    target = generate.Saved(*from_hf(folder, dtype="float32"), load_tokenizer(folder))
    job = prompt_batches.Job(target, None, None, 1, (), None, None, "coupled", 1)
    said = generate.told(generate.compose(*FAST), job)
    for name in ("ours", "orphan", "held"):
        (tmp_path / f"{name}.jsonl").write_text(line)
    (tmp_path / "ours.jsonl.flags").write_text(json.dumps(said))
    (tmp_path / "foreign.jsonl").write_text(line + "{}\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    given = [f"hf={folder}", "prompts=prompts.jsonl", "out=ours.jsonl", *FAST]
    given = [flag for flag in given if flag.split("=")[0] != flags.split("=")[0]] + flags.split()
    with (tmp_path / "held.jsonl").open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)
        assert sentence in main(*given, of="generate").sentence()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_stop_string_cuts_the_text_and_ends_the_row(ask, asked, folder):
    free = ask("sampling.max_new_tokens=20")
    texts = ask("sampling.max_new_tokens=20", 'stop=["pq","zz"]', out="stopped.jsonl")
    for line, found in zip(free, texts, strict=True):
        assert "pq" in line["text"] and "zz" not in line["text"]
        assert (
            found["text"] == line["text"][: line["text"].index("pq")]
            and found["finish_reason"] == "stop"
        )
        count = len(found["tokens"])
        assert found["tokens"] == line["tokens"][:count] and len(found["log_probs"]) == count
        assert count == len(found["text"]) + 2  # each letter that `asked` draws is a token
    assert [call["stop_tokens"] for call in asked] == [(), ()], "no token of the tokenizer holds pq"
    cut = tuple(tuple(load_tokenizer(folder).encode(stop).tolist()) for stop in ("pq", "zz"))
    assert [call["sequences"] for call in asked] == [(), cut] and [len(each) for each in cut] == [
        2,
        2,
    ]
    ask('stop=["p"]', out="letter.jsonl")
    assert len(asked[-1]["stop_tokens"]) == 3  # p, and two longer ones


def test_a_row_ends_with_the_tokens_that_a_stop_string_is_cut_into(ask, folder):
    tokenizer, flags = load_tokenizer(folder), ("batch_size=3", "sampling.max_new_tokens=24")
    free = ask(*flags)

    def is_cut(ids):
        text = tokenizer.decode(np.array(ids))
        return text.isascii() and text.isalnum() and tokenizer.encode(text).tolist() == ids

    pairs = ((line, at) for line in free for at in range(1, 20))
    line, at = next((line, at) for line, at in pairs if is_cut(line["tokens"][at - 1 : at + 1]))
    stop = tokenizer.decode(np.array(line["tokens"][at - 1 : at + 1]))
    found = ask(*flags, f'stop=["{stop}"]', out="stopped.jsonl")[free.index(line)]
    assert (
        found["tokens"] == line["tokens"][: at + 1]
        and found["text"] == line["text"][: line["text"].index(stop)]
    )
    assert found["passes"] == at < line["passes"] == 23


def test_endings():
    def of(text, stops=(), stop_tokens=(), begun="say ", room=0):
        before, new = (np.array(list(x.encode()), int) for x in (begun, text))
        return text_codec.ending(Bytes(), before, new, stop_tokens, stops, room)

    assert of("hello") == ("hello", "length", 5)
    assert of("hello!", stop_tokens=(33,)) == ("hello", "stop", 6)
    assert of("hello!", ["lo"], (33,)) == ("hel", "stop", 5)
    assert of("hello", ["lo", "el", "ell"]) == ("h", "stop", 3)
    assert of("yes", ["y y"]) == (
        "yes",
        "length",
        3,
    )  # what the prompt ends with is no part of the text
    assert of("", ["x"]) == ("", "length", 0)
    assert text_codec.ending_tokens(Bytes(), ["\n", "ab"]) == (10,)
    assert text_codec.ending_tokens(Bytes(), []) == ()
    assert text_codec.ending_sequences(Bytes(), ["\n", "ab", "é"]) == ((97, 98), (195, 169))

    class Trimming(Bytes):
        def decode(self, ids):
            return super().decode(ids).lstrip()

    assert text_codec.ending_sequences(Trimming(), [" a", "b "]) == (
        (98, 32),
    )  # what " a" is cut into may mean "a" alone
    assert (
        text_codec.decode(Bytes(), np.array([65, 300, 66])) == "AB"
    )  # a vocabulary that was rounded up


def test_prompts_without_seeds_have_noise_of_their_own(tmp_path):
    path = tmp_path / "prompts.jsonl"
    named = [{"prompt": "a", "id": 1}, {"prompt": "a", "seed": 0}, {"prompt": "a", "seed": 9}]
    lines = [json.dumps(each) for each in [*({"prompt": f"{n}"} for n in range(64)), *named]]

    def seeds(lines, rule="prompt"):
        path.write_text("\n".join(lines) + "\n")
        return [request.seed for request in read_requests(path, rule)]

    given = seeds(lines)
    assert len(set(given[:65])) == 65 and given[65:] == [0, 9]
    assert seeds(lines[::-1]) == given[::-1], "a line that moves keeps its seed"
    twice = seeds([*lines[:3], *lines[:3]])
    assert twice[:3] == given[:3] and len(set(twice)) == 6, "equal prompts differ"
    assert seeds(lines, "zero") == [0] * 66 + [9]
    digest = hashlib.sha256(b'["0", null, 0]').digest()
    assert given[0] == int.from_bytes(digest[:4], "big")


def test_many_prompts_are_continued_independently(main, tmp_path, folder, oracle):
    """Equal prompts but for their seeds have continuations that differ."""
    prompts = ["alpha beta"] * 16
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
    flags = [f"hf={folder}", "prompts=prompts.txt", "batch_size=8", *FAST]
    assert main(*flags, "out=texts.jsonl", of="generate").code == 0
    lines = read(tmp_path / "texts.jsonl")
    assert len({tuple(line["tokens"]) for line in lines}) == 16
    line = lines[3]
    assert line["tokens"] == oracle(line["prompt"], line["seed"], 0)[0]
    assert main(*flags, "out=older.jsonl", "default_seed=zero", of="generate").code == 0
    older = read(tmp_path / "older.jsonl")
    want = oracle("alpha beta", 0, 0)[0]
    assert [(line["seed"], line["tokens"]) for line in older] == [(0, want)] * 16


def test_a_file_begun_before_seeds_by_prompt_goes_on_as_it_was(main, asked, folder, tmp_path):
    flags = [f"hf={folder}", "prompts=prompts.txt", "out=texts.jsonl", *FAST]
    (tmp_path / "prompts.txt").write_text("alpha\nbeta\n")
    assert main(*flags, "default_seed=zero", "special_tokens=true", of="generate").code == 0
    beside = tmp_path / "texts.jsonl.flags"
    told = json.loads(beside.read_text())
    del told["default_seed"], told["special_tokens"]
    beside.write_text(json.dumps(told))
    (tmp_path / "prompts.txt").write_text("alpha\nbeta\ngamma\n")
    said = main(*flags, of="generate")
    assert said.code == 0 and "1 lines to write, 2 were there" in said.out
    assert "continues by default_seed=zero special_tokens=true" in said.out
    assert [line["seed"] for line in read(tmp_path / "texts.jsonl")] == [0, 0, 0]
    beside.write_text(json.dumps(told | {"default_seed": "zero", "special_tokens": False}))
    sentence = main(*flags, of="generate").sentence()
    assert "of default_seed='zero', and these would be of default_seed='prompt'" in sentence


class Spelling(Bytes):
    """Bytes and a special token 256, spelled <end>, as its tokenizer reads it by default."""

    vocab_size = 257
    bos_ids = (256,)

    def encode(self, text, *, special_tokens=True):
        if not special_tokens:
            return super().encode(text)
        parts = [super(Spelling, self).encode(part) for part in text.split("<end>")]
        joined = [parts[0]]
        for part in parts[1:]:
            joined += [np.array([256]), part]
        return np.concatenate(joined).astype(np.int32)


def test_special_tokens_that_a_prompt_spells_are_text_unless_asked_for():
    spelled = list(b"a<end>")
    ids, added = text_codec.encode(Spelling(), "a<end>", 300, special_tokens=False)
    assert ids.tolist() == [256, *spelled] and added == 1
    ids, added = text_codec.encode(Spelling(), "a<end>", 300)
    assert ids.tolist() == [256, 97, 256] and added == 1
    ids, added = text_codec.encode(Spelling(), "<end>a", 300)
    assert ids.tolist() == [256, 97] and added == 0, "a prompt that spells BOS has one"
    ids, added = text_codec.encode(Spelling(), "<end>a", 300, special_tokens=False)
    assert ids.tolist() == [256, *b"<end>a"] and added == 1
    ids, added = text_codec.encode(OnlyText(), "a", 300, special_tokens=False)
    assert ids.tolist() == [97] and added == 0


@pytest.fixture(scope="module")
def target(folder):
    model, params = from_hf(folder, dtype="float32")
    return generate.Saved(model=model, params=params, tokenizer=load_tokenizer(folder))


@pytest.mark.parametrize(
    "flags, kept",
    [
        ("special_tokens=true default_seed=zero", {"special_tokens": True, "default_seed": "zero"}),
        ("beams=2 length_penalty=0.5", {"beams": 2, "length_penalty": 0.5}),
        ("draft=copy", {"seed": 0}),
    ],
    ids=["prompts", "beams", "draft"],
)
def test_flags_that_decide_on_a_text_are_stored_with_it(target, flags, kept):
    job = prompt_batches.Job(target, None, None, 1, (), None, None, "coupled", 1)
    stored = generate.told(generate.compose(*FAST, *flags.split()), job)
    usual = generate.told(generate.compose(*FAST), job)
    assert {name: stored[name] for name in kept} == kept
    changed = {name for name in stored if stored[name] != usual.get(name)}
    assert changed == {name for name in kept if kept[name] != usual.get(name)}


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            "num_samples=2 stop=[x] batch_size=3 special_tokens=true",
            {"num_samples": 2, "stop": ("x",), "batch_size": 3, "special_tokens": True},
        ),
        (
            "beams=3 length_penalty=0.5",
            {"num_samples": 3, "beams": Beams(3, NEW, 0.5), "special_tokens": False},
        ),
        ("rule=rejection seed=4", {"rule": "rejection", "draft": NoDraft(), "beams": None}),
    ],
    ids=["samples", "beams", "rule"],
)
def test_flags_reach_what_continues_prompts(main, folder, monkeypatch, flags, expected):
    jobs = []
    monkeypatch.setattr(generate, "show", lambda config, job, requests: jobs.append(job))
    said = main(f"hf={folder}", "prompt=a", *FAST, *flags.split(), of="generate")
    assert said.code == 0, said
    (job,) = jobs
    assert {name: getattr(job, name) for name in expected} == expected


def test_flags_of_a_folder_reach_its_reader(folder, monkeypatch):
    calls = []

    def load(path, config, dtype):
        calls.append((path, config.checkpoint, config.use_ema, config.strict, dtype))
        raise UsageError("nothing is read")

    monkeypatch.setattr(generate.lm, "load", load)
    flags = {"checkpoint": "newest", "use_ema": True, "strict": False, "dtype": "float16"}
    for config in (generate.Config(**flags), generate.Config()):
        with pytest.raises(UsageError, match="nothing is read"):
            generate.load(str(folder), config, "hf")
    changed = (folder, "newest", True, False, "float16")
    assert calls == [changed, (folder, "best", False, True, "bfloat16")]


def test_tasks_hold_special_tokens_where_the_flag_says_so():
    target = generate.Saved(lm_config(vocab_size=300, **MODEL), None, Spelling())
    job = prompt_batches.Job(target, None, Sampling(2), 1, (), NoDraft(), None, "coupled", 1)
    for special_tokens, want in ((True, [256, 97]), (False, [256, *b"<end>a"])):
        wanted = job._replace(special_tokens=special_tokens)
        (task,) = prompt_batches.make_tasks(wanted, [Request("<end>a")], {})
        assert task.tokens.tolist() == want


class OnlyText(Bytes):
    """A tokenizer without the option."""

    def encode(self, text):
        return super().encode(text)


def test_texts_over_the_trained_length_are_said_once(main, asked, folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("alpha\nbeta beta beta\n" * 3)
    reach = from_hf(folder)[0].max_seq_len
    flags = [f"hf={folder}", "prompts=prompts.txt", "batch_size=1", *FAST[:2]]
    said = main(*flags, f"sampling.max_new_tokens={reach}", of="generate")
    assert said.code == 0 and said.out.count("over the") == 1
    assert f"6 of 6 prompts with sampling.max_new_tokens={reach} reach up to" in said.out
    assert f"over the {reach} that the model was trained on" in said.out
    assert "over the" not in main(*flags, "sampling.max_new_tokens=8", of="generate").out


@pytest.mark.parametrize(
    ("changes", "trained", "is_said"),
    [
        ({}, 10, False),
        ({}, 9, True),
        ({}, None, False),
        ({"positions": "none"}, 9, False),
        ({"mixer": "min_lstm"}, 9, False),
    ],
)
def test_which_models_have_a_trained_length(changes, trained, is_said):
    config = lm_config(vocab_size=256, **MODEL | changes)
    target = generate.Saved(config, None, Bytes(), trained)
    job = prompt_batches.Job(target, None, Sampling(7), 1, (), NoDraft(), None, "coupled", 1)
    tasks = prompt_batches.make_tasks(job, [Request("abc"), Request("a")], {})
    sentence = prompt_batches.beyond_training(job, tasks)
    assert sentence.startswith("1 of 2 prompts") == is_said
    assert bool(sentence) == is_said


def test_the_trained_length_of_a_run_is_that_of_its_rows(main, copied, asked):
    length = yaml.safe_load((copied / "config.yaml").read_text())["data"]["seq_len"]
    room = f"sampling.max_new_tokens={length}"
    said = main("run=run", "prompt=alpha", *FAST[:2], room, of="generate")
    assert said.code == 0 and f"over the {length} that the model was trained on" in said.out


@pytest.mark.parametrize(
    ("new", "stop_tokens", "stops", "room", "want"),
    [
        ("hello", (), (), 5, ("hello", "length", 5)),
        ("hello", (), (), 6, ("hello", "unfinished", 5)),
        ("hello!", (33,), (), 9, ("hello", "stop", 6)),
        ("hello", (), ("lo",), 9, ("hel", "stop", 5)),
    ],
)
def test_a_text_that_neither_ended_nor_filled_its_room_is_marked(
    new, stop_tokens, stops, room, want
):
    begun = np.array([115])
    ids = np.array(list(new.encode()))
    assert text_codec.ending(Bytes(), begun, ids, stop_tokens, stops, room) == want


def test_requests_are_lines(tmp_path):
    plain, objects = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_bytes("one\r\n\ntwo ä \nthree".encode())
    assert [request[:3] for request in read_requests(plain, "zero")] == [
        ("one", 0, None),
        ("two ä ", 0, None),
        ("three", 0, None),
    ]
    assert read_requests(plain)[1].where == "line 3 of prompts.txt"
    objects.write_text('{"prompt": "a\\nb", "seed": 7, "id": "x"}\r\n \n{"prompt": "", "id": 3}\n')
    assert [request[:3] for request in read_requests(objects, "zero")] == [
        ("a\nb", 7, "x"),
        ("", 0, 3),
    ]


def test_objects_are_told_by_content_and_a_mark_is_no_text(tmp_path):
    for name in ("p.txt", "mes prières.JSONL", "p"):
        (tmp_path / name).write_bytes(b'\xef\xbb\xbf\n{"prompt": "a", "seed": 7}\n')
        assert read_requests(tmp_path / name) == [
            Request(prompt="a", seed=7, where=f"line 2 of {name}")
        ]
    (tmp_path / "p.txt").write_bytes(b'\xef\xbb\xbf{"x": 1}\n')
    assert read_requests(tmp_path / "p.txt")[0].prompt == '{"x": 1}'


CHAT = [{"role": "user", "content": "alpha"}]
JINJA = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
JINJA += "{% if add_generation_prompt %}[assistant]{% endif %}"


def test_chats_are_written_by_a_template(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": CHAT, "seed": 3}) + "\n")
    (request,) = read_requests(tmp_path / "p.jsonl")
    assert request.prompt == "<|im_start|>user\nalpha<|im_end|>\n<|im_start|>assistant\n"
    assert request.is_chat and request.seed == 3
    written = read_requests(
        tmp_path / "p.jsonl", template_of=lambda: ChatTemplate(JINJA, {"bos_token": "<s>"})
    )
    assert written[0].prompt == "<s>[user]alpha[assistant]"
    tools = [{"name": "f"}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": CHAT, "tools": tools}) + "\n")
    reading = ChatTemplate("{{ tools | tojson }}" + JINJA)
    (request,) = read_requests(tmp_path / "t.jsonl", template_of=lambda: reading)
    assert request.prompt == '[{"name": "f"}][user]alpha[assistant]'
    with pytest.raises(UsageError, match="line 1 of p.jsonl: the chat template cannot take"):
        refusing = ChatTemplate("{{ raise_exception('no') }}")
        read_requests(tmp_path / "p.jsonl", template_of=lambda: refusing)


def test_the_folders_own_template_writes_chats(main, tmp_path, folder):
    """The text of a chat equals the text of its prompt, which the template writes."""
    asked = {"messages": CHAT, "seed": 1}
    (tmp_path / "p.jsonl").write_text(json.dumps(asked) + "\n")
    given = ["prompts=p.jsonl", *FAST]
    said = main(f"hf={folder}", *given, "out=no.jsonl", of="generate")
    assert said.code == 2 and "has no chat template, by which messages would be" in said.err
    chatty = tmp_path / "chatty model"
    shutil.copytree(folder, chatty)
    (chatty / "chat_template.jinja").write_text(JINJA)
    said = main(f"hf={chatty}", *given, "out=chats.jsonl", of="generate")
    assert said.code == 0, said
    prompt = {"prompt": "[user]alpha[assistant]", "seed": 1}
    (tmp_path / "p.jsonl").write_text(json.dumps(prompt) + "\n")
    assert main(f"hf={chatty}", *given, "out=texts.jsonl", of="generate").code == 0
    assert read(tmp_path / "chats.jsonl") == read(tmp_path / "texts.jsonl")
    assert read(tmp_path / "chats.jsonl")[0]["prompt"] == "[user]alpha[assistant]"


BAD_LINES = [
    (b'{"prompt": "a"}\n{"prompt": ', "line 2 of p.jsonl cannot be read as JSON"),
    (b"[" * 100_000, "line 1 of p.jsonl cannot be read as JSON"),
    (b'"a"', 'line 1 of p.jsonl must be an object with a text as its "prompt"'),
    (b'{"text": "a"}', "line 1 of p.jsonl must be an object"),
    (
        b'{"prompt": "a", "n": 3}',
        "line 1 of p.jsonl has 'n', which nothing heeds; legal are prompt, messages, tools, seed, "
        "id",
    ),
    (
        b'{"prompt": "a", "seed": -1}',
        "line 1 of p.jsonl has seed=-1; legal are whole numbers from 0 to 4294967295",
    ),
    (b'{"prompt": "a", "seed": 4294967296}', "has seed=4294967296"),
    (b'{"prompt": "a", "seed": true}', "has seed=True"),
    (b'{"prompt": "a", "id": [1]}', "has id=[1]"),
    (
        b'{"prompt": "a\xff"}',
        "p.jsonl is not UTF-8 at byte 13, but perhaps Latin-1; expected UTF-8, convert it: ",
    ),
    (
        "a".encode("utf-16"),
        "p.jsonl is UTF-16; expected UTF-8, convert it: iconv -f UTF-16 -t UTF-8 ",
    ),
    (b'{"messages": []}', "line 1 of p.jsonl has messages=[]; expected a list of at least one"),
    (
        b'{"messages": [{"role": "user"}]}',
        "has the message {'role': 'user'}; expected an object with role",
    ),
    (
        b'{"messages": [{"role": "assistant", "content": "a"}]}',
        "ends with a message of the assistant; expected one that it is to answer",
    ),
    (b'{"messages": [{"role": "user", "content": null}]}', "has a content that is no text; ChatML"),
    (
        b'{"prompt": "a", "tools": [{}]}',
        "line 1 of p.jsonl has tools and a prompt; expected messages",
    ),
    (
        b'{"messages": [{"role": "user", "content": "a"}], "tools": ["f"]}',
        "line 1 of p.jsonl has tools=['f']; expected a list of objects",
    ),
    (
        b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"name": "f"}]}',
        "line 1 of p.jsonl has tools, which ChatML does not write; expected a template",
    ),
    (b'{"prompt": "a", "messages": []}', "line 1 of p.jsonl has a prompt and messages"),
    (b"\n\n", "has no prompt"),
]


@pytest.mark.parametrize(
    "content, sentence", BAD_LINES, ids=[sentence for _, sentence in BAD_LINES]
)
def test_lines_that_cannot_be_read_are_named(tmp_path, content, sentence):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(UsageError) as error:
        read_requests(tmp_path / "p.jsonl")
    assert sentence in str(error.value) and len(str(error.value)) < 300


BAD_FLAGS = [
    ("prompt=a", "run= must name an existing folder, not ''"),
    ("run=nowhere prompt=a", "run= must name an existing folder, not 'nowhere'"),
    ("hf=. prompt=a", "hf=. is no Hugging Face folder: it has no config.json"),
    ("run=. prompt=a", "it has no config.yaml"),
    ("run=a hf=b", "run= and hf= name a model each"),
    ("prompt=a prompts=b", "prompt= and prompts= are both given"),
    ("hf=MODEL", "the prompt has no tokens"),
    ("hf=MODEL prompts=nowhere.txt", "nowhere.txt cannot be opened"),
    ("hf=MODEL prompts=empty.jsonl", "line 2 of empty.jsonl has no tokens"),
    ("hf=MODEL prompt=a draft=model", "draft=model needs draft_run="),
    ("hf=MODEL prompt=a draft_run=MODEL", "draft=none with draft_run="),
    ("hf=MODEL prompt=a draft=model draft_run=OTHER", "give a draft of the same tokens"),
    ("hf=MODEL prompt=a draft=model draft_run=WIDER", "384 symbols of the tokenizer bpe:"),
    ("hf=MODEL prompt=a draft=model draft_run=nowhere", "draft_run= must name an existing folder"),
    ("hf=MODEL prompt=a draft=medusa", "draft='medusa' is unknown; legal are none, copy"),
    ("hf=MODEL prompt=a draft_length=4", "draft_length=4 belongs to no draft"),
    ("hf=MODEL prompt=a draft=copy rule=rejection", "draft=copy has none; expected draft=model"),
    ("hf=MODEL prompt=a rule=typical", "rule='typical' is unknown; legal are coupled, rejection"),
    ("hf=MODEL prompt=a num_samples=0", "num_samples=0 must be at least 1"),
    ("hf=MODEL prompt=a num_samples=5000", "num_samples=5000 must be at least 1 and at most 1024"),
    (
        "hf=MODEL prompt=a sampling.max_new_tokens=9999999",
        "sampling.max_new_tokens=9999999 must be at least 1 and at",
    ),
    ("hf=MODEL prompt=a batch_size=0", "batch_size=0 must be at least 1"),
    ("hf=MODEL prompt=a batch_size=3 mesh.data=8", "batch_size=3 does not divide over mesh.data=8"),
    ("hf=MODEL prompt=a mesh.context=8 mesh.data=1", "sampling has nothing along context"),
    ("hf=MODEL prompt=a stop=['']", "stop= has an empty string"),
    ("hf=MODEL prompt=a metrics=[tensorboard]", "metrics= has nothing to write here"),
    ("hf=MODEL prompt=a sampling.temprature=1", "did you mean sampling.temperature"),
    (
        "hf=LEARNED prompt=abcdefgh",
        "the prompt has 7 tokens, which with sampling.max_new_tokens=6 are over the 12",
    ),
    (
        "hf=MODEL draft=model draft_run=SHORT prompt=abcdefgh",
        "are over the 12 positions of the draft",
    ),
]


@pytest.fixture(scope="module")
def folders(folder, tmp_path_factory):
    path, learned = tmp_path_factory.mktemp("others"), {"positions": "learned", "max_seq_len": 12, "activation": "gelu",
                                                        "norm": "layer", "bias": True, "tied": True}  # fmt: skip
    others = {"OTHER": hf_folder(path / "other", 320, text="other words " * 40), "MODEL": folder}
    others["WIDER"] = hf_folder(path / "wider", 384)
    return others | {
        "LEARNED": hf_folder(path / "learned", 320, **learned),
        "SHORT": path / "learned",
    }


@pytest.mark.parametrize("flags, sentence", BAD_FLAGS, ids=[flags for flags, _ in BAD_FLAGS])
def test_bad_flags(main, folders, tmp_path, monkeypatch, flags, sentence):
    monkeypatch.setattr(prompt_batches, "draw", None)  # nothing is compiled
    (tmp_path / "empty.jsonl").write_text('{"prompt": "a"}\n{"prompt": ""}\n')
    for name, path in folders.items():
        flags = flags.replace(f"={name}", f"={path}")
    said = main(FAST[0], FAST[2], *flags.split(), of="generate").sentence()
    assert sentence in said and len(said) < 400, said


def test_a_batch_that_does_not_fit_says_what_to_lower(main, folder, monkeypatch):
    def draw(*_, **__):
        raise JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(prompt_batches, "draw", draw)
    said = main(f"hf={folder}", "prompt=alpha", "num_samples=3", *FAST, of="generate").sentence()
    assert (
        "1 prompts of up to 16 tokens, 3 x 6 new ones each, do not fit into memory; lower batch_size"
        in said
    )


def test_logits_that_are_not_finite_are_no_text(folder):
    target = generate.Saved(None, None, load_tokenizer(folder))
    job = prompt_batches.Job(target, None, Sampling(2), 1, (), None, None, "coupled", 1)
    task = prompt_batches.Task(Request("a", where="line 3"), np.array([1]), 16, (0,))
    with pytest.raises(UsageError, match="line 3 makes the model's logits infinite or NaN"):
        prompt_batches._line(job, task, 0, np.array([1, 2]), np.array([0.0, np.nan]), 1)


def test_ctrl_c_says_how_many_lines_are_whole(main, asked, folder, tmp_path, monkeypatch):
    write = completions.Completions.write

    def once(self, lines):
        write(self, lines)
        raise KeyboardInterrupt

    monkeypatch.setattr(completions.Completions, "write", once)
    (tmp_path / "prompts.txt").write_text("alpha\nbeta\n")
    said = main(
        f"hf={folder}",
        "prompts=prompts.txt",
        "out=texts.jsonl",
        "batch_size=1",
        *FAST,
        of="generate",
    )
    assert (
        said.code == 130
        and "1 lines of texts.jsonl are whole, and the same command goes on" in said.err
    )
    assert len(read(tmp_path / "texts.jsonl")) == 1


def test_texts_of_a_run_are_printed_where_no_file_is_named(main, copied, asked):
    said = main("run=run", "prompt=alpha", "num_samples=2", *FAST, of="generate")
    assert said.code == 0 and "checkpoint of step" in said.out
    assert "seed 0 sample 0: length after 6 tokens in 5 passes\nalphaEFGHIJ\n" in said.out
    assert "seed 0 sample 1: length after 6 tokens in 5 passes\nalphaFGHIJK\n" in said.out
    assert asked[0]["model"].dtype == "float32" and asked[0]["rule"] == "coupled"


@pytest.mark.parametrize(
    "flags, want",
    [
        ("", NoDraft()),
        ("draft=copy", CopyDraft()),
        ("draft=copy draft_length=3", CopyDraft(3)),
        ("draft=jacobi draft_length=3", JacobiDraft(3)),
        ("draft=lookahead", LookaheadDraft()),
        ("draft=lookahead draft_length=3", LookaheadDraft(ngram=4)),
    ],
)
def test_drafts_by_name_and_length(flags, want):
    draft, params = generate.make_draft(generate.compose(*flags.split()), None)
    assert draft == want and params is None
    assert "draft_length=3" not in flags or max(draft.tree.depth[: 1 + 3]) == 3


def test_a_smaller_model_drafts(ask, asked, folder, tmp_path):
    ask("draft=model", f"draft_run={folder}", "draft_length=3", "rule=rejection")
    (call,) = asked
    assert call["draft"] == ModelDraft(Decoder(call["model"]), 3) and call["rule"] == "rejection"
    weights = text_codec.fingerprint(from_hf(folder)[1])
    assert text_codec.fingerprint(call["draft_params"]) == weights
    said = json.loads(
        (tmp_path / "texts.jsonl.flags").read_text()
    )  # by this rule a draft decides on tokens, too
    assert (said["draft"], said["draft_length"], said["draft_run"], said["weights"]) == (
        "model",
        3,
        weights,
        weights,
    )


def test_every_preset_opens_with_its_command_and_composes():
    paths = sorted((CONF / "generate" / "preset").glob("*.yaml"))
    assert {path.stem for path in paths} == {"greedy", "samples"}
    for path in paths:
        first, command = path.read_text().splitlines()[:2]
        flags = command.removeprefix("# python -m experiments.generate ")
        assert first == "# @package _global_" and flags.startswith(f"preset={path.stem} run=")
        generate.compose(*shlex.split(flags))
    assert (
        generate.compose("preset=greedy").draft == "copy"
        and generate.compose("preset=samples").num_samples == 8
    )


def test_a_fingerprint_is_of_every_array():
    params = {"a": jnp.arange(6.0).reshape(2, 3), "b": jnp.zeros(2)}
    known = text_codec.fingerprint(params)
    assert known == text_codec.fingerprint(jax.tree.map(jnp.array, params)) and len(known) == 8
    for changed in ({"a": params["a"].at[0, 1].add(1)}, {"b": params["b"] + 1}):
        assert text_codec.fingerprint(params | changed) != known


def searched_slowly(folder, prompt, width):
    """The most likely texts, by all tokens after all beams, each pass over all tokens before."""
    config, params = from_hf(folder, dtype="float32")
    logits = jit(lambda tokens: apply(params, tokens, config))
    beams = [(0.0, load_tokenizer(folder).encode(prompt).tolist())]
    for _ in range(NEW):
        longer = []
        for log_prob, text in beams:
            row = logits(np.pad(text, (0, LENGTH - len(text)))[None])[0, len(text) - 1]
            each = np.asarray(jax.nn.log_softmax(row))
            longer += [
                (log_prob + float(each[token]), [*text, token]) for token in range(len(each))
            ]
        beams = sorted(longer, reverse=True)[:width]
    return [(log_prob, text[-NEW:]) for log_prob, text in beams]


def test_beams_are_the_most_likely_texts_the_best_first(ask, folder):
    lines = ask("beams=3", "length_penalty=0.5", prompts=PROMPTS[:2])
    assert [line["sample"] for line in lines if line["prompt"] == "gamma"] == [0, 1, 2]
    for prompt, _ in PROMPTS[:2]:
        want = searched_slowly(folder, prompt, 3)
        mine = [line for line in lines if line["prompt"] == prompt]
        assert [line["tokens"] for line in mine] == [tokens for _, tokens in want]
        np.testing.assert_allclose(
            [line["log_prob"] for line in mine], [log_prob for log_prob, _ in want], atol=1e-4
        )
        scores = [log_prob / NEW**0.5 for log_prob, _ in want]
        np.testing.assert_allclose([line["score"] for line in mine], scores, atol=1e-4)
    assert ask("beams=3", "length_penalty=0.5", prompts=PROMPTS[:2]) == lines  # all are there


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "beams=2 num_samples=3",
            "beams=2 search for the most likely texts .* leave num_samples= out",
        ),
        ("beams=2 draft=copy", "leave draft= out"),
        ("beams=2 stop=[x]", "leave stop= out"),
        ("beams=2 sampling.top_k=3", "leave sampling= out"),
        ("beams=321", "beams=321 is over the model's 320 symbols"),
        ("beams=-1", "beams=-1 must be at least 0"),
    ],
)
def test_what_a_search_does_not_take_is_rejected(main, folder, flags, sentence):
    said = main(f"hf={folder}", "prompt=alpha", *FAST, *flags.split(), of="generate")
    assert re.search(sentence, said.sentence())


def test_a_gguf_file_is_a_model(folder, main):
    """Both flags that name a model take one."""
    path = write_gguf(folder, folder.parent / "words.gguf")
    for flag in ("hf", "run"):
        said = main(f"{flag}={path}", "prompt=alpha", *FAST, of="generate")
        assert said.code == 0 and "\nalpha" in said.out, said
