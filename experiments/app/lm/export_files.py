"""What `mode=export` writes: a folder that transformers loads, adapters that PEFT loads, or a file of arrays."""

import pathlib
import re
import tempfile

import jax

from jaxpar.io import write_arrays
from jaxpar.lm import AdapterConfig, LMConfig, merge_adapters, to_hf, to_peft
from jaxpar.lm.text import Bpe, Tokenizer
from jaxpar.types import PyTree, UsageError

from .. import runner
from ..runner import say
from . import initial_model

ARRAYS = (".npz", ".safetensors")


def checked(out: str) -> pathlib.Path:
    """Returns where to write, or refuses it before anything is read."""
    path = pathlib.Path(out)
    if not out:
        raise UsageError(
            "mode=export needs out= to name a folder to make, or a .safetensors or .npz file."
        )
    if re.fullmatch(r"\.[a-z]+", path.suffix) and path.suffix not in ARRAYS:
        raise UsageError(
            f"out={out} ends in {path.suffix}; legal are .safetensors, .npz and, for a folder, none."
        )
    return path


def write(
    out: pathlib.Path,
    run: str,
    model: LMConfig,
    adapter: AdapterConfig,
    params: PyTree,
    tokenizer: Tokenizer,
    base: str,
) -> None:
    """Writes parameters; those of adapters alone to a folder, unless `adapter.merge` says that they are merged.

    `run` is the folder that they come from, and `base` what its frozen model came from, as `init` names it.
    """
    if out.suffix in ARRAYS:
        write_arrays(out, merge_adapters(params))
    elif adapter.kind != "none" and not adapter.merge:
        to_peft(
            params, model, out, adapter, base.removeprefix("hf:") if base.startswith("hf:") else ""
        )
    else:
        with tempfile.TemporaryDirectory() as scratch:
            file = pathlib.Path(scratch) / "tokenizer.json" if isinstance(tokenizer, Bpe) else None
            if isinstance(tokenizer, Bpe):
                tokenizer.save(str(file))
            to_hf(merge_adapters(params), model, out, tokenizer=file)
            if isinstance(tokenizer, Bpe) and jax.process_index() == 0:
                initial_model.write_texts(pathlib.Path(run), out, tokenizer)
    say(f"written    {runner.short(out)}")
