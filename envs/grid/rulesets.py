"""Rulesets for `envs.grid.xland`: drawn in bulk as trees of productions, kept in benchmark files.

A goal needs one or two things. Each of them is either on the floor at first or the product of a rule, whose inputs
are drawn in the same way, down to `depth`. Every thing of a task is another one of the 60 (six tiles, ten colours)
and is needed once, so whatever fires on the way to the goal is wanted, and every ruleset can be solved wherever there
is room to put things down; distractors fire only on things that no goal needs (Nikulin et al. 2024, section 4).
"""

import dataclasses
import functools
import io
import pathlib
import zipfile
import zlib
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, Between, Each, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from . import tiles

__all__ = [
    "Ruleset",
    "Tree",
    "check",
    "distinct",
    "generate",
    "load_benchmark",
    "sample_ruleset",
    "save_benchmark",
]

NUM_KINDS = 12
THINGS = np.array(
    [tiles.code(tile, colour) for tile in tiles.PICKABLE for colour in range(1, 11)], np.uint8
)


@flax.struct.dataclass
class Ruleset:
    """One task, or many with a leading axis; `envs.grid.xland` tells what the numbers mean.

    Attributes:
        rules: uint8 `[R, 4]`, rows of (kind, a, b, c).
        goal: uint8 `[3]`, (kind, a, b).
        objects: uint8 `[N]`, 0 for none.
    """

    rules: Any
    goal: Any
    objects: Any


@dataclasses.dataclass(frozen=True)
class Tree:
    """How rulesets are drawn.

    Attributes:
        depth: how many productions may be needed one after the other.
        prune: the probability that a thing lies on the floor although the tree could go deeper.
        distractors: things that no goal needs.
        false_rules: rules about them, which lead nowhere.
        kinds: which of the kinds 1 to 11 occur; `(1, 2, 7)` ignores sides.
    """

    depth: int = field(0, AtLeast(0))
    prune: float = field(0.0, Between(0, 1))
    distractors: int = field(3, AtLeast(0))
    false_rules: int = field(0, AtLeast(0))
    kinds: tuple[int, ...] = field(tuple(range(1, NUM_KINDS)), Each(Between(1, NUM_KINDS - 1)))

    def __post_init__(self):
        check_fields(self)
        if not self.kinds:
            raise UsageError(
                f"the kinds of rules and goals are some of 1 to {NUM_KINDS - 1}, not {self.kinds}"
            )
        if self.false_rules and not self.distractors:
            raise UsageError("false rules are about distractors, of which this tree has none")
        if self.num_things > len(THINGS):
            raise UsageError(
                f"{self} needs {self.num_things} different things, and there are {len(THINGS)}"
            )

    @classmethod
    def pick(cls) -> "Tree":
        """Which one of four things is to be picked up: a bandit with legs."""
        return cls(distractors=3, kinds=(1,))

    @classmethod
    def small(cls) -> "Tree":
        """One production deep, with two distractors and two false rules."""
        return cls(depth=1, prune=0.3, distractors=2, false_rules=2)

    @classmethod
    def medium(cls) -> "Tree":
        """Two productions deep."""
        return cls(depth=2, prune=0.2, distractors=2, false_rules=2)

    @classmethod
    def high(cls) -> "Tree":
        """Three productions deep."""
        return cls(depth=3, prune=0.1, distractors=2, false_rules=2)

    @property
    def num_nodes(self) -> int:
        """Places in the two binary trees below a goal."""
        return 2 * (2 ** (self.depth + 1) - 1)

    @property
    def num_things(self) -> int:
        """Different things that a ruleset may name."""
        return self.num_nodes + self.distractors + self.false_rules


@functools.partial(jax.jit, static_argnames=("tree", "num"))
def generate(key: PRNGKey, tree: Tree, num: int) -> Ruleset:
    """`num` independent rulesets, `rules [num, R, 4]`, `goal [num, 3]`, `objects [num, N]`; consumes `key`.

    `R = max(2 (2^depth - 1) + false_rules, 1)`, `N = 2^(depth + 1) + distractors`, padded at the end. A million trees
    of depth one take seconds on a CPU.
    """
    return jax.vmap(lambda key: _draw(key, tree))(jax.random.split(key, num))


