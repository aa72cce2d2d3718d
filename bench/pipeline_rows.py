"""Our side of `bench/pipeline.py`: one step, which makes loss and gradient, and what its tasks take by themselves."""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable

import decode_rows
import harness

from jaxpar.parallel.pipeline import Op, SlotSizes, TaskCosts

TIMINGS = 5, 20  # at least and at most


@dataclasses.dataclass(frozen=True)
class ChunkCosts(TaskCosts):
    """Times of tasks where BW is not B and W, and where the ends of the model take some too.

    Attributes:
      BW: Of a chunk, both stages at once.
      enter: Of the embedding.
      head: Of norm, head and loss with their gradients, which belong to the last chunk's B or BW.
      leave: Of the embedding's gradient.
      last: Number of the last chunk.
    """

    BW: float = 0.0
    enter: float = 0.0
    head: float = 0.0
    leave: float = 0.0
    last: int = 0

    def of(self, task) -> float:
        """Returns the time of a task."""
        op, chunk, _ = task
        is_back = op in (Op.B, Op.BW)
        time = self.BW if op == Op.BW else super().of(task)
        time += self.enter if op == Op.F and chunk == 0 else 0.0
        return (
            time + (self.head if is_back and chunk == self.last else 0) + (self.leave if is_back and not chunk else 0)
        )


def config_of(request: dict, **changes):
    """Returns the model that a request names."""
    from jaxpar.lm import LMConfig

    names = ("dtype", "attention", "remat")
    options = request["model"] | {name: request[name] for name in names} | changes
    return LMConfig(**options, rope_theta=500000.0, low_logits=True, loss_chunk=32768, scan_layers=False)


def batch_of(request: dict, rows: int) -> dict:
    """Returns tokens and targets, the same in every process."""
    import jax

    shape = 2, rows, request["length"]
    tokens, targets = jax.random.randint(jax.random.key(1), shape, 0, request["model"]["vocab_size"])
    return {"tokens": tokens, "targets": targets}


def schedule_of(request: dict):
    """Returns the schedule of a request, or None where the model is not cut."""
    from jaxpar.parallel.pipeline import named_schedule

    name, m = request["schedule"], request["microbatches"]
    return named_schedule(name, request["devices"], m, request["chunks"]) if name else None


class Step:
    """Loss and gradient of a batch: by a pipeline, sharded over the devices, or on one."""

    def __init__(self, request: dict, schedule):
        """Compiles."""
        import jax

        from jaxpar.lm import axes, init
        from jaxpar.lm.stages import stages
        from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, rules_from, use_mesh
        from jaxpar.nn.schedule import InTurn
        from jaxpar.parallel.pipeline import Pipelined

        config, kind = config_of(request), request["kind"]
        self.devices = jax.devices()[: request["devices"]]
        spec = MeshSpec(**({"stage": len(self.devices)} if schedule else {"fsdp": len(self.devices)}))
        rules = rules_from(layout="stages") if schedule else rules_from()
        make = Pipelined(schedule) if schedule else InTurn()
        parts = 1 if kind == "whole" else request["microbatches"]

        def run(params, batch):
            (loss, _), gradient = make(stages(config), params, batch, None, parts)
            return loss, gradient

        with use_mesh(make_mesh(spec, self.devices), rules):
            start = functools.partial(init, config=config)
            shape = jax.eval_shape(start, jax.random.key(0))
            layout = named_shardings(shape, axes(config))
            params = jax.jit(start, out_shardings=layout)(jax.random.key(0))
            batch = batch_of(request, request["rows"] * request["microbatches"])
            self.args = params, jax.device_put(batch, named_shardings(batch, dict.fromkeys(batch, ("batch", None))))
            begin = time.perf_counter()
            self.program = jax.jit(run, out_shardings=(None, layout)).lower(*self.args).compile()
            self.said = {"compile_s": time.perf_counter() - begin} | decode_rows.memory_of(self.program)
            loss, gradient = self.program(*self.args)
            self.said |= judged(loss, gradient) | {"planned_bytes": self.said.pop("peak_bytes")}

    def timed(self, spend_s: float) -> dict:
        """Median of several steps, and the most bytes of each device so far."""
        said = timed(lambda: self.program(*self.args), spend_s)
        stats = [device.memory_stats() or {} for device in self.devices]
        peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
        return self.said | said | ({"peaks": peaks} if peaks else {})


