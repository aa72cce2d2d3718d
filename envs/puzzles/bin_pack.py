"""Bin packing in three dimensions: put boxes into a container, one at a time, to fill as much of it as can be.

An action is a pair of a space and an item, `space * I + item`, and puts the item, which is not turned, into the lower
corner of the space. Spaces are the maximal empty boxes of what is packed (Lai and Chan, "Developing a simulated
annealing algorithm for the cutting stock problem", 1997), E slots of them; too small ones, into which the least
remaining sides do not go, are left out, since nothing fits into them ever after. Legal are items that are not packed
and that the space takes. The episode ends when none is, or with an action that the mask forbids, which costs
`illegal_cost`. The outcome is the share of the container that is filled.

A packing that is cut from the container by planes through whole boxes (`Split`) can be replayed: in the order in which
every part below a cut comes before the part above it, each item's lower corner is that of all spaces that hold it.
"""

import colorsys
import dataclasses
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env import Box, Discrete, picture
from jaxpar.fields import AtLeast, Each, OneOf, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from .given import Generator, Given, check_generator
from .rewards import REWARDS, reward_of_outcome, unless

__all__ = ["VARIANTS", "BinPack", "Level", "Split", "given"]

MOST_VOLUME = 2**30
"""Of a container: volumes are int32."""


@flax.struct.dataclass
class Level:
    """The sides of the `container`, int32 `[3]`, and of every item its `size`, int32 `[I, 3]`."""

    container: Array
    size: Array


@flax.struct.dataclass
class Params:
    """What an action that the mask forbids costs, in containers."""

    illegal_cost: Any = 1.0


@flax.struct.dataclass
class State:
    """The `level` and the packing so far.

    Attributes:
        level: what is to be packed, and into what.
        reach: int32 `[E, 6]`, a row for each space: minus its lower corner, then its upper corner, so that one space
            lies in another where none of its six numbers is greater; zeros where there is none.
        corner: int32 `[I, 3]`, the lower corner of every item; -1 where it is not packed.
        lost: bool `[]`, whether there were more spaces than E, so that some are missing from here on.
        illegal: bool `[]`, whether an illegal action ended it.
    """

    level: Level
    reach: Array
    corner: Array
    lost: Array
    illegal: Array


def check_container(sides: tuple[int, ...], num_items: int) -> None:
    """Refuses what is no container for that many items."""
    if len(sides) != 3 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise UsageError(f"a container has three sides, whole numbers over 0, not {sides}")
    volume = sides[0] * sides[1] * sides[2]
    if not num_items <= volume <= MOST_VOLUME:
        raise UsageError(
            f"the container {sides} holds {volume}, which must be from {num_items}, its items, to 2^30"
        )


