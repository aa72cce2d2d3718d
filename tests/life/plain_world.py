"""A world's step in plain Python, one inhabitant after the other: what `World` must equal, number by number.

Python's integers have no end, so nothing here can overflow unseen. Brains and draws of random
numbers are given.
"""

import math

import numpy as np

ONE, FAR = 1024, 2**14


def toward_zero(a, b):
    """a / b, rounded towards zero."""
    return int(math.copysign(abs(a) // abs(b), a * b)) if a else 0


def falloff(way):
    """e^(-d/2) in 1/1024, d in eighths of a cell, its square in quarters."""
    square = (way[0] ** 2 + way[1] ** 2) >> 12
    return 0 if square >= 1024 else round(ONE * math.exp(-0.5 * math.sqrt(square / 4)))


class PlainWorld:
    """The state as lists of Python's integers, and one step of it."""

    def __init__(self, world, state):
        agents, robots, ground = state.agents, state.robots, state.terrain
        self.world, self.price = world, world.laws.prices()
        self.alive = [bool(x) for x in agents.alive]
        self.energy = [int(x) for x in agents.energy] + [int(x) for x in robots.energy]
        self.age = [int(x) for x in agents.age]
        self.place = [[int(x) for x in row] for row in (*agents.position, *robots.position)]
        self.kind, self.own, self.spoken, self.heard, self.last = (
            np.asarray(x).astype(object)
            for x in (agents.kind, agents.own, agents.spoken, agents.heard, agents.last)
        )
        self.lineage = [int(x) for x in agents.lineage]
        self.memory = np.asarray(robots.memory).astype(object)
        self.program = np.asarray(robots.program).astype(object)
        self.cells = np.asarray(ground.energy).astype(object)
        self.fields = np.asarray(ground.fields).astype(object)
        self.bit = np.asarray(ground.bit).astype(object)

    def cell(self, body):
        return self.place[body][0] // ONE, self.place[body][1] // ONE

    def way(self, start, end):
        side = self.world.side
        ways = [
            (self.place[end][i] - self.place[start][i] + side // 2) % side - side // 2
            for i in (0, 1)
        ]
        return [max(-FAR, min(FAR, x)) for x in ways]

    def neighbours(self, body, others, k):
        """The k nearest that are within sight: pairs of body and way, nearest first."""
        n, sight = self.world.num_agents, min(self.world.sight * ONE, FAR)
        rows = []
        for other in others:
            if other != body and (other >= n or self.alive[other]):
                way = self.way(body, other)
                square = way[0] ** 2 + way[1] ** 2
                if square <= sight**2:
                    rows.append((square, other, way))
        return [(other, way) for _, other, way in sorted(rows)[:k]]

    def look(self):
        w, n = self.world, self.world.num_agents
        robots = range(n, n + w.num_robots)
        self.agents_near = [self.neighbours(i, range(n), w.seen_agents) for i in range(n)]
        self.robots_near = [self.neighbours(i, robots, w.seen_robots) for i in range(n)]
        self.robots_hear = [self.neighbours(j, range(n + w.num_robots), 2) for j in robots]

    def sight(self, i):
        """What agent i sees: ground, agents, robots, own; floats."""
        w, n, half = self.world, self.world.num_agents, self.world.window // 2
        ground = []
        for dx in range(-half, half + 1):
            for dy in range(-half, half + 1):
                x, y = ((c + d) % w.size for c, d in zip(self.cell(i), (dx, dy), strict=True))
                ground += [
                    self.cells[x, y],
                    *(f >> 10 for f in self.fields[:, x, y]),
                    self.bit[x, y] * ONE,
                ]
        logs = lambda j: [math.log1p(self.energy[j] / ONE), math.log1p(self.age[j])]  # noqa: E731
        signals = lambda j: [x / ONE for x in (*self.last[j], *self.kind[j], *self.own[j])]  # noqa: E731
        agents, robots = np.zeros((w.seen_agents, 40)), np.zeros((w.seen_robots, 36))
        for row, (j, way) in enumerate(self.agents_near[i]):
            agents[row] = [1, *logs(j), *(x / (8 * ONE) for x in way), *signals(j)]
        for row, (j, way) in enumerate(self.robots_near[i]):
            inside = [x / ONE for x in (*self.memory[j - n], *self.program[j - n])]
            robots[row] = [
                1,
                math.log1p(self.energy[j] / ONE),
                *(x / (8 * ONE) for x in way),
                *inside,
            ]
        own = [*logs(i), *signals(i), *(x / ONE for x in (*self.heard[i], *self.spoken[i]))]
        return [x / (8 * ONE) for x in ground], agents, robots, own

    def step(self, signals):
        """All but growth and births, of signals `[N, 44]`; returns the heat."""
        w, p, n = self.world, self.price, self.world.num_agents
        acts = np.zeros((n + w.num_robots, 44), object)
        acts[:n] = np.asarray(signals).astype(object) * np.asarray(self.alive)[:, None]
        self.compute(acts)
        for j in range(w.num_robots):
            acts[n + j, 3] = self.memory[j, 3]
            if self.energy[n + j] > 0:
                acts[n + j, :3] = self.memory[j, :3]
        everyone = range(n + w.num_robots)
        near = [self.agents_near[i] + self.robots_near[i] for i in range(n)] + self.robots_hear
        cost = [self.cost(body, acts[body]) for body in everyone]
        self.eat(acts[:, 3])
        heat = 0
        for body in everyone:
            spilled = max(self.energy[body] - p.stomach, 0)
            alive = body >= n or self.alive[body]
            spent = min(self.energy[body] - spilled, cost[body]) if alive else 0
            self.energy[body] -= spilled + spent
            heat += spilled + spent
        heat += self.strike(acts[:, 5], near)
        cells = [self.cell(i) for i in range(n)]
        self.travel(acts, near)
        for i in range(n):
            for f in range(5):
                self.fields[(f + 1, *cells[i])] += acts[i, 39 + f] * p.shaping
        self.fields = np.clip(self.fields, 0, 31 * 2**20)
        self.tell(acts)
        dead = [i for i in range(n) if self.alive[i] and self.energy[i] == 0]
        for i in range(n):
            self.age[i] += self.alive[i]
        for i in dead:
            self.alive[i] = False
        return heat

    def cost(self, body, act):
        p, price = self.price, [f[self.cell(body)] >> 10 for f in self.fields]
        parts = [
            (abs(act[0]) + abs(act[1])) * p.move // ONE * price[2] // ONE,
            abs(act[2]) * p.push // ONE * price[3] // ONE,
            max(act[6], 0) * p.speak // ONE * price[4] // ONE,
            abs(act[5]) * p.hit // ONE,
            sum(map(abs, act[39:])) * p.shape // ONE,
        ]
        return sum(parts) + (
            p.upkeep + p.aging * self.age[body] if body < self.world.num_agents else 0
        )

    def eat(self, mouths):
        guests = {}
        for body, mouth in enumerate(mouths):
            guests.setdefault(self.cell(body), []).append((body, max(mouth, 0)))
        for cell, eaters in guests.items():
            there = self.cells[cell]
            wants = [mouth * self.price.bite // ONE * there // ONE for _, mouth in eaters]
            for (body, _), want in zip(eaters, wants, strict=True):
                got = min(there, sum(wants)) * want // max(sum(wants), 1)
                self.energy[body] += got
                self.cells[cell] -= got

    def strike(self, hits, near):
        gifts, blows = [0] * len(hits), [0] * len(hits)
        for giver, hit in enumerate(hits):
            given = [(j, -hit * falloff(way) // ONE) for j, way in near[giver]] if hit < 0 else []
            if sum(x for _, x in given) <= self.energy[giver]:
                for j, x in given:
                    gifts[j] += x
                    gifts[giver] -= x
        for striker, hit in enumerate(hits):
            for j, way in near[striker] if hit > 0 else []:
                blows[j] += hit * falloff(way) // ONE
        lost = [min(e + g, b) for e, g, b in zip(self.energy, gifts, blows, strict=True)]
        self.energy = [e + g - x for e, g, x in zip(self.energy, gifts, lost, strict=True)]
        return sum(lost)

    def travel(self, acts, near):
        moved = [[x + toward_zero(a * self.price.speed, ONE) for x, a in zip(place, act[:2], strict=True)]
                 for place, act in zip(self.place, acts, strict=True)]  # fmt: skip
        for pusher, act in enumerate(acts):
            for j, way in near[pusher]:
                force, longest = toward_zero(act[2] * falloff(way), ONE), max(map(abs, way))
                for i in (0, 1):
                    along = toward_zero(way[i] * ONE, max(longest, 1))
                    moved[j][i] += toward_zero(
                        toward_zero(force * along, ONE) * self.price.speed, ONE
                    )
        self.place = [[x % self.world.side for x in place] for place in moved]

    def compute(self, acts):
        n = self.world.num_agents
        ears = [sorted(near, key=lambda pair: tuple(pair[1])) for near in self.robots_hear]
        # Whom one does not see stands far away, so it is no matter in which place it says nothing.
        for j, near in enumerate(ears):
            drawn = [(i, max(acts[i, 6], 0)) for i, _ in near if i < n]
            total = max(sum(s for _, s in drawn), ONE)
            pull = [
                sum(s * (acts[i, 23 + k] - self.program[j, k]) for i, s in drawn) for k in range(16)
            ]
            self.program[j] += [toward_zero(x, total) for x in pull]
        for _ in range(self.world.ticks):
            said = np.concatenate((acts[:n, 23:39], self.memory))
            memory, marks = self.memory.copy(), {}
            for j, near in enumerate(ears):
                first, second = ([said[i] for i, _ in near] + [np.zeros(16, object)] * 2)[:2]
                memory[j] = operate(self.memory[j], self.program[j], first, second)
                cell = self.cell(n + j)
                if memory[j, 4] > 1014:
                    memory[j, 15] = self.bit[cell] * ONE
                elif memory[j, 4] < -1014:
                    marks[cell] = max(marks.get(cell, 0), int(memory[j, 15] > 0))
            for cell, bit in marks.items():
                self.bit[cell] = bit
            self.memory = memory

    def tell(self, acts):
        n = self.world.num_agents
        self.own = np.clip(self.own + acts[:n, 7:23], -ONE, ONE)
        self.spoken = acts[:n, 23:39]
        for i in range(n):
            weights = [(j, max(acts[j, 6], 0)) for j, _ in self.agents_near[i]]
            total = max(sum(s for _, s in weights), 1)
            self.heard[i] = [
                toward_zero(sum(s * self.spoken[j, k] for j, s in weights), total)
                for k in range(16)
            ]
            eat = max(acts[i, 3], 0)
            self.last[i] = [*acts[i, :3], eat, acts[i, 4], acts[i, 5], *acts[i, 39:]]

    def bear(self, noise):
        """Births, in order of wealth: pairs of parent and child, and the fees. `noise` `[B, 8]` is of identities."""
        w, p, n = self.world, self.price, self.world.num_agents
        full = sum(self.alive) * p.fee // n
        price = [full * (self.fields[(5, *self.cell(i))] >> 10) // ONE + p.child for i in range(n)]
        wants = [
            i
            for i in range(n)
            if self.alive[i] and self.last[i, 4] > 0 and self.energy[i] > 2 * price[i]
        ]
        parents = sorted(wants, key=lambda i: (-self.energy[i], i))
        free = [i for i in range(n) if not self.alive[i]]
        pairs = list(zip(parents, free, strict=False))[: w.max_births]
        fees = 0
        for k, (parent, child) in enumerate(pairs):
            self.energy[parent] -= price[parent]
            fees += price[parent] - p.child
            self.energy[child], self.age[child], self.alive[child] = p.child, 0, True
            self.place[child], self.lineage[child] = list(self.place[parent]), self.lineage[parent]
            self.kind[child] = np.clip(self.kind[parent] + noise[k], -ONE, ONE)
            for x in (self.own, self.spoken, self.heard, self.last):
                x[child] = 0
        return pairs, fees

    def grow(self, base):
        """Growth towards base maps `[6, S, S]`: regrowth, overflow, heat."""
        regrowth = overflow = heat = 0
        rate = (self.price.relax * (base[0] >> 10)) >> 13
        self.fields = self.fields + (((base - self.fields) >> 9) * rate[None] >> 9)
        for cell in np.ndindex(*self.cells.shape):
            gain = self.fields[(1, *cell)] >> 10
            there = self.cells[cell] + gain
            spilled = max(there - (self.fields[(0, *cell)] >> 10), 0)
            gone = min(there - spilled, self.price.evaporation)
            self.cells[cell] = there - spilled - gone
            regrowth, overflow, heat = regrowth + gain, overflow + spilled, heat + gone
        return regrowth, overflow, heat


def operate(memory, program, first, second):
    """One operation of one robot."""
    choice = int(np.argmax(program[:7].astype(float)))
    product = lambda a, b: toward_zero(a * b, ONE)  # noqa: E731
    out = list(memory)
    if choice == 0:
        out = list(first)
    elif choice == 2:
        out = [product(m, a) for m, a in zip(memory, first, strict=True)]
    elif choice == 3:
        out = [product(m, a) + b for m, a, b in zip(memory, first, second, strict=True)]
    elif choice == 4:
        out = [
            m + product(b, a - 2 * product(m, a))
            for m, a, b in zip(memory, first, second, strict=True)
        ]
    elif choice == 5:
        out[15] = ONE - product(first[15], second[15])
    elif choice == 6:
        out[15] = program[7 + 4 * (first[15] > 0) + 2 * (memory[15] > 0) + (second[15] > 0)]
    return np.clip(out, -ONE, ONE)


def plain_maps(angles, size):
    """Base maps by gradient noise in floats, cell by cell, `[6, S, S]`: within rounding of those in whole numbers."""
    angles = np.asarray(angles) * (2 * np.pi / 2**32)
    count, lattice, _ = angles.shape
    per = size // lattice
    ranges = [(1.0, 8.0), (0.0, 1.5), (0.5, 2.0), (0.5, 2.0), (0.5, 2.0), (0.5, 1.5)]
    fade = lambda t: 6 * t**5 - 15 * t**4 + 10 * t**3  # noqa: E731
    out = np.zeros((count, size, size))
    for f, x, y in np.ndindex(*out.shape):
        (a, tx), (b, ty) = (divmod((c + 0.5) / per, 1) for c in (x, y))
        total = 0.0
        for i, j in np.ndindex(2, 2):
            angle = angles[f, (int(a) + i) % lattice, (int(b) + j) % lattice]
            slope = np.cos(angle) * (tx - i) + np.sin(angle) * (ty - j)
            total += slope * (fade(tx) if i else 1 - fade(tx)) * (fade(ty) if j else 1 - fade(ty))
        low, high = ranges[f]
        out[f, x, y] = low + (high - low) * (np.clip(1.5 * total, -1, 1) + 1) / 2
    return out
