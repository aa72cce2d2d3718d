"""The only loops: `run` and `run_until` as one program, `fit` from the host with everything a long run needs.

The key of step s is `fold_in(root, s)` in every loop and for any chunks, so a run that is cut, resumed or driven by
hand makes the same steps.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.io import Checkpoints, Progress, Writer
from jaxpar.mesh import named_shardings, platform
from jaxpar.processes import AGREE_EVERY, interruptible
from jaxpar.types import (
    Algorithm,
    BatchFn,
    Info,
    PRNGKey,
    PyTree,
    SupportsAxes,
    SupportsDone,
    SupportsOlderStates,
    UsageError,
)

__all__ = [
    "AGREE_EVERY",
    "XLA_OPTIONS",
    "Fit",
    "FitResult",
    "Hooks",
    "compile_step",
    "fit",
    "resume",
    "run",
    "run_until",
]

XLA_OPTIONS: dict[str, Any] = {
    "gpu": {
        # Merging the q, k and v products would only add slices before attention: 2.5 % of a GPT-2 step on an H100.
        "xla_gpu_dot_merger_threshold_mb": 0,
        # A layer's weights in one collective: 65 small ones a step left 9 ms of a 1B model's uncovered on two H200.
        "xla_gpu_all_gather_combine_threshold_bytes": 2**28,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 2**28,
        "xla_gpu_all_reduce_combine_threshold_bytes": 2**28,
    },
}


def run(
    algorithm: Algorithm,
    key: PRNGKey,
    state: PyTree,
    inputs: PyTree,
    num_steps: int,
    *,
    start: int | jax.Array = 0,
) -> tuple[PyTree, Info]:
    """Makes `num_steps` steps by one `lax.scan`: a whole run as a pure function.

    Args:
      algorithm: What iterates; static under jit.
      key: Root key; step s gets `fold_in(key, s)`.
      state: State before the first step.
      inputs: Pytree with a leading axis of `num_steps`, one slice a step; or None.
      num_steps: Static.
      start: Number of the first step.

    Returns:
      The last state, and every step's info stacked.
    """

    def body(state, step_and_inputs):
        step, inputs = step_and_inputs
        return algorithm.step(jax.random.fold_in(key, step), state, inputs)

    return jax.lax.scan(body, state, (start + jnp.arange(num_steps), inputs))


def run_until(
    algorithm: SupportsDone, key: PRNGKey, state: PyTree, inputs: PyTree, max_steps: int
) -> tuple[PyTree, jax.Array]:
    """Makes steps by one `lax.while_loop` until `algorithm.done(state)`, at most `max_steps`.

    Every step gets the same `inputs`. Under `vmap` the loop runs until all are done; those done before keep
    their state.

    Returns:
      The last state and the number of steps made. `done` of that state tells whether it converged.
    """

    def go_on(carry):
        step, state = carry
        return (step < max_steps) & ~algorithm.done(state)

    def body(carry):
        step, state = carry
        return step + 1, algorithm.step(jax.random.fold_in(key, step), state, inputs)[0]

    steps, state = jax.lax.while_loop(go_on, body, (jnp.int32(0), state))
    return state, steps


@dataclasses.dataclass(frozen=True)
class Fit:
    """How the host drives a run. Counts are in steps; 0 means never (but at the end).

    Attributes:
      num_steps: Length of the run.
      chunk: Steps in one program; `save_every` and `eval_every` must be multiples of it.
      eval_every: Steps between evaluations.
      save_every: Steps between checkpoints.
      profile: "first:last" steps to write a profile of, in whole chunks, or "".
      until_done: Whether the run ends after the chunk in which `algorithm.done(state)` comes true; the host then waits
        for every chunk.
    """

    num_steps: int = field(legal=AtLeast(1))
    chunk: int = field(1, AtLeast(1))
    eval_every: int = field(0, AtLeast(0))
    save_every: int = field(0, AtLeast(0))
    profile: str = ""
    until_done: bool = False

    def __post_init__(self):
        """Refuses counts that do not fit together."""
        check_fields(self)
        for name in ("eval_every", "save_every"):
            every = getattr(self, name)
            if every % self.chunk:
                raise UsageError(f"{name}={every} must be 0 or a multiple of chunk={self.chunk}.")
        if self.profile:
            self.profile_steps()

    def profile_steps(self) -> tuple[int, int]:
        """Returns the first and last profiled step, both 0 for none."""
        if not self.profile:
            return 0, 0
        first, _, last = self.profile.partition(":")
        if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
            raise UsageError(
                f"profile={self.profile!r} is not first:last with first < last, such as 10:15."
            )
        if int(first) >= self.num_steps:
            raise UsageError(
                f"profile={self.profile!r} begins after the run's {self.num_steps} steps."
            )
        return int(first), int(last)


@dataclasses.dataclass
class Hooks:
    """What a host-driven run reads from and reports to; everything is optional.

    Attributes:
      axes: Logical axes of the state, to lay it out on the ambient mesh; by default `algorithm.axes()`, if it has that.
      checkpoints: Where to save, and to resume from if it holds any.
      metadata: Saved with each checkpoint; a resume from a checkpoint of other metadata is refused.
      renamed: Names in the state that older checkpoints have under another one, from today's to that.
      writer: Where metrics go, by step: "train/..." each step, "speed/...", and what `evaluate` returns. Of each save
        "speed/save_stall_s": seconds that training stood still for it.
      progress: What to show them on.
      evaluate: State -> metrics, every `Fit.eval_every` steps and at the end.
      watch: Called with the step and the state every `Fit.eval_every` steps and at the end; keeps no state.
      check: Called with each step's metrics; may raise to stop the run.
      report: Called once with the compiled program.
      profile_folder: Where the profile goes.
    """

    axes: PyTree | None = None
    checkpoints: Checkpoints | None = None
    metadata: Mapping[str, object] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    writer: Writer | None = None
    progress: Progress | None = None
    evaluate: Callable[[PyTree], Mapping[str, float]] | None = None
    watch: Callable[[int, PyTree], None] | None = None
    check: Callable[[int, Mapping[str, float]], None] | None = None
    report: Callable[[jax.stages.Compiled], None] | None = None
    profile_folder: Path | None = None


@dataclasses.dataclass
class FitResult:
    """Where a run ended.

    Attributes:
      state: The last state.
      step: Steps made.
      metrics: The last value of every metric.
      interrupted: Number of the signal that came, 2 of Ctrl-C and 15 of SIGTERM, whose checkpoint of `step` is written;
        0 where none did.
      compile_s: Seconds of compilation.
    """

    state: PyTree
    step: int
    metrics: dict[str, float]
    interrupted: int
    compile_s: float


def compile_step(
    algorithm: Algorithm,
    state: PyTree,
    inputs: PyTree,
    *,
    length: int = 1,
    axes: PyTree | None = None,
) -> jax.stages.Compiled:
    """Compiles `(key, step, state, inputs) -> (state, infos)`, ahead of time.

    The state is donated and keeps its layout. Infos have a leading axis of `length` steps, and so have the inputs if
    `length` is over 1. State and inputs may be abstract. On a mesh, `axes` are the state's logical axes.
    """

    def program(key, step, state, inputs):
        if length > 1:
            return run(algorithm, key, state, inputs, length, start=step)
        # A loop of one trip would only hide the step from XLA's fusion.
        state, info = algorithm.step(jax.random.fold_in(key, step), state, inputs)
        return state, jax.tree.map(lambda x: x[None], info)

    out = None if axes is None else (named_shardings(state, axes), None)
    lowered = jax.jit(program, donate_argnums=2, out_shardings=out).lower(
        jax.random.key(0), np.int32(0), state, inputs
    )
    return lowered.compile(compiler_options=XLA_OPTIONS.get(platform()))


def fit(
    algorithm: Algorithm,
    key: PRNGKey,
    batch: BatchFn,
    counts: Fit,
    hooks: Hooks | None = None,
    *,
    state: PyTree | None = None,
    start: int = 0,
) -> FitResult:
    """Drives a run from the host: data, metrics, progress, checkpoints, resume, interruption.

    The device is always one step ahead: metrics of a step are fetched after the next one was sent off, so
    the host's work hides behind the device's. Ctrl-C and SIGTERM finish the step, save and return; a second Ctrl-C
    is Python's own again, as is the first before there is a step to save. Run it under `use_mesh` to have the state
    laid out.

    Args:
      algorithm: What is trained.
      key: Root key: folded with 2^32-1 for `init`, with s for step s.
      batch: Step number -> inputs, placed on the device; pure, so a resumed run needs no saved iterator.
      counts: Of steps, and of steps between what is done on the way.
      hooks: What to read from and report to.
      state: First state instead of `algorithm.init`'s, unless a checkpoint is there. It is donated.
      start: Steps that `state` has made, as `resume` tells; over 0, no checkpoint is read.

    Raises:
      UsageError: If all checkpoints are of another run (`RunMismatchError`) or damaged (`CorruptCheckpointError`), or a
        save failed (`SaveError`).
    """
    hooks = _with_axes(algorithm, hooks or Hooks())
    step, state = (start, state) if start else _first_state(algorithm, key, state, hooks)
    driver = _Driver(hooks, step)

    def has_ended() -> bool:
        return step >= counts.num_steps or (
            counts.until_done and bool(cast(SupportsDone, algorithm).done(state))
        )

    if has_ended():
        metrics = dict(hooks.evaluate(state)) if hooks.evaluate else {}
        return FitResult(state, step, metrics, 0, 0.0)
    programs: dict[int, jax.stages.Compiled] = {}
    with interruptible() as interruption, _profiler(counts, hooks.profile_folder) as profiler:
        stop, done = 0, False
        while not (done or stop):
            length = min(counts.chunk - step % counts.chunk, counts.num_steps - step)
            inputs = (
                batch(step) if length == 1 else _stack([batch(step + i) for i in range(length)])
            )
            if length not in programs:
                programs[length] = driver.compile(algorithm, state, inputs, length)
            profiler(step, length)
            state, infos = programs[length](key, np.int32(step), state, inputs)
            interruption.gentle, step = True, step + length
            driver.sent(step, length, infos)
            stop, done = interruption.agreed(step), has_ended()
            if done or (counts.eval_every and step % counts.eval_every == 0):
                driver.look(step, state)
            if hooks.checkpoints and (
                done or stop or (counts.save_every and step % counts.save_every == 0)
            ):
                driver.flush()
                driver.saved(
                    step, hooks.checkpoints.save(step, state, driver.current, dict(hooks.metadata))
                )
        driver.flush()
        if hooks.checkpoints:
            hooks.checkpoints.wait()
    return FitResult(state, step, driver.latest, stop or interruption.number, driver.compile_s)


def resume(
    algorithm: Algorithm, hooks: Hooks, *, state: PyTree | None = None
) -> tuple[int, PyTree] | None:
    """Restores the newest whole checkpoint of this run onto the ambient mesh, for `fit` to go on from.

    A newer one that is damaged or of another configuration is set aside, with a note to the user. `fit` does all this
    itself; call it first where something must know the step before the run starts.

    Args:
      algorithm: Whose `init` gives the state's structure.
      hooks: Its `checkpoints`, `metadata`, `renamed` and `axes` are read, and notes go to `progress`.
      state: Gives the structure instead; may be abstract.

    Returns:
      The number of steps made and the state, or None where there is no checkpoint.

    Raises:
      RunMismatchError: All whole ones are of other `metadata`, or of a state of another layout.
      CorruptCheckpointError: None is whole.
    """
    hooks, checkpoints = _with_axes(algorithm, hooks), hooks.checkpoints
    if checkpoints is None:
        return None
    shapes = _shapes(algorithm, state)
    if hooks.axes is None:
        shardings = jax.tree.map(
            lambda _: jax.sharding.SingleDeviceSharding(jax.devices()[0]), shapes
        )
    else:
        shardings = named_shardings(shapes, hooks.axes)
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    later = ()
    if isinstance(algorithm, SupportsOlderStates):
        later = algorithm.later_leaves
    restored = checkpoints.restore_newest(abstract, hooks.metadata, hooks.renamed, later)
    for sentence in checkpoints.refused:  # on process 0
        (hooks.progress.note if hooks.progress else print)(sentence)
    return restored


def _with_axes(algorithm: Algorithm, hooks: Hooks) -> Hooks:
    if (
        hooks.axes is None
        and isinstance(algorithm, SupportsAxes)
        and not jax.sharding.get_mesh().empty
    ):
        return dataclasses.replace(hooks, axes=algorithm.axes())
    return hooks


def _first_state(
    algorithm: Algorithm, key: PRNGKey, state: PyTree | None, hooks: Hooks
) -> tuple[int, PyTree]:
    """Returns the step and state to start from: the newest checkpoint's, the given one, or a fresh one."""
    resumed = resume(algorithm, hooks, state=state)
    if resumed is not None:
        return resumed
    shardings = (
        None if hooks.axes is None else named_shardings(_shapes(algorithm, state), hooks.axes)
    )
    if state is None:
        init = jax.jit(_init_of(_Same(algorithm)), out_shardings=shardings)
        return 0, init(jax.random.fold_in(key, 2**32 - 1))
    return 0, state if shardings is None else jax.device_put(state, shardings)


