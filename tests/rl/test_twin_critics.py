"""TD3 and SAC beside plain NumPy, value and gradient; their whole updates beside their parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

import envs
from jaxpar.rl import Network, Sac, SacRates, Td3, Td3Rates, train
from jaxpar.rl.buffer import sample
from jaxpar.rl.distributions import draw_squashed
from jaxpar.rl.replay import Experience
from jaxpar.rl.sac import sac_actor_loss, sac_targets, temperature_loss
from jaxpar.rl.td3 import td3_actor_loss, td3_targets
from jaxpar.rl.twin_critics import critic_loss
from jaxpar.types import UsageError

PENDULUM, PARAMS = envs.make("Pendulum-v1")
SHORT = PARAMS.replace(max_steps=5)
SIZES = {
    "num_envs": 2,
    "num_steps": 8,
    "gradient_steps": 1,
    "batch_size": 6,
    "capacity": 64,
    "warmup": 12,
}
NETWORK = Network(hidden=(5,))
TD3_RATES = Td3Rates(
    learning_rate=0.01, discount=0.9, tau=0.25, target_noise=0.7, noise_clip=0.4, reward_scale=0.5
)
SAC_RATES = SacRates(learning_rate=0.01, discount=0.9, tau=0.25, temperature=0.3, reward_scale=0.5)
TD3 = Td3(PENDULUM, NETWORK, TD3_RATES, policy_period=1, **SIZES)
SAC = Sac(PENDULUM, NETWORK, SAC_RATES, **SIZES)


# By hand, from here on, in NumPy and float64.


def plain(weights, name, x):
    """A head of a network of one layer."""
    layers = weights["heads"][name]["params"]
    h = np.tanh(x @ layers["Dense_0"]["kernel"] + layers["Dense_0"]["bias"])
    return h @ layers["out"]["kernel"] + layers["out"]["bias"]


def plain_q(critics, obs, action):
    x = np.concatenate([obs, action], -1)
    return np.stack(
        [plain(jax.tree.map(lambda w, i=i: w[i], critics), "value", x)[..., 0] for i in range(2)]
    )


def plain_squashed(head, noise):
    mean, log_std = np.split(head, 2, -1)
    std = np.exp(np.clip(log_std, -20, 2))
    u = mean + std * noise
    normal = np.exp(-0.5 * noise**2) / (std * np.sqrt(2 * np.pi))
    return np.tanh(u), np.log(np.prod(normal * np.cosh(u) ** 2, -1))  # 1 - tanh^2 = 1 / cosh^2


def plain_td3(weights, target, rows, noise, rates):
    """Targets, the critics' loss and the actor's."""
    smooth = np.clip(rates.target_noise * noise, -rates.noise_clip, rates.noise_clip)
    action = np.clip(np.tanh(plain(target["actor"], "policy", rows.next_obs)) + smooth, -1, 1)
    wanted = rows.reward + rows.discount * plain_q(target["critics"], rows.next_obs, action).min(0)
    q = plain_q(weights["critics"], rows.obs, rows.action)
    counted = rows.weight > 0
    critics = sum(np.mean((each - wanted)[counted] ** 2) for each in q)
    own = np.tanh(plain(weights["actor"], "policy", rows.obs))
    return wanted, critics, -np.mean(plain_q(weights["critics"], rows.obs, own)[0][counted])


def plain_sac(weights, target, rows, after, now):
    """Targets, the critics' loss, the actor's and the temperature's, and the entropy."""
    temperature = np.exp(weights["log_temperature"])
    action, log_p = plain_squashed(plain(weights["actor"], "policy", rows.next_obs), after)
    value = plain_q(target["critics"], rows.next_obs, action).min(0) - temperature * log_p
    wanted = rows.reward + rows.discount * value
    counted = rows.weight > 0
    q = plain_q(weights["critics"], rows.obs, rows.action)
    critics = sum(np.mean((each - wanted)[counted] ** 2) for each in q)
    own, log_p = plain_squashed(plain(weights["actor"], "policy", rows.obs), now)
    actor = np.mean(
        (temperature * log_p - plain_q(weights["critics"], rows.obs, own).min(0))[counted]
    )
    entropy = -np.mean(log_p[counted])
    return wanted, critics, actor, temperature * (entropy + 1.0), entropy


