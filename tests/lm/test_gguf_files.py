"""GGUF files: the same model, parameters, tokens and texts as in the folder they are written from."""

import json
import sys

import gguf
import jax
import numpy as np
import pytest
import tokenizers
from fast import noisy_params
from gguf_writing import add_bpe, as_read, write_gguf
from lm_configs import lm_config, with_fields
from safetensors.numpy import save_file
from tokenizers import decoders, models, pre_tokenizers, trainers

from jaxpar.lm import Imported, config_from_hf, from_hf, load_model, read_imported, to_hf
from jaxpar.lm.hub.gguf_files import folder_of, packed_tensors
from jaxpar.lm.hub.gguf_headers import read_header
from jaxpar.lm.text.chat import load_chat
from jaxpar.lm.text.tokenizer import load_tokenizer
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.types import UsageError

SIZES = dict(
    vocab_size=40,
    max_seq_len=64,
    num_layers=2,
    embed_dim=64,
    num_heads=4,
    num_kv_heads=2,
    mlp_dim=96,
    rope_theta=5000.0,
    norm_eps=1e-5,
    dtype="float32",
)
GEMMA = dict(
    activation="geglu",
    post_norms=True,
    embed_scale=True,
    norm_plus_one=True,
    tied=True,
    head_dim=32,
    score_dim=32.0,
)
CONFIGS = {
    "llama": lm_config(**SIZES),
    "qwen2": lm_config(**SIZES, qkv_bias=True, tied=True),
    "qwen3": lm_config(**SIZES, head_dim=32, qk_norm=True),
    "gemma2": lm_config(**SIZES, **GEMMA, windows=(3, 0), score_cap=2.0, logit_cap=3.0),
    "gemma3_text": lm_config(
        **SIZES | dict(num_layers=3),
        **GEMMA,
        windows=(3, 3, 0),
        qk_norm=True,
        rope_theta_local=10000.0,
    ),
    "phi3": lm_config(**SIZES, rope_share=0.5, windows=(5,)),
}
MORE = {"gemma3_text": [lambda writer: writer.add_sliding_window_pattern(3)]}
TEXT = "the cat sat on the mat. 12 cats, 345 mats!\n\n  It's a cat's mat; don't sit.\té中 "


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    for name, config in CONFIGS.items():
        to_hf(noisy_params(config), config, root / name, imported=Imported(kind=name, config={}))
    return root


def assert_same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_the_model_and_parameters_of_its_folder(folders, tmp_path, name):
    path = write_gguf(folders / name, tmp_path / "model.gguf", more=MORE.get(name, ()))
    config, params = from_hf(path, dtype="float32")
    assert config == CONFIGS[name] == config_from_hf(path, dtype="float32")
    save_as(as_read(folders / name, "F32"), folders / name, tmp_path / "again")
    assert_same(params, from_hf(tmp_path / "again", dtype="float32")[1])


def save_as(tensors, folder, to):
    to.mkdir()
    save_file(tensors, to / "model.safetensors")
    (to / "config.json").write_text((folder / "config.json").read_text())


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_quantised_numbers_are_those_of_the_package(folders, tmp_path, kind):
    """Rows are quantised one by one, so that their order changes no number."""
    path = write_gguf(folders / "llama", tmp_path / "model.gguf", kind)
    save_as(as_read(folders / "llama", kind), folders / "llama", tmp_path / "again")
    config, params = load_model(path, "float32")
    assert_same(params, from_hf(tmp_path / "again", dtype="float32")[1])
    assert not np.array_equal(params["layers"]["wq"], noisy_params(config)["layers"]["wq"])
    wanted = {"F16": "float16", "BF16": "bfloat16"}.get(kind, "float32")
    assert read_imported(path).dtype == wanted
    assert load_model(path)[1]["head"].dtype == wanted


def test_devices_read_their_own_parts(folders, tmp_path):
    path = write_gguf(folders / "llama", tmp_path / "model.gguf", "Q8_0")
    whole = load_model(path, "float32")[1]
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))):
        assert_same(load_model(path, "float32")[1], whole)


