"""What an estimate says of a pipeline: how long stages wait, and what each keeps; and a search of schedules by both."""

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.table import Column, Table

from jaxpar import aot
from jaxpar.aot import JobLayout, has_margin
from jaxpar.lm import loss
from jaxpar.lm import params as declared
from jaxpar.lm.stages import stages
from jaxpar.mesh import rules_from
from jaxpar.pipeline import (
    PIPELINES,
    Pipelined,
    Schedule,
    TaskCosts,
    loop,
    named_schedule,
    search_schedule,
    simulate_schedule,
    vee,
)
from jaxpar.types import UsageError

from ..lm.pipeline_flags import with_sides
from ..mesh_flags import shares
from .report import size_text

MARGIN = 0.20
"""Fraction of a device's memory that must stay free. In `bench/pipeline_memory.py` a compiler
needs up to a quarter more than is counted here."""

_LEADING = {"inbox": 1, "head": 1, "stash": 2, "factors": 2}
"""Number of leading axes, of slots and of turns of a chunk, before the axes of a microbatch."""


class Held(NamedTuple):
    """Bytes of a device besides slots.

    Attributes:
      state: Parameters, optimizer, batch and counters: all arguments, which are donated.
      optimizer: Optimizer's share of `state`.
      parameters: Trained parameters' share of `state`; gradients are as wide.
      layers: Layers' share of `parameters`.
      task: Most that a task of one microbatch needs while it runs.
      layout: Layout of one microbatch's arrays within a stage.
    """

    state: float
    optimizer: float
    parameters: float
    layers: float
    task: float
    layout: JobLayout

    def by(self, schedule: Schedule, slots: float) -> float:
        """Returns the most that a device holds at once, with `slots` bytes in its loop over ticks.

        While the loop runs, it holds slots, sums of gradients, and layers that were sent to the
        devices of their chunks. Sums are then sent to the devices that hold their layers. The
        optimizer's new state is written last. The old one stays: a step that is not finite keeps it.
        """
        at_rest = tuple(
            chunk * schedule.devices // schedule.depth for chunk in range(schedule.depth)
        )
        is_at_rest = schedule.placement == at_rest
        sums = self.parameters + (schedule.copies - 1) * self.layers
        sent = schedule.copies * self.layers * (not is_at_rest)
        collected = self.layers * (not is_at_rest)
        loop = sums + sent + slots + self.task
        collection = sums + 2 * collected  # the message and the sum that it is added to
        update = self.parameters + self.optimizer
        return self.state + max(loop, collection, update)


def schedules(config: Any) -> dict[str, Schedule]:
    """Returns the schedule of the flags by its name, or for "search" all that fit the model's layers."""
    count, found = shares("stage"), {}
    parts = config.microbatches or 2 * count
    if config.pipeline != "search":
        return {
            config.pipeline: with_sides(
                config, named_schedule(config.pipeline, count, parts, config.chunks)
            )
        }
    for name in PIPELINES:
        try:
            made = with_sides(config, named_schedule(name, count, parts, config.chunks))
        except UsageError:
            continue
        if stages(config.model).num_turns % made.depth == 0:
            found[name] = made
    return found


def slots_of(config: Any, schedule: Schedule) -> dict[str, list[jax.ShapeDtypeStruct]]:
    """Returns the arrays of each kind of slots on one stage, whole, as the program has them."""
    rows = jax.ShapeDtypeStruct((config.data.batch_size, config.data.seq_len), jnp.int32)
    batch = dict.fromkeys(
        ("tokens", "targets", *(("places",) if shares("seq_layer") > 1 else ())), rows
    )
    key = jax.eval_shape(lambda: jax.random.key(0)) if config.model.dropout else None
    params = declared.abstract(config.model, jnp.dtype("float32"))
    model = stages(config.model)
    return Pipelined(schedule).slots(model, params, batch, key, schedule.microbatches)


def bytes_on_device(slots: dict[str, list[jax.ShapeDtypeStruct]], layout: JobLayout) -> float:
    """Returns the bytes of slots on one device, split within a stage as a microbatch is.

    Gathered weights lie as products read them: split by tensor and experts, but for their norms.
    What waits on the host is on no device.
    """
    total = size_of(slots["weights"]) / (shares("mlp") * shares("experts"))
    for name, leading in _LEADING.items():
        for x in slots[name]:
            one = jax.core.ShapedArray(x.shape[leading:], x.dtype)
            total += math.prod(x.shape[:leading]) * layout.bytes(one)
    return total


def size_of(arrays: list[jax.ShapeDtypeStruct]) -> float:
    """Returns the bytes of whole arrays."""
    return float(sum(x.size * x.dtype.itemsize for x in arrays))


def bytes_besides_slots(config: Any, job: aot.Job, schedule: Schedule) -> Held:
    """Returns what a device holds besides slots, for any schedule with these microbatches."""
    sizes: dict[str, float] = collections.defaultdict(float)
    for row in aot.placements(job):
        sizes[row.group] += row.bytes
        if "params.layers." in row.path and row.group == "parameters":
            sizes["layers"] += row.bytes
    task = task_job(config, job, schedule)
    return Held(
        state=sizes["parameters"] + sizes["optimizer"] + sizes["other"],
        optimizer=sizes["optimizer"],
        parameters=sizes["parameters"],
        layers=sizes["layers"],
        task=aot.analyse(task)[0].temporaries,
        layout=JobLayout(task),
    )


