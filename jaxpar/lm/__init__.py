"""Decoder-only language models, as pure functions over a tree of parameters.

| file | in -> out shapes | called by |
|---|---|---|
| `text` | files of text -> batches of tokens int [B, T], by (seed, step) | experiments |
| `config`, `params` | LMConfig -> tree of (shape, axes, init) -> params | all below |
| `model` | params, tokens [B, T] -> features [B, T, D], logits [B, T, V], by `jaxpar.nn` | `loss`, `sample` |
| `loss`, `stages` | params, batch -> loss [], what was told; the same as first, layer, last | `train` |
| `objectives` | params, batch -> log-likelihoods [B, T]; losses [] of other kinds | `train`, `evaluation` |
| `tuning` | parameters -> those that are trained; what their rates are multiplied by | `train`, `adapters` |
| `adapters` | params -> adapters beside a frozen base; their merging and fusing | `train` |
| `train` | state, batch -> next state, whatever is trained | `jaxpar.loop` |
| `transfers` | LMConfig, the ambient mesh -> collectives of a step; bytes of split attention | `experiments` |
| `sample` | prompt [B, T] -> tokens [B, S] | experiments |
| `evaluation` | params, records of JSONL -> likelihoods [N], accuracy and perplexity with their errors | experiments |
| `hub` | Hugging Face folder <-> LMConfig, params; PEFT's adapters | experiments |
"""

from jaxpar._renamed import renamed
from jaxpar.decode import Sampling
from jaxpar.lm.adapters import (
    AdapterConfig,
    adapter_axes,
    fuse_adapters,
    merge_adapters,
    num_adapted,
    with_adapters,
)
from jaxpar.lm.config import (
    AttentionConfig,
    EmbeddingConfig,
    ExecutionConfig,
    ExpertsConfig,
    LMConfig,
    LossesConfig,
    MixerConfig,
    MlpConfig,
    NormConfig,
    ResidualConfig,
    RopeConfig,
    gpt2,
    llama,
)
from jaxpar.lm.hub.architectures import config_from_hf
from jaxpar.lm.hub.exchange import from_hf, load_model, to_hf
from jaxpar.lm.hub.imported import Imported, load_imported, read_imported, save_imported
from jaxpar.lm.hub.peft import from_peft, to_peft
from jaxpar.lm.loss import cross_entropy, loss
from jaxpar.lm.mixers import BLOCK_RECURRENT, mixers_of, with_mixer
from jaxpar.lm.model import apply
from jaxpar.lm.objectives import ObjectiveConfig, num_pairs, preference_loss
from jaxpar.lm.params import Leaf, axes, flops_per_token, init, leaves, num_params
from jaxpar.lm.plain_step import plain_state, plain_step
from jaxpar.lm.sample import Decoder, cache_axes, empty_cache, extend, generate
from jaxpar.lm.train import AdaptedState, AdapterTrainer, Trainer, TrainState
from jaxpar.lm.transfers import (
    context_bytes,
    declared_transfers,
    expert_bytes,
    pipeline_transfers,
    step_transfers,
)
from jaxpar.lm.tuning import TuningConfig
from jaxpar.optim import OptimizerConfig

__all__ = [
    "BLOCK_RECURRENT",
    "AdaptedState",
    "AdapterConfig",
    "AdapterTrainer",
    "AttentionConfig",
    "Decoder",
    "EmbeddingConfig",
    "ExecutionConfig",
    "ExpertsConfig",
    "Imported",
    "LMConfig",
    "Leaf",
    "LossesConfig",
    "MixerConfig",
    "MlpConfig",
    "NormConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "ResidualConfig",
    "RopeConfig",
    "Sampling",
    "TrainState",
    "Trainer",
    "TuningConfig",
    "adapter_axes",
    "apply",
    "axes",
    "cache_axes",
    "config_from_hf",
    "context_bytes",
    "cross_entropy",
    "declared_transfers",
    "empty_cache",
    "expert_bytes",
    "extend",
    "flops_per_token",
    "from_hf",
    "from_peft",
    "fuse_adapters",
    "generate",
    "gpt2",
    "init",
    "leaves",
    "llama",
    "load_imported",
    "load_model",
    "loss",
    "merge_adapters",
    "mixers_of",
    "num_adapted",
    "num_pairs",
    "num_params",
    "pipeline_transfers",
    "plain_state",
    "plain_step",
    "preference_loss",
    "read_imported",
    "save_imported",
    "step_transfers",
    "to_hf",
    "to_peft",
    "with_adapters",
    "with_mixer",
]


def __getattr__(name: str) -> object:
    return renamed(__name__, name)
