"""A slow tree for observation widening, grown from recorded moves, and a problem whose observations never repeat."""

import dataclasses
import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from fast import jit
from plain_tree import LOG, note

from jaxpar.env import Box, Discrete
from jaxpar.pomdp.planners.pft import Pft
from jaxpar.pomdp.planners.pomcpow import Pomcpow


@flax.struct.dataclass
class LineParams:
    noise: Any = 0.6
    discount: Any = 0.9


@dataclasses.dataclass(frozen=True)
class Line:
    """Walk left, stay or right on a line, seen through noise; being far from 0 costs, and beyond 3 the episode ends."""

    name = "Line"

    @property
    def default_params(self):
        return LineParams()

    def observation_space(self, params):
        return Box(-jnp.inf, jnp.inf, ())

    def action_space(self, params):
        return Discrete(3)

    def init(self, key, params):
        return jax.random.uniform(key, (), minval=-2.0, maxval=2.0)

    def transition(self, key, state, action, params):
        return state + action - 1 + 0.3 * jax.random.normal(key)

    def observe(self, key, state, action, params):
        return state + params.noise * jax.random.normal(key)

    def log_likelihood(self, obs, state, action, next_state, params):
        return -0.5 * ((obs - next_state) / params.noise) ** 2 - jnp.log(params.noise)

    def reward(self, state, action, next_state, params):
        return -jnp.abs(next_state)

    def terminal(self, state, params):
        return jnp.abs(state) > 3

    def heuristic(self, state, params):
        return -jnp.abs(state)


def noted(moved, simulations, descent, reward, goes):
    note(
        "move",
        live=simulations.live,
        node=descent.node,
        edge=descent.edge,
        child=descent.child,
        action=descent.action,
        fresh=descent.fresh,
        before=simulations.states,
        after=descent.result.state,
        obs=descent.result.obs,
        over=descent.result.terminated,
        moved=moved,
        reward=reward,
        goes=goes,
    )


@dataclasses.dataclass(frozen=True)
class RecordedNodes:
    """A part that writes down what another does."""

    inner: object

    def has_ended(self, descent, is_keyed):
        return self.inner.has_ended(descent, is_keyed)

    def visit(self, key, batch, state, descent):
        out = self.inner.visit(key, batch, state, descent)
        noted(out[1], state.simulations, descent, out[2], out[3])
        return out

    def fill(self, key, batch, state):
        state, waiting = self.inner.fill(key, batch, state)
        note("end", states=state.simulations.states, waiting=waiting, rewards=state.path.rewards)
        return state, waiting


@dataclasses.dataclass(frozen=True)
class RecordedPft(Pft):
    def expansion(self):
        return RecordedNodes(super().expansion())


@dataclasses.dataclass(frozen=True)
class RecordedPomcpow(Pomcpow):
    def expansion(self):
        return RecordedNodes(super().expansion())


def recorded(planner, env, params, belief, key):
    LOG.clear()
    found = jit(planner.search, static_argnums=1)(key, env, params, belief)
    jax.block_until_ready(found)
    jax.effects_barrier()
    return found, list(LOG)


class PlainNode:
    def __init__(self):
        self.visits, self.edges, self.held, self.obs, self.guesses = 0, {}, [], None, []


class PlainEdge:
    def __init__(self):
        self.visits, self.returns, self.rewards, self.children, self.drawn = 0, [], [], [], 0


class PlainWidening:
    """Nodes by their id in the tensors; what may be new follows the published rule, one visit after another."""

    def __init__(self, planner, env, params, discount, beliefs):
        self.planner, self.env, self.params, self.discount = planner, env, params, discount
        self.nodes, self.rewards = {0: PlainNode()}, np.asarray(beliefs.reward)
        self.likelihood = jit(lambda *row: env.log_likelihood(*row, params))

    def replay(self, log):
        walks = [[] for _ in range(self.planner.num_simulations)]
        for name, row in log:
            if name == "move":
                if not any(walks):
                    self.nodes[0].visits += int(row["live"].sum())
                for i in np.flatnonzero(row["live"]):
                    self.move(i, row, walks[i])
                self.arrivals(row)
            else:
                for i, walk in enumerate(walks):
                    self.back_up(walk, row, i)
                walks = [[] for _ in walks]

    def move(self, i, row, walk):
        node, action = self.nodes[int(row["node"][i])], int(row["action"][i])
        if self.planner.num_simulations == 1:
            self.check_choice(node, action)
        edge = node.edges.setdefault(action, PlainEdge())
        child, ends = (
            int(row["child"][i]),
            bool(row["over"][i]) and isinstance(self.planner, Pomcpow),
        )
        if self.planner.keyed is not True:
            widens = (
                edge.drawn
                <= self.planner.k_observations * edge.visits**self.planner.alpha_observations
            )
            edge.drawn += widens
            if not ends:
                known = child in edge.children
                assert known or bool(row["fresh"][i])
                assert not known or not widens or bool(row["fresh"][i]), (
                    "a slot that opens is a new node"
                )
                assert len(edge.children) - known < edge.drawn
        edge.visits += 1
        walk.append((edge, child))
        if not ends and child not in edge.children:
            edge.children.append(child)
            self.nodes[child] = PlainNode()
            self.nodes[child].obs = np.asarray(row["obs"][i])
        if not ends:
            self.nodes[child].visits += 1

    def check_choice(self, node, action):
        def bound(a):
            edge = node.edges.get(a)
            if edge is None:
                return math.inf
            bonus = math.sqrt(math.log(node.visits + 1) / edge.visits)
            return self.value(edge) + self.planner.exploration * bonus

        assert bound(action) >= max(bound(a) for a in range(3)) - 1e-3

    def arrivals(self, row):
        """States that came to the nodes of POMCPOW, weighted by the observation of the node."""
        if not isinstance(self.planner, Pomcpow):
            return
        rows = [i for i in np.flatnonzero(row["live"]) if not row["over"][i]]
        for i in rows:
            node = self.nodes[int(row["child"][i])]
            weight = self.likelihood(node.obs, row["before"][i], row["action"][i], row["after"][i])
            node.held.append((float(row["after"][i]), 0.0 if self.planner.keyed else float(weight)))
        for i in rows:
            held = dict(self.nodes[int(row["child"][i])].held)
            if row["goes"][i]:
                assert float(row["moved"][i]) in held
                np.testing.assert_allclose(row["reward"][i], -abs(row["moved"][i]), rtol=1e-5)
            else:
                assert row["moved"][i] == row["after"][i]

    def value(self, edge):
        if self.planner.backup == "mean":
            return np.mean(edge.returns)
        below = [self.nodes[child] for child in edge.children]
        future = sum(node.visits * self.worth(node) for node in below)
        return (sum(edge.rewards) + self.discount * future) / edge.visits

    def worth(self, node):
        if node.edges:
            return max(self.value(edge) for edge in node.edges.values())
        return np.mean(node.guesses) if node.guesses else 0.0

    def back_up(self, walk, row, i):
        future = -abs(float(row["states"][i])) if row["waiting"][i] else 0.0
        if row["waiting"][i]:
            (self.nodes[walk[-1][1]] if walk else self.nodes[0]).guesses.append(future)
        for d in range(len(walk) - 1, -1, -1):
            reward = float(row["rewards"][d, i])
            if not isinstance(
                self.planner, Pomcpow
            ):  # a node's reward is the mean over its filter step, made once
                np.testing.assert_allclose(reward, self.rewards[walk[d][1]], rtol=1e-5)
                assert reward < 0
            future = reward + self.discount * future
            walk[d][0].returns.append(future)
            walk[d][0].rewards.append(reward)
