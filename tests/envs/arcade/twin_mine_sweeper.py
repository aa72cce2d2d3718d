"""MineSweeper with sets of cells, drawn as a board of characters."""


class MineSweeperTwin:
    def __init__(self, size, mines, view):
        self.size, self.view, self.time, self.last = size, view, 0, None
        self.mines = {(r, c) for r in range(size) for c in range(size) if mines[r][c]}
        self.opened = set()

    def board(self):
        """'.' closed, '+' a mine in sight, '*' one that went off, figures."""
        lines = []
        for r in range(self.size):
            for c in range(self.size):
                cell = (r, c)
                shown = cell == self.last if self.view == "partial" else cell in self.opened
                if not shown:
                    lines.append("+" if self.view == "full" and cell in self.mines else ".")
                elif cell in self.mines:
                    lines.append("*")
                else:
                    near = [(r + i, c + j) for i in (-1, 0, 1) for j in (-1, 0, 1)]
                    lines.append(str(sum(other in self.mines for other in near)))
        return "".join(lines)

    def legal(self):
        return [divmod(i, self.size) not in self.opened for i in range(self.size**2)]

    def step(self, action):
        """Reward, terminated, truncated."""
        cell, cells = divmod(action, self.size), self.size**2
        self.time, self.last = self.time + 1, cell
        if cell in self.opened:
            reward = -0.5 / cells
        else:
            reward = -0.5 if cell in self.mines else 1 / (cells - len(self.mines))
        self.opened.add(cell)
        over = bool(self.opened & self.mines) or len(self.opened | self.mines) == cells
        return reward, over, self.time >= cells
