"""What an estimate says of a pipeline: how long stages wait, and what each keeps; and a search of schedules by both."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich.table import Column, Table

from jaxpar import aot
from jaxpar.lm import params as declared
from jaxpar.lm.stages import stages
from jaxpar.parallel.pipeline import (
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

from ._estimate_report import size_text
from ._mesh import shares
from ._pipeline import with_sides


class Held(NamedTuple):
    """Bytes of a device beside slots.

    Attributes:
      fixed: Of parameters, optimizer, batch and gradients.
      layers: Of the parameters of layers, within `fixed`.
    """

    fixed: float
    layers: float

    def by(self, schedule: Schedule) -> float:
        """Returns all, with layers that are sent to the stages of their chunks, and gradients of a second copy."""
        at_rest = tuple(chunk * schedule.devices // schedule.depth for chunk in range(schedule.depth))
        sent = 0 if schedule.placement == at_rest else schedule.copies
        return self.fixed + self.layers * (sent + schedule.copies - 1)


def schedules(config: Any) -> dict[str, Schedule]:
    """Returns the schedule of the flags by its name, or for "search" all that fit the model's layers."""
    count, found = shares("stage"), {}
    parts = config.microbatches or 2 * count
    if config.pipeline != "search":
        return {config.pipeline: with_sides(config, named_schedule(config.pipeline, count, parts, config.chunks))}
    for name in PIPELINES:
        try:
            made = with_sides(config, named_schedule(name, count, parts, config.chunks))
        except UsageError:
            continue
        if stages(config.model).num_turns % made.depth == 0:
            found[name] = made
    return found


def bytes_of(config: Any, schedule: Schedule) -> dict[str, float]:
    """Returns the bytes of each kind of slots on one stage, all of its devices together, as the program has them."""
    rows = jax.ShapeDtypeStruct((config.data.batch_size, config.data.seq_len), jnp.int32)
    batch = dict.fromkeys(("tokens", "targets", *(("places",) if shares("seq_layer") > 1 else ())), rows)
    key = jax.eval_shape(lambda: jax.random.key(0)) if config.model.dropout else None
    params = declared.abstract(config.model, jnp.dtype("float32"))
    slots = Pipelined(schedule).slots(stages(config.model), params, batch, key, schedule.microbatches)
    return {name: float(sum(x.size * x.dtype.itemsize for x in part)) for name, part in slots.items()}


def row_of(config: Any, name: str, schedule: Schedule, held: Held, capacity: float | None) -> dict[str, Any]:
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
    slots = bytes_of(config, schedule)
    kept = sum(slots.values())
    # Gathered weights lie as products read them: split by tensor and experts, but for their norms, not as the batch is.
    weights = slots["weights"] / (shares("mlp") * shares("experts"))
    rest = (kept - slots["weights"] - slots["host"]) / (shares("batch") * shares("seq_layer"))
    device = held.by(schedule) + rest + weights
    return {
        "schedule": name, "bubble": events.idle_fraction, "lockstep": steps.idle_fraction, "time": steps.makespan,
        "microbatches": schedule.microbatches, "kept": max(steps.held), "slots": slots, "stage": kept,
        "device": device, "fits": None if capacity is None else device <= capacity,
    }  # fmt: skip


def estimate_pipeline(config: Any, job: aot.Job, capacity: float | None) -> list[dict[str, Any]]:
    """Returns a row for each schedule that the flags name, best first: those that fit, by their time in lock-step."""
    held: dict[str, float] = {}
    layers = sum(each.bytes for each in aot.placements(job) if "params.layers." in each.path)
    for placement in aot.placements(job):
        held[placement.group] = held.get(placement.group, 0) + placement.bytes
    fixed = sum(held.values()) + held["parameters"]  # sums of gradients are as wide as what is trained
    with job.ambient():
        found = schedules(config)
        if not found:
            raise UsageError(f"no schedule has layers for each chunk of mesh.stage={shares('stage')}.")
        rows = [row_of(config, name, schedule, Held(fixed, layers), capacity) for name, schedule in found.items()]
        if config.pipeline == "search" and not config.offload:  # which has no cap on what is kept
            rows += searched(config, rows, Held(fixed, layers), capacity)
    return sorted(rows, key=lambda row: (row["fits"] is False, row["time"], row["device"]))


def searched(config: Any, rows: list[dict[str, Any]], held: Held, capacity: float | None) -> list[dict[str, Any]]:
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
            over, each = row["device"] - (capacity or 0), (row["device"] - held.by(made)) / max(row["kept"], 1)
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
        table.add_row(row["schedule"], f"{row['bubble']:.1%}", f"{row['lockstep']:.1%}", str(row["kept"]), *sizes, fits)
    return table
