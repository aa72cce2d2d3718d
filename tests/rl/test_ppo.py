"""PPO and A2C: their losses by hand, fresh policies at ratio 1, one device and eight, seeds side by side."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

import envs
from jaxpar.env import Discrete
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh
from jaxpar.rl import A2c, A2cRates, Network, Ppo, PpoRates, Seeds, train
from jaxpar.rl.a2c import a2c_loss
from jaxpar.rl.agent import ActorCriticOutput
from jaxpar.rl.collect import Batch, RolloutStart, RolloutWeights, collect
from jaxpar.rl.learner import minibatch_updates
from jaxpar.rl.ppo import ppo_loss
from jaxpar.types import UsageError

CART, CART_PARAMS = envs.make("CartPole-v1")
SMALL = Network(hidden=(8,))
TINY = Ppo(CART, SMALL, num_envs=8, num_steps=4, epochs=2, minibatches=2)
LOSSES = {
    "ppo": (ppo_loss, PpoRates(clip=0.1, entropy_coef=0.02)),
    "a2c": (a2c_loss, A2cRates(entropy_coef=0.02)),
}
STEP = jit(TINY.step)


def batch_of(seed, dtype):
    rng = np.random.default_rng(seed)
    shape = (3, 4)
    logits, value = rng.normal(size=(*shape, 3)), rng.normal(size=shape)
    drawn = rng.integers(0, 3, shape).astype(np.int32)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    old = np.take_along_axis(log_p, drawn[..., None], -1)[..., 0] + 0.2 * rng.normal(size=shape)
    weight = (rng.random(shape) > 0.2).astype(dtype)
    numbers = {
        "log_prob": old,
        "value": value + 0.2 * rng.normal(size=shape),
        "advantage": rng.normal(size=shape),
        "target": rng.normal(size=shape),
    }
    batch = Batch(
        obs=None, start=np.zeros(shape, bool), raw_action=drawn, weight=weight, action_mask=None, carry={},
        **{name: x.astype(dtype) for name, x in numbers.items()},
    )  # fmt: skip
    return batch, logits.astype(dtype), value.astype(dtype)


def by_hand(name, logits, value, batch, rates):
    """The losses as the papers write them, a step at a time."""
    counted = [i for i in np.ndindex(*batch.weight.shape) if batch.weight[i]]
    mean, deviation = (
        np.mean([batch.advantage[i] for i in counted]),
        np.std([batch.advantage[i] for i in counted]),
    )
    policy = values = spread = 0.0
    for i in counted:
        p = np.exp(logits[i] - logits[i].max())
        p /= p.sum()
        if name == "ppo":
            ratio = p[batch.raw_action[i]] / np.exp(batch.log_prob[i])
            advantage = (batch.advantage[i] - mean) / (deviation + 1e-8)
            near = min(max(ratio, 1 - rates.clip), 1 + rates.clip)
            policy -= min(ratio * advantage, near * advantage)
            moved = batch.value[i] + min(max(value[i] - batch.value[i], -rates.clip), rates.clip)
            values += max((value[i] - batch.target[i]) ** 2, (moved - batch.target[i]) ** 2) / 2
        else:
            policy -= np.log(p[batch.raw_action[i]]) * batch.advantage[i]
            values += (value[i] - batch.target[i]) ** 2 / 2
        spread -= sum(x * np.log(x) for x in p)
    return (policy + rates.value_coef * values - rates.entropy_coef * spread) / len(counted)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_by_hand(name, x64):
    loss, rates = LOSSES[name]
    agent = types.SimpleNamespace(action_space=Discrete(3))
    agent.apply = lambda weights, *_: ActorCriticOutput(*weights, {}, jnp.ones((), bool))
    batch, logits, value = batch_of(0, np.float64)
    found, slopes = jax.value_and_grad(lambda w: loss(w, agent, batch, rates)[0])((logits, value))
    np.testing.assert_allclose(found, by_hand(name, logits, value, batch, rates), rtol=1e-12)
    for place, wanted in enumerate(slopes):
        for i in [(0, 0), (1, 2), (2, 3)]:
            i = i if place else (*i, 1)
            ends = []
            for step in (1e-6, -1e-6):
                moved = [logits.copy(), value.copy()]
                moved[place][i] += step
                ends.append(by_hand(name, *moved, batch, rates))
            np.testing.assert_allclose(wanted[i], (ends[0] - ends[1]) / 2e-6, atol=1e-8)


@pytest.mark.parametrize("name", LOSSES)
def test_a_ratio_that_is_nan_is_reported(name):
    """XLA for CPUs leaves NaN out of a maximum over 36,000 samples."""
    loss, rates = LOSSES[name]
    agent = types.SimpleNamespace(action_space=Discrete(3))
    many = jax.tree.map(
        lambda x: jnp.tile(x, (100, 30) + (1,) * (x.ndim - 2)), batch_of(0, np.float32)
    )
    batch, logits, value = many

    def info_of(logits):
        agent.apply = lambda *_: ActorCriticOutput(logits, value, {}, jnp.ones((), bool))
        return loss(None, agent, batch, rates)[1]

    assert jax.jit(info_of)(logits)["ratio_error"] < 10
    assert jax.jit(info_of)(logits.at[150, 40].set(jnp.nan))["ratio_error"] == np.inf


@pytest.fixture(scope="module")
def stepped():
    """A fresh learner's first and second update."""
    first = jit(TINY.init)(jax.random.key(0), CART_PARAMS)
    second, info = STEP(jax.random.key(1), first, CART_PARAMS)
    return first, second, info, STEP(jax.random.key(2), second, CART_PARAMS)


