"""What the JSON files of a Hugging Face folder may hold: read, judged key by key, refused by name."""

import json
import math
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

from jaxpar.types import UsageError

__all__ = ["Kind", "read_json", "refuse_unknown"]


class Kind(NamedTuple):
    """What a key may hold: in words, and as a test that takes any JSON value."""

    legal: str
    holds: Callable[[Any], bool]


def _whole(value: object, least: int, most: int) -> bool:
    return type(value) is int and least <= value <= most  # true and false are ints to Python


def _finite(value: object) -> bool:
    return (
        type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max
    )  # False for NaN


def _id(value: object) -> bool:
    return _whole(value, 0, 2**31 - 1)


SIZE = Kind("a whole number from 1 to 2147483647", lambda x: _whole(x, 1, 2**31 - 1))
LAYERS = Kind("a whole number from 1 to 65535", lambda x: _whole(x, 1, 65535))
POSITIVE = Kind("a finite number over 0", lambda x: _finite(x) and x > 0)
NOT_NEGATIVE = Kind("a finite number of at least 0", lambda x: _finite(x) and x >= 0)
RAISING = Kind("a finite number of at least 1", lambda x: _finite(x) and x >= 1)
SHARE = Kind("a number from 0 to under 1", lambda x: _finite(x) and 0 <= x < 1)
FLAG = Kind("true or false", lambda x: type(x) is bool)
TEXT = Kind("a string", lambda x: isinstance(x, str))
TABLE = Kind("an object", lambda x: isinstance(x, dict))
NAMED_TEXTS = Kind(
    "an object of strings",
    lambda x: isinstance(x, dict) and all(isinstance(item, str) for item in x.values()),
)
NAMES = Kind(
    "a list of strings", lambda x: isinstance(x, list) and all(isinstance(item, str) for item in x)
)
ENDLESS = Kind(
    "[0, Infinity]",
    lambda x: (
        isinstance(x, list)
        and len(x) == 2
        and _finite(x[0])
        and x[0] == 0
        and x[1] in (math.inf, INFINITY)
    ),
)
INFINITY = {"__float__": "Infinity"}  # as transformers 5 writes it
RANK = Kind(
    "a whole number of at least 1, or 'auto'", lambda x: x == "auto" or _whole(x, 1, 2**31 - 1)
)
IDS = Kind(
    "a token's number or a list of them",
    lambda x: _id(x) or isinstance(x, list) and bool(x) and all(map(_id, x)),
)


def literal(*values: object) -> Kind:
    """Returns the kind that holds these values, and no others that Python takes for equal."""
    return Kind(
        " or ".join(map(repr, values)), lambda x: any(type(x) is type(v) and x == v for v in values)
    )


def all_of(value: str) -> Kind:
    """Returns the kind that holds lists of nothing but this string."""
    return Kind(
        f"a list of {value!r}", lambda x: isinstance(x, list) and all(item == value for item in x)
    )


# Keys that change no number that a model computes: where it comes from, how transformers runs, trains or samples it,
# classification heads that a causal model lacks.
HARMLESS = frozenset(
    "architectures attention_dropout attn_implementation attn_pdrop bad_words_ids "
    "begin_suppress_tokens cache_implementation chunk_size_feed_forward cls_token_id "
    "custom_pipelines decoder_start_token_id diversity_penalty do_sample dtype early_stopping "
    "embd_pdrop encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task "
    "forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label is_decoder "
    "is_llama_config label2id length_penalty mask_token_id max_length max_sequence_length "
    "max_window_layers min_length model_max_length model_type n_ctx no_repeat_ngram_size "
    "num_beam_groups num_beams num_labels num_return_sequences output_attentions "
    "output_hidden_states output_past output_router_logits output_scores pad_token_id prefix "
    "pretraining_tp problem_type remove_invalid_values repetition_penalty resid_pdrop return_dict "
    "return_dict_in_generate router_aux_loss_coef sep_token_id summary_activation "
    "summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens "
    "task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype "
    "torchscript transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed "
    "unsloth_version use_bfloat16 use_cache".split()
)