def task_job(config: Any, job: aot.Job, schedule: Schedule) -> aot.Job:
    """Returns the gradient of one turn and of both ends of the model, for one microbatch.

    A task of a stage does no more than this, turn by turn, and has the peaks of a turn and
    of the loss. Where all stages share the head, each has its own rows of it.
    """
    model = config.model
    turns = stages(model).num_turns
    vocabulary = model.vocab_size
    if schedule.has_vocabulary:
        vocabulary = -(-vocabulary // schedule.devices)
    one = dataclasses.replace(model, num_layers=model.num_layers // turns, vocab_size=vocabulary)
    layout = "+".join(part for part in config.layout.split("+") if part != "stages")
    rows = (config.data.batch_size // schedule.microbatches, config.data.seq_len)
    names = ("tokens", "targets", *(("places",) if shares("seq_layer") > 1 else ()))
    batch = dict.fromkeys(names, jax.ShapeDtypeStruct(rows, jnp.int32))
    return aot.Job(
        lambda params, batch: jax.grad(loss)(params, batch, one),
        (declared.abstract(one, jnp.dtype("float32")), batch),
        (declared.axes(one), dict.fromkeys(names, ("batch", "seq_layer"))),
        job.mesh,
        rules=rules_from(config.rules, layout),
    )


def row_of(
    config: Any, name: str, schedule: Schedule, held: Held, capacity: float | None
) -> dict[str, Any]:
    """Returns what is told of one schedule; `held` is what a device holds beside slots.

    Args:
      config: What is estimated.
      name: Of the schedule.
      schedule: On the stages of the ambient mesh.
      held: Bytes of a device.
      capacity: Bytes of a device, or None if unknown.
    """
    chunks = len(schedule.placement) // schedule.devices // schedule.copies
    costs = TaskCosts(1 / chunks, 1 / chunks, 1 / chunks, S=0, T=0)
    events, steps = (simulate_schedule(schedule, costs, lockstep=each) for each in (False, True))
    arrays = slots_of(config, schedule)
    slots = {kind: size_of(part) for kind, part in arrays.items()}
    kept = sum(slots.values())
    own = bytes_on_device(arrays, held.layout)
    device = held.by(schedule, own)
    fits = None if capacity is None else has_margin(device, capacity, MARGIN)
    return {
        "schedule": name, "bubble": events.idle_fraction, "lockstep": steps.idle_fraction, "time": steps.makespan,
        "microbatches": schedule.microbatches, "kept": max(steps.held), "slots": slots, "stage": kept,
        "own": own, "device": device, "fits": fits, "margin": MARGIN,
    }  # fmt: skip


def estimate_pipeline(config: Any, job: aot.Job, capacity: float | None) -> list[dict[str, Any]]:
    """Returns a row for each schedule that the flags name, best first: those that fit, by their time in lock-step."""
    with job.ambient():
        found = schedules(config)
        if not found:
            raise UsageError(
                f"no schedule has layers for each chunk of mesh.stage={shares('stage')}."
            )
        held = bytes_besides_slots(config, job, next(iter(found.values())))
        rows = [row_of(config, name, schedule, held, capacity) for name, schedule in found.items()]
        if config.pipeline == "search" and not config.offload:  # which has no cap on what is kept
            rows += searched(config, rows, held, capacity)
    return sorted(rows, key=lambda row: (row["fits"] is False, row["time"], row["device"]))


def searched(
    config: Any, rows: list[dict[str, Any]], held: Held, capacity: float | None
) -> list[dict[str, Any]]:
    """Returns rows of `search_schedule` over one and two chunks a stage, with as much kept as there is room for."""
    out, count, parts = [], shares("stage"), rows[0]["microbatches"]
    for name, placement in (("searched", loop(count)), ("searched_v", vee(count))):
        chunks = len(placement) // count
        if stages(config.model).num_turns % len(placement):
            continue
        cap = parts * chunks
        while True:
            costs = TaskCosts(1 / chunks, 1 / chunks, 1 / chunks, S=0, T=0)
            made = search_schedule(placement, parts, costs, cap)
            row = row_of(config, name, with_sides(config, made), held, capacity)
            if row["fits"] is not False or cap <= chunks:
                break
            # Less by what is over, at least by one; each kept microbatch of a chunk takes its share.
            over = row["device"] - (1 - MARGIN) * (capacity or 0)
            each = row["own"] / max(row["kept"], 1)
            cap = max(chunks, min(cap, row["kept"]) - max(1, int(over / each)))
        out.append(row | {"cap": cap})
    return out


def table_of(rows: list[dict[str, Any]]) -> Table:
    """Returns the table for the terminal."""
    right = ("bubble", "in lock-step", "kept", "a stage keeps", "a device holds")
    table = Table("schedule", *(Column(name, justify="right") for name in right), "fits")
    for row in rows:
        fits = {None: "unknown", True: "yes", False: "NO"}[row["fits"]]
        sizes = size_text(row["stage"]), size_text(row["device"])
        table.add_row(
            row["schedule"],
            f"{row['bubble']:.1%}",
            f"{row['lockstep']:.1%}",
            str(row["kept"]),
            *sizes,
            fits,
        )
    return table
