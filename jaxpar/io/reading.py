"""What one checkpoint on disk holds, read without communication between processes, and the reasons to refuse it."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from typing import Any, TypedDict

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from jaxpar.io import layers
from jaxpar.io.digest import numpy_digest
from jaxpar.io.storage import unreadable_reason
from jaxpar.types import PyTree, UsageError

__all__ = ["CorruptCheckpointError", "RunMismatchError"]


class ArrayForm(TypedDict):
    """What two arrays must share to stand for each other."""

    dtype: str
    shape: tuple[int, ...]


class ArrayDescription(ArrayForm):
    """What a checkpoint says of one array."""

    digest: str


class CorruptCheckpointError(UsageError):
    """A checkpoint is not what was saved."""


class RunMismatchError(UsageError):
    """A checkpoint is whole, but of another configuration."""


def flatten(tree: PyTree) -> dict[str, PyTree]:
    """Returns the leaves by their logical names: `params/layers/wq`, in whatever classes they are held."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def nest(leaves: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Returns nested dicts with the leaves at their names."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *folders, name = path.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def describe(
    leaves: Mapping[str, jax.Array], digests: Mapping[str, str], metadata: Mapping[str, object]
) -> dict[str, object]:
    """Returns what a checkpoint says about its arrays: dtype, shape and digest by path, and a check of the text."""
    arrays = {
        path: {"dtype": str(leaf.dtype), "shape": list(leaf.shape), "digest": digests[path]}
        for path, leaf in leaves.items()
    }
    return {"arrays": arrays, "check": _check(arrays, metadata)}


def read_description(folder: epath.Path) -> tuple[dict[str, ArrayDescription], dict[str, object]]:
    """Returns the arrays' description and the metadata of the checkpoint in `folder`.

    Raises:
      CorruptCheckpointError: They are not both there as they were written.
    """
    json_handler = ocp.JsonCheckpointHandler()
    try:
        layout, metadata = (
            dict(json_handler.restore(folder / item)) for item in ("layout", "metadata")
        )
        arrays = {
            path: entry | {"shape": tuple(entry["shape"])}
            for path, entry in layout["arrays"].items()
        }
        if layout["check"] != _check(layout["arrays"], metadata):
            raise ValueError("its description is not what was written")
    except Exception as error:
        raise _unreadable(folder, error) from error
    return arrays, metadata


def read_arrays(
    folder: epath.Path, wanted: Mapping[str, jax.ShapeDtypeStruct], partial: bool = False
) -> dict[str, jax.Array]:
    """Reads all arrays of a checkpoint onto the shardings of `wanted`; each process reads its own part.

    With `partial` the checkpoint may have others, which are not read.

    Raises:
      CorruptCheckpointError: A file cannot be read. Whether what was read is what was saved is for the digests to say.
    """
    tree = nest(wanted)
    try:
        if partial:
            how = ocp.checkpoint_utils.construct_restore_args(tree)
            some = ocp.args.PyTreeRestore(item=tree, restore_args=how, partial_restore=True)
            arrays = flatten(ocp.PyTreeCheckpointHandler().restore(folder / "state", args=some))
        else:
            every = ocp.args.StandardRestore(tree)
            arrays = flatten(ocp.StandardCheckpointHandler().restore(folder / "state", args=every))
        for path, leaf in wanted.items():  # Orbax believes what the files say of themselves
            if (arrays[path].shape, arrays[path].dtype) != (leaf.shape, leaf.dtype):
                raise ValueError(f"{path} is of another shape or dtype than was saved")
        return arrays
    except jax.errors.JaxRuntimeError as error:  # the device's memory, not the checkpoint
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UsageError(
            f"the checkpoint {folder} does not fit into the devices' memory; take more devices, or split more of it"
        ) from error
    except Exception as error:
        raise _unreadable(folder, error) from error


