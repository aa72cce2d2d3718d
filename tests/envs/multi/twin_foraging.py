"""Foraging as ordinary loops over a grid of numbers."""

STEPS = {0: (0, 0), 1: (-1, 0), 2: (1, 0), 3: (0, -1), 4: (0, 1), 5: (0, 0)}


class ForagingTwin:
    """One episode from a level that is handed in."""

    def __init__(self, size, sight, position, strength, food, weight, penalty=0.0):
        """Takes arrays; food of weight zero does not exist."""
        self.size, self.sight, self.penalty = size, sight or size, penalty
        self.players = [tuple(map(int, place)) for place in position]
        self.strength = [int(level) for level in strength]
        self.food = {
            tuple(map(int, place)): int(w) for place, w in zip(food, weight, strict=True) if w > 0
        }
        self.spawned = sum(self.food.values())
        self.slots = len(food)

    def neighbours(self, cell):
        """The four cells around."""
        return [(cell[0] + STEPS[a][0], cell[1] + STEPS[a][1]) for a in (1, 2, 3, 4)]

    def legal(self, i):
        """The actions that agent i may take."""
        allowed = [0]
        for action in (1, 2, 3, 4):
            row, column = (
                self.players[i][0] + STEPS[action][0],
                self.players[i][1] + STEPS[action][1],
            )
            if 0 <= row < self.size and 0 <= column < self.size and (row, column) not in self.food:
                allowed.append(action)
        if any(cell in self.food for cell in self.neighbours(self.players[i])):
            allowed.append(5)
        return allowed

    def step(self, actions):
        """Moves, lifts, and returns the rewards."""
        actions = [int(a) if a in self.legal(i) else 0 for i, a in enumerate(actions)]
        wanted = [
            (p[0] + STEPS[a][0], p[1] + STEPS[a][1])
            for p, a in zip(self.players, actions, strict=True)
        ]
        while True:
            clashes = [
                i
                for i, cell in enumerate(wanted)
                if wanted.count(cell) > 1 and cell != self.players[i]
            ]
            if not clashes:
                break
            for i in clashes:
                wanted[i] = self.players[i]
        rewards = [0.0] * len(actions)
        for cell, weight in list(self.food.items()):
            loaders = [
                i
                for i, a in enumerate(actions)
                if a == 5 and self.players[i] in self.neighbours(cell)
            ]
            force = sum(self.strength[i] for i in loaders)
            for i in loaders:
                done = force >= weight
                rewards[i] = (
                    self.strength[i] * weight / (force * self.spawned) if done else -self.penalty
                )
            if loaders and force >= weight:
                del self.food[cell]
        self.players = wanted
        return rewards

    def vector(self, i):
        """What agent i sees as a list of triples."""
        centre = self.players[i]
        corner = max(centre[0] - self.sight, 0), max(centre[1] - self.sight, 0)

        def seen(cell):
            return abs(cell[0] - centre[0]) <= self.sight and abs(cell[1] - centre[1]) <= self.sight

        def pad(triples, count):
            return triples + [(-1, -1, 0)] * (count - len(triples))

        food = [
            (r - corner[0], c - corner[1], self.food[r, c])
            for r, c in sorted(self.food)
            if seen((r, c))
        ]
        order = [i] + [j for j in range(len(self.players)) if j != i]
        players = [
            (self.players[j][0] - corner[0], self.players[j][1] - corner[1], self.strength[j])
            for j in order
            if seen(self.players[j])
        ]
        return sum(pad(food, self.slots) + pad(players, len(self.players)), ())

    def grid(self, i):
        """What agent i sees as three lists of rows: agents, food, where one could stand."""
        span = range(-self.sight, self.sight + 1)
        layers = [[[0] * len(span) for _ in span] for _ in range(3)]
        for a, down in enumerate(span):
            for b, right in enumerate(span):
                cell = self.players[i][0] + down, self.players[i][1] + right
                if cell in self.players:
                    layers[0][a][b] = self.strength[self.players.index(cell)]
                layers[1][a][b] = self.food.get(cell, 0)
                inside = 0 <= cell[0] < self.size and 0 <= cell[1] < self.size
                layers[2][a][b] = int(inside and cell not in self.players and cell not in self.food)
        return layers
