"""What mixes the tokens of a language model, by its name and flags: one row a name."""

import dataclasses
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from jaxpar.nn.attention import Attention, Visible
from jaxpar.nn.attention.context import SplitSequence
from jaxpar.nn.cells.solvers import solver
from jaxpar.nn.mixer import Mixer
from jaxpar.nn.mixers.block_recurrent import GATES, BlockRecurrent
from jaxpar.nn.mixers.by_name import LAYERS, layer_of, layer_size
from jaxpar.nn.mixers.hgrn import Hgrn
from jaxpar.nn.mixers.lmu import Lmu, equal_units
from jaxpar.nn.mixers.matrix_state import MatrixState
from jaxpar.nn.mixers.recurrent import CELLS, Recurrent, cell_of, equal_size
from jaxpar.nn.mixers.ssd import Mamba2
from jaxpar.nn.mixers.tcnca import Tcnca
from jaxpar.nn.norm import Norm
from jaxpar.nn.position import Rope
from jaxpar.types import UsageError

__all__ = ["mixers_of", "with_mixer"]

if TYPE_CHECKING:
    from jaxpar.lm.config import LMConfig

OF_ATTENTION = ("qk_norm", "qkv_bias", "windows", "score_cap", "score_dim", "rope_theta_local")
OWN = {
    **dict.fromkeys(OF_ATTENTION, "attention"),
    "mixer_dim": "recurrent mixers and those with a matrix state",
    "mixer_key_dim": "mixers with a matrix state",
    "mixer_groups": "mamba2",
    "mixer_window": "lmu, block_recurrent, windowed and tcnca",
    "mixer_states": "lmu and block_recurrent",
}
"""Fields that some mixers read, and whose they are in words."""


class Row(NamedTuple):
    """How a mixer is made.

    Attributes:
      make: From the configuration, its name and its units.
      units: Returns as many as make it as large as attention would be; None where heads alone say its size.
      reads: The fields of `OWN` that it reads.
    """

    make: Callable[["LMConfig", str, int], Mixer]
    units: Callable[["LMConfig", str], int] | None = None
    reads: tuple[str, ...] = ()


def mixers_of(config: "LMConfig") -> Mixer | tuple[Mixer, ...]:
    """Returns the mixer of all layers, or those that layers have in turn."""
    names, windows = _names(config), config.windows or (0,)
    count = math.lcm(len(names), len(windows))
    if config.num_layers % count and config.num_layers % len(names) == 0:
        count = config.num_layers  # the turn of windows is cut off by the last layer
    made = []
    for layer in range(count):
        name, window = names[layer % len(names)], windows[layer % len(windows)]
        mixer = MIXERS[name].make(config, name, _units(config, name))
        made.append(
            _windowed_attention(config, mixer, window) if isinstance(mixer, Attention) else mixer
        )
    return tuple(made) if count > 1 else made[0]


def with_mixer(config: "LMConfig", mixer: str) -> "LMConfig":
    """Returns the configuration with another mixer, at attention's size; fields that it does not read are the usual.

    A block-recurrent mixer has no units of its own: its heads get the even size that comes nearest.
    """
    reads = MIXERS[mixer].reads if mixer in MIXERS else ()
    usual = {
        name: getattr(type(config), name)
        for name in OWN
        if name not in reads or name == "mixer_dim"
    }
    changed = dataclasses.replace(config, mixer=mixer, **usual)
    if mixer not in BLOCK_RECURRENT:
        return changed
    size = _size_of_attention(changed)
    return dataclasses.replace(
        changed,
        head_dim=min(
            range(2, config.head_dim + 2, 2), key=lambda k: abs(_size_of_heads(changed, k) - size)
        ),
    )