def judged(loss, gradient) -> dict:
    """Returns the loss, the norm of the gradient, and a sum of its bits, which differs where a bit does."""
    import jax
    import jax.numpy as jnp

    @jax.jit
    def of(gradient):
        leaves = jax.tree.leaves(gradient)
        bits = [jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32).sum() for x in leaves]
        return jnp.sqrt(sum(jnp.square(x.astype(jnp.float32)).sum() for x in leaves)), sum(bits)

    norm, bits = of(gradient)
    if not bool(jnp.isfinite(norm)):
        raise ValueError(f"the gradient is not finite; loss={float(loss)}")
    return {"loss": float(loss), "norm": float(norm), "bits": int(bits)}


def timed(call: Callable, spend_s: float) -> dict:
    """Returns the median of calls that are waited for one by one; the first are warm-up."""
    import jax

    taken, most = [], TIMINGS[1]
    while len(taken) < most + 2:
        begin = time.perf_counter()
        out = jax.block_until_ready(call())
        taken.append(time.perf_counter() - begin)
        del out
        most = max(TIMINGS[0], min(most, int(spend_s / max(taken[-1], 1e-6))))
    taken = taken[2:]
    return {"ms": 1e3 * statistics.median(taken), "least_ms": 1e3 * min(taken), "timings": len(taken)}


def measured_costs(request: dict, depth: int) -> tuple[ChunkCosts, dict]:
    """Returns what tasks of one of `depth` chunks take on one device, in ms, and bytes that F leaves.

    Layers of a chunk are compiled one after the other, with weights where they lie, so no copy into or out of an array
    of all of them is in these times; sums of gradients are float32 and added to in place, as the executor's are.
    """
    import jax
    import jax.numpy as jnp

    from jaxpar.lm import init
    from jaxpar.lm.stages import stages
    from jaxpar.nn.two_stage import two_stage

    size = request["model"]["num_layers"] // depth
    config = config_of(request, num_layers=size)
    pieces, spend = stages(config), request["spend_s"] / 4
    held = jax.jit(lambda key: pieces.hold(init(key, config)))(jax.random.key(0))
    layers = held.pop("layers")
    weights = [jax.tree.map(lambda x, i=i: jnp.copy(x[i]), layers) for i in range(size)]
    data = batch_of(request, request["rows"])
    total = jnp.float32(request["rows"] * request["microbatches"] * request["length"])

    def layer(params, x):
        return pieces.remat(lambda params, x: pieces.layer(params, 0, x, data, None)[0])(params, x)

    enter = jax.jit(lambda ends: pieces.first(ends, data, None))
    x = jax.block_until_ready(enter(held))
    split = two_stage(layer, weights[0], x, products=pieces.products())

    @jax.jit
    def forward(weights, x):
        kept = []
        for params in weights:
            x, pull = split.forward(params, x)
            kept.append(pull)
        return x, kept

    def back(kept, g):
        factors = []
        for pull in reversed(kept):
            g, more = split.backward_input(pull, g)
            factors.append(more)
        return g, factors[::-1]

    def late(weights, factors, sums):
        news = [split.backward_weights(*pair) for pair in zip(weights, factors, strict=True)]
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, news)

    def both(weights, kept, g, sums):
        # One layer after the other, so that the factors of none outlive it.
        new = list(sums)
        for i in reversed(range(len(weights))):
            g, factors = split.backward_input(kept[i], g)
            more = split.backward_weights(weights[i], factors)
            new[i] = jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums[i], more)
        return g, new

    def end(ends, x, sums):
        loss, (of_ends, g) = jax.value_and_grad(lambda ends, x: pieces.last(ends, x, data, total)[0], (0, 1))(ends, x)
        return loss, g, jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, of_ends)

    def leave(ends, g, sums):
        more = jax.vjp(lambda ends: pieces.first(ends, data, None), ends)[1](g)[0]
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, more)

    def zeros(tree):
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)), tree)

    def adding(fn, args, sums, last):
        """Times `fn(*args, sums)` whose last result (or only) replaces the sums that it was given."""
        program, box = jax.jit(fn, donate_argnums=len(args)), [sums]

        def call():
            out = program(*args, box[0])
            box[0] = out[-1] if last else out
            return out

        return timed(call, spend)["ms"]

    y, kept = forward(weights, x)
    own = {id(leaf) for leaf in jax.tree.leaves((weights, held, data))}
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((weights, held, data))}
    left = {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.tree.leaves(kept) if id(leaf) not in own}
    stash = sum(size for where, size in left.items() if where not in pointers)
    backward = jax.jit(back)
    _, factors = backward(kept, y)
    times = {
        "F": timed(lambda: forward(weights, x), spend)["ms"],
        "B": timed(lambda: backward(kept, y), spend)["ms"],
        "W": adding(late, (weights, factors), zeros(weights), False),
        "BW": adding(both, (weights, kept, y), zeros(weights), True),
        "enter": timed(lambda: enter(held), spend)["ms"],
        "head": adding(end, (held, y), zeros(held), True),
        "leave": adding(leave, (held, y), zeros(held), False),
    }
    times |= {"offload": 0.0, "fetch": 0.0}
    if request["what"] == "offload":
        times |= host_times(stash, spend)
    pairs = sum(leaf.nbytes for leaf in jax.tree.leaves([each.pairs for each in factors]))
    return ChunkCosts(**times, last=depth - 1), {"stash_bytes": stash, "factor_bytes": pairs}


