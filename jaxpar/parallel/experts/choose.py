"""Transports by name."""

from jaxpar.fields import OneOf
from jaxpar.nn.experts import Transport
from jaxpar.nn.experts.transport import SUM
from jaxpar.parallel.experts.annotate import Annotated
from jaxpar.parallel.experts.exchange import AllToAll
from jaxpar.parallel.experts.gather import Gather
from jaxpar.types import UsageError

__all__ = ["TRANSPORTS", "transport_for"]

TRANSPORTS = ("auto", "sum", "gather", "all_to_all", "annotated")


def transport_for(name: str) -> Transport:
    """Returns a transport by its name in `TRANSPORTS`.

    Raises:
      UsageError: If the name is unknown.
    """
    known = {"auto": Gather(), "sum": SUM, "gather": Gather(), "all_to_all": AllToAll(), "annotated": Annotated()}
    if name not in known:
        raise UsageError(f"transport={name!r} is unknown; legal are {OneOf(TRANSPORTS)}.")
    return known[name]
