"""Classic control with exactly Gymnasium's transitions: cart-pole, pendulum, acrobot and both mountain cars.

Rules, constants, rewards and time limits are those of Gymnasium 1.3 (`gymnasium/envs/classic_control`), in whatever
precision the state has: float32 from `init`. gymnax's MountainCarContinuous stops the car at the goal in place of the
left wall; these do not. Every constant is a parameter, and every transition but for its clips is differentiable.

Sources: cart-pole, Barto, Sutton and Anderson (1983), "Neuronlike adaptive elements that can solve difficult learning
control problems"; acrobot, Sutton (1996) with the equations of Sutton and Barto's book; mountain car, Moore (1990).
"""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxpar.env import Box, Discrete, picture
from jaxpar.types import Array, PRNGKey

from .mountain_car import MountainCar, MountainCarContinuous

__all__ = ["VARIANTS", "Acrobot", "CartPole", "MountainCar", "MountainCarContinuous", "Pendulum"]


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
        return Discrete(2)

    def init(self, key: PRNGKey, params: CartPoleParams) -> CartPoleState:
        """All four uniform in ±0.05."""
        x, x_dot, theta, theta_dot = jax.random.uniform(key, (4,), jnp.float32, -0.05, 0.05)
        return CartPoleState(x, x_dot, theta, theta_dot, jnp.zeros((), jnp.int32))

    def transition(self, key: PRNGKey, state: CartPoleState, action: Array, params: CartPoleParams) -> CartPoleState:
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

    def observe(self, key: PRNGKey, state: CartPoleState, action: Array | None, params: CartPoleParams) -> Array:
        """The state without its clock."""
        return jnp.stack([state.x, state.x_dot, state.theta, state.theta_dot])

    def reward(self, state: CartPoleState, action: Array, next_state: CartPoleState, params: CartPoleParams) -> Array:
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
        image = picture.line(picture.canvas(80, 144), (0.0, 64.0), (144.0, 64.0), 1.0, picture.BLACK)
        cart = jnp.stack([72 + state.x / params.max_x * 60, jnp.asarray(60.0, state.x.dtype)])
        image = picture.rectangle(
            image, cart - jnp.asarray([12.0, 5.0]), cart + jnp.asarray([12.0, 5.0]), picture.BLACK
        )
        tip = cart + 48 * jnp.stack([jnp.sin(state.theta), -jnp.cos(state.theta)])
        return picture.finish(picture.disc(picture.line(image, cart, tip, 5.0, picture.BROWN), cart, 3, picture.BLUE))


@flax.struct.dataclass
class PendulumState:
    """Angle from upright and its velocity (rad, rad/s), steps so far."""

    theta: Array
    theta_dot: Array
    time: Array


@flax.struct.dataclass
class PendulumParams:
    """SI units; `dt` is the length of a step."""

    gravity: Any = 10.0
    mass: Any = 1.0
    length: Any = 1.0
    dt: Any = 0.05
    max_speed: Any = 8.0
    max_torque: Any = 2.0
    max_steps: Any = 200


