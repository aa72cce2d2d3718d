"""Adapters in the files of PEFT, `adapter_config.json` and `adapter_model.safetensors`, for every kind of folder.

Where a file fuses several weights in one tensor, as GPT-2's `c_attn` has queries, keys and values, their changes of
rank r are one of three times the rank whose B is zero but for three blocks: the same change exactly. Read back, each
weight gets the whole of A, and its own rows of B.
"""

import dataclasses
import itertools
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from jaxpar.lm.adapters import (
    AdapterConfig,
    added_targets,
    is_product,
    num_contracted,
    saved_names,
    targets,
    unflattened,
)
from jaxpar.lm.config import LMConfig
from jaxpar.lm.hub.architectures import architecture_of
from jaxpar.lm.hub.exchange import _Of
from jaxpar.lm.hub.imported import Imported
from jaxpar.lm.hub.keys import (
    FLAG,
    NAMES,
    POSITIVE,
    SHARE,
    SIZE,
    TABLE,
    Kind,
    brief,
    check,
    read_json,
)
from jaxpar.lm.hub.saved_modules import (
    PREFIX,
    added_tensors,
    find,
    on_host,
    saved_modules,
    take_added,
    take_saved,
)
from jaxpar.lm.params import leaves
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import Lora, whole_weight
from jaxpar.types import PyTree, UsageError

__all__ = ["from_peft", "to_peft"]

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
KINDS: dict[str, Kind] = {
    "r": SIZE, "lora_alpha": POSITIVE, "lora_dropout": SHARE, "use_rslora": FLAG, "use_dora": FLAG,
    "rank_pattern": TABLE, "alpha_pattern": TABLE, "modules_to_save": NAMES, "ensure_weight_tying": FLAG,
}  # fmt: skip
CHANGES = (
    "trainable_token_indices", "layer_replication", "use_qalora", "alora_invocation_tokens",
    "target_parameters", "lora_bias", "eva_config", "corda_config", "arrow_config", "use_bdlora",
    "kasa_config", "lora_ga_config", "velora_config", "monteclora_config", "loftq_config",
)  # fmt: skip
"""Keys that, where they are on, change what an adapter computes in ways that there are none of here."""


class _Part:
    """One weight of ours within a module of the files."""

    def __init__(self, name: str, leaf: Leaf, of: _Of):
        """Reads the table's row of the weight."""
        self.name, self.num, self.row = name, num_contracted(leaf), of.row(name)
        ours, theirs = self.row.layout.split(">")
        groups, into = theirs.split(","), ours[: self.num]
        if sorted(groups) != sorted((into, ours[self.num :])):
            raise UsageError(
                f"{name} lies as {self.row.layout} in the files, which no adapter of PEFT's can say."
            )
        self.fan_in_fan_out = groups[0] == into
        self.rows, self.size = (
            math.prod(leaf.shape[1 : 1 + self.num]),
            math.prod(leaf.shape[1 + self.num :]),
        )
        self.into, self.out, self.layers = (
            leaf.shape[1 : 1 + self.num],
            leaf.shape[1 + self.num :],
            leaf.shape[0],
        )


def _modules(model: LMConfig, of: _Of) -> dict[tuple[str, int], list[_Part]]:
    """Returns the parts of each module, in order, by its name and their layer."""
    flat = jax.tree_util.tree_leaves_with_path(
        leaves(model), is_leaf=lambda leaf: isinstance(leaf, Leaf)
    )
    parts = [
        _Part(jax.tree_util.keystr(path, simple=True, separator="."), leaf, of)
        for path, leaf in flat
        if is_product(leaf)
    ]
    out: dict[tuple[str, int], list[_Part]] = {}
    for part in sorted(parts, key=lambda part: part.row.part):
        for layer in range(part.layers):
            out.setdefault(
                (of.tensor(part.name, (layer,)).removesuffix(".weight"), layer), []
            ).append(part)
    return out


def _of(model: LMConfig, imported: Imported | None) -> _Of:
    """Returns where the leaves of a model lie in the folder that it came from."""
    kind = ""
    if imported:
        kind = imported.kind
    return _Of(arch=architecture_of(model, kind), period=model.stack().period)


