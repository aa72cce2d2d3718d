"""ES-HyperNEAT as the paper writes it: queues, recursion, lists of connections, one CPPN at a time."""

import dataclasses
from collections import deque
from typing import Any


@dataclasses.dataclass
class Point:
    x: float
    y: float
    width: float
    level: int
    weight: float = 0.0
    children: list[Any] = dataclasses.field(default_factory=list)

    def leaves(self):
        return (
            [w for child in self.children for w in child.leaves()]
            if self.children
            else [self.weight]
        )

    def variance(self):
        if not self.children:
            return 0.0
        weights = self.leaves()
        mean = sum(weights) / len(weights)
        return sum((mean - w) ** 2 for w in weights) / len(weights)


def division(tree, cppn, a, b, outgoing):
    """Algorithm 1; a root of level 1 has children of level 2, so depths here are levels - 1."""
    root = Point(0.0, 0.0, 1.0, 1)
    queue = deque([root])
    while queue:
        p = queue.popleft()
        half = p.width / 2
        p.children = [
            Point(p.x + i * half, p.y + j * half, half, p.level + 1)
            for i in (-1, 1)
            for j in (-1, 1)
        ]
        for child in p.children:
            child.weight = (
                cppn(a, b, child.x, child.y) if outgoing else cppn(child.x, child.y, a, b)
            )
        if p.level < tree.initial_depth or (
            p.level < tree.max_depth and p.variance() > tree.division
        ):
            queue.extend(p.children)
    return root


def express(tree, cppn, a, b, p, outgoing, connections):
    """Algorithm 2."""

    def asked(x, y):
        return cppn(a, b, x, y) if outgoing else cppn(x, y, a, b)

    for c in p.children:
        if c.variance() >= tree.variance:
            express(tree, cppn, a, b, c, outgoing, connections)
            continue
        left, right = (abs(c.weight - asked(c.x + i * p.width, c.y)) for i in (-1, 1))
        top, bottom = (abs(c.weight - asked(c.x, c.y + j * p.width)) for j in (-1, 1))
        if max(min(top, bottom), min(left, right)) > tree.band:
            ends = ((a, b), (c.x, c.y)) if outgoing else ((c.x, c.y), (a, b))
            connections[ends] = c.weight * tree.largest


def discover(tree, cppn):
    """Algorithm 3: the connections by their ends, and the hidden nodes, on ways from inputs to outputs alone."""

    def of(place, outgoing):
        connections = {}
        express(tree, cppn, *place, division(tree, cppn, *place, outgoing), outgoing, connections)
        return connections

    connections = {}
    for place in tree.inputs:
        connections |= of(place, True)
    hidden = {target for _, target in connections}
    unexplored = set(hidden)
    for _ in range(tree.iterations):
        found = {}
        for place in unexplored:
            found |= of(place, True)
        connections |= found
        unexplored = {target for _, target in found} - hidden
        hidden |= unexplored
    for place in tree.outputs:
        connections |= of(place, False)
    kept = (
        hidden
        & walked(connections, tree.inputs)
        & walked({(t, s) for s, t in connections}, tree.outputs)
    )
    ends = set(tree.inputs) | kept | set(tree.outputs)
    return {(s, t): w for (s, t), w in connections.items() if s in ends and t in ends}, kept


def walked(edges, begin):
    """All that can be reached."""
    found, todo = set(), list(begin)
    while todo:
        place = todo.pop()
        new = {t for s, t in edges if s == place} - found
        found |= new
        todo += new
    return found


def apply_networks(tree, connections, hidden, act, x):
    """Outputs, node by node."""
    inputs = dict(zip(tree.inputs, x, strict=True))
    values = dict.fromkeys(hidden, 0.0)

    def node(place):
        known = inputs | values
        return act(sum(w * known[s] for (s, t), w in connections.items() if t == place))

    for _ in range(tree.sweeps or tree.iterations + 1):
        values = {place: node(place) for place in hidden}
    return [node(place) for place in tree.outputs]
