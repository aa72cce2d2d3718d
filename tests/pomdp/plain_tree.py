"""A slow tree of dictionaries, grown from recorded simulations, and the recorder."""

import dataclasses
import math

import jax
import numpy as np
from jax.experimental import io_callback

from jaxpar.pomdp.planners.vopp import Vopp

LOG = []


def note(name, **arrays):
    io_callback(
        lambda **got: LOG.append((name, {k: np.asarray(v) for k, v in got.items()})),
        None,
        ordered=True,
        **arrays,
    )


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A back end that writes down what it is asked."""

    inner: object

    def empty(self, num_nodes, num_edges):
        return self.inner.empty(num_nodes, num_edges)

    def links(self, table):
        return self.inner.links(table)

    def find(self, table, edges, keys, wanted, count, capacity):
        note("find", keys=keys, wanted=wanted)
        return self.inner.find(table, edges, keys, wanted, count, capacity)


@dataclasses.dataclass(frozen=True)
class RecordedVopp(Vopp):
    """A planner that writes down its choices."""

    def select(self, key, tree, simulations, legal):
        actions = super().select(key, tree, simulations, legal)
        note("select", actions=actions, live=simulations.live, legal=legal)
        return actions

    def back_up(self, tree, children, path, depth, discount):
        note("path", rewards=path.rewards, leaf=path.leaf, depth=depth)
        return super().back_up(tree, children, path, depth, discount)


def recorded(planner, env, params, belief, key):
    LOG.clear()
    search = jax.jit(planner.search, static_argnums=1)(key, env, params, belief)
    jax.block_until_ready(search)
    jax.effects_barrier()
    return search.tree, list(LOG)


class PlainTree:
    """Nodes by history, a tuple (a, o, a, o, ...); edges by history + action."""

    def __init__(self, planner, discount):
        self.planner, self.eta, self.discount, self.n = (
            planner,
            planner.eta,
            discount,
            planner.num_simulations,
        )
        self.legal, self.moved = {}, set()
        self.nodes, self.edges = (
            {(): [0, 0.0, 0, 0.0]},
            {},
        )  # visits, leaf sum, leaf visits, V; visits, R, psi, Q

    def replay(self, log):
        histories, levels, seen = [()] * self.n, [], []
        for name, row in log:
            if name == "select":
                if not seen:
                    for i in range(self.n):
                        self.nodes[()][0] += int(row["live"][i])
                    seen.append({()})
                levels.append([None] * self.n)
                self.choice = row
            elif name == "find":
                seen.append(set())
                for i in np.flatnonzero(self.choice["live"]):
                    self.legal[histories[i]] = int(self.choice["legal"][i].sum())
                    edge = histories[i] + (int(self.choice["actions"][i]),)
                    self.moved.add(edge)
                    self.edges.setdefault(edge, [0, 0.0, math.inf, 0.0])[0] += 1
                    levels[-1][i] = edge
                    histories[i] = None
                    if row["wanted"][i]:
                        histories[i] = edge + (int(row["keys"][i]),)
                        self.nodes.setdefault(histories[i], [0, 0.0, 0, 0.0])[0] += 1
                        seen[-1].add(histories[i])
            else:
                self.finish(row, histories, levels, seen)
                histories, levels, seen, self.moved = [()] * self.n, [], [], set()

    def finish(self, row, histories, levels, seen):
        for d, edges in enumerate(levels):
            for i, edge in enumerate(edges):
                if edge is not None:
                    self.edges[edge][1] += float(row["rewards"][d, i])
        for i, history in enumerate(histories):
            if history is not None:
                self.nodes[history][1] += float(row["leaf"][i])
                self.nodes[history][2] += 1
        for histories in reversed(seen):
            for history in histories:
                self.back_up(history)

    def back_up(self, history):
        node = self.nodes[history]
        edges = {a: self.edges[history + (a,)] for a in range(99) if history + (a,) in self.edges}
        if not edges:
            node[3] = node[1] / node[2]
            return
        for a, edge in edges.items():
            below = [
                n
                for h, n in self.nodes.items()
                if len(h) == len(history) + 2 and h[:-1] == history + (a,)
            ]
            edge[3] = (edge[1] + self.discount * sum(n[0] * n[3] for n in below)) / edge[0]
        first, others = self.start(history, node, edges)
        for edge in edges.values():
            edge[2] = first if edge[2] == math.inf else edge[2]
        level = self.soft([e[2] for e in edges.values()] + [first] * others)
        for a, edge in edges.items():
            if history + (a,) in self.moved:
                edge[2] += edge[3] - level
        node[3] = self.soft([e[2] for e in edges.values()] + [first] * others)

    def start(self, history, node, edges):
        """The first preference of an action, and how many untried actions count with it."""
        old = [e[2] for e in edges.values() if e[2] != math.inf]
        share = self.soft(old) - math.log(len(old)) / self.eta if old else 0.0
        if self.planner.unvisited == "mask" or not node[2]:
            return share, 0
        most = min(
            self.legal[history],
            math.ceil(self.planner.widen * max(node[0], 1) ** self.planner.widen_power),
        )
        most = max(most, len(edges))
        return node[1] / node[2] - math.log(most) / self.eta, most - len(edges)

    def soft(self, psi):
        top = max(psi)
        return top + math.log(sum(math.exp(self.eta * (p - top)) for p in psi)) / self.eta
