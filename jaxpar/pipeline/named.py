"""Schedules by name, for flags."""

from collections.abc import Callable

from jaxpar.pipeline import orders
from jaxpar.pipeline.greedy import bitpipe, hanayo
from jaxpar.pipeline.ops import Schedule
from jaxpar.types import UsageError

__all__ = ["PIPELINES", "named_schedule"]

# (devices, microbatches, chunks of a device, where a schedule leaves them open) -> schedule
MAKERS: dict[str, Callable[[int, int, int], Schedule]] = {
    "gpipe": lambda p, m, v: orders.gpipe(p, m),
    "1f1b": lambda p, m, v: orders.one_f_one_b(p, m),
    "interleaved": orders.interleaved,
    "breadth_first": orders.breadth_first,
    "blockwise": lambda p, m, v: orders.blockwise(p, m, v, p),
    "hanayo": lambda p, m, v: hanayo(p, m, max(v // 2, 1)),
    "zb_h1": lambda p, m, v: orders.zb_h1(p, m),
    "zb_h2": lambda p, m, v: orders.zb_h2(p, m),
    "zb_v": lambda p, m, v: orders.zb_v(p, m),
    "bitpipe": lambda p, m, v: bitpipe(p, m),
}

PIPELINES: tuple[str, ...] = tuple(MAKERS)
"""Names that `named_schedule` knows, from the plainest on."""


def named_schedule(name: str, devices: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Returns a schedule by its name.

    Args:
      name: One of `PIPELINES`.
      devices: P.
      microbatches: m.
      chunks: v of each device, where the schedule leaves it open: interleaved, breadth_first, blockwise (in units of P
        microbatches) and hanayo (v / 2 waves).

    Raises:
      UsageError: For another name, or numbers of which no such schedule is made.
    """
    if name not in MAKERS:
        raise UsageError(f"pipeline={name!r} is unknown; legal are {', '.join(PIPELINES)}.")
    return MAKERS[name](devices, microbatches, chunks)
