"""Networks act by legal actions, with keys of their own; genomes that have one parent mutate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from plain_neat import random_genomes

import envs
from envs.classic.cart_pole import CartPole
from experiments.app.env.champions import NetworkPolicy
from jaxpar.env import Box, Discrete
from jaxpar.neat import (
    FAST,
    Episodes,
    NeatConfig,
    PlayOptions,
    act,
    check_genomes,
    express,
    init_carry,
    io_sizes,
    mutate,
    play,
)
from jaxpar.neat.episodes import _Player
from jaxpar.rollout.policies import takes_mask

TIGER, TIGER_PARAMS = envs.make("Tiger")


class Listening(type(TIGER)):
    """Tiger whose doors stay shut: every step costs 1."""

    def action_mask(self, state, params):
        return jnp.array([True, False, False])


class Leftwards(CartPole):
    """A cart that may be pushed to the left alone."""

    def action_mask(self, state, params):
        return jnp.array([True, False])


def drawn(key):
    """The reward of a step of `Drawing` with this key."""
    return jax.random.uniform(jax.random.split(key)[0])


class Drawing(CartPole):
    """A cart that is anywhere after each step, which is its reward."""

    def transition(self, key, state, action, params):
        return state.replace(x=jax.random.uniform(key))

    def reward(self, state, action, next_state, params):
        return next_state.x


def networks_for(env, params, count=4, kind="feedforward"):
    config = NeatConfig(*io_sizes(env, params, True), max_nodes=9, max_conns=16, kind=kind)
    return jit(express, static_argnums=0)(
        config, random_genomes(np.random.default_rng(0), config, count)
    )


def test_illegal_actions_are_no_choice():
    many, two, one = Discrete(3), Discrete(2), Discrete(1)
    y = jnp.float32([0.1, 0.9, 0.5])
    assert act(many, y) == 1
    for mask, choice in (([1, 1, 1], 1), ([1, 0, 1], 2), ([1, 0, 0], 0)):
        assert act(many, y, mask=jnp.bool_(mask)) == choice
    lost = jnp.float32([0.0, -jnp.inf, 0.5])
    assert act(many, lost, mask=jnp.bool_([0, 1, 0])) == 1
    for out, mask, choice in (
        (0.9, [1, 1], 1), (0.1, [1, 1], 0), (0.9, [1, 0], 0), (0.1, [0, 1], 1), (0.9, [0, 0], 1)
    ):  # fmt: skip
        assert act(two, jnp.float32([out]), mask=jnp.bool_(mask)) == choice
    assert act(one, jnp.float32([0.9])) == act(one, jnp.float32([0.9]), mask=jnp.bool_([1])) == 0
    np.testing.assert_allclose(act(Box(-2.0, 2.0, (1,)), jnp.float32([0.75])), [1.0])


def test_episodes_are_of_legal_actions():
    networks = networks_for(TIGER, TIGER_PARAMS)
    key = jax.random.key(0)

    def returns(env):
        return jit(lambda: play(key, networks, env, TIGER_PARAMS, 2, 8, 10))().returns

    assert (np.asarray(returns(TIGER)) < -10).any()
    np.testing.assert_array_equal(returns(Listening()), np.full((4, 2), -10.0, np.float32))


def test_a_policy_of_films_takes_the_mask():
    one = networks_for(TIGER, TIGER_PARAMS, 1)
    policy = NetworkPolicy(Episodes(TIGER, 0.0))
    asks = takes_mask(policy)
    for legal in range(3):
        mask = jnp.arange(3) == legal
        arguments = (jax.random.key(0), (one, TIGER_PARAMS), jnp.int32(1), init_carry(one))
        assert asks and policy(*arguments, action_mask=mask)[0] == legal


def test_a_kernel_masks_as_slots_do():
    env = Leftwards()
    params = env.default_params
    game = _Player(
        key=jax.random.key(3),
        networks=networks_for(env, params),
        env=env,
        params=params,
        episodes=2,
        max_steps=12,
        options=PlayOptions(compacts=False),
    )
    whole = jax.jit(game.by_kernel(interpret=True))()
    slots = jax.jit(lambda: game.play_in_slots(8))()
    np.testing.assert_array_equal(whole.lengths, slots.lengths)
    # Pushed to one side alone, it falls soon, whatever the network says.
    assert slots.lengths.max() < 12


def test_every_step_has_its_own_key():
    """A reward is the first number of its step's key: none is drawn twice, none is the reset's."""
    env = Drawing()
    networks = networks_for(env, env.default_params, 3)
    key = jax.random.key(7)
    played = jit(lambda: play(key, networks, env, env.default_params, 2, 4, 5))()
    for g in range(3):
        for e in range(2):
            own = jax.random.fold_in(jax.random.fold_in(key, g), e)
            want = sum(float(drawn(jax.random.fold_in(own, t))) for t in range(1, 6))
            assert played.returns[g, e] == pytest.approx(want, rel=1e-5)


def test_genomes_mutate_each_on_its_own():
    rates = FAST.replace(add_node=0.3, add_conn=0.3, del_node=0.1, del_conn=0.1)
    config = NeatConfig(2, 1, 1, 10, 16, kind="recurrent", rates=rates)
    genomes = random_genomes(np.random.default_rng(0), config, 40, conns=6)
    run = jit(mutate, static_argnums=1)
    found = jax.device_get(run(jax.random.key(0), config, genomes))
    check_genomes(config, found)
    delta = found.on.sum(1).astype(int) - genomes.on.sum(1)
    grew, same, shrank = delta > 0, delta == 0, delta < 0
    assert grew.sum() > 5 and same.sum() > 5 and shrank.sum() > 0
    # A change of structure keeps the weights of old connections.
    for p in np.flatnonzero(grew):
        old = genomes.on[p]
        np.testing.assert_array_equal(found.weight[p][old], genomes.weight[p][old])
        born = found.on[p] & ~old
        assert (found.innovation[p][born] > genomes.innovation[p].max()).all()
    assert (found.weight != genomes.weight)[same].any()
    # Each depends on the key and its index alone.
    few = run(jax.random.key(0), config, jax.tree.map(lambda x: x[:5], genomes))
    jax.tree.map(np.testing.assert_array_equal, few, jax.tree.map(lambda x: x[:5], found))
    other = jax.device_get(run(jax.random.key(1), config, genomes))
    assert (other.weight != found.weight).any()
