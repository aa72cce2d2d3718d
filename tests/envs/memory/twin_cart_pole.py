"""CartPole in float64 NumPy, one step from a given motion, and the seen part of it."""

import math

import numpy as np


class CartPoleTwin:
    def __init__(self, seen, max_steps):
        self.seen, self.max_steps = list(seen), max_steps

    def step(self, motion, action):
        """The next motion, what is seen of it, terminated."""
        x, v, angle, spin = (float(number) for number in motion)
        push = 10.0 if action == 1 else -10.0
        sin, cos = math.sin(angle), math.cos(angle)
        shared = (push + 0.1 * 0.5 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * shared) / (0.5 * (4 / 3 - 0.1 * cos * cos / 1.1))
        move = shared - 0.1 * 0.5 * turn * cos / 1.1
        motion = np.array([x + 0.02 * v, v + 0.02 * move, angle + 0.02 * spin, spin + 0.02 * turn])
        return motion, motion[self.seen], abs(motion[0]) > 2.4 or abs(motion[2]) > math.radians(12)
