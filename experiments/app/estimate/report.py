"""What an estimate prints and writes: tables, report.json, a picture of the memory."""

import dataclasses
import json
import pathlib
import re
from typing import Any

import jax
from rich.console import Console
from rich.table import Column, Table

from jaxpar import aot
from jaxpar.aot import LINK_SHARE
from jaxpar.io import plot_memory
from jaxpar.lm import num_params

from .. import runner
from ..runner import say

PARTS = ("parameters", "optimizer", "other", "temporaries")


def mesh_text(mesh: Any) -> str:
    """Returns the axes over 1, such as "fsdp=16 tensor=4"."""
    return (
        " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    )


def size_text(size: float) -> str:
    """Returns bytes in the unit that suits them, such as "1.41 GiB"."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 2**power:
            return f"{size / 2**power:,.2f} {unit}"
    return f"{size:.0f} B"


def slug(*parts: str) -> str:
    """Returns a folder's name."""
    return re.sub(r"[^\w.]+", "-", "-".join(parts)).lower()


def print_estimate(config: Any, job: aot.Job, found: aot.Estimate, chip: aot.Chip | None) -> None:
    """Prints the whole report of one estimate."""
    rows, length = config.data.batch_size, config.data.seq_len
    device = chip.name if chip else job.mesh.devices.flat[0].device_kind
    say(f"model      {num_params(config.model):,} parameters")
    say(f"step       {'one token for' if config.decode else 'training on'} {rows} rows of {length}")
    say(
        f"mesh       {mesh_text(job.mesh)} on {job.mesh.size} {device} device{'s' * (job.mesh.size > 1)}"
    )
    how = (
        f"compiled in {found.compile_s:.0f} s"
        if found.compiled
        else "analytic model, nothing compiled"
    )
    say(f"memory     {how}\n")
    print_table(_memory_table(found))
    say(verdict(found) + "\n")
    if found.crossings:
        print_table(_crossing_table(found))
    if found.roofline is not None:
        print_table(_time_table(config, found))
    else:
        say("no prediction of time: the peaks of this machine are unknown.")
    say(
        f"FLOPs      {found.flops.total:.4g} a step by the jaxpr; {job.model_flops:.4g} are the model's own."
    )
    for note in found.notes:
        say(f"note       {note}")


def verdict(found: aot.Estimate) -> str:
    """Says whether it fits, in a sentence."""
    if found.fits is None:
        return f"peak {size_text(found.peak)} a device; how much this device has is unknown."
    word = "fits" if found.fits else "DOES NOT FIT"
    rest = "too much" if found.excess > 0 else "to spare"
    capacity = found.capacity or 0.0
    used = f"{size_text(found.peak)} of {size_text(capacity)} a device"
    free = f"{size_text(abs(found.excess))} {rest}"
    return f"{word} with {margin_text(found.margin)}: {used}, {free}."


def margin_text(margin: float) -> str:
    """Returns a margin as "8 % margin"."""
    return f"{100 * margin:.0f} % margin"


def _memory_table(found: aot.Estimate) -> Table:
    table = Table("memory a device", _right("size"), "what it is")
    what = {
        "parameters": "exact",
        "optimizer": "exact",
        "other": "exact: batch or cache, key, counters",
        "temporaries": "peak less the above",
    }
    for name in PARTS:
        table.add_row(name, size_text(getattr(found, name)), what[name])
        if name == "temporaries" and found.activations is not None:
            text = size_text(found.activations)
            table.add_row(
                "  activations", text, "what the gradient saves, by JAX; the compiler may keep less"
            )
    table.add_row(
        "peak", size_text(found.peak), "the compiler's" if found.compiled else "analytic model"
    )
    return table


def _crossing_table(found: aot.Estimate) -> Table:
    table = Table("collectives a step", "mesh axes", _right("times"), _right("a device"))
    for row in found.crossings:
        table.add_row(row.kind, row.axes, f"{row.count:,}", size_text(row.bytes))
    return table


def _time_table(config: Any, found: aot.Estimate) -> Table:
    line = found.roofline
    assert line is not None
    table = Table("model, not measurement", _right("ms a step"), "")
    table.add_row("compute", f"{1e3 * line.compute_s:.2f}", "all products at the achievable rate")
    table.add_row("memory", f"{1e3 * line.memory_s:.2f}", "all traffic at the achievable rate")
    table.add_row(
        "kernels", f"{1e3 * line.kernels_s:.2f}", "one after the other, each by its own bound"
    )
    for axes, seconds in line.links_s.items():
        table.add_row(f"links, {axes}", f"{1e3 * seconds:.2f}", "collectives, beside the kernels")
    tokens = config.data.batch_size * (1 if config.decode else config.data.seq_len)
    table.add_row(
        "step",
        f"{1e3 * line.step_s:.2f}",
        f"bound by {line.bound}; {tokens / line.step_s:,.0f} tokens/s",
    )
    table.add_row("MFU", f"{100 * line.mfu:.1f} %", "the model's own FLOPs, of the chip's peak")
    return table


def print_placements(rows: list[aot.Placement]) -> None:
    """Prints one row a parameter."""
    table = Table("parameter", "shape", "split over", _right("a device"), "rule")
    for row in rows:
        if row.group == "parameters":
            spec = ", ".join(
                "+".join(e) if isinstance(e, tuple) else str(e or "-") for e in row.spec
            )
            name = row.path.split("params.")[-1]
            table.add_row(name, str(row.shape), f"({spec})", size_text(row.bytes), row.rule)
    print_table(table)


def print_moves(source: Any, sent: dict[str, float]) -> None:
    """Prints what bringing the state from another layout sends."""
    kinds = ", ".join(f"{size_text(size)} by {kind}" for kind, size in sent.items())
    say(
        f"from       {source}: each device sends {size_text(sum(sent.values()))}{kinds and ': '}{kinds}."
    )


def print_context(sent: dict[str, float], chip: aot.Chip | None) -> None:
    """Prints what a device sends for attention over a split sequence, and how long its links take if that is all."""
    if not sent:
        return
    table = Table("attention over a split sequence", _right("a device"), _right("ms a step"))
    for way, size in sent.items():
        table.add_row(
            way, size_text(size), f"{1e3 * context_seconds({way: size}, chip):.2f}" if chip else ""
        )
    table.add_row(
        "",
        size_text(sum(sent.values())),
        f"{1e3 * context_seconds(sent, chip):.2f}" if chip else "",
    )
    print_table(table)


def print_experts(sent: dict[str, float], taken: str, chip: aot.Chip | None) -> None:
    """Prints what a device sends to reach experts of others, by each transport, and how long its links take for it."""
    if not sent:
        return
    table = Table(
        f"tokens to their experts, of which transport={taken}",
        _right("a device"),
        _right("ms a step"),
    )
    for name, size in sent.items():
        table.add_row(
            name,
            size_text(size),
            f"{1e3 * context_seconds({'all': size}, chip):.2f}" if chip else "",
        )
    print_table(table)


def context_seconds(sent: dict[str, float], chip: aot.Chip) -> float:
    """Returns how long the links take: a torus has one up and one down, a switch one for all that a device sends."""
    up, down, every = (sent.get(way, 0.0) for way in ("up", "down", "all"))
    busiest = max(up, down) + every / 2 if chip.dims else up + down + every
    return busiest / (LINK_SHARE * chip.link_bandwidth)


def print_findings(findings: list[aot.Finding]) -> None:
    """Prints the candidates, the best first."""
    table = Table(
        "candidate",
        "verdict",
        _right("peak"),
        _right("by the model"),
        _right("step ms"),
        _right("MFU"),
    )
    shown = [f for f in findings if f.peak is not None][:20]
    for f in shown:
        line = f.estimate.roofline if f.estimate else None
        table.add_row(
            str(f.candidate),
            f.verdict,
            size_text(f.estimate.peak) if f.estimate else "",
            size_text(f.peak or 0),
            f"{1e3 * (line.step_s if line else f.step_s or 0):.1f}",
            f"{100 * line.mfu:.1f} %" if line else "",
        )
    print_table(table)
    illegal = sum(f.peak is None for f in findings)
    say(
        f"{len(findings)} candidates, {sum(f.estimate is not None for f in findings)} compiled, {illegal} not legal."
    )
    say(
        "times are a model, not a measurement; those without an MFU estimate their collectives, too."
    )


def estimate_json(found: aot.Estimate) -> dict[str, Any]:
    """Returns an estimate as JSON holds it."""
    rows = [row._asdict() for row in found.crossings]
    values = dataclasses.asdict(found)
    return values | {"excess": found.excess, "flops": found.flops._asdict(), "crossings": rows}


def findings_json(findings: list[aot.Finding]) -> list[dict[str, Any]]:
    """Returns the outcome of a search as JSON holds it."""
    return [
        dataclasses.asdict(dataclasses.replace(f, estimate=None))
        | {"estimate": estimate_json(f.estimate) if f.estimate else None}
        for f in findings
    ]


def write(
    folder: pathlib.Path, content: dict[str, Any], bars: dict[str, aot.Estimate], copy: str
) -> None:
    """Writes report.json and memory.png into a folder, and the report to `copy` as well."""
    if jax.process_index():
        return
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1) + "\n"
    for path in [folder / "report.json", *([pathlib.Path(copy)] if copy else [])]:
        path.write_text(text)
    if bars:
        parts = {
            name: {part: getattr(found, part) for part in PARTS} for name, found in bars.items()
        }
        capacity = next(iter(bars.values())).capacity
        plot_memory(parts, capacity, folder / "memory.png", title="Memory of a device, estimated")
    say(f"report     {runner.short(folder / 'report.json')}")


def _right(text: str) -> Any:
    return Column(text, justify="right")


def print_table(table: Table) -> None:
    """Prints a table, by one process of all."""
    if jax.process_index() == 0:
        Console(width=None if Console().is_terminal else 110).print(table)
