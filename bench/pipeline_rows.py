"""Our side of `bench/pipeline.py`: one step, which makes loss and gradient, and what its tasks take by themselves."""

import contextlib
import dataclasses
import functools
import time

import decode_rows
import harness
from pipeline_costs import batch_of, config_of, measured_costs, timed


def schedule_of(request: dict):
    """Returns the schedule of a request, or None where the model is not cut."""
    from jaxpar.pipeline import named_schedule

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
        from jaxpar.pipeline import Pipelined
        from jaxpar.pipeline.accumulation import InTurn

        config, kind = config_of(request), request["kind"]
        self.devices = jax.devices()[: request["devices"]]
        spec = MeshSpec(
            **({"stage": len(self.devices)} if schedule else {"fsdp": len(self.devices)})
        )
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
            self.args = (
                params,
                jax.device_put(
                    batch, named_shardings(batch, dict.fromkeys(batch, ("batch", None)))
                ),
            )
            begin = time.perf_counter()
            self.program = jax.jit(run, out_shardings=(None, layout)).lower(*self.args).compile()
            self.said = {"compile_s": time.perf_counter() - begin} | decode_rows.memory_of(
                self.program
            )
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
        bits = [
            jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32).sum() for x in leaves
        ]
        return jnp.sqrt(sum(jnp.square(x.astype(jnp.float32)).sum() for x in leaves)), sum(bits)

    norm, bits = of(gradient)
    if not bool(jnp.isfinite(norm)):
        raise ValueError(f"the gradient is not finite; loss={float(loss)}")
    return {"loss": float(loss), "norm": float(norm), "bits": int(bits)}


def answer(request: dict) -> dict:
    """Answers for one row: this process makes it alone."""
    from jaxpar.mesh import simulate_devices

    simulate_devices(request["mesh"])
    import jax

    from jaxpar.pipeline import simulate_schedule, with_offload

    said = {"device": jax.devices()[0].device_kind, "version": f"jax {jax.__version__}"}
    schedule = schedule_of(request)
    if (
        request["kind"] == "offload"
    ):  # as `experiments.lm offload=true` has it; what it costs is told by the row
        schedule = with_offload(schedule, lockstep=True)
        said |= {"sides": len(schedule.sides)}
        if not schedule.sides:
            raise ValueError(f"with_offload finds nothing in {schedule}")
    step = Step(request, schedule)
    said |= step.timed(request["spend_s"])
    del step
    if schedule:
        try:
            costs, more = measured_costs(request, schedule.depth)
            timing = simulate_schedule(schedule, costs, lockstep=True)
            said |= more | {
                "costs": dataclasses.asdict(costs),
                "lockstep_ms": timing.makespan,
                "ticks": timing.ticks,
            }
            said |= {
                "events_ms": simulate_schedule(schedule, costs).makespan,
                "held": max(timing.held),
            }
        except Exception as error:  # the step's own time is worth a row without
            said["note"] = (
                f"costs failed, {type(error).__name__}: {' '.join(str(error).split())[:200]}"
            )
    return said


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        harness.serve(answer)
