"""A slow DESPOT of objects, one scenario and one path after another, from the same keys as the tensors."""

import functools

import jax
import numpy as np
from fast import jit

from jaxpar.env import step


class Node:
    def __init__(self, scenarios, depth, parent=None):
        self.scenarios, self.depth, self.parent, self.actions = scenarios, depth, parent, {}


class PlainDespot:
    """Nodes hold `{scenario: state}`; `actions[a]` is `(rho, {observation: node})`."""

    def __init__(self, planner, env, params, keys, states, discount):
        self.planner, self.env, self.params, self.keys, self.discount = (
            planner,
            env,
            params,
            keys,
            discount,
        )
        self.count = len(keys)
        states = [jax.tree.map(lambda x, i=i: x[i], states) for i in range(self.count)]
        self.moved = jit(
            lambda key, d, state, action: step(
                jax.random.split(jax.random.fold_in(key, d))[0], env, state, action, params
            )
        )
        self.move = functools.cache(self._move)
        heuristic, mask = (
            jit(lambda state, part=part: part(state, params)) for part in self.parts()
        )
        self.heuristic = functools.cache(lambda name: float(heuristic(self.states[name])))
        self.mask = functools.cache(lambda name: np.asarray(mask(self.states[name])))
        self.states = {}
        root = {
            i: self.named(state)
            for i, state in enumerate(states)
            if not bool(env.terminal(state, params))
        }
        self.root = self.value(Node(root, 0))

    def named(self, state):
        name = tuple(np.asarray(x).tobytes() for x in jax.tree.leaves(state))
        self.states[name] = state
        return name

    def _move(self, scenario, depth, name, action):
        result = self.moved(self.keys[scenario], depth, self.states[name], np.int32(action))
        key = (
            self.env.obs_key(result.obs, self.params)
            if hasattr(self.env, "obs_key")
            else result.obs
        )
        return self.named(result.state), int(key), float(result.reward), bool(result.terminated)

    def default_return(self, scenario, depth, name):
        total, weight = 0.0, 1.0
        while depth < self.planner.max_depth:
            name, _, reward, over = self.move(scenario, depth, name, self.planner.default)
            total, weight, depth = total + weight * reward, weight * self.discount, depth + 1
            if over:
                return total
        return total + (weight * self.heuristic(name) if self.planner.leaf == "heuristic" else 0.0)

    def parts(self):
        """The environment's optional parts, or what they are without."""
        everything = np.ones(self.env.action_space(self.params).n, bool)
        yield getattr(self.env, "heuristic", lambda state, params: 0.0)
        yield getattr(self.env, "action_mask", lambda state, params: everything)

    def upper_bound(self, depth, name):
        if self.planner.upper == "heuristic":
            return self.heuristic(name)
        return self.planner.max_reward * sum(
            self.discount**t for t in range(self.planner.max_depth - depth)
        )

    def value(self, node):
        weight = self.discount**node.depth / self.count
        node.default = weight * sum(
            self.default_return(i, node.depth, s) for i, s in node.scenarios.items()
        )
        node.utility = node.default
        if node.depth < self.planner.max_depth:
            bound = weight * sum(self.upper_bound(node.depth, s) for s in node.scenarios.values())
            node.utility = max(bound, node.default)
        node.lower, node.upper = (
            node.default,
            max(node.default, node.utility - self.planner.regularization),
        )
        return node

    def legal(self, node):
        return np.flatnonzero(
            np.all([self.mask(name) for name in node.scenarios.values()], axis=0)
        ).tolist()

    def expand(self, node):
        weight = self.discount**node.depth / self.count
        for action in self.legal(node):
            gain, groups = -self.planner.regularization, {}
            for i, name in node.scenarios.items():
                following, key, reward, over = self.move(i, node.depth, name, action)
                gain += weight * reward
                if not over:
                    groups.setdefault(key, {})[i] = following
            below = {
                key: self.value(Node(group, node.depth + 1, node)) for key, group in groups.items()
            }
            node.actions[action] = (gain, below)

    def edge(self, node, action, kind):
        gain, below = node.actions[action]
        gain += self.planner.regularization if kind == "utility" else 0.0
        return gain + sum(getattr(child, kind) for child in below.values())

    def excess(self, node, gap):
        return (
            node.upper
            - node.lower
            - len(node.scenarios) / self.count * self.planner.gap_ratio * gap
        )

    def is_cut(self, node):
        price, above = self.planner.regularization, node.parent
        while price > 0 and above is not None:
            if above.utility - above.default <= price * (node.depth - above.depth):
                return True
            above = above.parent
        return False

    def wave(self, choose):
        """One wave, or one trial; `choose(node)` says which action has the highest upper bound."""
        gap = self.root.upper - self.root.lower
        ends, pending = [], [self.root]
        while pending and gap > 1e-6:
            node = pending.pop()
            assert not self.is_cut(node), "the published rule would cut what the walk reaches"
            if self.excess(node, gap) > 0 and node.depth < self.planner.max_depth:
                if not node.actions:
                    ends.append(node)
                    continue
                children = list(node.actions[choose(node)][1].values())
                if not self.planner.wide and children:
                    children = [
                        max(
                            children,
                            key=lambda child: (self.excess(child, gap), -min(child.scenarios)),
                        )
                    ]
                pending += children
        for node in ends:
            self.expand(node)
        for node in sorted(
            {id(n): n for end in ends for n in self.lineage(end)}.values(), key=lambda n: -n.depth
        ):
            if node.actions:
                for kind in ("lower", "upper", "utility"):
                    setattr(
                        node,
                        kind,
                        max(node.default, *(self.edge(node, a, kind) for a in node.actions)),
                    )

    def lineage(self, node):
        while node is not None:
            yield node
            node = node.parent
