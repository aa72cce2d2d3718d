"""Fine-tuning by transformers, PEFT and torch (extra `peers`), on rows of this library."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np


def save_llama(folder: Path, tied: bool = False) -> None:
    """Writes a random Llama of two layers, in float32, as transformers saves one."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        torch_dtype="float32",
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def read_llama(folder: Path):
    """The folder's model in float32."""
    import torch
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )


def with_adapter(model, folder: Path):
    """The model with PEFT's adapter in a folder, to be trained."""
    import peft

    return peft.PeftModel.from_pretrained(model, folder, is_trainable=True)


def packed_loss(model, batch: dict[str, np.ndarray]):
    """Mean loss over the targets that count; a token sees its segment up to itself."""
    import torch

    segments = torch.from_numpy(batch["segments"])
    length = segments.shape[1]
    seen = segments[:, :, None] == segments[:, None, :]
    seen &= torch.ones(length, length, dtype=torch.bool).tril()
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    logits = model(
        input_ids=torch.from_numpy(batch["tokens"]).long(),
        position_ids=torch.from_numpy(batch["positions"]).long(),
        attention_mask=mask[:, None],
        use_cache=False,
    ).logits
    labels = np.where(batch["weights"] > 0, batch["targets"], -100)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), torch.from_numpy(labels).long().flatten()
    )


def losses(
    model,
    batches: Callable[[int], dict[str, np.ndarray]],
    num_steps: int,
    rate: Callable[[int], float],
    clip_norm: float,
    weight_decay: float,
) -> Iterator[float]:
    """Yields the loss of each step of AdamW.

    Vectors do not decay: norms, and the magnitudes of DoRA.
    """
    import torch

    trained = [x for x in model.parameters() if x.requires_grad]
    groups = [
        {"params": [x for x in trained if x.ndim > 1], "weight_decay": weight_decay},
        {"params": [x for x in trained if x.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8)
    model.train()
    for step in range(num_steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = packed_loss(model, batches(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, clip_norm)
        optimizer.step()
        yield loss.item()
