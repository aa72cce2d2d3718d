"""PipeDream as one program: weights change after every microbatch, and a ring of their versions keeps gradients true.

A pipeline that waits for nobody. Stage s of P has P - s microbatches under way; each goes back through the weights that
it came through (weight stashing), and its gradient changes the newest ones at once. With W_s(j) the weights of stage s
after j updates and L_j the loss of microbatch j,

    g_j = gradient of L_j at (W_0(v_0), ..., W_(P-1)(v_(P-1))),   v_s = max(0, j - (P - 1 - s))
    W_s(j + 1) = rule(W_s(j), part s of g_j)

which is online training by delayed gradients; of one stage it is online training.

Example:
    import jax
    import jax.numpy as jnp
    import optax

    from jaxpar.lm import LMConfig, init
    from jaxpar.lm.stages import stages
    from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
    from jaxpar.pipeline import PipeDream

    config = LMConfig(vocab_size=8, num_layers=2, embed_dim=8, dtype="float32")
    params, tokens = init(jax.random.key(0), config), jnp.arange(48).reshape(4, 3, 4) % 8
    microbatches = {"tokens": tokens, "targets": (tokens + 1) % 8}  # four of three rows
    model, train = stages(config), PipeDream(optax.adam(1e-2))
    with use_mesh(make_mesh(MeshSpec(stage=1), jax.devices()[:1])):  # of four stages: stage=4
        state = train.init(model, params)
        params, state, losses = jax.jit(lambda *args: train(model, *args))(params, state, microbatches)
    assert losses.shape == (4,) and losses[-1] < losses[0]
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from jaxpar.mesh import axes_like, constrain, is_axes
from jaxpar.pipeline._chunks import AXIS
from jaxpar.pipeline._once import at_most_once
from jaxpar.pipeline._turn import Where, raw_shape, turn_of
from jaxpar.pipeline._work import (
    Index,
    _at,
    _at_all,
    _from,
    _put,
    _split,
    _wide,
    _with,
    _zeros,
    added,
)
from jaxpar.pipeline.accumulation import Stages, key_of_part
from jaxpar.pipeline.ops import Op
from jaxpar.pipeline.orders import pipedream
from jaxpar.pipeline.pack import COLUMNS, TickTable, pack_schedule
from jaxpar.pipeline.two_stage import put_together
from jaxpar.stage import by_stage
from jaxpar.types import Array, PRNGKey, PyTree, UsageError

__all__ = ["PipeDream"]

AT, ALL = P(AXIS), P()
VERSIONS: tuple[str, ...] = (
    "read",  # slot of the ring with the weights that F and BW use: the newest at the time of F
    "newest",  # slot that BW updates
    "write",  # slot for what it makes of them: no microbatch under way needs what is there
)


@dataclasses.dataclass(frozen=True)
class PipeDream:
    """Trains a model by PipeDream over the stages of a mesh, a microbatch an update.

    Each stage updates its own parameters by its own copy of the rule: its layers, the first stage also what the model
    reads before its layers, the last one all else. A norm that a rule takes is therefore a stage's own.

    Attributes:
      rule: What makes a step of a gradient, as of optax; with a schedule, that of the number of microbatches.

    Reference: arXiv:1806.03377, section 3.3.
    """

    rule: optax.GradientTransformation

    def init(self, stages: Stages, params: PyTree, axes: PyTree | None = None) -> PyTree:
        """Returns the rule's first state on each stage: every array has an axis of stages in front, [P, ...].

        Args:
          stages: The model.
          params: Its parameters; those of "layers" are stacked, [N, ...].
          axes: Their logical axes, by which copies of them in the state are split within a stage too; or None.

        Raises:
          UsageError: If the layers do not divide over the stages of the ambient mesh.
        """
        _num_stages(stages, params)

        def first_state(own):
            state = self.rule.init(own)
            names = (
                axes_like(state, own, axes)
                if axes
                else jax.tree.map(lambda x: (None,) * x.ndim, state)
            )
            return jax.tree.map(
                lambda names, x: constrain(x, *names)[None], names, state, is_leaf=is_axes
            )

        return jax.jit(by_stage(first_state, (_own(params),), AT))(
            params
        )  # which without jit refuses constants

    def __call__(
        self,
        stages: Stages,
        params: PyTree,
        state: PyTree,
        microbatches: PyTree,
        key: PRNGKey | None = None,
    ) -> tuple[PyTree, PyTree, Array]:
        """Returns parameters and state after one update a microbatch, and the loss of each, [m], as it went forward.

        The pipeline fills and drains once a call: idle time is (P-1)/(m+P-1), so give many microbatches at once.

        Cost: each microbatch's forward and backward pass once, in 2 (m + P - 1) ticks; a tick is as long as the longest
        task of any stage. On each stage, P versions of its layers and of what is read before them (the last stages need
        fewer, but one program has the same arrays everywhere), one of all other parameters, a state of the rule for
        all of these, and P microbatches of activations.

        Args:
          stages: The model, whose `hold` and `release` also take the layers of a stage, or one of them.
          params: As of `init`.
          state: Of `init`, or of the last call.
          microbatches: What `stages.first` reads, [m, B, ...]: m of them, in turn.
          key: Microbatch j draws with this, folded with j; None without dropout. Consumed.

        Raises:
          UsageError: If layers, stages and microbatches do not fit each other, or a parameter is read before the layers
            and after them, as a tied embedding is.
        """
        devices = _num_stages(stages, params)
        m, known = (
            sorted({leaf.shape[0] for leaf in jax.tree.leaves(tree)})
            for tree in (microbatches, state)
        )
        if len(m) != 1 or known not in ([], [devices]):
            raise UsageError(
                f"microbatches are stacked, all [m, ...], and the state is [{devices}, ...] of as many stages; here m "
                f"is {m}, and the state is of {known}."
            )
        microbatches = jax.tree.map(
            lambda x: constrain(x, None, "batch", *(None,) * (x.ndim - 2), name="microbatches"),
            microbatches,
        )
        first = _read_first(stages, params, microbatches, key)
        table, slots = _packed(devices, *m)
        rows = jnp.asarray(np.concatenate([table.rows, slots], -1))

        def train(own, state, microbatches, key, rows):
            work = _Work(stages, self.rule, table, first, own, microbatches, key)
            return work.run(own, jax.tree.map(lambda x: x[0], state), rows[:, 0])

        given, each = (_own(params), AT, ALL, ALL, P(None, *AT)), (_own(params), AT, ALL)
        return by_stage(train, given, each)(params, state, microbatches, key, rows)


class _Carry(NamedTuple):
    """What a stage holds from tick to tick.

    Attributes:
      message: A residual stream or its gradient, of this tick's task.
      inbox: Residual streams and their gradients that have come, [slots, ...].
      stash: What forward passes keep, [slots, turns of a stage, ...].
      ring: Versions of the stage's own parameters, [slots, ...]; of those that the last stage alone reads, one.
      state: Of the rule.
      losses: Of each microbatch, as far as this stage counts it, [m].
    """

    message: PyTree
    inbox: PyTree
    stash: list[Array]
    ring: PyTree
    state: PyTree
    losses: Array


class _Work:
    """The tasks of one stage, and a tick of all; for the inside of a program that is manual over the axis `stage`."""

    def __init__(
        self,
        stages: Stages,
        rule: optax.GradientTransformation,
        table: TickTable,
        first: frozenset[str],
        own: PyTree,
        microbatches: PyTree,
        key: PRNGKey | None,
    ):
        self.stages, self.rule, self.table, self.first = stages, rule, table, first
        self.microbatches, self.key = microbatches, key
        self.devices, self.m = table.schedule.devices, table.schedule.microbatches
        self.size, self.me = stages.num_turns // self.devices, jax.lax.axis_index(AXIS)
        self.turns = np.arange(self.size, dtype=np.int32)
        self.own, self.ring = own, self.filled(own)
        where, held = self.where(0), self.held(self.ring, 0, 0)
        self.layers = jax.tree.structure(held["layers"])
        self.x = jax.eval_shape(lambda: stages.first(held, where.data, where.key))
        self.turn = turn_of(stages, _layer(held), self.x, where)
        self.kept = [raw_shape(like) for like in self.turn.kept]
        self.loss, _ = jax.eval_shape(
            lambda x: stages.last(held, x, where.data, stages.total(where.data)), self.x
        )

    def run(self, own: PyTree, state: PyTree, rows: Array) -> tuple[PyTree, PyTree, Array]:
        """Returns what `PipeDream` does: a stage's layers and state, and what lies outside of the layers on all."""
        slots = self.table.slots
        stash, losses = _zeros(self.kept, slots["stash"], self.size), _zeros(self.loss, self.m)
        start = _Carry(
            _zeros(self.x), _zeros(self.x, slots["inbox"]), stash, self.ring, state, losses
        )
        end, _ = jax.lax.scan(self.tick, start, rows)
        own = self.version(end.ring, self.m % (self.devices - self.me))

        def of(owner: int, x: Array) -> Array:
            return jax.lax.psum(jnp.where(self.me == owner, x, jnp.zeros_like(x)), AXIS)

        for name, part in own.items():
            if name != "layers":
                owner = 0 if name in self.first else self.devices - 1
                own[name] = jax.tree.map(functools.partial(of, owner), part)
        return own, jax.tree.map(lambda x: x[None], end.state), jax.lax.psum(end.losses, AXIS)

    def tick(self, carry: _Carry, row: Array) -> tuple[_Carry, None]:
        """Does a task, and exchanges messages with both neighbours."""
        cell = dict(zip((*COLUMNS, *VERSIONS), row, strict=True))
        carry = carry._replace(message=_split(_zeros(self.x)))
        for op, task in ((Op.F, self.forward), (Op.BW, self.backward)):
            carry = at_most_once(cell["op"] == op, task, cell, carry)
        inbox = _put(carry.inbox, carry.message, cell["keep"])
        for step, column in ((1, "from_before"), (-1, "from_after")):
            inbox = _put(inbox, _from(carry.message, step, self.devices), cell[column])
        return carry._replace(inbox=inbox), None

    def forward(self, cell: dict, carry: _Carry) -> _Carry:
        """The forward pass of the stage's layers with its newest weights, from the data or from what has come."""
        j, slot = cell["microbatch"], cell["read"]
        where = self.where(j)

        def enter(cell, x):
            del x
            where = self.where(cell["microbatch"])
            return _split(
                self.stages.first(self.held(carry.ring, cell["read"], 0), where.data, where.key)
            )

        x = at_most_once(self.me == 0, enter, cell, _split(_at_all(carry.inbox, cell["input"])))

        def one(x_and_stash, turn):
            x, stash = x_and_stash
            here = dataclasses.replace(where, index=where.index + turn)
            x, kept, told = self.turn.forward(_layer(self.held(carry.ring, slot, turn)), x, here)
            stash = [
                _with(slots, each, cell["stash"], turn)
                for slots, each in zip(stash, kept, strict=True)
            ]
            return (x, stash), sum(told.losses.values(), jnp.zeros((), self.loss.dtype))

        (x, stash), losses = jax.lax.scan(one, (x, carry.stash), self.turns)
        losses = carry.losses.at[j].add(losses.sum().astype(self.loss.dtype))
        return carry._replace(message=_split(x), stash=stash, losses=losses)

    def backward(self, cell: dict, carry: _Carry) -> _Carry:
        """The backward pass with the weights of the forward pass, and an update of the newest."""
        slot = cell["read"]
        where = self.where(cell["microbatch"])
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, _wide(x.dtype)), self.ends(cell, carry))
        carry = carry._replace(message=_split(_at_all(carry.inbox, cell["input"])))
        carry, sums = at_most_once(self.me == self.devices - 1, self.returned, cell, (carry, sums))

        def one(g, turn):
            here = dataclasses.replace(where, index=where.index + turn)
            params = _layer(self.held(carry.ring, slot, turn))
            kept = [_at(leaf, cell["stash"], turn) for leaf in carry.stash]
            g, pairs, rest = self.turn.backward(params, kept, here, g, 1.0)
            return g, put_together(self.turn.products, self.turn.gradients(params, pairs), rest)

        g, layers = jax.lax.scan(one, carry.message, self.turns, reverse=True)
        carry = carry._replace(message=_split(g))
        carry, sums = at_most_once(self.me == 0, self.entered, cell, (carry, sums))
        layers = jax.tree.unflatten(self.layers, [x.astype(_wide(x.dtype)) for x in layers])
        gradient = self.stages.release(self.version(carry.ring, slot), {"layers": layers, **sums})
        newest = self.version(carry.ring, cell["newest"])
        updates, state = self.rule.update(gradient, carry.state, newest)
        new = optax.apply_updates(newest, updates)
        ring = jax.tree.map(
            lambda x, new: _with(x, new, _within(x, cell["write"])), carry.ring, new
        )
        return carry._replace(ring=ring, state=state)

    def returned(self, cell: dict, carry_and_sums: tuple[_Carry, PyTree]) -> tuple[_Carry, PyTree]:
        """Counts the loss of what the last stage has given; the message is then its gradient."""
        carry, sums = carry_and_sums
        j = cell["microbatch"]
        where = self.where(j)

        def last(ends, x):
            return self.stages.last(ends, x, where.data, self.stages.total(where.data))[0]

        loss, pull = jax.vjp(last, self.ends(cell, carry), carry.message)
        of_ends, g = pull(jnp.ones_like(loss))
        return carry._replace(message=_split(g), losses=carry.losses.at[j].add(loss)), added(
            sums, of_ends
        )

    def entered(self, cell: dict, carry_and_sums: tuple[_Carry, PyTree]) -> tuple[_Carry, PyTree]:
        """Adds the gradient of what entered the first stage's layers."""
        carry, sums = carry_and_sums
        where = self.where(cell["microbatch"])
        _, pull = jax.vjp(
            lambda ends: self.stages.first(ends, where.data, where.key), self.ends(cell, carry)
        )
        return carry, added(sums, pull(carry.message)[0])

    def ends(self, cell: dict, carry: _Carry) -> PyTree:
        """What lies outside of the layers, of the version that a task reads, as a step holds it."""
        return {
            name: part
            for name, part in self.held(carry.ring, cell["read"], 0).items()
            if name != "layers"
        }

    def where(self, j: Index) -> Where:
        """What the stage's first turn reads of microbatch j."""
        return Where(
            self.me * self.size, _at_all(self.microbatches, j), key_of_part(self.key, j, self.m)
        )

    def filled(self, own: PyTree) -> PyTree:
        """A ring with the first version in every slot."""
        size = {name: self.devices if name == "layers" or name in self.first else 1 for name in own}
        return {
            name: jax.tree.map(lambda x, n=size[name]: jnp.broadcast_to(x, (n, *x.shape)), part)
            for name, part in own.items()
        }

    def version(self, ring: PyTree, slot: Index) -> PyTree:
        """The stage's parameters in a slot."""
        return jax.tree.map(lambda x: _at(x, _within(x, slot)), ring)

    def held(self, ring: PyTree, slot: Index, turn: Index) -> PyTree:
        """The same as a step holds them, of the layers one turn, [1, ...]: so that no version is copied whole."""
        layers = jax.tree.map(lambda x: _at(x, slot, turn)[None], ring["layers"])
        ends = {name: part for name, part in ring.items() if name != "layers"}
        return self.stages.hold({"layers": layers, **self.version(ends, slot)})