@dataclasses.dataclass(frozen=True)
class Pendulum:
    """Swing a pendulum up with a torque too weak to lift it; costs angle, speed and torque. Never ends by itself."""

    @property
    def name(self) -> str:
        """Pendulum-v1."""
        return "Pendulum-v1"

    @property
    def default_params(self) -> PendulumParams:
        """Gymnasium's."""
        return PendulumParams()

    def observation_space(self, params: PendulumParams) -> Box:
        """Cosine, sine, angular velocity, float32 `[3]`."""
        high = (1.0, 1.0, PendulumParams.max_speed)
        return Box(tuple(-end for end in high), high, (3,))

    def action_space(self, params: PendulumParams) -> Box:
        """The torque, float32 `[1]`; beyond its bounds it is clipped."""
        return Box(-PendulumParams.max_torque, PendulumParams.max_torque, (1,))

    def init(self, key: PRNGKey, params: PendulumParams) -> PendulumState:
        """Any angle, velocity uniform in ±1."""
        theta, theta_dot = jax.random.uniform(key, (2,), jnp.float32, -1, 1)
        return PendulumState(theta * math.pi, theta_dot, jnp.zeros((), jnp.int32))

    def transition(self, key: PRNGKey, state: PendulumState, action: Array, params: PendulumParams) -> PendulumState:
        """One semi-implicit Euler step."""
        gravity = 3 * params.gravity / (2 * params.length) * jnp.sin(state.theta)
        drive = 3.0 / (params.mass * params.length**2) * self._torque(action, params)
        theta_dot = state.theta_dot + (gravity + drive) * params.dt
        theta_dot = jnp.clip(theta_dot, -params.max_speed, params.max_speed)
        return PendulumState(state.theta + theta_dot * params.dt, theta_dot, state.time + 1)

    def observe(self, key: PRNGKey, state: PendulumState, action: Array | None, params: PendulumParams) -> Array:
        """Cosine, sine, angular velocity."""
        return jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.theta_dot])

    def reward(self, state: PendulumState, action: Array, next_state: PendulumState, params: PendulumParams) -> Array:
        """Minus the squared angle from upright, 0.1 of the squared velocity, 0.001 of the squared torque."""
        angle = (state.theta + math.pi) % (2 * math.pi) - math.pi
        return -(angle**2 + 0.1 * state.theta_dot**2 + 0.001 * self._torque(action, params) ** 2)

    def terminal(self, state: PendulumState, params: PendulumParams) -> Array:
        """Never."""
        return jnp.zeros((), bool)

    def truncated(self, state: PendulumState, params: PendulumParams) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: PendulumState, params: PendulumParams) -> Array:
        """The rod, uint8 `[96, 96, 3]`."""
        pivot = jnp.full(2, 48.0)
        tip = pivot + 36 * jnp.stack([jnp.sin(-state.theta), -jnp.cos(state.theta)])
        image = picture.line(picture.canvas(96, 96), pivot, tip, 9.0, picture.RED)
        return picture.finish(picture.disc(image, pivot, 2.5, picture.BLACK))

    def _torque(self, action: Array, params: PendulumParams) -> Array:
        return jnp.clip(action[0], -params.max_torque, params.max_torque)


@flax.struct.dataclass
class AcrobotState:
    """Angle of the first link from hanging, of the second from the first (rad), their velocities, steps so far."""

    theta1: Array
    theta2: Array
    theta1_dot: Array
    theta2_dot: Array
    time: Array


@flax.struct.dataclass
class AcrobotParams:
    """SI units; both links share length, mass, centre and moment of inertia; `dt` is the length of a step."""

    length: Any = 1.0
    mass: Any = 1.0
    center: Any = 0.5
    inertia: Any = 1.0
    gravity: Any = 9.8
    dt: Any = 0.2
    max_speed1: Any = 4 * math.pi
    max_speed2: Any = 9 * math.pi
    max_steps: Any = 500


