"""`init=hf:folder` and `init=run:folder`: a run whose first parameters, model and tokenizer are those of a folder."""

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.lm import LMConfig, Trainer, config_from_hf, from_hf
from jaxpar.lm.text import Bpe, Tokenizer, load_tokenizer
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


def source(init: str, flag: str = "init") -> pathlib.Path | None:
    """Returns the folder that `init`, or a flag like it, names; None where there is none."""
    if not init:
        return None
    kind, _, name = init.partition(":")
    if kind not in ("hf", "run") or not name:
        nothing = "nothing to start from random numbers" if flag == "init" else "nothing"
        raise UsageError(f"{flag}={init} names no {'start' if flag == 'init' else 'model'}; "
                         f"legal are hf:folder, run:folder, or {nothing}.")  # fmt: skip
    return pathlib.Path(name)


def with_model(model: LMConfig, folder: pathlib.Path) -> LMConfig:
    """Returns the model of a Hugging Face folder, computed as `model` says."""
    return as_told(config_from_hf(folder, dtype=model.dtype), model)


def as_told(found: LMConfig, model: LMConfig) -> LMConfig:
    """Returns a model that was found, computed as `model` is: in its dtype, by its execution."""
    return dataclasses.replace(found, dtype=model.dtype, execution=model.execution)


def kept(run: pathlib.Path) -> pathlib.Path | None:
    """Returns the run's copy of `FILES`, once it has one."""
    return run / "init" if (run / "init" / FILES[0]).is_file() else None


def kept_tokenizer(run: pathlib.Path, given: pathlib.Path | None) -> Bpe | None:
    """Returns the tokenizer that the run keeps, copied from the folder `given` the first time; None without either."""
    if given is not None and kept(run) is None:
        tokenizer = load_tokenizer(given)  # a folder without one leaves nothing behind
        if jax.process_index() == 0:
            (run / "init").mkdir(parents=True, exist_ok=True)
            for name in reversed(FILES):  # the one that `kept` looks for comes last
                if (given / name).is_file():
                    shutil.copyfile(given / name, run / "init" / name)
        return tokenizer
    copy = kept(run)
    return None if copy is None else load_tokenizer(copy)


def keep_of_run(run: pathlib.Path, given: pathlib.Path, tokenizer: Tokenizer) -> None:
    """Keeps the tokenizer of the run `given`, and what it keeps itself of a folder's texts, the first time."""
    if kept(run) is None and isinstance(tokenizer, Bpe) and jax.process_index() == 0:
        (run / "init").mkdir(parents=True, exist_ok=True)
        for name in FILES[1:]:
            if (given / "init" / name).is_file():
                shutil.copyfile(given / "init" / name, run / "init" / name)
        if (given / "init" / FILES[0]).is_file():
            shutil.copyfile(given / "init" / FILES[0], run / "init" / FILES[0])
        else:
            tokenizer.save(str(run / "init" / FILES[0]))


def write_texts(run: pathlib.Path, out: pathlib.Path, tokenizer: Bpe) -> None:
    """Adds to an exported folder how its texts begin, end and take turns, as the run's first folder said it."""
    for name in FILES[1:4]:
        if (run / "init" / name).is_file():
            shutil.copyfile(run / "init" / name, out / name)
    ends = {"bos_token_id": tokenizer.bos_ids[:1], "eos_token_id": tokenizer.eos_ids}
    if not (out / FILES[3]).exists() and any(ends.values()):
        given = {key: ids[0] if len(ids) == 1 else list(ids) for key, ids in ends.items() if ids}
        (out / FILES[3]).write_text(json.dumps(given, indent=2) + "\n")


def read_parameters(trainer: Trainer, folder: pathlib.Path) -> PyTree:
    """Reads the parameters of a Hugging Face folder to the ambient mesh."""
    dtype: Any = jnp.promote_types(trainer.model.dtype, jnp.float32)
    return from_hf(folder, dtype=trainer.model.dtype, param_dtype=dtype)[1]


def first_state(trainer: Trainer, seed: int, read: Callable[[], PyTree]) -> PyTree:
    """Returns the state that training begins with from what `read` finds; `seed` draws adapters."""
    shapes = jax.eval_shape(trainer.init, jax.random.key(0))
    begin = functools.partial(trainer.begin, key=jax.random.key(seed))
    return jax.jit(begin, out_shardings=named_shardings(shapes, trainer.axes()), donate_argnums=0)(
        read()
    )