def check_mixers(config: "LMConfig") -> None:
    """Fills the size of a recurrent mixer in, and refuses fields of others."""
    object.__setattr__(config, "mixers", tuple(config.mixers))
    names = _names(config)
    if config.mixers and config.mixer != "attention":
        raise UsageError(
            f"model.mixer={config.mixer} is one for all layers; take model.mixers or it, not both."
        )
    for name, whose in OWN.items():
        value, default = getattr(config, name), getattr(type(config), name)
        if value != default and not any(name in MIXERS[mixer].reads for mixer in names):
            value, default = (
                str(x).lower() if isinstance(x, bool) else x for x in (value, default)
            )
            asked = ", ".join(dict.fromkeys(names))
            raise UsageError(
                f"model.{name}={value} is of {whose}, not of model.mixer={asked}; take {default}."
            )
    for mixer in names:
        _check_one(config, mixer)
    if not config.mixers:
        object.__setattr__(config, "mixer_dim", _units(config, config.mixer))


def _check_one(config: "LMConfig", name: str) -> None:
    if name == "attention":
        return
    moves = config.context != "auto" and "attention" not in _names(config)
    if moves or config.context_order not in ("auto", "contiguous"):
        raise UsageError(
            f"model.mixer={name} reads tokens in turn; take model.context=auto, model.context_order=contiguous."
        )
    if name in WINDOWED and config.num_kv_heads != config.num_heads:
        raise UsageError(
            f"model.mixer={name} has a key head for each of its heads; take model.num_kv_heads=0."
        )
    if name == "mamba2" and config.num_heads % config.mixer_groups:
        raise UsageError(
            f"model.mixer_groups={config.mixer_groups} must divide model.num_heads={config.num_heads}."
        )
    unit = 4 * config.num_heads
    if name in LAYERS and config.mixer_dim % unit:
        nearest = max(unit, round(config.mixer_dim / unit) * unit)
        raise UsageError(
            f"model.mixer_dim={config.mixer_dim} is no multiple of 4 heads, {unit}, as model.mixer={name} needs; "
            f"nearest is {nearest}."
        )


def _names(config: "LMConfig") -> tuple[str, ...]:
    return tuple(config.mixers) or (config.mixer,)


def _units(config: "LMConfig", name: str) -> int:
    units = MIXERS[name].units
    return 0 if units is None else config.mixer_dim or units(config, name)


def _size_of_attention(config: "LMConfig") -> int:
    return 2 * config.embed_dim * config.head_dim * (config.num_heads + config.num_kv_heads)


def _size_of_heads(config: "LMConfig", head_dim: int) -> int:
    """Parameters of a block-recurrent mixer whose heads are of this size."""
    mixer = dataclasses.replace(_windowed(config, config.mixer, 0), head_dim=head_dim)
    leaves = mixer.leaves(config.embed_dim, 1.0, 1.0)["mixer"]
    return sum(math.prod(leaf.shape) for leaf in leaves.values())


def _attention(config: "LMConfig", name: str, units: int) -> Attention:
    del name, units
    scaling = (
        config.rope_low_freq_factor,
        config.rope_high_freq_factor,
        config.rope_original_len,
        config.rope_scaling,
    )
    rope = Rope(config.rope_theta, config.rope_factor, *scaling, config.rope_share)
    rope = rope if config.positions == "rope" else None
    heads = config.num_heads, config.num_kv_heads, config.head_dim
    norm = (
        Norm(config.norm, config.norm_eps, config.bias, config.norm_plus_one)
        if config.qk_norm
        else None
    )
    attend = SplitSequence(config.context, config.context_order)
    options = {
        "dropout": config.dropout,
        "impl": config.attention,
        "attend": attend,
        "qk_norm": norm,
    }
    scores = {"score_cap": config.score_cap, "score_dim": config.score_dim}
    return Attention(*heads, config.bias, rope, qkv_bias=config.qkv_bias, **scores, **options)


