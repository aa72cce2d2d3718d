import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from forks import Fork, Forks, after, best, legal, mixer, perturbed, values
from tolerance import EXACT_MATHS, assert_close

import envs
from jaxpar.nn import MinGRU
from jaxpar.rl import Network, Pqn, PqnRates
from jaxpar.rl.action_values import QBatch, q_loss
from jaxpar.rl.pqn import lambda_targets
from jaxpar.rollout import RolloutOptions, rollout
from jaxpar.types import UsageError

RATES = PqnRates(
    learning_rate=0.01, discount=0.9, q_lambda=0.6, max_grad_norm=0.3, reward_scale=0.5
)
SMALL = Network(hidden=(8,), activation="relu", layer_norm=True)
GAMES = {
    None: (Fork(), "none"),
    "none": (Forks(), "none"),
    "vdn": (Forks(), "vdn"),
    "qmix": (Forks(), "qmix"),
}


def learner_of(kind, **more):
    env, joint = GAMES[kind]
    fields = {
        "num_envs": 3,
        "num_steps": 14,
        "epochs": 1,
        "minibatches": 1,
        "decomposition_size": 4,
    }
    return Pqn(env, SMALL, RATES, decomposition=joint, **(fields | more))


def walked(learner, epsilon=1.0):
    """A state with lively weights, and what its policy does."""
    state = jit(learner.init)(jax.random.key(0), None)
    rates = state.rates.replace(epsilon_start=jnp.float32(epsilon))
    state = state.replace(weights=perturbed(state.weights), rates=rates)
    agent = learner.agent()

    def walk(state):
        acting = state.weights, jnp.float32(epsilon)
        # The key is what a step of the learner makes of its own.
        act_key = jax.random.split(jax.random.key(1))[0]
        params = learner.env.default_params
        options = RolloutOptions(value=agent.value)
        env_state, steps = rollout(
            act_key,
            state.env_state,
            learner.env,
            params,
            agent,
            acting,
            learner.num_steps,
            options,
        )
        mask = jax.vmap(learner.env.action_mask, (0, None))(
            env_state.state, learner.env.default_params
        )
        last = jax.vmap(agent.value, (None, 0, 0, 0))(acting, env_state.obs, env_state.carry, mask)
        return steps, lambda_targets(agent, steps, last, env_state.carry, state.rates)

    return state, *jit(walk)(state)


def targets(weights, kind, steps):
    """Q(lambda) targets [T, B, (N)] by their definition, as means over all lengths, with every end known by heart."""
    obs, action = np.asarray(steps.obs), np.asarray(steps.action)
    reward, count = 0.5 * np.asarray(steps.reward), len(steps.obs)
    if kind in ("vdn", "qmix"):
        reward = reward.mean(-1)
    seen = set()

    def returns(t, index, length):
        total, power = 0.0, 1.0
        for s in range(t, t + length):
            total, power = total + power * reward[s, index], power * 0.9
            led_to, over, cut = after(obs[s, index], action[s, index])
            if over or cut or s == count - 1:
                break
        seen.add((over, cut))
        return total + (
            0.0 if over else power * np.asarray(best(weights, kind, led_to, legal(led_to)))
        )

    def target(t, index):
        ends = (any(after(obs[s, index], action[s, index])[1:]) for s in range(t, count))
        left = next((k for k, end in enumerate(ends, 1) if end), count - t)
        parts = [0.4 * 0.6 ** (k - 1) * returns(t, index, k) for k in range(1, left)]
        return sum(parts) + 0.6 ** (left - 1) * returns(t, index, left)

    found = np.array([[target(t, index) for index in range(obs.shape[1])] for t in range(count)])
    assert {(False, False), (True, False), (False, True)} <= seen, "the walk shows not every end"
    return found


