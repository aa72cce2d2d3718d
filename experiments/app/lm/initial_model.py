"""`init=hf:folder` and `init=run:folder`: a run whose first parameters, model and tokenizer are those of a folder."""

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import multihost_utils

from jaxpar.lm import (
    Imported,
    LMConfig,
    Trainer,
    config_from_hf,
    from_hf,
    load_imported,
    read_imported,
    save_imported,
)
from jaxpar.lm.hub import gguf_files
from jaxpar.lm.text import (
    Bpe,
    DataConfig,
    Tokenizer,
    load_chat,
    load_tokenizer,
    open_template,
)
from jaxpar.mesh import named_shardings
from jaxpar.types import PyTree, UsageError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""What says how a folder's texts become tokens; a run keeps a copy, so that it needs the folder no longer."""

TEMPLATE = FILES[2]


def source(init: str, flag: str = "init") -> pathlib.Path | None:
    """Returns the folder that `init`, or a flag like it, names; None where there is none.

    For a GGUF file it is a folder that is made of it.
    """
    if not init:
        return None
    kind, _, name = init.partition(":")
    if kind not in ("hf", "run") or not name:
        nothing = "nothing to start from random numbers" if flag == "init" else "nothing"
        raise UsageError(f"{flag}={init} names no {'start' if flag == 'init' else 'model'}; "
                         f"legal are hf:folder, run:folder, or {nothing}.")  # fmt: skip
    return gguf_files.folder_of(name)


def folder_named(name: str) -> str:
    """Returns a folder as a flag names it, for a GGUF file one that is made of it; "" for none."""
    if not name:
        return name
    return str(gguf_files.folder_of(name))


def with_model(model: LMConfig, folder: pathlib.Path, strict: bool = True) -> LMConfig:
    """Returns the model of a Hugging Face folder, computed as `model` says."""
    return as_told(config_from_hf(folder, dtype=model.dtype, strict=strict), model)


def as_told(found: LMConfig, model: LMConfig) -> LMConfig:
    """Returns a model that was found, computed as `model` is: in its dtype, by its execution."""
    return dataclasses.replace(found, dtype=model.dtype, execution=model.execution)


def kept(run: pathlib.Path) -> pathlib.Path | None:
    """Returns the run's copy of `FILES`, once it has one."""
    return run / "init" if (run / "init" / FILES[0]).is_file() else None


def kept_tokenizer(
    run: pathlib.Path, given: pathlib.Path | None, template: str = "", strict: bool = True
) -> Bpe | None:
    """Returns the tokenizer that a run keeps; None where it keeps none.

    Args:
      run: Folder of the run.
      given: Hugging Face folder that it begins with, of which the first call keeps a copy of
        `FILES` and a record; None for a run that begins with none.
      template: Chat template in place of the folder's, as of `data.template`.
      strict: Whether keys of `config.json` that nobody knows are rejected.
    """
    if given is not None and kept(run) is None:
        tokenizer = load_tokenizer(given)  # a folder without one leaves nothing behind
        imported = read_imported(given, strict=strict)
        text = ""
        if template:
            text = open_template(template).text
        if jax.process_index() == 0:
            (run / "init").mkdir(parents=True, exist_ok=True)
            save_imported(imported, run)
            _copy(FILES[1:], given, run / "init")
            if text:
                (run / "init" / TEMPLATE).write_text(text, "utf-8")
            _copy(FILES[:1], given, run / "init")  # the one that `kept` looks for comes last
        _wait_for_all()
        return tokenizer
    copy = kept(run)
    return None if copy is None else load_tokenizer(copy)