def test_a_part_of_a_tensor_is_a_part_of_the_whole(folders, tmp_path):
    path = write_gguf(folders / "llama", tmp_path / "model.gguf", "Q4_1")
    for tensor in packed_tensors(path).values():
        whole = tensor.read(tuple(slice(0, size) for size in tensor.shape))
        assert whole.shape == tensor.shape and whole.dtype == np.float32
        cuts = tuple(slice(size // 4, size // 2 + 1) for size in tensor.shape)
        np.testing.assert_array_equal(tensor.read(cuts), whole[cuts])


def test_a_header_is_read_as_the_package_reads_it(folders, tmp_path):
    more = [
        lambda writer: writer.add_array("x.floats", [0.5, 2.0]),
        lambda writer: writer.add_array("x.texts", ["a", "é", ""]),
        lambda writer: writer.add_bool("x.flag", True),
        lambda writer: writer.add_int64("x.long", -(2**40)),
        lambda writer: writer.add_float64("x.double", 0.1),
        lambda writer: writer.add_custom_alignment(64),
    ]
    path = write_gguf(folders / "llama", tmp_path / "model.gguf", "Q8_0", more=more)
    reader = gguf.GGUFReader(path)
    header = read_header(path)
    assert header.values == {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    assert header.tensors == {
        tensor.name: (tuple(tensor.shape.tolist()[::-1]), tensor.tensor_type, tensor.data_offset)
        for tensor in reader.tensors
    }


def factors_of(size, theta, factor, length=8192):
    """Factors of Llama 3's rule as llama.cpp's converter writes them, by frequency."""
    found = []
    for i in range(0, size, 2):
        wavelength = 2 * np.pi * theta ** (i / size)
        if wavelength < length / 4:
            found.append(1.0)
        elif wavelength > length / 1:
            found.append(factor)
        else:
            smooth = (length / wavelength - 1) / (4 - 1)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


def test_scaled_rotations(folders, tmp_path):
    """Llama 3's rule is in a tensor of what it made, the others in numbers."""
    model = with_fields(CONFIGS["llama"], rope_theta=5e5)
    to_hf(noisy_params(model), model, tmp_path / "folder")
    factors = factors_of(16, 5e5, 32.0)
    assert 1 < sorted(factors)[4] < 32
    path = write_gguf(tmp_path / "folder", tmp_path / "scaled.gguf", factors=factors)
    rope = config_from_hf(path).rope
    assert (rope.scaling, rope.factor, rope.original_len) == ("llama3", 32.0, 8192)
    assert (rope.low_freq_factor, rope.high_freq_factor, rope.theta) == (1.0, 4.0, 5e5)
    from_hf(path)

    factors[4] *= 1.1
    write_gguf(tmp_path / "folder", tmp_path / "other.gguf", factors=factors)
    with pytest.raises(UsageError, match="rope_freqs.weight are not those of Llama 3's rule"):
        config_from_hf(tmp_path / "other.gguf")

    yarn = [
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.YARN),
        lambda writer: writer.add_rope_scaling_factor(4.0),
        lambda writer: writer.add_rope_scaling_orig_ctx_len(32),
        lambda writer: writer.add_rope_scaling_yarn_beta_fast(16.0),
    ]
    rope = config_from_hf(write_gguf(folders / "qwen3", tmp_path / "yarn.gguf", more=yarn)).rope
    assert (rope.scaling, rope.factor, rope.original_len) == ("yarn", 4.0, 32)
    assert (rope.low_freq_factor, rope.high_freq_factor) == (1, 16.0)

    linear = [
        lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
        lambda writer: writer.add_rope_scaling_factor(8.0),
    ]
    more = [*MORE["gemma3_text"], *linear]
    rope = config_from_hf(write_gguf(folders / "gemma3_text", tmp_path / "g.gguf", more=more)).rope
    assert (rope.scaling, rope.factor, rope.theta_local) == ("linear", 8.0, 10000.0)


def learned(text, pre, count=340):
    """A byte-level BPE of the tokenizers library, split as the kind `pre` is published."""
    steps = {
        "gpt-2": [],
        "smollm": [pre_tokenizers.Digits(individual_digits=True)],
        "qwen2": [pre_tokenizers.Split(tokenizers.Regex(QWEN2), "isolated")],
        "llama-bpe": [pre_tokenizers.Split(tokenizers.Regex(LLAMA3), "isolated")],
    }[pre]
    tokenizer = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("gpt-2", "smollm"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=count,
        special_tokens=["<begin>", "<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 3, trainer)
    return tokenizer


# As their tokenizer.json have them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace("{1,3}", "")


def adding(tokenizer, pre, more=lambda writer: None):
    """Returns a function that adds a learned tokenizer to a file, and the number of tokens."""
    parts = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(parts["vocab"], key=parts["vocab"].get)

    def add(writer):
        merges = [" ".join(pair) for pair in parts["merges"]]
        add_bpe(writer, tokens, merges, {0: 3, 1: 3}, pre)
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(1)
        more(writer)

    return add, len(tokens)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Writes a small model with a tokenizer; returns the file."""
    root = tmp_path_factory.mktemp("small")
    made = {}

    def write(name, add, count, **options):
        if count not in made:
            config = with_fields(CONFIGS["llama"], vocab_size=count)
            to_hf(noisy_params(config), config, root / f"of-{count}")
            made[count] = root / f"of-{count}"
        (root / name).mkdir(exist_ok=True)
        return write_gguf(made[count], root / name / "model.gguf", tokenizer=add, **options)

    return write


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_byte_level_tokens_are_those_of_the_published_tokenizer(small, pre):
    tokenizer = learned(TEXT, pre)
    path = small(pre, *adding(tokenizer, pre))
    read = load_tokenizer(path)
    for text in (TEXT, "1234 cats", "e\u0301 don'T", "<end> x <begin><end>", "\n\n \n sat", ""):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert read.encode(text).tolist() == ids, text
        if pre != "qwen2":
            assert read.decode(ids) == tokenizer.decode(ids, skip_special_tokens=False)
    assert read.eos_ids == (1,)
    bos_ids = ()
    if pre == "llama-bpe":
        bos_ids = (0,)
    assert read.bos_ids == bos_ids


@pytest.mark.parametrize(("pre", "wanted"), [("llama-bpe", [4]), ("gpt-2", [0, 1, 2])])
def test_a_word_that_is_a_token_is_one_with_llama_3(small, pre, wanted):
    """Even where no merges make it."""

    def add(writer):
        add_bpe(writer, [*"abc", "<begin>", "abc"], [], {3: 3}, pre)
        writer.add_bos_token_id(3)

    assert load_tokenizer(small(f"word-{pre}", add, 5)).encode("abc").tolist() == wanted


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [("gpt-2", [4]), ("smollm", [0, 1, 0, 1]), ("qwen2", [0, 1, 0, 1]), ("llama-bpe", [5, 1])],
)
def test_digits_stand_together_as_the_kind_says(small, pre, wanted):
    """Merges make 12, 1212 and 121 of them, where the split lets them."""

    def add(writer):
        tokens = ["1", "2", "<begin>", "12", "1212", "121"]
        merges = ["1 2", "12 12", "12 1"]
        add_bpe(writer, tokens, merges, {2: 3}, pre)
        writer.add_bos_token_id(2)

    assert load_tokenizer(small(f"digits-{pre}", add, 6)).encode("1212").tolist() == wanted


def test_special_tokens_and_the_chat_template(small):
    def more(writer):
        writer.add_add_bos_token(True)
        writer.add_eot_token_id(9)
        writer.add_pad_token_id(3)
        writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")

    tokenizer = learned(TEXT, "gpt-2")
    path = small("special", *adding(tokenizer, "gpt-2", more))
    read = load_tokenizer(path)
    assert (read.bos_ids, read.eos_ids) == ((0,), (1, 9))
    template = load_chat(path)
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "<begin>x"
    imported = read_imported(path)
    assert imported.kind == "llama" and imported.template == template.text
    assert imported.config["pad_token_id"] == 3 and imported.config["eos_token_id"] == [1, 9]
    assert imported.special_tokens["bos_token"] == "<begin>"
    plain = tokenizers.Tokenizer.from_file(str(folder_of(path) / "tokenizer.json"))
    assert plain.encode("cat").ids[0] == 0
    assert folder_of(path) == folder_of(path)


def slow_pieces(text, scores):
    """SentencePiece's BPE: the two neighbours of the best score are joined, until none have one."""
    pieces = list(text)
    while True:
        found = [
            (scores[left + right], -at)
            for at, (left, right) in enumerate(zip(pieces, pieces[1:], strict=False))
            if left + right in scores
        ]
        if not found:
            return pieces
        at = -max(found)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


@pytest.mark.parametrize("is_led", [True, False])
def test_tokens_of_sentencepiece(small, is_led):
    words = ["▁t", "he", "▁the", "at", "▁c", "▁cat", "at▁", "ca", "s▁", "▁s", "▁sat", "▁▁", "tt"]
    letters = sorted(set("▁thecasmno"))
    normal = [*words, *letters]
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *normal]
    scores = [0.0] * 259 + [-float(number) for number in range(len(normal))]
    types = [2, 3, 3] + [6] * 256 + [1] * len(normal)

    def add(writer):
        writer.add_tokenizer_model("llama")
        writer.add_token_list(tokens)
        writer.add_token_scores(scores)
        writer.add_token_types(types)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_add_space_prefix(is_led)

    read = load_tokenizer(small(f"pieces-{is_led}", add, len(tokens)))
    table = dict(zip(normal, scores[259:], strict=True))
    for text in ("the cat sat", " the  cats", "cat on mat", "tttt", "a  cat"):
        spelled = text.replace(" ", "▁")
        if is_led:
            spelled = "▁" + spelled
        ids = read.encode(text)
        assert [tokens[number] for number in ids] == slow_pieces(spelled, table), text
        assert read.decode(ids) == text
    assert [tokens[number] for number in read.encode("é")][-2:] == ["<0xC3>", "<0xA9>"]
    assert (read.bos_ids, read.eos_ids) == ((1,), (2,))


def test_a_tokenizer_beside_the_file_is_taken_if_it_is_the_same(small):
    tokenizer = learned(TEXT, "gpt-2")
    add, count = adding(tokenizer, "unheard-of")
    path = small("beside", add, count)
    with pytest.raises(
        UsageError,
        match=r"pre='unheard-of'; expected one of gpt-2, smollm, .* the model's tokenizer",
    ):
        load_tokenizer(path)
    tokenizer.save(str(path.parent / "tokenizer.json"))
    assert load_tokenizer(path).encode(TEXT).tolist() == tokenizer.encode(TEXT).ids
    other = small("other", add, count)
    learned(TEXT[::-1], "gpt-2").save(str(other.parent / "tokenizer.json"))
    with pytest.raises(
        UsageError, match="which it is not in .*; expected the tokenizer of that model"
    ):
        load_tokenizer(other)


WRONG = {
    "another architecture": (
        dict(arch="mamba"),
        "is of architecture 'mamba'; expected a GGUF file of llama, qwen2",
    ),
    "a part": (
        dict(more=[lambda writer: writer.add_uint16("split.count", 3)]),
        "is one of 3 files; expected the one",
    ),
    "an adapter": (
        dict(more=[lambda writer: writer.add_type("adapter")]),
        "general.type='adapter'; expected a model",
    ),
    "no layers": (dict(without=["block_count"]), "lacks llama.block_count"),
    "layers that differ": (
        dict(without=["feed_forward_length"], more=[lambda w: w.add_feed_forward_length([96, 64])]),
        r"feed_forward_length=\[96, 64\]; expected one value of all layers",
    ),
    "an unknown key": (
        dict(more=[lambda writer: writer.add_uint32("llama.expert_count", 8)]),
        "llama.expert_count=8, which is not honoured here",
    ),
    "another vocabulary": (
        dict(
            without=["vocab_size"], more=[lambda writer: writer.add_uint32("llama.vocab_size", 41)]
        ),
        "llama.vocab_size differs from the 40 rows",
    ),
    "wide values": (
        dict(
            without=["attention.value_length"],
            more=[lambda w: w.add_uint32("llama.attention.value_length", 8)],
        ),
        "attention.value_length=8; expected 16",
    ),
    "half-turned heads": (
        dict(
            without=["rope.dimension_count"],
            more=[lambda writer: writer.add_rope_dimension_count(8)],
        ),
        "rope.dimension_count=8 of heads of 16; expected the same",
    ),
    "another tokenizer": (
        dict(
            tokenizer=lambda writer: (
                writer.add_tokenizer_model("bert"),
                writer.add_token_list(["a"]),
            )
        ),
        "tokenizer.ggml.model='bert'; expected gpt2, llama, or the model's tokenizer.json",
    ),
    "no tokenizer": (
        dict(tokenizer=lambda writer: None),
        "has no tokenizer.ggml.tokens; expected a tokenizer",
    ),
    "a token twice": (
        dict(tokenizer=lambda writer: add_bpe(writer, ["a", "a"], [])),
        "has a token twice; expected tokens that differ",
    ),
    "an end that is no token": (
        dict(tokenizer=lambda w: (add_bpe(w, ["a", "b"], []), w.add_eos_token_id(2))),
        "eos_token_id=2; expected one of the 2 tokens",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_are_rejected(folders, tmp_path, name, monkeypatch):
    options, sentence = WRONG[name]
    options = dict(options)
    arch = options.pop("arch", None)
    if arch:
        monkeypatch.setitem(
            write_gguf.__globals__["ARCHITECTURES"], "llama", (arch, gguf.MODEL_ARCH.LLAMA)
        )
    path = write_gguf(folders / "llama", tmp_path / "model.gguf", **options)
    with pytest.raises(UsageError, match=sentence):
        from_hf(path)


def test_an_unknown_key_is_passed_over_where_that_is_asked_for(folders, tmp_path):
    more = [lambda writer: writer.add_uint32("llama.expert_count", 8)]
    path = write_gguf(folders / "llama", tmp_path / "model.gguf", more=more)
    with pytest.warns(UserWarning, match="llama.expert_count=8, which are not honoured"):
        assert from_hf(path, dtype="float32", strict=False)[0] == CONFIGS["llama"]


def test_damaged_files(folders, tmp_path):
    path = write_gguf(folders / "llama", tmp_path / "model.gguf", "Q8_0")
    whole = path.read_bytes()
    broken = tmp_path / "broken.gguf"
    for size in (4, 12, 200, 3000, len(whole) - 5):
        broken.write_bytes(whole[:size])
        with pytest.raises(UsageError, match="broken.gguf is not a whole GGUF file: "):
            from_hf(broken)
    broken.write_bytes(whole[:4] + b"\x09" + whole[5:])
    with pytest.raises(UsageError, match="is GGUF of version 9; expected 2 or 3"):
        from_hf(broken)
    broken.write_bytes(b"PK\x03\x04")
    with pytest.raises(UsageError, match=r"begins with b'PK\\x03\\x04'; expected a GGUF file"):
        from_hf(broken)


def test_a_file_that_changed_is_read_again(folders, tmp_path):
    path = write_gguf(folders / "llama", tmp_path / "model.gguf")
    assert config_from_hf(path).norm.eps == 1e-5
    write_gguf(folders / "qwen3", path)
    assert config_from_hf(path).attention.qk_norm


def test_without_the_package_one_sentence_says_what_to_install(folders, tmp_path, monkeypatch):
    path = write_gguf(folders / "llama", tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"needs the package gguf; pip install 'jaxpar\[gguf\]'\."):
        from_hf(path)


def test_nothing_is_left_behind(folders, tmp_path, monkeypatch):
    at_end = []
    monkeypatch.setattr("atexit.register", lambda *call, **options: at_end.append((call, options)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    path = write_gguf(folders / "llama", tmp_path / "model.gguf")
    folder = folder_of(path)
    assert folder.parent.parent == tmp_path / "scratch" and (folder / "model.gguf").is_symlink()
    (((function, *values), options),) = at_end
    function(*values, **options)
    assert not list((tmp_path / "scratch").iterdir()) and path.is_file()


def test_what_is_no_file_of_gguf_stays_as_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "absent.gguf"):
        assert folder_of(path) == path
