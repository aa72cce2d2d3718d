"""Double-pole balancing: two poles of different length on one cart, neuroevolution's classic benchmark.

Physics: the equations of A. Wieland, "Evolving neural network controllers for unstable systems", IJCNN 1991, for N
poles hinged to a cart, each a uniform rod of half-length l_i and mass m_i, upwards at theta_i = 0:

    x''       = (F - mu_c sign(x') + sum_i F_i) / (M + sum_i M_i)
    theta_i'' = -3/(4 l_i) (x'' cos theta_i - g sin theta_i + mu_p theta_i' / (m_i l_i))
    F_i       = m_i l_i theta_i'^2 sin theta_i + 3/4 m_i cos theta_i (mu_p theta_i' / (m_i l_i) - g sin theta_i)
    M_i       = m_i (1 - 3/4 cos^2 theta_i)

An action holds for 0.02 s: two Runge-Kutta steps (order 4) of 0.01 s. It fails when |x| > 2.4 m or a pole leans more
than 36 degrees, judged once an action.

| constant | value | |
| --- | --- | --- |
| g | 9.8 m/s^2 | |
| M; m_1, m_2 | 1 kg; 0.1, 0.01 kg | cart; long and short pole |
| l_1, l_2 | 0.5, 0.05 m | half the poles' lengths |
| largest force | 10 N | continuous in [-10, 10], or bang-bang |
| mu_p | 2e-6 N m s | friction of the hinges |
| mu_c | 0 | friction of the track; papers list 5e-4 N, the programs behind their figures leave it out, and so do we |
| start | theta_1 = 0.07 rad | everything else is 0 |

Task (K. Stanley and R. Miikkulainen, "Evolving neural networks through augmenting topologies", Evolutionary
Computation 10(2), 2002, section 4, with the source of NEAT 1.2.1 by F. Gomez and K. Stanley for what the text omits):
with velocities, solved by 100,000 balanced steps; without, by 100,000 steps after a search with the damping fitness of
F. Gruau, D. Whitley and L. Pyeatt (GP 1996), and then by balancing 1,000 steps from at least 200 of 625 starts
(`generalisation_starts`).

Deviations: observations carry no constant bias input; forces below 10/256 N, which some authors forbid, are allowed;
100 balanced steps suffice for the second part of the damping fitness, as in the paper (the program asks for 101).
"""

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.types import Array, PRNGKey

from .integrator import rk4

__all__ = [
    "VARIANTS",
    "DoublePole",
    "Motion",
    "Params",
    "State",
    "damping_fitness",
    "generalisation_starts",
    "wobble",
]

SCALES = (4.8, 2.0, 0.52, 2.0, 0.52, 2.0)
"""What an observation divides x, x', theta_1, theta_1', theta_2, theta_2' by, as in NEAT 1.2.1."""

WINDOW = 100
"""The last balanced steps whose wobble the damping fitness sums."""

LEVEL_RANGE = (2.16, 1.35, 0.06283152, 0.15009752)
"""Half-widths of the starts in x, x', theta_1, theta_1': m, m/s, 3.6 degrees, 8.6 degrees/s."""

HEIGHT, WIDTH = 80, 240


class Motion(NamedTuple):
    """Where cart and poles are and how fast: float32 scalars in m, m/s, rad, rad/s. It is also a level."""

    x: Array
    x_dot: Array
    theta1: Array
    theta1_dot: Array
    theta2: Array
    theta2_dot: Array


@flax.struct.dataclass
class Params:
    """Numbers of the physics and the task; units in the module's table."""

    gravity: Any = 9.8
    cart_mass: Any = 1.0
    pole_mass1: Any = 0.1
    pole_mass2: Any = 0.01
    half_length1: Any = 0.5
    half_length2: Any = 0.05
    hinge_friction: Any = 2e-6
    track_friction: Any = 0.0
    max_force: Any = 10.0
    dt: Any = 0.01
    max_x: Any = 2.4
    max_angle: Any = 0.628329
    start_angle: Any = 0.07
    max_steps: Any = 100_000


@flax.struct.dataclass
class State:
    """The motion, the steps made (int32), and the last wobbles, float32 `[100]` (`[0]` without damping)."""

    motion: Motion
    time: Array
    wobbles: Array