def test_a_fresh_policy_has_ratio_one(stepped):
    info, later = stepped[2], stepped[3][1]
    # The same weights on the same steps: only how rows are laid out in products differs.
    assert (
        info["ratio_error"] <= 16 * EXACT_MATHS["float32"]
        and later["ratio_error"] <= 16 * EXACT_MATHS["float32"]
    )
    assert info["approx_kl"] > 1e-9, "later minibatches are after a step, so there ratios differ"


def test_an_update_ends_where_the_policy_is_too_far_from_the_one_that_acted(stepped):
    """The steps before are those of an update without a bound, and weights stay where the bound was passed."""
    first, wide = stepped[0], dataclasses.replace(TINY, target_kl=1e6)
    fast = first.replace(rates=first.rates.replace(learning_rate=jnp.float32(0.01)))
    key, act_key = jax.random.key(1), jax.random.split(jax.random.key(1))[0]

    @jit
    def pieces(state):
        plain, stopless = TINY.step(key, state, CART_PARAMS)[0], wide.step(key, state, CART_PARAMS)
        start = RolloutStart(env_state=state.env_state)
        acting = RolloutWeights(learned=state.weights)
        batch = collect(act_key, start, TINY.agent(), CART_PARAMS, acting, state.rates, 4)[1]

        def bounded(too_far):
            loss = functools.partial(ppo_loss, rates=state.rates)
            return minibatch_updates(TINY, jax.random.split(key)[1], state, batch, loss, too_far)

        free = bounded(lambda info: jnp.bool_(False))
        second = free[2]["approx_kl"][0, 1]  # a distance that no later minibatch has
        return (
            plain,
            stopless,
            free,
            bounded(lambda info: jnp.abs(info["approx_kl"] / second - 1) < 1e-4),
        )

    plain, (stopless, said), free, bounded = pieces(fast)
    assert_close(stopless.weights, plain.weights, EXACT_MATHS["float32"])
    assert said["stopped"] == 0
    np.testing.assert_array_equal(bounded[2]["stopped"], [[0, 1], [1, 1]])
    later = np.asarray(bounded[2]["approx_kl"] / free[2]["approx_kl"][0, 1])[1]
    assert (np.abs(later - 1) > 1e-3).all(), "the bound is passed once"
    # One step of Adam, and no more: each weight by the rate at most.
    furthest = [
        np.max(
            jax.tree.leaves(
                jax.tree.map(lambda a, b: float(np.abs(a - b).max()), weights, fast.weights)
            )
        )
        for weights in (bounded[0], plain.weights)
    ]
    assert 0.009 < furthest[0] < 0.0101 and furthest[1] > 0.02


