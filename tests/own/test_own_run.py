"""Runs from three functions: any layout is one device, a run that was cut is the run that was not, refusals."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tolerance import LAYOUT, assert_close

from experiments.app import own_models
from jaxpar.loop import Fit
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
from jaxpar.own import (
    LayoutOptions,
    OwnModel,
    examples_in_batches,
    from_nnx,
    lay_out,
    mean_loss,
    predictions,
    train_own,
    verify_own,
)
from jaxpar.types import UsageError
from jaxpar.verify import Layout, VerifyOptions

RULE = optax.adam(1e-2, eps=1e-6)
ALL_AXES = Layout(MeshSpec(data=2, fsdp=2, tensor=2))
TASKS = {
    "lm": lambda: own_models.language(8, 1, 0, RULE),
    "maml": lambda: own_models.sinusoids(8, 0, RULE),
    "policy": lambda: own_models.balance(
        8, 0, RULE, length=24
    ),  # no shorter, or all episodes are equal
}


@pytest.mark.parametrize("name", TASKS)
def test_every_example_is_the_same_on_any_layout(name):
    task = TASKS[name]()

    def batch(step):
        return task.model.collate(list(task.examples[8 * step : 8 * step + 8]))

    options = VerifyOptions(dtypes=["float32"], steps=2)
    [row] = verify_own(task.model, batch, [ALL_AXES], allow=task.allow, options=options)
    assert not (row.breaches or row.refused), row
    assert row.gradient > 0 and row.steps > 0  # something was compared
    assert {axis for _, axis in row.transfers} == {"data", "fsdp", "tensor"}


@pytest.mark.slow  # 90 s of compiling
@pytest.mark.parametrize("name", TASKS)
def test_every_example_is_the_same_on_more_layouts(name):
    task, sizes = (
        TASKS[name](),
        [dict(data=2, tensor=4), dict(data=8), dict(fsdp=8), dict(fsdp=4, tensor=2)],
    )
    layouts = [
        ALL_AXES,
        *(Layout(MeshSpec(**size)) for size in sizes),
        Layout(MeshSpec(fsdp=4, tensor=2), "zero1"),
    ]
    dtypes = ["float32"] + (name != "policy") * ["float64"]  # CartPole computes in float32
    batch = task.model.collate(list(task.examples[:8]))
    options = VerifyOptions(dtypes=dtypes)
    rows = verify_own(task.model, lambda step: batch, layouts, allow=task.allow, options=options)
    assert len(rows) == 6 * len(dtypes) and not any(row.breaches or row.refused for row in rows), (
        rows
    )


# ---------------------------------------------------------------- state beside the parameters, of linen and of NNX


class Noisy(nn.Module):
    """A network with batch statistics and dropout."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(
            nn.BatchNorm(momentum=0.5)(
                nn.Dense(8, use_bias=False)(x), use_running_average=not train
            )
        )
        return nn.Dense(1)(nn.Dropout(0.5)(x, deterministic=not train))


def in_linen(optimizer=RULE):
    module = Noisy()

    def loss(variables, batch, key):
        apply = dict(mutable=["batch_stats"], rngs={"dropout": key})
        y, changed = module.apply(variables, batch["x"], True, **apply)
        error = jnp.square(y - batch["y"]).mean()
        return error, {"batch_stats": changed["batch_stats"], "largest": jnp.abs(y).max()}

    def predict(variables, batch):
        return module.apply(variables, batch["x"], False)

    return OwnModel(
        lambda key: module.init(key, jnp.zeros((1, 4)), False), loss, predict, optimizer, collate
    )