def loss(weights, kind, steps, target):
    """Half the mean squared error and its gradient, step by step."""

    @jit
    @jax.value_and_grad
    def one(weights, obs, action, target):
        q = values(weights, kind, obs)
        done = q[action] if kind is None else jnp.stack([q[i, action[i]] for i in range(2)])
        if kind in ("vdn", "qmix"):
            done = mixer(weights, kind, obs.reshape(-1), done)
        return jnp.sum((done - target) ** 2)

    obs, action, target = np.asarray(steps.obs), np.asarray(steps.action), target.astype(np.float32)
    rows = [one(weights, obs[at], action[at], target[at]) for at in np.ndindex(target.shape[:2])]
    return jax.tree.map(lambda *x: 0.5 * np.sum([np.float64(y) for y in x], 0) / target.size, *rows)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.slow] if kind in ("none", "vdn") else [])
        for kind in GAMES
    ],
)
def test_an_update_equals_its_equations(kind):
    learner = learner_of(kind)
    state, steps, batch = walked(learner)
    want = targets(state.weights, kind, steps)
    assert_close(batch.target, want, 10 * EXACT_MATHS["float32"])
    assert bool(jnp.all(batch.weight == 1))
    want_loss, want_grads = loss(state.weights, kind, steps, want)
    (got_loss, _), grads = jit(
        jax.value_and_grad(lambda w: q_loss(w, learner.agent(), batch), has_aux=True)
    )(state.weights)
    assert_close(got_loss, want_loss, 10 * EXACT_MATHS["float32"])
    assert_close(grads, want_grads, 1e-5)  # float32 on both sides
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(want_grads)))
    assert norm > 0.3, "the gradient is too short to be clipped"
    # RAdam's first step has no variance to divide by: it is the gradient's.
    moved = jax.tree.map(lambda w, g: w - 0.01 * g * 0.3 / norm, state.weights, want_grads)
    after_step, info = jit(learner.step)(jax.random.key(1), state, None)
    assert_close(
        jax.tree.map(lambda a, b: a - b, after_step.weights, state.weights),
        jax.tree.map(lambda a, b: a - b, moved, state.weights),
        1e-4,  # a difference of nearly equal numbers
    )
    assert float(info["q_loss"]) == pytest.approx(float(want_loss), rel=1e-4)
    assert float(info["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    assert all(x.shape == () and x.dtype == jnp.float32 for x in info.values())


def test_gradients_through_a_memory_equal_backpropagation_through_time():
    network = Network(encoder=(5,), hidden=(), activation="relu", memory="min_gru", memory_size=4)
    agent = dataclasses.replace(learner_of(None), network=network).agent()
    weights = perturbed(agent.init(jax.random.key(0)))
    rng = np.random.default_rng(0)
    batch = QBatch(
        obs=jnp.asarray(rng.random((7, 2, 9)), jnp.float32),
        start=jnp.asarray(rng.random((7, 2)) < 0.3),
        action=jnp.asarray(rng.integers(0, 3, (7, 2)), jnp.int32),
        target=jnp.asarray(rng.standard_normal((7, 2)), jnp.float32),
        weight=jnp.ones((7, 2)).at[3, 1].set(0.0),
        carry=jnp.asarray(rng.standard_normal((2, 4)), jnp.float32),
    )
    cell, starts = MinGRU(4), np.asarray(batch.start)

    def step_by_step(weights, carry):
        parts, total = weights["network"], 0.0
        dense, out = parts["encoder"]["params"]["Dense_0"], parts["heads"]["q"]["params"]["out"]
        for index in range(2):
            h = carry[index]
            for t in range(7):
                h = h * (not starts[t, index])
                x = jnp.maximum(batch.obs[t, index] @ dense["kernel"] + dense["bias"], 0)
                h = cell.step(
                    parts["memory"], h[None], cell.input_projections(parts["memory"], x[None])
                )[0]
                q = (h @ out["kernel"] + out["bias"])[batch.action[t, index]]
                total += batch.weight[t, index] * (q - batch.target[t, index]) ** 2
        return 0.5 * total / 13

    assert bool(jnp.any(batch.start[1:])) and not bool(jnp.all(batch.start[0]))
    want = jit(jax.value_and_grad(step_by_step, (0, 1)))(weights, batch.carry)
    got = jit(jax.value_and_grad(lambda w, c: q_loss(w, agent, batch.replace(carry=c))[0], (0, 1)))(
        weights, batch.carry
    )
    assert_close(got, want, 1e-5)  # float32 on both sides


def test_epsilon_greedy_is_legal_and_as_random_as_told():
    learner = learner_of(None, num_envs=64, num_steps=40)
    state, steps, _ = walked(learner, epsilon=0.3)
    obs, action = np.asarray(steps.obs).reshape(-1, 9), np.asarray(steps.action).reshape(-1)
    mask = np.asarray(learner.env.action_mask(type("", (), {"place": obs[:, :4].argmax(-1)}), None))
    assert mask[np.arange(len(action)), action].all()
    q = np.where(mask, np.asarray(jax.vmap(lambda x: values(state.weights, None, x))(obs)), -np.inf)
    expected = (1 - 0.3 + 0.3 / mask.sum(-1)).mean()  # a random action may be the best one too
    is_best = action == q.argmax(-1)
    assert abs(is_best.mean() - expected) < 4 * np.sqrt(expected * (1 - expected) / len(action))
    greedy = learner.agent(greedy=True)
    for place in range(3):
        row = np.flatnonzero(obs[:, :4].argmax(-1) == place)[0]
        act = greedy(
            jax.random.key(0), state.weights, jnp.asarray(obs[row]), (), jnp.asarray(mask[row])
        )[0]
        assert int(act) == q[row].argmax()


def test_epsilon_and_learning_rate_fall_in_lines():
    rates = PqnRates(
        learning_rate=1.0, anneal=4.0, epsilon_start=0.9, epsilon_end=0.1, epsilon_anneal=2.0
    )
    learner = Pqn(Fork(), SMALL, rates, num_envs=2, num_steps=2, epochs=1, minibatches=1)
    state, step, seen = jit(learner.init)(jax.random.key(0), None), jit(learner.step), []
    for update in range(5):
        state, info = step(jax.random.key(update), state, None)
        seen.append((float(info["epsilon"]), float(info["learning_rate"])))
    np.testing.assert_allclose(
        seen, [(0.9, 1.0), (0.5, 0.75), (0.1, 0.5), (0.1, 0.25), (0.1, 0)], atol=1e-6
    )


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"minibatches": 5}, "minibatches=5 does not divide 42 steps of all environments"),
        (
            {"network": Network(memory="min_gru"), "minibatches": 2},
            "minibatches=2 does not divide 3 environments",
        ),
        ({"decomposition": "sum"}, "decomposition='sum' is unknown; legal are none, vdn, qmix"),
        ({"decomposition": "vdn"}, "decomposition='vdn' needs several agents; Fork has one"),
        ({"decomposition_size": 0}, "decomposition_size=0 must be at least 1"),
        ({"epochs": 0}, "epochs=0 must be at least 1"),
    ],
)
def test_bad_input_is_refused_in_a_sentence(fields, sentence):
    with pytest.raises(UsageError, match=sentence):
        dataclasses.replace(learner_of(None), **fields)


def test_continuous_actions_are_refused():
    with pytest.raises(UsageError, match="Q-learners act by one Discrete choice"):
        Pqn(envs.make("Pendulum-v1")[0])
