"""What a stage does in a tick: a task, then the same exchanges as all others; and a loop over ticks."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar.mesh import constrain
from jaxpar.nn.mixer import TRAINING
from jaxpar.nn.schedule import Head, Stages, key_of_part
from jaxpar.nn.two_stage import put_together, take_apart
from jaxpar.parallel.pipeline._chunks import AXIS, collect_chunks, spread_chunks
from jaxpar.parallel.pipeline._head import Share, merge_shares, rows_gradient, share_of
from jaxpar.parallel.pipeline._turn import Where, raw_shape, turn_of
from jaxpar.parallel.pipeline.ops import Op
from jaxpar.parallel.pipeline.pack import COLUMNS, TickTable
from jaxpar.types import Array, PRNGKey, PyTree

Index = int | Array


class Slots(NamedTuple):
    """What a device holds between ticks; the first axis is that of slots.

    Attributes:
      inbox: Residual streams and their gradients that have come.
      stash: What forward passes keep, [slots, turns of a chunk, ...].
      factors: Of weights whose gradients are put off, the same.
      head: Of a head that is split over stages, what S leaves to T.
    """

    inbox: PyTree
    stash: list[Array]
    factors: list[tuple[Array, Array]]
    head: PyTree = ()


class Sums(NamedTuple):
    """Gradients so far.

    Attributes:
      layers: Of each array of the layers, [v, turns of a chunk, ...].
      ends: Of what lies outside of them.
      rows: Of a stage's rows of the head, where it is split; and then:
      entered: Of each microbatch's residual stream before the first layer, [m, ...].
    """

    layers: list[Array]
    ends: PyTree
    rows: PyTree = ()
    entered: PyTree = ()


class Done(NamedTuple):
    """What a task gives.

    Attributes:
      message: A residual stream or its gradient.
      kept: For a slot of the stash.
      pairs: For a slot of factors.
      told: By each turn, of F.
      loss: Of B and BW of the last chunk, and of the microbatch alone.
      last: What it told.
      sums: With what the task adds.
      left: Of S, for a slot of the head.
    """

    message: PyTree
    kept: list[Array]
    pairs: list[tuple[Array, Array]]
    told: PyTree
    loss: Array
    last: PyTree
    sums: Sums
    left: PyTree = ()


class Given(NamedTuple):
    """What a stage is given.

    Attributes:
      layers: Its turns at rest.
      ends: Parameters outside of the layers that it reads.
      parts: The microbatches, [m, ...].
      key: Of dropout, or None.
      total: What sums over tokens are divided by.
      rows: Its rows of a head that is split, [n, D].
      entered: Then also each microbatch's residual stream before the first layer, [m, ...].
    """

    layers: PyTree
    ends: PyTree
    parts: PyTree
    key: PRNGKey | None
    total: Array
    rows: PyTree = ()
    entered: PyTree = ()


@dataclasses.dataclass(frozen=True)
class Program:
    """What each stage runs, on its own block over the axis `stage`."""

    stages: Stages
    table: TickTable
    chunk_size: int
    vocabulary: int

    def __call__(self, given: Given, rows: Array) -> tuple[Array, PyTree, PyTree, Sums]:
        """Returns loss, what turns and loss told, and gradients; rows of the table are [ticks, 1, columns]."""
        schedule, me = self.table.schedule, jax.lax.axis_index(AXIS)
        layers = spread_chunks(given.layers, schedule, self.chunk_size)
        numbers = np.array([schedule.chunks_of(device) for device in range(schedule.devices)])
        kind = HeadWork if schedule.has_vocabulary else Work
        work = kind(self, given._replace(layers=layers), jnp.asarray(numbers)[me])
        (_, _, sums, loss, told, last), _ = jax.lax.scan(work.tick, work.start(), rows[:, 0])
        loss, last, outside = jax.tree.map(lambda x: jax.lax.psum(x, AXIS), (loss, last, sums.ends))
        gradients = collect_chunks(jax.tree.unflatten(jax.tree.structure(layers), sums.layers), schedule)
        return loss, told, last, sums._replace(layers=gradients, ends=outside)


class Work:
    """The tasks of one device, and a tick of all."""

    loses = True  # in the last chunk's backward task, not where all stages meet

    def __init__(self, program: Program, given: Given, own: Array):
        self.table, self.stages, self.size = program.table, program.stages, program.chunk_size
        self.schedule, self.own, self.given = self.table.schedule, own, given
        self.layers, self.ends, self.parts, self.key, self.total, *_ = given
        self.share = 1 / self.schedule.microbatches
        where = self.where(0, 0, 0)
        self.vocabulary = program.vocabulary
        self.x = jax.eval_shape(lambda: self.enter(where, 0))
        self.turn = turn_of(self.stages, self.params_of(0, 0), self.x, where)
        self.loss, self.last = jax.eval_shape(lambda x: self.lose(x, where), self.x)
        self.kept = [raw_shape(like) for like in self.turn.kept]
        self.ops = sorted({Op.IDLE, *(task.op for task in self.schedule.tasks)})
        is_apart = Op.B in self.ops  # otherwise no task leaves factors to another
        self.pairs = [(product.x, product.y) for product in self.turn.products if product and is_apart]

    def where(self, chunk: Index, turn: Index, j: Index) -> Where:
        """What a turn of a device's chunk reads of microbatch j."""
        key = key_of_part(self.key, j, self.schedule.microbatches)
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
        return Slots(streams, stash, factors), flying, Sums(wide, ends), _zeros(self.loss), told, _zeros(self.last, m)

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
        branches |= self.more_tasks(cell, slots, sums)
        which = np.full(max(Op) + 1, 0, np.int32)
        which[self.ops] = np.arange(len(self.ops))
        done: Done = jax.lax.switch(jnp.asarray(which)[op], [branches[one] for one in self.ops])

        is_forward, is_back = op == Op.F, (op == Op.B) | (op == Op.BW)
        stash = _put(slots.stash, done.kept, jnp.where(is_forward, cell["stash"], -1))
        factors = _put(slots.factors, done.pairs, jnp.where(op == Op.B, cell["factors"], -1))
        told = _put(told, done.told, jnp.where(is_forward, chunk, -1), j)
        last = _put(last, done.last, jnp.where(is_back & self.is_last(chunk) & self.loses, j, -1))

        inbox = _put(slots.inbox, done.message, cell["keep"])
        flying = (*flying, done.message)
        for step, column in ((1, "from_before"), (-1, "from_after")):
            inbox = _put(inbox, _from(flying[0], step, self.schedule.devices), cell[column])
        slots = Slots(inbox, stash, factors, _put(slots.head, done.left, jnp.where(op == Op.S, cell["head"], -1)))
        slots, sums, loss, last = self.meet(cell, slots, flying[0], done.sums, loss + done.loss, last)
        return (slots, flying[1:], sums, loss, told, last), None

    def more_tasks(self, cell: dict, slots: Slots, sums: Sums) -> dict:
        """Tasks that only some schedules have."""
        del cell, slots, sums
        return {}

    def meet(self, cell: dict, slots: Slots, message: PyTree, sums: Sums, loss: Array, last: PyTree) -> tuple:
        """Exchanges of all stages at once, which only some schedules have."""
        del cell, message
        return slots, sums, loss, last

    def is_first(self, chunk: Index) -> Array:
        return self.own[chunk] % self.schedule.depth == 0

    def is_last(self, chunk: Index) -> Array:
        return self.own[chunk] % self.schedule.depth == self.schedule.depth - 1

    def nothing(self, sums: Sums) -> Done:
        kept, pairs, told = (_zeros(like, self.size) for like in (self.kept, self.pairs, self.turn.told))
        return Done(_split(_zeros(self.x)), kept, pairs, told, _zeros(self.loss), _zeros(self.last), sums)

    def forward(self, cell: dict, slots: Slots, sums: Sums) -> Done:
        """The forward pass of a chunk, from the data or from what has come."""
        chunk, j = cell["chunk"], cell["microbatch"]
        where = self.where(chunk, 0, j)
        x = jax.lax.cond(
            self.is_first(chunk),
            lambda: _split(self.enter(where, j)),
            lambda: _split(_at_all(slots.inbox, cell["input"])),
        )

        def one(x, turn):
            here = dataclasses.replace(where, index=where.index + turn)
            x, kept, told = self.turn.forward(self.params_of(chunk, turn), x, here)
            return x, (kept, told)

        x, (kept, told) = jax.lax.scan(one, x, jnp.arange(self.size))
        return self.nothing(sums)._replace(message=_split(x), kept=kept, told=told)

    def backward(self, cell: dict, slots: Slots, sums: Sums, fused: bool) -> Done:
        """The gradient of a chunk's input, from what has come or from the loss; and of its weights, if fused."""
        chunk, j = cell["chunk"], cell["microbatch"]
        where, arrived = self.where(chunk, 0, j), _at_all(slots.inbox, cell["input"])
        done = self.nothing(sums)

        loss, last, sums, g = self.returned(chunk, arrived, where, done)

        def one(g, turn):
            here = dataclasses.replace(where, index=where.index + turn)
            params, kept = self.params_of(chunk, turn), [_at(leaf, cell["stash"], turn) for leaf in slots.stash]
            g, pairs, rest = self.turn.backward(params, kept, here, g, self.share)
            return g, (rest, self.turn.gradients(params, pairs) if fused else pairs)

        g, (rest, late) = jax.lax.scan(one, g, jnp.arange(self.size), reverse=True)

        sums = jax.lax.cond(self.is_first(chunk), lambda: self.leave(sums, where, j, g), lambda: sums)
        sums = sums._replace(layers=self.add(sums.layers, chunk, rest=rest, late=late if fused else None))
        pairs = done.pairs if fused else late
        return done._replace(message=_split(g), pairs=pairs, loss=loss, last=last, sums=sums)

    def enter(self, where: Where, j: Index) -> PyTree:
        """The residual stream before the first layer."""
        del j
        return self.stages.first(self.ends, where.data, where.key)

    def leave(self, sums: Sums, where: Where, j: Index, g: PyTree) -> Sums:
        """Adds the gradient of what `enter` reads."""
        del j
        _, pull = jax.vjp(lambda ends: self.stages.first(ends, where.data, where.key), self.ends)
        return sums._replace(ends=added(sums.ends, pull(g)[0]))

    def lose(self, x: PyTree, where: Where) -> tuple[Array, PyTree]:
        """The loss of what leaves the last layer, and what is told of it."""
        return self.stages.last(self.ends, x, where.data, self.total)

    def returned(self, chunk: Index, arrived: PyTree, where: Where, done: Done) -> tuple:
        """Loss, what it told, sums, and the gradient of a chunk's output: what has come, or of the loss of it."""
        sums = done.sums

        def of_loss():
            def last(ends, x):
                return self.stages.last(ends, x, where.data, self.total)

            loss, pull, told = jax.vjp(last, self.ends, arrived, has_aux=True)
            ends, g = pull(jnp.ones_like(loss))
            return loss, told, sums._replace(ends=added(sums.ends, ends)), _split(g)

        return jax.lax.cond(self.is_last(chunk), of_loss, lambda: (done.loss, done.last, sums, _split(arrived)))

    def weights(self, cell: dict, slots: Slots, sums: Sums) -> Done:
        """The gradients of a chunk's weights, from the factors that B left."""
        chunk = cell["chunk"]

        def one(_, turn):
            pairs = jax.tree.map(lambda x: _at(x, cell["factors"], turn), slots.factors)
            return None, self.turn.gradients(self.params_of(chunk, turn), pairs)

        _, late = jax.lax.scan(one, None, jnp.arange(self.size))
        return self.nothing(sums)._replace(sums=sums._replace(layers=self.add(sums.layers, chunk, late=late)))

    def add(self, sums: list[Array], chunk: Array, rest: list | None = None, late: list | None = None) -> list[Array]:
        """Adds gradients [turns of a chunk, ...] to those of the chunk: of the products, of the others, or of both."""
        products, new = self.turn.products, []
        for totals, more in zip(take_apart(products, sums), (late, rest), strict=True):
            if more is not None:
                pairs = zip(totals, more, strict=True)
                totals = [_with(total, _at(total, chunk) + x.astype(total.dtype), chunk) for total, x in pairs]
            new.append(totals)
        return put_together(products, *new)


