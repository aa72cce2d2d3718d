"""One step of any optimizer: its value, its guard, its traced numbers, and the tree that its state is saved as."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fast import jit
from tolerance import assert_close

from jaxpar.nn import SequenceNetwork, SequenceTrainer
from jaxpar.optim import Optimizer, OptimizerConfig, learning_rate, make_optimizer
from jaxpar.optim.update import finite_or_old
from jaxpar.types import UsageError

NAMES = ("adamw", "muon", "radam", "rmsprop")
SHAPES = {"layers": {"w": (2, 3, 4), "scale": (2, 3)}, "b": (3,)}
AXES = {"layers": {"w": ("layers", "embed", "mlp"), "scale": ("layers", None)}, "b": (None,)}


def drawn(seed, std=1.0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(std * rng.standard_normal(shape), dtype), SHAPES, is_leaf=is_shape
    )


def is_shape(x):
    return isinstance(x, tuple)


def made(name, num_steps=None, **fields):
    fields = {"warmup_steps": 0, "schedule": "linear", "learning_rate": 0.1, **fields}
    return make_optimizer(OptimizerConfig(name, **fields), num_steps, axes=AXES)


def same(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


# ---------------------------------------------------------------- value


OPTAX = {
    "adamw": lambda c, rate: optax.adamw(
        rate, c.b1, c.b2, c.eps, weight_decay=c.weight_decay, mask=two_or_more
    ),
    "radam": lambda c, rate: optax.chain(
        optax.scale_by_radam(c.b1, c.b2, c.eps),
        optax.add_decayed_weights(c.weight_decay, two_or_more),
        optax.scale(-rate),
    ),
    "rmsprop": lambda c, rate: optax.chain(
        optax.rmsprop(1.0, c.b2, c.eps),
        optax.add_decayed_weights(-c.weight_decay, two_or_more),
        optax.scale(rate),
    ),
}


def two_or_more(params):
    return jax.tree.map(lambda x: x.ndim > 1, params)


@pytest.mark.parametrize("name", OPTAX)
@pytest.mark.parametrize("num_steps", [None, 9], ids=["traced", "scheduled"])
def test_values_are_those_of_optax_in_double_precision(name, num_steps, x64):
    config = OptimizerConfig(name, 0.1, b1=0.8, b2=0.97, eps=1e-3, weight_decay=0.3, clip_norm=2.0, schedule="constant",
                             warmup_steps=0)  # fmt: skip
    optimizer, given = make_optimizer(config, num_steps), {} if num_steps else {"rate": 0.1}
    theirs = optax.chain(optax.clip_by_global_norm(2.0), OPTAX[name](config, 0.1))
    params = other = drawn(0, dtype=np.float64)
    state, their_state = optimizer.init(params), theirs.init(params)
    for step in range(9):
        grads = drawn(step + 1, std=[0.1, 3.0][step % 2], dtype=np.float64)
        params, state, info = optimizer.update(grads, state, params, **given)
        updates, their_state = theirs.update(grads, their_state, other)
        other = optax.apply_updates(other, updates)
        assert_close(params, other, 1e-13)
        np.testing.assert_allclose(
            info["grad_norm"], np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))
        )
        assert info["learning_rate"] == 0.1 and info["skipped"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_the_same_as_one_of_optax(name):
    """`transformation` and `update` make the same steps, schedule, clip and decay included."""
    optimizer = made(name, 5, clip_norm=0.5, weight_decay=0.3, warmup_steps=2)
    plain = optimizer.transformation()
    params = other = drawn(0)
    state = their_state = optimizer.init(params)
    rates = learning_rate(OptimizerConfig(learning_rate=0.1, schedule="linear", warmup_steps=2), 5)
    for step in range(4):
        params, state, info = jit(optimizer.update)(drawn(step + 1), state, params)
        updates, their_state = jit(plain.update)(drawn(step + 1), their_state, other)
        other = optax.apply_updates(other, updates)
        assert_close((params, state), (other, their_state), 2e-6)
        np.testing.assert_allclose(info["learning_rate"], rates(step), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_decay_is_of_matrices_alone(name):
    """Without a gradient all that moves is what decays; with or without a schedule, before or after the rate."""
    zeros, params = drawn(0, 0.0), drawn(1)
    want = jax.tree.map(lambda x, decays: x * (1 - 0.1 * 0.5 * decays), params, two_or_more(params))
    for num_steps in (None, 9):
        optimizer = made(name, num_steps, weight_decay=0.5, schedule="constant")
        got = optimizer.update(
            zeros, optimizer.init(params), params, rate=None if num_steps else jnp.float32(0.1)
        )[0]
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), got, want)


def test_a_mask_of_the_callers_is_heard():
    params, zeros = drawn(1), drawn(0, 0.0)
    mask = {"layers": {"w": False, "scale": False}, "b": True}
    optimizer = make_optimizer(OptimizerConfig(weight_decay=0.5, warmup_steps=0), 9, decays=mask)
    got = optimizer.update(zeros, optimizer.init(params), params)[0]
    moved = jax.tree.map(lambda got, old: bool((got != old).any()), got, params)
    assert moved == mask


def test_clips_shorten_the_gradient_to_a_norm():
    """A plain rule shows what it is given; max_norm=0 stops all, and a norm of 0 is no NaN."""
    params, grads, zeros = drawn(0), drawn(1), drawn(0, 0.0)
    norm = float(optax.tree.norm(grads))
    for clip, max_norm, want in ((0.5, None, 0.5), (99.0, None, norm), (0.0, None, norm), (99.0, 0.5, 0.5),
                                 (0.5, 99.0, norm), (0.0, 0.0, 0.0)):  # fmt: skip
        for schedule in (None, lambda step: 1.0):
            optimizer = Optimizer(optax.identity(), schedule, clip)
            state, rate = optimizer.init(params), None if schedule else 1.0
            got, _, info = optimizer.update(grads, state, params, rate=rate, max_norm=max_norm)
            moved = jax.tree.map(lambda old, new: old - new, params, got)
            np.testing.assert_allclose(
                optax.tree.norm(moved), want, rtol=1e-5, err_msg=f"{clip} {max_norm}"
            )
            np.testing.assert_allclose(info["grad_norm"], norm, rtol=1e-6)
            still, _, info = optimizer.update(zeros, state, params, rate=rate, max_norm=max_norm)
            same(still, params)
            assert info["skipped"] == 0


# ---------------------------------------------------------------- traced numbers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_steps", [None, 9], ids=["traced", "scheduled"])
def test_rates_and_clips_that_are_swept_equal_the_loop(name, num_steps):
    optimizer, params, grads = made(name, num_steps, weight_decay=0.3), drawn(0), drawn(1)
    rates, norms = jnp.array([0.0, 0.01, 0.3]), jnp.array([0.1, 99.0, 1.0])

    def two_steps(rate, norm):
        new, state, _ = optimizer.update(
            grads, optimizer.init(params), params, rate=rate, max_norm=norm
        )
        return optimizer.update(drawn(2), state, new, rate=rate, max_norm=norm)

    swept = jit(jax.vmap(two_steps))(rates, norms)
    one = jit(two_steps)
    for i, (rate, norm) in enumerate(zip(rates, norms, strict=True)):
        assert_close(jax.tree.map(lambda x, i=i: x[i], swept), one(rate, norm), 2e-6)
    same(swept[2]["learning_rate"], rates)
    same(jax.tree.map(lambda x: x[0], swept[0]), params)  # at a rate of 0


def test_a_given_rate_goes_before_the_schedule_which_counts_on():
    optimizer, params = made("adamw", 10, final_ratio=0.0), drawn(0)
    state = optimizer.init(params)
    _, state, info = optimizer.update(drawn(1), state, params, rate=jnp.float32(0.7))
    np.testing.assert_allclose(info["learning_rate"], 0.7)
    info = optimizer.update(drawn(1), state, params)[2]
    np.testing.assert_allclose(info["learning_rate"], 0.1 * 0.9, rtol=1e-6)


def test_without_a_schedule_a_rate_is_asked_for():
    optimizer, params = made("adamw"), drawn(0)
    with pytest.raises(UsageError, match="no schedule; give rate= to every update"):
        optimizer.update(drawn(1), optimizer.init(params), params)
    with pytest.raises(UsageError, match="without a schedule is none of optax's"):
        optimizer.transformation()


# ---------------------------------------------------------------- the guard


OLD = {"w": jnp.ones(3), "b": jnp.zeros(2)}, {"mu": jnp.ones(3), "count": jnp.int32(4)}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["params", "gradient", "nowhere", "loss"])
def test_a_step_is_taken_whole_or_not_at_all(where, bad):
    new = {"w": jnp.full(3, 2.0), "b": jnp.ones(2)}, {"mu": jnp.zeros(3), "count": jnp.int32(5)}
    if where == "params":
        new[0]["b"] = new[0]["b"].at[1].set(bad)
    norm = jnp.float32(bad if where == "gradient" else 1.0)
    kept, good = finite_or_old(
        new, OLD, norm, jnp.isfinite(jnp.float32(bad)) if where == "loss" else True
    )
    same(kept, new if where == "nowhere" else OLD)
    assert bool(good) == (where == "nowhere") and kept[1]["count"].dtype == jnp.int32


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_steps", [None, 9], ids=["traced", "scheduled"])
def test_what_is_not_finite_changes_no_bit_and_is_counted(name, num_steps):
    """A NaN in one gradient, a loss that is no number, gradients whose squares overflow, a rate that is."""
    optimizer, params = made(name, num_steps, weight_decay=0.3), drawn(0)
    update = jit(
        lambda grads, state, params, rate, good: optimizer.update(
            grads, state, params, rate=rate, good=good
        )
    )
    first = optimizer.update(drawn(1), optimizer.init(params), params, rate=jnp.float32(0.1))
    params, state, rate, fine = *first[:2], jnp.float32(0.1), jnp.bool_(True)
    nan = drawn(2) | {"b": jnp.array([0.0, jnp.nan, 0.0])}
    for grads, step, good in (
        (nan, rate, fine),
        (drawn(2), rate, jnp.bool_(False)),
        (drawn(2, 1e30), rate, fine),
        (drawn(2), jnp.float32(jnp.inf), fine),
    ):
        kept, moved, info = update(grads, state, params, step, good)
        assert info["skipped"] == 1 and info["skipped"].dtype == jnp.float32
        same((kept, moved), (params, state))
    kept, _, info = update(drawn(2), state, params, rate, fine)
    assert info["skipped"] == 0 and (kept["b"] != params["b"]).all()


def test_the_schedule_does_not_count_what_was_not_made():
    optimizer, params = made("adamw", 4, final_ratio=0.0), drawn(0)
    state = optimizer.init(params)
    rates = []
    for good in (True, False, False, True, True):
        _, state, info = optimizer.update(drawn(1), state, params, good=jnp.bool_(good))
        rates.append(float(info["learning_rate"]))
    np.testing.assert_allclose(rates, [0.1, 0.075, 0.075, 0.075, 0.05], rtol=1e-6)


def test_a_sequence_trainer_takes_no_step_that_is_not_finite():
    """Loss and gradient are finite; the rate times the decay is not."""
    network = SequenceNetwork(2, 1, "min_gru", size=4, layers=1, classes=False)
    trainer = SequenceTrainer(
        network, OptimizerConfig(learning_rate=1e38, weight_decay=1e3, warmup_steps=0)
    )
    first = jit(trainer.init)(jax.random.key(0))
    batch = {
        "inputs": jnp.ones((2, 3, 2)),
        "targets": jnp.ones((2, 3)),
        "weights": jnp.ones((2, 3)),
    }
    state, info = jit(trainer.step)(jax.random.key(1), first, batch)
    same((state.params, state.opt_state), (first.params, first.opt_state))
    assert (
        np.isfinite(info["loss"])
        and np.isfinite(info["grad_norm"])
        and info["skipped"] == 1
        and state.step == 1
    )
    state, info = jit(trainer.step)(
        jax.random.key(1), first, batch | {"targets": jnp.full((2, 3), 3e38)}
    )
    same((state.params, state.opt_state), (first.params, first.opt_state))
    assert not np.isfinite(info["loss"]) and info["skipped"] == 1


# ---------------------------------------------------------------- what is saved


def test_states_have_the_paths_of_checkpoints_that_there_are():
    """A name here that changes cuts every run off from its checkpoints."""

    def paths(optimizer):
        state = jax.eval_shape(optimizer.init, drawn(0))
        return {
            jax.tree_util.keystr(path, simple=True, separator="/")
            for path, _ in jax.tree.leaves_with_path(state)
        }

    leaves = {"layers/w", "layers/scale", "b"}
    adam = {"count", *(f"{moment}/{leaf}" for moment in ("mu", "nu") for leaf in leaves)}
    assert paths(made("adamw")) == paths(made("radam")) == adam
    assert paths(made("rmsprop")) == {f"nu/{leaf}" for leaf in leaves}
    assert paths(made("adamw", 9)) == {f"1/0/{path}" for path in adam} | {"1/2/count"}
    assert paths(made("adamw", 9, clip_norm=0.0, weight_decay=0.0)) == paths(made("adamw", 9))
    inner = "1/0/inner_states"
    left = {f"{moment}/{leaf}" for moment in ("mu", "nu") for leaf in leaves - {"layers/w"}}
    assert paths(made("muon", 9)) == {
        *(f"{inner}/adam/inner_state/{path}" for path in ("count", *left)),
        *(f"{inner}/muon/inner_state/{path}" for path in ("count", "mean/layers/w")),
        "1/1/count", "2/inner_state/count",
    }  # fmt: skip


# ---------------------------------------------------------------- leaves joined


@pytest.mark.parametrize("name", ["adamw", "radam", "rmsprop"])
def test_one_vector_takes_the_steps_of_its_leaves(name):
    optimizer, params = made(name, weight_decay=0.0), drawn(0)
    apart = params, optimizer.init(params)
    joined = optimizer.joined(*apart)
    together = joined.params, joined.state
    assert joined.params.shape == (33,)

    @jit
    def both(apart, together, grads):
        numbers = {"rate": jnp.float32(0.1), "max_norm": jnp.float32(1.0)}
        vector = jax.grad(
            lambda v: sum(map(jnp.vdot, *map(jax.tree.leaves, (joined.part(v), grads))))
        )(together[0])
        *apart, told = optimizer.update(grads, apart[1], apart[0], **numbers)
        *together, same_told = optimizer.update(vector, together[1], together[0], **numbers)
        return apart, together, told, same_told

    for seed in range(1, 4):
        apart, together, *told = both(apart, together, drawn(seed))
        assert_close(told[1], told[0], 2e-6)
    whole = joined.part(together[0]), joined.part_state(together[1])
    assert jax.tree.structure(whole) == jax.tree.structure(tuple(apart))
    assert_close(whole, tuple(apart), 2e-6)


@pytest.mark.parametrize("name, decay", [("muon", 0.0), ("adamw", 0.1)])
def test_leaves_that_are_not_alike_stay_apart(name, decay):
    optimizer, params = made(name, weight_decay=decay), drawn(0)
    state = optimizer.init(params)
    assert optimizer.joined(params, state)[:2] == (params, state)