@dataclasses.dataclass(frozen=True)
class Acrobot:
    """Swing a hanging chain of two links over a line by a torque of -1, 0 or 1 at the joint; -1 a step until then."""

    @property
    def name(self) -> str:
        """Acrobot-v1."""
        return "Acrobot-v1"

    @property
    def default_params(self) -> AcrobotParams:
        """Gymnasium's."""
        return AcrobotParams()

    def observation_space(self, params: AcrobotParams) -> Box:
        """Cosine and sine of each angle, then both velocities, float32 `[6]`."""
        high = (1.0, 1.0, 1.0, 1.0, AcrobotParams.max_speed1, AcrobotParams.max_speed2)
        return Box(tuple(-end for end in high), high, (6,))

    def action_space(self, params: AcrobotParams) -> Discrete:
        """Torque -1, 0, 1."""
        return Discrete(3)

    def init(self, key: PRNGKey, params: AcrobotParams) -> AcrobotState:
        """All four uniform in ±0.1."""
        theta1, theta2, speed1, speed2 = jax.random.uniform(key, (4,), jnp.float32, -0.1, 0.1)
        return AcrobotState(theta1, theta2, speed1, speed2, jnp.zeros((), jnp.int32))

    def transition(self, key: PRNGKey, state: AcrobotState, action: Array, params: AcrobotParams) -> AcrobotState:
        """One fourth-order Runge-Kutta step, angles wrapped to ±pi, velocities clipped."""
        now = jnp.stack([state.theta1, state.theta2, state.theta1_dot, state.theta2_dot])
        torque = (action - 1).astype(now.dtype)
        k1 = self._derivative(now, torque, params)
        k2 = self._derivative(now + params.dt / 2 * k1, torque, params)
        k3 = self._derivative(now + params.dt / 2 * k2, torque, params)
        k4 = self._derivative(now + params.dt * k3, torque, params)
        theta1, theta2, speed1, speed2 = now + params.dt / 6.0 * (k1 + 2 * k2 + 2 * k3 + k4)
        return AcrobotState(
            _wrap(theta1),
            _wrap(theta2),
            jnp.clip(speed1, -params.max_speed1, params.max_speed1),
            jnp.clip(speed2, -params.max_speed2, params.max_speed2),
            state.time + 1,
        )

    def observe(self, key: PRNGKey, state: AcrobotState, action: Array | None, params: AcrobotParams) -> Array:
        """Cosines, sines and velocities."""
        angles = [f(theta) for theta in (state.theta1, state.theta2) for f in (jnp.cos, jnp.sin)]
        return jnp.stack([*angles, state.theta1_dot, state.theta2_dot])

    def reward(self, state: AcrobotState, action: Array, next_state: AcrobotState, params: AcrobotParams) -> Array:
        """-1, and 0 for the step that reaches the line."""
        return jnp.where(self.terminal(next_state, params), 0.0, -1.0)

    def terminal(self, state: AcrobotState, params: AcrobotParams) -> Array:
        """The tip is a link's length above the pivot."""
        return -jnp.cos(state.theta1) - jnp.cos(state.theta2 + state.theta1) > 1.0

    def truncated(self, state: AcrobotState, params: AcrobotParams) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: AcrobotState, params: AcrobotParams) -> Array:
        """Both links and the line, uint8 `[96, 96, 3]`."""
        pivot, both = jnp.full(2, 48.0), state.theta1 + state.theta2
        joint = pivot + 20 * jnp.stack([jnp.sin(state.theta1), jnp.cos(state.theta1)])
        tip = joint + 20 * jnp.stack([jnp.sin(both), jnp.cos(both)])
        image = picture.line(picture.canvas(96, 96), (0.0, 28.0), (96.0, 28.0), 1.0, picture.GRAY)
        image = picture.line(image, pivot, joint, 6.0, picture.BLUE)
        image = picture.line(image, joint, tip, 6.0, picture.GREEN)
        return picture.finish(picture.disc(picture.disc(image, pivot, 3, picture.YELLOW), joint, 3, picture.YELLOW))

    def _derivative(self, now: Array, torque: Array, params: AcrobotParams) -> Array:
        """Velocities and accelerations, by the equations of Sutton and Barto's book."""
        theta1, theta2, speed1, speed2 = now
        m, length, center, inertia, g = params.mass, params.length, params.center, params.inertia, params.gravity
        cos2, sin2 = jnp.cos(theta2), jnp.sin(theta2)
        d1 = m * center**2 + m * (length**2 + center**2 + 2 * length * center * cos2) + 2 * inertia
        d2 = m * (center**2 + length * center * cos2) + inertia
        phi2 = m * center * g * jnp.cos(theta1 + theta2 - math.pi / 2)
        whirl = m * length * center * sin2
        phi1 = (m * center + m * length) * g * jnp.cos(theta1 - math.pi / 2) + phi2
        phi1 -= whirl * speed2**2 + 2 * whirl * speed2 * speed1
        acc2 = (torque + d2 / d1 * phi1 - whirl * speed1**2 - phi2) / (m * center**2 + inertia - d2**2 / d1)
        return jnp.stack([speed1, speed2, -(d2 * acc2 + phi1) / d1, acc2])


def _wrap(angle: Array) -> Array:
    """The angle within ±pi, both ends included."""
    turns = jnp.ceil((jnp.abs(angle) - math.pi) / (2 * math.pi))
    return angle - jnp.sign(angle) * jnp.maximum(turns, 0) * 2 * math.pi


VARIANTS = {
    "CartPole-v1": CartPole,
    "Pendulum-v1": Pendulum,
    "Acrobot-v1": Acrobot,
    "MountainCar-v0": MountainCar,
    "MountainCarContinuous-v0": MountainCarContinuous,
}
