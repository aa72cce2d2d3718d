"""Language models by pipelines: equal to the same model without, with all that a layer may be and tell."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import assert_close

from jaxpar.lm import ObjectiveConfig, OptimizerConfig, Trainer, TuningConfig, axes
from jaxpar.lm.stages import stages
from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.pipeline import Pipelined, one_f_one_b, with_gathers, with_vocabulary, zb_h1, zb_v
from jaxpar.pipeline.accumulation import InTurn
from jaxpar.types import UsageError

TOLERANCE = 1e-12  # float64; sums in another order
TWO_LAYERS = tiny.exact(tiny.LLAMA)
FOUR_LAYERS = dataclasses.replace(TWO_LAYERS, num_layers=4)
AT_REST = rules_from(layout="stages")


def batch_of(microbatches):
    """Rows of several documents, of which not every token counts."""
    rng, shape = np.random.default_rng(0), (4 * microbatches, 6)
    batch = {name: rng.integers(0, 16, shape) for name in ("tokens", "targets")}
    batch |= {
        "segments": np.tile([0, 0, 1, 1, 1, 2], (len(batch["tokens"]), 1)),
        "weights": rng.uniform(size=shape),
    }
    return jax.tree.map(
        jnp.asarray, batch | {"positions": np.tile([0, 1, 0, 1, 2, 0], (shape[0], 1))}
    )


def mesh_of(sizes):
    return make_mesh(MeshSpec(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])


EXPERTS = with_fields(TWO_LAYERS, num_experts=4, experts_per_token=2, balance_loss=0.1)
MODELS = {
    "all of a transformer": (
        with_fields(
            FOUR_LAYERS, norm="layer", positions="learned", bias=True, dropout=0.3, max_seq_len=6,
            tied=True, remat="names", z_loss=0.1, ranges=True,
        ),
        zb_v(2, 3),
        dict(stage=2, data=2, tensor=2),
    ),
    "a head over all stages": (
        with_fields(FOUR_LAYERS, vocab_size=18, tied=True, z_loss=0.1, dropout=0.3),
        with_vocabulary(zb_v(2, 2)),
        dict(stage=2, data=2, tensor=2),
    ),
    "experts": (
        EXPERTS,
        zb_h1(2, 2),
        dict(stage=2, expert=2, data=2),
    ),
    "experts that are gathered": (
        EXPERTS,
        with_gathers(zb_h1(2, 2)),
        dict(stage=2, expert=2, fsdp=2),
    ),
    "blocks that are gathered": (
        with_fields(TWO_LAYERS, remat="blockwise"),
        with_gathers(zb_h1(2, 2)),
        dict(stage=2, fsdp=2),
    ),
    "a hybrid in a ladder": (
        with_fields(
            FOUR_LAYERS, num_kv_heads=4, mixers=("gla", "attention"), residual="ladder",
            ladder_from=1,
        ),
        with_gathers(one_f_one_b(2, 2)),
        dict(stage=2, fsdp=2),
    ),
}  # fmt: skip


# 6 s each: a head over all stages has, below, the same losses and draws on a shorter schedule; gathers have the hybrid.
SLOW = {"a head over all stages", "experts that are gathered", "blocks that are gathered"}
each_model = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in MODELS],
)


@each_model
def test_a_pipeline_makes_the_gradient_of_the_model(name, x64):
    config, schedule, sizes = MODELS[name]
    m = schedule.microbatches
    params, batch = tiny.params_of(config), batch_of(m)
    key = jax.random.key(3) if config.dropout else None
    want = jit(lambda *args: InTurn()(stages(config), *args, m))(params, batch, key)
    with use_mesh(mesh_of(sizes), AT_REST):
        run = jit(lambda *args: Pipelined(schedule)(stages(config), *args, m))
        got = run(shard(params, axes(config)), batch, key)
    assert_close(jax.device_get(got), jax.device_get(want), TOLERANCE)
    if name == "all of a transformer":
        assert set(want[0][1].metrics) == {"z_loss", "residual_max"}
    if name.startswith("experts"):
        assert want[0][1].losses  # which count


@pytest.mark.parametrize("latency", [1, pytest.param(2, marks=pytest.mark.slow)])  # 15 s
def test_rows_of_the_vocabulary_lie_on_all_stages(latency, x64):
    config, m = with_fields(TWO_LAYERS, z_loss=0.1, dropout=0.3), 2
    params, batch, key = tiny.params_of(config), batch_of(m), jax.random.key(3)
    want = jit(lambda *args: InTurn()(stages(config), *args, m))(params, batch, key)
    schedule = with_vocabulary(one_f_one_b(2, m))
    with use_mesh(mesh_of(dict(stage=2, tensor=2)), AT_REST | {"vocab": ("stage", "tensor")}):
        params = shard(params, axes(config))
        assert {x.data.shape[0] for x in params["head"].addressable_shards} == {
            4
        }  # 16 rows on 4 devices
        assert {x.data.shape[0] for x in params["layers"]["wq"].addressable_shards} == {
            1
        }  # of 2 layers
        assert {x.data.shape[0] for x in params["embedding"].addressable_shards} == {4}
        got = jit(lambda *args: Pipelined(schedule, latency)(stages(config), *args, m))(
            params, batch, key
        )
    assert_close(jax.device_get(got), jax.device_get(want), TOLERANCE)


@pytest.mark.parametrize(
    "split_head", [True, pytest.param(False, marks=pytest.mark.slow)]
)  # 10 s each
def test_objectives_and_tuning_are_those_of_one_device(split_head, x64):
    """Moments are of the gradients; 18 symbols leave two rows of the head empty where four devices share it."""
    config = with_fields(TWO_LAYERS, vocab_size=18, tied=True, z_loss=0.1)
    schedule = with_vocabulary(one_f_one_b(2, 2)) if split_head else zb_h1(2, 2)
    tuning = TuningConfig(freeze=("wq", "w_up"), layer_decay=0.7, ema=0.6)
    objective = ObjectiveConfig(label_smoothing=0.2)
    one = Trainer(
        config, OptimizerConfig(warmup_steps=1), 5, accumulate=2, tuning=tuning, objective=objective
    )
    first, batch = one.init(jax.random.key(0)), batch_of(2)

    def stepped(trainer, state):
        step = jit(trainer.step)
        for number in range(2):
            state, told = step(jax.random.key(number), state, batch)
        return jax.device_get((state, told))

    want = stepped(one, first)
    with use_mesh(mesh_of(dict(stage=2, tensor=2)), AT_REST):
        got = stepped(
            dataclasses.replace(one, schedule=Pipelined(schedule)), shard(first, one.axes())
        )
    assert_close(got[0], want[0], TOLERANCE)
    assert_close(got[1], want[1], 1e-6)  # float32
    kept, moved = (
        got[0].params["layers"][name] - first.params["layers"][name] for name in ("wq", "wk")
    )
    assert not kept.any() and moved.any()


def test_three_steps_of_training_with_a_sequence_that_is_split():
    config = with_fields(tiny.LLAMA, context="gather", context_order="contiguous")
    batch = {name: x for name, x in batch_of(2).items() if name in ("tokens", "targets")}
    schedule = zb_h1(2, 2)

    def trained(trainer):
        state = trainer.init(jax.random.key(0))
        state = shard(state, trainer.axes()) if jax.sharding.get_abstract_mesh().shape else state
        step = jit(trainer.step)
        for _ in range(3):
            state, info = step(jax.random.key(1), state, batch)
        return jax.device_get((state, info))

    alone = Trainer(config, OptimizerConfig(warmup_steps=1), 5, accumulate=2)
    want = trained(alone)
    with use_mesh(mesh_of(dict(stage=2, context=2, tensor=2)), AT_REST):
        got = trained(dataclasses.replace(alone, schedule=Pipelined(schedule)))
    assert_close(got, want, 1e-5)


def test_gradients_of_16_bits_are_added_in_32():
    config = dataclasses.replace(tiny.LLAMA, dtype="bfloat16")
    params = tiny.params_of(tiny.LLAMA)
    with use_mesh(mesh_of(dict(stage=2)), AT_REST):
        run = lambda *args: Pipelined(zb_h1(2, 2))(stages(config), *args, None, 2)  # noqa: E731
        (_, _), grads = jax.eval_shape(run, params, batch_of(2))
    assert {x.dtype for x in jax.tree.leaves(grads)} == {jnp.dtype("float32")}


def test_a_ring_within_a_stage_is_refused():
    config = with_fields(tiny.LLAMA, context="ring")
    params = tiny.params_of(config)
    batch = {name: x for name, x in batch_of(2).items() if name in ("tokens", "targets")}
    with (
        use_mesh(mesh_of(dict(stage=2, context=2))),
        pytest.raises(UsageError, match="take context=gather"),
    ):
        jax.eval_shape(
            lambda *args: Pipelined(zb_h1(2, 2))(stages(config), *args, None, 2), params, batch
        )


def test_a_recurrence_over_a_split_sequence_is_refused():
    config = with_fields(tiny.LLAMA, mixer="gla")
    params = tiny.params_of(config)
    batch = {name: x for name, x in batch_of(2).items() if name in ("tokens", "targets")}
    with (
        use_mesh(mesh_of(dict(stage=2, context=2))),
        pytest.raises(UsageError, match=r"take mesh\.context=1"),
    ):
        jax.eval_shape(
            lambda *args: Pipelined(zb_h1(2, 2))(stages(config), *args, None, 2), params, batch
        )
