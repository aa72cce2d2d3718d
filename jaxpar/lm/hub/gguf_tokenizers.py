"""Tokenizers of GGUF files as `tokenizer.json`, of byte-level BPE and of SentencePiece's BPE.

Names of metadata are from llama.cpp's `gguf-py`. Texts are split as in `llama-vocab.cpp`, which
splits them as the models' own `tokenizer.json`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jaxpar.lm.hub.gguf_architectures import Contents, Metadata
from jaxpar.lm.hub.keys import brief
from jaxpar.types import UsageError

NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER = 4
"""Types of tokens, of `gguf.TokenType`."""

WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,%d}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Split of Llama 3 and of Qwen 2, which differ in the number of digits of a piece."""


class TextSplit(NamedTuple):
    """Rule by which a text is split before BPE, and the use of the vocabulary.

    Attributes:
      digits: Largest number of digits of a piece; 0 leaves digits to GPT-2's rule.
      is_gpt2: Whether GPT-2's rule splits, behind single digits if `digits` is 1.
      ignores_merges: Whether a word that is a token is never put together.
      adds_bos: Whether texts begin with BOS where the file does not say it.
      is_composed: Whether texts are brought to the normal form C before.
    """

    digits: int = 0
    is_gpt2: bool = True
    ignores_merges: bool = False
    adds_bos: bool = False
    is_composed: bool = False


LLAMA3 = TextSplit(digits=3, is_gpt2=False, ignores_merges=True, adds_bos=True)
QWEN2 = TextSplit(digits=1, is_gpt2=False, is_composed=True)
SPLITS = {
    "gpt-2": TextSplit(),
    "smollm": TextSplit(digits=1),
    "starcoder": TextSplit(digits=1),
    "refact": TextSplit(digits=1),
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
}
"""Splits by `tokenizer.ggml.pre`."""

SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""Special tokens: names in `tokenizer_config.json`, and in the metadata after `tokenizer.ggml.`."""


def write_tokenizer(contents: Contents, folder: Path) -> dict[str, object]:
    """Writes a file's tokenizer and its chat template into a folder.

    A `tokenizer.json` in the GGUF file's folder is taken in place of the file's own, once its
    tokens are the same ones.

    Args:
      contents: The GGUF file.
      folder: Folder to write.

    Returns:
      Keys of `config.json` about special tokens.

    Raises:
      UsageError: The tokenizer has another kind, or other tokens than the model.
    """
    values = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in contents.values.items()
        if name.startswith("tokenizer.")
    }
    tokens = values.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise UsageError(f"{contents.path} has no tokenizer.ggml.tokens; expected a tokenizer.")
    beside = contents.path.parent / "tokenizer.json"
    split = SPLITS.get(values.get("pre", ""), TextSplit())
    adds = values.get("add_bos_token", values.get("model") == "llama" or split.adds_bos)
    named = _special_tokens(contents, values, tokens)
    if beside.is_file():
        tokenizer = _beside(beside, contents, tokens)
    elif values.get("model") == "gpt2":
        tokenizer = _byte_level(contents, values, tokens)
    elif values.get("model") == "llama":
        tokenizer = _sentencepiece(contents, values, tokens)
    else:
        kind = brief(values.get("model"))
        raise UsageError(
            f"{contents.path}: tokenizer.ggml.model={kind}; expected gpt2, llama, "
            "or the model's tokenizer.json in the folder of the file."
        )
    if adds and not beside.is_file():
        _add_bos(contents, tokenizer, named)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = named | {
        "add_bos_token": bool(adds),
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    template = values.get("tokenizer.chat_template", "")
    if template:
        (folder / "chat_template.jinja").write_text(template, "utf-8")
    return _ids(values)


def _ids(values: Metadata) -> dict[str, object]:
    """Returns keys of `config.json`: a text ends with EOS or with the end of a turn."""
    out: dict[str, object] = {}
    ends = [values[key] for key in ("eos_token_id", "eot_token_id") if key in values]
    ends = list(dict.fromkeys(ends))
    if ends:
        out["eos_token_id"] = ends
        if len(ends) == 1:
            out["eos_token_id"] = ends[0]
    for key, name in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if name in values:
            out[key] = values[name]
    return out


def _special_tokens(contents: Contents, values: Metadata, tokens: Sequence[str]) -> dict[str, str]:
    """Returns the special tokens by their names in `tokenizer_config.json`."""
    found = {}
    for key, name in SPECIAL.items():
        if name not in values:
            continue
        if not 0 <= values[name] < len(tokens):
            raise UsageError(
                f"{contents.path}: tokenizer.ggml.{name}={values[name]}; expected one of the "
                f"{len(tokens)} tokens."
            )
        found[key] = tokens[values[name]]
    return found


def _byte_level(
    contents: Contents, values: Metadata, tokens: Sequence[str]
) -> tokenizers.Tokenizer:
    """Returns a byte-level BPE."""
    name = values.get("pre")
    if name not in SPLITS:
        raise UsageError(
            f"{contents.path}: tokenizer.ggml.pre={brief(name)}; expected one of "
            f"{', '.join(SPLITS)}, or the model's tokenizer.json in the folder of the file."
        )
    split = SPLITS[name]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=_vocabulary(contents, tokens),
            merges=[tuple(merge.split(" ", 1)) for merge in values.get("merges", [])],
            ignore_merges=split.ignores_merges,
        )
    )
    steps: list[Any] = []
    if not split.is_gpt2:
        pattern = tokenizers.Regex(WORDS % split.digits)
        steps.append(pre_tokenizers.Split(pattern, "isolated"))
    elif split.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.is_gpt2))
    if split.is_composed:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(contents, tokenizer, values, tokens)
    return tokenizer


def _sentencepiece(
    contents: Contents, values: Metadata, tokens: Sequence[str]
) -> tokenizers.Tokenizer:
    """Returns SentencePiece's BPE; its merges are the pairs that make a token, best first."""
    scores = values.get("scores", [])
    types = values.get("token_type", [])
    if len(scores) != len(tokens) or len(types) != len(tokens):
        raise UsageError(
            f"{contents.path} has {len(scores)} scores and {len(types)} types of "
            f"{len(tokens)} tokens; expected one of each."
        )
    vocab = _vocabulary(contents, tokens)
    # Of one score the pair of the smaller numbers comes first, as transformers orders them.
    pairs = [
        (-scores[number], vocab[token[:cut]], vocab[token[cut:]])
        for number, token in enumerate(tokens)
        if types[number] == NORMAL
        for cut in range(1, len(token))
        if token[:cut] in vocab and token[cut:] in vocab
    ]
    unknown = None
    if "unknown_token_id" in values:
        unknown = tokens[values["unknown_token_id"]]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(tokens[left], tokens[right]) for _, left, right in sorted(pairs)],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    is_led = values.get("add_space_prefix", True)
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if is_led:
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ends)
    _add_tokens(contents, tokenizer, values, tokens)
    return tokenizer


