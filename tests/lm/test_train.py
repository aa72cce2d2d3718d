"""The optimizer step: accumulation, what it does with bad steps, what it says."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fast import jit
from lm_configs import lm_config
from tolerance import LAYOUT, assert_close

from jaxpar.lm import OptimizerConfig, Trainer
from jaxpar.lm.train import Health, _watch
from jaxpar.optim import learning_rate
from jaxpar.types import UsageError

ROWS, T, V = 8, 6, 16
TRAINER = Trainer(
    lm_config(
        vocab_size=V,
        num_layers=2,
        embed_dim=16,
        num_heads=2,
        mlp_dim=24,
        dtype="float32",
        init_std=0.2,
        loss_chunk=16,
    ),
    OptimizerConfig(warmup_steps=2, learning_rate=1e-2, eps=1e-6),  # see test_layouts on eps
    num_steps=50,
    max_skipped=3,
)


def batch_of(seed=0, weights=None):
    tokens = np.random.default_rng(seed).integers(0, V, (ROWS, T + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]} | (
        {} if weights is None else {"weights": weights}
    )


@functools.cache
def step_of(trainer):
    return jit(trainer.step)


@pytest.fixture(scope="module")
def start():
    return jit(TRAINER.init)(jax.random.key(0))


# ---------------------------------------------------------------- accumulation


@pytest.mark.slow
def test_accumulation_equals_the_whole_batch(start):
    want = step_of(TRAINER)(jax.random.key(1), start, batch_of())
    got = step_of(dataclasses.replace(TRAINER, accumulate=4))(jax.random.key(1), start, batch_of())
    assert_close(got, want, LAYOUT["float32"])  # another order of sums, as between layouts


def test_accumulation_equals_the_whole_batch_with_unequal_weights(x64, start):
    """Parts that weigh more count more, one that weighs nothing counts nothing."""
    trainer = dataclasses.replace(
        TRAINER, model=dataclasses.replace(TRAINER.model, dtype="float64")
    )
    state = jax.tree.map(
        lambda x: np.asarray(x, np.float64 if x.dtype == np.float32 else x.dtype), start
    )
    weights = np.random.default_rng(1).uniform(0, 2, (ROWS, T)) * (np.arange(ROWS) % 4 > 0)[:, None]
    want, _ = step_of(trainer)(jax.random.key(1), state, batch_of(weights=weights))
    for parts in (4, 8):
        got, _ = step_of(dataclasses.replace(trainer, accumulate=parts))(
            jax.random.key(1), state, batch_of(weights=weights)
        )
        assert {x.dtype for x in jax.tree.leaves(got.params)} == {np.dtype("float64")}
        assert_close(got, want, LAYOUT["float64"])


@pytest.mark.parametrize("parts", [1, 4])
def test_each_part_has_a_dropout_key_of_its_own(start, monkeypatch, parts):
    """The loss draws one number by its key; weights leave that of one part at a time."""
    from jaxpar.lm import stages
    from jaxpar.nn.auxiliary import NOTHING

    def drawn(params, batch, model, *, normaliser, share, dropout_key, smoothing):
        return jax.random.uniform(dropout_key) * batch["weights"].max() + 0 * params[
            "embedding"
        ].sum(), NOTHING

    monkeypatch.setattr(stages, "losses", drawn)
    model = dataclasses.replace(TRAINER.model, dropout=0.1)
    step = dataclasses.replace(TRAINER, model=model, accumulate=parts).step
    value = jit(lambda key, state, batch: step(key, state, batch)[1]["loss"])
    rows = np.arange(ROWS)[:, None] % parts * np.ones((1, T), int)
    seen = {}
    for key in (1, 2):
        for part in range(parts):
            batch = batch_of(weights=(rows == part).astype(np.float32))
            seen[key, part] = float(value(jax.random.key(key), start, batch))
    assert len(set(seen.values())) == 2 * parts, seen


def test_parts_that_do_not_divide_are_refused(start):
    with pytest.raises(
        UsageError, match="train.accumulate=3 does not divide the batch of 8 rows; nearest is 2"
    ):
        dataclasses.replace(TRAINER, accumulate=3).step(jax.random.key(0), start, batch_of())


# ---------------------------------------------------------------- bad steps


def bad_batch(value):
    weights = np.ones((ROWS, T), np.float32)
    weights[3, 2] = value
    return batch_of(weights=weights)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_step_changes_nothing_and_is_counted(start, value):
    step, good = step_of(TRAINER), batch_of(weights=np.ones((ROWS, T), np.float32))
    state, _ = step(jax.random.key(1), start, good)
    bad, info = step(jax.random.key(2), state, bad_batch(value))
    jax.tree.map(
        np.testing.assert_array_equal, (bad.params, bad.opt_state), (state.params, state.opt_state)
    )
    assert not np.isfinite(info["loss"]) and info["skipped"] == info["skipped_in_a_row"] == 1
    assert bad.step == 2 and bad.health.loss_mean == state.health.loss_mean
    after, info = step(jax.random.key(3), bad, good)
    assert info["skipped"] == 1 and info["skipped_in_a_row"] == 0 and np.isfinite(info["loss"])
    # The good step is the one that would have come without the bad one: same schedule, same moments.
    straight, _ = step(jax.random.key(3), state, good)
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.params, after.opt_state),
        (straight.params, straight.opt_state),
    )
    assert any(
        (a != b).any()
        for a, b in zip(*map(jax.tree.leaves, (after.params, bad.params)), strict=True)
    )


def test_a_bad_gradient_of_a_good_loss_is_skipped(start, monkeypatch):
    from jaxpar.lm import stages

    plain = stages.losses

    def bad(params, *args, **options):
        value, aux = plain(params, *args, **options)
        return value + jnp.sqrt(
            0.0 * params["embedding"][0, 0]
        ), aux  # sqrt(x - x) is 0 with gradient nan

    monkeypatch.setattr(stages, "losses", bad)
    state, info = jit(dataclasses.replace(TRAINER, num_steps=51).step)(
        jax.random.key(1), start, batch_of()
    )
    assert np.isfinite(info["loss"]) and not np.isfinite(info["grad_norm"]) and info["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, start.params)


def test_an_update_that_is_not_finite_is_not_taken(start):
    """Loss and gradient are finite, and a moment is so large that the correction of its bias overflows."""
    mu = optax.tree.get(start.opt_state, "mu")
    large = mu | {"embedding": mu["embedding"].at[0, 0].set(3e38)}
    state = begun = start.replace(opt_state=optax.tree.set(start.opt_state, mu=large))
    for count in (1, 2, 3):
        assert not TRAINER.done(state)
        state, info = step_of(TRAINER)(
            jax.random.key(count), state, batch_of(weights=np.ones((ROWS, T), np.float32))
        )
        assert (
            np.isfinite(info["loss"])
            and np.isfinite(info["grad_norm"])
            and info["skipped"] == count
        )
    jax.tree.map(
        np.testing.assert_array_equal,
        (state.params, state.opt_state),
        (begun.params, begun.opt_state),
    )
    assert TRAINER.done(state) and state.health.loss_mean == begun.health.loss_mean


def test_done_after_too_many_bad_steps_in_a_row(start):
    step, good = step_of(TRAINER), batch_of(weights=np.ones((ROWS, T), np.float32))
    state, done = start, []
    for batch in (bad_batch(np.nan), bad_batch(np.nan), good, *[bad_batch(np.nan)] * 4):
        state, _ = step(jax.random.key(1), state, batch)
        done.append(bool(TRAINER.done(state)))
    assert done == [False, False, False, False, False, True, True] and state.health.skipped == 6


# ---------------------------------------------------------------- spikes


@jit
def spikes_of(losses):
    count, zero = jnp.int32(0), jnp.float32(0)

    def watch(health, value):
        return _watch(health, value, jnp.isfinite(value))

    return jax.lax.scan(watch, Health(count, count, count, zero, zero), losses)


def descent(noise):
    rng = np.random.default_rng(0)
    smooth = 3 + 7 * np.exp(-np.arange(400) / 60)
    return (smooth * (1 + noise * rng.standard_normal(400))).astype(np.float32)


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.03])
def test_a_descent_has_no_spikes(noise):
    health, spikes = spikes_of(descent(noise))
    assert not np.asarray(spikes).any() and health.spikes == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_noisy_plateau_has_no_spikes(seed):
    losses = 3 + 0.03 * np.random.default_rng(seed).standard_normal(400)
    assert spikes_of(losses.astype(np.float32))[0].spikes == 0
    losses[300] += 0.8  # many deviations, but no more than a quarter of the loss
    assert np.flatnonzero(spikes_of(losses.astype(np.float32))[1]).tolist() == [300]


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("place", [30, 100, 200, 399])
def test_an_injected_spike_is_found_where_it_is(noise, place):
    losses = descent(noise)
    losses[place] *= 2.5
    health, spikes = spikes_of(losses)
    assert np.flatnonzero(spikes).tolist() == [place] and health.spikes == 1


@pytest.mark.parametrize("place", [120, 200, 399])
@pytest.mark.parametrize("scatter", [0.0, 0.02])
def test_a_spike_after_any_long_descent_is_found(scatter, place):
    time = np.arange(400)
    falls = (
        10 - 7 * np.minimum(time / 100, 1),
        2 + 9 / np.sqrt(1 + time),
        3 + 7 * np.exp(-time / 20),
    )
    for seed, losses in enumerate(falls):
        losses = losses * (1 + scatter * np.random.default_rng(seed).standard_normal(400))
        assert not np.asarray(spikes_of(losses.astype(np.float32))[1]).any()
        losses[place] *= 2.5
        assert np.flatnonzero(spikes_of(losses.astype(np.float32))[1]).tolist() == [place]


def test_the_deviation_of_a_level_loss_is_its_standard_deviation():
    losses = 3 + 0.03 * np.random.default_rng(0).standard_normal((50, 400))
    deviations = [np.sqrt(spikes_of(row.astype(np.float32))[0].loss_variance) for row in losses]
    assert 0.9 * 0.03 < np.mean(deviations) < 1.1 * 0.03


def test_a_bad_loss_is_no_spike_and_does_not_touch_the_mean():
    losses = descent(0.01)
    losses[50:53] = [np.nan, np.inf, -np.inf]
    health, spikes = spikes_of(losses)
    without, _ = spikes_of(np.delete(losses, [50, 51, 52]))
    assert not np.asarray(spikes).any() and health.skipped == 3
    np.testing.assert_array_equal(health.loss_mean, without.loss_mean)


def test_the_step_reports_a_spike(start):
    settled = dataclasses.replace(
        start,
        health=dataclasses.replace(
            start.health, loss_mean=jnp.float32(1.0), loss_variance=jnp.float32(1e-4)
        ),
    )
    state, info = step_of(TRAINER)(jax.random.key(0), settled, batch_of())
    assert info["spike"] == 1 and info["spikes"] == 1 and state.health.spikes == 1


# ---------------------------------------------------------------- what a step says and does


def test_training_learns_a_batch_by_heart(start):
    state, losses, rates = start, [], []
    for number in range(40):
        state, info = step_of(TRAINER)(jax.random.key(number), state, batch_of())
        losses.append(float(info["loss"]))
        rates.append(float(info["learning_rate"]))
    assert losses[-1] < 0.5 * losses[0] and state.step == 40
    np.testing.assert_allclose(
        rates, jax.vmap(learning_rate(TRAINER.optimizer, 50))(np.arange(40)), rtol=1e-6
    )


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_axes_of_the_state_follow_the_parameters(name):
    """Every moment lies as its parameter; all else of the state is whole everywhere."""
    trainer = dataclasses.replace(TRAINER, optimizer=OptimizerConfig(name))

    def is_axes(value):
        return type(value) is tuple and all(name is None or isinstance(name, str) for name in value)

    def by_path(tree):
        paths = jax.tree.leaves_with_path(tree, is_leaf=is_axes)
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in paths
        }

    state, axes = by_path(jax.eval_shape(trainer.init, jax.random.key(0))), by_path(trainer.axes())
    declared = {
        path.removeprefix("params/"): names
        for path, names in axes.items()
        if path.startswith("params/")
    }
    assert declared["layers/wq"] == ("layers", "embed", "heads", "head_dim")
    moments = [path for path in axes if any(part in path for part in ("/mu/", "/nu/", "/mean/"))]
    assert len(moments) >= len(declared)
    for path in moments:
        assert axes[path] == declared[re.split("/(?:mu|nu|mean)/", path)[1]]
    rest = axes.keys() - set(moments) - {f"params/{path}" for path in declared}
    assert all(axes[path] == (None,) * state[path].ndim for path in rest)