def to_peft(
    params: PyTree,
    model: LMConfig,
    folder: str | Path,
    adapter: AdapterConfig,
    base: str = "",
    *,
    imported: Imported | None = None,
    adapters: PyTree = None,
) -> None:
    """Writes the adapters among `params` as PEFT's `PeftModel.from_pretrained` loads them.

    Args:
      params: With adapters, as `AdaptedState.params`.
      model: Of a kind that `to_hf` writes.
      folder: Absent or empty.
      adapter: Its scaling, dropout and magnitudes.
      base: Where the frozen model lies, for `base_model_name_or_path`.
      imported: Record of the folder that the model came from, whose tensors have the names that the
        adapters are written for; without one they are those of the first architecture that
        expresses `model`.
      adapters: What is trained, as `jaxpar.lm.train.AdaptedState.adapters`. `params` have the sums
        of embedding or head and its change: without `adapters` these are written as saved modules.

    Raises:
      UsageError: There are no adapters; experts are adapted or saved, or a parameter that no module
        of PEFT's can hold alone; the folder holds something; or the model has no architecture,
        or another one than `imported`.
    """
    if "experts" in adapter.target and "experts" in added_targets(model):
        raise UsageError(
            "adapter.target=experts: PEFT's files have no changes of experts' tensors as "
            "folders have them; expected other weights in adapter.target, or adapter.merge=true."
        )
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} already holds something; give a folder that is absent or empty."
        )
    of = _of(model, imported)
    found = _changes(params, model, of, adapter)
    saved = set(saved_names(model, adapter))
    adapted = targets(model, adapter.target)
    for module, arrays in added_tensors(adapters or {}, of).items():
        found.tensors.update({f"{PREFIX}{module}.{name}": x for name, x in arrays.items()})
        found.ranks[module] = (adapter.rank, adapter.alpha)
    if not found.tensors:
        raise UsageError("there is no adapter among the parameters; to_hf writes a model without.")
    if adapters is None:  # their changes are in the sums alone
        added = {name for name, leaf in adapted.items() if not is_product(leaf)}
        saved |= added
        adapted = {name: leaf for name, leaf in adapted.items() if name not in added}
    whole = saved_modules(params, model, of, saved, adapted)
    found.tensors.update(whole.tensors)
    ranks = found.ranks
    told = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base or None, "inference_mode": True,
        "r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": adapter.dropout, "bias": "none",
        "use_rslora": adapter.rslora, "use_dora": adapter.dora, "fan_in_fan_out": found.turned,
        "modules_to_save": whole.names or None,
        "target_modules": sorted(ranks),
        "rank_pattern": {name: rank for name, (rank, _) in ranks.items() if rank != adapter.rank},
        "alpha_pattern": {name: alpha for name, (_, alpha) in ranks.items() if alpha != adapter.alpha},
    }  # fmt: skip
    if whole.tied:  # of PEFT from 0.18 on; others do not know the key
        told["ensure_weight_tying"] = True
    if jax.process_index() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(found.tensors, folder / TENSORS, metadata={"format": "pt"})
        (folder / TENSORS).chmod(folder.stat().st_mode & 0o666)
        (folder / CONFIG).write_text(json.dumps(told, indent=2) + "\n")


class _Changes(NamedTuple):
    """Changes of products as files hold them.

    Attributes:
      tensors: A, B and magnitudes by name.
      ranks: Rank and alpha by the end of a module's name.
      turned: Whether the files' weights are [in, out].
    """

    tensors: dict[str, np.ndarray]
    ranks: dict[str, tuple[int, float]]
    turned: bool


def _changes(params: PyTree, model: LMConfig, of: _Of, adapter: AdapterConfig) -> _Changes:
    """Returns the changes of products among the parameters."""
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, tuple[int, float]] = {}
    found: dict[str, dict] = {}
    turned = False
    for (module, layer), parts in _modules(model, of).items():
        blocks = []
        for part in parts:
            if part.name not in found:
                found[part.name] = _arrays(find(params, part.name), adapter.dora)
            blocks.append(
                {name: x[layer] for name, x in found[part.name].items() if name != "scale"}
            )
        if not any("down" in block for block in blocks):
            continue
        scale = max(found[part.name].get("scale", 0.0) for part in parts)
        down, up = _fused(parts, blocks)
        tensors[f"{PREFIX}{module}.lora_A.weight"] = down
        tensors[f"{PREFIX}{module}.lora_B.weight"] = up
        if adapter.dora:
            sizes = [block["magnitude"].reshape(-1) for block in blocks]
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = np.concatenate(sizes)
        rank = down.shape[0]
        power = 0.5 if adapter.rslora else 1.0
        ranks[parts[0].row.name.removesuffix(".weight")] = (rank, scale * rank**power)
        turned |= parts[0].fan_in_fan_out
    return _Changes(tensors=tensors, ranks=ranks, turned=turned)


def _arrays(w: PyTree, dora: bool) -> dict:
    """Returns the stacked arrays of one weight's adapter on the host, and its scale; of none its magnitudes alone."""
    if isinstance(w, Lora):
        out = {"down": on_host(w.down), "up": on_host(w.up), "scale": w.scale}
        return out | ({"magnitude": on_host(w.magnitude)} if w.magnitude is not None else {})
    return {"magnitude": _norms(w)} if dora else {}


