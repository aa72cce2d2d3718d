"""Saliency: how much what agents do hangs on each number that they see."""

import jax
import jax.numpy as jnp

from jaxpar.life.brains import Sight
from jaxpar.life.inhabitants import WorldState, see
from jaxpar.life.world import World

__all__ = ["HEARD", "action_saliency"]

HEARD = slice(37, 53)
"""Where in `Sight.own` the message stands that an agent heard in the last step."""


def action_saliency(world: World, state: WorldState) -> Sight:
    """The size of the gradient of an agent's outputs y by each number x that it sees, through one step of its brain.

        S[n, i] = sqrt(mean over k of (d y[n, k] / d x[n, i])^2)        of 44 outputs k

    Its memory is taken as it is, and those who are dead have 0. One forward pass and 44 backward passes.

    Args:
        world: the world, whose brain has a gradient.
        state: the state before the step.

    Returns:
        S as a `Sight`, float32: output a unit of what is seen.
    """
    agents, near = state.agents, world.look(state)
    sight = see(agents, state.robots, state.terrain, near[0], near[1], world.window)
    outputs, back = jax.vjp(
        lambda sight: world.brain.act(agents.genome, agents.carry, sight)[0], sight
    )
    # Nobody's outputs depend on what others see, so that one pull-back has output k of all agents.
    rows = jnp.broadcast_to(jnp.eye(outputs.shape[1])[:, None], (outputs.shape[1], *outputs.shape))
    (slopes,) = jax.vmap(back)(rows)
    alive = lambda x: agents.alive.reshape(-1, *[1] * (x.ndim - 1))  # noqa: E731
    return jax.tree.map(lambda x: jnp.where(alive(x[0]), jnp.sqrt(jnp.mean(x**2, 0)), 0), slopes)
