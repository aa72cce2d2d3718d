"""How long a step would take if every part ran at an achievable share of its peak: a model, not a measurement.

    kernels = sum over kernels of max(operations / (MATMUL_SHARE x peak FLOP/s), bytes / (HBM_SHARE x peak bandwidth))
    links   = sum over collectives of bytes moved / (LINK_SHARE x bandwidth of the links)
    step    = max(kernels, links)

Kernels run one after the other, so each has a roofline of its own (Williams et al. 2009, doi 10.1145/1498765.1498785)
and their times add; collectives run beside them, so the longer of the two decides, which is the best case: whatever a
program cannot hide comes on top. A collective of V bytes over n devices moves V (n-1)/n through a device for an
all-gather, a reduce-scatter or an all-to-all, twice that for an all-reduce, and V for a permutation; on a torus its
ring uses two links, on a switch the whole link. Operations are in bfloat16; start-up times, and networks between hosts
of GPUs or slices of TPUs, are not in it.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable

from jax.sharding import Mesh

from jaxpar.aot.hlo import Crossing
from jaxpar.aot.topology import Chip
from jaxpar.aot.traffic import Traffic

__all__ = ["HBM_SHARE", "LINK_SHARE", "MATMUL_SHARE", "Roofline", "roofline"]

MATMUL_SHARE = 798 / 989.4
"""Achievable share of peak FLOP/s: a product of 8192^3 in bfloat16 on an H100; assumed of other chips."""
HBM_SHARE = 3.0 / 3.35
"""Achievable share of peak memory bandwidth: a copy on an H100; assumed of other chips."""
LINK_SHARE = 0.8
"""Achievable share of link bandwidth: assumed of all."""

_MOVED = {"all-reduce": 2.0, "collective-permute": 1.0, "collective-broadcast": 1.0}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds a step, by the model of this file.

    Attributes:
      compute_s: All operations at the achievable rate.
      memory_s: All bytes at the achievable rate.
      kernels_s: Both, kernel by kernel.
      links_s: Mesh axes -> time of their collectives.
      step_s: What the model predicts.
      bound: "compute", "memory" or "links": the term that decides.
      mfu: Model FLOP utilisation: of the chip's peak, what the model's own operations use.
    """

    compute_s: float
    memory_s: float
    kernels_s: float
    links_s: dict[str, float]
    step_s: float
    bound: str
    mfu: float


def roofline(
    traffic: Traffic,
    crossings: Iterable[Crossing],
    chip: Chip,
    mesh: Mesh,
    model_flops: float = 0.0,
) -> Roofline:
    """Returns the prediction for one step.

    Args:
      traffic: Of one device.
      crossings: Collectives of the compiled step, summed.
      chip: Its peaks.
      mesh: Names and sizes of the axes.
      model_flops: What the model needs, over all devices; 0 takes the counted operations.
    """
    flops, bandwidth = MATMUL_SHARE * chip.flops, HBM_SHARE * chip.hbm_bandwidth
    links: dict[str, float] = collections.defaultdict(float)
    for found in crossings:
        count = (
            math.prod(mesh.shape[axis] for axis in found.axes.split("+"))
            if found.axes != "?"
            else mesh.size
        )
        moved = found.bytes * _MOVED.get(found.kind, (count - 1) / count)
        if found.kind == "all-reduce":  # a reduce-scatter and an all-gather
            moved *= (count - 1) / count
        links[found.axes] += moved / (LINK_SHARE * chip.link_bandwidth * (2 if chip.dims else 1))
    compute, memory = traffic.flops / flops, traffic.bytes / bandwidth
    kernels, network = traffic.seconds(flops, bandwidth), sum(links.values())
    step = max(kernels, network)
    bound = "links" if network > kernels else "compute" if compute > memory else "memory"
    needed = model_flops or traffic.flops * mesh.size
    mfu = needed / (step * mesh.size * chip.flops) if step else 0.0
    return Roofline(compute, memory, kernels, dict(links), step, bound, mfu)