def _draw(key: PRNGKey, tree: Tree) -> Ruleset:
    """One ruleset, level by level from the goal down; consumes `key`."""
    things_key, goal_key, kinds_key, prune_key, false_key = jax.random.split(key, 5)
    things = jax.random.permutation(things_key, jnp.asarray(THINGS))[: tree.num_things]
    kinds = jnp.asarray(tree.kinds, jnp.uint8)
    goal_kind = jax.random.choice(goal_key, kinds)
    wanted = jnp.stack([jnp.ones((), bool), goal_kind >= 7])
    goal = jnp.stack([goal_kind, things[0], jnp.where(wanted[1], things[1], 0)])
    drawn = jax.random.choice(kinds_key, kinds, (tree.num_nodes,))
    kept = jax.random.bernoulli(prune_key, tree.prune, (tree.num_nodes,))
    # One row at least: no checkpoint holds arrays of size 0.
    rules, objects, first = (
        [jnp.zeros((0 if tree.depth or tree.false_rules else 1, 4), jnp.uint8)],
        [],
        0,
    )
    for level in range(tree.depth):
        here = slice(first, first + 2 ** (level + 1))
        first = here.stop
        inputs = things[first : first + 2 * (here.stop - here.start)].reshape(-1, 2)
        made, two = wanted & ~kept[here], drawn[here] >= 7
        rule = jnp.stack(
            [drawn[here], inputs[:, 0], jnp.where(two, inputs[:, 1], 0), things[here]], axis=1
        )
        rules.append(jnp.where(made[:, None], rule, 0))
        objects.append(jnp.where(wanted & ~made, things[here], 0))
        wanted = jnp.stack([made, made & two], axis=1).reshape(-1)
    objects.append(jnp.where(wanted, things[first : tree.num_nodes], 0))
    rules.append(_false_rules(false_key, tree, things, kinds))
    found = _compact(jnp.concatenate(objects))[: 2 ** (tree.depth + 1)]
    distractors = things[tree.num_nodes : tree.num_nodes + tree.distractors]
    return Ruleset(
        rules=_compact(jnp.concatenate(rules)),
        goal=goal,
        objects=_compact(jnp.concatenate([found, distractors])),
    )


def _false_rules(key: PRNGKey, tree: Tree, things: Array, kinds: Array) -> Array:
    """Rules that need a distractor, and make things that are needed nowhere; consumes `key`."""
    if not tree.false_rules:
        return jnp.zeros((0, 4), jnp.uint8)
    kind_key, first_key, second_key = jax.random.split(key, 3)
    kind = jax.random.choice(kind_key, kinds, (tree.false_rules,))
    first = tree.num_nodes + jax.random.randint(first_key, kind.shape, 0, tree.distractors)
    second = jax.random.randint(second_key, kind.shape, 0, tree.num_nodes)
    made = things[tree.num_nodes + tree.distractors :]
    return jnp.stack([kind, things[first], jnp.where(kind >= 7, things[second], 0), made], axis=1)


def _compact(rows: Array) -> Array:
    """The rows that do not begin with 0 first, otherwise in their order."""
    empty = (rows if rows.ndim == 1 else rows[:, 0]) == 0
    return rows[jnp.argsort(empty, stable=True)]


def distinct(key: PRNGKey, tree: Tree, num: int) -> Ruleset:
    """`num` rulesets of which no two are equal, on the host; consumes `key`.

    Raises:
        UsageError: the tree gives fewer.
    """
    found = np.zeros((0, 0), np.uint8)
    for part in range(100):
        drawn = jax.tree.map(np.asarray, generate(jax.random.fold_in(key, part), tree, num))
        rows = np.concatenate([leaf.reshape(num, -1) for leaf in jax.tree.leaves(drawn)], axis=1)
        before, shapes = len(found), [leaf.shape[1:] for leaf in jax.tree.leaves(drawn)]
        rows = np.concatenate([found.reshape(-1, rows.shape[1]), rows])
        found = rows[np.sort(np.unique(rows, axis=0, return_index=True)[1])]
        if len(found) >= num:
            ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
            parts = np.split(found[:num], ends, axis=1)
            leaves = [part.reshape(num, *shape) for part, shape in zip(parts, shapes, strict=True)]
            return jax.tree.unflatten(
                jax.tree.structure(drawn), [jnp.asarray(leaf) for leaf in leaves]
            )
        if len(found) == before:
            break
    raise UsageError(f"{tree} gives only about {len(found)} different rulesets, not {num}")