def _windowed_attention(config: "LMConfig", mixer: Attention, window: int) -> Attention:
    """The attention of a layer that sees `window` tokens, with the rotary base of such layers."""
    if not window:
        return mixer
    rope = mixer.positions
    if isinstance(rope, Rope) and config.rope_theta_local:
        rope = Rope(config.rope_theta_local, share=config.rope_share)
    return dataclasses.replace(mixer, visible=Visible(window=window), positions=rope)


def _recurrent(config: "LMConfig", name: str, units: int) -> Recurrent:
    return Recurrent(cell_of(name, units, config.num_heads), solver(config.solver))


def _hgrn(config: "LMConfig", name: str, units: int) -> Hgrn:
    del name
    return Hgrn(units, config.norm_eps)


def _matrix_state(config: "LMConfig", name: str, units: int) -> MatrixState:
    return MatrixState(
        layer_of(name, units, config.num_heads, config.mixer_key_dim), config.mixer_chunk
    )


def _mamba2(config: "LMConfig", name: str, units: int) -> MatrixState:
    del name
    values = units // config.num_heads
    sizes = config.num_heads, config.mixer_key_dim or values, values
    return MatrixState(Mamba2(*sizes, config.mixer_groups, eps=config.norm_eps), config.mixer_chunk)


def _lmu(config: "LMConfig", name: str, units: int) -> Lmu:
    sizes = units, config.num_heads, config.mixer_states, float(config.mixer_window)
    return Lmu(*sizes, spiking=name == "spiking_lmu")


def _windowed(config: "LMConfig", name: str, units: int) -> BlockRecurrent:
    del units
    states, gate = 0 if name == "windowed" else config.mixer_states, GATES[name.endswith("lstm")]
    return BlockRecurrent(config.num_heads, config.head_dim, config.mixer_window, states, gate)


def _tcnca(config: "LMConfig", name: str, units: int) -> Tcnca:
    del name, units
    rope = Rope(config.rope_theta) if config.positions == "rope" else None
    return Tcnca(config.num_heads, config.head_dim, config.mixer_window, positions=rope)


def _equal_cells(config: "LMConfig", name: str) -> int:
    return equal_size(name, config.embed_dim, config.num_heads, _size_of_attention(config))


def _equal_hgrn(config: "LMConfig", name: str) -> int:
    del name  # four matrices
    return max(8, round(_size_of_attention(config) / config.embed_dim / 32) * 8)


def _equal_layers(config: "LMConfig", name: str) -> int:
    sizes = config.embed_dim, config.num_heads, _size_of_attention(config), config.mixer_key_dim
    return layer_size(name, *sizes)


def _equal_lmus(config: "LMConfig", name: str) -> int:
    del name
    return equal_units(
        config.embed_dim, config.num_heads, config.mixer_states, _size_of_attention(config)
    )


BLOCK_RECURRENT = ("block_recurrent", "block_recurrent_lstm")
WINDOWED = ("windowed", *BLOCK_RECURRENT, "tcnca")

MIXERS: dict[str, Row] = {
    "attention": Row(_attention, None, OF_ATTENTION),
    **dict.fromkeys(CELLS, Row(_recurrent, _equal_cells, ("mixer_dim",))),
    "hgrn": Row(_hgrn, _equal_hgrn, ("mixer_dim",)),
    **dict.fromkeys(LAYERS, Row(_matrix_state, _equal_layers, ("mixer_dim", "mixer_key_dim"))),
    "mamba2": Row(_mamba2, _equal_layers, ("mixer_dim", "mixer_key_dim", "mixer_groups")),
    **dict.fromkeys(
        ("lmu", "spiking_lmu"),
        Row(_lmu, _equal_lmus, ("mixer_dim", "mixer_window", "mixer_states")),
    ),
    **dict.fromkeys(BLOCK_RECURRENT, Row(_windowed, None, ("mixer_window", "mixer_states"))),
    "windowed": Row(_windowed, None, ("mixer_window",)),
    "tcnca": Row(_tcnca, None, ("mixer_window",)),
}
"""Name -> how it is made: what `model.mixer` and `model.mixers` may be."""
