"""What a stage does in a tick: a task, then the same exchanges as all others; and a loop over ticks."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar.mesh import constrain
from jaxpar.nn.mixer import TRAINING
from jaxpar.pipeline._chunks import AXIS, collect_chunks, gathered_chunk, spread_chunks
from jaxpar.pipeline._head import Share, merge_shares, rows_gradient, share_of
from jaxpar.pipeline._held import Given, Slots, State, Sums
from jaxpar.pipeline._host import empty_on_host, exchanged
from jaxpar.pipeline._once import at_most_once
from jaxpar.pipeline._turn import Where, raw_shape, turn_of
from jaxpar.pipeline.accumulation import Head, Stages, key_of_part
from jaxpar.pipeline.ops import Op
from jaxpar.pipeline.pack import TickTable
from jaxpar.pipeline.two_stage import put_together, take_apart
from jaxpar.types import Array, PyTree

Index = int | Array


Task = Callable[[dict, State], State]


@dataclasses.dataclass(frozen=True)
class Program:
    """What each stage runs, on its own block over the axis `stage`."""

    stages: Stages
    table: TickTable
    chunk_size: int
    vocabulary: int
    fixed: tuple[bool, ...] | None = None  # of each array of the layers; None if all have gradients

    def __call__(self, given: Given, rows: Array) -> tuple[Array, PyTree, PyTree, Sums]:
        """Returns loss, what turns and loss told, and gradients.

        Rows of the table are [ticks, 1, columns].
        Gradients of the layers are a list, of the arrays that have one.
        """
        work = self.work(given)
        schedule = self.table.schedule
        (end, _), _ = jax.lax.scan(work.tick, work.start(), rows[:, 0])
        sums = end.sums
        summed = end.loss, end.last, sums.ends
        loss, last, outside = jax.tree.map(lambda x: jax.lax.psum(x, AXIS), summed)
        gradients = collect_chunks(sums.layers, schedule)
        return loss, end.told, last, sums._replace(layers=gradients, ends=outside)

    def work(self, given: Given) -> "Work":
        """Returns the tasks of this stage, with its own chunks."""
        schedule, me = self.table.schedule, jax.lax.axis_index(AXIS)
        layers = spread_chunks(given.layers, schedule, self.chunk_size)
        numbers = np.array([schedule.chunks_of(device) for device in range(schedule.devices)])
        kind = HeadWork if schedule.has_vocabulary else Work
        return kind(self, given._replace(layers=layers), jnp.asarray(numbers)[me])


class Work:
    """The tasks of one device, and a tick of all.

    A pipeline that differs in what a task reads or adds overrides the methods that say so: `HeadWork` here, and
    PipeDream in `asynchronous`, whose weights are of several versions.
    """

    loses = True  # in the last chunk's backward task, not where all stages meet

    def __init__(self, program: Program, given: Given, own: Array):
        self.table, self.stages, self.size = program.table, program.stages, program.chunk_size
        self.schedule, self.own, self.given = self.table.schedule, own, given
        self.layers, self.ends, self.parts, self.key, self.total, *_ = given
        self.share = self.share_of_microbatch()
        self.turns = np.arange(self.size, dtype=np.int32)
        where = self.where(0, 0, 0)
        self.vocabulary = program.vocabulary
        self.x = jax.eval_shape(lambda: self.enter(self.ends, where, 0))
        self.gathers = "weights" in self.table.slots
        self.turn = turn_of(
            self.stages, self.params_of(0, 0), self.x, where, self.gathers, program.fixed
        )
        self.loss, self.last = jax.eval_shape(lambda x: self.lose(x, where), self.x)
        self.kept = [raw_shape(like) for like in self.turn.kept]
        self.ops = {task.op for task in self.schedule.tasks}
        is_apart = Op.B in self.ops  # otherwise no task leaves factors to another
        self.pairs = [
            (product.x, product.y) for product in self.turn.products if product and is_apart
        ]

    def share_of_microbatch(self) -> float:
        """Returns the weight of a microbatch's auxiliary losses in the gradient."""
        return 1 / self.schedule.microbatches

    def where(self, chunk: Index, turn: Index, j: Index) -> Where:
        """What a turn of a device's chunk reads of microbatch j."""
        key = key_of_part(self.key, j, self.schedule.microbatches)
        index = self.own[chunk] % self.schedule.depth * self.size + turn
        return Where(index, jax.tree.map(lambda x: _at(x, j), self.parts), key)

    def params_of(self, chunk: Index, turn: Index) -> PyTree:
        return jax.tree.map(lambda x: _at(x, chunk, turn), self.layers)

    def params_in(self, cell: dict, state: State) -> Callable[[Index], PyTree]:
        """Returns a task's parameters of a turn: gathered ones, or those that lie here."""
        if self.gathers:
            weights = state.slots.weights
            return lambda turn: jax.tree.map(lambda x: _at(x, cell["weights"], turn), weights)
        return functools.partial(self.params_of, cell["chunk"])

    def ends_in(self, cell: dict, state: State) -> PyTree:
        """Returns the parameters outside of the layers that a task reads."""
        del cell, state
        return self.ends

    def total_in(self, where: Where) -> Array:
        """Returns what sums over a microbatch's tokens are divided by."""
        del where
        return self.total

    def gather(self, cell: dict, state: State) -> State:
        """Gathers the weights of a chunk into a slot."""
        chunk = gathered_chunk(_at_all(self.layers, cell["gather"]), self.stages)
        weights = jax.tree.map(
            lambda x, new: _with(x, new, cell["gather_to"]), state.slots.weights, chunk
        )
        return state._replace(slots=state.slots._replace(weights=weights))

    def start(self) -> tuple[State, tuple]:
        """What is carried from tick to tick, empty: the state, and messages under way."""
        slots, turn, m = self.table.slots, self.turn, self.schedule.microbatches
        num_chunks = self.own.shape[0]
        streams = _zeros(self.x, slots["inbox"])
        stash = _zeros(self.kept, slots["stash"], self.size)
        factors = _zeros(self.pairs, slots["factors"], self.size)
        wide = [
            jnp.zeros(leaf.shape, _wide(leaf.dtype))
            for leaf, is_fixed in zip(jax.tree.leaves(self.layers), turn.fixed, strict=True)
            if not is_fixed
        ]
        ends = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _wide(leaf.dtype)), self.ends)
        told = _zeros(turn.told, num_chunks, m, self.size)
        flying = tuple(_zeros(self.x) for _ in range(self.table.latency - 1))
        host = empty_on_host(self.kept, slots["host"] + 1, self.size) if "host" in slots else []
        weights = (
            gathered_chunk(_zeros(jax.tree.map(lambda x: x[0], self.layers)), self.stages)
            if self.gathers
            else ()
        )
        weights = jax.tree.map(lambda x: jnp.broadcast_to(x, (slots["weights"], *x.shape)), weights)
        held = Slots(streams, stash, factors, host=host, weights=weights)
        return State(
            _zeros(self.x), held, Sums(wide, ends), _zeros(self.loss), told, _zeros(self.last, m)
        ), flying

    def tick(self, carry: tuple[State, tuple], row: Array) -> tuple[tuple[State, tuple], None]:
        """Does a task, and exchanges messages with both neighbours; before it, slots with the host."""
        state, flying = carry
        cell = dict(zip(self.columns(), row, strict=True))
        state = state._replace(message=_split(_zeros(self.x)))
        if state.slots.host:
            stash, host = exchanged(state.slots.stash, state.slots.host, cell)
            state = state._replace(slots=state.slots._replace(stash=stash, host=host))
        if self.gathers:
            state = at_most_once(cell["gather"] >= 0, self.gather, cell, state)
        for op, task in self.tasks().items():
            if op in self.ops:
                state = at_most_once(cell["op"] == op, task, cell, state)
        inbox = _put(state.slots.inbox, state.message, cell["keep"])
        flying = (*flying, state.message)
        for step, column in ((1, "from_before"), (-1, "from_after")):
            inbox = _put(inbox, _from(flying[0], step, self.schedule.devices), cell[column])
        state = self.meet(cell, state._replace(slots=state.slots._replace(inbox=inbox)), flying[0])
        return (state, flying[1:]), None

    def columns(self) -> tuple[str, ...]:
        """Returns the names of the numbers of a row."""
        return self.table.columns

    def tasks(self) -> dict[Op, Task]:
        """What is done for each operation of the table; for none nothing is."""
        return {
            Op.F: self.forward,
            Op.B: functools.partial(self.backward, fused=False),
            Op.W: self.weights,
            Op.BW: functools.partial(self.backward, fused=True),
        }

    def meet(self, cell: dict, state: State, message: PyTree) -> State:
        """Exchanges of all stages at once, which only some schedules have."""
        del cell, message
        return state

    def is_first(self, chunk: Index) -> Array:
        return self.own[chunk] % self.schedule.depth == 0

    def is_last(self, chunk: Index) -> Array:
        return self.own[chunk] % self.schedule.depth == self.schedule.depth - 1

    def forward(self, cell: dict, state: State) -> State:
        """The forward pass of a chunk, from the data or from what has come."""
        chunk, j, slot = cell["chunk"], cell["microbatch"], cell["stash"]
        where, slots = self.where(chunk, 0, j), state.slots
        params_of = self.params_in(cell, state)

        def enter(cell, x):
            del x
            j = cell["microbatch"]
            ends = self.ends_in(cell, state)
            return _split(self.enter(ends, self.where(cell["chunk"], 0, j), j))

        x = at_most_once(
            self.is_first(chunk), enter, cell, _split(_at_all(slots.inbox, cell["input"]))
        )

        def one(carry, turn):
            x, stash, all_told = carry
            here = dataclasses.replace(where, index=where.index + turn)
            x, kept, told = self.turn.forward(params_of(turn), x, here)
            stash = [
                _with(slots, each, slot, turn) for slots, each in zip(stash, kept, strict=True)
            ]
            return (
                x,
                stash,
                jax.tree.map(lambda x, new: _with(x, new, chunk, j, turn), all_told, told),
            ), None

        (x, stash, told), _ = jax.lax.scan(one, (x, slots.stash, state.told), self.turns)
        return state._replace(message=_split(x), slots=slots._replace(stash=stash), told=told)

    def backward(self, cell: dict, state: State, fused: bool) -> State:
        """The gradient of a chunk's input, from what has come or from the loss; and of its weights, if fused."""
        chunk = cell["chunk"]
        slots = state.slots
        params_of = self.params_in(cell, state)
        where = self.where(chunk, 0, cell["microbatch"])
        state = state._replace(message=_split(_at_all(slots.inbox, cell["input"])))
        if self.loses:
            state = at_most_once(self.is_last(chunk), self.returned, cell, state)

        def one(carry, turn):
            g, factors, layers = carry
            here = dataclasses.replace(where, index=where.index + turn)
            params, kept = params_of(turn), [_at(leaf, cell["stash"], turn) for leaf in slots.stash]
            g, pairs, rest = self.turn.backward(params, kept, here, g, self.share)
            late = None
            if fused:
                late = self.turn.gradients(params, pairs)
            else:
                factors = jax.tree.map(
                    lambda x, new: _with(x, new, cell["factors"], turn), factors, pairs
                )
            return (g, factors, self.add(layers, chunk, turn, rest=rest, late=late)), None

        start = state.message, slots.factors, state.sums.layers
        (g, factors, layers), _ = jax.lax.scan(one, start, self.turns, reverse=True)
        sums, slots = state.sums._replace(layers=layers), slots._replace(factors=factors)
        state = state._replace(message=_split(g), slots=slots, sums=sums)
        return at_most_once(self.is_first(chunk), self.leave, cell, state)

    def enter(self, ends: PyTree, where: Where, j: Index) -> PyTree:
        """The residual stream before the first layer."""
        del j
        return self.stages.first(ends, where.data, where.key)

    def leave(self, cell: dict, state: State) -> State:
        """Adds the gradient of what `enter` reads."""
        where = self.where(cell["chunk"], 0, cell["microbatch"])
        ends = self.ends_in(cell, state)
        _, pull = jax.vjp(lambda ends: self.stages.first(ends, where.data, where.key), ends)
        sums = state.sums
        return state._replace(sums=sums._replace(ends=added(sums.ends, pull(state.message)[0])))

    def lose(self, x: PyTree, where: Where) -> tuple[Array, PyTree]:
        """The loss of what leaves the last layer, and what is told of it."""
        return self.stages.last(self.ends, x, where.data, self.total_in(where))

    def returned(self, cell: dict, state: State) -> State:
        """Counts the loss of what the last chunk has given; the message is then its gradient."""
        j = cell["microbatch"]
        where = self.where(cell["chunk"], 0, j)

        def last(ends, x):
            return self.stages.last(ends, x, where.data, self.total_in(where))

        ends = self.ends_in(cell, state)
        x = _at_all(state.slots.inbox, cell["input"])
        loss, pull, told = jax.vjp(last, ends, x, has_aux=True)
        ends, g = pull(jnp.ones_like(loss))
        sums = state.sums._replace(ends=added(state.sums.ends, ends))
        last_told = jax.tree.map(lambda x, new: _with(x, new, j), state.last, told)
        counted = self.add_loss(state.loss, loss, j)
        return state._replace(message=_split(g), sums=sums, loss=counted, last=last_told)

    def add_loss(self, losses: Array, loss: Array, j: Index) -> Array:
        """Adds a microbatch's loss to what was counted so far."""
        del j
        return losses + loss

    def weights(self, cell: dict, state: State) -> State:
        """The gradients of a chunk's weights, from the factors that B left."""
        chunk, factors = cell["chunk"], state.slots.factors

        def one(layers, turn):
            pairs = jax.tree.map(lambda x: _at(x, cell["factors"], turn), factors)
            late = self.turn.gradients(self.params_of(chunk, turn), pairs)
            return self.add(layers, chunk, turn, late=late), None

        layers, _ = jax.lax.scan(one, state.sums.layers, self.turns)
        return state._replace(sums=state.sums._replace(layers=layers))

    def add(
        self,
        sums: list[Array],
        chunk: Array,
        turn: Array,
        rest: list | None = None,
        late: list | None = None,
    ) -> list[Array]:
        """Adds a turn's gradients to those of its chunk: of the products, of the others, or of both."""
        products, new = self.turn.summed, []
        for totals, more in zip(take_apart(products, sums), (late, rest), strict=True):
            if more is not None:
                pairs = zip(totals, more, strict=True)
                totals = [
                    _with(x, _at(x, chunk, turn) + y.astype(x.dtype), chunk, turn) for x, y in pairs
                ]
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

    def enter(self, ends: PyTree, where: Where, j: Index) -> PyTree:
        del ends, where
        return _at_all(self.given.entered, j)

    def leave(self, cell: dict, state: State) -> State:
        entered = _put(state.sums.entered, state.message, cell["microbatch"])
        return state._replace(sums=state.sums._replace(entered=entered))

    def lose(self, x: PyTree, where: Where) -> tuple[Array, PyTree]:
        value = self.shared(x, where).norm.sum()  # read for its shape alone
        return value, self.head.told(value)

    def shared(self, x: PyTree, where: Where) -> Share:
        """What this stage says of the last layer's output."""
        head = self.head
        targets, _ = head.targets(where.data, self.total)
        return share_of(
            self.given.rows, head.ready(self.ends, x), targets, self.vocabulary, head.smoothing
        )

    def start(self) -> tuple[State, tuple]:
        state, flying = super().start()
        rows = jnp.zeros(self.given.rows.shape, _wide(self.given.rows.dtype))
        sums = state.sums._replace(rows=rows, entered=_zeros(self.given.entered))
        slots = state.slots._replace(head=_zeros(self.left(), self.table.slots["head"]))
        return state._replace(slots=slots, sums=sums), flying

    def left(self) -> PyTree:
        """Shapes of what S leaves: the last layer's output, this stage's share, and the microbatch's number."""
        where = self.where(0, 0, 0)
        share = jax.eval_shape(lambda x: self.shared(x, where), self.x)
        return self.x, share, jax.ShapeDtypeStruct((), jnp.int32)

    def tasks(self) -> dict[Op, Task]:
        return {**super().tasks(), Op.S: self.share_of_loss, Op.T: self.rows_of_head}

    def share_of_loss(self, cell: dict, state: State) -> State:
        """What this stage's rows say of a microbatch that left the last layer, for a slot of the head."""
        slots, j = state.slots, cell["microbatch"]
        x = _at_all(slots.inbox, cell["input"])
        head = _put(slots.head, (x, self.shared(x, self.where(0, 0, j)), j), cell["head"])
        return state._replace(slots=slots._replace(head=head))

    def rows_of_head(self, cell: dict, state: State) -> State:
        """Adds the gradient of this stage's rows."""
        x, share, j = _at_all(state.slots.head, cell["head"])
        head, rows = self.head, state.sums.rows
        targets, weights = head.targets(self.where(0, 0, j).data, self.total)
        more = rows_gradient(
            share, head.ready(self.ends, x), targets, weights, self.vocabulary, head.smoothing
        )
        return state._replace(sums=state.sums._replace(rows=rows + more.astype(rows.dtype)))

    def meet(self, cell: dict, state: State, message: PyTree) -> State:
        """Sends the last chunk's output to all, and merges shares: in ticks that are the same for all stages."""
        me, owner = jax.lax.axis_index(AXIS), self.schedule.placement[-1]

        def sent(cell, inbox):
            every = jax.tree.map(
                lambda x: jax.lax.psum(jnp.where(me == owner, x, 0), AXIS), message
            )
            return _put(inbox, every, cell["from_all"])

        def barrier(cell, state):
            slots, sums = state.slots, state.sums
            x, share, j = _at_all(slots.head, cell["merge"])
            head = self.head
            _, weights = head.targets(self.where(0, 0, j).data, self.total)
            value, z, g, factor = merge_shares(share, weights, head.z_loss)
            _, pull = jax.vjp(head.ready, self.ends, x)
            of_ends, g = pull(g)
            once = (me == 0).astype(value.dtype)  # all stages have the same
            ends = added(sums.ends, jax.tree.map(lambda x: x * once.astype(x.dtype), of_ends))
            told = jax.tree.map(lambda x: x * once.astype(x.dtype), head.told(z))
            kept = _put(slots.head, (x, share._replace(factor=factor), j), cell["merge"])
            slots = slots._replace(head=kept, inbox=_put(slots.inbox, _split(g), cell["merged"]))
            last = _put(state.last, told, j)
            return state._replace(
                slots=slots,
                sums=sums._replace(ends=ends),
                loss=state.loss + once * value,
                last=last,
            )

        inbox = at_most_once(cell["from_all"] >= 0, sent, cell, state.slots.inbox)
        state = state._replace(slots=state.slots._replace(inbox=inbox))
        return at_most_once(cell["merge"] >= 0, barrier, cell, state)


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
        places = (
            (jnp.maximum(slot, 0),)
            if column is None
            else (jnp.maximum(slot, 0), jnp.maximum(column, 0))
        )
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
    """Residual streams, split as they are between layers: every task must end alike."""
    return jax.tree.map(lambda leaf: constrain(leaf, *TRAINING.outside), x)


def _from(x: PyTree, step: int, devices: int) -> PyTree:
    """What the device `step` places before this one sends."""
    pairs = [(device, (device + step) % devices) for device in range(devices)]
    return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, AXIS, pairs), x)
