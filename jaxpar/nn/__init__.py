"""Sequence layers that language models, learners and experiments share, and what several of them train with.

| file | in -> out shapes | called by |
|---|---|---|
| `leaf`, `linear` | tree of (shape, axes, init) -> parameters; x, weight -> their product | all below, `lm` |
| `norm`, `position`, `mlp` | x [B, T, D] -> [B, T, D]; positions [B, T] -> angles or slopes | `block`, `attention` |
| `auxiliary`, `mixer` | what layers tell; the contract of what mixes tokens | `attention`, `mixers`, `stack` |
| `attention`, `mixers` | params, x [B, T, D], cache -> y [B, T, D], cache, what is told | `block` |
| `experts` | params, x [B, T, D] -> [B, T, D] by the few experts that each token chooses | `block`, `lm` |
| `block`, `stack` | the same of one layer; of all, with remat and caches | `lm`, `rl`, users |
| `cells`, `gated`, `aaren`, `s5` | params, h [B, n], projections [B, n] -> h [B, n], and facts about it | `layer` |
| `layer`, `solvers` | cell, params, xs [B, T, D], h0 -> ys [B, T, n], h | users, `mixers` |
| `network` | params, xs [B, T, D] -> [B, T, C]; the trainer of any network | experiments |
| `conv_embedding`, `stack_network` | params, xs [B, T, C] -> [B, T, D]; a stack as such a network | experiments |
| `space_time` | params, x [B, T, S, D] -> the same, layers along space and time in turn | `vision` |
| `vision` | params, images [B, H, W, C] -> logits [B, classes]; films [B, T, H, W] -> their next frames | experiments |
"""

from jaxpar.nn.aaren import Aaren
from jaxpar.nn.cells import Cell, SequenceCell
from jaxpar.nn.gated import GRU, LEM, LSTM, CfC, MinGRU, MinLSTM, ParaGRU, ParaLSTM
from jaxpar.nn.layer import recurrent
from jaxpar.nn.network import SequenceNetwork, SequenceTrainer
from jaxpar.nn.s5 import S5
from jaxpar.nn.space_time import SpaceTimeStack
from jaxpar.nn.vision import FramePredictor, ImageClassifier

__all__ = [
    "GRU",
    "LEM",
    "LSTM",
    "S5",
    "Aaren",
    "Cell",
    "CfC",
    "FramePredictor",
    "ImageClassifier",
    "MinGRU",
    "MinLSTM",
    "ParaGRU",
    "ParaLSTM",
    "SequenceCell",
    "SequenceNetwork",
    "SequenceTrainer",
    "SpaceTimeStack",
    "recurrent",
]
