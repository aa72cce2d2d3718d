"""Tokens of weight 0 move no loss, gradient or metric of a language model, in any layout."""

import jax
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import assert_close
from weighted_batches import MODELS, NEAR, T, batch_of, in_turn, outcome

from jaxpar.lm import axes
from jaxpar.lm.stages import stages
from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.pipeline import Pipelined, zb_h1
from jaxpar.pipeline.accumulation import InTurn
from jaxpar.types import UsageError

LAYOUTS = {
    "all_to_all": (dict(data=2, expert=4), "capacity"),
    "gather": (dict(expert=2, context=2, tensor=2), "experts"),
}


def is_padding(weights):
    """Returns true where no token from here to the end of its row counts."""
    return np.flip(np.cumsum(np.flip(weights, 1), 1), 1) == 0


def with_other_padding(batch):
    other = tiny.batch_of(batch=len(batch["tokens"]), length=batch["tokens"].shape[1], seed=9)
    hidden = is_padding(batch["weights"])
    out = dict(batch)
    for name in ("tokens", "targets"):
        out[name] = np.where(hidden, other[name], batch[name])
    return out


@pytest.mark.parametrize(
    ("name", "count"), [*((name, 1) for name in MODELS), ("experts", 2), ("capacity in groups", 2)]
)
def test_padding_moves_nothing(name, count, x64):
    config = MODELS[name]
    batch = batch_of()
    params = tiny.params_of(config)
    model = stages(config)
    want = outcome(in_turn, model, params, batch, None, count)
    got = outcome(in_turn, model, params, with_other_padding(batch), None, count)
    assert_close(got, want, NEAR)
    if config.experts.num_experts:
        blind = {name: x for name, x in batch.items() if name != "weights"}
        other = outcome(in_turn, model, params, blind, None, count)
        assert abs(other[1]["balance_loss"] - want[1]["balance_loss"]) > 1e-4


@pytest.mark.parametrize("name", ["dense", "experts", "sigmoid, concatenated"])
def test_padded_is_unpadded(name, x64):
    config = MODELS[name]
    few = batch_of(rows=3)
    params = tiny.params_of(config)
    model = stages(config)
    more = {name: np.pad(x, ((0, 1), (0, 3)), mode="edge") for name, x in few.items()}
    more["weights"][3:] = 0
    more["weights"][:, T:] = 0
    want = outcome(in_turn, model, params, few, None, 1)
    assert_close(outcome(in_turn, model, params, more, None, 1), want, NEAR)


def test_rows_of_padding_leave_a_capacity_as_it_was(x64):
    config = MODELS["capacity"]
    few = batch_of(rows=3)
    params = tiny.params_of(config)
    model = stages(config)
    more = {name: np.pad(x, ((0, 1), (0, 0))) for name, x in few.items()}
    want = outcome(in_turn, model, params, few, None, 1)
    assert_close(outcome(in_turn, model, params, more, None, 1), want, NEAR)


@pytest.mark.parametrize("transport", LAYOUTS)
def test_padding_moves_nothing_on_a_mesh(transport, x64):
    sizes, name = LAYOUTS[transport]
    config = MODELS[name]
    batch = batch_of()
    params = tiny.params_of(config)
    want = outcome(in_turn, stages(config), params, batch, None, 1)
    split = stages(with_fields(config, transport=transport, context_order="contiguous"))
    with use_mesh(make_mesh(MeshSpec(**sizes))):
        rows = with_other_padding(batch)
        placed = shard(rows, dict.fromkeys(rows, ("batch", "seq_layer")))
        run = jit(lambda *args: InTurn()(split, *args, None, 1))
        got = outcome(run, shard(params, axes(config)), placed)
    assert_close(got, want, 1e-10)  # sums of other parts of the batch


def test_padding_moves_nothing_in_a_pipeline(x64):
    config = MODELS["experts"]
    batch = batch_of()
    params = tiny.params_of(config)
    want = outcome(in_turn, stages(config), params, batch, None, 2)
    with use_mesh(make_mesh(MeshSpec(stage=2, expert=2, data=2)), rules_from(layout="stages")):
        run = jit(lambda *args: Pipelined(zb_h1(2, 2))(stages(config), *args, None, 2))
        got = outcome(run, shard(params, axes(config)), with_other_padding(batch))
    assert_close(got, want, 1e-10)


def test_a_loss_of_all_layers_together_has_no_pipeline():
    config = with_fields(tiny.LLAMA, num_experts=4, balance_layers="concatenated")
    params = tiny.params_of(config)
    batch = tiny.batch_of(batch=4)
    mesh = make_mesh(MeshSpec(stage=2, data=2), jax.devices()[:4])
    with use_mesh(mesh), pytest.raises(UsageError, match="expected summed"):
        jax.eval_shape(
            lambda *args: Pipelined(zb_h1(2, 2))(stages(config), *args, None, 2),
            params,
            batch,
        )