def read_numpy(folder: epath.Path) -> dict[str, np.ndarray]:
    """Reads all arrays of a checkpoint to the host, typed keys as their words, and checks their digests.

    Raises:
      CorruptCheckpointError: A file cannot be read, or an array is not the one that was saved.
    """
    described, _ = read_description(folder)
    handler = ocp.PyTreeCheckpointHandler()
    how = nest(dict.fromkeys(described, ocp.RestoreArgs(restore_type=np.ndarray)))
    try:
        arrays = flatten(
            handler.restore(folder / "state", args=ocp.args.PyTreeRestore(restore_args=how))
        )
    except Exception as error:
        raise _unreadable(folder, error) from error
    check_digests(folder, described, {path: numpy_digest(x) for path, x in arrays.items()})
    return arrays


def check_digests(
    folder: epath.Path, described: Mapping[str, ArrayDescription], found: Mapping[str, str]
) -> None:
    """Raises `CorruptCheckpointError` unless every array that is described has the digest that was found."""
    wrong = [path for path, entry in described.items() if entry["digest"] != found.get(path)]
    if wrong:
        others = f" and {len(wrong) - 1} others" if len(wrong) > 1 else ""
        raise CorruptCheckpointError(
            f"the checkpoint {folder} is damaged: {wrong[0]}{others} is not what was saved"
        )


def check_same_run(
    folder: epath.Path, saved: Mapping[str, object], metadata: Mapping[str, object]
) -> None:
    """Raises `RunMismatchError` unless all of `metadata` is among what was saved."""
    for name, value in metadata.items():
        if saved.get(name) != value:
            raise RunMismatchError(
                f"the checkpoint of step {folder.name} was made with {name}={saved.get(name)!r} and this run has "
                f"{value!r}; go back to that, or start anew with resume=false."
            )


def match_state(
    folder: epath.Path,
    described: Mapping[str, ArrayDescription],
    wanted: Mapping[str, jax.ShapeDtypeStruct],
    renamed: Mapping[str, str],
) -> tuple[dict[str, layers.LeafSource], dict[str, jax.ShapeDtypeStruct]]:
    """Returns where each wanted leaf comes from and what to read for it; refuses a state of another layout.

    A leaf that was saved under an older name is found by `renamed`, from parts of paths to what they were called.
    """
    ours: dict[str, ArrayForm] = {
        path: {"dtype": str(leaf.dtype), "shape": leaf.shape} for path, leaf in wanted.items()
    }
    older = {path: _older_name(path, renamed) for path in ours if path not in described}
    today = {old: path for path, old in older.items() if old in described}
    saved = {
        today.get(path, path): (entry["dtype"], entry["shape"]) for path, entry in described.items()
    }
    found = layers.match_layers(
        saved, {path: (entry["dtype"], entry["shape"]) for path, entry in ours.items()}
    )
    names = {path: old for old, path in today.items()}
    sources = {
        path: dataclasses.replace(
            source, paths=tuple(names.get(name, name) for name in source.paths)
        )
        for path, source in found.items()
    }
    used = {name for source in sources.values() for name in source.paths}
    theirs = {today.get(path, path): entry for path, entry in described.items()}
    for path in dict.fromkeys([*ours, *sorted(theirs)]):
        if (
            path in ours
            and path not in sources
            or path in theirs
            and names.get(path, path) not in used
        ):
            here, there = (
                _text_of(side[path]) if path in side else "absent" for side in (ours, theirs)
            )
            raise RunMismatchError(
                f"the checkpoint of step {folder.name} in {folder.parent} does not fit this run: "
                f"{path} is {there} there and {here} here; start anew with resume=false, or go on with the version "
                "and the flags that made it"
            )
    return sources, layers.saved_form(
        {path: (entry["dtype"], entry["shape"]) for path, entry in described.items()},
        sources,
        wanted,
    )


def _older_name(path: str, renamed: Mapping[str, str]) -> str:
    """The path with whole names, or runs of them such as `rates/tau`, replaced."""
    path = f"/{path}/"
    for new, old in renamed.items():
        path = path.replace(f"/{new}/", f"/{old}/")
    return path[1:-1]


def _text_of(entry: ArrayForm) -> str:
    return f"{entry['dtype']}[{','.join(map(str, entry['shape']))}]"


def _check(arrays: Mapping[str, object], metadata: Mapping[str, object]) -> str:
    as_read = json.loads(json.dumps([dict(arrays), dict(metadata)]))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def _unreadable(folder: epath.Path, error: Exception) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        f"the checkpoint {folder} cannot be read: {unreadable_reason(error)}"
    )
