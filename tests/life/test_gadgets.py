"""Robots compute: gates, a half adder, and every elementary automaton, beside NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit

from jaxpar.life import automaton_ring, ring_bits
from jaxpar.life.gadgets import half_adder, nand_gate
from jaxpar.loop import run
from jaxpar.types import UsageError

PAIRS = jnp.asarray([(0, 0), (0, 1), (1, 0), (1, 1)])


def test_three_robots_are_a_nand_gate_and_five_add():
    kinds = "nand", "table", "bit"
    gadgets = [functools.partial(nand_gate, kind) for kind in kinds] + [half_adder]

    @jit
    def program():
        world, _ = half_adder(PAIRS[0])
        states = [jax.vmap(lambda inputs, g=gadget: g(inputs)[1])(PAIRS) for gadget in gadgets]
        states = jax.tree.map(lambda *x: jnp.stack(x), *states)
        go_on = lambda state: run(world, jax.random.key(0), state, None, 2)[0]  # noqa: E731
        state = jax.vmap(jax.vmap(go_on))(states)
        return ring_bits(state), state.terrain.bit

    bits, ground = (np.asarray(x) for x in program())
    for kind, found in zip(kinds, bits, strict=False):
        np.testing.assert_array_equal(found[:, 2], [1, 1, 1, 0], kind)
        np.testing.assert_array_equal(found[:, :2], PAIRS)
    np.testing.assert_array_equal(ground[2][:, 3, 3], [1, 1, 1, 0])
    np.testing.assert_array_equal(2 * bits[3][:, 4] + bits[3][:, 3], np.asarray(PAIRS).sum(1))


def automaton(rule, bits, generations):
    """A NumPy automaton on a ring."""
    for _ in range(generations):
        bits = (rule >> (4 * np.roll(bits, 1) + 2 * bits + np.roll(bits, -1))) & 1
    return bits


def check_rules(generations):
    bits = np.random.default_rng(0).integers(0, 2, 32)

    @jit
    @jax.vmap
    def program(rule):
        world, state = automaton_ring(rule, bits)
        return ring_bits(run(world, jax.random.key(0), state, None, generations // world.ticks)[0])

    found = np.asarray(program(jnp.arange(256)))
    want = np.stack([automaton(rule, bits, generations) for rule in range(256)])
    np.testing.assert_array_equal(found, want)
    assert len(np.unique(want, axis=0)) > 100


def test_a_ring_of_robots_is_every_elementary_automaton():
    check_rules(40)


@pytest.mark.slow  # 20 s
def test_it_is_for_500_generations():
    check_rules(500)


def test_what_is_no_gadget_is_refused():
    with pytest.raises(UsageError, match="'nor' is no gate; legal are nand"):
        nand_gate("nor", PAIRS[0])
    with pytest.raises(UsageError, match="12 robots does not fit; legal are multiples of 8"):
        automaton_ring(110, np.zeros(12, int))
