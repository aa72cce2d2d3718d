"""Configurations of small language models in one line: fields by one name each, whichever group they are in.

`lm_config(num_heads=2, mlp_dim=64)` is `LMConfig(attention=AttentionConfig(num_heads=2),
mlp=MlpConfig(dim=64))`: the names are those of `jaxpar.lm.flat_names`.
"""

import dataclasses

from jaxpar import lm
from jaxpar.fields import make_nested, replace_nested
from jaxpar.lm.flat_names import FLAT_NAMES

GROUPS = {field.name for field in dataclasses.fields(lm.LMConfig)}


def paths_of(fields):
    """The values of fields by their paths."""
    return {
        name if dataclasses.is_dataclass(value) else FLAT_NAMES.get(name, name): value
        for name, value in fields.items()
    }


def lm_config(**fields):
    """A language model's configuration."""
    return make_nested(lm.LMConfig, paths_of(fields))


def gpt2(**fields):
    """GPT-2 with other values of some fields."""
    return lm.gpt2(**paths_of(fields))


def llama(**fields):
    """Llama with other values of some fields."""
    return lm.llama(**paths_of(fields))


def with_fields(config, **fields):
    """A configuration with other values of some fields; one of anything else as `dataclasses.replace` does."""
    if isinstance(config, lm.LMConfig):
        return replace_nested(config, paths_of(fields))
    return dataclasses.replace(config, **fields)


def field_of(config, name):
    """The value of a field by its one name."""
    for part in FLAT_NAMES.get(name, name).split("."):
        config = getattr(config, part)
    return config
