"""Steps of training as programs: how one is laid out, compiled and run, and what came of it."""

import contextlib
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jaxpar.aot.estimate import EFFORTS, compile_lowered
from jaxpar.aot.hlo import drop_unused
from jaxpar.aot.job import Job
from jaxpar.aot.memory_estimate import analyse
from jaxpar.aot.verify.layouts import Layout
from jaxpar.mesh import make_mesh, named_shardings, platform, shard, use_mesh
from jaxpar.types import Array, Device, PRNGKey, PyTree

__all__ = ["Outcome", "Program", "compile_program", "on_mesh", "run_program"]

Rules = Mapping[str, tuple[str, ...]]

_apart = (
    threading.Lock()
)  # what is set while a program is compiled past the cache holds for all threads
_running = threading.Lock()  # a program of many simulated devices needs all threads of the process


class Program(NamedTuple):
    """Training under one layout, in one dtype.

    Attributes:
      state: Pytree of host arrays that training begins with.
      axes: Logical axes of its leaves.
      step: (key, state, batch) -> (loss, gradient of the parameters, next state); pure.
      batch: Number of a step -> its batch, a pytree of host arrays, in the order of the ambient mesh.
      batch_axes: Logical axes of these.
      place: Number of a step -> its batch on the devices of the ambient mesh, as training brings it
        there; None splits whole arrays by their axes.
      observed: state -> the part of it that is compared, by names that the twin has too.
    """

    state: PyTree
    axes: PyTree
    step: Callable[[PRNGKey, PyTree, PyTree], tuple[Array, PyTree, PyTree]]
    batch: Callable[[int], PyTree]
    batch_axes: PyTree
    place: Callable[[int], PyTree] | None = None
    observed: Callable[[PyTree], PyTree] = lambda state: state

    def placed(self, number: int) -> PyTree:
        """Returns the batch of a step on the devices of the ambient mesh."""
        if self.place is not None:
            return self.place(number)
        return shard(self.batch(number), self.batch_axes)


class Outcome(NamedTuple):
    """Results of some steps, on the host.

    Attributes:
      losses: Loss of each step.
      gradient: Gradient of the first step.
      state: What `Program.observed` shows of the state after the last.
    """

    losses: list[float]
    gradient: PyTree
    state: PyTree


class Compiled(NamedTuple):
    """A program that was compiled.

    Attributes:
      run: (key, state, batch) -> what the step returns.
      text: HLO after all passes.
      partitioned: HLO as the partitioner left it, in the dtypes of the model: XLA for CPU widens 16 bits
        afterwards. Empty where it is not wanted.
      jaxpr: What was traced.
      memory: Statistics of the compiler: bytes of arguments, results and temporaries; None where it has none.
    """

    run: jax.stages.Compiled
    text: str
    partitioned: str
    jaxpr: Any
    memory: Any


def on_mesh(layout: Layout, rules: Rules, devices: Sequence[Device] | None = None):
    """Returns a context that yields a layout's mesh, ambient inside, with the rules."""
    if devices is None:
        devices = jax.devices()[: layout.num_devices]
    return use_mesh(make_mesh(layout.mesh, devices), rules)


def compile_program(
    program: Program, *, with_gradient: bool = True, is_partitioned_kept: bool = False
) -> Compiled:
    """Compiles a step for the devices of the ambient mesh; the state is donated, as training does.

    Args:
      program: What is compiled.
      with_gradient: Whether the gradient is a result, to be compared. Products are then of full
        precision on every device; otherwise the step is what training compiles.
      is_partitioned_kept: Whether `Compiled.partitioned` is wanted.
    """

    def step(key, state, batch):
        loss, gradient, state = program.step(key, state, batch)
        if not with_gradient:
            gradient = None
        return loss, gradient, state

    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.state)
    shardings = named_shardings(state, program.axes)
    jitted = jax.jit(
        step,
        in_shardings=(None, shardings, None),
        out_shardings=(None, None, shardings),
        donate_argnums=1,
    )
    key = jax.eval_shape(lambda: jax.random.key(0))
    precision = contextlib.nullcontext()
    if with_gradient:
        precision = jax.default_matmul_precision("highest")
    with precision:
        traced = jitted.trace(key, state, _shapes_of_batch(program))
        lowered = traced.lower()
    if is_partitioned_kept:
        compiled, partitioned = _compile_apart(lowered)
    else:
        compiled, partitioned = compile_lowered(lowered, _options()), ""
    return Compiled(
        run=compiled,
        text=compiled.as_text() or "",
        partitioned=partitioned,
        jaxpr=traced.jaxpr.jaxpr,
        memory=compiled.memory_analysis(),
    )


