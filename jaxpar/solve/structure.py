"""Which entries of a new state depend on which of the old: what makes the Jacobian of a step cheap.

A state is cut into groups of leaves that do not depend on each other, and each group, with its
leading axes as batch, into `[*batch, n]`: batch elements are independent, the n entries of one are
coupled. An elementwise cell has one group a leaf with all axes as batch and n = 1; k leaves coupled
elementwise are n = k; a dense cell on [B, D] has batch [B] and n = D. The Jacobian of a group then
costs n Jacobian-vector products, each with the same entry of all batch elements.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.scan import affine_lanes, affine_scan
from jaxpar.scan.varying import varying_as
from jaxpar.solve._dependence import Lost, Relation, relations
from jaxpar.types import Array, PyTree, UsageError, largest

__all__ = ["Block", "Dense", "check_structure"]

MAX_LANES = 2
"""Groups of at most so many coupled entries are solved with each entry as an array of its own."""

Jacobian = tuple[Any, ...]
"""One item a group: lanes `A[i][j]` of shape [T, *batch] if n <= `MAX_LANES`, else an array [T, *batch, n, n]."""

Leaves = tuple[Array, ...]


@dataclasses.dataclass(frozen=True)
class Block:
    """Declares Jacobians of k x k blocks: k leaves of one shape coupled elementwise, or leaves [..., k]."""

    k: int = field(legal=AtLeast(1))

    __post_init__ = check_fields


@dataclasses.dataclass(frozen=True)
class Dense:
    """Declares that all entries are coupled, but for `batch_dims` leading axes that all leaves share."""

    batch_dims: int = field(0, AtLeast(0))

    __post_init__ = check_fields


Jac = str | Block | Dense
"""How the structure of a Jacobian is given: "auto", "diag", `Block(k)`, "dense" or `Dense(batch_dims)`."""


class Group(NamedTuple):
    """Leaves that depend on each other and on no other leaf.

    Attributes:
      leaves: Their numbers.
      batch: The dimensions that all their shapes begin with and along which nothing is coupled.
      sizes: Entries of each leaf for one batch element.
    """

    leaves: tuple[int, ...]
    batch: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def n(self) -> int:
        """Coupled entries."""
        return sum(self.sizes)

    def flat(self, leaves: Leaves) -> Array:
        """Returns the group's leaves [T, ...] as one array [T, *batch, n] of their widest dtype."""
        mine = [leaves[number] for number in self.leaves]
        dtype = jnp.result_type(*mine)
        parts = (
            leaf.reshape(leaf.shape[0], *self.batch, size).astype(dtype)
            for leaf, size in zip(mine, self.sizes, strict=True)
        )
        return jnp.concatenate(list(parts), -1)

    def lanes(self, leaves: Leaves) -> Leaves:
        """Returns the same as n arrays [T, *batch]."""
        if all(size == 1 for size in self.sizes):
            mine = [leaves[number] for number in self.leaves]
            dtype = jnp.result_type(*mine)
            return tuple(leaf.reshape(leaf.shape[0], *self.batch).astype(dtype) for leaf in mine)
        flat = self.flat(leaves)
        return tuple(flat[..., entry] for entry in range(self.n))

    def put(self, leaves: list, entries: Array | Leaves) -> None:
        """Writes `entries`, an array [T, *batch, n] or n lanes, into the group's places of `leaves`."""
        stop = np.cumsum(self.sizes).tolist()
        for number, size, end in zip(self.leaves, self.sizes, stop, strict=True):
            if not isinstance(entries, tuple):
                part = entries[..., end - size : end]
            elif size == 1:
                part = entries[end - 1]
            else:
                part = jnp.stack(entries[end - size : end], -1)
            leaves[number] = part.reshape(leaves[number].shape).astype(leaves[number].dtype)