def _norms(w: PyTree) -> np.ndarray:
    """Magnitudes of a weight without an adapter, beside others in one tensor: they change nothing."""
    values = on_host(jax.vmap(whole_weight)(w)).astype(np.float32)
    flat = values.reshape(
        values.shape[0], values.shape[1], -1
    )  # of fused weights only the first axis is contracted
    return np.sqrt((flat**2).sum(1))


def _fused(parts: list[_Part], blocks: list[dict]) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [r, in] and B [out, r] of a module; of several weights the ranks are added up."""
    rank, first, at = sum(block["down"].shape[-1] for block in blocks if "down" in block), 0, 0
    downs, up = [], np.zeros((sum(part.size for part in parts), rank), np.float32)
    for part, block in zip(parts, blocks, strict=True):
        if "down" in block:
            own = block["down"].shape[-1]
            downs.append(block["down"].reshape(part.rows, own).T)
            up[at : at + part.size, first : first + own] = block["up"].reshape(own, part.size).T
            first += own
        at += part.size
    return np.ascontiguousarray(np.concatenate(downs), np.float32), up


def from_peft(
    folder: str | Path, model: LMConfig, *, imported: Imported | None = None
) -> tuple[AdapterConfig, PyTree]:
    """Reads adapters of PEFT's for a model of one of the kinds of folders.

    Args:
      folder: Of `adapter_config.json` and `adapter_model.safetensors`.
      model: What they are for.
      imported: Record of the folder that the model came from, as of `to_peft`.

    Returns:
      Their configuration, and the tree that `with_adapters` takes; changes whose alpha or rank a pattern sets apart are
      brought to the configuration's scale. Modules that PEFT saved whole replace the base's.

    Raises:
      UsageError: A file is damaged, or the adapter is of another kind or of another model.
    """
    folder = Path(folder)
    adapter, told = _read_config(folder)
    try:
        tensors = load_file(folder / TENSORS)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder / TENSORS} is not a whole safetensors file: {error}") from error
    of = _of(model, imported)
    changes: dict[str, PyTree] = dict(_take_added(tensors, model, of, told, adapter))
    ends = told.get("modules_to_save", [])
    whole = take_saved(tensors, model, of, ends, bool(told.get("ensure_weight_tying")))
    changes.update(whole)
    changes.update(_take_changes(tensors, model, of, told, adapter))
    if tensors:
        raise UsageError(
            f"{folder} has tensor {min(tensors)}, of no product of the model's layers."
        )
    return _described(adapter, changes, model), unflattened(changes)


def _take_changes(
    tensors: dict[str, np.ndarray], model: LMConfig, of: _Of, told: dict, adapter: AdapterConfig
) -> dict[str, dict[str, jax.Array]]:
    """Takes the changes of products out of a file's tensors, by the names of the weights."""
    layers: dict[str, list[dict]] = {}
    for (module, _), parts in _modules(model, of).items():
        names = {
            key: f"{PREFIX}{module}.{name}"
            for key, name in _NAMES.items()
            if f"{PREFIX}{module}.{name}" in tensors
        }
        given = {key: tensors.pop(name).astype(np.float32) for key, name in names.items()}
        if not given:
            for part in parts:
                layers.setdefault(part.name, []).append({})
            continue
        rank, alpha = _ranked(told, module, adapter)
        _check_shapes(module, given, parts, rank, adapter.dora)
        own = alpha / rank ** (0.5 if adapter.rslora else 1.0)
        at = 0
        for part in parts:
            cut = slice(at, at + part.size)
            block = {"down": given["A"].T.reshape(*part.into, rank)}
            block["up"] = (given["B"][cut] * (own / adapter.scale)).T.reshape(rank, *part.out)
            if adapter.dora:
                block["magnitude"] = given["m"][cut].reshape(part.out)
            layers.setdefault(part.name, []).append(block)
            at += part.size
    return {name: _stacked(name, blocks) for name, blocks in layers.items() if any(blocks)}


def _take_added(
    tensors: dict[str, np.ndarray], model: LMConfig, of: _Of, told: dict, adapter: AdapterConfig
) -> dict[str, PyTree]:
    """Takes the changes of embedding and head out of a file's tensors, at the adapter's scale.

    A file that holds the weight besides gives the sum: PEFT replaces the base's by it.
    """
    out: dict[str, PyTree] = {}
    for word, given in take_added(tensors, model, of).items():
        module = of.tensor(word, ()).removesuffix(".weight")
        rank, alpha = _ranked(told, module, adapter)
        if rank != given["up"].shape[0]:
            raise UsageError(
                f"the change of {module} is of rank {given['up'].shape[0]}, but {CONFIG} "
                f"means {rank}."
            )
        up = given["up"] * (alpha / rank ** (0.5 if adapter.rslora else 1.0) / adapter.scale)
        if "base" in given:
            out[word] = jnp.asarray(given["base"] + adapter.scale * (given["down"] @ up))
        else:
            out[word] = {"added_down": jnp.asarray(given["down"]), "added_up": jnp.asarray(up)}
    return out


