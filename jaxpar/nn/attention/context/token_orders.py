"""Which device holds which places of a sequence: in turn, folded so that causal work is even, or dealt out."""

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from jaxpar.fields import OneOf, check_fields, field
from jaxpar.types import Array, UsageError

__all__ = ["ORDERS", "Order", "in_order", "padded"]

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
            nearest = (
                f"nearest are {below} and {below + parts}" if below else f"smallest is {parts}"
            )
            raise UsageError(
                f"a {self.name} order of {length} tokens over context={shares} needs a multiple of {parts}; "
                f"the {nearest}."
            )
        places = np.arange(length)
        if self.name == "zigzag":
            rows = places.reshape(parts, -1)
            return np.concatenate(
                [rows[part] for r in range(shares) for part in (r, parts - 1 - r)]
            )
        return places.reshape(-1, shares).T.reshape(-1) if self.name == "striped" else places

    @property
    def parts(self) -> int:
        """Runs of places in turn that a device holds; "striped" has none longer than a token."""
        return 2 if self.name == "zigzag" else 1

    def pairs(self, shares: int, device: int, other: int) -> list[tuple[int, int, bool]]:
        """Returns of which parts something is seen under a causal rule, of all others nothing.

        Under "zigzag" a device has two pairs with any other, each of T / 2 N queries and as many keys.

        Args:
          shares: N.
          device: Whose queries.
          other: Whose keys.

        Returns:
          (Part of the queries, part of the keys, whether the pair is causal: else each query sees each key).

        Raises:
          UsageError: If the order has no parts.
        """
        if self.name == "striped":
            raise UsageError(
                "a striped order has no parts that see all or nothing of another; take zigzag or contiguous."
            )

        def held(device):
            return (device, 2 * shares - 1 - device) if self.name == "zigzag" else (device,)

        both = [(i, j, a, b) for i, a in enumerate(held(device)) for j, b in enumerate(held(other))]
        return [(i, j, a == b) for i, j, a, b in both if a >= b]

    def split(self, x: Array, shares: int, axis: int = 1) -> Array:
        """Returns an array with time at `axis` in this order."""
        return jnp.take(x, self.places(x.shape[axis], shares), axis)

    def join(self, x: Array, shares: int, axis: int = 1) -> Array:
        """Returns an array of this order with time as it was."""
        return jnp.take(x, np.argsort(self.places(x.shape[axis], shares)), axis)


def in_order(batch: Mapping[str, np.ndarray], order: Order, shares: int) -> dict[str, np.ndarray]:
    """Returns a host's batch with its tokens in the order in which N devices hold them, and with their places.

    Args:
      batch: Arrays [B, T]; "places" of tokens in their rows are added, and tell attention that they lie in this order.
      order: Of the tokens.
      shares: N; with 1 the batch stays as it is.

    Raises:
      UsageError: If T does not divide as the order needs.
    """
    if shares == 1:
        return dict(batch)
    shape = next(iter(batch.values())).shape
    places = order.places(shape[1], shares)
    batch = {"places": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape), **batch}
    return {name: x[:, places] for name, x in batch.items()}


def padded(batch: Mapping[str, np.ndarray], length: int) -> dict[str, np.ndarray]:
    """Returns a host's batch with rows of `length` tokens, of which those that are added count nothing.

    They lie after all others, which under a causal rule see nothing of them, and repeat the last token of their row,
    its segment and its position: no document begins there.

    Args:
      batch: Arrays [B, T] of a language model; "weights" are added, 1 for the tokens that were there.
      length: At least T.

    Raises:
      UsageError: If the rows are longer.
    """
    rows, tokens = next(iter(batch.values())).shape
    if tokens == length:
        return dict(batch)
    if tokens > length:
        raise UsageError(
            f"rows of {tokens} tokens cannot be padded to {length}; the smallest length is {tokens}."
        )
    batch = {"weights": np.ones((rows, tokens), np.float32), **batch}
    made = {name: np.pad(x, ((0, 0), (0, length - tokens)), "edge") for name, x in batch.items()}
    for name, x in made.items():
        if name.endswith("weights"):  # those of what is rejected, too
            x[:, tokens:] = 0
    return made
