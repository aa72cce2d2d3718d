"""Chips and their published peaks, and compile-only devices of TPU slices that are not here."""

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

from jaxpar.types import Device, UsageError

__all__ = [
    "CHIPS",
    "Chip",
    "Topology",
    "chip_of",
    "devices",
    "hbm_bytes",
    "parse_topology",
    "status_of",
]


@dataclasses.dataclass(frozen=True)
class Chip:
    """Peaks of one JAX device: a chip, but half a chip of a tpu7x, which is two devices.

    Attributes:
      name: As in "v5p:4x4x4".
      kind: How `device_kind` of JAX begins.
      flops: Dense bfloat16 FLOP/s.
      hbm_bytes: Capacity, of a TPU without what its runtime keeps.
      hbm_bandwidth: Bytes/s.
      link_bandwidth: Bytes/s one way of one link: ICI of a TPU, NVLink of a GPU.
      links: Links of the device; a ring of an all-gather uses two of a torus at a time, and all of a GPU's switch.
      dims: Dimensions of the torus; 0 for a switch.
      devices: JAX devices a chip.
      example: Shape to name in an error.
      options: What libtpu needs to know besides.
    """

    name: str
    kind: str
    flops: float
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    links: int
    dims: int = 0
    devices: int = 1
    example: str = "8"
    options: tuple[tuple[str, Any], ...] = ()


_MEGACORE = (
    ("chip_config_name", "megacore"),
)  # libtpu would show each v4 chip as two devices, and JAX refuses those

# TPU v5e, v5p and v6e: "How to scale your model", its table of TPU specs; v4: Jouppi et al., arXiv:2304.01433, table 4,
# and the same book; tpu7x: Google Cloud's TPU7x page (a chip: 2307 TFLOP/s, 192 GB, 7.37 TB/s, 1.2 TB/s of ICI over
# six links and both ways), halved. A TPU's memory is what libtpu's compiler lets a program have, read out of its
# refusals. GPUs: NVIDIA's data sheets of the SXM parts, dense, not with sparsity.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", "TPU v4", 275e12, 30.75 * 2**30, 1.23e12, 45e9, 6, 3, 1, "2x2x2", _MEGACORE),
        Chip("v5e", "TPU v5 lite", 197e12, 15.75 * 2**30, 0.81e12, 45e9, 4, 2, 1, "4x4"),
        Chip("v5p", "TPU v5", 459e12, 95.73 * 2**30, 2.8e12, 90e9, 6, 3, 1, "4x4x4"),
        Chip("v6e", "TPU v6 lite", 920e12, 31.24 * 2**30, 1.6e12, 90e9, 4, 2, 1, "4x4"),
        Chip("tpu7x", "TPU7x", 1153.5e12, 94.74 * 2**30, 3.69e12, 100e9, 6, 3, 2, "2x2x1"),
        Chip("a100", "NVIDIA A100", 312e12, 80e9, 2.039e12, 300e9, 1),
        Chip("h100", "NVIDIA H100", 989.4e12, 80e9, 3.35e12, 450e9, 1),
        Chip("h200", "NVIDIA H200", 989.4e12, 141e9, 4.8e12, 450e9, 1),
        Chip("b200", "NVIDIA B200", 2250e12, 180e9, 7.7e12, 900e9, 1),
    )
}


class Topology(NamedTuple):
    """A slice of chips: `text` as given, its kind of chip and its shape."""

    text: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """JAX devices of the slice."""
        return math.prod(self.shape) * self.chip.devices

    @property
    def offline(self) -> bool:
        """Whether no compiler for it can run here: GPUs can be estimated by the analytic model alone."""
        return not self.chip.dims


