"""What mixes the tokens of a language model, by its name and flags: one row a name."""

import dataclasses
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from jaxpar.fields import replace_nested
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
from jaxpar.nn.position import Rope
from jaxpar.types import UsageError

__all__ = ["mixers_of", "with_mixer"]

if TYPE_CHECKING:
    from jaxpar.lm.config import LMConfig

OF_ATTENTION = (
    "attention.qk_norm",
    "attention.qkv_bias",
    "attention.windows",
    "attention.score_cap",
    "attention.score_dim",
    "rope.theta_local",
)
OWN = {
    **dict.fromkeys(OF_ATTENTION, "attention"),
    "mixer.dim": "recurrent mixers and those with a matrix state",
    "mixer.key_dim": "mixers with a matrix state",
    "mixer.groups": "mamba2",
    "mixer.window": "lmu, block_recurrent, windowed and tcnca",
    "mixer.states": "lmu and block_recurrent",
}
"""Fields that some mixers read, by their paths, and in words whose they are."""


class Row(NamedTuple):
    """How a mixer is made.

    Attributes:
      make: From the configuration, its kind and its units.
      units: Returns as many as make it as large as attention would be; None where heads alone say
        its size.
      reads: The fields of `OWN` that it reads.
    """

    make: Callable[["LMConfig", str, int], Mixer]
    units: Callable[["LMConfig", str], int] | None = None
    reads: tuple[str, ...] = ()


def mixers_of(config: "LMConfig") -> Mixer | tuple[Mixer, ...]:
    """Returns the mixer of all layers, or those that layers have in turn."""
    kinds = config.mixer.kinds
    windows = config.attention.windows or (0,)
    count = math.lcm(len(kinds), len(windows))
    if config.num_layers % count and config.num_layers % len(kinds) == 0:
        count = config.num_layers  # the turn of windows is cut off by the last layer

    made = []
    for layer in range(count):
        kind = kinds[layer % len(kinds)]
        mixer = MIXERS[kind].make(config, kind, _units(config, kind))
        if isinstance(mixer, Attention):
            mixer = _windowed_attention(config, mixer, windows[layer % len(windows)])
        made.append(mixer)
    return tuple(made) if count > 1 else made[0]


def with_mixer(config: "LMConfig", kind: str) -> "LMConfig":
    """Returns the configuration with another mixer, at attention's size.

    Fields that it does not read have their defaults. A block-recurrent mixer has no units of its
    own: its heads get the even size that comes nearest.
    """
    reads = MIXERS[kind].reads if kind in MIXERS else ()
    usual = {
        path: _default(config, path) for path in OWN if path not in reads or path == "mixer.dim"
    }
    changed = replace_nested(config, usual | {"mixer.kind": kind})
    if kind not in BLOCK_RECURRENT:
        return changed
    size = _size_of_attention(changed)
    sizes = range(2, config.attention.head_dim + 2, 2)
    nearest = min(sizes, key=lambda head_dim: abs(_size_of_heads(changed, head_dim) - size))
    return replace_nested(changed, {"attention.head_dim": nearest})


def check_mixers(config: "LMConfig") -> None:
    """Fills the size of a recurrent mixer in, and rejects fields of others."""
    kinds = config.mixer.kinds
    for path, whose in OWN.items():
        value = operator.attrgetter(path)(config)
        default = _default(config, path)
        if value != default and not any(path in MIXERS[kind].reads for kind in kinds):
            asked = ", ".join(dict.fromkeys(kinds))
            raise UsageError(
                f"model.{path}={_flag_text(value)} is of {whose}, not of "
                f"model.mixer.kind={asked}; take {_flag_text(default)}."
            )
    for kind in kinds:
        _check_one(config, kind)
    if not config.mixer.in_turn:
        units = _units(config, config.mixer.kind)
        object.__setattr__(config, "mixer", dataclasses.replace(config.mixer, dim=units))


def _default(config: "LMConfig", path: str) -> object:
    """Returns the default of a field of a group."""
    group, _, name = path.partition(".")
    return getattr(type(config).__dataclass_fields__[group].default, name)


def _flag_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _check_one(config: "LMConfig", kind: str) -> None:
    if kind == "attention":
        return
    execution = config.execution
    moves = execution.context != "auto" and "attention" not in config.mixer.kinds
    if moves or execution.context_order not in ("auto", "contiguous"):
        raise UsageError(
            f"model.mixer.kind={kind} reads tokens in turn; take model.execution.context=auto, "
            "model.execution.context_order=contiguous."
        )
    heads = config.attention.num_heads
    if kind in WINDOWED and config.attention.num_kv_heads != heads:
        raise UsageError(
            f"model.mixer.kind={kind} has a key head for each of its heads; "
            "take model.attention.num_kv_heads=0."
        )
    if kind == "mamba2" and heads % config.mixer.groups:
        raise UsageError(
            f"model.mixer.groups={config.mixer.groups} must divide "
            f"model.attention.num_heads={heads}."
        )
    unit = 4 * heads
    if kind in LAYERS and config.mixer.dim % unit:
        nearest = max(unit, round(config.mixer.dim / unit) * unit)
        raise UsageError(
            f"model.mixer.dim={config.mixer.dim} is no multiple of 4 heads, {unit}, as "
            f"model.mixer.kind={kind} needs; nearest is {nearest}."
        )


def _units(config: "LMConfig", kind: str) -> int:
    units = MIXERS[kind].units
    if units is None:
        return 0
    return config.mixer.dim or units(config, kind)


def _size_of_attention(config: "LMConfig") -> int:
    heads = config.attention.num_heads + config.attention.num_kv_heads
    return 2 * config.embed_dim * config.attention.head_dim * heads


