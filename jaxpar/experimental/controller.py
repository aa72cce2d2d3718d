"""A single controller that runs a graph of sharded functions on several meshes, dispatching ahead of the compute.

The idea of Pathways (Barham et al. 2022), on JAX's own asynchronous runtime: one process enqueues everything, in one
order, so that devices which work together always agree on what is next, and no graph can deadlock. `submit` returns a
future as soon as the work is enqueued, whether or not its inputs have been computed. `serial=True` waits after each
submission: the same results, one node at a time.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.io.figure import COLORS, empty_figure, save, tidy
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, use_mesh
from jaxpar.transfers import move
from jaxpar.types import PyTree, UsageError

__all__ = ["Client", "Event", "Future", "NodeError", "plot_trace", "start_pathways"]


class NodeError(RuntimeError):
    """A node of the graph failed, or one that it depends on; `node` names the one that failed first."""

    def __init__(self, name: str, node: str, reason: str):
        self.node, self.reason = node, reason
        because = "" if name == node else f"node {name!r} has no result, because "
        super().__init__(f"{because}node {node!r} failed: {reason}")


@dataclasses.dataclass
class Event:
    """What happened to one node, in seconds since its client was made.

    Attributes:
      node: Its name.
      mesh: The mesh that it ran on.
      after: Names of the nodes whose results it reads.
      submitted: When `submit` was called.
      dispatched: When `submit` had enqueued it.
      ready: When its results were there; NaN before, and without `trace`.
    """

    node: str
    mesh: str
    after: tuple[str, ...]
    submitted: float
    dispatched: float = float("nan")
    ready: float = float("nan")


class Future:
    """What a node will have computed; `Client.submit` takes it in place of the value.

    Attributes:
      name: Of the node.
      value: Pytree of `jax.Array`, usable at once: JAX waits where their content is needed. None if dispatch failed.
    """

    def __init__(self, client: "Client", name: str, parents: tuple["_Node", ...]):
        self.name, self.value = name, None
        self._client, self._node = client, _Node(name, parents)

    def ready(self) -> bool:
        """Tells without waiting whether `result` would return, or raise, at once."""
        return self._node.error is not None or all(
            leaf.is_ready() for leaf in jax.tree.leaves(self.value)
        )

    def result(self) -> PyTree:
        """Waits for the value and returns it.

        Raises:
          NodeError: The node failed, or one that it depends on, which is named.
        """
        self._client._settle(self)
        if self._node.error is not None:
            raise self._node.error
        return self.value


class _Node:
    """The part of a future that outlives its arrays: dependents ask it for an error."""

    def __init__(self, name: str, parents: tuple["_Node", ...]):
        self.name, self.parents = name, parents
        self.error: NodeError | None = None

    def ancestors(self) -> set["_Node"]:
        found: set[_Node] = set()
        left: list[_Node] = [self]
        while left:
            new = set(left.pop().parents) - found
            left.extend(new)
            found |= new
        return found


class Client:
    """Runs functions on named meshes of one process's devices, in the order in which they are submitted.

    Args:
      meshes: By name a mesh, or a spec with every size given: specs take the devices from the first on, in order.
        Meshes may share devices.
      rules: Table of logical axes, for `in_axes` and for `constrain` inside the functions; by default `RULES`.
      serial: Whether each submission waits until its node is done: the sequential form of every graph.
      max_in_flight: Nodes that may be enqueued and not done; a submission over that waits for the oldest.
      trace: Whether to note when each node is done; costs a thread a mesh, which does nothing but wait.

    A client is a context manager: its end waits for everything. Threads may submit to one client; each submission is
    enqueued whole before the next.

    Raises:
      UsageError: The specs need more devices than there are, or a device is another process's.
    """

    def __init__(
        self,
        meshes: Mapping[str, Mesh | MeshSpec],
        *,
        rules: Mapping[str, tuple[str, ...]] | None = None,
        serial: bool = False,
        max_in_flight: int = 256,
        trace: bool = False,
    ):
        if max_in_flight < 1:
            raise UsageError(f"max_in_flight={max_in_flight} must be at least 1.")
        start_pathways()
        self.meshes = _lay_out(meshes)
        self.trace: list[Event] = []
        self._rules, self._serial, self._max_in_flight = rules, serial, max_in_flight
        self._flying: list[Future] = []  # dispatched, and done or not
        self._lock = threading.RLock()
        self._began = time.perf_counter()
        # The devices of a mesh work in order, so one that waits in order sees each end when it happens.
        self._observers = (
            {name: ThreadPoolExecutor(1) for name in self.meshes} if trace and not serial else {}
        )

    def submit(
        self,
        fn: Callable,
        *args: PyTree,
        on: str,
        in_axes: Sequence[PyTree] | None = None,
        name: str | None = None,
    ) -> Future:
        """Enqueues `fn(*args)` on a mesh and returns at once.

        Args:
          fn: Pure function of arrays; compiled by `jax.jit`, under the mesh, unless it is already.
          args: Pytrees of arrays, numbers and futures. A future's arrays move from the devices that hold them to those
            of `on`.
          on: Name of the mesh.
          in_axes: Logical axes of each argument, a tuple of names a leaf, or None. Without them an array that lies on
            the devices of the mesh stays as it is, and every other is copied whole to each.
          name: Of the node in errors and in the trace; by default the function's, and a number.

        Raises:
          UsageError: The mesh has another name, `in_axes` does not fit, or a future is another client's. What `fn`
            raises goes into the future.
        """
        with self._lock:
            submitted = time.perf_counter() - self._began
            if on not in self.meshes:
                raise UsageError(
                    f"there is no mesh {on!r}; this client has {', '.join(self.meshes)}."
                )
            if in_axes is not None and len(in_axes) != len(args):
                raise UsageError(f"in_axes has {len(in_axes)} entries for {len(args)} arguments.")
            inputs = [
                leaf for leaf in jax.tree.leaves(args, is_leaf=_is_future) if _is_future(leaf)
            ]
            if any(future._client is not self for future in inputs):
                raise UsageError(
                    "a future belongs to the client that made it; hand its result() to another."
                )
            name = name or f"{getattr(fn, '__name__', 'node')}-{len(self.trace)}"
            future = Future(self, name, tuple(dict.fromkeys(value._node for value in inputs)))
            self._make_room()
            self._dispatch(future, fn, args, self.meshes[on], in_axes)
            event = Event(name, on, tuple(node.name for node in future._node.parents), submitted)
            event.dispatched = time.perf_counter() - self._began
            self.trace.append(event)
            self._flying.append(future)
            if self._serial:
                self._settle(future)
                event.ready = time.perf_counter() - self._began
            elif self._observers:
                self._observers[on].submit(self._observe, event, future.value)
        return future

    def wait(self) -> None:
        """Waits until everything that was submitted is done; errors stay in their futures."""
        with self._lock:
            while self._flying:
                self._settle(self._flying[0])
                del self._flying[0]

    def close(self) -> None:
        """Waits as `wait` does, and ends the threads of the trace."""
        self.wait()
        for observer in self._observers.values():
            observer.shutdown()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _dispatch(
        self, future: Future, fn: Callable, args: PyTree, mesh: Mesh, in_axes: PyTree
    ) -> None:
        if failed := [node.error for node in future._node.parents if node.error is not None]:
            future._node.error = NodeError(future.name, failed[0].node, failed[0].reason)
            return
        args = jax.tree.map(
            lambda leaf: leaf.value if _is_future(leaf) else leaf, args, is_leaf=_is_future
        )
        targets = [
            _shardings(arg, mesh, in_axes and in_axes[i], self._rules) for i, arg in enumerate(args)
        ]
        program = fn if isinstance(fn, jax.stages.Wrapped) else jax.jit(fn)
        try:
            placed = jax.tree.map(move, args, tuple(targets))
            with use_mesh(mesh, self._rules):
                future.value = program(*placed)
        except Exception as error:
            self._blame(future, error)

    def _make_room(self) -> None:
        for future in [future for future in self._flying if future.ready()]:
            self._settle(future)
            self._flying.remove(future)
        while len(self._flying) >= self._max_in_flight:
            self._settle(self._flying[0])
            del self._flying[0]

    def _settle(self, future: Future) -> None:
        """Waits for a future, and notes its error."""
        node = future._node
        if node.error is not None:
            return
        try:
            jax.block_until_ready(future.value)
        except Exception as error:
            with self._lock:
                self._blame(future, error)
        if node.error is None:
            node.parents = ()  # not needed any more, and the history of a long run must not stay in memory

    def _blame(self, future: Future, error: Exception) -> None:
        """Notes an error with the node where it began, which is the first to be found among the ancestors."""
        ancestors = future._node.ancestors()
        for other in list(self._flying):
            if other._node in ancestors:
                self._settle(other)
        causes = [node.error for node in future._node.parents if node.error is not None]
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        cause = causes[0] if causes else NodeError(future.name, future.name, reason)
        future._node.error = NodeError(future.name, cause.node, cause.reason)
        future._node.error.__cause__ = error

    def _observe(self, event: Event, value: PyTree) -> None:
        with contextlib.suppress(Exception):  # the future tells
            jax.block_until_ready(value)
        event.ready = time.perf_counter() - self._began


def start_pathways() -> bool:
    """Lets Pathways provide the devices of many hosts to this process, where `pathwaysutils` is installed.

    Call it before anything asks for a device, as `Client` does. `pathwaysutils.initialize` acts only where
    JAX_PLATFORMS names Pathways' proxy. Returns whether the package is there.
    """
    if importlib.util.find_spec("pathwaysutils") is None:
        return False
    importlib.import_module("pathwaysutils").initialize()
    return True


def plot_trace(trace: Sequence[Event], out: Path) -> None:
    """Draws a trace as a PNG, a row a mesh: a tick where a node was dispatched, a bar where it can have been computed.

    A bar begins when its node was dispatched, its inputs were ready and the mesh had done the node before; a grey line
    leads there from the tick, and shows how far dispatch ran ahead.

    Raises:
      UsageError: No node of the trace is done, or matplotlib is missing.
    """
    done = [event for event in trace if np.isfinite(event.ready)]
    if not done:
        raise UsageError(
            "no node of this trace is done; make the client with trace=True, and wait for it."
        )
    rows = {name: row for row, name in enumerate(dict.fromkeys(event.mesh for event in done))}
    ends, free = {}, {}
    figure = empty_figure(9, 1.4 + 0.8 * len(rows))
    axes = figure.subplots()
    for index, event in enumerate(done):
        begin = max(
            [
                event.dispatched,
                free.get(event.mesh, 0.0),
                *(ends.get(name, 0.0) for name in event.after),
            ]
        )
        row, color = rows[event.mesh], COLORS[index % len(COLORS)]
        axes.barh(row, max(event.ready - begin, 0), left=begin, height=0.6, color=color)
        axes.hlines(
            row - 0.38, event.dispatched, max(begin, event.dispatched), color="0.75", linewidth=1
        )
        axes.plot([event.dispatched] * 2, [row - 0.42, row - 0.34], color="black", linewidth=0.8)
        if event.ready - begin > 0.04 * done[-1].ready:
            axes.text(
                (begin + event.ready) / 2, row, event.node, ha="center", va="center", fontsize=7
            )
        ends[event.node] = free[event.mesh] = event.ready
    axes.set(yticks=list(rows.values()), yticklabels=list(rows), xlim=(0, None), ylabel="mesh")
    axes.set_xlabel("seconds (tick: dispatched; bar: computed)")
    axes.invert_yaxis()
    tidy(axes, "")
    save(figure, out)


def _is_future(value: object) -> bool:
    return isinstance(value, Future)


def _lay_out(meshes: Mapping[str, Mesh | MeshSpec]) -> dict[str, Mesh]:
    """Makes the meshes of specs from consecutive devices, and checks that all devices are this process's."""
    taken, made = 0, {}
    for name, mesh in meshes.items():
        if isinstance(mesh, MeshSpec):
            count = int(np.prod(dataclasses.astuple(mesh)))
            if min(dataclasses.astuple(mesh)) < 1:
                raise UsageError(
                    f"mesh {name!r} leaves a size open; a client's meshes need every size."
                )
            if taken + count > jax.device_count():
                raise UsageError(
                    f"mesh {name!r} ends at device {taken + count} but {jax.device_count()} are here."
                )
            mesh = make_mesh(mesh, jax.devices()[taken : taken + count])
            taken += count
        if mesh.is_multi_process:
            raise UsageError(
                f"mesh {name!r} has devices of other processes; one controller needs Pathways for that."
            )
        made[name] = mesh
    return made


def _shardings(
    tree: PyTree, mesh: Mesh, axes: PyTree | None, rules: Mapping[str, tuple[str, ...]] | None
) -> PyTree:
    """Returns where each leaf shall lie on `mesh`: by its logical axes, else where it is, else whole everywhere."""
    if axes is not None:
        with use_mesh(mesh, rules):
            return named_shardings(tree, axes)
    devices, whole = set(mesh.devices.flat), NamedSharding(mesh, PartitionSpec())

    def stay(x: PyTree) -> jax.sharding.Sharding:
        there = isinstance(x, jax.Array) and x.committed and x.sharding.device_set == devices
        return x.sharding if there else whole

    return jax.tree.map(stay, tree)
