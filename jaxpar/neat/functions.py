"""Activations and aggregations, with neat-python's exact formulas."""

from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp

from jaxpar.types import Array, PyTree, UsageError

__all__ = [
    "ACTIVATIONS",
    "AGGREGATIONS",
    "Activation",
    "activate",
    "aggregate",
    "check_distinct",
    "check_names",
    "check_own",
    "is_bounded",
]  # fmt: skip


def _clipped(z: Array, slope: float) -> Array:
    return jnp.clip(slope * z, -60.0, 60.0)


def _selu(z: Array) -> Array:
    scale, alpha = 1.0507009873554804934193349852946, 1.6732632423543772848170429916717
    return jnp.where(z > 0, scale * z, scale * alpha * jnp.expm1(jnp.minimum(z, 0)))


Activation = Callable[[Array], Array]

ACTIVATIONS: dict[str, Activation] = {
    "sigmoid": lambda z: jax.nn.sigmoid(_clipped(z, 5.0)),
    "tanh": lambda z: jnp.tanh(_clipped(z, 2.5)),
    "sin": lambda z: jnp.sin(_clipped(z, 5.0)),
    "gauss": lambda z: jnp.exp(-5.0 * jnp.clip(z, -3.4, 3.4) ** 2),
    "relu": lambda z: jnp.maximum(z, 0.0),
    "elu": lambda z: jnp.where(z > 0, z, jnp.expm1(jnp.minimum(z, 0))),
    "lelu": lambda z: jnp.where(z > 0, z, 0.005 * z),
    "selu": _selu,
    "softplus": lambda z: 0.2 * jax.nn.softplus(_clipped(z, 5.0)),
    "identity": lambda z: z,
    "clamped": lambda z: jnp.clip(z, -1.0, 1.0),
    "inv": lambda z: jnp.where(z == 0, 0.0, 1.0 / jnp.where(z == 0, 1.0, z)),
    "log": lambda z: jnp.log(jnp.maximum(z, 1e-7)),
    "exp": lambda z: jnp.exp(jnp.clip(z, -60.0, 60.0)),
    "abs": jnp.abs,
    "hat": lambda z: jnp.maximum(0.0, 1.0 - jnp.abs(z)),
    "square": lambda z: z**2,
    "cube": lambda z: z**3,
    "steep_sigmoid": lambda z: jax.nn.sigmoid(4.9 * z),  # the paper's; neat-python has no such
}
"""By neat-python's names; an infinite `inv` of a tiny number stays infinite here."""

_BOUNDED = {"sigmoid", "steep_sigmoid", "tanh", "sin", "gauss", "clamped", "hat"}

AGGREGATIONS = ("sum", "product", "max", "min", "maxabs", "median", "mean")
"""By neat-python's names; over no inputs, the product is 1 and every other is 0."""


def check_names(names: tuple[str, ...], known: tuple[str, ...], what: str) -> None:
    """Rejects an empty, unknown or repeated choice of functions."""
    wrong = [name for name in names if name not in known]
    if wrong or not names or isinstance(names, str):
        which = (
            f"{wrong[0]!r} is no {what}"
            if wrong and not isinstance(names, str)
            else f"{names!r} names no {what}s"
        )
        raise UsageError(f"{which}; legal are tuples of {', '.join(known)}.")
    check_distinct(f"{what}s", names)


def check_distinct(field: str, names: tuple[str, ...]) -> None:
    """Rejects a choice with a repeated name, which would be drawn twice as often."""
    repeated = [name for place, name in enumerate(names) if name in names[:place]]
    if repeated:
        raise UsageError(
            f"{field}={names!r}: {repeated[0]!r} is repeated; expected distinct names."
        )


def check_own(own: object) -> None:
    """Refuses activations of one's own that are no pairs of a new name and a function of numbers, one by one."""
    if not isinstance(own, tuple | list) or not all(
        isinstance(pair, tuple) and len(pair) == 2 for pair in own
    ):
        raise UsageError(f"own_activations={own!r}; legal is a tuple of pairs (name, function).")
    for place, (name, function) in enumerate(own):
        if not isinstance(name, str) or not name.isidentifier():
            raise UsageError(
                f"own_activations: {name!r} is no name; legal are names as Python has them."
            )
        if name in ACTIVATIONS or name in [other for other, _ in own[:place]]:
            raise UsageError(
                f"own_activations: {name!r} is the name of another activation; give a new one."
            )
        if not callable(function) or not isinstance(function, Hashable):
            raise UsageError(
                f"own_activations: {name!r} is {function!r}; legal are hashable functions."
            )
        like = jax.ShapeDtypeStruct((2, 3), jnp.float32)
        try:
            found: PyTree = jax.eval_shape(function, like)
        except Exception as error:  # whatever a function of users raises
            what = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0].rstrip(".:")
            raise UsageError(
                f"own_activations: {name!r} takes no array of float32 numbers ({what})."
            ) from None
        if not isinstance(found, jax.ShapeDtypeStruct) or (found.shape, found.dtype) != (
            like.shape,
            like.dtype,
        ):
            raise UsageError(
                f"own_activations: {name!r} makes {found} of {like}; legal is a number from each number."
            )


def is_bounded(names: tuple[str, ...]) -> bool:
    """Whether no activation among them can overflow."""
    return set(names) <= _BOUNDED


def activate(functions: tuple[Activation, ...], choice: Array, z: Array) -> Array:
    """Applies to each number the function that `choice`, its index into `functions`, says; shapes broadcast."""
    out = functions[0](z)
    for index, function in enumerate(functions[1:], 1):
        out = jnp.where(choice == index, function(z), out)
    return out


def aggregate(names: tuple[str, ...], choice: Array, terms: Array, mask: Array) -> Array:
    """Aggregates the last axis of `terms` where `mask` says, by the function that `choice` says.

    Args:
        names: the functions in use.
        choice: int32, index into `names`, of the shape of the result.
        terms: float32 `[..., K]`.
        mask: bool, broadcasts to `[..., K]`.
    """
    out = _aggregated(names[0], terms, mask)
    for index, name in enumerate(names[1:], 1):
        out = jnp.where(choice == index, _aggregated(name, terms, mask), out)
    return out


def _aggregated(name: str, terms: Array, mask: Array) -> Array:
    terms, mask = jnp.broadcast_arrays(terms, mask)
    count = jnp.sum(mask, -1)
    match name:
        case "sum":
            return jnp.sum(jnp.where(mask, terms, 0), -1)
        case "product":
            return jnp.prod(jnp.where(mask, terms, 1), -1)
        case "max":
            return jnp.where(count > 0, jnp.max(jnp.where(mask, terms, -jnp.inf), -1), 0)
        case "min":
            return jnp.where(count > 0, jnp.min(jnp.where(mask, terms, jnp.inf), -1), 0)
        case "maxabs":
            largest = jnp.argmax(jnp.where(mask, jnp.abs(terms), -1), -1)
            return jnp.where(
                count > 0, jnp.take_along_axis(terms, largest[..., None], -1)[..., 0], 0
            )
        case "mean":
            return jnp.sum(jnp.where(mask, terms, 0), -1) / jnp.maximum(count, 1)
    ordered = jnp.sort(jnp.where(mask, terms, jnp.inf), -1)
    low, high = (jnp.maximum(count - 1, 0) // 2)[..., None], (count // 2)[..., None]
    middle = [
        jnp.take_along_axis(ordered, at, -1)[..., 0]
        for at in (low, jnp.minimum(high, terms.shape[-1] - 1))
    ]
    return jnp.where(count > 0, (middle[0] + middle[1]) / 2, 0)
