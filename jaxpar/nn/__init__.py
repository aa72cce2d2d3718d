"""Sequence layers that language models, learners and experiments share, and what several of them train with.

| file | in -> out shapes | called by |
|---|---|---|
| `leaf`, `linear` | tree of (shape, axes, init) -> parameters; x, weight -> their product | all below, `lm` |
| `norm`, `position`, `mlp` | x [B, T, D] -> [B, T, D]; positions [B, T] -> angles or slopes | `block`, `attention` |
| `auxiliary`, `mixer` | what layers tell; the contract of what mixes tokens | `attention`, `mixers`, `stack` |
| `attention`, `mixers` | params, x [B, T, D], cache -> y [B, T, D], cache, what is told | `block` |
| `experts` | params, x [B, T, D] -> [B, T, D] by the few experts that each token chooses | `block`, `lm` |
| `block`, `stack` | the same of one layer; of all, with remat and caches | `lm`, `rl`, users |
| `cells` | params, xs [B, T, D], h0 -> ys [B, T, n], h: cells, layers and networks of them | `mixers`, users |
| `images` | params, images [B, H, W, C] -> logits; films -> their next frames | experiments |
| `weights` | weights of few bits, in the position of an array | `linear`, `lm` |
"""

from jaxpar.nn.auxiliary import Aux, Max, both
from jaxpar.nn.cells.aaren import Aaren
from jaxpar.nn.cells.cell import Cell, SequenceCell
from jaxpar.nn.cells.gated import GRU, LEM, LSTM, CfC, MinGRU, MinLSTM, ParaGRU, ParaLSTM
from jaxpar.nn.cells.layer import recurrent
from jaxpar.nn.cells.network import SequenceNetwork, SequenceTrainer
from jaxpar.nn.cells.s5 import S5
from jaxpar.nn.images.space_time import SpaceTimeStack
from jaxpar.nn.images.vision import FramePredictor, ImageClassifier
from jaxpar.nn.leaf import init_leaves
from jaxpar.nn.linear import Lora
from jaxpar.nn.mixer import DECODING, Context, Mixer, TokenInfo
from jaxpar.nn.mlp import Mlp
from jaxpar.nn.norm import Norm
from jaxpar.nn.position import Alibi, Rope
from jaxpar.nn.stack import Stack

__all__ = [
    "DECODING",
    "GRU",
    "LEM",
    "LSTM",
    "S5",
    "Aaren",
    "Alibi",
    "Aux",
    "Cell",
    "CfC",
    "Context",
    "FramePredictor",
    "ImageClassifier",
    "Lora",
    "Max",
    "MinGRU",
    "MinLSTM",
    "Mixer",
    "Mlp",
    "Norm",
    "ParaGRU",
    "ParaLSTM",
    "Rope",
    "SequenceCell",
    "SequenceNetwork",
    "SequenceTrainer",
    "SpaceTimeStack",
    "Stack",
    "TokenInfo",
    "both",
    "init_leaves",
    "recurrent",
]
