"""Bodies: who is near whom, what each does to the others and to the ground, who dies, who is born.

Agents and robots are one list of M = N + R bodies here. What a body does lands by scatter-add, which takes memory in
proportion to M, and every amount is whole, so that no order matters. All amounts are in 1/1024 (`units.py`).
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.life.laws import Prices
from jaxpar.life.terrain import LIMIT, SHAPED, Terrain
from jaxpar.life.units import ONE, Wide, scaled, wide_sum
from jaxpar.mesh import platform
from jaxpar.types import Array, UsageError

__all__ = [
    "ACTION_WIDTHS",
    "NUM_ACTIONS",
    "SHOWN",
    "Actions",
    "action_index",
    "action_slice",
    "join_actions",
    "nearest",
    "read_actions",
]

SIGNALS = 16
ACTION_WIDTHS = {
    "move": 2,
    "push": 1,
    "eat": 1,
    "reproduce": 1,
    "hit": 1,
    "strength": 1,
    "own": SIGNALS,
    "message": SIGNALS,
    "shape": 5,
}
"""Outputs of a brain, in order: the name of each action, as `Actions` explains it, and its width."""
NUM_ACTIONS = sum(ACTION_WIDTHS.values())
"""Width of all outputs of a brain."""
SHOWN = ("move", "push", "eat", "reproduce", "hit", "shape")
"""Actions that others see in the next step, in the order of `Agents.last`."""
FAR = 2**14
"""Differences are cut at 16 cells, so that their squares can be added."""
_NOBODY = 2**30
_PAIRS = 2**20
"""Entries of the table of distances that are held at once, 4 MiB."""
# e^(-d/2) in 1/1024, d in eighths of a cell, by the square of d in quarters: beyond two cells it rounds to nothing.
FALLOFF = np.round(ONE * np.exp(-0.5 * np.sqrt(np.arange(1025) / 4))).astype(np.int32)
FALLOFF[-1] = 0


class Actions(NamedTuple):
    """What bodies do, int32: `[M]` unless said otherwise, in 1/1024, from -1 to 1.

    Attributes:
        move: `[M, 2]`.
        push: Over 0 away from oneself, below 0 towards.
        eat: From 0.
        reproduce: Over 0 wants to.
        hit: Over 0 takes energy off others, below 0 gives of one's own.
        strength: From 0, of speaking.
        own: `[M, 16]`, change of one's own message.
        message: `[M, 16]`, to others.
        shape: `[M, 5]`, change of the cell's fields.
    """

    move: Array
    push: Array
    eat: Array
    reproduce: Array
    hit: Array
    strength: Array
    own: Array
    message: Array
    shape: Array


class Neighbours(NamedTuple):
    """The k nearest of each of A bodies, nearest first, of two as near the one of the lower number.

    Attributes:
        who: int32 `[A, k]`.
        offset: int32 `[A, k, 2]`, the way there, the shorter way around the torus.
        seen: bool `[A, k]`, whether it is there and within sight.
    """

    who: Array
    offset: Array
    seen: Array


def action_slice(name: str, among: Sequence[str] = tuple(ACTION_WIDTHS)) -> slice:
    """Returns the slice that an action has of a brain's outputs, or of the outputs of the actions `among`.

    Raises:
      UsageError: No such action is among them.
    """
    if name not in among:
        raise UsageError(f"action={name!r}: there is none; expected one of {', '.join(among)}.")
    start = sum(ACTION_WIDTHS[each] for each in among[: among.index(name)])
    return slice(start, start + ACTION_WIDTHS[name])


def action_index(name: str, among: Sequence[str] = tuple(ACTION_WIDTHS)) -> int:
    """Returns the index of an action's first output, as `action_slice` counts."""
    return action_slice(name, among).start


