import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from forks import Fork, Forks, after, legal, mixer, perturbed, values
from tolerance import EXACT_MATHS, assert_close

from jaxpar.rl import Dqn, DqnRates, Network
from jaxpar.rl.buffer import sample
from jaxpar.rl.dqn import td_targets
from jaxpar.types import UsageError

RATES = DqnRates(learning_rate=0.01, discount=0.9, tau=0.25, max_grad_norm=0.3, reward_scale=0.5)
SMALL = Network(hidden=(8,), activation="relu", layer_norm=True)
LONE = Dqn(
    Fork(), SMALL, RATES, num_envs=3, num_steps=14, gradient_steps=1, batch_size=5, capacity=64, warmup=20, n_step=3,
    target_period=1,
)  # fmt: skip
TEAM = dataclasses.replace(
    LONE, env=Forks(), decomposition="qmix", decomposition_size=3, n_step=2, double=False
)


def lively(learner):
    """A state whose weights, and others of the target network, are none of them zero."""
    state = jit(learner.init)(jax.random.key(3), None)
    weights = perturbed(state.weights)
    return state.replace(
        weights=weights, target_weights=jax.tree.map(lambda x: 0.1 - 0.7 * x, weights)
    )


def replayed(learner, steps):
    """What the steps led to, by the game's rules: (obs, action, reward, discount, next_obs) of each that counts."""
    found, obs, action = [], np.asarray(steps.obs), np.asarray(steps.action)
    reward = 0.5 * np.asarray(steps.reward)
    if learner.decomposition != "none":
        reward = reward.mean(-1)
    kinds = set()
    for t, index in np.ndindex(obs.shape[:2]):
        if not steps.valid[t, index]:
            continue
        total, power = 0.0, 1.0
        for s in range(t, min(t + learner.n_step, len(obs))):
            total, power = total + power * reward[s, index], power * 0.9
            led_to, over, cut = after(obs[s, index], action[s, index])
            if over or cut:
                break
        kinds.add((over, cut))
        found.append((obs[t, index], action[t, index], total, 0.0 if over else power, led_to))
    assert {(False, False), (True, False), (False, True)} <= kinds, "the walk shows not every end"
    return [np.stack(column) for column in zip(*found, strict=True)]


def one_error(weights, learner, obs, action, target):
    """The squared error of one experience."""
    kind = None if learner.decomposition == "none" else learner.decomposition
    q = values(weights, kind, obs)
    if kind is None:
        return (q[action] - target) ** 2
    done = jnp.stack([q[i, action[i]] for i in range(2)])
    return (mixer(weights, kind, obs.reshape(-1), done) - target) ** 2


def one_target(weights, target, learner, reward, discount, obs):
    """What one experience was worth."""
    kind = None if learner.decomposition == "none" else learner.decomposition
    valued = np.asarray(values(target, kind, obs))
    judge = np.asarray(values(weights, kind, obs)) if learner.double else valued
    action = np.where(legal(obs), judge, -np.inf).argmax(-1)
    best = np.take_along_axis(valued, action[..., None], -1)[..., 0]
    return reward + discount * float(
        best if kind is None else mixer(target, kind, obs.reshape(-1), best)
    )


