"""Older names of a model's fields, from when it had one level: flags, files, calls and reads by them."""

import dataclasses
import pickle

import pytest
from lm_configs import field_of, lm_config

from experiments import lm
from experiments.app.mistakes import with_newer_fields, with_newer_names
from jaxpar.fields import leaf_fields, make_nested, replace_nested
from jaxpar.lm import LMConfig, MlpConfig, gpt2, llama
from jaxpar.lm.flat_names import FLAT_NAMES
from jaxpar.types import UsageError

OTHER = {
    "activation": "gelu",
    "attention": "xla",
    "balance_layers": "concatenated",
    "capacity": 2.0,
    "context": "ring",
    "context_order": "zigzag",
    "head_dim": 8,
    "mixer_dim": 32,
    "num_experts": 4,
    "num_heads": 2,
    "mixer": "gla",
    "mixers": ("gla", "attention"),
    "norm": "layer",
    "num_kv_heads": 2,
    "remat": "full",
    "residual": "ladder",
    "rope_scaling": "linear",
    "rope_share": 0.5,
    "router_scores": "sigmoid",
    "solver": "newton",
    "transport": "gather",
    "windows": (8,),
    "expert_failures": 0.25,
    "rope_high_freq_factor": 8.0,
}
"""Values that are not the default, of fields to whose default 1 is not added."""
NEEDS = {
    "experts": {"num_experts": 4},
    "losses": {"num_experts": 4},
    "transport": {"num_experts": 4},
    "mixer_groups": {"mixer": "mamba2"},
    "mixer_key_dim": {"mixer": "gla"},
    "mixer_dim": {"mixer": "gru"},
    "mixer_window": {"mixer": "lmu"},
    "mixer_states": {"mixer": "lmu"},
    "rope_theta_local": {"windows": (8,)},
    "ladder_from": {"residual": "ladder"},
    "num_heads": {"num_kv_heads": 1},
}
"""Other fields without which a field has no meaning, by its name or its group."""


def other(name):
    """A value of a field that is not its default, and the fields that it needs."""
    group, field = FLAT_NAMES[name].split(".")
    default = getattr(LMConfig.__dataclass_fields__[group].default, field)
    if name in OTHER:
        value = OTHER[name]
    elif isinstance(default, bool):
        value = not default
    else:
        value = default + 1
    return value, NEEDS.get(name, NEEDS.get(group, {}))


@pytest.mark.parametrize("name", sorted(FLAT_NAMES))
def test_a_field_is_made_read_and_changed_by_its_older_name(name):
    value, needs = other(name)
    needs = {key: each for key, each in needs.items() if key != name}
    want = lm_config(**needs, **{name: value})
    with pytest.warns(
        FutureWarning, match=rf"LMConfig\(.*\b{name}\b.*\) is now .*{FLAT_NAMES[name]}"
    ):
        assert LMConfig(**needs, **{name: value}) == want
    assert want != lm_config(**needs)
    if name in LMConfig.__dataclass_fields__:
        return  # that of a group today

    with pytest.warns(FutureWarning, match=rf"LMConfig.{name} is now LMConfig.{FLAT_NAMES[name]}"):
        assert getattr(want, name) == field_of(want, name)
    if not needs:
        with pytest.warns(FutureWarning):
            assert dataclasses.replace(LMConfig(), **{name: value}) == want


@pytest.mark.parametrize("names", [("num_heads", "num_kv_heads"), ("num_kv_heads", "num_heads")])
def test_fields_of_one_group_are_checked_together(names):
    values = {"num_heads": 6, "num_kv_heads": 3}
    with pytest.warns(FutureWarning) as record:
        config = LMConfig(embed_dim=96, **{name: values[name] for name in names})
    assert (config.attention.num_heads, config.attention.num_kv_heads) == (6, 3)
    assert record[0].filename == __file__


