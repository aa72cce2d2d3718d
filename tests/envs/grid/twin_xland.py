"""Rules, goals and trials written as ordinary loops."""

import numpy as np
from twin_grid import EMPTY, STEPS, SceneTwin


def pair(byte):
    return int(byte) // 16, int(byte) % 16


class XLandTwin:
    """A state of `envs.grid.xland` under given limits."""

    def __init__(self, state, trials, trial_steps):
        self.scene, self.begin = SceneTwin(state.scene), state.level.scene
        ruleset = state.level.ruleset
        self.rules = [(int(row[0]), *map(pair, row[1:])) for row in np.asarray(ruleset.rules)]
        self.goal = (int(ruleset.goal[0]), *map(pair, np.asarray(ruleset.goal[1:])))
        self.time, self.trial = int(state.time), int(state.trial)
        self.trials, self.trial_steps = trials, trial_steps
        self.fired = 0

    def beside(self, row, column):
        """The cells right, below, left, above."""
        return [(row + down, column + right) for down, right in STEPS]

    def matches(self, kind, a, b, action, put):
        """Where `kind` holds after `action`: "pocket", cells beside the agent, or the (one) cell beside `put`."""
        scene = self.scene
        if kind == 1:
            return ["pocket"] if action == 3 and scene.held == a else []
        if 2 <= kind <= 6 and action == 2:
            sides = enumerate(self.beside(scene.row, scene.column))
            return [
                cell for side, cell in sides if kind in (2, 3 + side) and scene.cell(*cell) == a
            ]
        if kind >= 7 and action == 4:
            for side, cell in enumerate(self.beside(*put)):
                here, there = scene.cell(*put), scene.cell(*cell)
                if here == a and there == b and kind in (7, 8 + side):
                    return [cell]
                if here == b and there == a and kind in (7, 8 + (side + 2) % 4):
                    return [cell]
        return []

    def act(self, action):
        """One action and the rules; whether the goal is reached."""
        put = self.scene.front()
        if not self.scene.step(action):
            return False
        for kind, a, b, c in self.rules:
            for place in self.matches(kind, a, b, action, put):
                self.fired += 1
                if place == "pocket":
                    self.scene.held = c
                    continue
                self.scene.grid[place[0]][place[1]] = c
                if kind >= 7:
                    self.scene.grid[put[0]][put[1]] = EMPTY
        return bool(self.matches(*self.goal, action, put))

    def step(self, action):
        """Reward, whether the episode ended."""
        won = self.act(action)
        self.time += 1
        reward = 1 - 0.9 * self.time / self.trial_steps if won else 0.0
        if won or self.time == self.trial_steps:
            self.scene, self.time, self.trial = SceneTwin(self.begin), 0, self.trial + 1
        return reward, self.trial == self.trials