"""Keys of transformers' common configuration class, `PreTrainedConfig`, and of tools around it."""

# Found by reading which attributes of `config` the modules of transformers 5.24.0 use in `forward`, or in what builds
# them: models/<name>/configuration_<name>.py beside models/<name>/modeling_<name>.py. Keys that `HARMLESS` or the
# architecture's own table has are left out here. The keys of time steps draw Mamba-2's first parameters.
UNREAD: dict[str, frozenset[str]] = {
    "mamba2": frozenset(("time_step_init_scheme", "time_step_scale")),
}
"""Keys of an architecture's own configuration class that its forward pass does not read, by `model_type`."""


def has_own_classes(auto_map: object, name: str) -> bool:
    """Returns whether an `auto_map` names no model but the architecture's own.

    Folders older than their architecture in transformers bring code of the same classes, such as
    `modeling_phi3.Phi3ForCausalLM`; code of another class computes something else.

    Args:
      auto_map: Value of the key.
      name: Class of the architecture, such as "Phi3ForCausalLM".
    """
    family = name.removesuffix("ForCausalLM").removesuffix("LMHeadModel")
    if not isinstance(auto_map, dict):
        return False
    for key, value in auto_map.items():
        if key in ("AutoTokenizer", "AutoProcessor"):
            continue
        if not isinstance(value, str) or not value.rpartition(".")[2].startswith(family):
            return False
    return True


def brief(value: object) -> str:
    """Returns a value as an error names it: on one line, and short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def plain(name: object) -> object:
    """Returns a name as it is, unless it would break an error's line."""
    return (
        brief(name)
        if isinstance(name, str) and not (name.isprintable() and len(name) <= 80)
        else name
    )


def check(where: object, key: str, value: object, kind: Kind) -> None:
    """Raises `UsageError` unless `value`, the one of `key` in the file `where`, is of its kind."""
    if not kind.holds(value):
        raise UsageError(f"{where} has {key}={brief(value)}; legal is {kind.legal}.")


def refuse_unknown(
    where: object,
    values: Mapping[str, object],
    known: Mapping[str, Kind],
    unread: Collection[str] = (),
    strict: bool = True,
) -> None:
    """Judges the keys of a `config.json`, nulls left out: the known ones by their kinds, others unless they are off.

    An unknown key may change what the model computes, so it passes only if it is harmless, or false.

    Args:
      where: File that an error names.
      values: Values of the file by key, without nulls.
      known: Kinds of the keys that are honoured.
      unread: Keys of the architecture that its forward pass does not read.
      strict: Whether other keys are rejected; otherwise one warning names them all.

    Raises:
      UsageError: For the first key that is not honoured, or of another kind.
    """
    windowed = values.get("use_sliding_window", True)
    unknown: list[str] = []
    for key, value in values.items():
        if key in known:
            check(where, key, value, known[key])
        elif key == "sliding_window" and windowed is False:
            continue
        elif key in HARMLESS or key in unread or key.startswith("_") or value is False:
            continue
        elif not strict:
            unknown.append(f"{plain(key)}={brief(value)}")
        elif key == "sliding_window":
            raise UsageError(
                f"{where} has sliding_window={brief(value)}; legal is null, or use_sliding_window=false."
            )
        else:
            raise UsageError(
                f"{where} has {plain(key)}={brief(value)}, which is not honoured here and may change what the model "
                "computes; legal is null, false, or no such key, and strict=false loads the folder without it."
            )
    if unknown:
        warnings.warn(
            f"{where} has {', '.join(unknown)}, which are not honoured: the model may compute something else.",
            stacklevel=2,
        )


def read_json(path: Path) -> dict[str, Any]:  # any JSON, before it is checked
    """Returns the object that a JSON file holds.

    Raises:
      UsageError: If it is absent, no JSON, or no object.
    """
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"there is no {path}; give a folder with config.json and safetensors files."
        ) from None
    except RecursionError:
        raise UsageError(
            f"{path} is not a JSON file that can be read: it is nested too deep."
        ) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a JSON file: {error}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} holds {type(values).__name__} instead of an object.")
    return values
