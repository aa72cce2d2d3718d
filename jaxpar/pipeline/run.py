"""One program that runs any table: a loop over ticks, in each a task of its own, and the same exchanges.

The program is manual over the mesh axis `stage` alone; inside a task GSPMD splits batch, weights, heads and experts as
it does without a pipeline, and all its collectives stay within a stage, whose devices all do the same task. What
crosses stages, a message to either side, is sent in every tick by all.

Example:
    import jax
    import jax.numpy as jnp

    from jaxpar.lm import LMConfig, init
    from jaxpar.lm.stages import stages
    from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
    from jaxpar.pipeline.accumulation import InTurn
    from jaxpar.pipeline import Pipelined, gpipe

    config = LMConfig(vocab_size=8, num_layers=2, embed_dim=8, dtype="float32")
    params, tokens = init(jax.random.key(0), config), jnp.arange(12).reshape(4, 3) % 8
    args = stages(config), params, {"tokens": tokens, "targets": tokens}, None, 2
    (want, _), _ = InTurn()(*args)
    with use_mesh(make_mesh(MeshSpec(stage=1), jax.devices()[:1])):  # of four stages: stage=4 and gpipe(4, 2)
        (got, _), grads = Pipelined(gpipe(1, 2))(*args)
    assert jnp.allclose(got, want, atol=1e-5)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.mesh import mesh_axes, num_shares
from jaxpar.nn.auxiliary import Aux, both, over_layers, over_parts
from jaxpar.pipeline._chunks import AXIS
from jaxpar.pipeline._held import Given, Sums
from jaxpar.pipeline._work import Program, added
from jaxpar.pipeline.accumulation import Stages, key_of_part, parts_of
from jaxpar.pipeline.ops import Schedule
from jaxpar.pipeline.pack import TickTable, pack_schedule
from jaxpar.stage import by_stage
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Pipelined"]

AT, ALL = P(AXIS), P()


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """Makes the gradient of a batch by a schedule over the stages of a mesh: an `Accumulation`.

    Equal to `jaxpar.pipeline.accumulation.InTurn` with as many microbatches, up to the order of sums.

    Attributes:
      schedule: Tasks of each stage, as from `one_f_one_b` or `zb_v`; those of `with_offload` keep on the host what they
        say, on TPUs and GPUs; those of `with_gathers` gather each chunk's weights when they say, not in each task.
      latency: Ticks until a message is read; with 2, messages travel while the next tick is computed.
    """

    schedule: Schedule
    latency: int = field(1, AtLeast(1))

    __post_init__ = check_fields

    def __call__(
        self, stages: Stages, params: PyTree, batch: PyTree, key: PRNGKey | None, count: int
    ) -> tuple[tuple[Array, Aux], PyTree]:
        """Returns ((loss, what was told), gradient); microbatch m draws with the key folded with m.

        Cost: the operations of the schedule's tasks; memory as `simulate_schedule` tells. Chunks that do not lie on
        the device that holds their layers at rest are sent there and their gradients back, once a step.

        Raises:
          UsageError: If schedule, mesh, microbatches and layers do not fit each other.
        """
        made = self._made(stages, params, batch, key, count)
        given, back, pull, head = made.given, Sums(AT, ALL), made.pull, stages.head  # type: ignore[arg-type]
        if self.schedule.has_vocabulary:
            back = back._replace(rows=AT, entered=AT)
        run = by_stage(made.program, (made.specs, P(None, *AT)), (ALL, AT, ALL, back))
        loss, of_layers, of_last, sums = run(given, jnp.asarray(made.program.table.rows))
        outside = sums.ends
        if pull is not None and head is not None:
            outside = self._outside(pull, sums, head.rows, made.program.vocabulary)
        of_layers = jax.vmap(over_layers, axis_size=count)(self._in_order(of_layers))
        told = over_parts(jax.vmap(both, axis_size=count)(of_layers, of_last))
        own = sum(over_parts(of_layers).losses.values())
        layers = _with_zeros(sums.layers, given.layers, made.program.fixed)
        return (loss + own, told), stages.release(params, {**outside, "layers": layers})

    def slots(
        self, stages: Stages, params: PyTree, batch: PyTree, key: PRNGKey | None, count: int
    ) -> dict[str, list[jax.ShapeDtypeStruct]]:
        """Returns the arrays in which a stage keeps what later ticks need; nothing is computed.

        They are whole here, and split within a stage as batch and weights are. Arguments may be shapes.

        Returns:
          "inbox", "stash", "factors", "head", "host", "weights" -> shapes of one stage, [slots, ...], as its loop over
          ticks carries them.
        """

        def start(params, batch, key):
            made = self._made(stages, params, batch, key, count)
            return by_stage(
                lambda given: made.program.work(given).start()[0].slots, (made.specs,), AT
            )(made.given)

        found = jax.eval_shape(start, params, batch, key)

        def share(x):
            return jax.ShapeDtypeStruct(
                (x.shape[0] // self.schedule.devices, *x.shape[1:]), x.dtype
            )

        return {
            name: [share(x) for x in jax.tree.leaves(part)]
            for name, part in found._asdict().items()
        }

    def _made(
        self, stages: Stages, params: PyTree, batch: PyTree, key: PRNGKey | None, count: int
    ) -> "_Made":
        """What a step is made of before its loop over ticks."""
        self.check(stages, count)
        held = stages.hold(params)
        ends = {name: part for name, part in held.items() if name != "layers"}
        given = Given(held["layers"], ends, parts_of(batch, count), key, stages.total(batch))
        size, specs, pull, head = 0, Given(AT, ALL, ALL, ALL, ALL), None, stages.head  # type: ignore[arg-type]
        if self.schedule.has_vocabulary:
            assert head is not None  # which `check` says
            entered, pull = self._entered(stages, ends, given)
            size = ends[head.rows].shape[0]
            rows = _filled(ends[head.rows], self.schedule.devices)
            given = given._replace(
                ends={name: ends[name] for name in head.reads}, rows=rows, entered=entered
            )
            specs = specs._replace(rows=AT, entered=ALL)
        table = _packed(self.schedule, self.latency)
        fixed = None
        if stages.fixed is not None:
            fixed = stages.fixed(params)
        program = Program(
            stages=stages,
            table=table,
            chunk_size=stages.num_turns // self.schedule.depth,
            vocabulary=size,
            fixed=fixed,
        )
        return _Made(program=program, given=given, specs=specs, pull=pull)

    def _entered(self, stages: Stages, ends: PyTree, given: Given) -> tuple[PyTree, Callable]:
        """What enters the first layer of each microbatch, and its backward pass: outside of the loop over ticks."""

        def all_of(ends):
            def one(j_and_data):
                j, data = j_and_data
                return stages.first(ends, data, key_of_part(given.key, j, len(numbers)))

            return jax.lax.map(one, (numbers, given.parts))

        numbers = jnp.arange(self.schedule.microbatches)
        return jax.vjp(all_of, ends)

    def _outside(self, pull: Callable, sums: Sums, rows: str, size: int) -> PyTree:
        """Gradients of all that lies outside of the layers, from those of a head that is split."""
        first = self.schedule.placement[0]
        m = self.schedule.microbatches
        (outside,) = pull(jax.tree.map(lambda x: x[first * m : (first + 1) * m], sums.entered))
        more = {**sums.ends, rows: sums.rows[:size]}
        return outside | {name: added(outside[name], part) for name, part in more.items()}

    def _in_order(self, told: PyTree) -> PyTree:
        """What turns told, [m, N, ...], of [P v, m, turns of a chunk, ...]: by the chunks a microbatch passed."""
        schedule = self.schedule
        own = [schedule.chunks_of(device) for device in range(schedule.devices)]
        at = {
            chunk: device * len(own[0]) + place
            for device, row in enumerate(own)
            for place, chunk in enumerate(row)
        }
        rows = np.array(
            [[at[chunk] for chunk in schedule.path(j)] for j in range(schedule.microbatches)]
        )
        columns = np.arange(schedule.microbatches)[:, None]
        return jax.tree.map(lambda x: x[rows, columns].reshape(len(rows), -1, *x.shape[3:]), told)

    def check(self, stages: Stages, count: int) -> None:
        """Refuses what this schedule cannot run on the ambient mesh; `__call__` says it too.

        Raises:
          UsageError: If schedule, mesh, microbatches and layers do not fit each other.
        """
        schedule, here = self.schedule, jax.sharding.get_abstract_mesh().shape.get(AXIS, 0)
        if schedule.devices != here:
            raise UsageError(
                f"the schedule {schedule} needs mesh.stage={schedule.devices}, not the {here} that are here."
            )
        if count != schedule.microbatches:
            raise UsageError(
                f"the schedule {schedule} has {schedule.microbatches} microbatches, not {count}."
            )
        if schedule.asynchronous:
            raise UsageError(
                f"{schedule.name} changes weights in between and has no one gradient; PipeDream runs it."
            )
        kinds = {side.kind for side in schedule.sides}
        if "reduce" in kinds or ("gather" in kinds and stages.axes is None):
            raise UsageError(
                f"{schedule.name} has what no program here runs: sides of kind reduce, since GSPMD sums gradients in "
                "each task, or gather of a model that does not say how its weights are split; legal are the others."
            )
        if kinds & {"offload", "fetch"} and "pinned_host" not in {
            memory.kind for memory in jax.devices()[0].addressable_memories()
        }:
            raise UsageError(
                f"{schedule.name} keeps activations in the memory pinned_host, which devices of the kind "
                f"{jax.devices()[0].device_kind} do not have; take it without offload, or model.execution.remat=full."
            )
        if schedule.has_vocabulary and stages.head is None:
            raise UsageError(
                f"{schedule.name} needs a model with a head of rows, `Stages.head`, which this one has not."
            )
        if stages.num_turns % schedule.depth:
            below = stages.num_turns // schedule.depth * schedule.depth
            legal = f"{below} or {below + schedule.depth}" if below else f"{schedule.depth}"
            raise UsageError(
                f"{stages.num_turns} layers do not divide over the {schedule.depth} chunks of {schedule.name}; the "
                f"nearest legal numbers are {legal}."
            )
        _packed(schedule, self.latency)  # which has its own refusals


class _Made(NamedTuple):
    """The program of a stage, what it is given and how that is split, and the backward pass of what enters layers."""

    program: Program
    given: Given
    specs: Given
    pull: Callable | None


def _with_zeros(gradients: list[Array], layers: PyTree, fixed: tuple[bool, ...] | None) -> PyTree:
    """Returns gradients in the structure of the layers: zeros where an array is fixed."""
    leaves, structure = jax.tree.flatten(layers)
    found = iter(gradients)
    marks = fixed or (False,) * len(leaves)
    every = [
        jnp.zeros(leaf.shape, jnp.float32) if is_fixed else next(found)
        for leaf, is_fixed in zip(leaves, marks, strict=True)
    ]
    return jax.tree.unflatten(structure, every)


def _filled(rows: Array, devices: int) -> Array:
    """Rows of a head, and zeros after them so that they divide over the stages and within one."""
    shares = devices * num_shares(*(axis for axis in mesh_axes("vocab") if axis != AXIS))
    return jnp.pad(rows, [(0, -rows.shape[0] % shares), (0, 0)])


@functools.lru_cache(maxsize=32)
def _packed(schedule: Schedule, latency: int) -> TickTable:
    return pack_schedule(schedule, latency)
