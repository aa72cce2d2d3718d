"""Hugging Face folders <-> parameters, for Llama and GPT-2.

An architecture is one table: where each leaf of `jaxpar.lm.params.leaves` lies in the files, and which key of
`config.json` holds each field of `LMConfig`. Both directions read the same table.
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jaxpar.lm.config import CHOICES, LMConfig
from jaxpar.lm.params import abstract, axes
from jaxpar.mesh import named_shardings
from jaxpar.types import PyTree, UsageError

__all__ = ["config_from_hf", "from_hf", "to_hf"]


class Row(NamedTuple):
    """Where a leaf lies in the files."""

    name: str  # of the tensor; in a layer, what follows the layer's prefix
    layout: str  # the leaf's axes > the tensor's, commas between; "dhk>hk,d": Linear [out, in], out = h * K + k
    third: int | None = None  # which third of the tensor's last axis, where three leaves are fused


class Architecture(NamedTuple):
    """One kind of folder; the parts of `config.json` that are not one key a field go through `read` and `write`."""

    name: str  # in "architectures"
    model_type: str
    layer: str  # prefix of a layer's tensors; a file may lack its first word
    passed_over: str  # pattern of tensors that are no parameters
    rows: dict[str, Row]  # leaf -> place
    fields: dict[str, tuple]  # field -> its key, and the default of transformers unless required
    fixed: dict[str, Any]  # key -> the one value that this library computes
    read: Callable[[dict], dict]  # config.json without nulls -> the other fields
    write: Callable[[LMConfig], dict]  # its inverse
    needs: Callable[[LMConfig], dict[str, tuple]]  # config -> legal values of the fields that are not free


FILE_DTYPES = ("BF16", "F16", "F32", "F64")
ROPE = {
    "rope_factor": "factor", "rope_low_freq_factor": "low_freq_factor", "rope_high_freq_factor": "high_freq_factor",
    "rope_original_len": "original_max_position_embeddings",
}  # fmt: skip
GELU = {"gelu_new": "gelu", "gelu": "gelu_exact"}


def _read_llama(values: dict) -> dict:
    bias = values.get("mlp_bias", False)
    if values.get("attention_bias", False) != bias:
        raise UsageError(f"mlp_bias={bias} and attention_bias={not bias} differ; legal are both true or both false.")
    rope = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if key in values}
    rope |= values.get("rope_scaling", {}) | values.get("rope_parameters", {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise UsageError(f"rope type {kind!r} is unknown; legal are default and llama3.")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UsageError(f"partial_rotary_factor={rope['partial_rotary_factor']} is unknown; legal is 1.0.")
    keys = ROPE if kind == "llama3" else {}
    if absent := [key for key in keys.values() if key not in rope]:
        raise UsageError(f"rope type 'llama3' also needs {', '.join(absent)}.")
    fields = {ours: rope[key] for ours, key in keys.items()} | {"rope_theta": rope.get("rope_theta", 10000.0)}
    return fields | {"bias": bias, "norm": "rms", "positions": "rope", "activation": "swiglu"}


def _write_llama(c: LMConfig) -> dict:
    # The older spelling, which every version of transformers reads.
    scaling = {"rope_type": "llama3"} | {key: getattr(c, ours) for ours, key in ROPE.items()}
    rope = {"rope_theta": c.rope_theta, "rope_scaling": None if c.rope_factor == 1.0 else scaling}
    return rope | {"attention_bias": c.bias, "mlp_bias": c.bias}


def _needs_llama(c: LMConfig) -> dict[str, tuple]:
    # transformers refuses an uneven width even where head_dim is given.
    width = c.embed_dim // c.num_heads * c.num_heads or c.num_heads
    kind = {"mixer": ("attention",), "norm": ("rms",), "positions": ("rope",)}
    return kind | {"activation": ("swiglu",), "embed_dim": (width,)}


def _read_gpt2(values: dict) -> dict:
    name = values.get("activation_function", "gelu_new")
    if name not in GELU:
        raise UsageError(f"activation_function={name!r} is unknown; legal are {', '.join(GELU)}.")
    width = values.get("n_inner", 4 * values["n_embd"])
    return {"mlp_dim": width, "activation": GELU[name], "norm": "layer", "positions": "learned", "bias": True}


def _write_gpt2(c: LMConfig) -> dict:
    name = next(key for key, ours in GELU.items() if ours == c.activation)
    return {"n_inner": c.mlp_dim, "activation_function": name, "embd_pdrop": c.dropout, "attn_pdrop": c.dropout}


def _needs_gpt2(c: LMConfig) -> dict[str, tuple]:
    kind = {"mixer": ("attention",), "norm": ("layer",), "positions": ("learned",), "bias": (True,)}
    kind |= {"activation": tuple(GELU.values())}
    return kind | {"tied": (True,), "num_kv_heads": (c.num_heads,), "embed_dim": (c.num_heads * c.head_dim,)}


LLAMA = Architecture(
    "LlamaForCausalLM", "llama", "model.layers.{}.", r"rotary_emb\.inv_freq$|^lm_head\.weight$",
    rows={
        "embedding": Row("model.embed_tokens.weight", "vd>v,d"), "head": Row("lm_head.weight", "vd>v,d"),
        "final_norm.scale": Row("model.norm.weight", "d>d"),
        "layers.attn_norm.scale": Row("input_layernorm.weight", "d>d"),
        "layers.mlp_norm.scale": Row("post_attention_layernorm.weight", "d>d"),
        "layers.wq": Row("self_attn.q_proj.weight", "dhk>hk,d"), "layers.bq": Row("self_attn.q_proj.bias", "hk>hk"),
        "layers.wk": Row("self_attn.k_proj.weight", "dgk>gk,d"), "layers.bk": Row("self_attn.k_proj.bias", "gk>gk"),
        "layers.wv": Row("self_attn.v_proj.weight", "dgk>gk,d"), "layers.bv": Row("self_attn.v_proj.bias", "gk>gk"),
        "layers.wo": Row("self_attn.o_proj.weight", "hkd>d,hk"), "layers.bo": Row("self_attn.o_proj.bias", "d>d"),
        "layers.w_gate": Row("mlp.gate_proj.weight", "df>f,d"), "layers.b_gate": Row("mlp.gate_proj.bias", "f>f"),
        "layers.w_up": Row("mlp.up_proj.weight", "df>f,d"), "layers.b_up": Row("mlp.up_proj.bias", "f>f"),
        "layers.w_down": Row("mlp.down_proj.weight", "fd>d,f"), "layers.b_down": Row("mlp.down_proj.bias", "d>d"),
    },
    fields={
        "vocab_size": ("vocab_size",), "num_layers": ("num_hidden_layers",), "embed_dim": ("hidden_size",),
        "num_heads": ("num_attention_heads",), "mlp_dim": ("intermediate_size",), "head_dim": ("head_dim", 0),
        "num_kv_heads": ("num_key_value_heads", 0), "max_seq_len": ("max_position_embeddings", 2048),
        "norm_eps": ("rms_norm_eps", 1e-6), "tied": ("tie_word_embeddings", False),
        "init_std": ("initializer_range", 0.02),
    },
    fixed={"hidden_act": "silu"}, read=_read_llama, write=_write_llama, needs=_needs_llama,
)  # fmt: skip

GPT2 = Architecture(
    "GPT2LMHeadModel", "gpt2", "transformer.h.{}.", r"\.attn\.(masked_)?bias$|^lm_head\.weight$",
    rows={
        "embedding": Row("transformer.wte.weight", "vd>v,d"), "positions": Row("transformer.wpe.weight", "td>t,d"),
        "final_norm.scale": Row("transformer.ln_f.weight", "d>d"),
        "final_norm.bias": Row("transformer.ln_f.bias", "d>d"),
        "layers.attn_norm.scale": Row("ln_1.weight", "d>d"), "layers.attn_norm.bias": Row("ln_1.bias", "d>d"),
        "layers.mlp_norm.scale": Row("ln_2.weight", "d>d"), "layers.mlp_norm.bias": Row("ln_2.bias", "d>d"),
        "layers.wq": Row("attn.c_attn.weight", "dhk>d,hk", 0), "layers.bq": Row("attn.c_attn.bias", "hk>hk", 0),
        "layers.wk": Row("attn.c_attn.weight", "dhk>d,hk", 1), "layers.bk": Row("attn.c_attn.bias", "hk>hk", 1),
        "layers.wv": Row("attn.c_attn.weight", "dhk>d,hk", 2), "layers.bv": Row("attn.c_attn.bias", "hk>hk", 2),
        "layers.wo": Row("attn.c_proj.weight", "hkd>hk,d"), "layers.bo": Row("attn.c_proj.bias", "d>d"),
        "layers.w_up": Row("mlp.c_fc.weight", "df>d,f"), "layers.b_up": Row("mlp.c_fc.bias", "f>f"),
        "layers.w_down": Row("mlp.c_proj.weight", "fd>f,d"), "layers.b_down": Row("mlp.c_proj.bias", "d>d"),
    },
    fields={
        "vocab_size": ("vocab_size",), "num_layers": ("n_layer",), "embed_dim": ("n_embd",), "num_heads": ("n_head",),
        "max_seq_len": ("n_positions",), "norm_eps": ("layer_norm_epsilon", 1e-5), "dropout": ("resid_pdrop", 0.1),
        "tied": ("tie_word_embeddings", True), "init_std": ("initializer_range", 0.02),
    },
    fixed={
        "tie_word_embeddings": True, "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False, "add_cross_attention": False,
    },
    read=_read_gpt2, write=_write_gpt2, needs=_needs_gpt2,
)  # fmt: skip


def from_hf(folder: str | Path, *, dtype: str = "bfloat16", param_dtype: Any = jnp.float32) -> tuple[LMConfig, PyTree]:
    """Reads a Llama or GPT-2 folder of `config.json` and safetensors, whole or in shards.

    Under `jaxpar.mesh.use_mesh` every device's slice is read from the files and placed at once; a process holds at most
    its own slices of one leaf besides. Without a mesh the leaves are ordinary arrays.

    Args:
      folder: As `save_pretrained` or `to_hf` writes it; tensors bfloat16, float16, float32 or float64.
      dtype: Of computation, for `LMConfig.dtype`.
      param_dtype: Of the parameters.

    Returns:
      The model and its parameters. GPT-2's dropout is `resid_pdrop`; a Llama has none.

    Raises:
      UsageError: If a file is absent or damaged, the architecture or a setting is unknown, or a tensor is missing,
        unexpected or misshapen.
    """
    folder, param_dtype = Path(folder), jnp.empty((), param_dtype).dtype
    arch, config = _read_config(folder, dtype)
    with ExitStack() as stack:
        tensors = _find_tensors(folder, arch, config, stack)

        def load(path, leaf, sharding=None):
            blocks = {}

            def block(index):
                bounds = tuple(cut.indices(size)[:2] for cut, size in zip(index, leaf.shape, strict=True))
                # Once for all devices that hold the same.
                if bounds not in blocks:
                    blocks[bounds] = _read(tensors, arch, _dotted(path), leaf, bounds)
                return blocks[bounds]

            if sharding is None:
                return jnp.asarray(block((slice(None),) * len(leaf.shape)))
            return jax.make_array_from_callback(leaf.shape, sharding, block)

        shapes = abstract(config, param_dtype)
        on_mesh = () if jax.sharding.get_mesh().empty else (named_shardings(shapes, axes(config)),)
        return config, jax.tree_util.tree_map_with_path(load, shapes, *on_mesh)


def to_hf(
    params: PyTree,
    config: LMConfig,
    folder: str | Path,
    *,
    dtype: str = "float32",
    max_shard_bytes: int = 4 * 2**30,
    tokenizer: str | Path | None = None,
) -> None:
    """Writes a folder that transformers' `AutoModelForCausalLM` loads, a Llama or a GPT-2 as `config` is one.

    The folder appears under its name once it is whole. At most one file's tensors are in memory at a time; sharded
    parameters are gathered one layer of a leaf at a time. All processes of a run call this, and process 0 writes.
    What the formats cannot hold is left out: a Llama's dropout, and how to compute (`dtype`, remat and the like).

    Args:
      params: As from `jaxpar.lm.init`, `jax.Array`s.
      config: The model.
      folder: Absent or empty.
      dtype: Of the tensors.
      max_shard_bytes: Size of a file, unless one tensor alone is larger.
      tokenizer: A tokenizer.json to copy along.

    Raises:
      UsageError: If the folder holds something or cannot be written, if neither architecture can express the model,
        or if `params` are not of `config`.
    """
    folder, arch = Path(folder).absolute(), _architecture(config)
    flat = _flat(params)
    _check(flat, config, folder, dtype, tokenizer)
    _wait_for_all()  # or another process would find the folder that process 0 has made
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    tensors = _tensors(arch, config)
    sizes = {name: math.prod(shape) * jnp.dtype(dtype).itemsize for name, (shape, _) in tensors.items()}
    files = _files(sizes, max_shard_bytes)
    writes = jax.process_index() == 0
    try:
        if writes:
            partial.mkdir(parents=True)
        for file, names in files.items():
            block = {name: _gather(arch, flat, tensors[name][1], dtype) for name in names}
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
                (partial / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
            (partial / "config.json").write_text(json.dumps(_config_json(arch, config, dtype), indent=2) + "\n")
            partial.replace(folder)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{folder} could not be written: {error}") from error
    finally:
        if writes:
            shutil.rmtree(partial, ignore_errors=True)
    _wait_for_all()


def _config_json(arch: Architecture, config: LMConfig, dtype: str) -> dict:
    values = {"architectures": [arch.name], "model_type": arch.model_type, "torch_dtype": dtype}
    # Left out, these would be the ids of transformers' own vocabularies.
    values |= {"bos_token_id": None, "eos_token_id": None}
    return (
        values | arch.fixed | {key[0]: getattr(config, ours) for ours, key in arch.fields.items()} | arch.write(config)
    )


def _dotted(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _flat(tree: PyTree) -> dict[str, Any]:
    return {_dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _name(arch: Architecture, leaf: str, layer: int) -> str:
    """Returns the tensor that holds `leaf`, of `layer` if it is in one."""
    return (arch.layer.format(layer) if leaf.startswith("layers.") else "") + arch.rows[leaf].name


def _tensors(arch: Architecture, config: LMConfig) -> dict[str, tuple[tuple[int, ...], list[tuple[str, int]]]]:
    """Returns the shape of every tensor of the files, and the leaves and layers that it is made of."""
    tensors = {}
    for name, leaf in _flat(abstract(config)).items():
        ours, theirs = arch.rows[name].layout.split(">")
        rest = len(leaf.shape) - len(ours)
        sizes = dict(zip(ours, leaf.shape[rest:], strict=True))
        shape = [math.prod(sizes[axis] for axis in group) for group in theirs.split(",")]
        shape[-1] *= 1 if arch.rows[name].third is None else 3
        for layer in range(config.num_layers if rest else 1):
            tensors.setdefault(_name(arch, name, layer), (tuple(shape), []))[1].append((name, layer))
    return tensors


def _read(tensors: dict, arch: Architecture, name: str, leaf: jax.ShapeDtypeStruct, bounds: tuple) -> np.ndarray:
    """Reads one block of a leaf, a layer at a time."""
    row, out = arch.rows[name], np.empty([stop - start for start, stop in bounds], leaf.dtype)
    rest = len(leaf.shape) - len(row.layout.split(">")[0])
    for layer, part in zip(range(*bounds[0]), out, strict=True) if rest else [(0, out)]:
        part[...] = _cut(tensors[_name(arch, name, layer)], row, leaf.shape[rest:], bounds[rest:])
    return out


def _cut(tensor: Any, row: Row, shape: tuple[int, ...], bounds: tuple[tuple[int, int], ...]) -> np.ndarray:
    """Reads a leaf's `bounds` out of a tensor of the files, one layer, in the leaf's order."""
    ours, theirs = row.layout.split(">")
    sizes, ranges = dict(zip(ours, shape, strict=True)), dict(zip(ours, bounds, strict=True))
    groups = theirs.split(",")
    cuts, lengths, inner = [], [], []
    for group in groups:
        first, rest = group[0], group[1:]
        stride = math.prod(sizes[axis] for axis in rest)
        shift = (row.third or 0) * sizes[first] if group == groups[-1] else 0
        start, stop = ranges[first]
        cuts.append(slice((shift + start) * stride, (shift + stop) * stride))
        lengths += [stop - start, *(sizes[axis] for axis in rest)]
        inner += [slice(None), *(slice(*ranges[axis]) for axis in rest)]
    block = tensor[tuple(cuts)].reshape(lengths)[tuple(inner)]
    order = theirs.replace(",", "")
    return block.transpose([order.index(axis) for axis in ours])


_pick = jax.jit(lambda leaf, layer: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False))


def _gather(arch: Architecture, flat: dict, parts: list[tuple[str, int]], dtype: str) -> np.ndarray:
    """Brings the leaves of one tensor to every host, and lays them out as the file has them."""
    blocks = []
    for name, layer in sorted(parts, key=lambda part: arch.rows[part[0]].third or 0):
        x = _pick(flat[name], layer) if name.startswith("layers.") else flat[name]
        x = x if x.is_fully_addressable else multihost_utils.process_allgather(x, tiled=True)
        x = np.asarray(x).astype(dtype)
        ours, theirs = arch.rows[name].layout.split(">")
        shape = [math.prod(x.shape[ours.index(axis)] for axis in group) for group in theirs.split(",")]
        blocks.append(x.transpose([ours.index(axis) for axis in theirs.replace(",", "")]).reshape(shape))
    # safetensors writes the memory of a strided array as it lies, without a word.
    return np.ascontiguousarray(np.concatenate(blocks, axis=-1))


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
    return {f"model-{i:05d}-of-{len(shares):05d}.safetensors": share for i, share in enumerate(shares, 1)}


def _wait_for_all() -> None:
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("jaxpar.lm.exchange")


def _architecture(config: LMConfig) -> Architecture:
    """Returns the architecture that expresses `config`, or says which fields stand in the way."""
    reasons = []
    for arch in (LLAMA, GPT2):
        wrong = {field: legal for field, legal in arch.needs(config).items() if getattr(config, field) not in legal}
        if not wrong:
            return arch
        parts = (f"model.{field}={' or '.join(map(str, legal))}" for field, legal in wrong.items())
        reasons.append((wrong, f"{arch.name} needs {' and '.join(parts)}"))
    fields = " ".join(f"{field}={getattr(config, field)}" for field in dict.fromkeys(f for w, _ in reasons for f in w))
    raise UsageError(f"no folder can hold a model with {fields}: {'; '.join(text for _, text in reasons)}.")


def _check(flat: dict, config: LMConfig, folder: Path, dtype: str, tokenizer: str | Path | None) -> None:
    """Refuses what `to_hf` cannot write, before it writes."""
    if dtype not in CHOICES["dtype"]:
        raise UsageError(f"dtype={dtype!r} is unknown; legal are {', '.join(CHOICES['dtype'])}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} already holds something; give a folder that is absent or empty.")
    if tokenizer is not None and not Path(tokenizer).is_file():
        raise UsageError(f"there is no tokenizer file {tokenizer}; give a tokenizer.json or None.")
    given, expected = ({name: leaf.shape for name, leaf in tree.items()} for tree in (flat, _flat(abstract(config))))
    for name in expected | given:
        here, there = given.get(name, "absent"), expected.get(name, "absent")
        if here != there:
            raise UsageError(f"parameter {name} has shape {here}, but the config means {there}.")


def _json(path: Path) -> dict:
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no {path}; give a folder with config.json and safetensors files.") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds {type(values).__name__} instead of an object.")
    return values


def config_from_hf(path: str | Path, *, dtype: str = "bfloat16") -> LMConfig:
    """Returns the model that a `config.json` describes, or that of the folder it lies in; reads no parameter.

    Raises:
      UsageError: If the file is absent or damaged, or the architecture or a setting is unknown.
    """
    return _read_config(Path(path), dtype)[1]


def _read_config(path: Path, dtype: str) -> tuple[Architecture, LMConfig]:
    """Translates `config.json`; an absent key means what it means to transformers."""
    path = path if path.is_file() else path / "config.json"
    values = {key: value for key, value in _json(path).items() if value is not None}
    kind = values.get("model_type")
    name = (values.get("architectures") or [kind])[0]
    arch = next((a for a in (LLAMA, GPT2) if name in (a.name, a.model_type) and kind in (a.model_type, None)), None)
    if arch is None:
        raise UsageError(
            f"{path} is of architecture {name} (model_type {kind}); legal are "
            f"{' and '.join(f'{a.name} (model_type {a.model_type})' for a in (LLAMA, GPT2))}."
        )
    for key, legal in arch.fixed.items():
        if values.get(key, legal) != legal:
            raise UsageError(f"{path} has {key}={values[key]!r}; legal is {legal!r}.")
    if absent := [key[0] for key in arch.fields.values() if len(key) == 1 and key[0] not in values]:
        raise UsageError(f"{path} lacks {', '.join(absent)}.")
    fields = {ours: values.get(*key) for ours, key in arch.fields.items()}
    return arch, LMConfig(**fields, **arch.read(values), dtype=dtype)


def _shards(index: Path) -> list[str]:
    """Returns the files that an index names, which are those beside it: a name must not lead to another folder."""
    names = _json(index).get("weight_map", {}).values()
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[^/\\\x00]+\.safetensors", name):
            raise UsageError(f"{index} has the file {name!r}; legal are names of .safetensors files beside it.")
    return sorted(set(names))


def _find_tensors(folder: Path, arch: Architecture, config: LMConfig, stack: ExitStack) -> dict[str, Any]:
    """Opens the files, without reading them, and returns every tensor's slicer once names and shapes are right."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not whole.is_file() and not index.is_file():
        raise UsageError(f"{folder} has neither {whole.name} nor {index.name}.")
    names = [whole.name] if whole.is_file() else _shards(index)
    prefix, found = arch.layer.split(".")[0] + ".", {}
    for path in (folder / name for name in names):
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
        except (OSError, SafetensorError) as error:
            raise UsageError(f"{path} is not a whole safetensors file: {error}") from error
        for name in file.keys():
            full = name if name.startswith((prefix, "lm_head.")) else prefix + name
            found[full] = file.get_slice(name)
    expected = _tensors(arch, config)
    for name, (shape, _) in expected.items():
        if name not in found:
            raise UsageError(f"{folder} lacks tensor {name} of shape {shape}.")
        if (there := tuple(found[name].get_shape())) != shape:
            raise UsageError(f"tensor {name} in {folder} has shape {there}, but its config.json means {shape}.")
        if found[name].get_dtype() not in FILE_DTYPES:
            raise UsageError(
                f"tensor {name} in {folder} is {found[name].get_dtype()}; legal are {', '.join(FILE_DTYPES)}."
            )
    for name in sorted(found.keys() - expected):
        if not re.search(arch.passed_over, name):
            shape = tuple(found[name].get_shape())
            raise UsageError(f"{folder} has tensor {name} of shape {shape}, which its config.json has no place for.")
    return found
