"""What actions hang on equals finite differences; the dead and brains that see nothing hang on nothing."""

import jax
import jax.numpy as jnp
import numpy as np
from fast import jit

from jaxpar.experimental.action_saliency import HEARD, action_saliency
from jaxpar.life import Brain, Lstm, Reflex, World
from jaxpar.life.inhabitants import see


def small(brain: Brain) -> World:
    """Four slots, the last of them empty."""
    return World(
        brain,
        4,
        num_start=3,
        num_robots=2,
        size=8,
        window=3,
        seen_agents=2,
        max_births=2,
        newcomers=0,
    )


def test_it_equals_finite_differences(x64):
    world = small(Lstm(4, 4, 1))
    state = world.init(jax.random.key(0))
    genome = jax.tree.map(lambda x: x.astype(jnp.float64), state.agents.genome)
    heard = jax.random.randint(jax.random.key(1), (4, 16), -1024, 1025, jnp.int32)
    state = state._replace(agents=state.agents._replace(genome=genome, heard=heard))
    found = jit(lambda state: action_saliency(world, state))(state)
    assert jax.tree.all(jax.tree.map(lambda x: not np.any(x[3]), found)), "the fourth is dead"
    near, agents = world.look(state), state.agents
    sight = see(agents, state.robots, state.terrain, near[0], near[1], world.window)
    np.testing.assert_allclose(sight.own[:, HEARD], heard / 1024)

    act = jit(lambda sight: world.brain.act(agents.genome, agents.carry, sight)[0])
    for name, column in (("ground", 5), ("own", HEARD.start), ("own", HEARD.stop - 1)):
        seen = getattr(sight, name).astype(jnp.float64)
        up, down = (
            act(sight._replace(**{name: seen.at[:, column].add(by)})) for by in (1e-4, -1e-4)
        )
        slope = np.sqrt(np.mean(((up - down) / 2e-4) ** 2, 1))[:3]
        assert np.all(slope > 1e-6)
        np.testing.assert_allclose(getattr(found, name)[:3, column], slope, rtol=1e-4)


def test_who_sees_nothing_hangs_on_nothing():
    world = small(Reflex(std=1.0))
    found = action_saliency(world, world.init(jax.random.key(0)))
    assert not any(np.any(x) for x in found)
