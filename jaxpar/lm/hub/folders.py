"""What the tables of Hugging Face folders share: their form, and the keys of rotary positions and of windows."""

import math
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from jaxpar.lm.config import LMConfig
from jaxpar.lm.hub.keys import (
    NOT_NEGATIVE,
    POSITIVE,
    RAISING,
    SIZE,
    TABLE,
    Kind,
    brief,
    check,
    literal,
    plain,
)
from jaxpar.types import UsageError


class Place(NamedTuple):
    """Where a leaf lies in the files."""

    name: str  # of the tensor; in a layer, what follows the layer's prefix; with {} for the number of an expert
    layout: str  # the leaf's axes > the tensor's, commas between; "dhk>hk,d": Linear [out, in], out = h * K + k
    part: int = 0  # which of the leaves that are fused in the tensor, one behind the other
    along: int = -1  # the axis of the tensor along which they are


class Architecture(NamedTuple):
    """One kind of folder; the parts of `config.json` that are not one key a field go through `read` and `write`."""

    name: str  # in "architectures"
    model_type: str
    layer: str  # prefix of a layer's tensors; a file may lack its first word
    passed_over: str  # pattern of tensors that are no parameters
    rows: dict[
        str, Place
    ]  # leaf -> place; of layers whose mixers differ, without the number of their place in a turn
    fields: dict[
        str, tuple
    ]  # field -> its key and kind, and the default of transformers unless required
    others: dict[str, Kind]  # keys that `read` translates
    fixed: dict[str, Any]  # key -> the one value that this library computes
    read: Callable[[dict], dict]  # config.json without nulls -> the other fields
    write: Callable[[LMConfig], dict]  # its inverse
    needs: Callable[
        [LMConfig], dict[str, tuple]
    ]  # config -> legal values of the fields that are not free
    nulls: tuple[
        str, ...
    ] = ()  # keys whose null says "none", not what an absent one means: `read` then finds 0


PART = Kind("a number over 0, up to 1", lambda x: type(x) in (int, float) and 0 < x <= 1)
TYPES = ("full_attention", "sliding_attention")
LAYER_TYPES = Kind(
    f"a list of {' and '.join(TYPES)}",
    lambda x: isinstance(x, list) and all(item in TYPES for item in x),
)
ROPE = {
    "rope.factor": "factor", "rope.low_freq_factor": "low_freq_factor", "rope.high_freq_factor": "high_freq_factor",
    "rope.original_len": "original_max_position_embeddings",
}  # fmt: skip
ROPE_KINDS = {
    "rope_theta": POSITIVE, "partial_rotary_factor": literal(1.0, 1), "factor": RAISING, "low_freq_factor": POSITIVE,
    "high_freq_factor": POSITIVE, "original_max_position_embeddings": SIZE,
}  # fmt: skip
ROPE_KEYS = {
    "rope_theta": POSITIVE, "partial_rotary_factor": literal(1.0, 1), "rope_scaling": TABLE, "rope_parameters": TABLE,
}  # fmt: skip
YARN = {"rope.factor": "factor", "rope.original_len": "original_max_position_embeddings"}
SCALINGS = {
    "default": {},
    "linear": {"rope.factor": "factor"},
    "llama3": ROPE,
    "yarn": YARN,
    "dynamic": {"rope.factor": "factor"},
}
"""The rope types that are honoured -> the keys that each needs."""
OPTIONAL: dict[str, dict[str, Kind]] = {
    "yarn": {
        "attention_factor": POSITIVE,
        "beta_fast": POSITIVE,
        "beta_slow": POSITIVE,
        "mscale": NOT_NEGATIVE,
        "mscale_all_dim": NOT_NEGATIVE,
        "truncate": literal(True),
    },
    # Older files of Phi-3 and of others hold it beside the rule, which reads max_position_embeddings.
    "dynamic": {"original_max_position_embeddings": SIZE},
}
"""The keys that a rope type may have besides."""

PLAIN = {
    "mixer.kind": ("attention",), "mixer.in_turn": ((),), "residual.kind": ("standard",), "weights": ("full",),
    "norm.post_norms": (False,),
    "embedding.scale": (False,), "embedding.logit_cap": (0.0,), "norm.plus_one": (False,),
}  # fmt: skip
"""What all but Gemma's kinds need."""

OF_SCORES = {
    "attention.qk_norm": (False,), "attention.qkv_bias": (False,), "attention.windows": ((),),
    "attention.score_cap": (0.0,), "attention.score_dim": (0.0,),
    "rope.theta_local": (0.0,), "rope.share": (1.0,),
}  # fmt: skip
LIKE_LLAMA = {"norm.kind": "rms", "positions": "rope", "mlp.activation": "swiglu"}


