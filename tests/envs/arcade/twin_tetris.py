"""Tetris as sets of cells: each piece is told, and its way down worked out cell by cell."""

from twin_arcade import Twin

PIECES = [
    {(0, 0), (0, 1), (0, 2), (0, 3)},
    {(0, 0), (0, 1), (1, 0), (1, 1)},
    {(0, 0), (0, 1), (0, 2), (1, 1)},
    {(0, 1), (0, 2), (1, 0), (1, 1)},
    {(0, 0), (0, 1), (1, 1), (1, 2)},
    {(0, 0), (0, 1), (0, 2), (1, 0)},
    {(0, 0), (0, 1), (0, 2), (1, 2)},
]


def turned(cells):
    """A quarter clockwise, within a box at the origin."""
    height = max(y for y, _ in cells)
    return {(x, height - y) for y, x in cells}


class TetrisTwin(Twin):
    side, limit = 10, 500

    def __init__(self, full, kind, width):
        super().__init__(full)
        self.width, self.resting, self.lines = width, set(), 0
        self.enter(kind)

    def enter(self, kind):
        self.shape, self.corner = PIECES[kind], (0, (self.width - 3) // 2)

    def placed(self, shape, corner):
        return {(y + corner[0], x + corner[1]) for y, x in shape}

    def free(self, shape, corner):
        return all(
            y < 10 and 0 <= x < self.width and (y, x) not in self.resting
            for y, x in self.placed(shape, corner)
        )

    def cells(self):
        shown = {(y, x): "~" for y in range(10) for x in range(self.width, 10)}
        shown |= {(9 - i, 9): "F" for i in range(min(self.lines, 10))}
        return (
            shown
            | dict.fromkeys(self.resting, "*")
            | dict.fromkeys(self.placed(self.shape, self.corner), "@")
        )

    def veiled(self, cells):
        return {at: mark for at, mark in cells.items() if mark != "*"}

    def step(self, action, next_kind):
        self.time += 1
        y, x = self.corner
        shape, corner = {
            0: (self.shape, (y, x - 1)),
            2: (self.shape, (y, x + 1)),
            3: (turned(self.shape), (y, x)),
        }.get(action, (self.shape, (y, x)))
        if self.free(shape, corner):
            self.shape, self.corner = shape, corner
        fell = 0
        while self.free(self.shape, (self.corner[0] + 1, self.corner[1])) and (
            action == 4 or fell == 0
        ):
            self.corner, fell = (self.corner[0] + 1, self.corner[1]), fell + 1
        if fell and action != 4:
            return 0.0, False
        self.resting |= self.placed(self.shape, self.corner)
        gone, y = 0, 9
        while y >= 0:
            if all((y, x) in self.resting for x in range(self.width)):
                gone += 1
                self.resting = {(v + (v < y), x) for v, x in self.resting if v != y}
            else:
                y -= 1
        before, self.lines = self.lines, self.lines + gone
        self.enter(next_kind)
        over = not self.free(self.shape, self.corner) or self.lines >= 10
        return (min(self.lines, 10) - before) / 10, over
