"""From rollout to update, against NumPy by hand: every end, reset, dead agent and mask in every row of a rollout."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from forks import perturbed
from tapes import (
    ENDS,
    Hand,
    Tape,
    Tapes,
    advantages,
    lambda_returns,
    ppo_loss,
    q_loss,
    returns,
    slope,
)
from tolerance import assert_close

from jaxpar.optim.update import Joined
from jaxpar.rl import Dqn, DqnRates, Network, Ppo, PpoRates, Pqn, PqnRates

STEPS, UNROLLS, RATE = 4, 3, 0.3
NETWORK = Network(encoder=(4,), hidden=(), memory="min_gru", memory_size=3)
DECIDED = {"discount": 0.9, "reward_scale": 0.5}


class Plain:
    """Down the gradient itself, so that what weights move by is the gradient."""

    def init(self, weights):
        return ()

    def joined(self, weights, state):
        return Joined(weights, state, lambda weights: weights, lambda state: state)

    def update(self, grads, state, weights, *, rate, max_norm):
        said = {
            "grad_norm": jnp.float32(1),
            "learning_rate": jnp.float32(RATE),
            "skipped": jnp.float32(0),
        }
        return jax.tree.map(lambda w, g: w - RATE * g, weights, grads), state, said


class PlainPpo(Ppo):
    optimizer = Plain()


class PlainPqn(Pqn):
    optimizer = Plain()


SIZES = {"num_envs": 16, "num_steps": STEPS, "epochs": 2, "minibatches": 2}
PPO = PlainPpo(
    Tapes(),
    NETWORK,
    PpoRates(clip=0.02, entropy_coef=0.3, value_coef=0.7, gae_lambda=0.7, **DECIDED),
    **SIZES,
)
PQN = PlainPqn(
    Tapes(), NETWORK, PqnRates(epsilon_start=0.5, epsilon_end=0.5, q_lambda=0.7, **DECIDED), **SIZES
)


def updated(learner, hand, key, weights):
    """By hand: a rollout, what it teaches, and the weights after all minibatches of all epochs; and means of infos."""
    act_key, deal_key = jax.random.split(key)
    rows, rates = hand.rollout(act_key, weights, STEPS), learner.rates
    rows["reward"] = rates.reward_scale * rows["reward"]
    if isinstance(learner, Ppo):
        rows["advantage"] = advantages(rows, rates.discount, rates.gae_lambda)
        rows["target"], loss = rows["advantage"] + rows["value"], ppo_loss
    else:
        rows["target"], loss = lambda_returns(rows, rates.discount, rates.q_lambda), q_loss
    told = []
    for epoch in jax.random.split(deal_key, learner.epochs):
        order = np.asarray(jax.random.permutation(epoch, learner.num_envs)).reshape(
            learner.minibatches, -1
        )
        for envs in order:
            told.append(loss(weights, rows, envs, rates))
            moves = slope(lambda w, envs=envs: loss(w, rows, envs, rates), weights)
            weights = jax.tree.map(lambda w, g: w - RATE * g, weights, moves)
    return weights, np.mean(told, 0)


def small_gates(weights):
    """Gates' biases are drawn as far as -5, where float32 rounds what they move by, 1e-3, to the next 5e-7."""
    return jax.tree.map_with_path(
        lambda path, x: x / 8 if path[-1] == jax.tree_util.DictKey("bz") else x, weights
    )


