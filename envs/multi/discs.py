"""Discs on a plane: how they push each other, move and are seen, all pairs at once. What `particles.py` is made of."""

from typing import Any

import flax.struct
import jax.numpy as jnp
import numpy as np

from jaxpar.env import picture
from jaxpar.types import Array

__all__ = [
    "PIXELS",
    "VIEW",
    "Physics",
    "contact_forces",
    "direction",
    "move",
    "others_of",
    "paint",
    "slow_down",
    "touching",
]

PIXELS, VIEW = 112, 1.4  # a picture shows the square from -1.4 to 1.4


@flax.struct.dataclass
class Physics:
    """The numbers of the world, which every task's parameters begin with."""

    dt: float = 0.1
    damping: float = 0.25
    contact_force: float = 100.0
    contact_margin: float = 0.001
    max_steps: int = 25


def contact_forces(
    position: Array, size: Array, others: Array, other_size: Array, params: Any
) -> Array:
    """The force `[N, 2]` on discs at `position` `[N, 2]` with radii `size` `[N]` from those of `others` `[M, 2]`.

    `contact_force * margin * softplus((sum of radii - distance) / margin)` along the line between them; zero from a
    disc in the same place, so that `others` may hold the discs themselves. O(N M).
    """
    delta = position[:, None] - others[None]
    squared = jnp.square(delta[..., 0]) + jnp.square(delta[..., 1])
    apart = squared > 0
    distance = jnp.sqrt(jnp.where(apart, squared, 1.0))
    overlap = (size[:, None] + other_size[None] - distance) / params.contact_margin
    penetration = params.contact_margin * jnp.logaddexp(overlap, 0.0)
    strength = jnp.where(apart, params.contact_force * penetration / distance, 0.0)
    return jnp.sum(strength[..., None] * delta, axis=1)


def move(position: Array, velocity: Array, force: Array, params: Any) -> tuple[Array, Array]:
    """Positions and velocities one step later, for discs of mass one."""
    return position + velocity * params.dt, velocity * (1 - params.damping) + force * params.dt


def slow_down(velocity: Array, max_speed: Array) -> Array:
    """Velocities `[N, 2]` shortened to `max_speed` `[N]` where they are longer."""
    squared = jnp.square(velocity[:, 0]) + jnp.square(velocity[:, 1])
    fast = squared > jnp.square(max_speed)
    return (
        velocity
        * jnp.where(fast, max_speed / jnp.sqrt(jnp.where(fast, squared, 1.0)), 1.0)[:, None]
    )


def direction(action: Array, continuous: bool) -> Array:
    """The push `[N, 2]` of actions: nothing, left, right, down, up, as int32 `[N]` or strengths `[N, 5]` in 0 to 1."""
    if continuous:
        action = jnp.clip(action, 0.0, 1.0)
        return jnp.stack([action[:, 2] - action[:, 1], action[:, 4] - action[:, 3]], axis=1)
    right_up, left_down = (
        action[:, None] == np.array([[2, 4]]),
        action[:, None] == np.array([[1, 3]]),
    )
    return right_up.astype(jnp.float32) - left_down.astype(jnp.float32)


def others_of(pairs: Array) -> Array:
    """`[N, N, ...]` without its diagonal, `[N, N - 1, ...]`, by slices alone."""
    count, rest = pairs.shape[0], pairs.shape[2:]
    flat = pairs.reshape(count * count, *rest)[1:]
    return flat.reshape(count - 1, count + 1, *rest)[:, :-1].reshape(count, count - 1, *rest)


def touching(position: Array, size: Array, others: Array, other_size: Array) -> Array:
    """Whether discs overlap, bool `[N, M]`."""
    delta = position[:, None] - others[None]
    squared = jnp.square(delta[..., 0]) + jnp.square(delta[..., 1])
    return jnp.sqrt(squared) < size[:, None] + other_size[None]


def paint(position: Array, size: Array, colour: Array) -> Array:
    """Discs drawn in order onto white, uint8 `[112, 112, 3]`, from -1.4 to 1.4 with y upwards."""
    image = picture.canvas(PIXELS, PIXELS)
    centre = picture.to_pixels(position, (-VIEW, -VIEW), (VIEW, VIEW), PIXELS, PIXELS)
    for i in range(len(position)):
        image = picture.disc(image, centre[i], size[i] * PIXELS / (2 * VIEW), colour[i])
    return picture.to_uint8(image)
