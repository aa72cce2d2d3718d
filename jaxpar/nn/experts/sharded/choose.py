"""Transports by name, and the one that sends least."""

import dataclasses
from collections.abc import Iterator

from jaxtyping import Array, Float

from jaxpar.fields import OneOf
from jaxpar.mesh import mesh_axes, num_shares
from jaxpar.nn.experts import Experts, Transport
from jaxpar.nn.experts.sharded.all_to_all import AllToAll
from jaxpar.nn.experts.sharded.annotate import Annotated
from jaxpar.nn.experts.sharded.gather import Gather, shared_axes
from jaxpar.nn.experts.sharded.lend import Spill
from jaxpar.nn.experts.sharded.ragged import Ragged
from jaxpar.nn.experts.transport import SUM, Routed, Weights
from jaxpar.nn.mixer import ActivationSizes, Context
from jaxpar.transfers import Transfer
from jaxpar.types import UsageError

__all__ = ["TRANSPORTS", "LeastSent", "bytes_sent", "transport_for"]


@dataclasses.dataclass(frozen=True)
class LeastSent:
    """Of `Gather` and `AllToAll` the one that sends fewer bytes where choices are even; of equal ones the first."""

    def of(self, layer: Experts, sizes: ActivationSizes) -> Transport:
        """Returns that one, on the ambient mesh."""
        return min(
            (Gather(), AllToAll()), key=lambda transport: bytes_sent(transport, layer, sizes)
        )

    def __call__(
        self, layer: Experts, tokens: Routed, weights: Weights, context: Context
    ) -> Float[Array, "B T D"]:
        """Returns the mixture."""
        x, expert, weight = tokens
        rows = x.shape[0] / num_shares(*mesh_axes("batch"))
        sizes = ActivationSizes(rows * x.shape[1], 1, x.dtype.itemsize, 1, x.shape[2], rows)
        return self.of(layer, sizes)(layer, tokens, weights, context)

    def transfers(self, layer: Experts, sizes: ActivationSizes) -> Iterator[Transfer]:
        """Declares what that one does."""
        return self.of(layer, sizes._replace(layers=1, again=1)).transfers(layer, sizes)


def bytes_sent(transport: Transport, layer: Experts, sizes: ActivationSizes) -> float:
    """Returns the bytes that a device sends in a training step to reach experts of others, where choices are even.

    By rings: of a gathered or scattered array of S bytes (P - 1) / P S, of a summed one twice that, and of what is
    exchanged all but the share that stays.
    """
    if isinstance(transport, LeastSent):
        transport = transport.of(layer, sizes._replace(layers=1, again=1))
    moves = transport.transfers(layer, sizes)
    if isinstance(transport, AllToAll | Ragged | Spill) and shared_axes():
        moves = transport.even(layer, sizes)
    sums = 1 if shared_axes() and transport != SUM else 2
    total = 0.0
    for move in moves:
        shares = num_shares(*(axis for axis in move.axes if axis in mesh_axes("experts")))
        total += (sums if move.kind == "sum" else 1) * move.bytes * (shares - 1) / shares
    return total


BY_NAME: dict[str, Transport] = {
    "auto": LeastSent(),
    "sum": SUM,
    "gather": Gather(),
    "all_to_all": AllToAll(),
    "annotated": Annotated(),
    "ragged": Ragged(),
    "spill": Spill(),
}
TRANSPORTS = tuple(BY_NAME)


def transport_for(name: str) -> Transport:
    """Returns a transport by its name in `TRANSPORTS`.

    Raises:
      UsageError: If the name is unknown.
    """
    if name not in BY_NAME:
        raise UsageError(f"transport={name!r} is unknown; legal are {OneOf(TRANSPORTS)}.")
    return BY_NAME[name]
