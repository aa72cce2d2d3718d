"""PipeDream as one program: weights change after every microbatch, and a ring of their versions keeps gradients true.

A pipeline in which no stage waits. Stage s of P has P - s microbatches under way. Each goes back through the weights
that it came through (weight stashing), and its gradient changes the newest ones at once. With W_s(j) the weights of
stage s after j updates and L_j the loss of microbatch j,

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
from jaxpar.pipeline._held import Given, State
from jaxpar.pipeline._turn import Where
from jaxpar.pipeline._work import Index, Program, Work, _at, _with, _zeros
from jaxpar.pipeline.accumulation import Stages
from jaxpar.pipeline.ops import Op
from jaxpar.pipeline.orders import pipedream
from jaxpar.pipeline.pack import TickTable, pack_schedule
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

    Each stage updates its own parameters by its own copy of the rule. The first stage has its layers and what the
    model reads before them, the last one its layers and all else. A norm that a rule takes is a stage's own.

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
            versions = _Versions(
                ring=_filled(own, first, devices), state=jax.tree.map(lambda x: x[0], state)
            )
            work = _DelayedWork(stages, self.rule, table, first, versions, microbatches, key)
            return work.run(rows[:, 0])

        given, each = (_own(params), AT, ALL, ALL, P(None, *AT)), (_own(params), AT, ALL)
        return by_stage(train, given, each)(params, state, microbatches, key, rows)


class _Versions(NamedTuple):
    """Parameters that are updated between ticks.

    Attributes:
      ring: Versions of the stage's own parameters, [slots, ...]; of those that the last stage alone reads, one.
      state: Optimizer state of the rule.
    """

    ring: PyTree
    state: PyTree


class _DelayedWork(Work):
    """The tasks of a stage that reads the version of its weights that a row names, and updates the newest."""

    def __init__(
        self,
        stages: Stages,
        rule: optax.GradientTransformation,
        table: TickTable,
        first: frozenset[str],
        versions: _Versions,
        microbatches: PyTree,
        key: PRNGKey | None,
    ):
        devices = table.schedule.devices
        program = Program(stages, table, chunk_size=stages.num_turns // devices, vocabulary=0)
        self.stages = stages
        self.rule = rule
        self.first = first
        self.versions = versions
        self.me = jax.lax.axis_index(AXIS)

        # Held layers only by their shapes, [1, turns of a stage, ...]: no version is copied whole.
        held = jax.eval_shape(stages.hold, self.version(versions.ring, 0))
        layers = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), held["layers"]
        )
        given = Given(
            layers=layers,
            ends=self.ends_of(versions.ring, 0),
            parts=microbatches,
            key=key,
            total=jnp.zeros(()),  # not read: each microbatch has its own
        )
        super().__init__(program, given, own=self.me[None])

    def run(self, rows: Array) -> tuple[PyTree, PyTree, Array]:
        """Returns what `PipeDream` does: a stage's layers and state, and what lies outside of the layers on all."""
        (end, _), _ = jax.lax.scan(self.tick, self.start(), rows)
        ring, state = end.versions
        num_microbatches = self.schedule.microbatches
        own = self.version(ring, num_microbatches % (self.schedule.devices - self.me))

        def from_owner(owner: int, x: Array) -> Array:
            return jax.lax.psum(jnp.where(self.me == owner, x, jnp.zeros_like(x)), AXIS)

        for name, part in own.items():
            if name != "layers":
                owner = 0 if name in self.first else self.schedule.devices - 1
                own[name] = jax.tree.map(functools.partial(from_owner, owner), part)

        # A stage has one chunk: its turns' losses are [1, m, turns of a stage].
        losses = end.loss
        if end.told.losses:
            of_turns = sum(end.told.losses.values(), jnp.zeros(()))
            losses = losses + of_turns[0].sum(-1).astype(losses.dtype)
        return own, jax.tree.map(lambda x: x[None], state), jax.lax.psum(losses, AXIS)

    def columns(self) -> tuple[str, ...]:
        return *super().columns(), *VERSIONS

    def start(self) -> tuple[State, tuple]:
        state, flying = super().start()
        losses = _zeros(self.loss, self.schedule.microbatches)
        return state._replace(loss=losses, versions=self.versions), flying

    def share_of_microbatch(self) -> float:
        return 1.0

    def add_loss(self, losses: Array, loss: Array, j: Index) -> Array:
        return losses.at[j].add(loss)

    def total_in(self, where: Where) -> Array:
        return self.stages.total(where.data)

    def params_of(self, chunk: Index, turn: Index) -> PyTree:
        del chunk
        return self.turn_of(self.versions.ring, 0, turn)

    def params_in(self, cell: dict, state: State) -> Callable[[Index], PyTree]:
        return functools.partial(self.turn_of, state.versions.ring, cell["read"])

    def ends_in(self, cell: dict, state: State) -> PyTree:
        return self.ends_of(state.versions.ring, cell["read"])

    def backward(self, cell: dict, state: State, fused: bool) -> State:
        """The backward pass with the weights of the forward pass, and an update of the newest."""
        nothing = jax.tree.map(jnp.zeros_like, state.sums)
        state = super().backward(cell, state._replace(sums=nothing), fused)
        ring, rule_state = state.versions

        layers = [x[0] for x in state.sums.layers]
        layers = jax.tree.unflatten(jax.tree.structure(self.layers), layers)
        held = {"layers": layers, **state.sums.ends}
        gradient = self.stages.release(self.version(ring, cell["read"]), held)

        newest = self.version(ring, cell["newest"])
        updates, rule_state = self.rule.update(gradient, rule_state, newest)
        new = optax.apply_updates(newest, updates)
        ring = jax.tree.map(lambda x, new: _with(x, new, _within(x, cell["write"])), ring, new)
        return state._replace(versions=_Versions(ring=ring, state=rule_state))

    def version(self, ring: PyTree, slot: Index) -> PyTree:
        """Returns the stage's parameters in a slot."""
        return jax.tree.map(lambda x: _at(x, _within(x, slot)), ring)

    def held(self, ring: PyTree, slot: Index, turn: Index) -> PyTree:
        """Returns a slot's parameters as a step holds them, of the layers one turn, [1, ...]."""
        layers = jax.tree.map(lambda x: _at(x, slot, turn)[None], ring["layers"])
        ends = {name: part for name, part in ring.items() if name != "layers"}
        return self.stages.hold({"layers": layers, **self.version(ends, slot)})

    def turn_of(self, ring: PyTree, slot: Index, turn: Index) -> PyTree:
        """Returns the held parameters of one turn."""
        return jax.tree.map(lambda x: x[0], self.held(ring, slot, turn)["layers"])

    def ends_of(self, ring: PyTree, slot: Index) -> PyTree:
        """Returns the held parameters outside of the layers."""
        held = self.held(ring, slot, 0)
        return {name: part for name, part in held.items() if name != "layers"}


def _filled(own: PyTree, first: frozenset[str], devices: int) -> PyTree:
    """Returns a ring with the first version in every slot."""

    def fill(name: str, part: PyTree) -> PyTree:
        slots = devices if name == "layers" or name in first else 1
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (slots, *x.shape)), part)

    return {name: fill(name, part) for name, part in own.items()}


def _within(x: Array, slot: Index) -> Array:
    """A slot of an array of a ring: those that the last stage alone reads have one, which it needs; -1 stays."""
    return jnp.minimum(slot, len(x) - 1)


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
