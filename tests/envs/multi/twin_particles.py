"""Particle tasks as ordinary loops in float64, one entity after the other, stepped from a state that is handed in."""

import math

import numpy as np

DT, DAMPING, FORCE, MARGIN = 0.1, 0.25, 100.0, 0.001
PUSHES = {0: (0.0, 0.0), 1: (-1.0, 0.0), 2: (1.0, 0.0), 3: (0.0, -1.0), 4: (0.0, 1.0)}


class Disc:
    """One entity: position, velocity, radius, push, greatest speed, whether it moves and whether it is solid."""

    def __init__(
        self, position, velocity=(0.0, 0.0), size=0.05, push=5.0, speed=None, moves=True, solid=True
    ):
        """Copies everything as Python floats."""
        self.position, self.velocity = [float(x) for x in position], [float(x) for x in velocity]
        self.size, self.push, self.speed, self.moves, self.solid = size, push, speed, moves, solid

    def distance(self, other):
        """Between centres."""
        return math.hypot(
            self.position[0] - other.position[0], self.position[1] - other.position[1]
        )

    def touches(self, other):
        """Whether the discs overlap."""
        return self.distance(other) < self.size + other.size


class World:
    """Agents, then landmarks."""

    def __init__(self, agents, landmarks):
        """Takes lists of `Disc`."""
        self.agents, self.landmarks = agents, landmarks

    def step(self, actions):
        """Moves the agents by one choice or five strengths each."""
        entities = self.agents + self.landmarks
        forces = []
        for agent, action in zip(self.agents, actions, strict=True):
            if np.ndim(action):
                push = float(action[2]) - float(action[1]), float(action[4]) - float(action[3])
            else:
                push = PUSHES[int(action)]
            forces.append([agent.push * push[0] * agent.moves, agent.push * push[1] * agent.moves])
        for a, first in enumerate(entities):
            for b in range(a + 1, len(entities)):
                second = entities[b]
                distance = first.distance(second)
                if not (first.solid and second.solid) or distance == 0:
                    continue
                x = -(distance - first.size - second.size) / MARGIN
                penetration = MARGIN * (
                    x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))
                )
                for i in range(2):
                    force = (
                        FORCE * (first.position[i] - second.position[i]) / distance * penetration
                    )
                    if a < len(forces) and first.moves:
                        forces[a][i] += force
                    if b < len(forces) and second.moves:
                        forces[b][i] -= force
        for agent, force in zip(self.agents, forces, strict=True):
            if not agent.moves:
                continue
            for i in range(2):
                agent.position[i] += agent.velocity[i] * DT
                agent.velocity[i] = agent.velocity[i] * (1 - DAMPING) + force[i] * DT
            speed = math.hypot(*agent.velocity)
            if agent.speed is not None and speed > agent.speed:
                agent.velocity = [v / speed * agent.speed for v in agent.velocity]

    def away(self, me, other):
        """Where `other` is, seen from `me`."""
        return [other.position[0] - me.position[0], other.position[1] - me.position[1]]


class SpreadTwin(World):
    """Rewards and observations of spread."""

    def __init__(self, position, velocity, landmarks):
        """Takes arrays `[N, 2]`, `[N, 2]`, `[L, 2]`."""
        agents = [Disc(p, v, size=0.15) for p, v in zip(position, velocity, strict=True)]
        super().__init__(agents, [Disc(p, moves=False, solid=False) for p in landmarks])

    def rewards(self):
        """One number an agent."""
        cover = -sum(min(agent.distance(mark) for agent in self.agents) for mark in self.landmarks)
        hits = [sum(a.touches(b) for b in self.agents if b is not a) for a in self.agents]
        return [0.5 * cover - 0.5 * hit for hit in hits]

    def observations(self):
        """One list an agent."""
        rows = []
        for me in self.agents:
            row = me.velocity + me.position
            for mark in self.landmarks:
                row = row + self.away(me, mark)
            for other in self.agents:
                row = row + (self.away(me, other) if other is not me else [])
            rows.append(row + [0.0, 0.0] * (len(self.agents) - 1))
        return rows


class TagTwin(World):
    """Rewards and observations of tag."""

    def __init__(self, position, velocity, landmarks, chasers):
        """Takes arrays `[N, 2]`, `[N, 2]`, `[L, 2]`, and how many of the first agents chase."""
        self.chasers = chasers
        agents = []
        for i, (p, v) in enumerate(zip(position, velocity, strict=True)):
            size, push, speed = (0.075, 3.0, 1.0) if i < chasers else (0.05, 4.0, 1.3)
            agents.append(Disc(p, v, size, push, speed))
        super().__init__(agents, [Disc(p, size=0.2, moves=False) for p in landmarks])

    def rewards(self):
        """One number an agent."""
        chasers, prey = self.agents[: self.chasers], self.agents[self.chasers :]
        touches = [sum(p.touches(c) for c in chasers) for p in prey]
        rewards = [10.0 * sum(touches)] * len(chasers)
        for p, touched in zip(prey, touches, strict=True):
            price = 0.0
            for x in p.position:
                x = abs(x)
                price += (
                    0.0 if x < 0.9 else (x - 0.9) * 10 if x < 1 else min(math.exp(2 * x - 2), 10.0)
                )
            rewards.append(-10.0 * touched - price)
        return rewards

    def observations(self):
        """One list an agent, those of the prey two zeros longer than the original's."""
        rows = []
        for i, me in enumerate(self.agents):
            row = me.velocity + me.position
            for mark in self.landmarks:
                row = row + self.away(me, mark)
            for other in self.agents:
                row = row + (self.away(me, other) if other is not me else [])
            for j, other in enumerate(self.agents):
                row = row + (other.velocity if j >= self.chasers and j != i else [])
            rows.append(row + ([0.0, 0.0] if i >= self.chasers else []))
        return rows


class TalkTwin(World):
    """Rewards and observations of speaker and listener."""

    def __init__(self, position, velocity, landmarks, goal):
        """Takes arrays `[2, 2]`, `[2, 2]`, `[3, 2]`, and the goal's index."""
        self.goal, self.message = int(goal), [0.0, 0.0, 0.0]
        speaker, listener = (
            Disc(p, v, 0.075, solid=False) for p, v in zip(position, velocity, strict=True)
        )
        speaker.moves = False
        super().__init__(
            [speaker, listener], [Disc(p, moves=False, solid=False) for p in landmarks]
        )

    def step(self, actions):
        """Speaks, then moves."""
        word = actions[0]
        self.message = (
            [float(x) for x in word[:3]] if np.ndim(word) else [float(word == i) for i in range(3)]
        )
        super().step(actions)

    def rewards(self):
        """The same for both."""
        return [-(self.agents[1].distance(self.landmarks[self.goal]) ** 2)] * 2

    def observations(self):
        """The speaker's colour and zeros; the listener's view."""
        listener = self.agents[1]
        row = list(listener.velocity)
        for mark in self.landmarks:
            row = row + self.away(listener, mark)
        return [
            [0.65 if i == self.goal else 0.15 for i in range(3)] + [0.0] * 8,
            row + self.message,
        ]
