"""A world as a picture."""

import jax.numpy as jnp

from jaxpar.life.inhabitants import WorldState
from jaxpar.life.units import ONE
from jaxpar.types import Array

__all__ = ["draw_world"]


def draw_world(state: WorldState, scale: int = 4) -> Array:
    """The torus seen from above, uint8 `[scale S, scale S, 3]`: x to the right, y upwards.

    The ground is the greener the more energy a cell holds, and dotted where its bit is set; robots are dark, agents
    coloured by the number of their lineage, the lighter the more energy they have.
    """
    ground = state.terrain
    full = jnp.clip(ground.energy / (8 * ONE), 0, 1)[..., None]
    image = (1 - full) * jnp.asarray([236.0, 226, 208])[None, None] + full * jnp.asarray(
        [60.0, 150, 70]
    )[None, None]
    image = jnp.repeat(jnp.repeat(image, scale, 0), scale, 1)
    dots = jnp.kron(ground.bit, jnp.zeros((scale, scale), jnp.int32).at[0, 0].set(1))
    image = jnp.where(dots[..., None] > 0, 255.0, image)
    image = _stand(
        image, state.robots.position, jnp.full((len(state.robots.energy), 3), 40.0), True, scale
    )
    hue = (
        (state.agents.lineage[:, None] * 0.381966 + jnp.asarray([0.0, 1 / 3, 2 / 3])[None])
        * 2
        * jnp.pi
    )
    bright = 0.55 + 0.45 * jnp.clip(state.agents.energy / (64 * ONE), 0, 1)[:, None]
    colours = bright * (128 + 127 * jnp.cos(hue))
    image = _stand(image, state.agents.position, colours, state.agents.alive, scale)
    return jnp.round(image.transpose(1, 0, 2)[::-1]).astype(jnp.uint8)


def _stand(image: Array, places: Array, colours: Array, there: Array | bool, scale: int) -> Array:
    """The image with squares of half a cell's side where bodies stand."""
    wide = max(scale // 2, 1)
    steps = jnp.arange(wide)
    x, y = ((places[:, i] * scale // ONE)[:, None] + steps[None] for i in (0, 1))
    side = len(image)
    x = jnp.where(jnp.broadcast_to(jnp.asarray(there), x.shape[:1])[:, None], x % side, side)
    return image.at[x[:, :, None], (y % side)[:, None, :]].set(
        colours[:, None, None].astype(image.dtype), mode="drop"
    )
