"""A record of what a Hugging Face folder said, kept beside whatever was made from it."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from jaxpar.lm.config import DTYPES
from jaxpar.lm.hub.architectures import KINDS, read_config
from jaxpar.lm.hub.gguf_files import folder_of
from jaxpar.lm.hub.keys import NAMED_TEXTS, TABLE, TEXT, brief, check, read_json
from jaxpar.lm.hub.stored import FILE_DTYPES, stored
from jaxpar.lm.text.chat import load_chat
from jaxpar.types import UsageError

__all__ = ["FILE", "Imported", "load_imported", "read_imported", "save_imported"]

FILE = "imported.json"
"""Name of the record in a run folder."""


@dataclasses.dataclass(frozen=True)
class Imported:
    """A Hugging Face folder's own words, which an export of what was made from it repeats.

    Attributes:
      kind: `model_type` of the architecture, such as "phi3": two architectures may describe the
        same model, but their tensors and their adapters have other names.
      config: `config.json` as it was.
      tokenizer: SHA-256 of `tokenizer.json`; empty where there is none.
      template: Text of the chat template; empty where there is none.
      special_tokens: Special tokens by name, such as {"bos_token": "<s>"}.
      dtype: Type of the numbers, of `jaxpar.lm.config.DTYPES`.
    """

    kind: str
    config: Mapping[str, Any]  # any JSON
    tokenizer: str = ""
    template: str = ""
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    dtype: str = "float32"

    def __post_init__(self) -> None:
        """Rejects kinds and types of numbers that there are none of."""
        kinds = [arch.model_type for arch in KINDS]
        if self.kind not in kinds:
            raise UsageError(
                f"kind={brief(self.kind)}: no architecture; expected {', '.join(kinds)}."
            )
        if self.dtype not in DTYPES:
            raise UsageError(
                f"dtype={brief(self.dtype)}: no type of numbers; expected {', '.join(DTYPES)}."
            )


def read_imported(folder: str | Path, *, strict: bool = True) -> Imported:
    """Reads a Hugging Face folder's record; no parameter is read.

    Args:
      folder: Folder of `config.json`, and of a tokenizer and a chat template if it has them; or a
        GGUF file.
      strict: Whether unknown keys of `config.json` are rejected, as by `from_hf`.

    Raises:
      UsageError: `config.json` or another file is absent or damaged, or cannot be honoured.
    """
    folder = folder_of(folder)
    arch, _ = read_config(folder, "float32", strict)
    values = read_json(folder / "config.json")
    file = folder / "tokenizer.json"
    template = load_chat(folder)
    return Imported(
        kind=arch.model_type,
        config=values,
        tokenizer=hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
        template="" if template is None else template.text,
        special_tokens=_special_tokens(folder / "tokenizer_config.json"),
        dtype=_dtype(folder, values),
    )


def save_imported(imported: Imported, run: str | Path) -> None:
    """Writes the record into a run folder, whole or not at all."""
    file = Path(run) / FILE
    partial = file.with_name(f"{FILE}.partial-{os.getpid()}")
    partial.write_text(json.dumps(dataclasses.asdict(imported), indent=1) + "\n", "utf-8")
    partial.replace(file)


def load_imported(run: str | Path) -> Imported | None:
    """Returns the record in a run folder; None where there is none, as in older runs.

    Raises:
      UsageError: The file is damaged.
    """
    file = Path(run) / FILE
    if not file.is_file():
        return None
    values = read_json(file)
    kinds = {
        "kind": TEXT,
        "config": TABLE,
        "tokenizer": TEXT,
        "template": TEXT,
        "special_tokens": NAMED_TEXTS,
        "dtype": TEXT,
    }
    for key, kind in kinds.items():
        check(file, key, values.get(key), kind)
    return Imported(
        kind=values["kind"],
        config=values["config"],
        tokenizer=values["tokenizer"],
        template=values["template"],
        special_tokens=values["special_tokens"],
        dtype=values["dtype"],
    )


def _special_tokens(file: Path) -> dict[str, str]:
    """Returns the special tokens of a `tokenizer_config.json`, by name."""
    settings = {}
    if file.is_file():
        settings = read_json(file)
    found: dict[str, str] = {}
    for key, value in settings.items():
        text = value
        if isinstance(value, dict):
            text = value.get("content")
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _dtype(folder: Path, values: Mapping[str, object]) -> str:
    """Returns the type of a folder's numbers, by `config.json`, else by its first tensor."""
    for key in ("dtype", "torch_dtype"):
        name = values.get(key)
        if name in DTYPES:
            return str(name)
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy"):
                tensors = stored(path)
        except (OSError, SafetensorError):
            continue  # reading the parameters names the damage
        for tensor in tensors.values():
            if tensor.dtype in FILE_DTYPES:
                return FILE_DTYPES[tensor.dtype].name
    return "float32"