@pytest.mark.parametrize(
    "learner", [LONE, pytest.param(TEAM, marks=pytest.mark.slow)], ids=["double", "qmix"]
)
def test_an_update_equals_its_equations(learner):
    state, key = lively(learner), jax.random.key(2)
    act_key, learn_key = jax.random.split(key)

    @jit
    def pieces(state):
        steps = learner.collect(act_key, state, jnp.bool_(True), learner.env.default_params)[1]
        stepped, info = learner.step(key, state, None)
        rows = sample(jax.random.split(learn_key, 1)[0], stepped.buffer, 5)
        batch = td_targets(
            learner.agent(), state.weights, state.target_weights, rows, learner.double
        )
        return steps, stepped, info, rows, batch

    steps, stepped, info, rows, batch = pieces(state)
    # What is kept is what happened, with the true last observation where an episode ended.
    want = replayed(learner, steps)
    size = len(want[0])
    assert int(stepped.buffer.size) == size < 42 and float(info["buffer_size"]) == size
    kept = jax.tree.map(lambda x: x[:size], stepped.buffer.rows)
    got = [kept.obs, kept.action, kept.reward, kept.discount, kept.next_obs]
    assert_close(
        got, [x.astype(y.dtype) for x, y in zip(want, got, strict=True)], EXACT_MATHS["float32"]
    )
    np.testing.assert_array_equal(kept.action, want[1])
    np.testing.assert_array_equal(kept.next_mask, np.stack([legal(x) for x in want[4]]))
    # What is learned from a batch of it.
    rows = jax.tree.map(np.asarray, rows)
    targets = [
        one_target(
            state.weights,
            state.target_weights,
            learner,
            rows.reward[i],
            rows.discount[i],
            rows.next_obs[i],
        )
        for i in range(5)
    ]
    assert_close(batch.target[0], np.array(targets), 10 * EXACT_MATHS["float32"])
    single = td_targets(
        learner.agent(), state.target_weights, state.target_weights, rows, learner.double
    ).target[0]
    assert bool(jnp.any(jnp.abs(single - batch.target[0]) > 0.01)) == learner.double, (
        "both would choose the same"
    )
    grad = jit(jax.value_and_grad(lambda w, *row: one_error(w, learner, *row)))
    errors = [
        grad(state.weights, rows.obs[i], rows.action[i], jnp.float32(targets[i])) for i in range(5)
    ]
    loss, grads = jax.tree.map(lambda *x: sum(x) / 10, *errors)
    assert float(info["q_loss"]) == pytest.approx(float(loss), rel=1e-4)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
    assert norm > 0.3 and float(info["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    # Adam's first step is the gradient by its own size.
    clipped = jax.tree.map(lambda g: g * 0.3 / norm, grads)
    moved = jax.tree.map(lambda w, g: w - 0.01 * g / (jnp.abs(g) + 1e-8), state.weights, clipped)
    clear = jax.tree.map(
        lambda g: jnp.abs(g) > 1e-5, clipped
    )  # beyond rounding, which Adam would blow up
    jax.tree.map(
        lambda a, b, c: np.testing.assert_allclose(np.where(c, a, 0), np.where(c, b, 0), atol=2e-5),
        stepped.weights, moved, clear,
    )  # fmt: skip
    assert sum(int(jnp.sum(x)) for x in jax.tree.leaves(clear)) > 50
    follow = jax.tree.map(
        lambda old, new: 0.75 * old + 0.25 * new, state.target_weights, stepped.weights
    )
    assert_close(stepped.target_weights, follow, EXACT_MATHS["float32"])


def test_nothing_is_learned_before_the_warmup_and_the_target_waits_for_its_period():
    learner = dataclasses.replace(
        LONE,
        gradient_steps=2,
        warmup=50,
        num_steps=8,
        target_period=3,
        rates=RATES.replace(tau=1.0),
        n_step=1,
    )
    state, step = jit(learner.init)(jax.random.key(3), None), jit(learner.step)
    first = state
    for update in range(12):
        before = state
        state, info = step(jax.random.key(update), state, None)
        is_warm = float(info["buffer_size"]) >= 50
        same = jax.tree.all(
            jax.tree.map(lambda a, b: bool(jnp.all(a == b)), state.weights, before.weights)
        )
        assert same == (not is_warm) and bool(jnp.isnan(info["q_loss"])) == (not is_warm)
        assert (
            int(state.gradient_steps) == int(before.gradient_steps) + 2 * is_warm
            and float(info["converged"]) == 1
        )
        if int(state.gradient_steps) == 2:
            jax.tree.map(np.testing.assert_array_equal, state.target_weights, first.weights)
        if int(state.gradient_steps) % 3 == 0 and is_warm:
            jax.tree.map(np.testing.assert_array_equal, state.target_weights, state.weights)
    assert int(state.gradient_steps) >= 8 and int(state.buffer.size) == 64


@pytest.mark.parametrize(
    "fields, sentence",
    [
        (
            {"network": Network(memory="min_gru")},
            "memory='min_gru' has no place in a buffer of single experiences",
        ),
        ({"capacity": 41}, "capacity=41 is too small: it must hold an update's 42 steps"),
        ({"warmup": 65}, "capacity=64 is too small: .* warmup=65; the least is 65"),
        ({"gradient_steps": 0}, "gradient_steps=0 must be at least 1"),
        ({"n_step": 0}, "n_step=0 must be at least 1"),
        ({"decomposition": "qmix"}, "decomposition='qmix' needs several agents"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(fields, sentence):
    with pytest.raises(UsageError, match=sentence):
        dataclasses.replace(LONE, **fields)
