"""Hugging Face folders <-> parameters, for the architectures of `jaxpar.lm.hub.architectures`."""

import functools
import itertools
import json
import math
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.typing import DTypeLike
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxpar.lm.config import DTYPES, LMConfig
from jaxpar.lm.hub.architectures import architecture_of, config_json, read_config
from jaxpar.lm.hub.folders import Architecture, Place
from jaxpar.lm.hub.gguf_files import FILE as GGUF
from jaxpar.lm.hub.gguf_files import PackedTensor, folder_of, packed_tensors
from jaxpar.lm.hub.imported import Imported, read_imported
from jaxpar.lm.hub.keys import brief, plain, read_json
from jaxpar.lm.hub.stored import (
    FILE_DTYPES,
    THREADS,
    Part,
    Stored,
    Wanted,
    exact,
    is_finite,
    laid,
    stored,
)
from jaxpar.lm.params import abstract, axes
from jaxpar.mesh import named_shardings
from jaxpar.types import PyTree, UsageError

__all__ = ["from_hf", "load_model", "to_hf"]


HEAD = "lm_head.weight"
Tensor: TypeAlias = Stored | PackedTensor
Bounds: TypeAlias = tuple[tuple[int, int], ...]
"""Begin and end along each axis."""


def from_hf(
    folder: str | Path,
    *,
    dtype: str = "bfloat16",
    param_dtype: DTypeLike = jnp.float32,
    strict: bool = True,
) -> tuple[LMConfig, PyTree]:
    """Reads a folder of `config.json` and safetensors, whole or in shards, of one of `architectures.KINDS`.

    Under `jaxpar.mesh.use_mesh` every device's slice is read from the files and placed at once; a process holds at most
    its own slices of one leaf besides. Without a mesh the leaves are ordinary arrays.

    Args:
      folder: As `save_pretrained` or `to_hf` writes it; tensors bfloat16, float16, float32 or float64. Or a GGUF
        file: its tensors are dequantised.
      dtype: Of computation, for `LMConfig.dtype`.
      param_dtype: Of the parameters.
      strict: Whether unknown keys of `config.json` are rejected; otherwise a warning
        names them.

    Returns:
      The model and its parameters. GPT-2's dropout is `resid_pdrop`; the others have none.

    Raises:
      UsageError: If a file is absent or damaged, the architecture is unknown, a key of `config.json` is not honoured, a
        tensor is missing, unexpected, misshapen or not finite, or a tied head is not the embedding.
    """
    return _read(folder_of(folder), dtype, param_dtype, strict, for_training=True)


