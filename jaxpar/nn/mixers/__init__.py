"""Mixers beside attention, which has a room of its own.

| file | in -> out shapes | called by |
|---|---|---|
| `recurrent` | params, x [B, T, D], state [B, n] -> y [B, T, D], state | `stack`, `network`, `rl` |
| `hgrn` | params, x [B, T, D], state [B, n] -> y [B, T, D], state | `stack` |
| `linear_attention`, `delta_rule` | q, k, v [B, T, H, ...], gates -> o [B, T, H, V], S [B, H, K, V] | all below |
| `options` | rows' documents, reading of states, form of computation: what these take | all below |
| `exponential_gates` | the same with exponential input gates, stabilised | `mlstm`, users |
| `fence` | x [B, T, ...], starts [B, T] -> finite x, marks [B, T, H] of what was not | three of these |
| `short_conv` | x [B, T, ...], weight [W, ...] -> y [B, T, ...], the last W - 1 inputs | `ssd`, `gated_delta`, `rwkv` |
| `gated_linear`, `mlstm`, `ssd`, `gated_delta`, `rwkv` | params, x -> inputs; inputs, S -> o, S | `matrix_state` |
| `matrix_state`, `by_name` | params, x [B, T, D], state -> y [B, T, D], state; a layer by its name | `stack`, `lm` |
| `legendre` | u [B, T, H], memory [B, H, d] -> memories [B, T, H, d]: scan, tree, transform, chunks | `lmu` |
| `spikes` | currents [B, T, ...], potentials [B, ...] -> spikes and potentials [B, T, ...] | the next two |
| `lmu` | params, x [B, T, D], memory [B, H, d] -> y [B, T, D], memory | `stack`, `lm.config` |
| `spiking_mlp` | params, x [B, T, D], potentials [B, F] -> y [B, T, D], potentials | `stack` |
| `in_windows` | q, k, v [B, T, H, K], two windows of them -> [B, T, H, K] | `block_recurrent`, `tcnca` |
| `block_recurrent` | params, x [B, T, D], two windows and states [B, S, D] -> the same | `stack`, `lm.config` |
| `tcnca` | params, x [B, T, D], last inputs and a chunk -> the same | `stack`, `lm.config` |
"""

from jaxpar.nn.mixers.block_recurrent import GATES, BlockRecurrent
from jaxpar.nn.mixers.by_name import LAYERS, layer_of, layer_size
from jaxpar.nn.mixers.delta_rule import delta_rule
from jaxpar.nn.mixers.exponential_gates import exponential_attention
from jaxpar.nn.mixers.gated_delta import GatedDelta
from jaxpar.nn.mixers.gated_linear import GatedLinear
from jaxpar.nn.mixers.hgrn import Hgrn
from jaxpar.nn.mixers.linear_attention import gates_of, linear_attention
from jaxpar.nn.mixers.lmu import Lmu
from jaxpar.nn.mixers.matrix_state import MatrixState
from jaxpar.nn.mixers.mlstm import MLstm
from jaxpar.nn.mixers.options import Packing, Readout, RecurrenceExecution
from jaxpar.nn.mixers.recurrent import CELLS, Recurrent, cell_of
from jaxpar.nn.mixers.rwkv import Rwkv6
from jaxpar.nn.mixers.short_conv import short_conv
from jaxpar.nn.mixers.spiking_mlp import SpikingMlp
from jaxpar.nn.mixers.ssd import Mamba2
from jaxpar.nn.mixers.tcnca import Tcnca

__all__ = [
    "CELLS",
    "GATES",
    "LAYERS",
    "BlockRecurrent",
    "RecurrenceExecution",
    "GatedDelta",
    "GatedLinear",
    "Hgrn",
    "Lmu",
    "MLstm",
    "Mamba2",
    "MatrixState",
    "Packing",
    "Readout",
    "Recurrent",
    "Rwkv6",
    "SpikingMlp",
    "Tcnca",
    "cell_of",
    "delta_rule",
    "exponential_attention",
    "gates_of",
    "layer_of",
    "layer_size",
    "linear_attention",
    "short_conv",
]
