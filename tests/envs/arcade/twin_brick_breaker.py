"""BrickBreaker as a picture of characters that is redrawn each step."""

HEIGHT, WIDTH = 11, 10


class BrickBreakerTwin:
    def __init__(self, x, dx, full, max_steps):
        self.ball, self.way, self.paddle, self.time = (4, x), (1, dx), 5, 0
        self.full, self.max_steps = full, max_steps
        self.bricks = {(y, x) for y in (1, 2, 3) for x in range(WIDTH)}

    def next_cell(self):
        """Where the ball goes, with its mirrored way."""
        (y, x), (dy, dx) = self.ball, self.way
        if not 0 <= x + dx < WIDTH:
            dx = -dx
        if y == 0 and dy == -1:
            dy = 1
        return (y + dy, x + dx), (dy, dx)

    def board(self):
        """Rows of pairs: what is there, and whether the dot is."""
        aim, _ = self.next_cell()
        out = []
        for y in range(HEIGHT):
            for x in range(WIDTH):
                mark = "123"[y - 1] if (y, x) in self.bricks else " "
                mark = "=" if y == HEIGHT - 1 and abs(x - self.paddle) < 2 else mark
                mark = "o" if (y, x) == self.ball else mark
                if not self.full and 6 <= y <= 8:
                    mark = "~"
                out.append(mark + ("." if self.full and (y, x) == aim else " "))
        return "".join(out)

    def step(self, action):
        """Reward, terminated, truncated."""
        self.time += 1
        self.paddle = min(WIDTH - 1, max(0, self.paddle + action - 1))
        cell, (dy, dx) = self.next_cell()
        reward = 0.0
        if cell in self.bricks:
            self.bricks.remove(cell)
            reward, self.way = 1 / 30, (-dy, dx)
        elif cell[0] == HEIGHT - 1 and abs(cell[1] - self.paddle) <= 1:
            self.ball, self.way = (HEIGHT - 2, cell[1]), (-1, cell[1] - self.paddle)
        else:
            self.ball, self.way = cell, (dy, dx)
        return reward, self.ball[0] == HEIGHT - 1 or not self.bricks, self.time >= self.max_steps
