"""The one runner: flags -> configuration -> run folder, devices and mesh; one sentence for a user's mistake.

Hydra stops here: experiments get the library's own frozen dataclasses. What trains goes on in `_train.train`, the one
training harness.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import json
import logging
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import hydra
import jax
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from jax.sharding import Mesh
from omegaconf import DictConfig, OmegaConf

import jaxpar
from jaxpar.fields import AtLeast, Between, check_fields, field, leaf_fields
from jaxpar.mesh import (
    MeshSpec,
    make_mesh,
    rules_from,
    simulate_devices,
    use_mesh,
)
from jaxpar.processes import check_same_on_all_processes, keep_programs, start_processes
from jaxpar.types import UsageError

from .. import module_of, show, start
from . import help_text, interrupts, silence
from .mistakes import (
    CONF,
    FLAG_ERRORS,
    conf_of,
    maker_of,
    refuse_malformed,
    sentence_of,
    with_newer_fields,
    with_newer_names,
    with_presets,
    with_quotes,
)
from .run_folder import fresh_folder as fresh_folder
from .run_folder import replace_text
from .run_folder import short as short

LAUNCHED = "JAXPAR_LAUNCHED"
"""Set by experiments.launch for its processes, whose standard input closes when it ends, however it ends."""
MAKING = ("train", "plan", "fast", "canonical")
"""Values of `mode` that make a run; those of others read the one in `run`, or need none."""
SHOWN = MeshSpec(data=2, fsdp=2, tensor=2)
"""What eight simulated devices are for: a mesh of three axes."""
# What Gloo, NCCL and the coordination service say where another process is gone.
_LOST = re.compile(
    r"gloo|nccl|connection|socket|peer|heartbeat|coordination|unavailable|barrier", re.IGNORECASE
)


@dataclasses.dataclass(frozen=True)
class Processes:
    """How this process finds the others; empty on one machine, and where the cluster can be detected.

    Attributes:
      coordinator: Where process 0 listens, as host:port.
      num_processes: How many there are.
      process_id: Which of them this is, from 0.
    """

    coordinator: str = ""
    num_processes: int = field(0, AtLeast(0))
    process_id: int = field(-1, AtLeast(-1))

    def __post_init__(self):
        """Refuses impossible counts."""
        check_fields(self, "processes.")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """What every experiment's configuration has.

    Attributes:
      name: First part of the run folder's name; each preset sets its own.
      seed: Of everything random.
      resume: Whether to go on in the run's folder; false starts anew in a new one.
      mesh: Sizes of the mesh axes. Left alone, it is data=all on accelerators, and on eight simulated CPU devices what
        suits the experiment: data=2 fsdp=2 tensor=2 for language models.
      layout: What is split when, of zero3, zero2, zero1, hybrid, nested, sequence and 2d; two are joined by +.
      rules: Changes to the table of logical axes, such as rules.embed=none.
      cpu_devices: CPU devices of this process where there is no accelerator; 0 means 8, or 1 if it is one of several.
      cache: Whether compiled programs are kept for the next run: in a folder of this machine's kind below
        ~/.cache/jaxpar, or in JAX_COMPILATION_CACHE_DIR.
      metrics: Where metrics go besides metrics.jsonl: tensorboard, wandb.
      processes: Start-up of many processes.
    """

    name: str = "run"
    seed: int = field(0, Between(0, 2**32 - 1))
    resume: bool = True
    mesh: MeshSpec = MeshSpec(data=-1)
    layout: str = "zero3"
    rules: dict[str, str] = dataclasses.field(default_factory=dict)
    cpu_devices: int = field(0, AtLeast(0))
    cache: bool = True
    metrics: list[str] = dataclasses.field(default_factory=list)
    processes: Processes = Processes()

    def __post_init__(self):
        """Refuses names that lead out of the folder of runs, and what no field may hold."""
        check_fields(self)
        if not re.fullmatch(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]*", self.name):
            raise UsageError(
                f"name={self.name!r} cannot name a folder; legal are names without / and \\ that begin with no dot."
            )


def identifying(default: Any = dataclasses.MISSING, legal: Any = None, **kinds: Any) -> Any:
    """A field whose flag says what a run is, not how it runs: another value makes another run (`identity`).

    With `before=`, a function from its value to what stood in identities under the flag's older names, runs that were
    made under those go on in their folders.
    """
    return field(default, legal, identity=True, **kinds)


def launch(name: str, schema: type, execute: Callable[[Any, pathlib.Path], Any]) -> None:
    """Parses the command line and calls `execute(config, folder)`; ends with exit code 2 on a user's mistake.

    Ctrl-C ends it at any moment with one sentence and exit code 130.

    Args:
      name: The experiment; `<name>.yaml`, in a folder of `conf/`, is its primary configuration.
      schema: Its frozen dataclass; must have the fields that `identity` reads.
      execute: The experiment. What it returns may have `interrupted`, as `FitResult` does: the number of a signal that
        ended it in good order, which becomes the exit code 128 + number.
    """
    _end_with_launcher()

    def begin(mistakes: list[BaseException]) -> None:
        _register(name, schema)
        sys.argv[1:] = with_presets(name, with_quotes(sys.argv[1:]))
        sys.argv[1:] = with_newer_names(schema, sys.argv[1:])
        if set(help_text.ASKED) & set(sys.argv[1:]):
            given = [flag for flag in sys.argv[1:] if flag not in help_text.ASKED]
            show(help_text.text_of(name, schema, compose(name, schema, given), RunConfig))
            return
        refuse_malformed(name, sys.argv[1:])
        _main(name, execute, mistakes)()

    answered(schema, begin)


def answered(schema: type, begin: Callable[[list[BaseException]], None]) -> None:
    """Calls `begin` with a list for the user's mistakes, and ends the process with the code and sentence of its end."""
    start.end()
    with interrupts.answering() as answer:
        mistakes, code = [], 0
        try:
            begin(mistakes)
        except (UsageError, OSError, *FLAG_ERRORS) as error:
            mistakes.append(error)
        except KeyboardInterrupt:
            answer.number = answer.number or signal.SIGINT
        except SystemExit as end:  # of an experiment whose result is a failure
            code = end.code or 0
        if answer.number:
            answer.leave()
    if mistakes:
        print(f"error: {sentence_of(mistakes[0], schema)}", file=sys.stderr)
    interrupts.finish(2 if mistakes else code)