def keep_of_run(
    run: pathlib.Path, given: pathlib.Path, tokenizer: Tokenizer, template: str = ""
) -> None:
    """Keeps the tokenizer of the run `given`, and what it keeps itself of a folder's texts, the first time.

    `template` is a chat template in place of the one that the run `given` keeps.
    """
    if kept(run) is not None or not isinstance(tokenizer, Bpe):
        return
    imported = load_imported(given)
    text = ""
    if template and imported:
        text = open_template(template).text
    if jax.process_index() == 0:
        (run / "init").mkdir(parents=True, exist_ok=True)
        if imported is not None:
            save_imported(imported, run)
        _copy(FILES[1:], given / "init", run / "init")
        if text:
            (run / "init" / TEMPLATE).write_text(text, "utf-8")
        if (given / "init" / FILES[0]).is_file():
            _copy(FILES[:1], given / "init", run / "init")
        else:
            tokenizer.save(str(run / "init" / FILES[0]))
    _wait_for_all()


def _copy(names: Sequence[str], given: pathlib.Path, to: pathlib.Path) -> None:
    for name in names:
        if (given / name).is_file():
            shutil.copyfile(given / name, to / name)


def _wait_for_all() -> None:
    """Waits until process 0 has written what the others read."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("experiments.app.lm.initial_model")


def imported_of(folder: pathlib.Path, strict: bool = True) -> Imported | None:
    """Returns the record of a Hugging Face folder, or the one in a run; None in runs without."""
    if (folder / "config.json").is_file():
        return read_imported(folder, strict=strict)
    return load_imported(folder)


def with_template(data: DataConfig, folder: pathlib.Path | None) -> DataConfig:
    """Returns `data` with the chat template of a run, or of a Hugging Face folder.

    A run whose record says what its folder was has its template in `init`, beside the special
    tokens that it names. A run without a record, as older ones, keeps the template of `data`.

    Args:
      data: Its own `template` counts for Hugging Face folders, and for runs without a record.
      folder: The run or the folder; None for neither.
    """
    if folder is None:
        return data
    is_hf = (folder / "config.json").is_file()
    if is_hf and data.template:
        return data
    if not is_hf and load_imported(folder) is None:
        return data
    texts = folder / "init"
    if is_hf:
        texts = folder
    if load_chat(texts) is None:
        return data
    return dataclasses.replace(data, template=str(texts))


def write_texts(
    run: pathlib.Path,
    out: pathlib.Path,
    tokenizer: Bpe,
    trained: str = "",
    given: str = "",
) -> None:
    """Adds to an exported folder how its texts begin, end and take turns, as the run trained on them.

    Args:
      run: Folder of the run, or a Hugging Face folder.
      out: The exported folder.
      tokenizer: The run's.
      trained: Chat template that the run trained with, as `data.template` names it; it is written
        where the folder has none and the file is still there.
      given: Chat template in place of all others.
    """
    texts = run / "init"
    if (run / "config.json").is_file():
        texts = run
    _copy(FILES[1:4], texts, out)
    if given:
        (out / TEMPLATE).write_text(open_template(given).text, "utf-8")
    elif trained and pathlib.Path(trained).exists() and load_chat(out) is None:
        (out / TEMPLATE).write_text(open_template(trained).text, "utf-8")
    ends = {"bos_token_id": tokenizer.bos_ids[:1], "eos_token_id": tokenizer.eos_ids}
    if not (out / FILES[3]).exists() and any(ends.values()):
        written = {key: ids[0] if len(ids) == 1 else list(ids) for key, ids in ends.items() if ids}
        (out / FILES[3]).write_text(json.dumps(written, indent=2) + "\n")


def read_parameters(trainer: Trainer, folder: pathlib.Path, strict: bool = True) -> PyTree:
    """Reads the parameters of a Hugging Face folder to the ambient mesh, as training has them."""
    dtype: Any = jnp.promote_types(trainer.model.dtype, jnp.float32)  # any number's type
    return from_hf(folder, dtype=trainer.model.dtype, param_dtype=dtype, strict=strict)[1]


def first_state(trainer: Trainer, seed: int, read: Callable[[], PyTree]) -> PyTree:
    """Returns the state that training begins with from what `read` finds; `seed` draws adapters."""
    shapes = jax.eval_shape(trainer.init, jax.random.key(0))
    begin = functools.partial(trainer.begin, key=jax.random.key(seed))
    return jax.jit(begin, out_shardings=named_shardings(shapes, trainer.axes()), donate_argnums=0)(
        read()
    )