def wobble(motion: Motion) -> Array:
    """|x| + |x'| + |theta_1| + |theta_1'|, what Gruau's fitness wants small."""
    return (
        jnp.abs(motion.x)
        + jnp.abs(motion.x_dot)
        + jnp.abs(motion.theta1)
        + jnp.abs(motion.theta1_dot)
    )


def damping_fitness(wobbles: Array, balanced: Array) -> Array:
    """Gruau's fitness: 0.1 t / 1000 + 0.9 * 0.75 / (sum of the last 100 wobbles), the latter once t >= 100.

    It is unbounded as the poles come to rest; the sum counts as 1e-6 at least.

    Args:
        wobbles: float32 `[100]`, those of the last 100 balanced steps, in any order.
        balanced: int32, t, the number of balanced steps.
    """
    stability = jnp.where(balanced >= WINDOW, 0.75 / jnp.maximum(jnp.sum(wobbles), 1e-6), 0)
    return 0.1 * balanced / 1000 + 0.9 * stability


def generalisation_starts() -> Motion:
    """The 625 starts from which a solution is judged: fields float32 `[625]`; each is a level for `init_level`."""
    shares = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
    grid = np.meshgrid(*(half * (2 * shares - 1) for half in LEVEL_RANGE), indexing="ij")
    moving = [jnp.asarray(axis.reshape(-1), jnp.float32) for axis in grid]
    return Motion(*moving, *(jnp.zeros(len(moving[0]), jnp.float32) for _ in range(2)))


@dataclasses.dataclass(frozen=True)
class DoublePole:
    """The environment.

    Attributes:
        velocities: whether they are observed: float32 `[6]`, else the positions alone, float32 `[3]` (a POMDP).
        discrete: two actions, full force to the left (0) or to the right (1); else a share of it, float32 `[1]` in
            [-1, 1], clipped there.
        damping: the return of an episode is Gruau's fitness; else a step that stays in balance earns 1.
    """

    velocities: bool = True
    discrete: bool = False
    damping: bool = False

    @property
    def name(self) -> str:
        """As in `VARIANTS`."""
        parts = {
            "NoVelocities": not self.velocities,
            "Discrete": self.discrete,
            "Damping": self.damping,
        }
        return "-".join(["DoublePole", *(part for part, is_so in parts.items() if is_so)])

    @property
    def default_params(self) -> Params:
        """100,000 steps; 1,000 with the damping fitness."""
        return Params(max_steps=1000) if self.damping else Params()

    def observation_space(self, params: Params) -> Box:
        """The observed numbers are unbounded: the last of an episode lies beyond the limits."""
        return Box(-np.inf, np.inf, (6 if self.velocities else 3,))

    def action_space(self, params: Params) -> Box | Discrete:
        """See `discrete`."""
        return Discrete(2, names=("left", "right")) if self.discrete else Box(-1.0, 1.0, (1,))

    def init(self, key: PRNGKey, params: Params) -> State:
        """The published start, which is always the same; `key` is not needed."""
        still = jnp.zeros((), jnp.float32)
        lean = jnp.asarray(params.start_angle, jnp.float32)
        return self.init_level(key, Motion(still, still, lean, still, still, still), params)

    def sample_level(self, key: PRNGKey, params: Params) -> Motion:
        """A start drawn uniformly from the box around `generalisation_starts`; consumes `key`."""
        draw = jax.random.uniform(key, (4,), jnp.float32, -1, 1) * jnp.asarray(
            LEVEL_RANGE, jnp.float32
        )
        return Motion(*draw, *jnp.zeros(2, jnp.float32))

    def init_level(self, key: PRNGKey, level: Motion, params: Params) -> State:
        """Starts from a motion; `key` is not needed."""
        motion = Motion(*(jnp.asarray(number, jnp.float32) for number in level))
        return State(
            motion, jnp.zeros((), jnp.int32), jnp.zeros(WINDOW if self.damping else 0, jnp.float32)
        )

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """0.02 s of physics under one force; deterministic."""
        share = 2.0 * action - 1 if self.discrete else jnp.clip(action[0], -1, 1)
        force = share * params.max_force
        motion = state.motion
        for _ in range(2):
            motion = rk4(lambda motion: derivative(motion, force, params), motion, params.dt)
        wobbles = state.wobbles
        if self.damping:
            wobbles = wobbles.at[state.time % WINDOW].set(wobble(motion))
        return State(motion, state.time + 1, wobbles)

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """The motion over `SCALES`, without its velocities unless `velocities`."""
        scaled = [number / scale for number, scale in zip(state.motion, SCALES, strict=True)]
        return jnp.stack(scaled if self.velocities else scaled[::2])

    def reward(self, state: State, action: Array, next_state: State, params: Params) -> Array:
        """1, or the gain in Gruau's fitness, for a step that stays in balance; 0 for the one that fails."""
        gain = jnp.ones((), jnp.float32)
        if self.damping:
            gain = damping_fitness(next_state.wobbles, next_state.time) - damping_fitness(
                state.wobbles, state.time
            )
        return jnp.where(self.terminal(next_state, params), 0, gain)

    def terminal(self, state: State, params: Params) -> Array:
        """Beyond the track or leaning too far; what is not a number has failed, too."""
        motion = state.motion
        angle = jnp.maximum(jnp.abs(motion.theta1), jnp.abs(motion.theta2))
        return ~((jnp.abs(motion.x) <= params.max_x) & (angle <= params.max_angle))

    def truncated(self, state: State, params: Params) -> Array:
        """After `max_steps`."""
        return state.time >= params.max_steps

    def render(self, state: State, params: Params) -> Array:
        """The cart between the limits of its track, its poles hinged apart to be seen; uint8 `[80, 240, 3]`."""
        motion = state.motion

        def pixel(x, y):
            return picture.to_pixels(
                jnp.stack([x, y * jnp.ones_like(x)]), (-3.0, -0.5), (3.0, 1.5), HEIGHT, WIDTH
            )

        x = jnp.asarray(motion.x, jnp.float32)
        limit = jnp.asarray(params.max_x, jnp.float32)
        image = picture.line(picture.canvas(HEIGHT, WIDTH), (0, 64), (WIDTH, 64), 1, picture.GRAY)
        for end in (-limit, limit):
            image = picture.line(image, pixel(end, -0.3), pixel(end, 0.1), 2, picture.RED)
        image = picture.rectangle(image, pixel(x - 0.3, 0.0), pixel(x + 0.3, -0.2), picture.BLACK)
        for hinge, theta, half, color in (
            (x - 0.15, motion.theta1, params.half_length1, picture.ORANGE),
            (x + 0.15, motion.theta2, params.half_length2, picture.BLUE),
        ):
            tip = pixel(hinge + 2 * half * jnp.sin(theta), 2 * half * jnp.cos(theta))
            image = picture.line(image, pixel(hinge, 0.0), tip, 4, color)
        return picture.to_uint8(image)


