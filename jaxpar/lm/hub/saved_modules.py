"""Saved modules, and changes of embedding and head, in PEFT's files.

PEFT names a module that is trained itself in `modules_to_save`, by the end of its name, and writes
all of its tensors. Of an embedding the change is `lora_embedding_A` [r, V] and `lora_embedding_B`
[D, r], W + s (B A)^T; a head is a product as any other.
"""

import itertools
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.lm.adapters import merge_adapters
from jaxpar.lm.config import LMConfig
from jaxpar.lm.hub.exchange import HEAD, _cut, _flat, _gather, _Of, _shifts, _tensors
from jaxpar.lm.params import abstract
from jaxpar.types import PyTree, UsageError

PREFIX = "base_model.model."
WORDS = ("embedding", "head")
"""Parameters outside of the layers that PEFT adapts."""


class Saved(NamedTuple):
    """Modules of a file that are trained themselves.

    Attributes:
      names: Ends of their names, for `modules_to_save`; no other module's name has such an end.
      tensors: Their tensors by the names of the file.
      tied: Whether embedding and head are one.
    """

    names: list[str]
    tensors: dict[str, np.ndarray]
    tied: bool


def saved_modules(
    params: PyTree, model: LMConfig, of: _Of, saved: Collection[str], adapted: Collection[str]
) -> Saved:
    """Gathers the modules that parameters lie in, with all that a module holds besides.

    Args:
      params: All parameters.
      model: Their configuration.
      of: Where the leaves lie in files.
      saved: Dotted names of parameters that are trained themselves.
      adapted: Dotted names of parameters that have a change.

    Raises:
      UsageError: A parameter is no module's, or an adapted one lies in the same.
    """
    tensors = _tensors(of, model)
    modules = {
        _module(name)
        for name, (_, parts) in tensors.items()
        if any(leaf in saved for leaf, _ in parts)
    }
    held = {name: parts for name, (_, parts) in tensors.items() if _module(name) in modules}
    leaves = {leaf: name for name, parts in held.items() for leaf, _ in parts}
    _check_modules(model, leaves, saved, adapted)
    flat = {leaf: merge_adapters(find(params, leaf)) for leaf in leaves}
    out = {PREFIX + name: _gather(of, flat, parts, "float32") for name, parts in held.items()}
    tied = model.embedding.tied and "embedding" in saved
    known = set(map(_module, tensors))
    if tied:
        # PEFT before 0.18 ties no saved modules: each has the values then.
        out[PREFIX + HEAD] = out[PREFIX + of.tensor("embedding", ())].copy()
        modules.add(_module(HEAD))
        known.add(_module(HEAD))
    return Saved(names=_ends(modules, known), tensors=out, tied=tied)


def _check_modules(
    model: LMConfig, leaves: Mapping[str, str], saved: Collection[str], adapted: Collection[str]
) -> None:
    """Rejects parameters that PEFT cannot save as modules."""
    instead = "expected other parameters in adapter.modules_to_save, or adapter.merge=true."
    experts = model.experts.num_experts > 0
    for leaf, name in leaves.items():
        if leaf in adapted:
            own = next(other for other in saved if leaves.get(other) == name)
            raise UsageError(
                f"adapter.modules_to_save={own}: it lies in {name} with {leaf}, which has a "
                f"change; {instead}"
            )
        if not name.endswith((".weight", ".bias")):
            raise UsageError(
                f"adapter.modules_to_save={leaf}: {name} is no module of its own, as PEFT's files "
                f"need it; {instead}"
            )
        if experts and leaf.startswith(("layers.w_", "layers.b_")):
            raise UsageError(
                f"adapter.modules_to_save={leaf}: routers and experts have other names in PEFT "
                f"than {name} in folders; {instead}"
            )


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _ends(modules: Collection[str], known: Collection[str]) -> list[str]:
    """Returns the shortest ends of names that mean these modules, and none else."""
    within = (itertools.accumulate(name.split("."), "{}.{}".format) for name in known)
    everything = set(itertools.chain.from_iterable(within))
    found = set()
    for module in sorted(modules):
        parts = module.split(".")
        for first in reversed(range(len(parts))):
            end = ".".join(parts[first:])
            if {name for name in everything if name.endswith(end)} <= set(modules):
                found.add(end)
                break
    return sorted(found)


def find(tree: PyTree, name: str) -> PyTree:
    """Returns the part of a tree of dicts that a dotted name means."""
    for part in name.split("."):
        tree = tree[part]
    return tree


def added_tensors(
    adapters: Mapping[str, Any],  # leaves, or dicts of them
    of: _Of,
) -> dict[str, dict[str, np.ndarray]]:
    """Returns the changes of embedding and head, by their module and by the names in its file.

    Args:
      adapters: As `jaxpar.lm.train.AdaptedState.adapters`.
      of: Where the leaves lie in files.
    """
    found = {}
    for word in WORDS:
        change = adapters.get(word)
        if not isinstance(change, dict):
            continue
        down = on_host(change["added_down"]).astype(np.float32)
        up = on_host(change["added_up"]).astype(np.float32)
        arrays = {"lora_A.weight": up, "lora_B.weight": down}
        if word == "embedding":
            arrays = {"lora_embedding_A": down.T, "lora_embedding_B": up.T}
        module = _module(of.tensor(word, ()))
        found[module] = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    return found


def on_host(x: jax.Array) -> np.ndarray:
    """Returns an array that may be split over processes, whole."""
    if not x.is_fully_addressable:
        x = multihost_utils.process_allgather(x, tiled=True)
    return np.asarray(x)