def host_times(size: int, spend_s: float) -> dict:
    """Returns ms of so many bytes to pinned memory of the host, and back."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    here, there = (SingleDeviceSharding(device, memory_kind=kind) for kind in ("device", "pinned_host"))
    x = jax.device_put(jnp.ones(max(size, 4) // 4, jnp.float32), here)
    out = jax.block_until_ready(jax.device_put(x, there))
    return {
        "offload": timed(lambda: jax.device_put(x, there), spend_s)["ms"],
        "fetch": timed(lambda: jax.device_put(out, here), spend_s)["ms"],
    }


def answer(request: dict) -> dict:
    """Answers for one row: this process makes it alone."""
    from jaxpar.mesh import simulate_devices

    simulate_devices(request["mesh"])
    import jax

    from jaxpar.parallel.pipeline import simulate_schedule, with_offload

    said = {"device": jax.devices()[0].device_kind, "version": f"jax {jax.__version__}"}
    schedule, costs = schedule_of(request), None
    if request["kind"] == "offload":
        # Costs come first here, since the schedule is made by them; a peak counts from the step on all the same, whose
        # arrays are larger than those of one chunk's tasks.
        costs, more = measured_costs(request, schedule.depth)
        schedule = with_offload(schedule, costs, sizes=SlotSizes(more["stash_bytes"], more["factor_bytes"]))
        said |= more | {"sides": len(schedule.sides)}
        if not schedule.sides:
            raise ValueError(
                f"with_offload puts nothing on the host at these costs, in ms: {dataclasses.asdict(costs)}"
            )
    step = Step(request, schedule)
    said |= step.timed(request["spend_s"])
    del step
    if schedule:
        try:
            if costs is None:
                costs, more = measured_costs(request, schedule.depth)
                said |= more
            plain = dataclasses.replace(schedule, sides=())
            timing = simulate_schedule(plain, costs, lockstep=True)
            said |= {"costs": dataclasses.asdict(costs), "lockstep_ms": timing.makespan, "ticks": timing.ticks}
            said |= {"events_ms": simulate_schedule(plain, costs).makespan, "held": max(timing.held)}
        except Exception as error:  # the step's own time is worth a row without
            said["note"] = f"costs failed, {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return said


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        harness.serve(answer)
