"""Fixed points of causal updates: element i of the update depends on elements before i only."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxpar.solve.fixed_point import Jacobi
from jaxpar.solve.gauss_seidel import GaussSeidel
from jaxpar.solve.sequential import Sequential
from jaxpar.types import PyTree, UsageError, concrete_values

__all__ = ["CausalStats", "Order", "causal_fixed_point", "check_causal"]

Update = Callable[[PyTree], PyTree]
Order = Jacobi | GaussSeidel | Sequential


class CausalStats(NamedTuple):
    """What a solve did, per sequence under `vmap`: evaluations of the update, and whether they sufficed."""

    iterations: Int[Array, ""]
    converged: Bool[Array, ""]


def causal_fixed_point(
    update: Update,
    guess: PyTree,
    *,
    axis: int = 0,
    method: Order = Jacobi(),  # noqa: B008 (frozen)
    tol: float = 0.0,
    max_iters: int | None = None,
    with_stats: bool = False,
) -> PyTree | tuple[PyTree, CausalStats]:
    """Solves x = update(x), where element i of update(x) depends on the elements of x before i only.

    Sampling from an autoregressive model with fixed noise is such a system (element = pixel), and
    so are the layers of a deep network (element = layer) and any recurrence. The sequential order
    evaluates `update` once an element; Jacobi's replaces all elements at once. After k evaluations
    the first k elements are final whatever the guess, and they are never written again, so N always
    suffice; fewer do where elements depend weakly on each other. Every method runs the same
    compiled evaluation and differs only in which elements an evaluation may replace, so with
    `tol=0` a discrete x comes out identical, and a float one to the rounding of `update`.

    The derivative is implicit (`lax.custom_root`, sweeps over the linearised update), in both
    modes, when all leaves are floats; discrete systems have none.

    Args:
      update: x -> x, any pytree of arrays. `check_causal` tests the claim; a result from an update
        that is not causal is meaningless.
      guess: Start: x's structure, shapes and dtypes. Every leaf has the N elements at `axis`.
      axis: Where the elements lie, in every leaf.
      method: `Jacobi()`: all elements at once. `GaussSeidel(block=b)`: b elements at once, block
        after block; it makes no fewer evaluations than Jacobi, but later elements do not move
        before earlier ones are final. `Sequential()`: one by one. Their other fields, which are
        `parallel_scan`'s, are not read.
      tol: A float is unchanged when it moves by at most `tol * max(1, |x|)`; 0 means not at all. A
        NaN always moves.
      max_iters: Most evaluations, N by default; fewer may end before the fixed point, so
        `with_stats` is then needed.
      with_stats: Whether `CausalStats` is returned, too. `converged` is False where x is not
        finite.

    Raises:
      UsageError: Leaves without N elements at `axis`, an update that changes structure, shape or
        dtype, or a bound whose outcome would not be returned.
    """
    num = _num_elements(guess, axis)
    _check_update(update, guess)
    if max_iters is not None and max_iters < num and not with_stats:
        raise UsageError(
            f"max_iters={max_iters} is less than the {num} elements, so the sweeps can end before the fixed point: "
            "pass with_stats=True and read `converged`, or leave max_iters out."
        )
    block = _block(method, num)
    limit = num if max_iters is None else max_iters

    def sweep(_, start):
        return _sweep(update, start, axis, block, tol, limit)

    if all(jnp.issubdtype(leaf.dtype, jnp.inexact) for leaf in jax.tree.leaves(guess)):
        x, stats = lax.custom_root(
            lambda x: jax.tree.map(jnp.subtract, update(x), x),
            guess,
            sweep,
            lambda linear, y: _solve_tangent(linear, y, num),
            has_aux=True,
        )
    else:
        x, stats = sweep(update, guess)
    stats = CausalStats(stats[0].astype(jnp.int32), stats[1] > 0)
    return (x, stats) if with_stats else x


def _sweep(update: Update, guess: PyTree, axis: int, block: int, tol: float, limit: int):
    """Replaces the elements of [low, high), the block at work, until they stay; those before `low` are final."""
    num = _num_elements(guess, axis)

    def accept(low, high, x, new):
        def leaf(old, new, start):
            index = jnp.arange(num).reshape(
                [-1 if dim == axis % old.ndim else 1 for dim in range(old.ndim)]
            )
            inside = (low <= index) & (index < high)
            # Element `low` is final as it comes; a later one that is not finite could reach earlier ones as 0 * inf.
            new_or_start = jnp.where(jnp.isfinite(new) | (index == low), new, start)
            return jnp.where(inside, new_or_start, old), jnp.all(
                _unchanged(old, new, tol) | ~inside
            )

        pairs = jax.tree.map(leaf, x, new, guess)
        x, same = jax.tree.transpose(jax.tree.structure(guess), jax.tree.structure((0, 0)), pairs)
        return x, jnp.stack(jax.tree.leaves(same)).all()

    def body(state):
        x, low, high, count = state
        x, same = accept(low, high, x, update(x))
        low = jnp.where(same, high, low + 1)
        return x, low, jnp.where(low >= high, jnp.minimum(high + block, num), high), count + 1

    start = (guess, jnp.int32(0), jnp.int32(min(block, num)), jnp.int32(0))
    x, low, _, count = lax.while_loop(
        lambda state: (state[1] < num) & (state[3] < limit), body, start
    )
    finite = jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(x)]).all()
    # As floats: the derivative of `custom_root` takes no integers beside the solution.
    return x, (count.astype(jnp.float32), ((low >= num) & finite).astype(jnp.float32))


def _unchanged(old: Array, new: Array, tol: float) -> Array:
    if tol == 0 or not jnp.issubdtype(new.dtype, jnp.inexact):
        return old == new
    # The smaller magnitude, so that an infinite value is not close to everything.
    scale = jnp.maximum(1, jnp.minimum(jnp.abs(old), jnp.abs(new)))
    return (old == new) | (jnp.abs(new - old) <= tol * scale)


def _solve_tangent(linear: Update, y: PyTree, num: int) -> PyTree:
    """Solves J v - v = y for a causal J, or its transpose: v <- J v - y ends within N sweeps, since J^N = 0."""

    def solve(linear, y):
        def body(state):
            v, _, count = state
            new = jax.tree.map(lambda lv, v, y: lv + v - y, linear(v), v, y)
            same = jnp.stack(
                [jnp.all(a == b) for a, b in zip(*map(jax.tree.leaves, (v, new)), strict=True)]
            ).all()
            return new, same, count + 1

        start = (jax.tree.map(jnp.negative, y), jnp.bool_(False), jnp.int32(1))
        return lax.while_loop(lambda state: ~state[1] & (state[2] < num), body, start)[0]

    return lax.custom_linear_solve(linear, y, solve, solve)


def check_causal(update: Update, example: PyTree, *, axis: int = 0, tol: float = 0.0) -> None:
    """Asserts by trial that element i of update(x) depends on the elements of x before i only.

    For each i the elements from i on are altered (floats moved by `1 + |x|`, integers by 1,
    booleans flipped), and the elements up to i of the output must stay: N + 1 evaluations, eager
    only. A trial at one point can miss a dependence that shows elsewhere; it reports none that is
    not there if `tol` covers the rounding of `update`.

    Args:
      update: As for `causal_fixed_point`.
      example: A point like those that the solve visits.
      axis: Where the elements lie, in every leaf.
      tol: A float of the output may move by `tol * max(1, |x|)`.

    Raises:
      UsageError: An element moves (named), or the arguments are being traced, so that their values
        are not known.
    """
    num = _num_elements(example, axis)
    _check_update(update, example)

    def moved(plain, first):
        def alter(x):
            index = jnp.arange(num).reshape(
                [-1 if dim == axis % x.ndim else 1 for dim in range(x.ndim)]
            )
            return jnp.where(index >= first, _other(x), x)

        def rows(a, b):
            return jnp.moveaxis(~_unchanged(a, b, tol), axis, 0).reshape(num, -1).any(1)

        out = update(jax.tree.map(alter, example))
        plain = jax.tree.map(lambda a, b: jnp.where(first == num, b, a), plain, out)
        return plain, jnp.stack(jax.tree.leaves(jax.tree.map(rows, plain, out))).any(0) & (
            jnp.arange(num) <= first
        )

    # The unaltered one goes first, through the same program: another one may round it otherwise.
    plain = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(update, example))
    _, does_move = lax.scan(moved, plain, jnp.roll(jnp.arange(num + 1), 1))
    known = concrete_values(does_move)
    if known is None:
        raise UsageError("check_causal reads values, which transformations hide: call it outside.")
    wrong = np.argwhere(known[0][1:])
    if len(wrong):
        first, element = wrong[0]
        raise UsageError(
            f"the update is not causal along axis {axis}: its element {element} moves with elements {first} and later "
            f"of its input, and may depend on those before {element} only."
        )


def _other(x: Array) -> Array:
    if x.dtype == jnp.bool_:
        return ~x
    return x + 1 + jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x + 1


def _block(method: Order, num: int) -> int:
    match method:
        case Jacobi():
            return num
        case Sequential():
            return 1
        case GaussSeidel(block=block, correction=False):
            return block
    raise UsageError(
        "method of causal_fixed_point must be Jacobi(), GaussSeidel(block=...) without correction, or Sequential(), "
        f"but is {method!r}."
    )


def _num_elements(x: PyTree, axis: int) -> int:
    shapes = {
        jax.tree_util.keystr(path): jnp.shape(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(x)
    }
    sizes = {
        name: shape[axis] for name, shape in shapes.items() if -len(shape) <= axis < len(shape)
    }
    if (
        not shapes
        or len(sizes) < len(shapes)
        or len(set(sizes.values())) > 1
        or 0 in sizes.values()
    ):
        raise UsageError(
            f"every leaf must have the same positive number of elements at axis {axis}, but the shapes are {shapes}."
        )
    return next(iter(sizes.values()))


def _check_update(update: Update, x: PyTree) -> None:
    want = jax.tree.map(jax.typeof, x)
    got = jax.eval_shape(update, x)
    same = jax.tree.structure(got) == jax.tree.structure(want) and all(
        (a.shape, a.dtype) == (b.shape, b.dtype)
        for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True)
    )
    if not same:
        raise UsageError(f"update must return what it is given, but it turns {want} into {got}.")
