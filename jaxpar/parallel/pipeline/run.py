"""One program that runs any table: a loop over ticks, a switch over tasks, and the same exchanges in every tick.

The program is manual over the mesh axis `stage` alone; inside a task GSPMD splits batch, weights, heads and experts as
it does without a pipeline, and all its collectives stay within a stage, whose devices all take the same branch. What
crosses stages, a message to either side, is sent in every tick by all.

Example:
    import jax
    import jax.numpy as jnp

    from jaxpar.lm import LMConfig, init
    from jaxpar.lm.stages import stages
    from jaxpar.nn.schedule import InTurn
    from jaxpar.parallel.pipeline import Pipelined, gpipe

    config = LMConfig(vocab_size=8, num_layers=2, embed_dim=8, num_heads=2, mlp_dim=8, dtype="float32")
    params, tokens = init(jax.random.key(0), config), jnp.arange(12).reshape(4, 3) % 8
    args = stages(config), params, {"tokens": tokens, "targets": tokens}, None, 2
    (want, _), _ = InTurn()(*args)
    (got, _), grads = Pipelined(gpipe(1, 2))(*args)  # of one stage here; of four on a mesh with stage=4
    assert jnp.allclose(got, want, atol=1e-5)
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxpar.mesh import constrain, num_shares
from jaxpar.nn.auxiliary import Aux, both, over_layers, over_parts
from jaxpar.nn.mixer import TRAINING
from jaxpar.nn.schedule import Stages, parts_of
from jaxpar.parallel.pipeline._chunks import AXIS, collect_chunks, spread_chunks
from jaxpar.parallel.pipeline._turn import Where, raw_shape, turn_of
from jaxpar.parallel.pipeline.ops import Op, Schedule
from jaxpar.parallel.pipeline.pack import COLUMNS, TickTable, pack_schedule
from jaxpar.stage import by_stage
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["Pipelined"]

AT, ALL = P(AXIS), P()
Index = int | Array


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """Makes the gradient of a batch by a schedule over the stages of a mesh: a `jaxpar.nn.schedule.Schedule`.

    Equal to `jaxpar.nn.schedule.InTurn` with as many microbatches, up to the order of sums.

    Attributes:
      schedule: Tasks of each stage, as from `one_f_one_b` or `zb_v`.
      latency: Ticks until a message is read; with 2, messages travel while the next tick is computed.
    """

    schedule: Schedule
    latency: int = 1

    def __call__(
        self, stages: Stages, params: PyTree, batch: PyTree, key: PRNGKey | None, count: int
    ) -> tuple[tuple[Array, Aux], PyTree]:
        """Returns ((loss, what was told), gradient); microbatch m draws with the key folded with m.

        Cost: the operations of the schedule's tasks; memory as `simulate_schedule` tells. Chunks that do not lie on
        the device that holds their layers at rest are sent there and their gradients back, once a step.

        Raises:
          UsageError: If schedule, mesh, microbatches and layers do not fit each other.
        """
        self.check(stages, count)
        table = _packed(self.schedule, self.latency)
        held = stages.hold(params)
        ends = {name: part for name, part in held.items() if name != "layers"}
        program = _Program(stages, table, stages.num_turns // self.schedule.depth)
        run = by_stage(program, (AT, ALL, ALL, ALL, ALL, P(None, *AT)), (ALL, AT, ALL, AT, ALL))
        loss, of_layers, of_last, layers, outside = run(
            held["layers"], ends, parts_of(batch, count), key, stages.total(batch), jnp.asarray(table.rows)
        )
        of_layers = jax.vmap(over_layers, axis_size=count)(self._in_order(of_layers))
        told = over_parts(jax.vmap(both, axis_size=count)(of_layers, of_last))
        own = sum(over_parts(of_layers).losses.values())
        return (loss + own, told), stages.release(params, {**outside, "layers": layers})

    def _in_order(self, told: PyTree) -> PyTree:
        """What turns told, [m, N, ...], of [P v, m, turns of a chunk, ...]: by the chunks a microbatch passed."""
        schedule = self.schedule
        own = [schedule.chunks_of(device) for device in range(schedule.devices)]
        at = {chunk: device * len(own[0]) + place for device, row in enumerate(own) for place, chunk in enumerate(row)}
        rows = np.array([[at[chunk] for chunk in schedule.path(j)] for j in range(schedule.microbatches)])
        columns = np.arange(schedule.microbatches)[:, None]
        return jax.tree.map(lambda x: x[rows, columns].reshape(len(rows), -1, *x.shape[3:]), told)

    def check(self, stages: Stages, count: int) -> None:
        """Refuses what this schedule cannot run on the ambient mesh; `__call__` says it too.

        Raises:
          UsageError: If schedule, mesh, microbatches and layers do not fit each other.
        """
        schedule, here = self.schedule, num_shares(AXIS)
        if schedule.devices != here:
            raise UsageError(f"the schedule {schedule} needs mesh.stage={schedule.devices}, and this mesh has {here}.")
        if count != schedule.microbatches:
            raise UsageError(f"the schedule {schedule} has {schedule.microbatches} microbatches, not {count}.")
        if schedule.asynchronous or schedule.has_vocabulary or schedule.sides:
            raise UsageError(f"{schedule.name} has what no program here runs: versions, S and T, or sides.")
        if stages.num_turns % schedule.depth:
            below = stages.num_turns // schedule.depth * schedule.depth
            legal = f"{below} or {below + schedule.depth}" if below else f"{schedule.depth}"
            raise UsageError(
                f"{stages.num_turns} layers do not divide over the {schedule.depth} chunks of {schedule.name}; the "
                f"nearest legal numbers are {legal}."
            )


@functools.lru_cache(maxsize=32)
def _packed(schedule: Schedule, latency: int) -> TickTable:
    return pack_schedule(schedule, latency)


class _Slots(NamedTuple):
    """What a device holds between ticks; the first axis is that of slots.

    Attributes:
      inbox: Residual streams and their gradients that have come.
      stash: What forward passes keep, [slots, turns of a chunk, ...].
      factors: Of weights whose gradients are put off, the same.
    """

    inbox: PyTree
    stash: list[Array]
    factors: list[tuple[Array, Array]]


class _Sums(NamedTuple):
    """Gradients so far: of each array of the layers [v, turns of a chunk, ...], and of what lies outside of them."""

    layers: list[Array]
    ends: PyTree


class _Done(NamedTuple):
    """What a task gives.

    Attributes:
      message: A residual stream or its gradient.
      kept: For a slot of the stash.
      pairs: For a slot of factors.
      told: By each turn, of F.
      loss: Of B and BW of the last chunk, and of the microbatch alone.
      last: What it told.
      sums: With what the task adds.
    """

    message: PyTree
    kept: list[Array]
    pairs: list[tuple[Array, Array]]
    told: PyTree
    loss: Array
    last: PyTree
    sums: _Sums


@dataclasses.dataclass(frozen=True)
class _Program:
    """What each stage runs, on its own block over the axis `stage`."""

    stages: Stages
    table: TickTable
    chunk_size: int

    def __call__(self, layers: PyTree, ends: PyTree, parts: PyTree, key: PRNGKey | None, total: Array, rows: Array):
        """Returns loss, what turns and loss told, and gradients, from turns at rest and what all stages have."""
        schedule = self.table.schedule
        layers = spread_chunks(layers, schedule, self.chunk_size)
        numbers = np.array([schedule.chunks_of(device) for device in range(schedule.devices)])
        own = jnp.asarray(numbers)[jax.lax.axis_index(AXIS)]
        work = _Work(self, (layers, ends, parts, key, total), own)
        (_, _, sums, loss, told, last), _ = jax.lax.scan(work.tick, work.start(), rows[:, 0])
        tree = jax.tree.structure(layers)
        loss, last, outside = jax.tree.map(lambda x: jax.lax.psum(x, AXIS), (loss, last, sums.ends))
        return loss, told, last, collect_chunks(tree.unflatten(sums.layers), schedule), outside


class _Work:
    """The tasks of one device, and a tick of all."""

    def __init__(self, program: _Program, given: tuple, own: Array):
        self.table, self.stages, self.size = program.table, program.stages, program.chunk_size
        self.schedule, self.own = self.table.schedule, own
        self.layers, self.ends, self.parts, self.key, self.total = given
        self.share = 1 / self.schedule.microbatches
        where = self.where(0, 0, 0)
        self.x = jax.eval_shape(self.stages.first, self.ends, where.data, where.key)
        self.turn = turn_of(self.stages, self.params_of(0, 0), self.x, where)
        self.loss, self.last = jax.eval_shape(self.stages.last, self.ends, self.x, where.data, self.total)
        self.kept = [raw_shape(like) for like in self.turn.kept]
        self.ops = sorted({Op.IDLE, *(task.op for task in self.schedule.tasks)})
        is_apart = Op.B in self.ops  # otherwise no task leaves factors to another
        self.pairs = [(product.x, product.y) for product in self.turn.products if product and is_apart]

    def where(self, chunk: Index, turn: Index, j: Index) -> Where:
        """What a turn of a device's chunk reads of microbatch j."""
        key = self.key
        if key is not None and self.schedule.microbatches > 1:
            key = jax.random.fold_in(key, j)
        index = self.own[chunk] % self.schedule.depth * self.size + turn
        return Where(index, jax.tree.map(lambda x: _at(x, j), self.parts), key)

    def params_of(self, chunk: Index, turn: Index) -> PyTree:
        return jax.tree.map(lambda x: _at(x, chunk, turn), self.layers)

    def start(self) -> tuple:
        """What is carried from tick to tick, empty."""
        slots, turn, m = self.table.slots, self.turn, self.schedule.microbatches
        num_chunks = self.own.shape[0]
        streams = _zeros(self.x, slots["inbox"])
        stash = _zeros(self.kept, slots["stash"], self.size)
        factors = _zeros(self.pairs, slots["factors"], self.size)
        wide = [jnp.zeros(leaf.shape, _wide(leaf.dtype)) for leaf in jax.tree.leaves(self.layers)]
        ends = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _wide(leaf.dtype)), self.ends)
        told = _zeros(turn.told, num_chunks, m, self.size)
        flying = tuple(_zeros(self.x) for _ in range(self.table.latency - 1))
        return _Slots(streams, stash, factors), flying, _Sums(wide, ends), _zeros(self.loss), told, _zeros(self.last, m)

    def tick(self, carry: tuple, row: Array) -> tuple[tuple, None]:
        """Does a task, writes what it gives into its slots, and exchanges messages with both neighbours."""
        slots, flying, sums, loss, told, last = carry
        cell = dict(zip(COLUMNS, row, strict=True))
        op, chunk, j = cell["op"], cell["chunk"], cell["microbatch"]
        branches = {
            Op.IDLE: lambda: self.nothing(sums),
            Op.F: lambda: self.forward(cell, slots, sums),
            Op.B: lambda: self.backward(cell, slots, sums, fused=False),
            Op.W: lambda: self.weights(cell, slots, sums),
            Op.BW: lambda: self.backward(cell, slots, sums, fused=True),
        }
        which = np.full(max(Op) + 1, 0, np.int32)
        which[self.ops] = np.arange(len(self.ops))
        done: _Done = jax.lax.switch(jnp.asarray(which)[op], [branches[one] for one in self.ops])

        is_forward, is_back = op == Op.F, (op == Op.B) | (op == Op.BW)
        stash = _put(slots.stash, done.kept, jnp.where(is_forward, cell["stash"], -1))
        factors = _put(slots.factors, done.pairs, jnp.where(op == Op.B, cell["factors"], -1))
        told = _put(told, done.told, jnp.where(is_forward, chunk, -1), j)
        last = _put(last, done.last, jnp.where(is_back & self.is_last(chunk), j, -1))

        inbox = _put(slots.inbox, done.message, cell["keep"])
        flying = (*flying, done.message)
        for step, column in ((1, "from_before"), (-1, "from_after")):
            inbox = _put(inbox, _from(flying[0], step, self.schedule.devices), cell[column])
        return (_Slots(inbox, stash, factors), flying[1:], done.sums, loss + done.loss, told, last), None

    def is_first(self, chunk: Array) -> Array:
        return self.own[chunk] % self.schedule.depth == 0

    def is_last(self, chunk: Array) -> Array:
        return self.own[chunk] % self.schedule.depth == self.schedule.depth - 1

    def nothing(self, sums: _Sums) -> _Done:
        kept, pairs, told = (_zeros(like, self.size) for like in (self.kept, self.pairs, self.turn.told))
        return _Done(_split(_zeros(self.x)), kept, pairs, told, _zeros(self.loss), _zeros(self.last), sums)

    def forward(self, cell: dict, slots: _Slots, sums: _Sums) -> _Done:
        """The forward pass of a chunk, from the data or from what has come."""
        chunk, j = cell["chunk"], cell["microbatch"]
        where = self.where(chunk, 0, j)
        x = jax.lax.cond(
            self.is_first(chunk),
            lambda: _split(self.stages.first(self.ends, where.data, where.key)),
            lambda: _split(_at_all(slots.inbox, cell["input"])),
        )

        def one(x, turn):
            here = dataclasses.replace(where, index=where.index + turn)
            x, kept, told = self.turn.forward(self.params_of(chunk, turn), x, here)
            return x, (kept, told)

        x, (kept, told) = jax.lax.scan(one, x, jnp.arange(self.size))
        return self.nothing(sums)._replace(message=_split(x), kept=kept, told=told)

    def backward(self, cell: dict, slots: _Slots, sums: _Sums, fused: bool) -> _Done:
        """The gradient of a chunk's input, from what has come or from the loss; and of its weights, if fused."""
        chunk, j = cell["chunk"], cell["microbatch"]
        where, arrived = self.where(chunk, 0, j), _at_all(slots.inbox, cell["input"])
        done = self.nothing(sums)

        def of_loss():
            def last(ends, x):
                return self.stages.last(ends, x, where.data, self.total)

            loss, pull, told = jax.vjp(last, self.ends, arrived, has_aux=True)
            ends, g = pull(jnp.ones_like(loss))
            return loss, told, _added(sums.ends, ends), _split(g)

        loss, last, ends, g = jax.lax.cond(
            self.is_last(chunk), of_loss, lambda: (done.loss, done.last, sums.ends, _split(arrived))
        )

        def one(g, turn):
            here = dataclasses.replace(where, index=where.index + turn)
            params, kept = self.params_of(chunk, turn), [_at(leaf, cell["stash"], turn) for leaf in slots.stash]
            g, pairs, rest = self.turn.backward(params, kept, here, g, self.share)
            return g, (rest, self.turn.gradients(params, pairs) if fused else pairs)

        g, (rest, late) = jax.lax.scan(one, g, jnp.arange(self.size), reverse=True)

        def of_first():
            _, pull = jax.vjp(lambda ends: self.stages.first(ends, where.data, where.key), self.ends)
            return _added(ends, pull(g)[0])

        ends = jax.lax.cond(self.is_first(chunk), of_first, lambda: ends)
        sums = _Sums(self.add(sums.layers, chunk, rest=rest, late=late if fused else None), ends)
        pairs = done.pairs if fused else late
        return done._replace(message=_split(g), pairs=pairs, loss=loss, last=last, sums=sums)

    def weights(self, cell: dict, slots: _Slots, sums: _Sums) -> _Done:
        """The gradients of a chunk's weights, from the factors that B left."""
        chunk = cell["chunk"]

        def one(_, turn):
            pairs = jax.tree.map(lambda x: _at(x, cell["factors"], turn), slots.factors)
            return None, self.turn.gradients(self.params_of(chunk, turn), pairs)

        _, late = jax.lax.scan(one, None, jnp.arange(self.size))
        return self.nothing(sums)._replace(sums=sums._replace(layers=self.add(sums.layers, chunk, late=late)))

    def add(self, sums: list[Array], chunk: Array, rest: list | None = None, late: list | None = None) -> list[Array]:
        """Adds gradients [turns of a chunk, ...] to those of the chunk: of the products, of the others, or of both."""
        late_ones, others, out = iter(late or []), iter(rest or []), []
        for total, product in zip(sums, self.turn.products, strict=True):
            given = late if product else rest
            if given is not None:
                more = next(late_ones if product else others).astype(total.dtype)
                total = _with(total, _at(total, chunk) + more, chunk)
            out.append(total)
        return out