def parse_topology(text: str) -> Topology:
    """Reads "v5p:4x4x4" (chips along each axis of the torus) or "h100:8".

    Raises:
      UsageError: For an unknown chip or a shape that it cannot have, with legal examples.
    """
    found = re.fullmatch(r"([a-z0-9]+):(\d+(?:x\d+)*)", text.strip().lower())
    chip = CHIPS.get(found[1]) if found else None
    if found is None or chip is None:
        legal = ", ".join(f"{chip.name}:{chip.example}" for chip in CHIPS.values())
        raise UsageError(
            f"topology={text!r} is unknown; legal are a kind of chip and a shape, such as {legal}."
        )
    shape = tuple(int(size) for size in found[2].split("x"))
    if len(shape) != (chip.dims or 1) or min(shape) < 1:
        what = f"{chip.dims} sizes joined by x" if chip.dims else "a number of GPUs"
        raise UsageError(
            f"topology={text!r}: {chip.name} takes {what}, such as {chip.name}:{chip.example}."
        )
    return Topology(f"{chip.name}:{found[2]}", chip, shape)


def devices(topology: Topology) -> list[Device]:
    """Returns compile-only devices of a TPU slice, of which none needs to exist; silent.

    Sets `TPU_SKIP_MDS_QUERY` and `ALLOW_MULTIPLE_LIBTPU_LOAD` for this process (no question to a cloud's metadata
    server; no refusal because another process holds libtpu's lock file). One chip to thousands: 0.2 s for 6,144.

    Raises:
      UsageError: If libtpu is not installed, or does not know the shape.
    """
    if topology.offline:
        raise UsageError(
            f"{topology.text} has no compiler outside its own machine; it is estimated analytically."
        )
    if importlib.util.find_spec("libtpu") is None:
        raise UsageError(
            f"topology={topology.text} needs libtpu; install it with `pip install libtpu` (it needs no TPU)."
        )
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    from jax.experimental import topologies

    shape = "x".join(map(str, topology.shape))
    options: dict[str, Any] = dict(topology.chip.options)
    # A host holds 2 x 2 chips; a shape that those do not tile is estimated as hosts of one chip.
    if any(size % 2 and size > 1 for size in topology.shape[:2]):
        options["chips_per_host_bounds"] = [1, 1, 1]
    try:
        with _quiet():
            return list(
                topologies.get_topology_desc(
                    f"{topology.chip.name}:{shape}", "tpu", **options
                ).devices
            )
    except (
        Exception
    ) as error:  # jaxlib raises its own kind, and libtpu says in many lines what it dislikes
        if "INVALID_ARGUMENT" in str(error):
            example = f"{topology.chip.name}:{topology.chip.example}"
            raise UsageError(
                f"topology={topology.text} is no slice that libtpu knows; legal is a shape such as {example}."
            ) from error
        raise UsageError(
            f"libtpu does not start for topology={topology.text} ({status_of(error)}); another process may hold it, or "
            "it does not fit this jaxlib."
        ) from error


def status_of(error: BaseException) -> str:
    """Returns the kind of error that XLA's and libtpu's messages begin with, in words: "invalid argument"."""
    found = re.match(r"\s*([A-Z]+(?:_[A-Z]+)*):", str(error))
    return found[1].lower().replace("_", " ") if found else "it does not say why"


def chip_of(device: Device) -> Chip | None:
    """Returns the row of `CHIPS` of a JAX device, None for a CPU or an unknown kind."""
    rows = [chip for chip in CHIPS.values() if device.device_kind.startswith(chip.kind)]
    return max(rows, key=lambda chip: len(chip.kind), default=None)


def hbm_bytes(device: Device) -> float | None:
    """Returns the memory of a device that a program may use: what it reports itself, else its row of `CHIPS`."""
    with contextlib.suppress(Exception):  # compile-only devices and CPUs refuse the question
        if limit := (device.memory_stats() or {}).get("bytes_limit"):
            return float(limit)
    chip = chip_of(device)
    return chip.hbm_bytes if chip else None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Drops what C++ writes to stderr: libtpu tells its authors which of its files met what."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)
