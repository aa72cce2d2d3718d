"""What `mode=export` writes: a folder that transformers loads, adapters that PEFT loads, or a file of arrays."""

import dataclasses
import pathlib
import re
import tempfile
from typing import Any

import jax

from jaxpar.fields import OneOf, check_fields, field
from jaxpar.io import write_arrays
from jaxpar.lm import merge_adapters, to_hf, to_peft
from jaxpar.lm.text import Bpe, Tokenizer
from jaxpar.types import PyTree, UsageError

from .. import runner
from ..runner import say
from . import initial_model

ARRAYS = (".npz", ".safetensors")
NARROW = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class ExportConfig:
    """Options of mode=export.

    Attributes:
      dtype: Type of the numbers: "bfloat16", "float16" or "float32"; empty for that of the
        folder that the run began with, or float32 without one.
    """

    dtype: str = field("", OneOf(("", *NARROW)))

    def __post_init__(self):
        """Rejects a type of numbers that there is none of."""
        check_fields(self, "export.")


def checked(out: str, dtype: str = "") -> pathlib.Path:
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
    if path.suffix == ".npz" and dtype == "bfloat16":
        raise UsageError(
            f"export.dtype=bfloat16: out={out} is of NumPy, which has no such numbers; expected "
            "float16, float32, or a .safetensors file."
        )
    return path


def write(
    out: pathlib.Path,
    config: Any,  # `experiments.lm.Config`, which imports this module
    params: PyTree,
    tokenizer: Tokenizer,
    template: str = "",
    *,
    adapters: PyTree = None,
) -> None:
    """Writes parameters; those of adapters alone to a folder, unless `adapter.merge` says that they are merged.

    Args:
      out: Folder or file to write.
      config: Configuration with the model, the adapter, what the run began with (`init`), and the
        folder that the parameters are of (`run`).
      params: The parameters.
      tokenizer: Tokenizer of the model.
      template: Chat template in place of the one that the run trained with.
      adapters: What the run trained, if it is one of adapters.
    """
    run = pathlib.Path(config.run)
    adapter = config.adapter
    merged = merge_adapters(params)
    if out.suffix in ARRAYS:
        write_arrays(out, in_dtype(merged, config.export.dtype))
        say(f"written    {runner.short(out)}")
        return
    imported = initial_model.imported_of(run, config.strict)
    if adapter.kind != "none" and not adapter.merge:
        is_folder = config.init.startswith("hf:")
        base = ""
        if is_folder:
            base = config.init.removeprefix("hf:")
        to_peft(params, config.model, out, adapter, base, imported=imported, adapters=adapters)
        say(f"written    {runner.short(out)}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        file = None
        if isinstance(tokenizer, Bpe):
            file = pathlib.Path(scratch) / "tokenizer.json"
        if isinstance(tokenizer, Bpe):
            tokenizer.save(str(file))
        to_hf(
            merged,
            config.model,
            out,
            dtype=config.export.dtype,
            tokenizer=file,
            imported=imported,
        )
        if isinstance(tokenizer, Bpe) and jax.process_index() == 0:
            initial_model.write_texts(run, out, tokenizer, config.data.template, template)
    say(f"written    {runner.short(out)}")


def in_dtype(params: PyTree, dtype: str) -> PyTree:
    """Returns parameters in a type of numbers; as they are where it is empty."""
    if not dtype:
        return params
    return jax.tree.map(lambda x: x.astype(dtype), params)
