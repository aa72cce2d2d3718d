"""Swing-up by 200 midpoint steps where the environment makes one of order 4, point mass in closed form; float64."""

import math

import numpy as np


class PendulumTwin:
    def step(self, theta, spin, action):
        u = 2.0 * min(1.0, max(-1.0, float(action[0])))

        def pull(theta, spin):
            return 9.81 * math.sin(theta) - 0.05 * spin + u

        theta, spin, h = float(theta), float(spin), 0.05 / 200
        for _ in range(200):
            half_theta, half_spin = theta + h / 2 * spin, spin + h / 2 * pull(theta, spin)
            theta, spin = theta + h * half_spin, spin + h * pull(half_theta, half_spin)
        reward = math.cos(theta) - 1 - 0.05 * spin**2 - 0.005 * u**2
        return theta, spin, [math.cos(theta), math.sin(theta), spin], reward


class PointTwin:
    def step(self, position, velocity, goal, action):
        """Exact: a linear equation under a constant force."""
        position, velocity = np.asarray(position, float), np.asarray(velocity, float)
        force, drag, h = np.clip(np.asarray(action, float), -1, 1), 0.1, 0.1
        final = force / drag
        decay = math.exp(-drag * h)
        position = position + final * h + (velocity - final) * (1 - decay) / drag
        velocity = final + (velocity - final) * decay
        away = position - np.asarray(goal, float)
        reward = -(away @ away + 0.1 * velocity @ velocity + 0.1 * force @ force)
        return position, velocity, np.concatenate([-away, velocity]), reward
