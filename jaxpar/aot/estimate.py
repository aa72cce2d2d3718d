"""The estimate of a job: whether it fits, where its memory goes, what it computes, what crosses devices, how fast."""

import dataclasses
import pathlib
import re
import tempfile
import time
from typing import Any, NamedTuple

import jax

from jaxpar.aot import hlo
from jaxpar.aot.job import Job
from jaxpar.aot.memory_estimate import analyse, arguments, saved_bytes
from jaxpar.aot.roofline import Roofline, roofline
from jaxpar.aot.topology import Chip, chip_of, hbm_bytes, status_of
from jaxpar.lower.flops import Flops, flops_of
from jaxpar.mesh import named_shardings, platform
from jaxpar.types import UsageError

__all__ = [
    "EFFORTS",
    "MARGINS",
    "Compilation",
    "Estimate",
    "compile_job",
    "compile_lowered",
    "estimate",
    "has_margin",
    "margin_of",
]

EFFORTS: dict[str, dict[str, Any]] = {
    # A fifth of the compile time; memory was 6 % off a full compile's for GPT-2 on four v5e.
    "low": {"exec_time_optimization_effort": -1.0, "memory_fitting_effort": -1.0},
    "full": {},
    "none": {},
}
"""How hard the compiler tries; "none" does not compile: everything is the analytic model's."""

MARGINS: dict[str, float] = {
    # Five steps on an H100 took what a full compile said to 0.1 %; the rest is the runtime's own.
    "full": 0.02,
    # Six hundredths that a low effort was off a full one's, and the above.
    "low": 0.08,
    # On an H100 the analytic model was 1.4 % under to 6.7 % over, for a TPU 7 % over. XLA for CPUs,
    # which fuses little, needs up to a quarter more.
    "none": 0.10,
}
"""Fraction of a device's memory that must stay free, by effort: how far its peak may be off."""

_TOO_MUCH = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
_USED_OF = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm")
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


class Compilation(NamedTuple):
    """What compiling gave.

    Attributes:
      program: None if it was refused for want of memory.
      text: Of the compiled program; empty where a refusal came first.
      peak: Bytes that it uses at most, or would need.
      capacity: What the compiler says a device has; None unless it refused.
    """

    program: jax.stages.Compiled | None
    text: str
    peak: float
    capacity: float | None


@dataclasses.dataclass(frozen=True)
class Estimate:
    """What a step needs and does; bytes are of one device.

    Attributes:
      fits: Whether the peak leaves the margin free; None where the capacity is unknown.
      margin: Fraction of the capacity that must stay free, of `MARGINS`.
      capacity: Bytes that a program may use.
      peak: Most bytes in use at once, arguments included.
      parameters: Of the arguments, exactly.
      optimizer: Of the arguments, exactly.
      other: Batch, key, counters, exactly.
      activations: What the forward pass saves for the backward pass, from `jax.vjp`; None if no loss was given.
      temporaries: The peak without the arguments; activations are within it.
      flops: Counted over all devices.
      crossings: Collectives, summed; empty if not compiled.
      compile_s: Seconds; 0 if not compiled.
      compiled: Whether the peak is a compiler's; else the analytic model's.
      roofline: Predicted times, a model; None for a device without known peaks.
      notes: What the numbers leave out here.
    """

    fits: bool | None
    margin: float
    capacity: float | None
    peak: float
    parameters: float
    optimizer: float
    other: float
    activations: float | None
    temporaries: float
    flops: Flops
    crossings: tuple[hlo.Crossing, ...]
    compile_s: float
    compiled: bool
    roofline: Roofline | None
    notes: tuple[str, ...]

    @property
    def excess(self) -> float:
        """Bytes that the peak is over the capacity; negative is room."""
        return self.peak - (self.capacity or self.peak)