def take_saved(
    tensors: dict[str, np.ndarray],
    model: LMConfig,
    of: _Of,
    ends: Collection[str],
    is_tied: bool,
) -> dict[str, jax.Array]:
    """Takes modules that were trained themselves out of a file's tensors, as parameters by name.

    Args:
      tensors: Tensors of the file by name; what is found is taken out.
      model: The model.
      of: Where its leaves lie in files.
      ends: Ends of the modules' names, as of `modules_to_save`.
      is_tied: Whether a saved embedding is the head too, as of `ensure_weight_tying`.

    Raises:
      UsageError: A tensor is missing, misshapen or not finite; or a tied embedding and the head
        differ.
    """
    expected = _tensors(of, model)
    found = {name: tensors.pop(PREFIX + name) for name in expected if PREFIX + name in tensors}
    for name, array in found.items():
        _check_tensor(name, array, expected[name][0])
    if model.embedding.tied:
        _take_head(tensors, found, of.tensor("embedding", ()), is_tied)
    known = {name: _module(name) for name in (*expected, HEAD)}
    for end in ends:
        meant = [name for name, module in known.items() if module.endswith(end)]
        if not meant:
            modules = ", ".join(sorted(set(known.values())))
            raise UsageError(
                f"modules_to_save={end}: the model has no such module; expected an end of "
                f"{modules}."
            )
        if absent := [name for name in meant if name in expected and name not in found]:
            raise UsageError(
                f"modules_to_save={end}: tensor {PREFIX}{min(absent)} is missing; expected all "
                "tensors of the module."
            )
    return _leaves_of(found, model, of)


def _take_head(
    tensors: dict[str, np.ndarray], found: Mapping[str, np.ndarray], embedding: str, is_tied: bool
) -> None:
    """Takes the head of a model that ties it out, once it is sure to be the embedding."""
    saved = found.get(embedding)
    head = tensors.pop(PREFIX + HEAD, None)
    if head is None and is_tied:
        head = saved
    if saved is None and head is None:
        return
    if saved is None or head is None or not np.array_equal(head, saved):
        raise UsageError(
            f"modules_to_save: {embedding} and {HEAD} differ, but the model ties them; expected "
            "both with the same values, as ensure_weight_tying=true saves them."
        )


def _check_tensor(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise UsageError(
            f"tensor {PREFIX}{name} is of shape {array.shape}, but the model means {shape}."
        )
    if not np.isfinite(array.astype(np.float32)).all():
        raise UsageError(f"tensor {PREFIX}{name} holds NaN or infinity.")


def _leaves_of(found: Mapping[str, np.ndarray], model: LMConfig, of: _Of) -> dict[str, jax.Array]:
    """Returns the parameters that tensors hold, by dotted names."""
    shifts = _shifts(of, model)
    out = {}
    for leaf, like in _flat(abstract(model)).items():
        row = of.row(leaf)
        ours, theirs = row.layout.split(">")
        rest = len(like.shape) - len(ours)
        every = list(itertools.product(*map(range, like.shape[:rest])))
        names = {at: of.tensor(leaf, at) for at in every}
        there = [name in found for name in names.values()]
        if not any(there):
            continue
        if not all(there):
            lacking = min(name for name in names.values() if name not in found)
            raise UsageError(
                f"modules_to_save has {leaf} of some layers alone, and not {lacking}; expected all "
                "layers or none."
            )
        order = theirs.replace(",", "")
        whole = tuple((0, size) for size in like.shape[rest:])
        blocks = [
            _cut(found[names[at]].__getitem__, row, like.shape[rest:], whole, shifts[leaf])
            .astype(np.float32)
            .transpose([order.index(axis) for axis in ours])
            for at in every
        ]
        out[leaf] = jnp.asarray(np.stack(blocks).reshape(like.shape))
    return out


def take_added(
    tensors: dict[str, np.ndarray], model: LMConfig, of: _Of
) -> dict[str, dict[str, np.ndarray]]:
    """Takes the changes of embedding and head out of a file's tensors.

    Returns:
      For each of the two that has a change: `down` [V, r] and `up` [r, D], unscaled. `base` [V, D]
      is there if the file has the weight itself, as `save_embedding_layers` writes it.

    Raises:
      UsageError: One is missing or misshapen, or belongs to a tied embedding.
    """
    out = {}
    for word in WORDS:
        name = HEAD
        if word == "embedding" or not model.embedding.tied:
            name = of.tensor(word, ())
        module = PREFIX + _module(name)
        files = {"down": "lora_B.weight", "up": "lora_A.weight", "base": "base_layer.weight"}
        if word == "embedding":
            files |= {"down": "lora_embedding_A", "up": "lora_embedding_B"}
        given = {
            key: tensors.pop(f"{module}.{file}").astype(np.float32)
            for key, file in files.items()
            if f"{module}.{file}" in tensors
        }
        if not given:
            continue
        if model.embedding.tied:
            raise UsageError(
                f"{module} has a change, but embedding and head of the model are one weight; "
                "expected them in modules_to_save, or none."
            )
        if word == "embedding":
            given |= {key: given[key].T for key in ("down", "up") if key in given}
        _check_added(module, given, (model.vocab_size, model.embed_dim))
        out[word] = given
    return out


def _check_added(module: str, given: dict[str, np.ndarray], shape: tuple[int, int]) -> None:
    """Rejects a change with arrays that are missing, misshapen or not finite."""
    if not {"down", "up"} <= given.keys():
        raise UsageError(f"{module} lacks A or B of its change; expected both.")
    rank = given["up"].shape[0]
    expected = {"down": (shape[0], rank), "up": (rank, shape[1]), "base": shape}
    for key, array in given.items():
        if array.shape != expected[key]:
            raise UsageError(
                f"the change of {module} has {key} of shape {array.shape}, but the model means "
                f"{expected[key]}."
            )
        if not np.isfinite(array).all():
            raise UsageError(f"the change of {module} holds NaN or infinity.")