def _within(x: Array, slot: Index) -> Array:
    """A slot of an array of a ring: those that the last stage alone reads have one, which it needs; -1 stays."""
    return jnp.minimum(slot, len(x) - 1)


def _layer(held: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x[0], held["layers"])


def _own(params: PyTree) -> PyTree:
    """How parameters lie: layers on their stage, all else on every one."""
    return {name: AT if name == "layers" else ALL for name in params}


def _num_stages(stages: Stages, params: PyTree) -> int:
    """P, of the ambient mesh, between whose stages the layers divide."""
    devices = jax.sharding.get_abstract_mesh().shape.get(AXIS, 0)
    if not devices:
        raise UsageError(
            "PipeDream needs a mesh with an axis `stage`; make one with jaxpar.mesh.make_mesh."
        )
    turns = {leaf.shape[:1] for leaf in jax.tree.leaves(params["layers"])}
    if turns != {(stages.num_turns,)}:
        raise UsageError(
            f'parameters of "layers" must be stacked, [{stages.num_turns}, ...]; here are {turns}.'
        )
    if stages.num_turns % devices:
        below = stages.num_turns // devices * devices
        legal = f"{below} or {below + devices}" if below else f"{devices}"
        raise UsageError(
            f"{stages.num_turns} layers do not divide over {devices} stages; the nearest legal numbers are {legal}."
        )
    return devices


