"""Ids that are no symbols count nothing, and batches where nothing counts are steps of zeros."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import assert_close
from weighted_batches import DENSE, EXPERTS, MODELS, NEAR, ROWS, T, V, batch_of, in_turn, outcome

from jaxpar.io import Checkpoints, RunMismatchError
from jaxpar.lm import ObjectiveConfig, OptimizerConfig, Trainer
from jaxpar.lm.loss import losses
from jaxpar.lm.objectives import preference_loss
from jaxpar.lm.stages import stages
from jaxpar.lm.text.batches import check_batch, normaliser_of, report_of, valid_batch
from jaxpar.lm.train import Health, _watch
from jaxpar.loop import Hooks, resume
from jaxpar.mesh import MeshSpec, make_mesh, rules_from, shard, use_mesh
from jaxpar.nn.auxiliary import scalars
from jaxpar.pipeline import Pipelined, zb_h1
from jaxpar.types import UsageError

# ---------------------------------------------------------------- ids that are no symbols


def with_bad_ids(batch):
    """A target of -100, one of V, and a token of V + 3, all with weights that count."""
    tokens, targets, weights = (batch[name].copy() for name in ("tokens", "targets", "weights"))
    targets[0, 2] = -100
    targets[4, 3] = V
    tokens[5, 5] = V + 3
    targets[1, 0] = -7
    weights[0, 2] = weights[4, 3] = weights[5, 5] = 1.0
    return batch | {"tokens": tokens, "targets": targets, "weights": weights}


@pytest.mark.parametrize("name", ["dense", "capacity"])
def test_bad_ids_count_nothing(name, x64):
    config = MODELS[name]
    params = tiny.params_of(config)
    model = stages(config)
    bad = with_bad_ids(batch_of())
    good = {name: x.copy() for name, x in bad.items()}
    good["targets"][[0, 4, 1], [2, 3, 0]] = 5
    good["tokens"][5, 5] = 0
    good["weights"][[0, 4, 5], [2, 3, 5]] = 0
    want = outcome(in_turn, model, params, good, None, 1)
    for count in (1, 2):
        plain = outcome(in_turn, model, params, good, None, count)
        assert_close(outcome(in_turn, model, params, bad, None, count), plain, NEAR)
    told = losses(params, bad, config)  # with its own normaliser
    assert_close((told[0], scalars(told[1])), want[:2], NEAR)
    report = report_of(bad, config)
    # One of weight 0 is none.
    assert (int(report.invalid_tokens), int(report.invalid_targets)) == (1, 2)


def test_targets_that_are_ignored_need_no_weights(x64):
    batch = {name: x for name, x in batch_of().items() if name != "weights"}
    masked = batch | {"targets": np.where(np.arange(T) < 3, -100, batch["targets"])}
    weighted = batch | {"weights": np.broadcast_to(np.arange(T) >= 3, (ROWS, T)).astype(float)}
    params = tiny.params_of(EXPERTS)
    got, want = (losses(params, each, EXPERTS) for each in (masked, weighted))
    assert_close((got[0], scalars(got[1])), (want[0], scalars(want[1])), NEAR)
    assert normaliser_of(masked, EXPERTS) == ROWS * (T - 3)
    assert int(report_of(masked, EXPERTS).invalid_targets) == ROWS * 3
    checked = check_batch(masked, V)
    assert int(report_of(checked, EXPERTS).invalid_targets) == 0
    assert_close(losses(params, checked, EXPERTS)[0], want[0], 1e-6)  # weights in float32


def narrowed(x):
    """Returns an array in float32 where it is in float64."""
    if x.dtype == np.float64:
        return x.astype(np.float32)
    return x


@pytest.mark.parametrize("sizes", [None, dict(data=4, tensor=2), dict(stage=2, data=2)], ids=str)
@pytest.mark.parametrize("parts", [2])
def test_counts_are_the_same_under_every_layout(sizes, parts):
    config = with_fields(tiny.LLAMA, num_experts=4)
    trainer = Trainer(config, OptimizerConfig(warmup_steps=1), 5, accumulate=parts)
    state = trainer.init(jax.random.key(0))
    bad = jax.tree.map(narrowed, with_bad_ids(batch_of()))
    rules = None
    if sizes is None:
        _, info = jit(trainer.step)(jax.random.key(1), state, bad)
    else:
        if "stage" in sizes:
            trainer = dataclasses.replace(trainer, schedule=Pipelined(zb_h1(2, parts)))
            rules = rules_from(layout="stages")
        mesh = make_mesh(MeshSpec(**sizes), jax.devices()[: int(np.prod(list(sizes.values())))])
        with use_mesh(mesh, rules):
            _, info = jit(trainer.step)(jax.random.key(1), shard(state, trainer.axes()), bad)
    assert (info["invalid_tokens"], info["invalid_targets"], info["empty"]) == (1, 2, 0)
    np.testing.assert_allclose(info["loss"], _loss_of(config, trainer, bad), rtol=1e-5)


def _loss_of(config, trainer, batch):
    params = trainer.init(jax.random.key(0)).params
    return outcome(in_turn, stages(config), params, batch, None, 2)[0]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            dict(tokens=(1, 2, V)),
            "tokens=16 at row 11, position 2 of a batch: it is no symbol of model.vocab_size=16",
        ),
        (dict(tokens=(0, 0, -1)), "tokens=-1 at row 10, position 0 .*; expected 0 to 15[.]"),
        (dict(tokens=(0, 0, -100)), "tokens=-100 at row 10"),
        (
            dict(targets=(1, 3, V)),
            "targets=16 at row 11, position 3 .*; expected 0 to 15, -100 for a target that",
        ),
        (dict(targets=(0, 2, -1)), "targets=-1 at row 10, position 2"),
        (dict(rejected_targets=(0, 2, V + 1)), "rejected_targets=17 at row 10, position 2"),
    ],
)
def test_bad_ids_are_refused_on_the_host(changes, sentence):
    batch = {name: x.copy() for name, x in batch_of(rows=2).items()}
    batch |= {f"rejected_{name}": x.copy() for name, x in batch.items()}
    check_batch(batch, V)
    ((name, (row, place, value)),) = changes.items()
    batch[name][row, place] = value
    with pytest.raises(UsageError, match=sentence):
        check_batch(batch, V, first_row=10)


def test_ignored_and_weightless_targets_pass_the_host():
    batch = batch_of(rows=2)
    targets = batch["targets"].copy()
    targets[0, 0] = 999
    targets[1, 3] = -100
    checked = check_batch(batch | {"targets": targets}, V)
    assert checked["weights"][1, 3] == 0 != batch["weights"][1, 3]
    assert checked["targets"][1, 3] == 0 and checked["tokens"] is batch["tokens"]
    assert (checked["weights"] != batch["weights"]).sum() == 1
    plain = {"tokens": batch["tokens"], "targets": targets[1:] * 0 - 100}
    assert not check_batch(plain, V)["weights"].any()


def test_valid_batches_stay_as_they_are(x64):
    batch = with_bad_ids(batch_of())
    once = valid_batch(batch, DENSE)
    jax.tree.map(np.testing.assert_array_equal, valid_batch(once, DENSE), once)


# ---------------------------------------------------------------- nothing that counts


SMOOTH = 0.1


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_batch_is_zero(name, x64):
    config = MODELS[name]
    params = tiny.params_of(config)
    model = stages(config, SMOOTH)
    batch = batch_of()
    empty = batch | {"weights": np.zeros((ROWS, T))}
    for count in (1, 2):
        value, told, gradient = outcome(in_turn, model, params, empty, None, count)
        assert value == 0 and not any(told.values())
        assert all(np.all(leaf == 0) for leaf in jax.tree.leaves(gradient))


def test_an_empty_microbatch_adds_nothing(x64):
    """Auxiliary losses are means over microbatches; an empty one has 0."""
    config = MODELS["experts"]
    params = tiny.params_of(config)
    model = stages(config, SMOOTH)
    batch = batch_of()
    batch["weights"][1::2] = 0
    alone = {name: x[::2] for name, x in batch.items()}
    total = normaliser_of(batch, config)
    run = jit(jax.value_and_grad(model.whole, has_aux=True), static_argnums=4)
    (value, aux), gradient = run(params, alone, None, total, 0.5)
    got = outcome(in_turn, model, params, batch, None, 2)
    assert_close((got[0], got[2]), jax.device_get((value, gradient)), NEAR)
    for key, loss in aux.losses.items():
        assert_close(got[1][key], loss / 2, NEAR)


def test_an_empty_batch_is_zero_in_a_pipeline():
    config = with_fields(tiny.LLAMA, num_experts=4, z_loss=0.1)
    schedule = Pipelined(zb_h1(2, 2))
    trainer = Trainer(config, OptimizerConfig(warmup_steps=1), 5, accumulate=2, schedule=schedule)
    batch = tiny.batch_of(batch=4) | {"weights": np.zeros((4, tiny.LENGTH), np.float32)}
    mesh = make_mesh(MeshSpec(stage=2, data=2), jax.devices()[:4])
    with use_mesh(mesh, rules_from(layout="stages")):
        state = shard(trainer.init(jax.random.key(0)), trainer.axes())
        _, info = jit(trainer.step)(jax.random.key(1), state, batch)
    assert (info["loss"], info["grad_norm"], info["empty"], info["skipped"]) == (0, 0, 1, 0)


def test_an_empty_step_is_counted_apart_and_no_spike_is_judged_by_it():
    trainer = Trainer(tiny.LLAMA, OptimizerConfig(warmup_steps=1), 9)
    step = jit(trainer.step)
    state = trainer.init(jax.random.key(0))
    full = tiny.batch_of() | {"weights": np.ones((tiny.BATCH, tiny.LENGTH), np.float32)}
    empty = full | {"weights": np.zeros_like(full["weights"])}
    state, _ = step(jax.random.key(1), state, full)
    before = state.health
    state, info = step(jax.random.key(2), state, empty)
    assert (info["loss"], info["empty"], info["spike"], info["skipped"]) == (0, 1, 0, 0)
    after = state.health
    assert (after.loss_mean, after.loss_variance) == (before.loss_mean, before.loss_variance)
    state, info = step(jax.random.key(3), state, full)
    assert info["empty"] == 1 and info["spike"] == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


def test_a_loss_after_empty_ones_is_judged_by_those_before():
    health = Health.start(jnp.float32)
    for value, empty in [(4.0, False)] * 3 + [(0.0, True)] * 50 + [(4.01, False)]:
        health, spike = _watch(health, jnp.float32(value), jnp.array(True), jnp.array(empty))
    assert not spike and health.empty == 50 and abs(float(health.loss_mean) - 4) < 0.01


def with_masks(pairs):
    """Returns pairs with weights of 1 where they were above 0, in float32."""
    out = dict(pairs)
    for name, x in pairs.items():
        if x.dtype.kind != "i":
            out[name] = (x > 0).astype(np.float32)
    return out


def without_weights(pairs):
    """Returns pairs with weights of 0."""
    out = dict(pairs)
    for name, x in pairs.items():
        if name.endswith("weights"):
            out[name] = np.zeros_like(x)
    return out


def test_pairs_that_count_nothing_are_zero():
    batch = batch_of(rows=4)
    pairs = batch | {f"rejected_{name}": np.roll(x, 1, 0) for name, x in batch.items()}
    pairs = with_masks(pairs)
    params, start = (tiny.params_of(tiny.LLAMA) for _ in range(2))
    start = jax.tree.map(lambda x: 0.9 * x, start)

    def of(params, batch):
        return preference_loss(params, start, batch, tiny.LLAMA, 0.1)

    run = jit(jax.value_and_grad(of, has_aux=True))
    nothing = without_weights(pairs)
    (value, _), gradient = run(params, nothing)
    assert value == 0 and not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))

    bad = {name: x.copy() for name, x in pairs.items()}
    bad["rejected_tokens"][1, 0] = V  # its whole pair has no meaning then
    left = {name: np.delete(x, 1, 0) for name, x in pairs.items()}
    assert_close(run(params, bad), run(params, left), 1e-5)
    trainer = Trainer(tiny.LLAMA, objective=ObjectiveConfig(kind="dpo"))
    _, info = jit(trainer.step)(jax.random.key(0), trainer.begin(params), nothing)
    assert (info["loss"], info["grad_norm"], info["empty"]) == (0, 0, 1)


# ---------------------------------------------------------------- older checkpoints


def test_a_checkpoint_that_lacks_the_count_goes_on_from_zero(tmp_path):
    trainer = Trainer(tiny.LLAMA, OptimizerConfig(warmup_steps=1), 9)
    state = jit(trainer.init)(jax.random.key(0))
    counted = state.replace(health=state.health.replace(empty=jnp.int32(7), skipped=jnp.int32(3)))
    older = {field.name: getattr(counted, field.name) for field in dataclasses.fields(counted)}
    older["health"] = {
        field.name: getattr(counted.health, field.name)
        for field in dataclasses.fields(counted.health)
        if field.name != "empty"
    }
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(5, {name: x for name, x in older.items() if x is not None}, {}, {})
        checkpoints.wait()
        step, read = resume(trainer, Hooks(checkpoints=checkpoints))
        assert step == 5 and (read.health.empty, read.health.skipped) == (0, 3)
        assert_close(read.params, state.params, 0)
        _, info = jit(trainer.step)(jax.random.key(1), read, tiny.batch_of())
        assert info["empty"] == 0 and info["skipped"] == 3
        checkpoints.save(6, counted, {}, {})
        checkpoints.wait()
        _, read = resume(trainer, Hooks(checkpoints=checkpoints))
        assert read.health.empty == 7


def test_another_absent_leaf_is_still_refused(tmp_path):
    state = {"health": {"skipped": jnp.int32(1)}}
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    leaf = jax.ShapeDtypeStruct((), jnp.int32, sharding=sharding)
    with contextlib.closing(Checkpoints(tmp_path)) as checkpoints:
        checkpoints.save(1, state, {}, {})
        checkpoints.wait()
        wanted = {"health": dict.fromkeys(("skipped", "empty", "spikes"), leaf)}
        with pytest.raises(RunMismatchError, match="health/spikes is absent there"):
            checkpoints.restore_newest(wanted, {}, later=("health/empty",))