def _size_of_heads(config: "LMConfig", head_dim: int) -> int:
    """Returns the number of parameters of a block-recurrent mixer whose heads are of this size."""
    mixer = dataclasses.replace(_windowed(config, config.mixer.kind, 0), head_dim=head_dim)
    leaves = mixer.leaves(config.embed_dim, 1.0, 1.0)["mixer"]
    return sum(math.prod(leaf.shape) for leaf in leaves.values())


def _attention(config: "LMConfig", kind: str, units: int) -> Attention:
    del kind, units
    attention = config.attention
    rope = None
    if config.positions == "rope":
        rope = Rope(
            theta=config.rope.theta,
            factor=config.rope.factor,
            low_freq_factor=config.rope.low_freq_factor,
            high_freq_factor=config.rope.high_freq_factor,
            original_len=config.rope.original_len,
            scaling=config.rope.scaling,
            share=config.rope.share,
            score_scale=config.rope.score_scale,
        )
    return Attention(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        bias=config.bias,
        positions=rope,
        dropout=config.dropout,
        impl=config.execution.kernel,
        attend=SplitSequence(config.execution.context, config.execution.context_order),
        qk_norm=config.norm_layer() if attention.qk_norm else None,
        qkv_bias=attention.qkv_bias,
        score_cap=attention.score_cap,
        score_dim=attention.score_dim,
    )


def _windowed_attention(config: "LMConfig", mixer: Attention, window: int) -> Attention:
    """Returns the attention of a layer that sees `window` tokens, with the rotary base of such layers."""
    if not window:
        return mixer
    rope = mixer.positions
    if isinstance(rope, Rope) and config.rope.theta_local:
        rope = Rope(theta=config.rope.theta_local, share=config.rope.share)
    return dataclasses.replace(mixer, visible=Visible(window=window), positions=rope)


def _recurrent(config: "LMConfig", kind: str, units: int) -> Recurrent:
    cell = cell_of(kind, units, config.attention.num_heads)
    return Recurrent(cell, solver(config.execution.solver))


def _hgrn(config: "LMConfig", kind: str, units: int) -> Hgrn:
    del kind
    return Hgrn(units, config.norm.eps)


def _matrix_state(config: "LMConfig", kind: str, units: int) -> MatrixState:
    layer = layer_of(kind, units, config.attention.num_heads, config.mixer.key_dim)
    return MatrixState(layer, config.execution.mixer_chunk)


def _mamba2(config: "LMConfig", kind: str, units: int) -> MatrixState:
    del kind
    heads = config.attention.num_heads
    values = units // heads
    layer = Mamba2(
        heads,
        config.mixer.key_dim or values,
        values,
        config.mixer.groups,
        eps=config.norm.eps,
    )
    return MatrixState(layer, config.execution.mixer_chunk)


def _lmu(config: "LMConfig", kind: str, units: int) -> Lmu:
    return Lmu(
        units,
        config.attention.num_heads,
        config.mixer.states,
        float(config.mixer.window),
        spiking=kind == "spiking_lmu",
    )


def _windowed(config: "LMConfig", kind: str, units: int) -> BlockRecurrent:
    del units
    states = 0 if kind == "windowed" else config.mixer.states
    gate = GATES[kind.endswith("lstm")]
    heads = config.attention
    return BlockRecurrent(heads.num_heads, heads.head_dim, config.mixer.window, states, gate)


def _tcnca(config: "LMConfig", kind: str, units: int) -> Tcnca:
    del kind, units
    rope = Rope(theta=config.rope.theta) if config.positions == "rope" else None
    heads = config.attention
    return Tcnca(heads.num_heads, heads.head_dim, config.mixer.window, positions=rope)


def _equal_cells(config: "LMConfig", kind: str) -> int:
    heads = config.attention.num_heads
    return equal_size(kind, config.embed_dim, heads, _size_of_attention(config))


def _equal_hgrn(config: "LMConfig", kind: str) -> int:
    del kind  # four matrices
    return max(8, round(_size_of_attention(config) / config.embed_dim / 32) * 8)


def _equal_layers(config: "LMConfig", kind: str) -> int:
    heads = config.attention.num_heads
    size = _size_of_attention(config)
    return layer_size(kind, config.embed_dim, heads, size, config.mixer.key_dim)


def _equal_lmus(config: "LMConfig", kind: str) -> int:
    del kind
    heads = config.attention.num_heads
    return equal_units(config.embed_dim, heads, config.mixer.states, _size_of_attention(config))


BLOCK_RECURRENT = ("block_recurrent", "block_recurrent_lstm")
WINDOWED = ("windowed", *BLOCK_RECURRENT, "tcnca")

MIXERS: dict[str, Row] = {
    "attention": Row(_attention, None, OF_ATTENTION),
    **dict.fromkeys(CELLS, Row(_recurrent, _equal_cells, ("mixer.dim",))),
    "hgrn": Row(_hgrn, _equal_hgrn, ("mixer.dim",)),
    **dict.fromkeys(LAYERS, Row(_matrix_state, _equal_layers, ("mixer.dim", "mixer.key_dim"))),
    "mamba2": Row(_mamba2, _equal_layers, ("mixer.dim", "mixer.key_dim", "mixer.groups")),
    **dict.fromkeys(
        ("lmu", "spiking_lmu"),
        Row(_lmu, _equal_lmus, ("mixer.dim", "mixer.window", "mixer.states")),
    ),
    **dict.fromkeys(BLOCK_RECURRENT, Row(_windowed, None, ("mixer.window", "mixer.states"))),
    "windowed": Row(_windowed, None, ("mixer.window",)),
    "tcnca": Row(_tcnca, None, ("mixer.window",)),
}
"""Name -> how it is made: what `model.mixer.kind` and `model.mixer.in_turn` may be."""