def _beside(file: Path, contents: Contents, tokens: Sequence[str]) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a file, after a check that it has the model's tokens."""
    try:
        tokenizer = tokenizers.Tokenizer.from_str(file.read_text("utf-8"))
    except Exception as error:  # the library raises no narrower class
        raise UsageError(f"{file} is not a tokenizer of the tokenizers library: {error}") from error
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number >= len(tokens) or tokens[number] != token:
            raise UsageError(
                f"{file}: token {number} is {brief(token)}, which it is not in {contents.path}; "
                "expected the tokenizer of that model, or no tokenizer.json in its folder."
            )
    return tokenizer


def _vocabulary(contents: Contents, tokens: Sequence[str]) -> dict[str, int]:
    """Returns the numbers of tokens."""
    vocab = {token: number for number, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise UsageError(f"{contents.path} has a token twice; expected tokens that differ.")
    return vocab


def _add_tokens(
    contents: Contents,
    tokenizer: tokenizers.Tokenizer,
    values: Metadata,
    tokens: Sequence[str],
) -> None:
    """Adds the tokens that no merges make, so that they are found in texts as they are spelled."""
    types = values.get("token_type", [])
    for number, kind in enumerate(types):
        if kind not in (UNKNOWN, CONTROL, USER):
            continue
        is_special = kind != USER
        added = tokenizers.AddedToken(tokens[number], special=is_special, normalized=False)
        if is_special:
            tokenizer.add_special_tokens([added])
        else:
            tokenizer.add_tokens([added])
    if tokenizer.get_vocab_size() != len(tokens):
        raise UsageError(
            f"{contents.path} has token types of more than its tokens; expected one of each token."
        )


def _add_bos(contents: Contents, tokenizer: tokenizers.Tokenizer, named: Mapping[str, str]) -> None:
    """Has texts begin with BOS, as transformers looks for it."""
    bos = named.get("bos_token")
    if bos is None:
        raise UsageError(
            f"{contents.path}: texts begin with BOS, and tokenizer.ggml.bos_token_id is absent; "
            "expected it."
        )
    number = tokenizer.token_to_id(bos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, number)]
    )
