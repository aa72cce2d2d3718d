"""Double-pole balancing in float64 NumPy, written as one loop over poles and four explicit stages."""

import math

import numpy as np

GRAVITY, CART, MASSES, HALVES, HINGE = -9.8, 1.0, (0.1, 0.01), (0.5, 0.05), 2e-6


def slope(y, force):
    """dy/dt of y = [x, x', theta_1, theta_1', theta_2, theta_2'], gravity negative as in Wieland's paper."""
    top, bottom = force, CART
    for i, (m, half) in enumerate(zip(MASSES, HALVES, strict=True)):
        theta, spin = y[2 + 2 * i], y[3 + 2 * i]
        top += m * half * spin * spin * math.sin(theta)
        top += 0.75 * m * math.cos(theta) * (HINGE * spin / (m * half) + GRAVITY * math.sin(theta))
        bottom += m * (1 - 0.75 * math.cos(theta) ** 2)
    out = [y[1], top / bottom]
    for i, (m, half) in enumerate(zip(MASSES, HALVES, strict=True)):
        theta, spin = y[2 + 2 * i], y[3 + 2 * i]
        pull = out[1] * math.cos(theta) + GRAVITY * math.sin(theta) + HINGE * spin / (m * half)
        out += [spin, -0.75 * pull / half]
    return np.array(out)


class DoublePoleTwin:
    """Steps from a given motion; remembers every wobble of the episode."""

    def __init__(self, velocities, discrete, damping, max_steps):
        self.velocities, self.discrete, self.damping, self.max_steps = (
            velocities,
            discrete,
            damping,
            max_steps,
        )
        self.begin()

    def begin(self):
        self.wobbles = []

    def fitness(self):
        t = len(self.wobbles)
        return 0.1 * t / 1000 + (0.9 * 0.75 / sum(self.wobbles[-100:]) if t >= 100 else 0.0)

    def step(self, y, action):
        """The next motion, observation, reward, terminated, truncated."""
        force = (
            (10.0 if action == 1 else -10.0)
            if self.discrete
            else 10.0 * float(np.clip(action[0], -1, 1))
        )
        y = np.asarray(y, np.float64)
        for _ in range(2):
            a = slope(y, force)
            b = slope(y + 0.005 * a, force)
            c = slope(y + 0.005 * b, force)
            d = slope(y + 0.01 * c, force)
            y = y + 0.01 / 6 * (a + 2 * b + 2 * c + d)
        failed = abs(y[0]) > 2.4 or abs(y[2]) > 0.628329 or abs(y[4]) > 0.628329
        earned = self.fitness()
        self.wobbles.append(sum(abs(y[:4])))
        reward = 0.0 if failed else self.fitness() - earned if self.damping else 1.0
        obs = y / np.array([4.8, 2, 0.52, 2, 0.52, 2])
        return (
            y,
            obs if self.velocities else obs[[0, 2, 4]],
            reward,
            failed,
            len(self.wobbles) >= self.max_steps,
        )
