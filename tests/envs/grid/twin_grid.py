"""MiniGrid's rules written as ordinary loops over lists, from its paper and documentation."""

import numpy as np

from envs.grid import tiles

THINGS = (tiles.KEY, tiles.BALL, tiles.SQUARE, tiles.PYRAMID, tiles.HEXAGON, tiles.STAR)
SHUT = (tiles.WALL, tiles.CLOSED, tiles.LOCKED)
STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))  # row and column, to the right, down, left, up
EMPTY, BORDER = (tiles.FLOOR, 0), (tiles.WALL, 6)


class SceneTwin:
    """A map as lists of (tile, colour), an agent, and what it holds (None or such a pair)."""

    def __init__(self, scene):
        grid = np.asarray(scene.grid)
        self.grid = [[(int(byte) // 16, int(byte) % 16) for byte in row] for row in grid]
        self.row, self.column = divmod(int(scene.cell), grid.shape[1])
        self.direction = int(scene.direction)
        held = int(scene.pocket)
        self.held = (held // 16, held % 16) if held else None

    def front(self):
        down, right = STEPS[self.direction]
        return self.row + down, self.column + right

    def cell(self, row, column):
        if 0 <= row < len(self.grid) and 0 <= column < len(self.grid[0]):
            return self.grid[row][column]
        return BORDER

    def step(self, action):
        """Acts; returns whether anything changed."""
        row, column = self.front()
        tile, colour = self.cell(row, column)
        if action == 0:
            self.direction = self.direction - 1 if self.direction > 0 else 3
        elif action == 1:
            self.direction = self.direction + 1 if self.direction < 3 else 0
        elif action == 2 and tile in (tiles.FLOOR, tiles.GOAL, tiles.LAVA, tiles.OPEN):
            self.row, self.column = row, column
        elif action == 3 and tile in THINGS and self.held is None:
            self.held = (tile, colour)
            self.grid[row][column] = EMPTY
        elif action == 4 and (tile, colour) == EMPTY and self.held is not None:
            self.grid[row][column] = self.held
            self.held = None
        elif action == 5 and tile == tiles.OPEN:
            self.grid[row][column] = (tiles.CLOSED, colour)
        elif action == 5 and (
            tile == tiles.CLOSED or (tile == tiles.LOCKED and self.held == (tiles.KEY, colour))
        ):
            self.grid[row][column] = (tiles.OPEN, colour)
        else:
            return False
        return True

    def legal(self):
        """Which actions change anything, by trying each on a copy."""
        mask = []
        for action in range(6):
            twin = object.__new__(type(self))
            twin.__dict__.update(self.__dict__, grid=[list(row) for row in self.grid])
            mask.append(twin.step(action))
        return mask

    def view(self, size, see_through):
        """The view, cell by cell, and MiniGrid's light, row by row."""
        seen = [[EMPTY] * size for _ in range(size)]
        for i in range(size):
            for j in range(size):
                forward, aside = size - 1 - i, j - size // 2
                down, right = STEPS[self.direction]
                row = self.row + forward * down + aside * right
                column = self.column + forward * right - aside * down
                seen[i][j] = self.cell(row, column)
        lit = [[see_through] * size for _ in range(size)]
        lit[size - 1][size // 2] = True
        if not see_through:
            for i in range(size - 1, -1, -1):
                for columns, side in ((range(size - 1), 1), (range(size - 1, 0, -1), -1)):
                    for j in columns:
                        if lit[i][j] and seen[i][j][0] not in SHUT:
                            lit[i][j + side] = True
                            if i > 0:
                                lit[i - 1][j] = lit[i - 1][j + side] = True
        for i in range(size):
            for j in range(size):
                if not lit[i][j]:
                    seen[i][j] = (tiles.NOTHING, 0)
        seen[size - 1][size // 2] = self.held or EMPTY
        return np.array(seen, np.uint8)

    def whole(self):
        seen = np.array(self.grid, np.uint8)
        if self.held:
            seen[0, 0] = self.held
        seen[self.row, self.column] = (tiles.AGENT, self.direction)
        return seen


class GridTwin:
    """A level of `envs.grid.rooms` under its clock."""

    def __init__(self, state, env, max_steps):
        self.scene = SceneTwin(state.level.scene)
        self.win, self.lose = int(state.level.win), int(state.level.lose)
        self.time, self.env, self.max_steps = int(state.time), env, max_steps

    def legal(self):
        mask = self.scene.legal()
        mask[3] &= self.env.layout.picks
        return mask

    def step(self, action):
        """Observation, reward, terminated, truncated."""
        self.time += 1
        if action != 3 or self.env.layout.picks:
            self.scene.step(action)
        here = self.scene.row * len(self.scene.grid[0]) + self.scene.column
        reward = 1 - 0.9 * (self.time / self.max_steps) if here == self.win else 0.0
        ended = (
            here in (self.win, self.lose)
            or self.scene.grid[self.scene.row][self.scene.column][0] == tiles.LAVA
        )
        return self.observe(), reward, ended, self.time >= self.max_steps

    def observe(self):
        return (
            self.scene.view(self.env.view, self.env.see_through)
            if self.env.view
            else self.scene.whole()
        )