class NoisyNnx(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = (
            nnx.Linear(4, 8, use_bias=False, rngs=rngs),
            nnx.Linear(8, 1, rngs=rngs),
        )
        self.norm, self.dropout = (
            nnx.BatchNorm(8, momentum=0.5, rngs=rngs),
            nnx.Dropout(0.5, rngs=rngs),
        )

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def in_nnx(optimizer=RULE):
    def loss(module, batch):
        y = module(batch["x"])
        return jnp.square(y - batch["y"]).mean(), {"largest": jnp.abs(y).max()}

    return from_nnx(NoisyNnx, loss, lambda module, batch: module(batch["x"]), optimizer, collate)


def collate(rows):
    x = np.stack(rows)
    return {"x": x, "y": x.sum(1, keepdims=True) ** 2}


EXAMPLES = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
SIZES = {"one": MeshSpec(), "eight": MeshSpec(data=2, fsdp=2, tensor=2)}


def trained(model, steps, where="eight", folder=None, **options):
    spec = SIZES[where]
    count = 8 if where == "eight" else 1
    with use_mesh(make_mesh(spec, jax.devices()[:count])):
        silent = LayoutOptions(tell=lambda text: None)
        options = dict(batch_size=8, seed=3, folder=folder, layout=silent) | options
        return train_own(model, EXAMPLES, Fit(steps, 1, 0, 2), **options)


def first_state(model):
    return jax.device_get(jax.jit(model.init)(jax.random.fold_in(jax.random.key(3), 2**32 - 1)))


def changed(new, old):
    return all(
        float(np.abs(x - y).max()) > 0
        for x, y in zip(*map(jax.tree.leaves, (new, old)), strict=True)
    )


def test_statistics_and_dropout_are_the_same_on_any_mesh():
    model = in_linen()
    whole, alone = trained(model, 3), trained(model, 3, "one")
    assert_close(whole.state, alone.state, LAYOUT["float32"])
    assert changed(jax.device_get(whole.state.collections), first_state(model).collections), (
        "statistics are kept"
    )
    assert {
        "train/largest",
        "train/loss",
        "train/skipped",
        "train/grad_norm",
    } <= whole.metrics.keys()
    variables = {"params": alone.state.params} | alone.state.collections
    want = Noisy().apply(variables, EXAMPLES[:13], False)
    for last in (
        8,
        4,
    ):  # on one mesh and the next: rows in their order, whatever fills up the last batch
        spec = dataclasses.replace(SIZES["eight"], data=last // 4)
        with use_mesh(make_mesh(spec, jax.devices()[8 - last :])):
            model = lay_out(model, collate(EXAMPLES[:8])).model
            state = jax.device_get(whole.state)
            np.testing.assert_allclose(
                predictions(model, state, EXAMPLES[:13], 8), want, rtol=1e-4, atol=1e-5
            )


def test_a_run_of_nnx_that_was_cut_is_the_one_that_was_not_bit_for_bit(tmp_path):
    model = in_nnx()
    whole = trained(model, 4)
    assert changed(jax.device_get(whole.state.collections), first_state(model).collections), (
        "statistics are kept"
    )
    for steps in (2, 4, 4):  # the last is finished when it begins
        again = trained(model, steps, folder=tmp_path)
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get((again.state, whole.state)))
    with pytest.raises(UsageError, match="seed"):
        trained(model, 6, folder=tmp_path, seed=4)
    loss, batch = jax.jit(model.loss), collate(EXAMPLES[:8])
    first, second = (loss(variables(whole.state), batch, jax.random.key(i)) for i in (0, 1))
    assert first[0] != second[0], "dropout follows the key"


def variables(state):
    return {"params": state.params} | state.collections


def test_a_step_is_what_one_writes_by_hand():
    model = in_linen()
    state = jax.jit(model.init)(jax.random.key(0))
    assert set(state.collections) == {"batch_stats"} and set(state.params) == {
        "Dense_0",
        "Dense_1",
        "BatchNorm_0",
    }
    batch, key = collate(EXAMPLES[:8]), jax.random.key(1)
    new, info = jax.jit(model.step)(key, state, batch)

    def by_hand(params):
        variables = {"params": params} | state.collections
        y, changed = Noisy().apply(
            variables, batch["x"], True, mutable=["batch_stats"], rngs={"dropout": key}
        )
        return jnp.square(y - batch["y"]).mean(), changed

    (value, changed), grads = jax.jit(jax.value_and_grad(by_hand, has_aux=True))(state.params)
    updates, moments = RULE.update(grads, state.optimizer, state.params)
    want = (optax.apply_updates(state.params, updates), changed, moments, value)
    assert_close((new.params, new.collections, new.optimizer, info["loss"]), want, 1e-6)


def test_batches_go_through_all_examples_once_an_epoch_in_an_order_of_its_own():
    model = dataclasses.replace(in_linen(), collate=lambda rows: {"x": np.asarray(rows)})
    batches = examples_in_batches(model, list(range(40)), 8, seed=1)
    epochs = [np.concatenate([batches(5 * epoch + i)["x"] for i in range(5)]) for epoch in range(2)]
    assert (
        all(sorted(epoch.tolist()) == list(range(40)) for epoch in epochs)
        and (epochs[0] != epochs[1]).any()
    )
    again = examples_in_batches(model, list(range(40)), 8, seed=1)
    np.testing.assert_array_equal(again(7)["x"], batches(7)["x"])
    assert (examples_in_batches(model, list(range(40)), 8, seed=2)(0)["x"] != batches(0)["x"]).any()
    with use_mesh(make_mesh(MeshSpec(data=8))):
        split = examples_in_batches(model, list(range(40)), 8, seed=1)(7)["x"]
        assert len(split.sharding.device_set) == 8
        np.testing.assert_array_equal(split, batches(7)["x"])


def test_means_over_held_out_examples():
    def loss(variables, batch, key):
        return variables["w"] * batch["x"].mean(), {"twice": 2 * batch["x"].mean()}

    model = OwnModel(
        lambda key: {"w": jnp.float32(3)}, loss, None, RULE, lambda rows: {"x": np.float32(rows)}
    )
    state = model.init(jax.random.key(0))
    assert state.collections is None
    # All five count, and each once: 112 / 5 = 22.4, times w = 3.
    means = mean_loss(model, [1, 2, 3, 6, 100], 2, state)
    assert means == pytest.approx({"validation/loss": 67.2, "validation/twice": 44.8})
    assert mean_loss(model, [1, 4], 4, state)["validation/loss"] == 7.5
    with pytest.raises(UsageError, match="no example to judge"):
        mean_loss(model, [], 2, state)


@pytest.mark.parametrize("count", [1, 4, 7, 21])
def test_every_held_out_example_counts_once_on_any_mesh(count):
    def loss(variables, batch, key):
        return (variables["w"] * batch["x"]).mean()

    model = OwnModel(
        lambda key: {"w": jnp.float32(3)}, loss, None, RULE, lambda rows: {"x": np.float32(rows)}
    )
    state = model.init(jax.random.key(0))
    rows = [float(i * i) for i in range(count)]
    want = 3 * sum(rows) / count
    with use_mesh(make_mesh(MeshSpec(data=4), jax.devices()[:4])):
        for batch_size in (4, 8):
            found = mean_loss(model, rows, batch_size, state)["validation/loss"]
            assert found == pytest.approx(want)
        with pytest.raises(UsageError, match="batch_size=6 does not divide"):
            mean_loss(model, rows, 6, state)


def test_held_out_examples_are_judged_without_dropout_and_with_kept_statistics():
    """In both ways of flax; a loss without a way of its own to judge says so."""
    rows = EXAMPLES[:5]
    batch = collate(rows)

    def judged(variables, batch):
        y = Noisy().apply(variables, batch["x"], False)
        return jnp.square(y - batch["y"]).mean()

    linen = dataclasses.replace(in_linen(), validation_loss=judged)
    for model in (linen, in_nnx()):
        state = jax.jit(model.init)(jax.random.key(0))
        # Kept statistics are others than those of the batch.
        state = state._replace(collections=jax.tree.map(lambda x: x + 0.5, state.collections))
        y = predictions(model, state, rows, 4)
        want = np.square(y - batch["y"]).mean()
        found = mean_loss(model, rows, 4, state)
        assert found["validation/loss"] == pytest.approx(want, rel=1e-5)
    state = jax.jit(linen.init)(jax.random.key(0))
    with pytest.warns(UserWarning, match="judged by loss as in training.*validation_loss"):
        mean_loss(in_linen(), rows, 4, state)
    drawing = dataclasses.replace(
        LINEAR,
        loss=lambda variables, batch, key: (
            batch["x"] @ variables["w"] * jax.random.uniform(key)
        ).mean(),
    )
    with pytest.warns(UserWarning, match="draws from its key"):
        mean_loss(drawing, rows, 4, drawing.init(jax.random.key(0)))
    bad = dataclasses.replace(LINEAR, validation_loss=lambda variables, batch: variables["w"])
    with pytest.raises(UsageError, match="validation_loss must return a float scalar"):
        mean_loss(bad, rows, 4, bad.init(jax.random.key(0)))


def test_statistics_that_are_not_finite_are_never_kept():
    """Overflowing statistics beside a finite loss, a loss of NaN, and an infinity of before."""

    def loss(variables, batch, key):
        seen = {"mean": variables["seen"]["mean"] + batch["x"].sum(), "lowest": jnp.float32(np.inf)}
        return (variables["params"]["w"] * batch["y"]).mean(), {"seen": seen}

    def first(key):
        seen = {"mean": jnp.float32(1), "lowest": jnp.float32(np.inf)}
        return {"params": {"w": jnp.float32(2)}, "seen": seen}

    model = OwnModel(first, loss, None, RULE, None)
    state, step = model.init(jax.random.key(0)), jax.jit(model.step)
    for x, y, good in ((2.0, 1.0, True), (np.inf, 1.0, False), (2.0, np.nan, False)):
        batch = {"x": jnp.float32([x]), "y": jnp.float32([y])}
        new, info = step(jax.random.key(0), state, batch)
        assert info["skipped"] == (not good)
        assert new.collections["seen"]["mean"] == (3.0 if good else 1.0)
        assert (new.params["w"] != 2.0) == good


# ---------------------------------------------------------------- refusals

LINEAR = OwnModel(
    lambda key: {"w": jnp.ones(4)},
    lambda variables, batch, key: (batch["x"] @ variables["w"]).mean(),
    lambda variables, batch: batch["x"] @ variables["w"],
    RULE,
    lambda rows: {"x": np.stack(rows)},
)


def with_loss(fn):
    return dataclasses.replace(
        LINEAR, loss=lambda variables, batch, key: fn(batch["x"] @ variables["w"])
    )


def counted(key):
    return {"params": {"w": jnp.ones(4)}, "count": jnp.ones(())}


@pytest.mark.parametrize(
    "model, options, sentence",
    [
        (with_loss(lambda y: y), {}, r"loss must return a float scalar, .* but made float32\[8\]; take a mean"),
        (with_loss(lambda y: 3.0), {}, "loss must return a float scalar, .* but made a float"),
        (with_loss(lambda y: (y.mean(), y)), {}, "loss returned .scalar, .*Tracer.; legal beside the scalar is a dict"),
        (with_loss(lambda y: (y.mean(), {"y": y})), {}, r"metric 'y' of loss has shape \(8,\); legal are scalars"),
        (with_loss(lambda y: (y.mean(), {"loss": y[0]})), {}, "metric 'loss' of loss is one that every run has"),
        (with_loss(lambda y: (y.mean(), {"a": {}})), {}, "loss returned 'a', neither a scalar nor a collection"),
        (with_loss(lambda y: jnp.nan * y.mean()), {}, "the loss of step 1 is nan; lower the learning rate or mend"),
        (LINEAR, {"batch_size": 9}, "batch_size=9 does not divide over the mesh's data x fsdp = 4; .* 8 and 12"),
        (LINEAR, {"batch_size": 3}, "batch_size=3 does not divide .* the nearest legal: 4"),
        (
            dataclasses.replace(LINEAR, collate=lambda rows: {"x": np.stack(rows)[1:]}),
            {},
            r"collate made x of shape \(7, 4\) from 8 examples; legal are arrays whose first dimension is 8",
        ),
        (dataclasses.replace(LINEAR, collate=lambda rows: {"x": "a"}), {}, "collate made x of a str from 8 examples"),
        (dataclasses.replace(LINEAR, collate=lambda rows: {}), {}, "collate made no array"),
        (
            dataclasses.replace(LINEAR, init_variables=lambda key: {"w": jnp.ones(4), "name": 3}),
            {},
            "params/name is a int, not an array",
        ),
        (
            dataclasses.replace(LINEAR, init_variables=lambda key: {"w": jnp.ones(4, jnp.int32)}),
            {},
            "params/w is of int32, which has no gradient; legal are parameters of floats",
        ),
        (dataclasses.replace(LINEAR, init_variables=lambda key: {}), {}, "init_variables made no parameter"),
        (
            dataclasses.replace(LINEAR, init_variables=counted, loss=lambda _, batch, key: batch["x"].mean()),
            {},
            "loss must return the new 'count', a collection that init made, .* mutable=.'count'.",
        ),
        (
            dataclasses.replace(
                LINEAR,
                init_variables=counted,
                loss=lambda _, batch, key: (batch["x"].mean(), {"count": jnp.ones(3)}),
            ),
            {},
            "loss returned count with other names, shapes or dtypes than it was given",
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_sentence(model, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        trained(model, 2, **options)


def test_more_mistakes():
    with pytest.raises(UsageError, match="there is no example to train on"):
        examples_in_batches(LINEAR, [], 8, 0)
    state = LINEAR.init(jax.random.key(0))
    with pytest.raises(UsageError, match="there is no example to predict"):
        predictions(LINEAR, state, [], 8)
    mean = dataclasses.replace(LINEAR, predict=lambda variables, batch: {"m": batch["x"].mean()})
    with pytest.raises(UsageError, match=r"predict made m of shape \(\) from 8 examples"):
        predictions(mean, state, EXAMPLES, 8)
    with pytest.raises(UsageError, match="there is no layout to verify"):
        verify_own(LINEAR, lambda step: {"x": EXAMPLES[:8]}, [])
    stopped = dataclasses.replace(LINEAR, optimizer=optax.sgd(jnp.inf))
    with pytest.raises(
        UsageError, match="the update of step 1 is not finite, its loss is; lower the learning rate"
    ):
        trained(stopped, 1)


def test_older_arguments_of_training_are_fields_of_the_layout():
    tables = []
    older = {
        "mesh": MeshSpec(data=4, tensor=2),
        "given": {"params/w": ("mlp",)},
        "tell": tables.append,
    }
    go = functools.partial(train_own, LINEAR, EXAMPLES, Fit(2), batch_size=8)
    with pytest.warns(FutureWarning, match=r"train_own\(mesh, given, .*\) is now") as warned:
        got = go(**older)
    assert len(warned) == 1 and warned[0].filename == __file__
    want = go(layout=LayoutOptions(**older))
    assert len(tables) == 2 and tables[0] == tables[1] and "mlp=tensor" in tables[0]
    for one, other in zip(jax.tree.leaves(got.state), jax.tree.leaves(want.state), strict=True):
        assert one.sharding == other.sharding
        np.testing.assert_array_equal(one, other)
    with pytest.raises(TypeError, match="unexpected keyword argument 'layouts'"):
        go(layouts=[])


def test_older_arguments_of_the_proof_are_fields_of_the_options():
    seen = []
    older = {"dtypes": ["float64"], "steps": 1, "topology": None, "report": seen.append}
    wide = {"x": EXAMPLES[:8]}
    go = functools.partial(verify_own, LINEAR, lambda step: wide, [Layout(MeshSpec(data=8))])
    with pytest.warns(
        FutureWarning, match=r"verify_own\(dtypes, steps, topology, report\)"
    ) as warned:
        got = go(**older)
    assert len(warned) == 1 and warned[0].filename == __file__
    assert seen == got
    assert go(options=VerifyOptions(dtypes=["float64"], steps=1)) == got
    assert [row.dtype for row in got] == ["float64"]
    with pytest.raises(TypeError, match="unexpected keyword argument 'rules'"):
        go(rules={})


def test_boxes_of_linen_are_opened():
    module = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.ones, ("a", "b")))
    model = dataclasses.replace(
        LINEAR, init_variables=lambda key: module.init(key, jnp.zeros((1, 4)))
    )
    assert model.init(jax.random.key(0)).params["kernel"].shape == (4, 4)


def test_a_layout_that_sends_activations_about_is_told():
    """Rows in another order: every device needs rows of all others."""

    def loss(variables, batch, key):
        mixed = batch["x"] @ variables["w"]
        return jnp.square(jnp.cumsum(mixed.T, 1)[:, ::-1].T - mixed).mean()

    init = lambda key: {"w": jnp.ones((4, 2))}  # noqa: E731
    model = dataclasses.replace(LINEAR, loss=loss, init_variables=init)
    wide = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    options = VerifyOptions(dtypes=["float32"], steps=1)
    layouts = [Layout(MeshSpec(data=8))]
    rows = verify_own(model, lambda step: {"x": wide}, layouts, options=options)
    assert any(
        "over data, where at most 0 of 0 are declared" in breach for breach in rows[0].breaches
    ), rows