def estimate(job: Job, *, effort: str = "low", chip: Chip | None = None) -> Estimate:
    """Estimates a job: traces it, compiles it for its mesh's devices, and runs nothing.

    Args:
      job: What to estimate.
      effort: As in `EFFORTS`.
      chip: Of which the devices are stand-ins, for machines without a compiler here; by default what they are.

    Raises:
      UsageError: If the job cannot be laid out on its mesh, or the effort is unknown.
    """
    margin = margin_of(effort)
    device = job.mesh.devices.flat[0]
    capacity = chip.hbm_bytes if chip else hbm_bytes(device)
    chip = chip or chip_of(device)
    jaxpr = job.trace()
    flops = flops_of(jaxpr)
    memory, traffic = analyse(job, jaxpr)
    notes = (
        [f"{flops.unknown_loops} loops of unknown length count once."]
        if flops.unknown_loops
        else []
    )
    crossing: tuple[hlo.Crossing, ...] = ()
    peak, seconds = memory.peak, 0.0
    if effort != "none":
        start = time.perf_counter()
        compilation = compile_job(job, effort)
        seconds = time.perf_counter() - start
        peak, capacity = compilation.peak, compilation.capacity or capacity
        if job.mesh.size > 1 and compilation.text:
            crossing = hlo.crossings(hlo.collectives(compilation.text, job.mesh))
            if None in hlo.trip_counts(compilation.text).values():
                notes.append("collectives in a loop of unknown length count once.")
        elif job.mesh.size > 1:
            crossing = traffic.crossings
            notes.append(
                "the program was refused for want of memory; its collectives are estimated from the jaxpr."
            )
    elif job.mesh.size > 1:
        crossing = traffic.crossings
        notes.append("collectives are estimated from the jaxpr: only a compiler knows them.")
    held = arguments(job)
    fits = None
    if capacity is not None:
        fits = has_margin(peak, capacity, margin)
    return Estimate(
        fits=fits,
        margin=margin,
        capacity=capacity,
        peak=peak,
        parameters=held[0],
        optimizer=held[1],
        other=held[2],
        activations=saved_bytes(job),
        temporaries=peak - sum(held),
        flops=flops,
        crossings=crossing,
        compile_s=seconds,
        compiled=effort != "none",
        roofline=None
        if chip is None
        else roofline(traffic, crossing, chip, job.mesh, job.model_flops),
        notes=tuple(notes),
    )


def margin_of(effort: str) -> float:
    """Returns the margin of a peak that is found by this effort.

    Raises:
      UsageError: If the effort is unknown.
    """
    if effort not in EFFORTS:
        raise UsageError(f"effort={effort!r} is unknown; legal are {', '.join(EFFORTS)}.")
    return MARGINS[effort]


def has_margin(peak: float, capacity: float, margin: float) -> bool:
    """Returns whether a peak leaves a fraction `margin` of the capacity free."""
    return peak <= (1 - margin) * capacity


def compile_job(job: Job, effort: str = "low") -> Compilation:
    """Compiles a job for its mesh's devices; a refusal for want of memory is a result, not an error."""
    shardings = job.shardings()
    with job.ambient(), tempfile.TemporaryDirectory() as folder:
        outs = None
        if job.out_axes is not None:
            shapes = jax.eval_shape(job.step, *job.args)
            outs = tuple(
                None if axes is None else named_shardings(shape, axes)
                for shape, axes in zip(shapes, job.out_axes, strict=True)
            )
        step = jax.jit(
            job.step, donate_argnums=job.donate, in_shardings=shardings, out_shardings=outs
        )
        options = dict(job.options or {}) | EFFORTS[effort]
        if platform() == "tpu":
            # A libtpu that is newer than jaxlib writes instructions that jaxlib cannot print; libtpu itself can.
            options |= {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        try:
            compiled = compile_lowered(step.lower(*job.args), options)
        except jax.errors.JaxRuntimeError as error:
            wanted = _TOO_MUCH.search(str(error)) or _USED_OF.search(str(error))
            if "RESOURCE_EXHAUSTED" not in str(error) or not wanted:
                kind = job.mesh.devices.flat[0].device_kind
                raise UsageError(
                    f"the compiler for {kind} does not take this step ({status_of(error)}); effort=none estimates it "
                    "without compiling."
                ) from error
            need, unit, have, other = wanted.groups()
            return Compilation(
                program=None,
                text=_dumped(folder),
                peak=float(need) * 2.0 ** _UNITS[unit],
                capacity=float(have) * 2.0 ** _UNITS[other],
            )
        text = _dumped(folder) or compiled.as_text() or ""
        on_tpu = platform() == "tpu"
    stats: Any = compiled.memory_analysis()
    peak = stats.argument_size_in_bytes + stats.temp_size_in_bytes
    peak += stats.output_size_in_bytes - stats.alias_size_in_bytes
    # XLA for TPU shares memory between what is not alive at once, and states the peak; the others allocate all of it.
    if on_tpu:
        peak = stats.peak_memory_in_bytes
    return Compilation(program=compiled, text=text, peak=float(peak), capacity=None)


def compile_lowered(
    lowered: jax.stages.Lowered, options: dict[str, bool | int | float | str]
) -> jax.stages.Compiled:
    """Compiles; options of `EFFORTS` that this version of the compiler does not know are left out."""
    while True:
        try:
            return lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            unknown = re.search(r"No such compile option: '(\w+)'", str(error))
            if not unknown or unknown[1] not in {
                name for effort in EFFORTS.values() for name in effort
            }:
                raise
            options = {name: value for name, value in options.items() if name != unknown[1]}


def _dumped(folder: str) -> str:
    """Returns the compiled program that XLA wrote into a folder, where it writes kernels too; empty without one."""
    files = list(pathlib.Path(folder).glob("*.jit_*.after_optimizations.txt"))
    return files[0].read_text() if files else ""