def sample_ruleset(key: PRNGKey, rulesets: Ruleset) -> Ruleset:
    """One of many, uniformly; consumes `key`."""
    index = jax.random.randint(key, (), 0, rulesets.goal.shape[0])
    return jax.tree.map(lambda leaf: jnp.asarray(leaf)[index], rulesets)


def save_benchmark(path: str | pathlib.Path, rulesets: Ruleset) -> None:
    """Writes many rulesets as a compressed `.npz` of `rules`, `goal` and `objects`, after `check`."""
    arrays = {name: np.asarray(getattr(rulesets, name)) for name in _RANKS}
    check(arrays, str(path))
    with open(path, "wb") as file:
        np.savez_compressed(file, **arrays)


def load_benchmark(path: str | pathlib.Path) -> Ruleset:
    """Reads what `save_benchmark` wrote.

    Raises:
        UsageError: there is no such file, or it holds something else (`check`).
    """
    try:
        file = np.load(io.BytesIO(pathlib.Path(path).read_bytes()), allow_pickle=False)
        arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(
            f"{path} is not a benchmark, a .npz of {', '.join(_RANKS)}: {error}"
        ) from None
    check(arrays, str(path))
    return Ruleset(**{name: jnp.asarray(array) for name, array in arrays.items()})


_RANKS = {"rules": 3, "goal": 2, "objects": 2}


def check(arrays: dict[str, np.ndarray], name: str) -> None:
    """Refuses in one sentence arrays that are no rulesets: names, dtypes, shapes, kinds, bytes of things."""
    if set(arrays) != set(_RANKS):
        raise UsageError(
            f"{name} must hold {', '.join(_RANKS)}, not {', '.join(sorted(arrays)) or 'nothing'}"
        )
    for part, rank in _RANKS.items():
        array = arrays[part]
        if array.dtype != np.uint8 or array.ndim != rank:
            raise UsageError(
                f"{name}: {part} must be uint8 of rank {rank}, not {array.dtype} {list(array.shape)}"
            )
    rules, goal, objects = (arrays[part] for part in _RANKS)
    if not len(goal) or {len(rules), len(objects)} != {len(goal)}:
        raise UsageError(
            f"{name}: {len(rules)} rules, {len(goal)} goals and {len(objects)} objects must be as many"
        )
    if rules.shape[2] != 4 or goal.shape[1] != 3:
        raise UsageError(
            f"{name}: rules have 4 and goals 3 columns, not {rules.shape[2]} and {goal.shape[1]}"
        )
    things = np.isin(np.arange(256), THINGS)
    used = np.arange(256)[:, None] >= np.array([1, 7])  # which of a and b a kind reads
    bad = {
        f"a kind of rule above {NUM_KINDS - 1}": rules[..., 0] >= NUM_KINDS,
        f"a goal whose kind is not 1 to {NUM_KINDS - 1}": (goal[:, 0] == 0)
        | (goal[:, 0] >= NUM_KINDS),
        "a rule about what cannot be picked up": used[rules[..., 0]] & ~things[rules[..., 1:3]],
        "a rule that makes what cannot be picked up": (rules[..., 0] > 0) & ~things[rules[..., 3]],
        "a goal about what cannot be picked up": used[goal[:, 0]] & ~things[goal[:, 1:]],
        "an object that cannot be picked up": (objects > 0) & ~things[objects],
    }
    for fault, where in bad.items():
        if where.any():
            raise UsageError(f"{name}: task {int(np.argwhere(where)[0][0])} has {fault}")