def _read(
    folder: Path, dtype: str, param_dtype: DTypeLike, strict: bool, for_training: bool
) -> tuple[LMConfig, PyTree]:
    """Reads a folder; see `from_hf`.

    Memory of the CPU device that is not for training is that of the parameters and of 1 / 32 of them.
    """
    param_dtype = jnp.empty((), param_dtype).dtype
    arch, config = read_config(folder, dtype, strict)
    of = _Of(arch, config.stack().period)
    tensors, shifts = _find_tensors(folder, of, config), _shifts(of, config)

    shapes = abstract(config, param_dtype)
    leaves, structure = jax.tree.flatten(shapes)
    shardings = [None] * len(leaves)
    if not jax.sharding.get_mesh().empty:
        shardings = jax.tree.leaves(named_shardings(shapes, axes(config)))
    on_host = not for_training and jax.default_backend() == "cpu"
    total = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    most = max(total // (32 * THREADS), 2**16) if on_host else total

    def wanted() -> Iterator[Wanted]:
        for at, (name, leaf, sharding) in enumerate(
            zip(_flat(shapes), leaves, shardings, strict=True)
        ):
            whole = (slice(None),) * len(leaf.shape)
            indices = (
                {None: whole}
                if sharding is None
                else sharding.addressable_devices_indices_map(leaf.shape)
            )
            places: dict[tuple, list] = {}
            for device, index in indices.items():
                bounds = tuple(
                    cut.indices(size)[:2] for cut, size in zip(index, leaf.shape, strict=True)
                )
                places.setdefault(bounds, []).append(
                    device
                )  # read once for all devices that hold the same
            head = tensors.get(HEAD) if config.embedding.tied and name == "embedding" else None
            for bounds, devices in places.items():
                shape = tuple(stop - start for start, stop in bounds)
                parts = _parts(tensors, of, name, leaf, bounds, shifts[name], head, most)
                yield Wanted(at, shape, leaf.dtype, tuple(devices), parts)

    blocks: list[list] = [[] for _ in leaves]
    for leaf, block in laid(wanted(), on_host):
        blocks[leaf].append(block)
    arrays = [
        own[0]
        if sharding is None
        else jax.make_array_from_single_device_arrays(leaf.shape, sharding, own)
        for leaf, sharding, own in zip(leaves, shardings, blocks, strict=True)
    ]
    return config, jax.tree.unflatten(structure, arrays)


def load_model(
    folder: str | Path, dtype: str = "", *, strict: bool = True
) -> tuple[LMConfig, PyTree]:
    """Reads a Hugging Face folder for use: parameters alone, each once, in the type asked for.

    No parameter is held in another type on the way: the peak is the parameters and what is read
    ahead of them. `from_hf` is for training, whose master weights are float32.

    Args:
      folder: As for `from_hf`.
      dtype: Type of the parameters and of computation, of `jaxpar.lm.config.DTYPES`; empty for
        that of the folder.
      strict: As for `from_hf`.

    Returns:
      The model and its parameters, laid out on the ambient mesh.

    Raises:
      UsageError: As `from_hf`, or `dtype` is unknown, or is float64 where JAX has none.
    """
    folder = folder_of(folder)
    name = dtype or read_imported(folder, strict=strict).dtype
    if name not in DTYPES:
        raise UsageError(
            f"dtype={brief(name)}: no type of numbers; expected {', '.join(DTYPES)}, or nothing."
        )
    if name == "float64" and not jax.config.jax_enable_x64:
        raise UsageError(
            "dtype=float64: JAX has no float64 here; expected float32, or jax_enable_x64=true."
        )
    with warnings.catch_warnings():
        if not dtype:  # the record has warned of unknown keys already
            warnings.filterwarnings("ignore", ".*are not honoured")
        return _read(folder, name, name, strict, for_training=False)


def to_hf(
    params: PyTree,
    config: LMConfig,
    folder: str | Path,
    *,
    dtype: str = "",
    max_shard_bytes: int = 4 * 2**30,
    tokenizer: str | Path | None = None,
    imported: Imported | None = None,
) -> None:
    """Writes a folder that transformers' `AutoModelForCausalLM` loads, of the architecture that `config` is.

    The folder appears under its name once it is whole. At most one file's tensors are in memory at a time; sharded
    parameters are gathered one layer of a leaf at a time. All processes of a run call this, and process 0 writes.
    What the formats cannot hold is left out: dropout but GPT-2's, a capacity and losses of a router, and how to compute
    (`dtype`, remat and the like).

    Args:
      params: As from `jaxpar.lm.init`, `jax.Array`s.
      config: The model.
      folder: Absent or empty.
      dtype: Of the tensors; empty for that of `imported`, or float32 without one.
      max_shard_bytes: Size of a file, unless one tensor alone is larger.
      tokenizer: A tokenizer.json to copy along.
      imported: Record of the folder that the model came from, whose architecture and special
        tokens the new folder has; without one it is the first architecture that expresses `config`.

    Raises:
      UsageError: If the folder holds something or cannot be written, if no architecture, or not that of `imported`,
        can express the model, or if `params` are not of `config`.
    """
    folder = Path(folder).absolute()
    arch = architecture_of(config, imported.kind if imported else "")
    dtype = dtype or (imported.dtype if imported else "float32")
    of = _Of(arch, config.stack().period)
    flat = _flat(params)
    _check(flat, config, folder, dtype, tokenizer)
    _wait_for_all()  # or another process would find the folder that process 0 has made
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    tensors = _tensors(of, config)
    sizes = {
        name: math.prod(shape) * jnp.dtype(dtype).itemsize for name, (shape, _) in tensors.items()
    }
    files = _files(sizes, max_shard_bytes)
    given = None
    if imported:
        given = imported.config
    writes = jax.process_index() == 0
    try:
        if writes:
            partial.mkdir(parents=True)
        for file, names in files.items():
            block = {name: _gather(of, flat, tensors[name][1], dtype) for name in names}
            if writes:
                save_file(block, partial / file, metadata={"format": "pt"})
                # It makes files that only their owner can read.
                (partial / file).chmod(partial.stat().st_mode & 0o666)
            del block  # before the next one is made
        if writes:
            if tokenizer is not None:
                shutil.copyfile(tokenizer, partial / "tokenizer.json")
            if len(files) > 1:
                where = {name: file for file, names in files.items() for name in names}
                index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
                (partial / "model.safetensors.index.json").write_text(
                    json.dumps(index, indent=2) + "\n"
                )
            (partial / "config.json").write_text(
                json.dumps(config_json(arch, config, dtype, given), indent=2) + "\n"
            )
            partial.replace(folder)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder} could not be written: {error}") from error
    finally:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
    _wait_for_all()


