"""What tests ask of transformers' own modules, of the extra `peers`: without it they fail, and are not skipped."""

from pathlib import Path

import numpy as np


def scores(model, tokens: np.ndarray) -> np.ndarray:
    """Logits [B, T, V] of tokens."""
    import torch

    with torch.no_grad():
        return model.eval()(torch.from_numpy(tokens)).logits.numpy()


def saved_with_other_values(model, folder: Path) -> Path:
    """The folder that transformers writes of a model with new random values, in small files."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape))
    model.save_pretrained(folder, max_shard_size="2KB")
    return folder