class HeadWork(Work):
    """The same where the rows of the head, and those of the embedding, are split over the stages."""

    loses = False

    @property
    def head(self) -> Head:
        """The model's."""
        assert self.stages.head is not None  # which `Pipelined.check` says
        return self.stages.head

    def enter(self, where: Where, j: Index) -> PyTree:
        del where
        return _at_all(self.given.entered, j)

    def leave(self, sums: Sums, where: Where, j: Index, g: PyTree) -> Sums:
        del where
        return sums._replace(entered=_put(sums.entered, g, j))

    def lose(self, x: PyTree, where: Where) -> tuple[Array, PyTree]:
        value = self.shared(x, where).norm.sum()  # read for its shape alone
        return value, self.head.told(value)

    def returned(self, chunk: Index, arrived: PyTree, where: Where, done: Done) -> tuple:
        del chunk, where  # `meet` counts the loss, and sends its gradient
        return done.loss, done.last, done.sums, _split(arrived)

    def shared(self, x: PyTree, where: Where) -> Share:
        """What this stage says of the last layer's output."""
        head = self.head
        targets, _ = head.targets(where.data, self.total)
        return share_of(self.given.rows, head.ready(self.ends, x), targets, self.vocabulary)

    def start(self) -> tuple:
        slots, flying, sums, *rest = super().start()
        rows = jnp.zeros(self.given.rows.shape, _wide(self.given.rows.dtype))
        sums = sums._replace(rows=rows, entered=_zeros(self.given.entered))
        return slots._replace(head=_zeros(self.left(), self.table.slots["head"])), flying, sums, *rest

    def nothing(self, sums: Sums) -> Done:
        return super().nothing(sums)._replace(left=_zeros(self.left()))

    def left(self) -> PyTree:
        """Shapes of what S leaves: the last layer's output, this stage's share, and the microbatch's number."""
        where = self.where(0, 0, 0)
        share = jax.eval_shape(lambda x: self.shared(x, where), self.x)
        return self.x, share, jax.ShapeDtypeStruct((), jnp.int32)

    def more_tasks(self, cell: dict, slots: Slots, sums: Sums) -> dict:
        def share():
            x, j = _at_all(slots.inbox, cell["input"]), cell["microbatch"]
            return self.nothing(sums)._replace(left=(x, self.shared(x, self.where(0, 0, j)), j))

        def rows():
            x, share, j = _at_all(slots.head, cell["head"])
            targets, weights = self.head.targets(self.where(0, 0, j).data, self.total)
            more = rows_gradient(share, self.head.ready(self.ends, x), targets, weights)
            return self.nothing(sums._replace(rows=sums.rows + more.astype(sums.rows.dtype)))

        return {Op.S: share, Op.T: rows}

    def meet(self, cell: dict, slots: Slots, message: PyTree, sums: Sums, loss: Array, last: PyTree) -> tuple:
        """Sends the last chunk's output to all, and merges shares: in ticks that are the same for all stages."""
        me, owner = jax.lax.axis_index(AXIS), self.schedule.placement[-1]

        def sent(inbox):
            every = jax.tree.map(lambda x: jax.lax.psum(jnp.where(me == owner, x, 0), AXIS), message)
            return _put(inbox, every, cell["from_all"])

        def barrier(slots, ends, loss, last):
            x, share, j = _at_all(slots.head, cell["merge"])
            head = self.head
            _, weights = head.targets(self.where(0, 0, j).data, self.total)
            value, z, g, factor = merge_shares(share, weights, head.z_loss)
            _, pull = jax.vjp(head.ready, self.ends, x)
            of_ends, g = pull(g)
            once = (me == 0).astype(value.dtype)  # all stages have the same
            ends = added(ends, jax.tree.map(lambda x: x * once.astype(x.dtype), of_ends))
            told = jax.tree.map(lambda x: x * once.astype(x.dtype), head.told(z))
            kept = _put(slots.head, (x, share._replace(factor=factor), j), cell["merge"])
            slots = slots._replace(head=kept, inbox=_put(slots.inbox, _split(g), cell["merged"]))
            return slots, ends, loss + once * value, _put(last, told, j)

        inbox = jax.lax.cond(cell["from_all"] >= 0, sent, lambda inbox: inbox, slots.inbox)
        slots = slots._replace(inbox=inbox)
        slots, ends, loss, last = jax.lax.cond(
            cell["merge"] >= 0, barrier, lambda *same: same, slots, sums.ends, loss, last
        )
        return slots, sums._replace(ends=ends), loss, last


