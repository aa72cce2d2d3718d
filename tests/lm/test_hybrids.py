"""`model.mixer.in_turn=[gru, attention]`: layers of several mixers in turn, in a language model."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import assert_close

from experiments import verify
from experiments.app.runner import identity
from jaxpar.lm import flops_per_token, num_params, to_hf
from jaxpar.lm.stages import stages
from jaxpar.pipeline.accumulation import layer_by_layer
from jaxpar.types import UsageError

ONE = dataclasses.replace(tiny.LLAMA, num_layers=4)
SMALL = with_fields(ONE, mixers=("min_gru", "attention"))


def test_each_mixer_is_as_large_and_costs_what_it_does_alone():
    apart = [with_fields(ONE, mixer=name) for name in SMALL.mixer.in_turn]
    assert num_params(SMALL) == sum(num_params(c) for c in apart) / 2
    assert flops_per_token(SMALL, 64) == sum(flops_per_token(c, 64) for c in apart) / 2
    assert [type(mixer).__name__ for mixer in SMALL.stack().mixers] == ["Recurrent", "Attention"]
    assert with_fields(ONE, mixers=["attention"]).stack() == ONE.stack()
    wide = with_fields(SMALL, mixers=("hgrn", "attention"), mixer_dim=24, qk_norm=True)
    assert wide.stack().mixers[0].size == 24 and wide.stack().mixers[1].qk_norm is not None


def test_stages_are_the_whole_in_value_and_gradient():
    params = tiny.params_of(SMALL)
    batch = tiny.batch_of()
    count = jnp.float32(batch["tokens"].size)
    pieces = layer_by_layer(stages(SMALL))
    got = jit(jax.value_and_grad(lambda p: pieces(p, batch, None, count)[0]))(params)
    assert_close(got, tiny.loss_and_gradient(params, batch, SMALL), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_on_a_mesh_it_is_what_it_is_on_one_device(optimizer):
    """Loss, gradients and steps in double precision, and no collective that is not declared (20 s each)."""
    small = "num_layers=4 embed_dim=32 mlp_dim=32 vocab_size=64 mixers=[min_gru,attention]".split()
    config = verify.compose(
        *(f"model.{flag}" for flag in small), "data.seq_len=8", "data.batch_size=8", f"optimizer.name={optimizer}",
        "dtypes=[float64]", "topology=none",
    )  # fmt: skip
    assert config.model.mixer.in_turn == ("min_gru", "attention")
    for row in verify.verify_lm(config, [verify.parse_layout("data2.fsdp2.tensor2")]):
        assert not row.refused and not row.breaches, row


def test_runs_without_it_are_called_as_they_were():
    config = verify.compose("topology=none")
    assert "mixers" not in str(identity(config)) and "weights" not in str(identity(config))
    hybrid = verify.compose(
        "model.num_layers=2", "model.mixer.in_turn=[hgrn,attention]", "topology=none"
    )
    assert hybrid.model.mixer.in_turn == ("hgrn", "attention") and "hgrn" in str(identity(hybrid))


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (
            dict(mixers=("min_gru", "rnn")),
            "'rnn'.* has an entry that is unknown; legal are attention, para_gru",
        ),
        (dict(num_layers=5), "num_layers=5 is not a multiple of the 2 mixers in turn"),
        (
            dict(mixer="hgrn"),
            "model.mixer.kind=hgrn is one for all layers; take model.mixer.in_turn or it, not both",
        ),
        (dict(mixers=("attention",), mixer_dim=8), "model.mixer.dim=8 is of recurrent mixers"),
    ],
)
def test_what_cannot_be_is_refused(fields, sentence):
    with pytest.raises(UsageError, match=sentence):
        with_fields(SMALL, **fields)


def test_a_hugging_face_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no folder can hold a model with mixer.in_turn="):
        to_hf(None, SMALL, tmp_path / "out")