@pytest.mark.parametrize(
    "learner",
    [
        PPO,
        PQN,
        *(
            pytest.param(dataclasses.replace(x, env=Tape()), marks=pytest.mark.slow)
            for x in (PPO, PQN)
        ),
    ],
    ids=["ppo-team", "pqn-team", "ppo", "pqn"],
)
def test_updates_equal_those_by_hand(learner):
    root, part = jax.random.key(11), "actor" if isinstance(learner, Ppo) else "network"
    state, step = jit(learner.init)(root, None), jit(learner.step)
    state = state.replace(weights=small_gates(perturbed(state.weights)))
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), state.weights[part])
    hand = Hand(jax.random.split(root)[1], learner.env, learner.num_envs, 3,
                epsilon=None if isinstance(learner, Ppo) else 0.5)  # fmt: skip
    for update in range(UNROLLS):
        key, before = jax.random.key(10 + update), state
        state, info = step(key, state, None)
        then, told = updated(learner, hand, key, weights)
        names = (
            ("policy_loss", "value_loss", "entropy")
            if isinstance(learner, Ppo)
            else ("q_loss", "q_mean")
        )
        told = told[1:] if isinstance(learner, Ppo) else told
        np.testing.assert_allclose(
            [info[name] for name in names], told, atol=2e-5, err_msg=f"update {update}"
        )
        moved, wanted = (
            jax.tree.map(lambda a, b: np.asarray(a, np.float64) - b, *pair)
            for pair in ((state.weights[part], before.weights[part]), (then, weights))
        )
        assert_close(moved, wanted, 1e-4)  # float32, differences of nearly equal numbers
        weights = then
    kinds = ("with all",) if hand.lone else ("with all", "alone")
    assert set(itertools.product(range(STEPS), ENDS, kinds)) <= hand.seen
    assert hand.lone or {(row, "agent_done") for row in range(STEPS)} <= hand.seen


@pytest.mark.parametrize(
    "env", [Tapes(), pytest.param(Tape(), marks=pytest.mark.slow)], ids=["team", "alone"]
)
def test_what_is_replayed_equals_what_happened_by_hand(env):
    rates = DqnRates(discount=0.9, epsilon_start=0.5, epsilon_end=0.5, reward_scale=0.5)
    network = Network(encoder=(4,), hidden=())
    learner = Dqn(env, network, rates, num_envs=16, num_steps=STEPS, gradient_steps=1, batch_size=2, capacity=256,
                  warmup=256, n_step=2)  # fmt: skip
    root = jax.random.key(4)
    state, step = jit(learner.init)(root, None), jit(learner.step)
    state = state.replace(weights=perturbed(state.weights))
    weights = jax.tree.map(lambda x: np.asarray(x, np.float64), state.weights["network"])
    hand = Hand(jax.random.split(root)[1], env, learner.num_envs, 4, next_step=True, epsilon=0.5)
    found = []
    for update in range(UNROLLS + 2):
        key = jax.random.key(20 + update)
        state = step(key, state, None)[0]
        rows = hand.rollout(jax.random.split(key)[0], weights, STEPS)
        rows["reward"] = 0.5 * rows["reward"]
        total, power, last = returns(rows, 0.9, 2)
        for place in np.ndindex(rows["counts"].shape[:2]):
            if rows["counts"][place].any():
                ends = [(last[(*place, n)], place[1], n) for n in range(hand.agents)]
                found.append({
                    "weight": rows["counts"][place], "obs": rows["obs"][place], "action": rows["raw_action"][place],
                    "reward": total[place],
                    "discount": np.array([0 if rows["terminated"][e] else power[(*place, e[2])] for e in ends]),
                    "next_obs": np.stack([rows["next_obs"][e] for e in ends]),
                    "next_mask": np.stack([rows["next_mask"][e] for e in ends]),
                })  # fmt: skip
    size = int(state.buffer.size)
    assert size == len(found) < 256
    for name in found[0]:
        want, got = (
            np.stack([row[name] for row in found]),
            np.asarray(getattr(state.buffer.rows, name))[:size],
        )
        got, on = got.reshape(want.shape), np.stack([row["weight"] for row in found])
        np.testing.assert_allclose(got if name == "weight" else got[on], want if name == "weight" else want[on],
                                   rtol=1e-5, err_msg=name)  # fmt: skip
    assert hand.lone or set(itertools.product(range(STEPS), ENDS, ("alone",))) <= hand.seen