def _wide(dtype: DTypeLike) -> DTypeLike:
    return jnp.promote_types(dtype, jnp.float32)


def _zeros(like: PyTree, *leading: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), like)


def _at(x: Array, *places: Index) -> Array:
    """Element `places` of the first axes."""
    for place in places:
        x = jax.lax.dynamic_index_in_dim(x, place, keepdims=False)
    return x


def _at_all(tree: PyTree, place: Array) -> PyTree:
    return jax.tree.map(lambda x: _at(x, place), tree)


def _put(buffers: PyTree, values: PyTree, slot: Array, column: Array | None = None) -> PyTree:
    """Writes into a slot, or into a column of it; nothing where the slot is -1, and then no bit changes."""

    def one(buffer, value):
        places = (jnp.maximum(slot, 0),) if column is None else (jnp.maximum(slot, 0), jnp.maximum(column, 0))
        return _with(buffer, jnp.where(slot >= 0, value, _at(buffer, *places)), *places)

    return jax.tree.map(one, buffers, values)


def _with(x: Array, value: Array, *places: Index) -> Array:
    """The array with another element at `places` of the first axes."""
    start = (*places, *(np.int32(0),) * (x.ndim - len(places)))
    return jax.lax.dynamic_update_slice(x, value.reshape((1,) * len(places) + value.shape), start)


def _added(sums: PyTree, gradient: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, gradient)


def _split(x: PyTree) -> PyTree:
    """Residual streams, split as they are between layers: every branch must end alike."""
    return jax.tree.map(lambda leaf: constrain(leaf, *TRAINING.outside), x)


def _from(x: PyTree, step: int, devices: int) -> PyTree:
    """What the device `step` places before this one sends."""
    pairs = [(device, (device + step) % devices) for device in range(devices)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, AXIS, pairs), x)