def _main(
    name: str, execute: Callable[[Any, pathlib.Path], Any], mistakes: list[BaseException]
) -> Callable[[], None]:
    """Returns the experiment as Hydra's main function; it adds to `mistakes` what the user did wrong."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here instead of being printed by Hydra

    @hydra.main(version_base="1.3", config_path=str(conf_of(name)), config_name=name)
    def task(node: DictConfig) -> None:
        try:
            with ending_together():
                ended = execute(
                    _to_config(node), pathlib.Path(HydraConfig.get().runtime.output_dir)
                )
        except (
            UsageError,
            OSError,
            *FLAG_ERRORS,
        ) as error:  # Hydra would print a line of its own about them
            mistakes.append(error)
            return
        except (Exception, SystemExit):
            if (
                interrupts.answer.number
            ):  # it is what became of a KeyboardInterrupt, and Hydra would print a line
                raise KeyboardInterrupt from None
            raise
        if number := getattr(ended, "interrupted", 0):
            interrupts.answer.number = number
            raise KeyboardInterrupt  # out of a sweep as well

    return task


def compose(name: str, schema: type, flags: list[str]) -> Any:
    """Returns the configuration that these command-line flags give, for notebooks and tests."""
    _register(name, schema)
    flags = with_newer_names(schema, with_presets(name, with_quotes(flags)))
    try:
        refuse_malformed(name, flags)
        with hydra.initialize_config_dir(str(conf_of(name)), version_base="1.3"):
            return _to_config(hydra.compose(name, overrides=flags))
    except FLAG_ERRORS as error:
        raise UsageError(sentence_of(error, schema)) from error


def load(folder: pathlib.Path, schema: type) -> Any:
    """Returns the configuration that a run folder was made with: plain data, whichever version wrote it.

    Raises:
      UsageError: It is not there, not of this schema, or asks for more than data, as `${oc.env:HOME}` does.
    """
    path = folder / "config.yaml"
    if not path.is_file():
        raise UsageError(
            f"{folder} is no run folder: it has no config.yaml; give run= the folder of a run."
        )
    try:
        saved = OmegaConf.load(path)
        content = OmegaConf.to_container(saved, resolve=False)
        _refuse_references(path, content)
        saved = OmegaConf.create(with_newer_fields(schema, content))
        return _to_config(OmegaConf.merge(_schema_node(schema), saved))
    except (*FLAG_ERRORS, OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        whose = (
            f"it is of experiments.{module_of(of)}"
            if (of := maker_of(path))
            else sentence_of(error, schema)
        )
        raise UsageError(f"{path} is not the configuration of such a run ({whose}).") from error


def _refuse_references(path: pathlib.Path, content: Any, name: str = "") -> None:
    """Refuses what OmegaConf would look up or run: ours are written with every value in place."""
    if isinstance(content, dict):
        for key, value in content.items():
            _refuse_references(path, value, f"{name}.{key}" if name else str(key))
    elif isinstance(content, list):
        for i, value in enumerate(content):
            _refuse_references(path, value, f"{name}[{i}]")
    elif isinstance(content, str) and "${" in content:
        raise UsageError(
            f"{path} has {name}={content!r}, which refers to something else; legal are plain values."
        )


def identity(config: Any) -> dict[str, Any]:
    """Returns what makes two runs the same run: seed, model, data, optimizer and adapter, by flag name.

    So do flags of the experiment itself whose metadata say `identity=True`. Mesh, remat, steps and logging are left
    out, so that they may change when a run resumes: fields whose metadata say `identity=False` say how, not what, and
    those of `identity="changed"`, which came after the first runs, count where they are not the default.
    """
    flat = {"seed": config.seed}
    for flag in dataclasses.fields(config):
        value = getattr(config, flag.name)
        if _identifies(flag, value, usual=False):
            before = flag.metadata.get("before")
            flat |= before(value) if before else {flag.name: value}
    for part in ("model", "data", "optimizer", "adapter", "tuning", "objective"):
        value = getattr(config, part, None)
        if value is not None:
            flat |= _identity_of_part(part, value)
    return flat


def _identity_of_part(part: str, value: Any) -> dict[str, Any]:
    """Returns the fields of a part of a configuration that identify a run."""
    # Under the names that fields had before they were nested: the folder's name must not change.
    older = {path: name for name, path in getattr(value, "older_names", {}).items()}
    flat = {}
    for path, declared, chosen in leaf_fields(value):
        if _identifies(declared, chosen, usual=True):
            # A list, as JSON gives back what a checkpoint was saved with.
            listed = list(chosen) if isinstance(chosen, tuple) else chosen
            flat[f"{part}.{older.get(path, path)}"] = listed
    return flat


def _identifies(declared: dataclasses.Field, value: Any, usual: bool) -> bool:
    """Returns whether a field's value is part of a run's identity; `usual` where its metadata do not say."""
    counts = declared.metadata.get("identity", usual)
    return counts is True or (counts == "changed" and value != declared.default)


def folder_name(config: Any) -> str:
    """Returns the run folder's name: the preset's, and eight digits of a hash of the identity."""
    text = json.dumps(identity(config), sort_keys=True)
    return f"{config.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@contextlib.contextmanager
def ending_together():
    """Ends this process at an error inside if it is one of several, with its sentence or traceback.

    An orderly end waits for the other processes: the checkpoints do, and so does JAX when Python exits. Those that
    died, or that met no error, never come. With a single process the error goes on as it is.
    """
    try:
        yield
    except Exception as error:
        if not jax.distributed.is_initialized():
            raise
        if interrupts.answer.number:
            interrupts.answer.leave()
        code, text = 1, "".join(traceback.format_exception(error))
        if isinstance(error, (UsageError, OSError)):
            code, text = 2, f"error: {sentence_of(error)}"
        elif isinstance(error, jax.errors.JaxRuntimeError) and _LOST.search(str(error)):
            text = (
                "error: another process of this run ended or cannot be reached "
                f"({str(error).splitlines()[0][:200]}); its own output says why, and the same command, started on "
                "all again, goes on from the newest checkpoint."
            )
        print(text.rstrip(), file=sys.stderr, flush=True)
        interrupts.leave(code)


def open_devices(config: RunConfig, usual: MeshSpec = SHOWN):
    """Joins the other processes, finds or simulates devices, and returns the mesh as a context, ambient inside.

    Args:
      config: The experiment's.
      usual: The mesh where none is asked for and there are eight simulated CPU devices, of which it may leave some out;
        `MeshSpec()` is one device, and is so anywhere.
    """
    _quieten()
    joined = start_processes(**dataclasses.asdict(config.processes))
    with_accelerator = accelerator()
    if (
        not with_accelerator
        and importlib.util.find_spec("libtpu")
        and "JAX_PLATFORMS" not in os.environ
    ):
        jax.config.update(
            "jax_platforms", "cpu"
        )  # libtpu, where installed for tests, would look for its TPU aloud
    if config.cpu_devices < 0:
        raise UsageError(
            f"cpu_devices={config.cpu_devices} must be at least 1, or 0 for the default."
        )
    simulate_devices(config.cpu_devices or (1 if joined else 8))
    if jax.default_backend() == "cpu" and with_accelerator:
        say(
            f"note: this machine has {with_accelerator} but JAX runs on the CPU; install jaxpar[{with_accelerator}]."
        )
    if joined and jax.default_backend() == "cpu":
        silence.hide_gloo()
    if config.cache:
        keep_programs(lambda text: say(f"note: {text}; cache=false keeps none."))
    jax.config.update("jax_enable_compilation_cache", config.cache)
    check_same_on_all_processes(
        repr(config).replace(repr(config.processes), ""), "the configuration"
    )
    spec, devices = config.mesh, jax.devices()
    if spec == MeshSpec(data=-1):
        if usual == MeshSpec():
            spec, devices = usual, jax.local_devices()[:1]
        elif jax.default_backend() == "cpu" and len(devices) == 8:
            size = math.prod(dataclasses.astuple(usual))
            if (
                size == 8 or jax.process_count() == 1
            ):  # every process needs devices of its own in the mesh
                spec, devices = usual, devices[:size]
    return _opened(use_mesh(make_mesh(spec, devices), rules_from(config.rules, config.layout)))


@contextlib.contextmanager
def _opened(mesh: contextlib.AbstractContextManager) -> Iterator[Mesh]:
    """Is `mesh`; inside, process 0 of a command says where it is silent for long."""
    with contextlib.ExitStack() as stack:
        if jax.process_index() == 0 and "ipykernel" not in sys.modules:
            stack.enter_context(silence.broken())
        yield stack.enter_context(mesh)


def write_start(folder: pathlib.Path, config: Any) -> None:
    """Writes config.yaml and env.json, from process 0."""
    if jax.process_index():
        return
    replace_text(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.structured(config)))
    commit = ""
    if (
        CONF.parents[1] / ".git"
    ).exists():  # an installed jaxpar may lie in another project's repository
        git = ["git", "rev-parse", "HEAD"]
        commit = subprocess.run(
            git, capture_output=True, text=True, cwd=CONF, check=False
        ).stdout.strip()
    facts = {
        "jaxpar": jaxpar.__version__,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "commit": commit or None,
        "devices": [device.device_kind for device in jax.devices()],
        "processes": jax.process_count(),
    }
    replace_text(folder / "env.json", json.dumps(facts, indent=1) + "\n")


def say(text: str) -> None:
    """Prints from process 0."""
    if jax.process_index() == 0:
        print(text, flush=True)


def say_files(folder: pathlib.Path, plot: pathlib.Path) -> None:
    """Prints where a run's plot, metrics and checkpoints are."""
    files = {
        "plot": plot,
        "metrics": folder / "metrics.jsonl",
        "checkpoint": folder / "checkpoints",
    }
    for name, path in files.items():
        say(f"{name:10} {short(path)}")