def test_an_update_that_is_not_finite_is_not_taken(stepped):
    first, second, info, _ = stepped
    endless = first.replace(rates=first.rates.replace(learning_rate=jnp.float32(jnp.inf)))
    after, said = STEP(jax.random.key(1), endless, CART_PARAMS)
    before = first.weights, first.opt_state
    jax.tree.map(np.testing.assert_array_equal, (after.weights, after.opt_state), before)
    assert said["skipped"] == TINY.epochs * TINY.minibatches and np.isfinite(said["grad_norm"])
    assert info["skipped"] == 0 and second.updates == after.updates == 1


def test_eight_devices_learn_as_one(stepped):
    first, alone, _, _ = stepped
    with use_mesh(make_mesh(MeshSpec(data=8))):
        spread = jax.device_put(first, named_shardings(first, TINY.axes()))
        many = jit(TINY.step)(jax.random.key(1), spread, CART_PARAMS)[0]
    np.testing.assert_array_equal(many.env_state.obs, alone.env_state.obs)
    # Sums over minibatches are of other order; Adam divides by the root of small squares.
    assert_close(jax.device_get(many.weights), alone.weights, 100 * EXACT_MATHS["float32"])


@pytest.mark.slow
def test_seeds_side_by_side_are_each_alone():
    seeds = Seeds(TINY, 2)
    state = jit(seeds.init)(jax.random.key(0), CART_PARAMS)
    state, info = jit(seeds.step)(jax.random.key(1), state, CART_PARAMS)
    one = jit(TINY.init)(jax.random.fold_in(jax.random.key(0), 1), CART_PARAMS)
    one, _ = jit(TINY.step)(jax.random.fold_in(jax.random.key(1), 1), one, CART_PARAMS)
    np.testing.assert_array_equal(state.env_state.obs[1], one.env_state.obs)
    assert_close(
        jax.tree.map(lambda x: x[1], state.weights), one.weights, 100 * EXACT_MATHS["float32"]
    )
    assert {"seed_00", "seed_01"} <= set(info)


@pytest.mark.slow
def test_it_balances_the_pole():
    updates = 300
    ppo = Ppo(CART, rates=PpoRates(anneal=float(updates)))
    infos = jax.jit(lambda key: train(ppo, key, None, updates)[1])(jax.random.key(0))
    assert np.mean(infos["return_mean"][-20:]) > 300  # a random policy returns 22


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: Ppo(CART, num_envs=4, num_steps=5, minibatches=3),
            "minibatches=3 does not divide 20 steps",
        ),
        (
            lambda: Ppo(CART, Network(memory="gru"), num_envs=4, minibatches=3),
            "minibatches=3 does not divide 4 environments; the nearest legal are 1, 2, 4",
        ),
        (lambda: Ppo(CART, central=True), "a central critic needs several agents"),
        (lambda: Ppo(CART, num_envs=0), "num_envs=0 must be at least 1"),
        (lambda: A2c(CART, num_steps=0), "num_steps=0 must be at least 1"),
        (lambda: Network(memory="gur"), "memory='gur' is unknown"),
        (lambda: Network(activation="tan"), "activation='tan' is unknown"),
        (lambda: Network(memory=object()), "cannot honour the start of episodes"),
        (lambda: Seeds(TINY, 0), "num_seeds=0"),
    ],
)
def test_mistakes_are_told(make, words):
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        make()


def test_it_is_static():
    assert hash(TINY) == hash(dataclasses.replace(TINY)) and TINY == dataclasses.replace(TINY)


def test_seeds_begin_in_the_environment_that_is_asked_for():
    env, params = envs.make("PendulumSwingUp")
    params = params.replace(start_spread=3.0)
    learner, key = Ppo(env, SMALL, num_envs=2, num_steps=4, minibatches=2), jax.random.key(3)
    made = jit(lambda: Seeds(learner, 1, params).init(key, None).env_state)()  # as `fit` begins
    asked, usual = (
        jit(learner.init)(jax.random.fold_in(key, 0), x).env_state for x in (params, None)
    )
    np.testing.assert_array_equal(made.obs[0], asked.obs)
    assert np.abs(np.asarray(usual.obs) - asked.obs).max() > 0.1
