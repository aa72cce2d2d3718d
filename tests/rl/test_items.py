"""A network of items does not care for their order, masks hold, actions name the items that the environment says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from tolerance import EXACT_MATHS, assert_close

import envs
from envs.puzzles import arithmetic
from envs.puzzles.bin_pack import BinPack, Split
from experiments.rl import compose, make_learner
from jaxpar.env import capabilities
from jaxpar.rl import A2c, ActorCritic, Items, Network, Ppo, Pqn
from jaxpar.rl.items import item_shape, moves_of
from jaxpar.types import UsageError

SMALL = Items(width=8, heads=2, layers=1, waves=2)


def agent_of(name, network=SMALL):
    env, params = envs.make(name)
    return ActorCritic(env, network), params


def outputs(agent, weights, obs, mask=None):
    out = agent.apply(weights, obs[None, None], jnp.zeros((1, 1), bool), {}, mask)
    return out.policy[0, 0], out.value[0, 0]


def weights_of(agent):
    """Weights far from the start, where all heads are nearly 0."""
    begun, rng = jit(agent.init)(jax.random.key(0)), np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(np.float64(x) + 0.5 * rng.standard_normal(x.shape)), begun
    )


def test_pairs_of_a_space_and_an_item_are_what_the_packing_takes():
    env = BinPack(Split(3), num_spaces=4)
    moves, params = moves_of(env, env.action_space(env.default_params)), env.default_params
    state = env.init(jax.random.key(0), params)
    rows = np.asarray(env.observe(jax.random.key(0), state, None, params))
    for action in np.flatnonzero(env.action_mask(state, params)):
        kind, space, item = moves[action]
        assert kind == 0 and rows[space, 0] == 1 and rows[item, 0] == 0
        packed = env.transition(jax.random.key(0), state, action, params)
        np.testing.assert_array_equal(packed.corner[item - 4], -state.reach[space, :3])
        assert env.packed(packed).sum() == 1
    assert sorted(map(tuple, moves.tolist())) == [(0, s, 4 + i) for s in range(4) for i in range(3)]


@pytest.mark.parametrize("name", ["TSP-10", "JobShop-FT06"])
def test_items_in_another_order_give_the_same_logits_in_that_order(x64, name):
    agent, _ = agent_of(name)
    weights, shape = weights_of(agent), item_shape(agent.env)
    obs, order = (
        np.random.default_rng(0).random(shape),
        np.random.default_rng(1).permutation(shape[0]),
    )

    def both(weights, obs):
        return outputs(agent, weights, jnp.asarray(obs))

    (logits, value), (moved, same) = (jit(both)(weights, x) for x in (obs, obs[order]))
    assert_close(
        {"logits": moved, "value": same},
        {"logits": logits[order], "value": value},
        EXACT_MATHS["float64"],
    )
    assert np.ptp(logits) > 1e-2 and value.shape == ()


def plain(weights, net, obs, moves):
    """The network in plain NumPy: loops over items, heads and actions."""
    w = jax.tree.map(np.asarray, weights["actor"]["params"])

    def dense(name, x):
        return x @ w[name]["kernel"] + w[name].get("bias", 0)

    norms = iter(f"LayerNorm_{i}" for i in range(2 * net.layers + 1))

    def norm(x):
        at = w[next(norms)]
        centred = x - x.mean(-1, keepdims=True)
        return (
            centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * at["scale"]
            + at["bias"]
        )

    def act(x):
        return x / (1 + np.exp(-x))

    waves = [f(np.pi * 2**k * obs) for f in (np.sin, np.cos) for k in range(net.waves)]
    h, size = dense("enter", np.concatenate([obs, *waves], -1)), net.width // net.heads
    for place in range(net.layers):
        q, k, v = np.split(dense(f"qkv_{place}", norm(h)), 3, -1)
        mixed = np.zeros_like(h)
        for head in range(net.heads):
            part = slice(head * size, (head + 1) * size)
            for i in range(len(h)):
                scores = np.exp([q[i, part] @ k[j, part] / np.sqrt(size) for j in range(len(h))])
                mixed[i, part] = (scores / scores.sum()) @ v[:, part]
        h = h + dense(f"mix_{place}", mixed)
        h = h + dense(f"outer_{place}", act(dense(f"inner_{place}", norm(h))))
    h = norm(h)
    logits = []
    for kind, *named in moves:
        seen = dense("pool_policy", h.mean(0))
        for slot, item in enumerate(named):
            seen = seen + dense(f"slot_{slot + 1}_policy", h[item])
        logits.append(dense("head_policy", act(seen))[kind])
    return np.array(logits), dense("head_value", act(dense("pool_value", h.mean(0))))[0]


def test_a_network_of_pairs_equals_loops_in_numpy(x64):
    agent, params = agent_of("Countdown-3")
    weights, obs = weights_of(agent), np.random.default_rng(0).random((4, 6))
    told = capabilities(agent.env).item_moves
    assert told is not None
    moves = np.asarray(told(params))
    got = jit(lambda weights, obs: outputs(agent, weights, obs))(weights, jnp.asarray(obs))
    want = plain(weights, SMALL, obs, moves)
    assert_close(dict(enumerate(got)), dict(enumerate(want)), EXACT_MATHS["float64"])
    assert moves.shape == (18, 3) and (moves[:, [1, 2, 0]] == arithmetic.moves(3)).all()


def test_illegal_items_are_never_named():
    agent, params = agent_of("Knapsack-20")
    obs = jnp.asarray(np.random.default_rng(0).random((20, 5)), jnp.float32)
    mask = jnp.arange(20) % 5 == 3
    drawn = jit(jax.vmap(lambda key: agent(key, agent.init(jax.random.key(0)), obs, {}, mask)[0]))(
        jax.random.split(jax.random.key(1), 64)
    )
    assert set(np.asarray(drawn).tolist()) == {3, 8, 13, 18}


def test_a_learner_updates_every_part_of_the_network():
    env, params = envs.make("TSP-10")
    learner = A2c(env, Items(8, 2, 1), num_envs=4, num_steps=5)
    state = jit(learner.init)(jax.random.key(0), params)
    after, info = jit(learner.step)(jax.random.key(1), state, params)
    moved = jax.tree.map(lambda a, b: np.abs(np.asarray(a - b)).max(), after.weights, state.weights)
    still = [
        jax.tree_util.keystr(path)
        for path, x in jax.tree_util.tree_leaves_with_path(moved)
        if not x > 0
    ]
    assert still == [] and float(info["ratio_error"]) < 1e-4


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: Items(width=10, heads=4), "heads=4 must divide width=10"),
        (lambda: agent_of("CartPole-v1"), r"CartPole-v1 observes .* no rows of items; use Network"),
        (lambda: agent_of("Sokoban-6x6"), r"Sokoban-6x6 observes .* no rows of items"),
        (lambda: agent_of("Spread-3"), "has several agents; a network of items serves one"),
        (lambda: Pqn(envs.make("TSP-10")[0], SMALL), "for Ppo and A2c alone"),
        (
            lambda: make_learner(compose("env=TSP-10", "algorithm=pqn", "items.width=8")),
            "legal: ppo, a2c",
        ),
        (lambda: make_learner(compose("preset=puzzle_tsp", "hidden=[8]")), "hidden does not apply"),
        (lambda: make_learner(compose("preset=puzzle_tsp", "items.depth=8")), "items.depth"),
    ],
)
def test_what_has_no_items_is_refused(make, words):
    with pytest.raises(UsageError, match=words):
        make()


def test_actions_that_are_no_items_need_moves():
    class Mute(type(envs.make("Countdown-3")[0])):
        item_moves = None

    with pytest.raises(UsageError, match="36 actions for 5 items and no item_moves"):
        moves_of(Mute(), Mute().action_space(None))


PRESETS = ("tsp", "tsp_a2c", "knapsack", "2048", "countdown", "ft06", "sokoban", "cube")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_of_puzzles_make_learners(name):
    learner, _ = make_learner(compose(f"preset=puzzle_{name}"))
    assert isinstance(learner.network, Items | Network) and isinstance(learner, Ppo | A2c)