def _end_with_launcher() -> None:
    """Ends this process when `experiments.launch` is gone, even by kill -9: the system closes the pipe then."""
    if not os.environ.pop(LAUNCHED, ""):
        return

    def wait() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


_stored: dict[str, type] = {}
"""What Hydra's store has by each name: to put it there again costs a copy."""


def _register(name: str, schema: type) -> None:
    if _stored.get(name) is not schema:
        ConfigStore.instance().store(name=f"{name}_schema", node=_schema_node(schema))
        _stored[name] = schema

    def folder(_root_: DictConfig) -> str:
        config = _to_config(_root_)
        run = getattr(config, "run", "")
        if hasattr(config, "run") and config.mode not in MAKING:
            return (
                run if run and os.path.isdir(run) else "."
            )  # Hydra makes the folder, which a typing error is not
        return run or str(pathlib.Path("runs") / name / folder_name(config))

    def stem(name: str) -> str:
        """Returns the name of a file without folder and suffix, and any other name as it is."""
        if not name.startswith("file:") and "/" not in name:
            return name
        return pathlib.PurePath(name.removeprefix("file:")).stem or "file"

    OmegaConf.register_new_resolver("run_folder", folder, replace=True)
    OmegaConf.register_new_resolver("stem", stem, replace=True)


