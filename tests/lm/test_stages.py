"""The model in stages and its schedules: pieces equal the whole, what was told is merged by its rule, z-loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from fast import jit
from lm_configs import with_fields
from tolerance import EXACT_MATHS, assert_close

from jaxpar.lm import OptimizerConfig, Trainer, apply
from jaxpar.lm import stages as module
from jaxpar.lm.loss import losses
from jaxpar.lm.stages import stages
from jaxpar.nn.auxiliary import Aux, Max, Mean, Min, Sum, both, over_layers, over_parts, scalars
from jaxpar.pipeline.accumulation import InTurn, key_of_part, layer_by_layer, parts_of
from jaxpar.types import UsageError

PLAIN = tiny.exact(tiny.LLAMA)
MODELS = {
    "llama": with_fields(PLAIN, z_loss=0.1),
    "gpt2": with_fields(tiny.exact(tiny.GPT2), activation="swiglu", dropout=0.3, tied=True),
    "aaren": with_fields(PLAIN, mixer="aaren", scan_layers=False),
}
TOLERANCE = EXACT_MATHS["float64"]
in_turn = jit(InTurn(), static_argnums=(0, 4))
staged = functools.cache(stages)  # two of one model are not equal, and would be compiled twice


def batch(packed=False):
    rng = np.random.default_rng(0)
    out = {"tokens": rng.integers(0, 16, (4, 6)), "targets": rng.integers(0, 16, (4, 6))}
    if packed:
        out |= {
            "segments": np.array([[0, 0, 1, 1, 1, 2]] * 4),
            "positions": np.array([[0, 1, 0, 1, 2, 0]] * 4),
        }
        out |= {"weights": rng.uniform(size=(4, 6))}
    return jax.tree.map(jnp.asarray, out)


@pytest.mark.parametrize(
    ("name", "packed"),
    [
        ("llama", True),
        ("gpt2", False),
        ("aaren", True),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("llama", False), ("gpt2", True), ("aaren", False))
        ),
    ],
)
def test_stages_one_after_the_other_are_the_model(name, packed, x64):
    config, data = MODELS[name], batch(packed)
    params, model = tiny.params_of(config), stages(config)
    args = params, data, jax.random.key(3), model.total(data), 1.0
    got, want = (
        jit(jax.value_and_grad(f, has_aux=True))(*args)
        for f in (layer_by_layer(model), model.whole)
    )
    assert_close(got, want, TOLERANCE)
    if not config.dropout:
        assert_close(want[0][0], tiny.loss_of(params, data, config), TOLERANCE)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("packed", [False, True])
def test_in_turn_equals_the_whole_batch(count, packed, x64):
    config, data = MODELS["llama"], batch(packed)
    params = tiny.params_of(config)
    (value, aux), grads = in_turn(staged(config), params, data, None, 1)
    (parts, told), sums = in_turn(staged(config), params, data, None, count)
    assert_close((parts, sums, scalars(told)), (value, grads, scalars(aux)), TOLERANCE)


def test_parts_that_do_not_divide_are_refused():
    with pytest.raises(
        UsageError, match="train.accumulate=3 does not divide the batch of 4 rows; nearest is 2"
    ):
        parts_of(batch(), 3)


def test_parts_draw_apart_and_a_single_part_as_the_batch():
    key = jax.random.key(5)
    assert key_of_part(None, 1, 3) is None
    data = [
        jax.random.key_data(key_of_part(key, index, count))
        for index, count in ((0, 1), (0, 3), (1, 3), (2, 3))
    ]
    np.testing.assert_array_equal(data[0], jax.random.key_data(key))
    assert len({tuple(each.tolist()) for each in data}) == 4
    np.testing.assert_array_equal(data[2], jax.random.key_data(jax.random.fold_in(key, 1)))


def test_a_schedule_of_ones_own_trains():
    called = []

    @dataclasses.dataclass(frozen=True)
    class Counting:
        def __call__(self, *args):
            called.append(args[-1])
            return InTurn()(*args)

    config = dataclasses.replace(MODELS["llama"], dtype="float32")
    options = OptimizerConfig(), 10, 2
    state, states = jit(Trainer(config, *options).init)(jax.random.key(0)), []
    for schedule in (InTurn(), Counting()):
        trainer = Trainer(config, *options, schedule=schedule)
        states.append(jit(trainer.step)(jax.random.key(1), state, batch()))
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert called == [2]


# ---------------------------------------------------------------- what is told


def test_a_layers_loss_is_added_once_however_the_batch_is_cut(monkeypatch, x64):
    """A mean over each microbatch's tokens, summed over two layers, averaged over microbatches of one size."""
    config, data = PLAIN, batch()
    params, plain = tiny.params_of(config), losses
    monkeypatch.setattr(module, "losses", functools.partial(_with_balance, plain))
    run = jit(InTurn(), static_argnums=(0, 4))
    (whole, aux), grads = run(stages(config), params, data, None, 1)
    (parts, told), sums = run(stages(config), params, data, None, 4)
    assert_close((parts, sums, scalars(told)), (whole, grads, scalars(aux)), TOLERANCE)
    balance = 2 * float(jnp.square(params["embedding"][data["tokens"]]).mean())
    assert_close(
        (whole, aux.losses["balance"]),
        (plain(params, data, config)[0] + balance, balance),
        TOLERANCE,
    )