@dataclasses.dataclass(frozen=True)
class Structure:
    """A partition of the state into groups; hashable.

    Attributes:
      groups: Every leaf is in one.
      proved: Whether the program of f shows it, so that no probe is needed.
      blind: Numbers of the leaves with parts that derivatives do not see (`blindness`).
    """

    groups: tuple[Group, ...]
    proved: bool = True
    blind: frozenset[int] = frozenset()

    @property
    def bytes_per_step(self) -> int:
        """Memory of one step's Jacobian and of what solving with it takes beside, in float32: a rule of thumb."""
        return sum(
            4 * math.prod(group.batch) * (4 * group.n**2 + 8 * group.n) for group in self.groups
        )

    def jacobian(self, apply: Callable[[Leaves], Leaves], before: Leaves) -> Jacobian:
        """Returns A at `before` [T, ...], `apply` being f at every step.

        Cost: as many Jacobian-vector products as the largest group has coupled entries.
        """
        n = max(group.n for group in self.groups)

        def column(seed: Leaves) -> Leaves:
            return jax.jvp(apply, (before,), (seed,))[1]

        if n <= MAX_LANES:
            columns = [column(self.seed(before, jnp.arange(n) == entry)) for entry in range(n)]
            return tuple(
                _rows([group.lanes(each) for each in columns[: group.n]]) for group in self.groups
            )
        stacked = jax.vmap(lambda chosen: column(self.seed(before, chosen)))(jnp.eye(n, dtype=bool))
        return tuple(
            _matrix(group, tuple(leaf[: group.n] for leaf in stacked)) for group in self.groups
        )

    def jacobian_by_rows(self, apply: Callable[[Leaves], Leaves], before: Leaves) -> Jacobian:
        """Returns what `jacobian` does, by reverse differentiation.

        Cost: a vector-Jacobian product for each coupled entry of the largest group.
        """
        n = max(group.n for group in self.groups)
        pull = jax.vjp(apply, before)[1]

        def row(chosen: Array) -> Leaves:
            return pull(self.seed(before, chosen))[0]

        rows = jax.lax.map(row, jnp.eye(n, dtype=bool))
        jacobian = []
        for group in self.groups:
            columns = _matrix(group, tuple(leaf[: group.n] for leaf in rows))
            if isinstance(columns, tuple):
                jacobian.append(_rows(columns))
            else:
                jacobian.append(jnp.swapaxes(columns, -1, -2))
        return tuple(jacobian)

    def seed(self, before: Leaves, chosen: Array) -> Leaves:
        """Returns the tangent that is one in the chosen entry of every group and every batch element."""
        seed = list(before)
        for group in self.groups:
            row = chosen[: group.n].astype(
                jnp.result_type(*(before[number] for number in group.leaves))
            )
            group.put(seed, jnp.broadcast_to(row, (before[0].shape[0], *group.batch, group.n)))
        return varying_as(tuple(seed), before)

    def apply(self, jacobian: Jacobian, v: Leaves) -> Leaves:
        """Returns A[t] v[t]."""
        out = list(v)
        for group, a in zip(self.groups, jacobian, strict=True):
            if isinstance(a, tuple):
                lanes = group.lanes(v)
                group.put(
                    out,
                    tuple(
                        sum((x * y for x, y in zip(row, lanes, strict=True)), jnp.zeros(()))
                        for row in a
                    ),
                )
            else:
                exact = jax.lax.Precision.HIGHEST
                group.put(out, jnp.einsum("...ij,...j->...i", a, group.flat(v), precision=exact))
        return tuple(out)

    def solve(
        self,
        jacobian: Jacobian,
        b: Leaves,
        start: Leaves | None = None,
        *,
        axis_name: str | None = None,
        reverse: bool = False,
    ) -> Leaves:
        """Returns delta[t] = A[t] delta[t-1] + b[t] by one affine scan over the leading axis.

        Args:
          jacobian: A.
          b: Leaves [T, ...].
          start: delta before the first step; zeros by default.
          axis_name: Mesh axis that time is split over.
          reverse: Whether the devices along it hold the parts from the last to the first.
        """
        if reverse and axis_name is not None:  # within a device time still runs forwards
            jacobian, b = jax.tree.map(lambda leaf: jnp.flip(leaf, 0), (jacobian, b))
            delta = self._scan(jacobian, b, start, axis_name=axis_name, reverse=True)
            return jax.tree.map(lambda leaf: jnp.flip(leaf, 0), delta)
        return self._scan(jacobian, b, start, axis_name=axis_name)

    def _scan(self, jacobian, b, start, **how):
        out = list(b)
        ahead = None if start is None else tuple(leaf[None] for leaf in start)
        for group, a in zip(self.groups, jacobian, strict=True):
            if isinstance(a, tuple):
                first = None if ahead is None else tuple(lane[0] for lane in group.lanes(ahead))
                group.put(out, affine_lanes(a, group.lanes(b), first, **how))
            else:
                first = None if ahead is None else group.flat(ahead)[0]
                group.put(out, affine_scan(a, group.flat(b), first, kind="dense", **how))
        return tuple(out)

    def dense(self, jacobian: Jacobian) -> tuple[Array, ...]:
        """Returns A of each group as an array [T, *batch, n, n]."""
        return tuple(
            jnp.stack([jnp.stack(row, -1) for row in a], -2) if isinstance(a, tuple) else a
            for a in jacobian
        )


def _rows(columns: Sequence[Leaves]) -> tuple[Leaves, ...]:
    """Returns columns of lanes as rows of lanes."""
    return tuple(zip(*columns, strict=True))