def case(learner):
    """Weights and targets, none of them zero or near each other, experiences and noise, float64."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(learner.init, jax.random.key(0), None)
    draw = lambda x: rng.normal(size=x.shape)  # noqa: E731
    weights, target = jax.tree.map(draw, shapes.weights), jax.tree.map(draw, shapes.target_weights)
    rows = Experience(
        obs=rng.normal(size=(7, 3)), action=rng.uniform(-1, 1, (7, 1)), reward=rng.normal(size=7),
        discount=0.9 * (rng.random(7) < 0.7), next_obs=rng.normal(size=(7, 3)), next_mask=None,
        weight=(np.arange(7) != 2).astype(float),
    )  # fmt: skip
    return weights, target, rows, rng.normal(size=(7, 1)), rng.normal(size=(7, 1))


def check_slopes(grads, part, loss):
    """A gradient beside central differences of the plain loss, at an entry of each leaf."""
    leaves, tree = jax.tree.flatten(part)
    for place, grad in enumerate(jax.tree.leaves(grads)):
        at = np.unravel_index(np.abs(grad).argmax(), grad.shape)
        ends = []
        for step in (1e-6, -1e-6):
            moved = [np.array(x) for x in leaves]
            moved[place][at] += step
            ends.append(loss(jax.tree.unflatten(tree, moved)))
        np.testing.assert_allclose(grad[at], (ends[0] - ends[1]) / 2e-6, rtol=1e-5, atol=1e-8)


def test_td3_by_hand_in_value_and_gradient(x64):
    weights, target, rows, noise, _ = case(TD3)
    agent, rates = TD3.agent(), TD3_RATES

    @jit
    def found(weights, target, rows, noise):
        wanted = td3_targets(agent, target, rows, noise, rates)
        critics = jax.value_and_grad(lambda part: critic_loss(part, agent, rows, wanted)[0])(
            weights["critics"]
        )
        actor = jax.value_and_grad(
            lambda part: td3_actor_loss(part, agent, weights["critics"], rows)[0]
        )
        return wanted, critics, actor(weights["actor"])

    wanted, (of_critics, critics), (of_actor, actor) = found(weights, target, rows, noise)
    want = plain_td3(weights, target, rows, noise, rates)
    for got, number in zip((wanted, of_critics, of_actor), want, strict=True):
        np.testing.assert_allclose(got, number, rtol=1e-10)
    for name, grads, place in (("critics", critics, 1), ("actor", actor, 2)):

        def loss(part, n=name, p=place):
            return plain_td3(weights | {n: part}, target, rows, noise, rates)[p]

        check_slopes(grads, weights[name], loss)


def test_sac_by_hand_in_value_and_gradient(x64):
    weights, target, rows, after, now = case(SAC)
    agent = SAC.agent()

    @jit
    def found(weights, target, rows, after, now):
        wanted = sac_targets(agent, weights, target, rows, after)
        critics = jax.value_and_grad(lambda part: critic_loss(part, agent, rows, wanted)[0])(
            weights["critics"]
        )
        actor = jax.value_and_grad(
            lambda part: sac_actor_loss(part, agent, weights, rows, now), has_aux=True
        )
        (of_actor, info), actor_grads = actor(weights["actor"])
        cooling = jax.value_and_grad(lambda part: temperature_loss(part, info["entropy"], -1.0)[0])
        return (
            wanted,
            critics,
            (of_actor, actor_grads),
            cooling(weights["log_temperature"]),
            info["entropy"],
        )

    wanted, (of_critics, critics), (of_actor, actor), (cooling, heat), entropy = found(
        weights, target, rows, after, now
    )
    want = plain_sac(weights, target, rows, after, now)
    for got, number in zip((wanted, of_critics, of_actor, cooling, entropy), want, strict=True):
        np.testing.assert_allclose(got, number, rtol=1e-10)
    np.testing.assert_allclose(heat, want[3], rtol=1e-10)  # of exp(x) c, which is itself
    for name, grads, place in (("critics", critics, 1), ("actor", actor, 2)):

        def loss(part, n=name, p=place):
            return plain_sac(weights | {n: part}, target, rows, after, now)[p]

        check_slopes(grads, weights[name], loss)


def test_a_squashed_density_sums_to_one_and_has_no_end(x64):
    u = jnp.linspace(-12, 12, 20001)[:, None]
    head = jnp.broadcast_to(jnp.array([0.3, -0.4]), (20001, 2))
    action, log_p = draw_squashed(head, u)
    assert float(jnp.trapezoid(jnp.exp(log_p), action[:, 0])) == pytest.approx(1, abs=1e-6)
    far = draw_squashed(jnp.array([300.0, 9.0]), jnp.array([50.0]))[
        1
    ]  # log 1 - a^2 would be that of 0
    assert far == pytest.approx(
        -1250 - 2 - 0.5 * np.log(2 * np.pi) + 2 * (300 + 50 * np.exp(2) - np.log(2)), rel=1e-12
    )


@pytest.mark.parametrize(
    "learner", [TD3, pytest.param(SAC, marks=pytest.mark.slow)], ids=["td3", "sac"]
)
def test_an_update_is_made_of_its_parts(learner):
    state, key = jit(learner.init)(jax.random.key(0), SHORT), jax.random.key(1)
    state = state.replace(
        weights=jax.tree.map(lambda x: x + 0.1, state.weights)
    )  # no longer the target's

    @jit
    def pieces(state):
        stepped, info = learner.step(key, state, SHORT)
        learn_key = jax.random.split(jax.random.split(key)[1], 1)[0]
        keys = jax.random.split(learn_key, 2 if learner is TD3 else 3)
        rows, agent, rates = sample(keys[0], stepped.buffer, 6), learner.agent(), state.rates
        noise = [jax.random.normal(k, (6, 1)) for k in keys[1:]]
        if learner is TD3:
            wanted = td3_targets(agent, state.target_weights, rows, noise[0], rates)
        else:
            wanted = sac_targets(agent, state.weights, state.target_weights, rows, noise[0])
        (of_critics, _), critics = jax.value_and_grad(critic_loss, has_aux=True)(
            state.weights["critics"], agent, rows, wanted
        )
        after = state.weights | {"critics": stepped.weights["critics"]}
        if learner is TD3:
            actor = jax.grad(lambda part: td3_actor_loss(part, agent, after["critics"], rows)[0])
        else:
            actor = jax.grad(lambda part: sac_actor_loss(part, agent, after, rows, noise[1])[0])
        return (
            stepped,
            info,
            of_critics,
            {"critics": critics, "actor": actor(state.weights["actor"])},
        )

    stepped, info, of_critics, grads = pieces(state)
    assert float(info["critic_loss"]) == pytest.approx(float(of_critics), rel=1e-4)
    for name, grad in grads.items():  # Adam's first step is the gradient by its own size
        for old, new, g in zip(
            *map(jax.tree.leaves, (state.weights[name], stepped.weights[name], grad)), strict=True
        ):
            clear = np.abs(g) > 1e-4
            np.testing.assert_allclose((new - old)[clear], -0.01 * np.sign(g)[clear], rtol=1e-2)
            assert clear.any()
    if learner is SAC:
        cools = float(info["entropy"]) > -1
        moved = float(stepped.weights["log_temperature"] - state.weights["log_temperature"])
        assert moved == pytest.approx(-0.01 if cools else 0.01, rel=1e-3)
    follow = {name: stepped.weights[name] for name in state.target_weights}
    want = jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, state.target_weights, follow)
    assert_close(stepped.target_weights, want, EXACT_MATHS["float32"])
    assert int(stepped.gradient_steps) == 1 and info["skipped"] == 0
    # Episodes of five steps that are cut: what is kept goes on in the next row, and is worth its discount always.
    rows = jax.tree.map(lambda x: np.asarray(x[: int(stepped.buffer.size)]), stepped.buffer.rows)
    np.testing.assert_allclose(rows.discount, 0.9, rtol=1e-6)
    angle, torque = np.arctan2(rows.obs[:, 1], rows.obs[:, 0]), 2 * rows.action[:, 0]
    cost = angle**2 + 0.1 * rows.obs[:, 2] ** 2 + 0.001 * torque**2
    np.testing.assert_allclose(rows.reward, -0.5 * cost, rtol=1e-4, atol=1e-5)
    speed = np.clip(rows.obs[:, 2] + 0.05 * (15 * np.sin(angle) + 3 * torque), -8, 8)
    np.testing.assert_allclose(rows.next_obs[:, 2], speed, rtol=1e-4, atol=1e-4)


@pytest.mark.slow  # 15 s of compiling
def test_the_actor_waits_for_its_period_and_all_for_the_warmup():
    learner = dataclasses.replace(TD3, policy_period=3, warmup=30)
    state, step = jit(learner.init)(jax.random.key(0), SHORT), jit(learner.step)
    same = lambda a, b: jax.tree.all(jax.tree.map(lambda x, y: bool(jnp.all(x == y)), a, b))  # noqa: E731
    for update in range(10):
        before = state
        state, info = step(jax.random.key(update), state, SHORT)
        warm = float(info["buffer_size"]) >= 30
        if update == 0:  # uniform; the actor's own with its noise are all below 0.4
            assert np.abs(state.buffer.rows.action[:12]).max() > 0.5
        assert same(state.weights["critics"], before.weights["critics"]) == (not warm)
        waits = not warm or int(state.gradient_steps) % 3 != 0
        assert same(state.weights["actor"], before.weights["actor"]) == waits
        assert same(state.target_weights, before.target_weights) == waits
    assert int(state.gradient_steps) >= 6


@pytest.mark.slow  # two minutes
@pytest.mark.parametrize(
    "kind, rates", [(Td3, Td3Rates(reward_scale=0.1)), (Sac, SacRates(1e-3, reward_scale=0.1))]
)
def test_it_swings_the_pendulum_up(kind, rates):
    learner = kind(PENDULUM, Network(hidden=(64, 64), activation="relu"), rates)
    infos = jax.jit(lambda key: train(learner, key, None, 200)[1])(jax.random.key(0))
    assert np.mean(infos["return_mean"][-40:]) > -300  # a random policy returns -1,200


@pytest.mark.parametrize(
    "make, words",
    [
        (
            lambda: Td3(envs.make("CartPole-v1")[0]),
            "CartPole-v1 takes actions of Discrete.* float Box with bounds",
        ),
        (
            lambda: Sac(PENDULUM, Network(memory="gru")),
            "memory='gru' has no place in a buffer of single experiences",
        ),
        (lambda: Sac(PENDULUM, capacity=32), "capacity=32 is too small"),
        (lambda: Td3(PENDULUM, policy_period=0), "policy_period=0 must be at least 1"),
        (lambda: Sac(PENDULUM, rates=SacRates(temperature=0.0)), "rates.temperature=0.0 must be"),
        (
            lambda: Td3(envs.make("Spread-3")[0]),
            "Spread.* has several agents; Td3 and Sac learn for one",
        ),
    ],
)
def test_mistakes_are_told(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_actions_are_uniform_until_it_is_warm_and_then_the_actors():
    learner = dataclasses.replace(
        TD3, rates=dataclasses.replace(TD3_RATES, noise=0.0, learning_rate=1e-6)
    )
    state, found = learner.init(jax.random.key(0), PARAMS), []
    step = jit(learner.step)
    for i in range(2):
        before = int(state.buffer.size)
        state, _ = step(jax.random.key(i), state, PARAMS)
        found.append(np.abs(state.buffer.rows.action[before : int(state.buffer.size)]))
    uniform, own = found  # the last layer of an actor begins with weights of 0.01
    assert (
        before >= learner.warmup and uniform.max() > 0.5 and uniform.std() > 0.1 and own.max() < 0.1
    )
