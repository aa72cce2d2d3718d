"""CartPole seen in part or through noise: control that needs memory.

Dynamics, limits and start of A. Barto, R. Sutton and C. Anderson, "Neuronlike adaptive elements that can solve
difficult learning control problems", 1983, as in Gymnasium's CartPole-v1 (Euler, 0.02 s); views and rewards of POPGym
(ICLR 2023), whose three difficulties last 200, 400 and 600 steps, or have noise 0.1, 0.2 and 0.3. Every step earns
1 / max_steps, so that balancing to the end returns 1.

Deviations from POPGym: its noise comes with positions only, here with any view; its noise is clipped to the space of
observations, here not, so that `log_likelihood` is exact; its velocity-only task shows positions after a reset, here
velocities always.
"""

import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

VIEWS = {"all": (0, 1, 2, 3), "positions": (0, 2), "velocities": (1, 3)}
HEIGHT, WIDTH = 80, 160


@flax.struct.dataclass
class Params:
    """SI units: m/s^2, kg, m (half the pole), N, s, m, rad."""

    gravity: Any = 9.8
    cart_mass: Any = 1.0
    pole_mass: Any = 0.1
    half_length: Any = 0.5
    max_force: Any = 10.0
    dt: Any = 0.02
    max_x: Any = 2.4
    max_angle: Any = 12 * 2 * np.pi / 360
    start_spread: Any = 0.05
    max_steps: Any = 200


@flax.struct.dataclass
class NoisyParams(Params):
    """And the standard deviation of the noise on every observed number."""

    noise: Any = 0.1


@flax.struct.dataclass
class State:
    """Position, velocity, angle and its rate (m, m/s, rad, rad/s), float32 `[4]`; steps made, int32."""

    motion: Array
    time: Array


@dataclasses.dataclass(frozen=True)
class MaskedCartPole:
    """CartPole of which only some numbers are seen.

    Attributes:
        observed: "positions", "velocities" or "all" of (x, x', theta, theta').
    """

    observed: str = "positions"

    def __post_init__(self):
        if self.observed not in VIEWS:
            raise UsageError(f"the cart and pole are observed by {', '.join(VIEWS)}, not {self.observed!r}")

    @property
    def name(self) -> str:
        """With its view."""
        return f"{type(self).__name__}-{self.observed}"

    @property
    def default_params(self) -> PyTree:
        """200 steps."""
        return Params()

    def observation_space(self, params: PyTree) -> Box:
        """Unbounded: velocities are, and the last position lies beyond its limit."""
        return Box(-np.inf, np.inf, (len(VIEWS[self.observed]),))

    def action_space(self, params: PyTree) -> Discrete:
        """Push to the left (0) or to the right (1)."""
        return Discrete(2)

    def init(self, key: PRNGKey, params: PyTree) -> State:
        """Four numbers uniform in +-`start_spread`; consumes `key`."""
        motion = jax.random.uniform(key, (4,), jnp.float32, -1, 1) * params.start_spread
        return State(motion, jnp.zeros((), jnp.int32))

    def transition(self, key: PRNGKey, state: State, action: Array, params: PyTree) -> State:
        """One Euler step under full force; deterministic."""
        x, x_dot, theta, theta_dot = state.motion
        force = (2.0 * action - 1) * params.max_force
        sin, cos = jnp.sin(theta), jnp.cos(theta)
        mass = params.cart_mass + params.pole_mass
        moment = params.pole_mass * params.half_length
        push = (force + moment * theta_dot**2 * sin) / mass
        turn = (params.gravity * sin - cos * push) / (params.half_length * (4 / 3 - params.pole_mass * cos**2 / mass))
        rate = jnp.stack([x_dot, push - moment * turn * cos / mass, theta_dot, turn])
        return State(state.motion + params.dt * rate, state.time + 1)

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: PyTree) -> Array:
        """The observed numbers, float32 `[2]` or `[4]`."""
        return state.motion[np.array(VIEWS[self.observed])]

    def reward(self, state: State, action: Array, next_state: State, params: PyTree) -> Array:
        """1 / max_steps."""
        return jnp.ones((), jnp.float32) / params.max_steps

    def terminal(self, state: State, params: PyTree) -> Array:
        """Beyond 2.4 m or 12 degrees."""
        return ~((jnp.abs(state.motion[0]) <= params.max_x) & (jnp.abs(state.motion[2]) <= params.max_angle))

    def truncated(self, state: State, params: PyTree) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: State, params: PyTree) -> Array:
        """Cart and pole as they are, whatever is observed; uint8 `[80, 160, 3]`."""
        x, _, theta, _ = state.motion

        def pixel(x, y):
            return picture.to_pixels(jnp.stack([x, y * jnp.ones_like(x)]), (-3.0, -1.0), (3.0, 2.0), HEIGHT, WIDTH)

        image = picture.line(picture.canvas(HEIGHT, WIDTH), (0, 58), (WIDTH, 58), 1, picture.GRAY)
        image = picture.rectangle(image, pixel(x - 0.4, 0.15), pixel(x + 0.4, -0.25), picture.BLACK)
        tip = pixel(x + 3 * params.half_length * jnp.sin(theta), 3 * params.half_length * jnp.cos(theta))
        return picture.finish(picture.line(image, pixel(x, 0.0), tip, 5, picture.ORANGE))


@dataclasses.dataclass(frozen=True)
class NoisyCartPole(MaskedCartPole):
    """CartPole whose observed numbers come with Gaussian noise of standard deviation `params.noise`."""

    observed: str = "all"

    @property
    def default_params(self) -> NoisyParams:
        """200 steps, noise 0.1."""
        return NoisyParams()

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: NoisyParams) -> Array:
        """The observed numbers with noise, float32 `[2]` or `[4]`; consumes `key`."""
        exact = super().observe(key, state, action, params)
        return exact + params.noise * jax.random.normal(key, exact.shape)

    def log_likelihood(self, obs: Array, state: State, action: Array, next_state: State, params: NoisyParams) -> Array:
        """The density log p(obs | action, next state), a sum of normal log densities."""
        exact = next_state.motion[np.array(VIEWS[self.observed])]
        return jnp.sum(jax.scipy.stats.norm.logpdf(obs, exact, params.noise))


VARIANTS = {
    "MaskedCartPole-Positions": MaskedCartPole,
    "MaskedCartPole-Velocities": lambda: MaskedCartPole("velocities"),
    "NoisyCartPole": NoisyCartPole,
    "NoisyCartPole-Positions": lambda: NoisyCartPole("positions"),
}