@dataclasses.dataclass(frozen=True)
class Split:
    """Cuts the container into `num_items` boxes, so that all of them fill it.

    A cut takes a box with chances as of its volume, an axis with chances as of its sides, and a place in the middle
    half of that side. The default is the inside of a container of 20 feet, in centimetres.
    """

    num_items: int = field(20, AtLeast(1))
    container: tuple[int, int, int] = field((587, 233, 220), Each(AtLeast(1)))

    def __post_init__(self) -> None:
        """Refuses containers that cannot be cut so often."""
        check_fields(self)
        object.__setattr__(
            self, "container", tuple(self.container)
        )  # OmegaConf makes lists of tuples
        check_container(self.container, self.num_items)

    def __call__(self, key: PRNGKey) -> Level:
        """Draws; consumes `key`."""
        return self.packing(key)[0]

    def packing(self, key: PRNGKey) -> tuple[Level, Array]:
        """The level of `key`, and the lower corners at which its items fill the container, int32 `[I, 3]`."""
        slots = np.arange(self.num_items)[:, None]

        def cut(number, boxes):
            corner, size = boxes
            box_key, axis_key, place_key = jax.random.split(jax.random.fold_in(key, number), 3)
            volume = jnp.prod(size, axis=1)
            chances = jnp.where(volume > 1, jnp.log(volume.astype(jnp.float32)), -jnp.inf)
            which = jax.random.categorical(box_key, chances)
            sides = size[which]
            chances = jnp.where(sides > 1, jnp.log(sides.astype(jnp.float32)), -jnp.inf)
            axis = np.arange(3) == jax.random.categorical(axis_key, chances)
            side = jnp.sum(jnp.where(axis, sides, 0))
            place = jax.random.randint(place_key, (), (side + 3) // 4, 3 * side // 4 + 1)
            upper = jnp.where(axis, corner[which] + place, corner[which])
            corner = jnp.where(slots == number, upper[None], corner)
            size = jnp.where(slots == number, jnp.where(axis, side - place, sides)[None], size)
            return corner, jnp.where(slots == which, jnp.where(axis, place, sides)[None], size)

        whole = jnp.asarray(self.container, jnp.int32)
        start = jnp.zeros((self.num_items, 3), jnp.int32), jnp.where(slots == 0, whole[None], 0)
        corner, size = jax.lax.fori_loop(1, self.num_items, cut, start)
        return Level(whole, size), corner


def given(*problems: tuple[tuple[int, int, int], tuple[tuple[int, int, int], ...]]) -> Given:
    """A generator of given problems (container, sizes of items), all with as many items.

    Raises:
        UsageError: a side is no whole number over 0, or an item does not fit into the empty container.
    """
    levels = []
    for container, items in problems:
        check_container(container, 1)
        for item in items:
            if len(item) != 3 or not all(
                isinstance(x, int) and 0 < x <= container[c] for c, x in enumerate(item)
            ):
                raise UsageError(
                    f"an item has three sides, whole numbers from 1 to the container's {container}, not {item}"
                )
        if not items:
            raise UsageError("BinPack takes at least one item")
        levels.append(Level(np.asarray(container, np.int32), np.asarray(items, np.int32)))
    return Given.of(*levels)


@dataclasses.dataclass(frozen=True)
class BinPack:
    """Observation: float32 `[E + I, 8]`, a row for each space, then for each item. Action: `space * I + item`.

    Columns: 1 in rows of spaces; 1 where there is a space, or an item to pack; the sides, and the lower corner (0 of an
    item that is not packed), as shares of the container's.

    Attributes:
        generator: `Split`, what `given` makes, or any that draws a `Level` of I items.
        num_spaces: E. Where more arise, those found last are left out, `State.lost` tells, and what was legal may not
            be any more; what is legal stays so.
        rewards: "dense", the share of each item as it is packed, or "sparse", all of it at the end.
    """

    generator: Generator = Split()
    num_spaces: int = field(40, AtLeast(1))
    rewards: str = field("dense", OneOf(REWARDS))
    absorbing = True  # `unless`

    def __post_init__(self) -> None:
        """Refuses unknown names, and what is no generator of a `Level`."""
        check_fields(self)
        _ = self.num_items

    @property
    def num_items(self) -> int:
        """I."""
        return check_generator("BinPack", self.generator, Level, "Split, given(...)").size.shape[0]

    @property
    def name(self) -> str:
        """With its number of items."""
        return f"BinPack-{self.num_items}"

    @property
    def default_params(self) -> Params:
        """An illegal action costs a container."""
        return Params()

    def observation_space(self, params: Params) -> Box:
        """Rows of features."""
        return Box(0.0, 1.0, (self.num_spaces + self.num_items, 8))

    def action_space(self, params: Params) -> Discrete:
        """A space and an item."""
        return Discrete(self.num_spaces * self.num_items)

    def item_moves(self, params: Params) -> np.ndarray:
        """Of each action the rows of its space and of its item, int32 `[A, 3]`, all of kind 0."""
        space, item = np.divmod(
            np.arange(self.num_spaces * self.num_items, dtype=np.int32), np.int32(self.num_items)
        )
        return np.stack([np.zeros_like(space), space, self.num_spaces + item], axis=1)

    def sample_level(self, key: PRNGKey, params: Params) -> Level:
        """The generator's; consumes `key`."""
        return self.generator(key)

    def init_level(self, key: PRNGKey, level: Level, params: Params) -> State:
        """An empty container, which is the only space; deterministic."""
        level = jax.tree.map(jnp.asarray, level)
        whole = jnp.concatenate([jnp.zeros(3, jnp.int32), level.container])
        reach = jnp.where((np.arange(self.num_spaces) == 0)[:, None], whole[None], 0)
        no = jnp.zeros((), bool)
        return State(level, reach, jnp.full(level.size.shape, -1, jnp.int32), no, no)

    def init(self, key: PRNGKey, params: Params) -> State:
        """The first state of a level that is drawn; consumes `key`."""
        return self.init_level(key, self.sample_level(key, params), params)

    def packed(self, state: State) -> Array:
        """Items that are in the container, bool `[I]`."""
        return state.corner[:, 0] >= 0

    def fits(self, state: State) -> Array:
        """Which item goes into which space, bool `[E, I]`."""
        sides = state.reach[:, :3] + state.reach[:, 3:]
        return jnp.all(state.level.size[None] <= sides[:, None], axis=2) & ~self.packed(state)[None]

    def action_mask(self, state: State, params: Params) -> Array:
        """Pairs of a space and an item that is not packed and fits, bool `[E * I]`."""
        return self.fits(state).reshape(-1)

    def transition(self, key: PRNGKey, state: State, action: Array, params: Params) -> State:
        """Packs an item, or ends by an illegal action; deterministic, O(E^2)."""
        mask = self.action_mask(state, params)
        legal, over = mask[action], state.illegal | ~jnp.any(mask)
        space, item = action // self.num_items, action % self.num_items
        corner = -state.reach[space, :3]
        upper = corner + state.level.size[item]
        here = (np.arange(self.num_items) == item)[:, None]
        moved = state.replace(corner=jnp.where(here, corner[None], state.corner))
        left = jnp.where(self.packed(moved)[:, None], MOST_VOLUME, state.level.size)
        reach, lost = without(state.reach, corner, upper, jnp.min(left, axis=0))
        moved = moved.replace(reach=reach, lost=state.lost | lost)
        return unless(over | ~legal, moved, state).replace(illegal=state.illegal | (~legal & ~over))

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: Params) -> Array:
        """All of the state, scaled."""
        lower, upper = -state.reach[:, :3], state.reach[:, 3:]
        spaces = jnp.ones((self.num_spaces, 1), bool), upper[:, :1] > 0, upper - lower, lower
        items = jnp.zeros((self.num_items, 1), bool), ~self.packed(state)[:, None], state.level.size
        rows = [
            jnp.concatenate(part, axis=1)
            for part in (spaces, (*items, jnp.maximum(state.corner, 0)))
        ]
        scale = jnp.concatenate([jnp.ones(2), state.level.container, state.level.container])
        return (jnp.concatenate(rows) / scale[None]).astype(jnp.float32)

    reward = reward_of_outcome

    def terminal(self, state: State, params: Params) -> Array:
        """Nothing fits any more, or an illegal action ended it."""
        return state.illegal | ~jnp.any(self.fits(state))

    def filled(self, state: State) -> Array:
        """The volume of what is packed, int32 `[]`."""
        return jnp.sum(jnp.where(self.packed(state), jnp.prod(state.level.size, axis=1), 0))

    def outcome(self, state: State, params: Params) -> Array:
        """The share that is filled, less the cost of an illegal action; float32."""
        share = self.filled(state) / jnp.prod(state.level.container)
        return (share - jnp.where(state.illegal, params.illegal_cost, 0.0)).astype(jnp.float32)

    def upper_bound(self, state: State, params: Params) -> Array:
        """As if every item that fits somewhere were packed, and no more than what is empty; float32 `[]`."""
        whole = jnp.prod(state.level.container)
        fits = jnp.any(self.fits(state), axis=0)
        volume = jnp.prod(state.level.size, axis=1) / whole
        more = jnp.minimum(jnp.sum(jnp.where(fits, volume, 0.0)), 1 - self.filled(state) / whole)
        paid = 0.0 if self.rewards == "dense" else self.outcome(state, params)
        return jnp.where(self.terminal(state, params), 0.0, more + paid).astype(jnp.float32)

    def heuristic(self, state: State, params: Params) -> Array:
        """The upper bound, which no packing exceeds."""
        return self.upper_bound(state, params)

    def render(self, state: State, params: Params) -> Array:
        """The packing from its upper corner, a colour an item, before the container's floor and far walls.

        Uint8 `[192, 192, 3]`. A ray runs along (1, 1, 1), so it enters a box where the least of its three upper faces
        is met, and leaves it at the greatest lower one.
        """
        across, up = np.array([-1, 1, 0]) / 2**0.5, np.array([-1, -1, 2]) / 6**0.5
        v, u = np.mgrid[0.52:-0.52:192j, -0.52:0.52:192j][
            ..., None
        ]  # of a diagonal of 1, which is seen under an angle
        scale = 1 / jnp.linalg.norm(state.level.container.astype(jnp.float32))
        sides = state.level.container * scale
        start = (sides / 2)[None, None] + (u * across + v * up)  # [192, 192, 3]
        low = jnp.maximum(state.corner, 0) * scale
        high = low + state.level.size * scale
        enters = high[:, None, None] - start[None]  # [I, 192, 192, 3]
        enter, leave = jnp.min(enters, axis=3), jnp.max(low[:, None, None] - start[None], axis=3)
        seen = jnp.where(self.packed(state)[:, None, None] & (enter > leave), enter, -jnp.inf)
        which = jnp.argmax(seen, axis=0)
        n, light = self.num_items, np.array([0.8, 0.65, 1.0])
        hues = [colorsys.hsv_to_rgb(i * 0.618 % 1, 0.5 + 0.2 * (i % 2), 0.92) for i in range(n)]
        face = jnp.argmin(jnp.take_along_axis(enters, which[None, :, :, None], axis=0)[0], axis=2)
        item = (
            255
            * jnp.asarray(np.array(hues, np.float32))[which]
            * jnp.asarray(light)[face][..., None]
        )
        far = jnp.max(-start, axis=2) < jnp.min(sides[None, None] - start, axis=2)
        wall = jnp.where(far, 200 + 40 * jnp.asarray(light)[jnp.argmax(-start, axis=2)], 255.0)[
            ..., None
        ]
        return picture.to_uint8(
            jnp.where((jnp.max(seen, axis=0) > -jnp.inf)[..., None], item, wall)
        )