def _compile_apart(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """Compiles and returns the text after the partitioner too, past the cache of programs, which keeps no such text."""
    name = "jax_persistent_cache_min_compile_time_secs"
    with _apart, tempfile.TemporaryDirectory() as folder:
        options = _options() | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        options["xla_dump_hlo_pass_re"] = "spmd-partitioning|call-inliner"
        # No two programs have the same value of this option, which means nothing on a CPU: none is found in the cache.
        options["xla_gpu_redzone_padding_bytes"] = int.from_bytes(os.urandom(6))
        before = getattr(jax.config, name)
        jax.config.update(name, 1e9)  # nor is one written
        try:
            compiled = compile_lowered(lowered, options)
        finally:
            jax.config.update(name, before)
        return compiled, _partitioned(folder)


def estimated_temporaries(program: Program, compiled: Compiled, mesh: Mesh, rules: Rules) -> float:
    """Returns the bytes that a device needs besides state and batch, by the account of `jaxpar.aot`."""
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype)),
        program.batch(0),
    )
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), program.state)
    key = jax.eval_shape(lambda: jax.random.key(0))
    axes = ((), program.axes, program.batch_axes)
    job = Job(program.step, (key, state, batch), axes, mesh, rules=rules, donate=(1,))
    memory, _ = analyse(job, compiled.jaxpr)
    return memory.temporaries


def _options() -> dict[str, bool | float | str]:
    """Options of a compiler for programs that run three times."""
    if platform() == "cpu":
        # Sharding and buffers are decided before machine code is made, which needs no optimising here.
        return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    if platform() == "tpu":
        return dict(EFFORTS["low"])
    return {}


def _shapes_of_batch(program: Program) -> PyTree:
    """Shapes and shardings of the first batch: as it was placed, or by its axes where no devices are here."""
    if platform() == "tpu":
        batch = program.batch(0)
        shardings = named_shardings(batch, program.batch_axes)
    else:
        batch = program.placed(0)
        shardings = jax.tree.map(lambda x: x.sharding, batch)

    def shape(x, sharding):
        return jax.ShapeDtypeStruct(
            x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=sharding
        )

    return jax.tree.map(shape, batch, shardings)


def _partitioned(folder: str) -> str:
    """Text of the program right after the partitioner, of those that XLA wrote into a folder.

    Called functions are part of their callers in it, so that it shows which results are read; what
    nothing reads is left out, as compilers do later.
    """
    for ending in ("after_call-inliner.before_pipeline-end", "after_spmd-partitioning"):
        files = sorted(pathlib.Path(folder).glob(f"*spmd-partitioner.{ending}*.txt"))
        if files:
            return drop_unused(files[-1].read_text())
    return ""


def run_program(program: Program, compiled: Compiled, steps: int, seed: int = 0) -> Outcome:
    """Runs steps on the ambient mesh, each with its own key and batch, and returns host arrays."""
    root = jax.random.key(seed)
    losses = []
    first = None
    with _running:
        state = shard(program.state, program.axes)
        for number in range(steps):
            key = jax.random.fold_in(root, number)
            loss, gradient, state = compiled.run(key, state, program.placed(number))
            losses.append(float(loss))
            if number == 0:
                first = jax.device_get(gradient)
        return Outcome(losses, first, jax.device_get(program.observed(state)))
