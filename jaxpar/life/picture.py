"""A world as a picture."""

import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxpar.life.inhabitants import WorldState
from jaxpar.life.units import ONE
from jaxpar.types import Array

__all__ = ["draw_world", "lineage_colours"]


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
    agents, robots = state.agents, state.robots
    dark = jnp.full((len(robots.energy), 3), 40.0)
    image = _stand(image, robots.position, dark, True, scale, _mark(scale, 5))
    bright = 0.55 + 0.45 * jnp.clip(agents.energy / (64 * ONE), 0, 1)[:, None]
    colours = bright * lineage_colours(agents.lineage)
    # A white edge, so that agents of any colour differ from the ground.
    wide = _mark(scale, 9)
    white = jnp.full_like(colours, 255.0)
    image = _stand(image, agents.position, white, agents.alive, scale, wide + 2)
    image = _stand(image, agents.position, colours, agents.alive, scale, wide)
    return jnp.round(image.transpose(1, 0, 2)[::-1]).astype(jnp.uint8)


def lineage_colours(lineage: ArrayLike) -> Array:
    """Returns a colour for each number of a lineage, float32 `[..., 3]`, 1 to 255; neighbours differ most."""
    thirds = jnp.asarray([0.0, 1 / 3, 2 / 3]).reshape((1,) * jnp.ndim(lineage) + (3,))
    hue = (jnp.asarray(lineage)[..., None] * 0.381966 + thirds) * 2 * jnp.pi
    return 128 + 127 * jnp.cos(hue)


def _mark(scale: int, pixels: int) -> int:
    """Returns the side of a mark in pixels: half a cell to two cells."""
    return max(scale // 2, min(pixels, 2 * scale))


def _stand(
    image: Array, places: Array, colours: Array, there: Array | bool, scale: int, wide: int
) -> Array:
    """The image with squares of `wide` pixels around where bodies stand."""
    steps = jnp.arange(wide) - wide // 2
    x, y = ((places[:, i] * scale // ONE)[:, None] + steps[None] for i in (0, 1))
    side = len(image)
    x = jnp.where(jnp.broadcast_to(jnp.asarray(there), x.shape[:1])[:, None], x % side, side)
    return image.at[x[:, :, None], (y % side)[:, None, :]].set(
        colours[:, None, None].astype(image.dtype), mode="drop"
    )