def without(reach: Array, lower: Array, upper: Array, least: Array) -> tuple[Array, Array]:
    """Maximal empty spaces `[E, 6]` after a box is taken out; and whether there are more than E.

    A space that the box meets leaves up to six parts, one before each face of the box. Two spaces are never nested, so
    parts before different faces are not (each reaches past the other's face), and a part before face d lies in
    another part or in a space that is left whole only if d alone kept the one space from lying in the other, and the
    other reaches the face (as all do that the box meets). So a
    matrix of bits tells which parts are maximal. What stays keeps its slot; parts fill the free ones, face by face.

    Args:
        reach: as in `State`.
        lower: the box's corner, `[3]`.
        upper: its other corner, `[3]`.
        least: sides that a space must have to be kept, `[3]`.
    """
    num, faces, bits = len(reach), np.arange(6), (1 << np.arange(6)).astype(np.uint8)
    cut = jnp.concatenate(
        [-upper, lower]
    )  # what the part before each face has instead of the space's own number
    met = jnp.all(reach > cut[None], axis=1)
    beyond = sum(
        jnp.where(reach[:, None, d] > reach[None, :, d], bits[d], np.uint8(0)) for d in faces
    )  # [E, E]
    alone = beyond & (beyond - 1) == 0
    covers = jnp.sum(
        jnp.where(cut[None] <= reach, bits[None], np.uint8(0)), axis=1, dtype=jnp.uint8
    )
    nested = jnp.where(alone, beyond & covers[None], np.uint8(0))
    nested = jax.lax.reduce(nested, np.uint8(0), jax.lax.bitwise_or, (1,))
    sides = reach[:, :3] + reach[:, 3:]
    wide = sides >= least[None]
    part = (
        cut[None] + jnp.roll(reach, 3, axis=1) >= jnp.concatenate([least, least])[None]
    )  # [E, 6], along its own axis
    others = jnp.stack([wide[:, (d + 1) % 3] & wide[:, (d + 2) % 3] for d in faces], axis=1)
    new = (met[:, None] & part & others & (nested[:, None] & bits[None] == 0)).T.reshape(
        -1
    )  # face by face
    stays = ~met & jnp.all(wide, axis=1)
    # Counts are as narrow as they can be: comparing and summing [E, 6 E] of them is most of the work.
    small = np.uint8 if 6 * num < 256 else np.int32
    count, free = (
        jnp.cumsum(new, dtype=small),
        jnp.cumsum(~stays, dtype=small),
    )  # of free slots up to each, itself too
    source = jnp.sum(count[None] < free[:, None], axis=1, dtype=small).astype(
        jnp.int32
    )  # new parts before its own
    face, space = source // num, source % num
    parts = jnp.where(face[:, None] == faces[None], cut[None], reach[space])
    parts = jnp.where((source < 6 * num)[:, None], parts, 0)
    return jnp.where(stays[:, None], reach, parts), count[-1] > free[-1]


VARIANTS = {
    "BinPack": BinPack,
    "BinPack-10": lambda: BinPack(Split(10)),
}
