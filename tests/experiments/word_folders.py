"""Folders of a small model of words."""

import tokenizers
from fast import noisy_params
from lm_configs import lm_config
from tokenizers import models

from jaxpar.lm import to_hf

MODEL = lm_config(
    vocab_size=16,
    max_seq_len=64,
    num_layers=1,
    embed_dim=8,
    num_heads=2,
    mlp_dim=12,
    dtype="float32",
)


def write_folder(folder, config, words):
    """Writes a model and a tokenizer of words, the first being the unknown one; returns the folder."""
    to_hf(noisy_params(config), config, folder)
    ids = {word: token for token, word in enumerate(words)}
    library = tokenizers.Tokenizer(models.WordLevel(ids, unk_token=words[0]))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    library.save(str(folder / "tokenizer.json"))
    return folder