def _with_balance(plain, params, data, config, *, share, **options):
    value, aux = plain(params, data, config, share=share, **options)
    term = jnp.square(params["embedding"][data["tokens"]]).mean()
    told = over_layers(Aux({"balance": jnp.stack([term, term])}, {}))
    return value + share * told.losses["balance"], both(aux, told)


def test_z_loss_is_the_mean_square_of_the_log_normaliser(x64):
    config, data = MODELS["llama"], batch()
    params = tiny.params_of(config)

    def plain(params):
        logits = apply(params, data["tokens"], config)
        log_norm = jax.nn.logsumexp(logits, -1)
        chosen = jnp.take_along_axis(logits, data["targets"][..., None], -1)[..., 0]
        return (log_norm - chosen).mean() + 0.1 * jnp.square(log_norm).mean(), 0.1 * jnp.square(
            log_norm
        ).mean()

    for chunk in (8192, 7):
        chunked = with_fields(config, loss_chunk=chunk)
        (value, aux), grads = jit(
            jax.value_and_grad(lambda p, c=chunked: losses(p, data, c), has_aux=True)
        )(params)
        (want, z), want_grads = jit(jax.value_and_grad(plain, has_aux=True))(params)
        assert_close((value, grads, aux.metrics["z_loss"].value), (want, want_grads, z), TOLERANCE)


def test_ranges_are_told_to_the_metrics():
    config = with_fields(MODELS["llama"], dtype="float32", ranges=True)
    trainer = Trainer(config, accumulate=2)
    _, info = jit(trainer.step)(jax.random.key(0), trainer.init(jax.random.key(1)), batch())
    assert {"residual_max", "z_loss"} <= set(info) and 0 < float(info["residual_max"]) < 10


def test_metrics_are_merged_by_their_own_rules():
    told = [
        Aux({"a": x}, {"mean": Mean(x, 2.0 * x), "sum": Sum(x), "max": Max(x), "min": Min(x)})
        for x in map(jnp.float32, (1, 4, 3))
    ]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *told)
    for merge, total in ((over_layers, 8), (over_parts, 8 / 3)):
        got = scalars(merge(stacked))
        want = {"a": total, "mean": 0.5, "sum": 8, "max": 4, "min": 1}
        assert {name: float(x) for name, x in got.items()} == pytest.approx(want)
    two = scalars(both(told[0], told[1]))
    assert {name: float(x) for name, x in two.items()} == {
        "a": 5,
        "mean": 0.5,
        "sum": 5,
        "max": 4,
        "min": 1,
    }
    bad = Aux({}, {"max": Max(jnp.array([1.0, np.nan])), "min": Min(jnp.array([np.nan, 1.0]))})
    assert scalars(over_layers(bad)) == {"max": np.inf, "min": -np.inf}
    many = np.ones((100, 64), np.float32)  # along this axis XLA for CPUs leaves NaN out
    many[50, 32] = np.nan
    bad = Aux({}, {"max": Max(jnp.array(many)), "min": Min(jnp.array(many))})
    found = scalars(over_layers(bad))
    assert found["max"][32] == np.inf and found["min"][32] == -np.inf and found["max"][0] == 1
    assert float(Mean(jnp.float32(0), jnp.float32(0)).value) == 0