def _wide(dtype: DTypeLike) -> DTypeLike:
    return jnp.promote_types(dtype, jnp.float32)


def _zeros(like: PyTree, *leading: int) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros((*leading, *x.shape), x.dtype), like)


def _at(x: Array, *places: Index) -> Array:
    """Element `places` of the first axes."""
    for place in places:
        x = jax.lax.dynamic_index_in_dim(x, place, keepdims=False)
    return x


def _at_all(tree: PyTree, place: Index) -> PyTree:
    return jax.tree.map(lambda x: _at(x, place), tree)


def _put(buffers: PyTree, values: PyTree, slot: Index, column: Index | None = None) -> PyTree:
    """Writes into a slot, or into a column of it; nothing where the slot is -1, and then no bit changes."""

    def one(buffer, value):
        places = (jnp.maximum(slot, 0),) if column is None else (jnp.maximum(slot, 0), jnp.maximum(column, 0))
        return _with(buffer, jnp.where(slot >= 0, value, _at(buffer, *places)), *places)

    return jax.tree.map(one, buffers, values)


def _with(x: Array, value: Array, *places: Index) -> Array:
    """The array with another element at `places` of the first axes."""
    start = (*places, *(np.int32(0),) * (x.ndim - len(places)))
    return jax.lax.dynamic_update_slice(x, value.reshape((1,) * len(places) + value.shape), start)


def added(sums: PyTree, gradient: PyTree) -> PyTree:
    """Returns the sums with a gradient added, in their own dtypes."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, gradient)


def _split(x: PyTree) -> PyTree:
    """Residual streams, split as they are between layers: every branch must end alike."""
    return jax.tree.map(lambda leaf: constrain(leaf, *TRAINING.outside), x)


def _from(x: PyTree, step: int, devices: int) -> PyTree:
    """What the device `step` places before this one sends."""
    pairs = [(device, (device + step) % devices) for device in range(devices)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, AXIS, pairs), x)
