"""Cart-pole with exactly Gymnasium's transitions.

Source: Barto, Sutton and Anderson (1983), "Neuronlike adaptive elements that can solve difficult learning control
problems"; rules and constants are those of Gymnasium 1.3 (`gymnasium/envs/classic_control`).
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Box, Discrete, picture
from jaxpar.types import Array, PRNGKey

__all__ = ["VARIANTS", "CartPole", "CartPoleParams", "CartPoleState"]


@flax.struct.dataclass
class CartPoleState:
    """Position and velocity of the cart (m, m/s), angle and its velocity of the pole (rad, rad/s), steps so far."""

    x: Array
    x_dot: Array
    theta: Array
    theta_dot: Array
    time: Array


@flax.struct.dataclass
class CartPoleParams:
    """SI units; `half_length` is half the pole's, `tau` the length of a step."""

    gravity: Any = 9.8
    cart_mass: Any = 1.0
    pole_mass: Any = 0.1
    half_length: Any = 0.5
    force: Any = 10.0
    tau: Any = 0.02
    max_theta: Any = 12 * 2 * math.pi / 360
    max_x: Any = 2.4
    max_steps: Any = 500


@dataclasses.dataclass(frozen=True)
class CartPole:
    """Push a cart left (0) or right (1) to keep its pole up; 1 for each step that began with the pole up."""

    @property
    def name(self) -> str:
        """CartPole-v1."""
        return "CartPole-v1"

    @property
    def default_params(self) -> CartPoleParams:
        """Gymnasium's."""
        return CartPoleParams()

    def observation_space(self, params: CartPoleParams) -> Box:
        """Position, velocity, angle, angular velocity, float32 `[4]`; twice the default limits."""
        high = (2 * CartPoleParams.max_x, math.inf, 2 * CartPoleParams.max_theta, math.inf)
        return Box(tuple(-end for end in high), high, (4,))

    def action_space(self, params: CartPoleParams) -> Discrete:
        """Left, right."""
        return Discrete(2, names=("left", "right"))

    def init(self, key: PRNGKey, params: CartPoleParams) -> CartPoleState:
        """All four uniform in ±0.05."""
        x, x_dot, theta, theta_dot = jax.random.uniform(key, (4,), jnp.float32, -0.05, 0.05)
        return CartPoleState(x, x_dot, theta, theta_dot, jnp.zeros((), jnp.int32))

    def transition(
        self, key: PRNGKey, state: CartPoleState, action: Array, params: CartPoleParams
    ) -> CartPoleState:
        """One Euler step."""
        force = jnp.where(action == 1, params.force, -params.force)
        mass, moment = params.cart_mass + params.pole_mass, params.pole_mass * params.half_length
        cos, sin = jnp.cos(state.theta), jnp.sin(state.theta)
        push = (force + moment * state.theta_dot**2 * sin) / mass
        inertia = params.half_length * (4.0 / 3.0 - params.pole_mass * cos**2 / mass)
        theta_acc = (params.gravity * sin - cos * push) / inertia
        x_acc = push - moment * theta_acc * cos / mass
        return CartPoleState(
            state.x + params.tau * state.x_dot,
            state.x_dot + params.tau * x_acc,
            state.theta + params.tau * state.theta_dot,
            state.theta_dot + params.tau * theta_acc,
            state.time + 1,
        )

    def observe(
        self, key: PRNGKey, state: CartPoleState, action: Array | None, params: CartPoleParams
    ) -> Array:
        """The state without its clock."""
        return jnp.stack([state.x, state.x_dot, state.theta, state.theta_dot])

    def reward(
        self, state: CartPoleState, action: Array, next_state: CartPoleState, params: CartPoleParams
    ) -> Array:
        """1, also for the step in which the pole falls."""
        return jnp.where(self.terminal(state, params), 0.0, 1.0)

    def terminal(self, state: CartPoleState, params: CartPoleParams) -> Array:
        """The cart or the pole is beyond its limit."""
        return (jnp.abs(state.x) > params.max_x) | (jnp.abs(state.theta) > params.max_theta)

    def truncated(self, state: CartPoleState, params: CartPoleParams) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: CartPoleState, params: CartPoleParams) -> Array:
        """The cart, its pole and the track, uint8 `[80, 144, 3]`."""
        image = picture.line(
            picture.canvas(80, 144), (0.0, 64.0), (144.0, 64.0), 1.0, picture.BLACK
        )
        cart = jnp.stack([72 + state.x / params.max_x * 60, jnp.asarray(60.0, state.x.dtype)])
        image = picture.rectangle(
            image, cart - jnp.asarray([12.0, 5.0]), cart + jnp.asarray([12.0, 5.0]), picture.BLACK
        )
        tip = cart + 48 * jnp.stack([jnp.sin(state.theta), -jnp.cos(state.theta)])
        return picture.to_uint8(
            picture.disc(picture.line(image, cart, tip, 5.0, picture.BROWN), cart, 3, picture.BLUE)
        )


VARIANTS = {"CartPole-v1": CartPole}