def derivative(motion: Motion, force: Array, params: Params) -> Motion:
    """The rate of change of `motion` under `force` (N): Wieland's equations."""
    poles = (
        (motion.theta1, motion.theta1_dot, params.half_length1, params.pole_mass1),
        (motion.theta2, motion.theta2_dot, params.half_length2, params.pole_mass2),
    )
    total_force = force - params.track_friction * jnp.sign(motion.x_dot)
    total_mass = params.cart_mass
    torques = []
    for theta, theta_dot, half, mass in poles:
        sin, cos = jnp.sin(theta), jnp.cos(theta)
        torque = params.hinge_friction * theta_dot / (mass * half) - params.gravity * sin
        total_force = total_force + mass * half * theta_dot**2 * sin + 0.75 * mass * cos * torque
        total_mass = total_mass + mass * (1 - 0.75 * cos**2)
        torques.append((cos, torque, half))
    x_ddot = total_force / total_mass
    spin1, spin2 = (-0.75 / half * (x_ddot * cos + torque) for cos, torque, half in torques)
    return Motion(motion.x_dot, x_ddot, motion.theta1_dot, spin1, motion.theta2_dot, spin2)


VARIANTS = {
    "DoublePole": DoublePole,
    "DoublePole-Discrete": lambda: DoublePole(discrete=True),
    "DoublePole-NoVelocities": lambda: DoublePole(velocities=False),
    "DoublePole-NoVelocities-Discrete": lambda: DoublePole(velocities=False, discrete=True),
    "DoublePole-NoVelocities-Damping": lambda: DoublePole(velocities=False, damping=True),
}