def read_rope(values: dict, theta: float = 10000.0, is_partial: bool = False) -> dict:
    """Translates `rope_theta`, `rope_scaling` and `rope_parameters`, which may hold parts of each other."""
    rope: dict[str, Any] = {}
    beside = {key: values[key] for key in ("rope_theta", "partial_rotary_factor") if key in values}
    for part in (beside, values.get("rope_scaling", {}), values.get("rope_parameters", {})):
        for key, value in part.items():
            if value is not None and rope.setdefault(key, value) != value:
                raise UsageError(
                    f"{key} is {brief(rope[key])} and {brief(value)}; legal is one value."
                )
    length = values.get("max_position_embeddings")
    old_name = rope.pop("type", "default")
    kind = rope.pop("rope_type", old_name)
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise UsageError(f"rope type {brief(kind)} is unknown; legal are {', '.join(SCALINGS)}.")
    keys = SCALINGS[kind]
    if kind == "yarn":
        _say_original_length(rope, values)
    names = ("rope_theta", "partial_rotary_factor", *keys.values())
    kinds = {key: ROPE_KINDS[key] for key in names} | OPTIONAL.get(kind, {})
    if is_partial:
        kinds["partial_rotary_factor"] = PART
    if absent := [key for key in keys.values() if key not in rope]:
        raise UsageError(f"rope type {kind!r} also needs {', '.join(absent)}.")
    for key, value in rope.items():
        if key not in kinds:
            raise UsageError(
                f"rope type {kind!r} does not honour {plain(key)}={brief(value)}; legal are {', '.join(kinds)}."
            )
        check("the rope of config.json", key, value, kinds[key])
    if kind == "llama3" and not rope["high_freq_factor"] > rope["low_freq_factor"]:
        raise UsageError(
            f"high_freq_factor={rope['high_freq_factor']} is not over low_freq_factor={rope['low_freq_factor']}, "
            "between which wavelengths are blended."
        )
    out = {ours: rope[key] for ours, key in keys.items()} | {
        "rope.theta": rope.get("rope_theta", theta)
    }
    if is_partial:
        out["rope.share"] = float(rope.get("partial_rotary_factor", 1.0))
    if kind == "yarn":
        out |= _yarn(rope)
    if kind == "dynamic":
        out["rope.original_len"] = _dynamic_length(rope, length)
    return out | ({} if kind in ("default", "llama3") else {"rope.scaling": kind})


def _say_original_length(rope: dict, values: dict) -> None:
    """Adds the length before scaling, which may stand beside the rope or be that of the model."""
    key = "original_max_position_embeddings"
    beside = values.get(key)
    if beside is not None and rope.setdefault(key, beside) != beside:
        raise UsageError(
            f"{key}={brief(beside)}: {brief(rope[key])} in rope_scaling; expected one value."
        )
    if "max_position_embeddings" in values:
        rope.setdefault(key, values["max_position_embeddings"])


def _yarn(rope: dict) -> dict:
    """Translates the keys of yarn that may be absent."""
    low = rope.get("beta_slow", 1)
    high = rope.get("beta_fast", 32)
    if not high > low:
        raise UsageError(
            f"beta_fast={high}: not over beta_slow={low}, between which wavelengths are blended; "
            f"expected a number over {low}."
        )
    out: dict[str, Any] = {"rope.low_freq_factor": low, "rope.high_freq_factor": high}
    scale = rope.get("attention_factor", 0.0)
    above = rope.get("mscale", 0)
    below = rope.get("mscale_all_dim", 0)
    if not scale and above and below:
        growth = 0.1 * math.log(rope["factor"])
        scale = (above * growth + 1) / (below * growth + 1)
    return out | {"rope.score_scale": float(scale)}


def _dynamic_length(rope: dict, length: int | None) -> int:
    """Returns the length up to which the dynamic rule changes nothing."""
    if length is None:
        raise UsageError(
            "rope type 'dynamic' also needs max_position_embeddings, the length that it begins at."
        )
    given = rope.get("original_max_position_embeddings", length)
    if given != length:
        raise UsageError(
            f"original_max_position_embeddings={given}: the dynamic rule begins at "
            f"max_position_embeddings={length}; expected that, or no such key."
        )
    return length


def write_rope(c: LMConfig) -> dict:
    """The inverse, in the older spelling, which every version of transformers reads."""
    keys = SCALINGS[c.rope.scaling]
    scaling = {"rope_type": c.rope.scaling} | {
        key: attrgetter(ours)(c) for ours, key in keys.items()
    }
    if c.rope.scaling == "yarn":
        scaling |= {
            "beta_slow": c.rope.low_freq_factor,
            "beta_fast": c.rope.high_freq_factor,
            "attention_factor": c.rope.score_scale or 0.1 * math.log(c.rope.factor) + 1,
        }
    return {"rope_theta": c.rope.theta, "rope_scaling": None if c.rope.factor == 1.0 else scaling}


def read_windows(values: dict, window: int, types: list[str]) -> dict:
    """Translates which layers see a window: `layer_types` if it is there, else `types`, by `sliding_window`.

    Args:
      values: Of config.json.
      window: Of `sliding_window`, as transformers takes it; 0 for none.
      types: What layers are where the file does not say it.
    """
    given = values.get("layer_types", types)
    if len(given) != len(types):
        raise UsageError(
            f"layer_types names {len(given)} layers of num_hidden_layers={len(types)}; legal is one each."
        )
    if TYPES[1] in given and not window:
        raise UsageError(
            "layer_types has sliding_attention, but there is no sliding_window; legal is a whole number."
        )
    return {"attention.windows": tuple(window if name == TYPES[1] else 0 for name in given)}


def write_windows(c: LMConfig) -> dict:
    """The inverse; its two keys are for architectures that have both."""
    turn = c.attention.windows or (0,)
    every = [turn[layer % len(turn)] for layer in range(c.num_layers)]
    types = [TYPES[bool(window)] for window in every]
    return {"sliding_window": max(every) or None, "layer_types": types}


def needs_rms(c: LMConfig) -> dict[str, tuple]:
    """What architectures of Llama's kind need."""
    return needs_attention(c) | {field: (value,) for field, value in LIKE_LLAMA.items()}


def needs_attention(c: LMConfig) -> dict[str, tuple]:
    """What architectures need whose mixers are attention as GPT-2 and Llama have it."""
    return PLAIN | OF_SCORES | {"mlp.dim": (max(1, c.mlp.dim),)}


def one_window(c: LMConfig) -> dict[str, tuple]:
    """The windows that `layer_types` and one `sliding_window` can say: those of the config, or none."""
    return {
        "attention.windows": (
            c.attention.windows
            if len({window for window in c.attention.windows if window}) < 2
            else (),
        )
    }