def _described(
    adapter: AdapterConfig, changes: dict[str, PyTree], model: LMConfig
) -> AdapterConfig:
    """Returns the configuration with what is adapted, and what is saved whole."""
    saved = tuple(sorted(name for name, change in changes.items() if not isinstance(change, dict)))
    added = tuple(word for word in added_targets(model) if word in changes and word not in saved)
    target = ("*", *added)
    if set(saved) & targets(model, ("*",)).keys():  # a weight has a change, or is saved
        adapted = [
            name.removeprefix("layers.")
            for name, change in changes.items()
            if isinstance(change, dict) and "down" in change
        ]
        target = (*adapted, *added)
    return dataclasses.replace(adapter, target=target, modules_to_save=saved)


_NAMES = {"A": "lora_A.weight", "B": "lora_B.weight", "m": "lora_magnitude_vector"}


def _read_config(folder: Path) -> tuple[AdapterConfig, dict]:
    path = folder / CONFIG
    if not path.is_file():
        raise UsageError(f"there is no {path}; give a folder with {CONFIG} and {TENSORS}.")
    told = {key: value for key, value in read_json(path).items() if value is not None}
    if told.get("peft_type") != "LORA":
        raise UsageError(f"{path} has peft_type={brief(told.get('peft_type'))}; legal is 'LORA'.")
    for key, kind in KINDS.items():
        if key in told:
            check(path, key, told[key], kind)
    if told.get("bias", "none") != "none":
        raise UsageError(f"{path} has bias={brief(told['bias'])}; legal is 'none'.")
    if told.get("init_lora_weights", True) not in (True, False, "gaussian", "orthogonal"):
        start = brief(told["init_lora_weights"])
        raise UsageError(
            f"{path} has init_lora_weights={start}, which changes the base; legal are true and 'gaussian'."
        )
    for key in CHANGES:
        if told.get(key):
            raise UsageError(
                f"{path} has {key}={brief(told[key])}, which is not honoured; legal is none."
            )
    given = {"rank": told.get("r", 8), "alpha": float(told.get("lora_alpha", 8))}
    given |= {"rslora": told.get("use_rslora", False), "dora": told.get("use_dora", False)}
    return AdapterConfig("lora", dropout=float(told.get("lora_dropout", 0.0)), **given), told


def _ranked(told: dict, module: str, adapter: AdapterConfig) -> tuple[int, float]:
    """Returns rank and alpha of a module: those of the first pattern that ends its name, or the configuration's."""

    def of(key: str, default: float) -> float:
        for pattern, value in told.get(key, {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return value
        return default

    return int(of("rank_pattern", adapter.rank)), float(of("alpha_pattern", adapter.alpha))


def _check_shapes(module: str, given: dict, parts: list[_Part], rank: int, dora: bool) -> None:
    """Refuses tensors of a module that are missing or misshapen."""
    size = sum(part.size for part in parts)
    expected = {"A": (rank, parts[0].rows), "B": (size, rank)} | ({"m": (size,)} if dora else {})
    for key, name in _NAMES.items():
        here, there = given[key].shape if key in given else "absent", expected.get(key, "absent")
        if here != there:
            raise UsageError(
                f"tensor {PREFIX}{module}.{name} is of shape {here}, but the model means {there}."
            )
        if key in given and not np.isfinite(given[key]).all():
            raise UsageError(f"tensor {PREFIX}{module}.{name} holds NaN or infinity.")


def _stacked(name: str, blocks: list[dict]) -> dict[str, jax.Array]:
    """Stacks a weight's layers; one without an adapter changes nothing."""
    full = next(block for block in blocks if block)
    for a, b in itertools.pairwise(block for block in blocks if block):
        if a["down"].shape != b["down"].shape:
            raise UsageError(f"layers have {name} of several ranks; legal is one.")
    if "magnitude" in full and not all(blocks):
        raise UsageError(f"some layers lack the magnitudes of {name}; legal are all or none.")
    nothing = {key: np.zeros_like(x) for key, x in full.items()}
    return {
        key: jnp.asarray(np.stack([(block or nothing)[key] for block in blocks])) for key in full
    }
