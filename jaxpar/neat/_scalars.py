"""A function of small arrays as one of scalars: inside a kernel that plays one episode, every value is a scalar.

A kernel has no small arrays to stack, slice or concatenate. So the function's jaxpr is interpreted with every array as
a NumPy array of numbers: what moves values is done here, once, and what computes is left, number by number.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray, Tracer
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.typing import ArrayLike, DTypeLike

from jaxpar.lower.jaxprs import CALLS, array_of, interpret
from jaxpar.types import Array, PyTree

ELEMENTWISE = frozenset(  # of those that Pallas lowers to Triton
    "abs add add_any and atan2 cbrt ceil clamp convert_element_type cos cosh div eq exp exp2 expm1 floor ge gt "
    "integer_pow is_finite le log log1p logistic lt max min mul ne neg not or pow rem rsqrt select_n sign sin "
    "sinh sqrt square sub tan tanh xor".split()
)
SAME = ("copy", "copy_p", "stop_gradient", "optimization_barrier", "sharding_constraint")
REDUCTIONS: dict[str, Callable[[Array, Array], Array]] = {
    "reduce_sum": jax.lax.add, "reduce_prod": jax.lax.mul, "reduce_max": jax.lax.max, "reduce_min": jax.lax.min,
    "reduce_and": jax.lax.bitwise_and, "reduce_or": jax.lax.bitwise_or,
}  # fmt: skip
LARGEST = 256
"""Numbers of an array, at most: each is an instruction."""


class NotScalar(Exception):
    """The function uses a key, loops, indexes by what it computes, or handles too many numbers; says which."""


def scalarize(
    f: Callable[..., Sequence[Array]], *likes: Array | jax.ShapeDtypeStruct
) -> Callable[..., list[Array]]:
    """The function of arrays `f(*arrays) -> arrays` as one of numbers: a list of all of them in, and one out, flat.

    Only what its results need is computed: a key that nothing reads is dropped.

    Args:
        f: takes and returns flat sequences of arrays.
        likes: arrays or `jax.ShapeDtypeStruct`, what it would be called with.

    Raises:
        NotScalar: now, with the reason.
    """
    if any(math.prod(jnp.shape(like)) > LARGEST for like in likes):
        raise NotScalar(f"it takes an array of more than {LARGEST} numbers")
    closed = jax.make_jaxpr(f)(*likes)

    def call(*numbers: Array) -> list[Array]:
        rest, inputs = iter(numbers), []
        for like in likes:
            inputs.append(np.empty(jnp.shape(like), object))
            for place in np.ndindex(inputs[-1].shape):
                inputs[-1][place] = next(rest)
        results = interpret(closed.jaxpr, closed.consts, inputs, _rule, _constant)
        return [x for result in results for x in result.flat]

    jax.eval_shape(
        call,
        *(jax.ShapeDtypeStruct((), x.dtype) for x in likes for _ in range(math.prod(jnp.shape(x)))),
    )
    return call


def _constant(value: ArrayLike, like: ShapedArray) -> PyTree:
    if isinstance(value, Tracer):
        raise NotScalar("it closes over a traced array")
    if jnp.issubdtype(like.dtype, jax.dtypes.extended):
        return None  # a key; a primitive that reads it raises `NotScalar`
    return _as_objects(np.asarray(value, like.dtype))


def _as_objects(value: np.ndarray) -> np.ndarray:
    boxed = np.empty(value.shape, object)
    for place in np.ndindex(value.shape):
        boxed[place] = value[place]
    return boxed


def _rule(equation: JaxprEqn, values: list[PyTree]) -> Sequence[PyTree] | None:
    name = equation.primitive.name
    if any(value is None for value in values) or any(
        jnp.issubdtype(array_of(var).dtype, jax.dtypes.extended) for var in equation.outvars
    ):
        raise NotScalar(f"it uses a key: {name}")
    if any(array_of(var).size > LARGEST for var in equation.outvars):
        raise NotScalar(f"{name} makes more than {LARGEST} numbers")
    if name in CALLS:
        return None
    if name == "cond":
        return _select_branch(equation.params["branches"], *values)
    return _apply_primitive(name, equation, values)


def _select_branch(
    branches: Sequence[ClosedJaxpr], index: np.ndarray, *values: PyTree
) -> list[np.ndarray]:
    every = [
        interpret(branch.jaxpr, branch.consts, values, _rule, _constant) for branch in branches
    ]
    found = every[0]
    for number, results in enumerate(every[1:], 1):
        here = index[()]
        chosen = here == number if jnp.asarray(here).dtype != jnp.bool_ else here
        found = [_apply_elementwise(lambda old, new, c=chosen: jnp.where(c, new, old), old, new)
                 for old, new in zip(found, results, strict=True)]  # fmt: skip
    return found


def _apply_primitive(name: str, equation: JaxprEqn, values: list[np.ndarray]) -> list[np.ndarray]:
    params, shape = equation.params, array_of(equation.outvars[0]).shape
    if name in ELEMENTWISE:
        return [_apply_elementwise(lambda *x: equation.primitive.bind(*x, **params), *values)]
    if name in SAME:
        return list(values)
    if name in REDUCTIONS:
        return [_reduce(REDUCTIONS[name], values[0], params["axes"])]
    if name in ("argmax", "argmin"):
        return [_arg_extreme(name, values[0], params["axes"], params["index_dtype"])]
    x: PyTree = values[0] if values else None
    match name:
        case "reshape" | "squeeze" | "expand_dims":
            return [x.reshape(shape)]
        case "broadcast_in_dim":
            spread = [1] * len(shape)
            for size, place in zip(x.shape, params["broadcast_dimensions"], strict=True):
                spread[place] = size
            return [np.broadcast_to(x.reshape(spread), shape)]
        case "concatenate":
            return [np.concatenate(values, params["dimension"])]
        case "stack":
            return [np.stack(values, params.get("axis", params.get("dimension", 0)))]
        case "slice":
            strides = params["strides"] or (1,) * x.ndim
            places = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
            return [x[tuple(slice(*place) for place in places)]]
        case "split":
            return np.split(x, np.cumsum(params["sizes"])[:-1], params["axis"])
        case "transpose":
            return [np.transpose(x, params["permutation"])]
        case "rev":
            return [np.flip(x, params["dimensions"])]
        case "iota":
            axis = np.arange(shape[params["dimension"]], dtype=params["dtype"])
            spread = [1] * len(shape)
            spread[params["dimension"]] = -1
            return [_as_objects(np.broadcast_to(axis.reshape(spread), shape))]
    raise NotScalar(f"it uses {name}")


def _apply_elementwise(f: Callable[..., Array], *values: np.ndarray) -> np.ndarray:
    shape = np.broadcast_shapes(*(x.shape for x in values))
    values = tuple(
        np.broadcast_to(x, shape) for x in values
    )  # of `select_n` and `clamp`, some are scalars
    out = np.empty(shape, object)
    for place in np.ndindex(shape):
        out[place] = f(*(x[place] for x in values))
    return out


def _reduce(f: Callable[[Array, Array], Array], x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    rest = [axis for axis in range(x.ndim) if axis not in axes]
    rows = np.transpose(x, [*rest, *axes]).reshape(*(x.shape[axis] for axis in rest), -1)
    if not rows.shape[-1]:
        raise NotScalar("it reduces nothing")
    out = np.empty(rows.shape[:-1], object)
    for place in np.ndindex(out.shape):
        total = rows[(*place, 0)]
        for k in range(1, rows.shape[-1]):
            total = f(total, rows[(*place, k)])
        out[place] = total
    return out


def _arg_extreme(name: str, x: np.ndarray, axes: Sequence[int], dtype: DTypeLike) -> np.ndarray:
    (axis,) = axes
    rows = np.moveaxis(x, axis, -1)
    out = np.empty(rows.shape[:-1], object)
    for place in np.ndindex(out.shape):
        best, at = rows[(*place, 0)], np.asarray(0, dtype)[()]
        for k in range(1, rows.shape[-1]):
            other = rows[(*place, k)]
            wins = other > best if name == "argmax" else other < best
            best, at = jnp.where(wins, other, best), jnp.where(wins, np.asarray(k, dtype)[()], at)
        out[place] = at
    return out
