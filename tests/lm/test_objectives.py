"""Smoothed targets, a teacher's laws and preferences, value and gradient, against NumPy; on one device and on eight.

The gradient by the logits is NumPy's; what takes it to the parameters is the transpose of `apply`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from lm_configs import with_fields
from tolerance import LAYOUT, assert_close

from jaxpar.lm import (
    AdapterConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Trainer,
    TuningConfig,
    apply,
    axes,
    init,
)
from jaxpar.lm.loss import CrossEntropyOptions, cross_entropy_and_z
from jaxpar.lm.objectives import Teacher, objective_stages, preference_loss
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, shard, use_mesh
from jaxpar.pipeline.accumulation import InTurn, layer_by_layer
from jaxpar.types import UsageError

MODEL = with_fields(tiny.SHALLOW, loss_chunk=10)
TEACHER = with_fields(MODEL, embed_dim=4, logit_cap=3.0)
NARROW = dataclasses.replace(MODEL, dtype="float32")
B, T = 4, 6


def drawn(seed, config=MODEL):
    return init(jax.random.key(seed), config, jnp.promote_types(config.dtype, jnp.float32))


def batch_of(seed=0, prefix=""):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 16, (B, T + 1), dtype=np.int32)
    weights = (rng.random((B, T)) < 0.6).astype(np.float32)
    return {
        f"{prefix}tokens": tokens[:, :-1],
        f"{prefix}targets": tokens[:, 1:],
        f"{prefix}weights": weights,
    }


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def logits_and_back(params, tokens, config=MODEL):
    z, back = jax.vjp(jax.jit(lambda p: apply(p, jnp.asarray(tokens), config)), params)
    return np.asarray(z), lambda d: back(jnp.asarray(d))[0]


def gradient(objective, params, batch, parts=1, **options):
    """Value and gradient as a trainer makes them, of so many microbatches."""
    pieces = objective_stages(MODEL, objective, **options)
    program = jax.jit(lambda params, batch: InTurn()(pieces, params, batch, None, parts))
    (value, told), grads = program(params, batch)
    return value, told, grads


def equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), got, want)


@pytest.mark.parametrize(("z_loss", "cap"), [(0.0, 0.0), (1e-2, 2.0)])
def test_smoothed_targets_are_numpys(z_loss, cap):
    rng, s = np.random.default_rng(0), 0.3
    x, head = rng.standard_normal((2, 5, 8)), rng.standard_normal((16, 8))
    targets, weights = rng.integers(0, 16, (2, 5)), rng.random((2, 5))
    options = CrossEntropyOptions(chunk=3, z_loss=z_loss, logit_cap=cap, smoothing=s)
    with jax.enable_x64(True):
        got = jax.value_and_grad(
            lambda x, head: cross_entropy_and_z(x, head, targets, weights, options)[0],
            (0, 1),
        )(jnp.asarray(x), jnp.asarray(head))
    u = x @ head.T
    z = cap * np.tanh(u / cap) if cap else u
    norm = np.log(np.exp(z).sum(-1))
    law = (1 - s) * np.eye(16)[targets] + s / 16
    np.testing.assert_allclose(law, optax.smooth_labels(jnp.eye(16)[targets], s), rtol=1e-6)
    value = (weights * (norm - (law * z).sum(-1) + z_loss * norm**2)).sum()
    d = weights[..., None] * (softmax(z) * (1 + 2 * z_loss * norm)[..., None] - law)
    d = d * (1 - (z / cap) ** 2) if cap else d
    equal(got, (value, (d @ head, np.einsum("btv,btd->vd", d, x))))


@pytest.mark.parametrize("parts", [1, 2])
def test_distillation_is_numpys(parts):
    share, temperature, s = 0.3, 2.0, 0.1
    objective = ObjectiveConfig(label_smoothing=s, distil=share, temperature=temperature)
    with jax.enable_x64(True):
        params, teacher, batch = drawn(0), drawn(1, TEACHER), batch_of()
        got = gradient(objective, params, batch, parts, teacher=Teacher(TEACHER, teacher))
        z, back = logits_and_back(params, batch["tokens"])
        z_teacher = np.asarray(apply(teacher, jnp.asarray(batch["tokens"]), TEACHER))
        w = batch["weights"] / batch["weights"].sum()
        law = (1 - s) * np.eye(16)[batch["targets"]] + s / 16
        p, q = softmax(z_teacher / temperature), softmax(z / temperature)
        apart = (w * (p * (np.log(p) - np.log(q))).sum(-1)).sum()
        value = (1 - share) * -(
            w * (law * np.log(softmax(z))).sum(-1)
        ).sum() + share * temperature**2 * apart
        d = w[..., None] * ((1 - share) * (softmax(z) - law) + share * temperature * (q - p))
        equal((got[0], got[2]), (value, back(d)))
        if parts == 1:
            np.testing.assert_allclose(got[1].metrics["teacher_kl"].value, apart, rtol=1e-10)


def pairs_of(seed=0):
    batch = batch_of(seed) | batch_of(seed + 1, "rejected_")
    for name in ("weights", "rejected_weights"):
        batch[name][:, -1] = 1
    return batch


@pytest.mark.parametrize("parts", [1, 2])
def test_preferences_are_numpys(parts):
    beta = 0.7
    with jax.enable_x64(True):
        params, reference, batch = drawn(0), drawn(1), pairs_of()
        got = gradient(ObjectiveConfig("dpo", beta=beta), params, batch, parts, reference=reference)
        gained, backs = [], []
        for prefix in ("", "rejected_"):
            tokens, targets, w = (
                batch[f"{prefix}{name}"] for name in ("tokens", "targets", "weights")
            )
            z, back = logits_and_back(params, tokens)
            z_reference = np.asarray(apply(reference, jnp.asarray(tokens), MODEL))
            hit = np.eye(16)[targets]
            own, other = (
                (w * (hit * np.log(softmax(x))).sum(-1)).sum(-1) for x in (z, z_reference)
            )
            gained.append(own - other)
            backs.append((back, w[..., None] * (hit - softmax(z))))
        margin = beta * (gained[0] - gained[1])
        value = np.log1p(np.exp(-margin)).mean()
        pull = -beta / (1 + np.exp(margin)) / B  # by the gain of what was chosen
        (chosen, d_chosen), (rejected, d_rejected) = backs
        want = jax.tree.map(
            jnp.add,
            chosen(pull[:, None, None] * d_chosen),
            rejected(-pull[:, None, None] * d_rejected),
        )
        equal((got[0], got[2]), (value, want))
        if parts == 1:
            told = got[1].metrics
            np.testing.assert_allclose(told["preference_accuracy"].value, (margin > 0).mean())
            np.testing.assert_allclose(told["preference_margin"].value, margin.mean())


def test_pairs_of_which_nothing_counts_count_nothing():
    with jax.enable_x64(True):
        params, reference, batch = drawn(0), drawn(1), pairs_of()
        half = {name: x[:2] for name, x in batch.items()}
        for name in ("weights", "rejected_weights"):
            batch[name][2:] = 0
        program = jax.jit(lambda batch: preference_loss(params, reference, batch, MODEL, 0.7)[0])
        np.testing.assert_allclose(program(batch), program(half), rtol=1e-12)


FAST = OptimizerConfig(learning_rate=1e-2, schedule="constant", warmup_steps=0, eps=1e-6)


def stepped(trainer, state, batches):
    step = jax.jit(trainer.step)
    for number, batch in enumerate(batches):
        state, info = step(jax.random.key(number), state, batch)
    return state, info


def test_a_run_of_preferences_keeps_its_start_and_begins_at_log_two():
    tuning = TuningConfig(freeze=("embedding",))
    trainer = Trainer(NARROW, FAST, 10, tuning=tuning, objective=ObjectiveConfig("dpo"))
    state = trainer.init(jax.random.key(0))
    first = jax.tree.map(np.asarray, state.params)
    _, told = stepped(trainer, state, [pairs_of()])
    assert told["loss"] == pytest.approx(math.log(2), rel=1e-6) and told["preference_margin"] == 0
    after, told = stepped(trainer, state, [pairs_of()] * 10)
    assert told["loss"] < 0.6 and told["preference_accuracy"] == 1
    assert "embedding" not in after.reference
    jax.tree.map(
        np.testing.assert_array_equal,
        after.reference,
        {k: v for k, v in first.items() if k != "embedding"},
    )

    def loss_of(params, reference):
        return preference_loss(params, reference, pairs_of(), NARROW, 0.1)[0]

    value = jax.jit(loss_of)(after.params, first)
    np.testing.assert_allclose(stepped(trainer, after, [pairs_of()])[1]["loss"], value, rtol=1e-5)


def test_the_reference_of_adapters_is_their_base():
    trainer = Trainer(
        NARROW,
        FAST,
        10,
        adapter=AdapterConfig("lora", rank=2),
        objective=ObjectiveConfig("dpo"),
    )
    state = trainer.init(jax.random.key(0))
    after, told = stepped(trainer, state, [pairs_of()] * 3)
    value = jax.jit(
        lambda state: preference_loss(state.params, state.base, pairs_of(), NARROW, 0.1)[0]
    )(after)
    np.testing.assert_allclose(stepped(trainer, after, [pairs_of()])[1]["loss"], value, rtol=1e-5)
    assert told["loss"] < math.log(2)


def test_adapters_learn_a_teachers_laws():
    objective = ObjectiveConfig(distil=0.4, temperature=2.0)
    trainer = Trainer(
        NARROW,
        FAST,
        10,
        adapter=AdapterConfig("lora", rank=2),
        objective=objective,
        teacher=NARROW,
    )
    state, teacher = trainer.init(jax.random.key(0)), drawn(1, NARROW)
    told = stepped(trainer, state, [batch_of() | {"teacher": teacher}])[1]
    plain = objective_stages(NARROW, objective, teacher=Teacher(NARROW, teacher))
    (value, aux), _ = jax.jit(lambda params: InTurn()(plain, params, batch_of(), None, 1))(
        state.params
    )
    apart = aux.metrics["teacher_kl"].value
    assert apart > 0
    np.testing.assert_allclose((told["loss"], told["teacher_kl"]), (value, apart), rtol=1e-5)


@pytest.mark.parametrize(
    "kind", ["dpo", pytest.param("teacher", marks=pytest.mark.slow)]
)  # 5 s each
def test_eight_devices_make_the_same_steps(kind):
    trainer = Trainer(
        NARROW,
        FAST,
        10,
        objective=ObjectiveConfig("dpo" if kind == "dpo" else "tokens", distil=0.4),
    )
    batch = pairs_of() if kind == "dpo" else batch_of() | {"teacher": drawn(1, NARROW)}
    if kind == "teacher":
        trainer = dataclasses.replace(
            trainer, teacher=NARROW, objective=ObjectiveConfig(label_smoothing=0.2)
        )
    want, told = stepped(trainer, trainer.init(jax.random.key(0)), [batch] * 2)
    with use_mesh(make_mesh(MeshSpec(data=2, fsdp=2, tensor=2))):
        places = named_shardings(jax.eval_shape(trainer.init, jax.random.key(0)), trainer.axes())
        state = jax.jit(trainer.init, out_shardings=places)(jax.random.key(0))
        if kind == "teacher":
            batch = batch | {"teacher": shard(batch["teacher"], axes(NARROW))}
        got, info = stepped(trainer, state, [batch] * 2)
    assert_close(jax.device_get(got), jax.device_get(want), LAYOUT["float32"])
    np.testing.assert_allclose(info["loss"], told["loss"], rtol=1e-5)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(
        UsageError, match="objective.label_smoothing=0.1 is of objective.kind=tokens"
    ):
        ObjectiveConfig("dpo", label_smoothing=0.1)
    with pytest.raises(UsageError, match="objective.kind='kto' is unknown; legal are tokens, dpo"):
        ObjectiveConfig("kto")
    with pytest.raises(UsageError, match="the teacher has 32 symbols, and the model 16"):
        Trainer(MODEL, teacher=dataclasses.replace(MODEL, vocab_size=32))
    with pytest.raises(UsageError, match="objective.kind=dpo has no teacher"):
        Trainer(
            MODEL,
            adapter=AdapterConfig("lora"),
            objective=ObjectiveConfig("dpo"),
            teacher=MODEL,
        )
    for kind, teacher, second in (
        ("dpo", None, "objective.kind=dpo"),
        ("tokens", MODEL, "a teacher"),
    ):
        with pytest.raises(
            UsageError,
            match=f"{second} runs a second model, whose layers no stage of a pipeline holds",
        ):
            Trainer(
                MODEL, schedule=layer_by_layer, objective=ObjectiveConfig(kind), teacher=teacher
            )