@functools.cache  # a third of what reading flags takes; Hydra and OmegaConf change only copies of it
def _schema_node(schema: type) -> DictConfig:
    """Returns the schema's tree, with declared defaults where an instance would hold derived ones.

    `LMConfig()` fills head_dim from embed_dim; a preset that changes embed_dim alone must not keep that.
    """
    node = _thaw(OmegaConf.structured(schema))
    for part in dataclasses.fields(schema):
        if dataclasses.is_dataclass(part.type) and part.default == part.type():
            node[part.name] = _thaw(OmegaConf.structured(part.type))
    return node


def _thaw(node: DictConfig) -> DictConfig:
    """Lets Hydra override a schema whose dataclass is frozen; the objects made of it stay frozen."""
    OmegaConf.set_readonly(node, None)
    for name in node:
        child = None if OmegaConf.is_missing(node, name) else node._get_node(name)
        if isinstance(child, DictConfig):
            _thaw(child)
            if OmegaConf.get_type(child) is dict:
                OmegaConf.set_struct(child, False)  # keys such as rules.embed are the user's
    return node


def _to_config(node: DictConfig) -> Any:
    """Returns the frozen dataclass that a configuration tree describes."""
    if "hydra" in node:
        node = node.copy()
        OmegaConf.set_struct(node, False)
        node.pop("hydra")
    return OmegaConf.to_object(node)


def accelerator() -> str | None:
    """Names the extra that would use this machine's accelerator, found without asking JAX."""
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/nvidia0"):
        return "cuda"
    return "tpu" if os.path.exists("/dev/accel0") or os.path.exists("/dev/vfio/0") else None


def _quieten() -> None:
    """Silences what Orbax, its event loop and TensorStore print about a failed save, which we tell in a sentence."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)

    def report(unraisable) -> None:
        # The first of many writes to fail closes the loop under the others.
        if str(unraisable.exc_value) != "Event loop is closed":
            interrupts.answer.lost(unraisable)

    sys.unraisablehook = report