def _dotted(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _flat(tree: PyTree) -> dict[str, PyTree]:
    return {_dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


class _Of(NamedTuple):
    """Where the leaves of one model lie: `row` and `tensor` of each."""

    arch: Architecture
    period: int  # after how many layers mixers repeat: a leaf of the turn's third is "layers.2.wq"

    def row(self, leaf: str) -> Place:
        """Returns the table's row of a leaf."""
        return self.arch.rows[_TURN.sub("layers.", leaf)]

    def tensor(self, leaf: str, at: tuple[int, ...]) -> str:
        """Returns the tensor that holds `leaf`, of a layer of those of its place and of an expert if it is in one."""
        if not at:
            return self.row(leaf).name
        turn = _TURN.match(leaf)
        layer = at[0] * self.period + (int(turn[1]) if turn else 0)
        return self.arch.layer.format(layer) + self.row(leaf).name.format(*at[1:])


_TURN = re.compile(r"^layers\.(\d+)\.")


def _tensors(of: _Of, config: LMConfig) -> dict[str, tuple[tuple[int, ...], list]]:
    """Returns the shape of every tensor of the files, and the leaves, layers and experts that it is made of."""
    tensors = {}
    for name, leaf in _flat(abstract(config)).items():
        row = of.row(name)
        rest, own = len(leaf.shape) - len(row.layout.split(">")[0]), _shape(row, leaf.shape)
        for at in itertools.product(*map(range, leaf.shape[:rest])):
            shape, parts = tensors.setdefault(of.tensor(name, at), (list(own), []))
            shape[row.along] += own[row.along] if parts else 0
            parts.append((name, at))
    return {name: (tuple(shape), parts) for name, (shape, parts) in tensors.items()}


def _shape(row: Place, shape: tuple[int, ...]) -> list[int]:
    """Returns a leaf's shape in the files, of one layer and expert."""
    ours, theirs = row.layout.split(">")
    sizes = dict(zip(ours, shape[len(shape) - len(ours) :], strict=True))
    return [math.prod(sizes[axis] for axis in group) for group in theirs.split(",")]


def _shifts(of: _Of, config: LMConfig) -> dict[str, int]:
    """Returns where each leaf begins in its tensor, along the axis along which leaves are fused."""
    shifts, ends = {}, {}
    for name, leaf in sorted(
        _flat(abstract(config)).items(), key=lambda item: of.row(item[0]).part
    ):
        row = of.row(name)
        tensor = row.name, (_TURN.match(name) or [""])[0]  # of one place in the turn of mixers
        shifts[name] = ends.get(tensor, 0)
        ends[tensor] = shifts[name] + _shape(row, leaf.shape)[row.along]
    return shifts


def _parts(
    tensors: dict[str, Tensor],
    of: _Of,
    name: str,
    leaf: jax.ShapeDtypeStruct,
    bounds: tuple[tuple[int, int], ...],
    shift: int,
    head: Tensor | None,
    most: int,
) -> Iterator[Part]:
    """Returns what is read of each tensor for one block of a leaf; a tied `head` is compared with it.

    A part is of `most` bytes of the leaf, or of one row of the tensor.
    """
    row = of.row(name)
    ours, theirs = row.layout.split(">")
    rest, order = len(leaf.shape) - len(ours), theirs.replace(",", "")
    turned = tuple(order.index(axis) for axis in ours)

    def block_of(tensor: Tensor, own: Bounds, shift: int) -> np.ndarray:
        return exact(_cut(tensor.read, row, leaf.shape[rest:], own, shift), leaf.dtype)

    def read(tensor: str, own: Bounds) -> np.ndarray:
        block = block_of(tensors[tensor], own, shift)
        if not is_finite(block):
            raise UsageError(
                f"tensor {tensor} holds NaN or infinity, or what is infinite as {leaf.dtype}."
            )
        if head is not None and not np.array_equal(block_of(head, own, 0), block):
            raise UsageError(
                f"tensor {HEAD} differs from {tensor}, to which tie_word_embeddings=true ties it; "
                "legal are equal ones, or tie_word_embeddings=false."
            )
        return block

    first = ours.index(order[0])
    for at in itertools.product(*(range(*ends) for ends in bounds[:rest])):
        inside = tuple(i - start for i, (start, _) in zip(at, bounds, strict=False))
        for own in _in_parts(bounds[rest:], first, leaf.dtype.itemsize, most):
            size = math.prod(stop - start for start, stop in own) * leaf.dtype.itemsize
            yield Part(
                at=inside,
                num_bytes=size,
                read=functools.partial(read, of.tensor(name, at), own),
                order=turned,
                begins=tuple(
                    start - begin for (start, _), (begin, _) in zip(own, bounds[rest:], strict=True)
                ),
            )


def _in_parts(bounds: Bounds, axis: int, itemsize: int, most: int) -> Iterator[Bounds]:
    """Cuts bounds along an axis into parts of `most` bytes, or of one index."""
    start, stop = bounds[axis]
    others = math.prod(end - begin for begin, end in bounds) // max(stop - start, 1)
    step = max(most // max(others * itemsize, 1), 1)
    for begin in range(start, stop, step):
        end = min(begin + step, stop)
        yield (*bounds[:axis], (begin, end), *bounds[axis + 1 :])


def _cut(
    read: Callable[[tuple[slice, ...]], np.ndarray],
    row: Place,
    shape: tuple[int, ...],
    bounds: tuple[tuple[int, int], ...],
    shift: int,
) -> np.ndarray:
    """Reads a leaf's `bounds` by what cuts a tensor, where it begins at `shift`, of one layer and expert.

    The leaf's axes are in the order of the tensor.
    """
    ours, theirs = row.layout.split(">")
    sizes, ranges = dict(zip(ours, shape, strict=True)), dict(zip(ours, bounds, strict=True))
    groups = theirs.split(",")
    cuts, lengths, inner = [], [], []
    for number, group in enumerate(groups):
        if not group:  # an axis of one
            cuts.append(slice(0, 1))
            continue
        first, rest = group[0], group[1:]
        stride = math.prod(sizes[axis] for axis in rest)
        start, stop = ranges[first]
        begin = shift if number == row.along % len(groups) else 0
        cuts.append(slice(begin + start * stride, begin + stop * stride))
        lengths += [stop - start, *(sizes[axis] for axis in rest)]
        inner += [slice(None), *(slice(*ranges[axis]) for axis in rest)]
    return read(tuple(cuts)).reshape(lengths)[tuple(inner)]


_pick = jax.jit(lambda leaf, at: leaf[at])


def _gather(of: _Of, flat: dict, parts: list[tuple[str, tuple]], dtype: str) -> np.ndarray:
    """Brings the leaves of one tensor to every host, and lays them out as the file has them."""
    blocks, along = [], of.row(parts[0][0]).along
    for name, at in sorted(parts, key=lambda part: of.row(part[0]).part):
        x = _pick(flat[name], at) if at else flat[name]
        x = x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
        x = np.asarray(x).astype(dtype)
        ours, theirs = of.row(name).layout.split(">")
        shape = _shape(of.row(name), x.shape)
        blocks.append(
            x.transpose([ours.index(axis) for axis in theirs.replace(",", "")]).reshape(shape)
        )
    # safetensors writes the memory of a strided array in its own order, without an error.
    return np.ascontiguousarray(np.concatenate(blocks, axis=along))


def _files(sizes: dict[str, int], limit: int) -> dict[str, list[str]]:
    """Shares tensors of `sizes` bytes out to files of at most `limit`, in their order."""
    shares, total = [[]], 0
    for name, size in sizes.items():
        if shares[-1] and total + size > limit:
            shares.append([])
            total = 0
        shares[-1].append(name)
        total += size
    if len(shares) == 1:
        return {"model.safetensors": shares[0]}
    return {
        f"model-{i:05d}-of-{len(shares):05d}.safetensors": share
        for i, share in enumerate(shares, 1)
    }


def _wait_for_all() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jaxpar.lm.hub.exchange")


def _check(
    flat: dict, config: LMConfig, folder: Path, dtype: str, tokenizer: str | Path | None
) -> None:
    """Refuses what `to_hf` cannot write, before it writes."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r} is unknown; legal are {', '.join(DTYPES)}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} already holds something; give a folder that is absent or empty."
        )
    if tokenizer is not None and not Path(tokenizer).is_file():
        raise UsageError(f"there is no tokenizer file {tokenizer}; give a tokenizer.json or None.")
    given, expected = (
        {name: leaf.shape for name, leaf in tree.items()}
        for tree in (flat, _flat(abstract(config)))
    )
    for name in expected | given:
        here, there = given.get(name, "absent"), expected.get(name, "absent")
        if here != there:
            raise UsageError(f"parameter {name} has shape {here}, but the config means {there}.")


def _find_tensors(folder: Path, of: _Of, config: LMConfig) -> dict[str, Tensor]:
    """Opens the files, without reading them, and returns every tensor once names and shapes are right."""
    prefix = of.arch.layer.split(".")[0] + "."
    found = _open_tensors(folder, prefix)
    expected = {name: shape for name, (shape, _) in _tensors(of, config).items()}
    router = found.get(of.tensor("layers.w_router", (0,))) if config.experts.num_experts else None
    if router is not None and (num := router.shape[0]) != config.experts.num_experts:
        key = of.arch.fields["experts.num_experts"][0]
        raise UsageError(
            f"{folder} has {num} experts a layer, but its config.json has {key}={config.experts.num_experts}."
        )
    if config.embedding.tied and HEAD in found:
        expected[HEAD] = expected[of.row("embedding").name]
    for name, shape in expected.items():
        if name not in found:
            raise UsageError(f"{folder} lacks tensor {name} of shape {shape}.")
        if (there := found[name].shape) != shape:
            raise UsageError(
                f"tensor {name} in {folder} has shape {there}, but its config.json means {shape}."
            )
        if found[name].dtype not in FILE_DTYPES:
            raise UsageError(
                f"tensor {name} in {folder} is {found[name].dtype}; legal are {', '.join(FILE_DTYPES)}."
            )
    for name in sorted(found.keys() - expected):
        if not re.search(of.arch.passed_over, name):
            shape = found[name].shape
            raise UsageError(
                f"{folder} has tensor {name} of shape {shape}, which its config.json has no place for."
            )
    return found


def _open_tensors(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Opens the files of a folder; a name may lack `prefix`, which it has in what is returned."""
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if (folder / GGUF).is_file():
        return dict(packed_tensors(folder / GGUF))
    if not whole.is_file() and not index.is_file():
        raise UsageError(f"{folder} has neither {whole.name} nor {index.name}.")
    found: dict[str, Tensor] = {}
    for path in [whole] if whole.is_file() else [folder / name for name in _file_names(index)]:
        try:
            with safe_open(path, framework="numpy"):
                tensors = stored(path)
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} is not a whole safetensors file: {error}") from error
        for name, tensor in tensors.items():
            full = name if name.startswith((prefix, "lm_head.")) else prefix + name
            if full in found:
                raise UsageError(f"{folder} holds tensor {full} twice; legal is once.")
            found[full] = tensor
    return found


def _file_names(index: Path) -> list[str]:
    """Returns the files that an index names, in its folder."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise UsageError(
            f"{index} has weight_map={brief(places)}; legal is an object of tensors and their files."
        )
    for tensor, name in places.items():
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
            raise UsageError(
                f"{index} says that {plain(tensor)} lies in {brief(name)}; legal is a safetensors file of that folder."
            )
    return sorted(set(places.values()))
