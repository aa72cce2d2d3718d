"""From a user's f to a program on leaves: traced once, closed-over arrays made arguments, its state checked."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.tree_util import keystr, tree_flatten_with_path

from jaxpar.scan.varying import varying_axes, varying_over
from jaxpar.solve.structure import Leaves
from jaxpar.types import Array, PyTree, UsageError


@dataclasses.dataclass(frozen=True, eq=False)
class Recurrence:
    """The program of f: (constants, leaves of a state, leaves of an input) -> leaves.

    Attributes:
      jaxpr: Its invars are state and input, its outvars the new state and the output.
      num_carry: Leaves of a state.
    """

    jaxpr: Any
    num_carry: int

    def call(self, consts: Leaves, before: Leaves, x: Leaves) -> list[Array]:
        """Returns the new state and the output."""
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, consts))(*before, *x)

    def step(self, consts: Leaves, before: Leaves, x: Leaves) -> Leaves:
        """Returns the new state."""
        return tuple(self.call(consts, before, x)[: self.num_carry])

    def output(self, consts: Leaves, before: Leaves, x: Leaves) -> Leaves:
        """Returns the output."""
        return tuple(self.call(consts, before, x)[self.num_carry :])

    def outputs(self, consts: Leaves, before: Leaves, xs: Leaves, h: Leaves) -> Leaves:
        """Returns all outputs [T, ...]; those that are entries of the new state are not computed again."""
        carried = {var: number for number, var in enumerate(self.jaxpr.outvars[: self.num_carry])}
        wanted = self.jaxpr.outvars[self.num_carry :]
        if all(var in carried for var in wanted):
            return tuple(h[carried[var]] for var in wanted)
        made = jax.checkpoint(jax.vmap(functools.partial(self.output, consts)))(before, xs)
        return tuple(
            h[carried[var]] if var in carried else y for var, y in zip(wanted, made, strict=True)
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A traced f with the arrays that it was traced for.

    Attributes:
      recurrence: The program.
      consts: What f closes over.
      init: Leaves of the state before the first step, promoted as `lax.scan` promotes Python
        numbers.
      xs: Leaves of the inputs.
      state_tree: Of the state.
      output_tree: Of the output.
    """

    recurrence: Recurrence
    consts: Leaves
    init: Leaves
    xs: Leaves
    state_tree: Any
    output_tree: Any

    def step(self, before: Leaves, x: Leaves) -> Leaves:
        """Returns the new state."""
        return self.recurrence.step(self.consts, before, x)


def trace(f: Callable, init: PyTree, xs: PyTree, axis_name: str | None) -> Traced:
    """Traces f for one step; products at full precision unless the user has set another default.

    Raises:
      UsageError: If the state that f returns is not like `init`.
    """
    names, state_tree = leaf_names(init), jax.tree.structure(init)
    state, inputs = (tuple(map(jnp.asarray, jax.tree.leaves(tree))) for tree in (init, xs))
    axes = frozenset() if axis_name is None else frozenset({axis_name})
    axes = axes.union(*map(varying_axes, (*state, *inputs)))
    # By its name, since the stubs of `jax.config` do not list its flags.
    precision = getattr(jax.config, "jax_default_matmul_precision") or "highest"  # noqa: B009
    with jax.default_matmul_precision(precision):
        while True:
            state, inputs = varying_over((state, inputs), axes)
            closed, (new_tree, output_tree) = _program(
                f, state, inputs, state_tree, jax.tree.structure(xs)
            )
            if new_tree != state_tree:
                raise UsageError(
                    f"f takes a carry of structure {state_tree} but returns one of {new_tree}."
                )
            new: Any = closed.out_avals[: len(state)]
            promoted = tuple(
                leaf.astype(aval.dtype)
                if jax.typeof(leaf).weak_type and leaf.dtype != aval.dtype
                else leaf
                for leaf, aval in zip(state, new, strict=True)
            )
            more = axes.union(*(aval.manual_axis_type.varying for aval in new))
            if more == axes and all(a is b for a, b in zip(state, promoted, strict=True)):
                break
            state, axes = promoted, more
    _check(names, state, new)
    recurrence = Recurrence(closed.jaxpr, len(state))
    return Traced(recurrence, tuple(closed.consts), state, inputs, state_tree, output_tree)


def _program(f, state: Leaves, inputs: Leaves, state_tree, inputs_tree):
    """Returns the jaxpr of f on leaves, and the structures of what f returns."""
    trees = []

    def flat(state, inputs):
        result = f(state_tree.unflatten(state), inputs_tree.unflatten(inputs))
        if not (isinstance(result, tuple) and len(result) == 2):
            raise UsageError(f"f must return a pair (carry, output), not {type(result).__name__}.")
        trees.append(tuple(map(jax.tree.structure, result)))
        return [jax.tree.leaves(part) for part in result]

    return jax.make_jaxpr(flat)(state, [leaf[0] for leaf in inputs]), trees[-1]


def _check(names: list[str], state: Leaves, new: Sequence[ShapedArray]) -> None:
    for name, old, aval in zip(names, state, new, strict=True):
        if old.shape != aval.shape or old.dtype != aval.dtype:
            raise UsageError(
                f"f takes carry leaf {name} as {kind(old)} but returns it as {kind(aval)}; they must be alike."
            )


def kind(leaf: Array | ShapedArray) -> str:
    """Returns dtype and shape, for messages."""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def leaf_names(tree: PyTree) -> list[str]:
    """Returns the path of every leaf, for messages."""
    return [keystr(path) or "(the whole carry)" for path, _ in tree_flatten_with_path(tree)[0]]