def join_actions(parts: Mapping[str, Array]) -> Array:
    """Returns outputs `[M, 44]` from some actions by name, each `[M, width]`; others are 0.

    Raises:
      UsageError: A name belongs to no action.
    """
    for name in parts:
        action_slice(name)
    first = next(iter(parts.values()))
    columns = []
    for name, width in ACTION_WIDTHS.items():
        columns.append(parts.get(name, jnp.zeros((len(first), width), first.dtype)))
    return jnp.concatenate(columns, 1)


def read_actions(signals: Array) -> Actions:
    """A brain's outputs as signals, int32 `[M, 44]`, as actions."""
    parts = {}
    for name, width in ACTION_WIDTHS.items():
        part = signals[:, action_slice(name)]
        parts[name] = part if width > 1 else part[:, 0]
    for name in ("eat", "strength"):
        parts[name] = jnp.maximum(parts[name], 0)
    return Actions(**parts)


def nearest(
    start: Array,
    numbers: Array,
    ends: Array,
    there: Array,
    k: int,
    side: int,
    sight: int,
    rows: int = 0,
) -> Neighbours:
    """Finds the k nearest ends that are there; memory in proportion to the bodies, time to the pairs.

    Args:
        start: int32 `[A, 2]`, positions.
        numbers: int32 `[A]`, which of the ends each is itself; -1 for none.
        ends: int32 `[B, 2]`.
        there: bool `[B]`.
        k: static, at most B.
        side: static, the torus' side in 1/1024.
        sight: static, how far one sees, at most `FAR`.
        rows: static, how many rows of the table of distances are held at once; 0 for as many as fit into `_PAIRS`.
    """
    rows = rows or max(1, _PAIRS // len(ends))

    def one(row):
        position, number = row
        way = jnp.clip(jnp.mod(ends - position[None] + side // 2, side) - side // 2, -FAR, FAR)
        far = jnp.sum(way * way, -1)
        far = jnp.where(there & (jnp.arange(len(ends)) != number), far, _NOBODY)
        least, index = _least(far, k)
        return Neighbours(index, way[index], least <= sight * sight)

    if len(start) <= rows:
        return jax.vmap(one)((start, numbers))
    return jax.lax.map(one, (start, numbers), batch_size=rows)


def _least(far: Array, k: int) -> tuple[Array, Array]:
    """The k least of `[B]`, least first, of equal ones the first, and where they are.

    `top_k` sorts the row on a GPU, which takes twice as long as to look through it eight times.
    """
    if k > 8 or platform() == "cpu":
        least, index = jax.lax.top_k(-far, k)
        return -least, index
    found = []
    for _ in range(k):
        index = jnp.argmin(far)
        found.append((far[index], index.astype(jnp.int32)))
        far = jnp.where(jnp.arange(len(far)) == index, jnp.iinfo(far.dtype).max, far)
    least, index = zip(*found, strict=True)
    return jnp.stack(least), jnp.stack(index)


def all_neighbours(agents: Neighbours, machines: Neighbours, heard: Neighbours) -> Neighbours:
    """One list for all M bodies: agents' K neighbours among agents and L among robots, robots' two among all."""
    num_agents, k = len(agents.who), agents.who.shape[1] + machines.who.shape[1]
    machines = machines._replace(who=machines.who + num_agents)
    theirs = jax.tree.map(lambda *x: jnp.concatenate(x, 1), agents, machines)
    pad = lambda x: jnp.pad(x, [(0, 0), (0, k - 2), *[(0, 0)] * (x.ndim - 2)])  # noqa: E731
    return jax.tree.map(lambda x, y: jnp.concatenate((x, pad(y))), theirs, heard)


def flat_cells(position: Array, size: int) -> Array:
    """The number of each body's cell, int32 `[M]`."""
    return (position[:, 0] >> 10) * size + (position[:, 1] >> 10)


def eat(terrain: Terrain, cells: Array, eats: Array, prices: Prices) -> tuple[Terrain, Array]:
    """What each body gets, int32 `[M]`: of a cell's T = min(energy, sum of demands), floor(T demand / sum).

    A demand is a share of what the cell holds, `bite` times the mouth's opening. What rounding leaves stays there.
    """
    energy = terrain.energy.reshape(-1)
    demand = (((eats * prices.bite) >> 10) * energy[cells]) >> 10
    asked = jnp.zeros_like(energy).at[cells].add(demand)[cells]
    take = jnp.minimum(energy[cells], asked) * demand // jnp.maximum(asked, 1)
    energy = energy.at[cells].add(-take)
    return terrain._replace(energy=energy.reshape(terrain.energy.shape)), take


def costs(terrain: Terrain, cells: Array, actions: Actions, prices: Prices) -> Array:
    """The heat of actions, int32 `[M]`, never below 0: every amount counts by its size, whatever its sign."""
    _, _, move, push, message, _ = (field.reshape(-1)[cells] >> 10 for field in terrain.fields)
    of_field = lambda amount, price, cost: (((jnp.abs(amount) * price) >> 10) * cost) >> 10  # noqa: E731
    return (
        of_field(jnp.sum(jnp.abs(actions.move), 1), prices.move, move)
        + of_field(actions.push, prices.push, push)
        + of_field(actions.strength, prices.speak, message)
        + ((jnp.abs(actions.hit) * prices.hit) >> 10)
        + ((jnp.sum(jnp.abs(actions.shape), 1) * prices.shape) >> 10)
    )


def reach(near: Neighbours) -> Array:
    """How much of a body's action arrives at each neighbour, int32 `[M, k]`: e^(-d/2), d in eighths of a cell."""
    square = jnp.sum(near.offset * near.offset, -1) >> 12
    return jnp.where(near.seen, jnp.asarray(FALLOFF)[jnp.minimum(square, len(FALLOFF) - 1)], 0)


def strike(energy: Array, near: Neighbours, hit: Array) -> tuple[Array, Array]:
    """Gifts, then blows: energies and heat `[M]` after both. Who cannot pay all its gifts gives none.

    A gift moves energy to those seen; a blow turns what it takes off into heat, never more than there is.
    """
    arrives = reach(near)
    gift = (jnp.maximum(-hit, 0)[:, None] * arrives) >> 10
    pays = jnp.sum(gift, 1) <= energy
    gift = jnp.where(pays[:, None], gift, 0)
    energy = (energy - jnp.sum(gift, 1)).at[near.who].add(gift)
    blow = (jnp.maximum(hit, 0)[:, None] * arrives) >> 10
    lost = jnp.minimum(energy, jnp.zeros_like(energy).at[near.who].add(blow))
    return energy - lost, lost


def travel(position: Array, near: Neighbours, actions: Actions, prices: Prices, side: int) -> Array:
    """Where bodies are after their own steps and the pushes of others: along the way from who pushes, or against it."""
    away = near.offset * ONE
    longest = jnp.max(jnp.abs(near.offset), -1, keepdims=True)
    along = jax.lax.div(away, jnp.broadcast_to(jnp.maximum(longest, 1), away.shape))
    force = (actions.push[:, None] * reach(near))[..., None]
    shift = scaled(scaled(scaled(force, 1), along), prices.speed)
    moved = (position + scaled(actions.move, prices.speed)).at[near.who].add(shift)
    return jnp.mod(moved, side)


def shape(terrain: Terrain, cells: Array, shapes: Array, prices: Prices) -> Terrain:
    """The ground after its fields' changes, int32 `[N, 5]`, of all who stand there; no field falls below 0."""
    fields = terrain.fields.reshape(len(terrain.fields), -1)
    fields = fields.at[SHAPED, cells].add((shapes * prices.shaping).T)
    return terrain._replace(fields=jnp.clip(fields, 0, LIMIT).reshape(terrain.fields.shape))


def heat_of(*parts: Array) -> Wide:
    """The exact sum of all parts, each of M numbers."""
    return wide_sum(jnp.concatenate(parts))