def _matrix(group: Group, columns: Leaves) -> Array | tuple[Leaves, ...]:
    """Returns A of one group from the leaves [n, T, ...] of its columns."""
    if group.n <= MAX_LANES:
        return _rows(
            [group.lanes(tuple(leaf[entry] for leaf in columns)) for entry in range(group.n)]
        )
    return jnp.moveaxis(jax.vmap(group.flat)(columns), 0, -1)


def elementwise(shapes: Sequence[tuple[int, ...]]) -> Structure:
    """Returns the structure of a state whose every entry depends on itself alone."""
    return Structure(
        tuple(Group((number,), tuple(shape), (1,)) for number, shape in enumerate(shapes))
    )


def structure_of(
    step: Callable, start: Leaves, x: Leaves, jac: Jac, names: Sequence[str] = ()
) -> Structure:
    """Returns the structure of f at states and inputs like `start` and `x`.

    Args:
      step: (leaves of a state, leaves of an input) -> leaves of the next state.
      start: Arrays or their shapes and dtypes.
      x: Likewise.
      jac: "auto" takes what the program of f's derivative shows; "diag", `Block`, "dense" and
        `Dense` declare.
      names: Of the leaves, for messages.

    Raises:
      UsageError: If the program shows that the declaration is wrong, or if leaves do not fit it.
    """
    shapes = [tuple(leaf.shape) for leaf in start]
    names = list(names) or [f"number {number}" for number in range(len(shapes))]
    pattern = _pattern(step, start, x)
    if jac == "auto":
        return _finest(pattern, shapes)
    if jac == "dense":
        found = _finest(pattern, shapes)
        jac = Dense(
            min(min(len(group.batch) for group in found.groups), max(0, min(map(len, shapes)) - 1))
        )
        if len({shape[: jac.batch_dims] for shape in shapes}) > 1:
            jac = Dense(0)
    structure = _declared(jac, shapes)
    return dataclasses.replace(structure, proved=_proved(structure, jac, pattern, shapes, names))


def _pattern(step: Callable, start: Leaves, x: Leaves) -> list[Relation]:
    """Returns for each leaf of the new state how its derivative depends on the leaves of the old."""

    def derivative(seed, before, x):
        return jax.jvp(lambda before: step(before, x), (before,), (seed,))[1]

    closed = jax.make_jaxpr(derivative)(start, start, x)
    seeds: list[Relation] = [{number: tuple(range(leaf.ndim))} for number, leaf in enumerate(start)]
    silent: list[Relation] = [{} for _ in closed.jaxpr.invars[len(seeds) :]]
    return relations(closed.jaxpr, seeds + silent)


def _kept(axes: tuple, old: tuple[int, ...], new: tuple[int, ...]) -> int:
    """Returns how many leading axes of an old leaf are the same in a new one."""
    kept = 0
    for place, axis in enumerate(axes):
        same = place < len(new) and old[place] == new[place]
        if not same or (axis != place and old[place] != 1):
            break
        kept += 1
    return kept


def _finest(pattern: list[Relation], shapes: list[tuple[int, ...]]) -> Structure:
    """Returns the partition into the most groups, each with the most batch axes, that a pattern shows."""
    owner = list(range(len(shapes)))
    for new, relation in enumerate(pattern):
        for old in relation:
            a, b = owner[new], owner[old]
            owner = [a if who == b else who for who in owner]
    groups = []
    for who in sorted(set(owner), key=owner.index):
        leaves = tuple(number for number, its in enumerate(owner) if its == who)
        dims = min(len(shapes[number]) for number in leaves)
        for new in leaves:
            for old, axes in pattern[new].items():
                dims = min(dims, _kept(axes, shapes[old], shapes[new]))
        groups.append(_group(leaves, dims, shapes))
    return Structure(tuple(groups))


def _group(leaves: tuple[int, ...], dims: int, shapes: list[tuple[int, ...]]) -> Group:
    sizes = tuple(math.prod(shapes[number][dims:]) for number in leaves)
    return Group(leaves, shapes[leaves[0]][:dims], sizes)


def _declared(jac: Jac, shapes: list[tuple[int, ...]]) -> Structure:
    """Returns the structure that a declaration means for leaves of these shapes."""
    every = tuple(range(len(shapes)))
    if jac == "diag":
        return elementwise(shapes)
    if isinstance(jac, Dense):
        if (
            min(map(len, shapes)) < jac.batch_dims
            or len({shape[: jac.batch_dims] for shape in shapes}) > 1
        ):
            raise UsageError(
                f"{jac} needs carry leaves that share {jac.batch_dims} leading axes, not shapes {shapes}."
            )
        return Structure((_group(every, jac.batch_dims, shapes),))
    if isinstance(jac, Block):
        if len(shapes) == jac.k and len(set(shapes)) == 1:
            return Structure((_group(every, len(shapes[0]), shapes),))
        if all(shape[-1:] == (jac.k,) for shape in shapes):
            return Structure(
                tuple(_group((number,), len(shapes[number]) - 1, shapes) for number in every)
            )
        raise UsageError(
            f"{jac} needs {jac.k} carry leaves of one shape, or leaves of shape [..., {jac.k}]: {shapes}."
        )
    raise UsageError(
        f"jac={jac!r} is unknown; legal are 'auto', 'diag', 'dense', Block(k) and Dense(batch_dims)."
    )