class _Same:
    """An algorithm that equals itself alone: those that compare equal may differ in what `init` reads."""

    def __init__(self, algorithm: Algorithm):
        self.algorithm = algorithm

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.algorithm is other.algorithm

    def __hash__(self) -> int:
        return id(self.algorithm)


@functools.lru_cache(maxsize=1)
def _init_of(same: _Same) -> Callable[[PRNGKey], PyTree]:
    """Returns one function for all calls with the last algorithm, so that JAX traces it once for a run."""
    return lambda key: same.algorithm.init(key, None)


def _shapes(algorithm: Algorithm, state: PyTree | None) -> PyTree:
    if state is None:
        return jax.eval_shape(_init_of(_Same(algorithm)), jax.random.key(0))
    return jax.eval_shape(lambda state: state, state)


def _stack(batches: list[PyTree]) -> PyTree:
    return jax.tree.map(lambda *parts: jnp.stack(parts), *batches)


class _Driver:
    """Fetches metrics one step late, and passes them on."""

    def __init__(self, hooks: Hooks, start: int):
        self.latest: dict[str, float] = {}
        self.current: dict[str, float] = {}  # of the last fetched step alone
        self.compile_s = 0.0
        self._hooks = hooks
        self._pending: tuple[int, int, Any] | None = None
        self._last = (start, time.perf_counter())

    def compile(
        self, algorithm: Algorithm, state: PyTree, inputs: PyTree, length: int
    ) -> jax.stages.Compiled:
        began = time.perf_counter()
        compiled = compile_step(algorithm, state, inputs, length=length, axes=self._hooks.axes)
        if self._hooks.checkpoints:
            self._hooks.checkpoints.prepare(state)
        if self._hooks.report and not self.compile_s:
            self._hooks.report(compiled)
        self.compile_s += time.perf_counter() - began
        self._last = (self._last[0], time.perf_counter())
        return compiled

    def sent(self, step: int, length: int, infos: Info) -> None:
        """Takes a program's infos; fetches those of the one before, which must be done by now."""
        self.flush()
        self._pending = (step, length, infos)
        if self._hooks.checkpoints:
            self._hooks.checkpoints.poll()

    def look(self, step: int, state: PyTree) -> None:
        """Evaluates the state and shows it to who watches, before the next step takes its memory."""
        if self._hooks.evaluate:
            self.evaluated(step, self._hooks.evaluate(state))
        if self._hooks.watch:
            self._hooks.watch(step, state)

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        self.flush()
        self.current = self.current | dict(metrics)
        self.latest |= dict(metrics)
        if self._hooks.writer:
            self._hooks.writer.write(step, metrics)
        if self._hooks.progress:
            self._hooks.progress.note(
                f"step {step}: " + "  ".join(f"{k} {v:.4f}" for k, v in metrics.items())
            )
        self._last = (step, time.perf_counter())  # evaluation is no training time

    def saved(self, step: int, stall_s: float) -> None:
        if self._hooks.writer:
            self._hooks.writer.write(step, {"speed/save_stall_s": stall_s})

    def flush(self) -> None:
        if self._pending is None:
            return
        (step, length, infos), self._pending = self._pending, None
        rows = jax.device_get(infos)
        now, (before, then) = time.perf_counter(), self._last
        self._last = (step, now)
        for i in range(length):
            values = {f"train/{name}": float(row[i]) for name, row in rows.items()}
            if i == length - 1:
                values["speed/steps_per_s"] = (step - before) / max(now - then, 1e-9)
            self.current = values
            self.latest |= values
            if self._hooks.writer:
                self._hooks.writer.write(step - length + 1 + i, values)
            if self._hooks.check:
                self._hooks.check(step - length + 1 + i, values)
        if self._hooks.progress:
            self._hooks.progress.update(step, self.latest)


@contextlib.contextmanager
def _profiler(counts: Fit, folder: Path | None):
    """Yields a function to call before each step, which starts and stops the profile."""
    first, last = counts.profile_steps()
    running = False

    def before(step: int, length: int) -> None:
        nonlocal running
        if not last or folder is None:
            return
        if not running and step < last and first < step + length:
            jax.profiler.start_trace(str(folder))
            running = True
        elif running and step >= last:
            jax.profiler.stop_trace()
            running = False

    try:
        yield before
    finally:
        if running:
            jax.profiler.stop_trace()
