"""Trees and reports of `Despot`: the tree of scenarios as arrays, a wave's path, the report with bounds."""

from typing import NamedTuple

import flax.struct

from jaxpar.pomdp.planners.planner import PlanInfo
from jaxpar.types import Array, PRNGKey, PyTree

__all__ = ["DespotInfo"]


@flax.struct.dataclass
class DespotInfo(PlanInfo):
    """As `PlanInfo`, where `value` and `values` are the lower bounds and `preferences` the upper ones; and these.

    Attributes:
        upper: float32, the upper bound of the root; the gap to `value` is what the search left open.
        defaulted: bool, no action was shown to be better than the default policy, whose action was taken.
        inconsistent: int32, scenarios at new nodes whose upper bound lay below what the default policy earns.
    """

    upper: Array
    defaulted: Array
    inconsistent: Array


LOWER, UPPER_BOUND = range(2)
"""Columns of values: `ell` and `mu`."""
COUNT, DEFAULT = range(2)
"""Columns of what a node is born with: scenarios, `l0`; the third is U."""


@flax.struct.dataclass
class ScenarioTree:
    """N nodes and X blocks of A particles; the first K particles are the roots of the scenarios.

    Attributes:
        keys: `[K]`, of the scenarios.
        default_action: int32, what the default policy does at the root.
        legal: bool `[A]`.
        ended: float32, the share of scenarios that were over at the root.
        first: int32 `[N]`, the lowest of them, which alone writes the node's values.
        action: int32 `[N]`, of the highest upper bound.
        block: int32 `[N]`, the block whose row holds the values of the node's actions; `EMPTY` at a leaf.
        born: float32 `[N, 3]`: the node's number of scenarios, l0, and U as it was first.
        node: float32 `[N, 2]`: ell, mu.
        edge: float32 `[X, A, 2]`: the same of the node's actions.
        particle_node: int32 `[X, A]`; `EMPTY` where the scenario ended.
        particle_block: int32 `[X, A]`, where its own children are; `EMPTY` at a leaf.
        states: `[X, A, ...]`.
        visits: int32 `[A]`, scenarios that went on from the root by each action.
        num_nodes: int32.
        num_blocks: int32.
        iteration: int32, waves.
        steps: int32, of scenarios in the tree.
        overflow: int32, scenarios at leaves, or steps, for which there was no room.
        invalid: int32, rewards and bounds that were not finite.
        stranded: int32, scenarios at expanded nodes without a legal action, or of a belief without any weight.
        inconsistent: int32.
        depth: int32.
        stalled: bool, the last wave found nothing to expand, as none after it would.
    """

    keys: PRNGKey
    default_action: Array
    legal: Array
    ended: Array
    first: Array
    action: Array
    block: Array
    born: Array
    node: Array
    edge: Array
    particle_node: Array
    particle_block: Array
    states: PyTree
    visits: Array
    num_nodes: Array
    num_blocks: Array
    iteration: Array
    steps: Array
    overflow: Array
    invalid: Array
    stranded: Array
    inconsistent: Array
    depth: Array
    stalled: Array

    @property
    def is_finished(self) -> Array:
        """True where the root's bounds meet, or no wave would expand anything."""
        return self.stalled | (self.node[0, UPPER_BOUND] <= self.node[0, LOWER])


class WavePath(NamedTuple):
    """Where a wave went.

    Attributes:
        nodes: int32 `[D + 1, K]`, `EMPTY` where a scenario had stopped before.
        particle: int32 `[K]`, where it stopped.
        depth: int32 `[K]`, of it.
        grow: bool `[K]`, at a leaf to expand.
    """

    nodes: Array
    particle: Array
    depth: Array
    grow: Array