def _proved(
    structure: Structure,
    jac: Jac,
    pattern: list[Relation],
    shapes: list[tuple[int, ...]],
    names: list[str],
) -> bool:
    """Returns whether a pattern shows a declared structure; refuses one that it contradicts."""
    group_of = {number: group for group in structure.groups for number in group.leaves}
    proved = True
    for new, relation in enumerate(pattern):
        for old, axes in relation.items():
            group = group_of[new]
            if old not in group.leaves:
                if any(isinstance(axis, Lost) and not axis.certain for axis in axes):
                    proved = False
                    continue
                raise UsageError(
                    f"carry leaf {names[new]} depends on leaf {names[old]}, which jac={jac!r} excludes; "
                    "declare jac='auto'."
                )
            kept = _kept(axes, shapes[old], shapes[new])
            if kept >= len(group.batch):
                continue
            lost = axes[kept]
            if not isinstance(lost, Lost) or lost.certain:
                by = lost.by if isinstance(lost, Lost) else "transposing"
                raise UsageError(
                    f"f couples entries of carry leaf {names[old]} along axis {kept} (by {by}), which jac={jac!r} "
                    "excludes; declare jac='auto' or jac='dense'."
                )
            proved = False
    return proved


def check_structure(f: Callable, init: PyTree, x: PyTree, jac: Jac) -> Structure:
    """Returns the structure of `f`'s Jacobian if `jac` declares it rightly; to be called once, outside of jit.

    The program of f's derivative decides where it can; else one product with a random vector does,
    at `init` moved by a random amount: a wrong declaration passes with probability zero, up to
    rounding.

    Args:
      f: As for `parallel_scan`.
      init: A state; leaves that are not floating stay as they are.
      x: One step's input.
      jac: As in the methods.

    Raises:
      UsageError: If the declaration is wrong: what is coupled, and along which axis.
    """
    from_tree = jax.tree.structure(init)
    state, inputs = (tuple(map(jnp.asarray, jax.tree.leaves(tree))) for tree in (init, x))
    places = [place for place, leaf in enumerate(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    paths = [keystr(path) or "carry" for path, _ in jax.tree_util.tree_flatten_with_path(init)[0]]
    start = tuple(state[place] for place in places)

    def step(before, inputs):
        whole = list(state)
        for place, leaf in zip(places, before, strict=True):
            whole[place] = leaf
        new = jax.tree.leaves(
            f(from_tree.unflatten(whole), jax.tree.structure(x).unflatten(inputs))[0]
        )
        return tuple(new[place] for place in places)

    structure = structure_of(step, start, inputs, jac, [paths[place] for place in places])
    keys = jax.random.split(jax.random.key(0), len(start))
    at = tuple(
        a + 0.1 * jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, start, strict=True)
    )
    with jax.default_matmul_precision("highest"):

        def apply(before):
            return tuple(leaf[None] for leaf in step(tuple(a[0] for a in before), inputs))

        error = jax.jit(lambda before: probe(structure, apply, before))(tuple(a[None] for a in at))
    if not structure.proved and not error <= probe_tolerance(start):
        raise UsageError(
            f"the Jacobian of f differs from jac={jac!r} by {float(error):.1e} of its product with a random vector; "
            "declare jac='auto' or jac='dense'."
        )
    return structure


def probe(structure: Structure, apply: Callable[[Leaves], Leaves], before: Leaves) -> Array:
    """Returns the largest |J v - A v| over all steps for random v, relative to the largest |J v| of each leaf."""
    keys = jax.random.split(jax.random.key(1), len(before))
    v = tuple(jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, before, strict=True))
    v = varying_as(v, before)
    exact = jax.jvp(apply, (before,), (v,))[1]
    ours = structure.apply(structure.jacobian(apply, before), v)
    errors = []
    for a, b in zip(exact, ours, strict=True):
        size = jnp.maximum(jnp.max(jnp.abs(a)), 1)
        # An error that is infinite or no number is divided by nothing.
        error = largest(jnp.abs(a - b))
        error = jnp.where(jnp.isfinite(error), error / size, jnp.inf)
        errors.append(error.astype(jnp.float32))
    return largest(jnp.stack(errors))


def probe_tolerance(leaves: Leaves) -> float:
    """Returns the bound on `probe` that rounding explains."""
    return 100 * max(float(jnp.finfo(leaf.dtype).eps) for leaf in leaves)
