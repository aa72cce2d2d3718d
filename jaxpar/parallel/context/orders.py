"""Which device holds which places of a sequence: in turn, folded so that causal work is even, or dealt out."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jaxpar.fields import OneOf, check_fields, field
from jaxpar.types import Array, UsageError

__all__ = ["ORDERS", "Order"]

ORDERS = ("contiguous", "zigzag", "striped")


@dataclasses.dataclass(frozen=True)
class Order:
    """An order of the places of a sequence, of which N devices hold a share each, one after the other.

    Attributes:
      name: "contiguous" (device r holds the r-th part), "zigzag" (of 2 N parts the r-th and the r-th from the end, so
        that each device has as many pairs of query and earlier key as any other) or "striped" (places r, r + N, ...;
        arXiv:2311.09431).
    """

    name: str = field("zigzag", OneOf(ORDERS))

    __post_init__ = check_fields

    def places(self, length: int, shares: int) -> np.ndarray:
        """Returns the place in the sequence of each token, int [T], in the order in which devices hold them.

        Raises:
          UsageError: If T does not divide into as many parts as the order has.
        """
        parts = shares * (2 if self.name == "zigzag" else 1)
        if length % parts:
            below = length // parts * parts
            nearest = f"nearest are {below} and {below + parts}" if below else f"smallest is {parts}"
            raise UsageError(
                f"a {self.name} order of {length} tokens over context={shares} needs a multiple of {parts}; "
                f"the {nearest}."
            )
        places = np.arange(length)
        if self.name == "zigzag":
            rows = places.reshape(parts, -1)
            return np.concatenate([rows[part] for r in range(shares) for part in (r, parts - 1 - r)])
        return places.reshape(-1, shares).T.reshape(-1) if self.name == "striped" else places

    def split(self, x: Array, shares: int, axis: int = 1) -> Array:
        """Returns an array with time at `axis` in this order."""
        return jnp.take(x, self.places(x.shape[axis], shares), axis)

    def join(self, x: Array, shares: int, axis: int = 1) -> Array:
        """Returns an array of this order with time as it was."""
        return jnp.take(x, np.argsort(self.places(x.shape[axis], shares)), axis)
