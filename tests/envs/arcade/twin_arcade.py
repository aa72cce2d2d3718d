"""The four small arcade games as dictionaries from cells to characters, redrawn each step."""


class Twin:
    """What all have: a clock, and a board of characters; rows and columns from the upper left."""

    side, limit = 8, 1000

    def __init__(self, full):
        self.full, self.time = full, 0

    def board(self):
        cells = self.cells()
        if not self.full:
            cells = self.veiled(cells)
        return "".join(cells.get((y, x), " ") for y in range(self.side) for x in range(self.side))

    def curtain(self, cells, rows):
        return {at: mark for at, mark in cells.items() if at[0] not in rows} | {
            (y, x): "~" for y in rows for x in range(self.side)
        }

    def slid(self, action):
        self.player = min(self.side - 1, max(0, self.player + action - 1))


class CatcherTwin(Twin):
    def __init__(self, full, column):
        super().__init__(full)
        self.fruit, self.player, self.fallen = (0, column), 4, 0

    def cells(self):
        return {self.fruit: "*", (7, self.player): "@"}

    def veiled(self, cells):
        return self.curtain(cells, range(2, 7))

    def step(self, action, next_column):
        self.time += 1
        self.slid(action)
        row, column = self.fruit
        if row + 1 < 7:
            self.fruit = row + 1, column
            return 0.0, False
        self.fruit, self.fallen = (0, next_column), self.fallen + 1
        return (0.2 if column == self.player else -0.2), self.fallen == 5


class SkittlesTwin(Twin):
    limit = 64

    def __init__(self, full):
        super().__init__(full)
        self.rocks, self.player = set(), 4

    def cells(self):
        return {rock: "*" for rock in self.rocks} | {(7, self.player): "@"}

    def veiled(self, cells):
        return self.curtain(cells, (5, 6))

    def step(self, action, new_columns):
        self.time += 1
        self.slid(action)
        self.rocks = {(y + 1, x) for y, x in self.rocks if y < 7} | {(0, x) for x in new_columns}
        hit = (7, self.player) in self.rocks
        return (0.0 if hit else 1 / 64), hit


class NavigatorTwin(Twin):
    side, limit = 6, 30

    def __init__(self, full, player, goal, pits):
        super().__init__(full)
        self.player, self.goal, self.pits = player, goal, pits

    def cells(self):
        return {pit: "o" for pit in self.pits} | {self.goal: "F"} | {self.player: "@"}

    def veiled(self, cells):
        return cells if self.time == 0 else {self.player: "@"}

    def step(self, action, _):
        self.time += 1
        dy, dx = {0: (-1, 0), 1: (1, 0), 2: (0, -1), 3: (0, 1)}[action]
        there = self.player[0] + dy, self.player[1] + dx
        if all(0 <= z < 6 for z in there):
            self.player = there
        return float(self.player == self.goal) - (self.player in self.pits), self.player in {
            self.goal,
            *self.pits,
        }


class BattleShipTwin(Twin):
    side, limit = 6, 36

    def __init__(self, full, ships):
        super().__init__(full)
        self.ships, self.shots = ships, []

    def cells(self):
        return {ship: "#" for ship in self.ships} | {
            at: "x" if at in self.ships else "." for at in self.shots
        }

    def veiled(self, cells):
        return {at: cells[at] for at in self.shots[-1:]}

    def legal(self):
        return [(y, x) not in self.shots for y in range(6) for x in range(6)]

    def step(self, action, _):
        self.time += 1
        at = divmod(action, 6)
        hit = at in self.ships and at not in self.shots
        self.shots.append(at)
        return (0.2 if hit else -1 / 31), self.ships <= set(self.shots)