def test_presets_warn_who_calls_them():
    with pytest.warns(FutureWarning) as record:
        assert gpt2(num_heads=6) == gpt2(**{"attention.num_heads": 6})
    assert record[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "value"),
    [("attention", "xla"), ("mixer", "gla"), ("norm", "layer"), ("residual", "ladder")],
)
def test_replacing_a_group_by_its_older_name_loses_nothing(name, value):
    config = lm_config(num_heads=2)
    with pytest.raises(
        UsageError, match=f"LMConfig.{name} is a group of fields, which {name}='{value}' would"
    ):
        dataclasses.replace(config, **{name: value})
    changed = replace_nested(config, {FLAT_NAMES[name]: value})
    assert changed.attention.num_heads == 2 and field_of(changed, name) == value


@pytest.mark.parametrize("name", sorted(FLAT_NAMES))
def test_a_flag_of_an_older_name_is_the_same_run(name, capsys):
    value, needs = other(name)
    text = str(list(value)) if isinstance(value, tuple) else str(value).lower()
    text = text.replace(" ", "").replace("'", "")
    more = [f"model.{FLAT_NAMES[key]}={each}".replace(" ", "").replace("(8,)", "[8]")
            for key, each in needs.items() if key != name]  # fmt: skip
    newer = lm.compose(f"model.{FLAT_NAMES[name]}={text}", *more)
    assert capsys.readouterr().err == ""
    older = lm.compose(f"model.{name}={text}", *more)
    assert older == newer
    note = f"note: model.{name} is now model.{FLAT_NAMES[name]}; older names go with the first release.\n"
    assert capsys.readouterr().err == note


def test_flags_keep_their_prefixes_and_groups_are_no_older_names(capsys):
    flags = [
        "+model.num_heads=2",
        "model.mixer={kind:gla}",
        "model.mixer=gla,gru",
        "model.mixer.kind=gla",
        "seed=1",
    ]
    assert with_newer_names(lm.Config, flags) == [
        "+model.attention.num_heads=2",
        "model.mixer={kind:gla}",
        "model.mixer.kind=gla,gru",
        "model.mixer.kind=gla",
        "seed=1",
    ]
    assert "model.num_heads is now" in capsys.readouterr().err


def test_a_saved_configuration_is_read_whichever_names_it_has():
    older = {
        "seed": 1,
        "model": {"num_heads": 2, "mixer": "gla", "embed_dim": 8, "num_kv_heads": 1},
    }
    newer = {
        "seed": 1,
        "model": {
            "attention": {"num_heads": 2, "num_kv_heads": 1},
            "mixer": {"kind": "gla"},
            "embed_dim": 8,
        },
    }
    assert with_newer_fields(lm.Config, older) == newer
    assert with_newer_fields(lm.Config, newer) == newer
    assert with_newer_fields(lm.Config, [1]) == [1]


def test_every_nested_field_has_one_older_name():
    nested = {path for path, _, _ in leaf_fields(LMConfig()) if "." in path}
    nested -= {"rope.score_scale"}  # which came when fields were nested already
    assert nested == set(FLAT_NAMES.values()) and len(FLAT_NAMES) == len(nested)


def test_presets_take_groups_and_paths():
    assert gpt2(**{"attention.num_heads": 6}).attention.head_dim == 128
    assert llama(mlp=MlpConfig(dim=8)).mlp == MlpConfig(dim=8)
    assert llama(**{"mlp.dim": 8, "num_layers": 2}).mlp.dim == 8
    part = make_nested(LMConfig, {"mlp": MlpConfig(dim=8), "mlp.activation": "gelu"}).mlp
    assert part == MlpConfig(dim=8, activation="gelu")
    with pytest.raises(UsageError, match="LMConfig has no field 'width'; legal are vocab_size"):
        make_nested(LMConfig, {"width": 3})
    with pytest.raises(
        UsageError, match="MlpConfig has no field 'width'; legal are dim, activation"
    ):
        replace_nested(LMConfig(), {"mlp.width": 3})
    with pytest.raises(AttributeError, match="'LMConfig' object has no attribute 'width'"):
        LMConfig().width  # noqa: B018


def test_configurations_are_stored_and_compared_as_before():
    config = llama(num_layers=2)
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(llama(num_layers=2))