def _read_first(
    stages: Stages, params: PyTree, microbatches: PyTree, key: PRNGKey | None
) -> frozenset[str]:
    """Names of the parameters that are read before the layers; the last stage has all others but the layers."""
    ends = {
        name: part for name, part in jax.eval_shape(stages.hold, params).items() if name != "layers"
    }
    data = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), microbatches)
    x, total = jax.eval_shape(stages.first, ends, data, key), jax.eval_shape(stages.total, data)
    before, after = (
        _names_read(stages.first, ends, data, key),
        _names_read(stages.last, ends, x, data, total),
    )
    if both := before & after:
        raise UsageError(
            f"{', '.join(sorted(both))} is read before the layers and after them, by stages that update apart; "
            "PipeDream needs a model with parameters of its own for each, such as an untied head."
        )
    return before


def _names_read(fn: Callable, ends: PyTree, *args: PyTree) -> frozenset[str]:
    jaxpr = jax.make_jaxpr(fn)(ends, *args).jaxpr
    read = {var for step in jaxpr.eqns for var in step.invars if not isinstance(var, jex.Literal)}
    paths, _ = zip(*jax.tree.leaves_with_path(ends), strict=True)
    pairs = zip(paths, jaxpr.invars, strict=False)  # those of `args` come after
    return frozenset(path[0].key for path, var in pairs if var in read)


@functools.lru_cache(maxsize=32)
def _packed(devices: int, m: int) -> tuple[TickTable, np.ndarray]:
    """The table, and int32 [ticks, P, `VERSIONS`]: version v of stage s lies in slot v mod P - s; -1 says nothing."""
    table = pack_schedule(pipedream(devices, m))
    op, j, slots = table.column("op"), table.column("microbatch"), devices - np.arange(devices)
    used = np.maximum(
        j - slots + 1, 0
    )  # updates before, where the stage has as many microbatches under way
    each = [(used, op != Op.IDLE), (j, op == Op.BW), (j + 1, op == Op.BW)]
    return table, np.stack(
        [np.where(says, version % slots, -1) for version, says in each], -1
    ).astype(np.int32)
