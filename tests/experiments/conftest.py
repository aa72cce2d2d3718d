"""`python -m experiments.lm` as a user runs it: in this process where that is enough, else in one of its own."""

import contextlib
import dataclasses
import fcntl
import importlib
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys

import jax
import pytest
from hydra._internal.hydra import Hydra
from jax.experimental.compilation_cache import compilation_cache

from experiments import module_of

ROOT = pathlib.Path(__file__).parents[2]
TINY = (
    "model.num_layers=1 model.embed_dim=32 model.attention.num_heads=2 "
    "model.attention.num_kv_heads=2 model.mlp.dim=64 data.seq_len=16 "
    "data.batch_size=8 train.steps=40 train.save_every=4 train.eval_every=20 train.eval_batches=1 "
    "sampling.max_new_tokens=8"
).split()


@dataclasses.dataclass
class Finished:
    code: int
    out: str
    err: str

    def sentence(self):
        """Returns the one sentence that a user's mistake ends in."""
        assert self.code == 2, self
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, self
        assert "Traceback" not in self.out + self.err and "Error executing job" not in self.err, (
            self
        )
        return errors[0]


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all workers of this run of the tests share."""
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def compiled(shared):
    """A folder of compiled programs that all processes share, so that a restart compiles nothing.

    It is not kept for the next run of the tests: some of those who write to it are killed.
    """
    return shared / "compiled"


@pytest.fixture(scope="session")
def cache():
    """The folder of compiled programs of the tests' own process."""
    return jax.config.jax_compilation_cache_dir


@contextlib.contextmanager
def alone(shared, name):
    """Only one worker at a time does what is done here, by this name."""
    with open(shared / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="session")
def text(shared):
    """A small text file: shuffled words."""
    words, shuffle = ["alpha", "beta", "gamma", "delta"], random.Random(0)
    path = shared / "words.txt"
    with alone(shared, "text"):
        if not path.exists():
            path.write_text("\n".join(" ".join(shuffle.choices(words, k=10)) for _ in range(600)))
    return path


@dataclasses.dataclass
class Command:
    """Runs `python -m experiments.lm` with the tiny model's flags, and `flags` after them, in `cwd`."""

    cwd: pathlib.Path
    flags: list[str]
    env: dict[str, str]

    def start(self, *flags, max_file_size=None, within=()):
        """`within` is a moment and a number, for killed_at.py."""
        script = (
            [str(ROOT / "tests" / "experiments" / "killed_at.py"), *within]
            if within
            else ["-m", "experiments.lm"]
        )
        line = [sys.executable, *script, *self.flags, *flags]
        if max_file_size:
            limit = f"resource.setrlimit(resource.RLIMIT_FSIZE, ({max_file_size},) * 2)"
            line = [
                sys.executable,
                "-c",
                f"import os, resource, sys; {limit}; os.execv(sys.argv[1], sys.argv[1:])",
                *line,
            ]
        pipes = dict(
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
        )
        return subprocess.Popen(line, cwd=self.cwd, env=self.env, **pipes)

    def finish(self, process):
        out, err = process.communicate(timeout=240)
        return self.said(process.returncode, out, err)

    def said(self, code, out, err):
        return Finished(code, out, err)

    def __call__(self, *flags, **options):
        return self.finish(self.start(*flags, **options))


@pytest.fixture(scope="session")
def command_in(compiled, text):
    """`command_in(folder)` is the `Command` of that folder."""
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",
    }
    return lambda cwd: Command(cwd, [*TINY, f"data.path={text}", "hydra.run.dir=run"], env)


@pytest.fixture
def command(tmp_path, command_in):
    return command_in(tmp_path)


@pytest.fixture(scope="session")
def finished(shared, command_in):
    """What an uninterrupted run said, and its folder, one for all workers; tests change only copies of it."""
    folder = shared / "finished"
    kept = folder / "said.json"
    with alone(shared, "finished"):
        if not kept.exists():
            shutil.rmtree(
                folder, ignore_errors=True
            )  # of a run that failed: the next worker says so as well
            folder.mkdir()
            said = command_in(folder)()
            assert said.code == 0, said
            kept.write_text(json.dumps(dataclasses.asdict(said)))
    return Finished(**json.loads(kept.read_text())), folder / "run"


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the finished run's folder, where `command` and `main` look for it."""
    return pathlib.Path(shutil.copytree(finished[1], tmp_path / "run"))


@pytest.fixture(scope="session")
def compile_once():
    """Is `compile_step`, which compiles a step once in a process, however many runs make it."""
    from jaxpar import loop, mesh

    plain, programs = loop.compile_step, {}

    def compile_step(algorithm, state, inputs, *, length=1, axes=None):
        leaves, structure = jax.tree.flatten((state, inputs))
        kinds = [(jax.typeof(x), getattr(x, "sharding", None)) for x in leaves]
        ambient = jax.sharding.get_mesh(), mesh._table.value
        key = (
            algorithm,
            structure,
            tuple(kinds),
            length,
            str(axes),
            ambient,
            jax.config.jax_compilation_cache_dir,
        )
        if key not in programs:
            programs[key] = plain(algorithm, state, inputs, length=length, axes=axes)
        return programs[key]

    return compile_step


@pytest.fixture
def one_device(monkeypatch):
    """A mesh of one device, under which runs of the language model draw no sample."""
    from experiments import lm
    from jaxpar.mesh import MeshSpec, make_mesh, use_mesh

    monkeypatch.setattr(lm, "draw_sample", lambda *_: "")  # a program of its own
    with use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])):
        yield


def plain_figure(width, height):
    """A picture that costs half as much to draw; tests/io draws the users' ones."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=30)


@pytest.fixture
def main(monkeypatch, capfd, tmp_path, cache, text, compile_once):
    """`main(*flags)` is the command in this process, in `tmp_path`.

    It fails if a training step is compiled, unless `compiles` says that one may be. `of` is another
    experiment, which gets no flags but those given.
    """
    from experiments.app import interrupts, runner
    from jaxpar import loop
    from jaxpar.io import graphs, plots

    def refuse(*args, **kwargs):
        raise AssertionError("a training step is compiled")

    monkeypatch.setattr(runner, "_quieten", lambda: None)  # it silences loggers for good
    # Hydra reads all flags twice, the first time for hydra.mode alone, which nothing here sets.
    monkeypatch.setattr(Hydra, "get_mode", lambda self, config_name, overrides: None)
    monkeypatch.setattr(interrupts, "_end", sys.exit)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plots, "empty_figure", plain_figure)
    monkeypatch.setattr(graphs, "empty_figure", plain_figure)
    before = jax.config.jax_compilation_cache_dir

    base = [*TINY, f"data.path={text}"]

    def call(*flags, of="lm", compiles=False):
        experiment = importlib.import_module(f"experiments.{module_of(of)}")
        monkeypatch.setattr(loop, "compile_step", compile_once if compiles else refuse)
        monkeypatch.setattr(sys, "argv", [of, *(base if of == "lm" else ()), *flags])
        capfd.readouterr()
        try:
            runner.launch(of, experiment.Config, experiment.execute)
            code = 0
        except SystemExit as exit_:
            code = exit_.code
        return Finished(code, *capfd.readouterr())

    call.flags = base
    yield call
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()  # JAX reads it once: later tests would still write there


@pytest.fixture
def trained(main, tmp_path):
    """`trained(*flags, of=..., steps=...)` is the last value of each metric of a whole run.

    The run is in `trained.folder`; the same flags again train nothing, since they name `steps`.
    """

    def call(*flags, of, steps):
        said = main(*flags, of=of, compiles=True)
        assert said.code == 0, said
        names = {path.name for path in call.folder.iterdir()}
        assert {"config.yaml", "env.json", "metrics.jsonl", "checkpoints", "plots"} <= names
        assert (call.folder / "plots" / "training.png").stat().st_size > 1000
        again = main(*flags, of=of)  # compiles nothing
        sentence = f"this run is finished; extend it with train.steps={2 * steps}"
        assert again.code == 0 and sentence in again.out
        lines = (call.folder / "metrics.jsonl").read_text().splitlines()
        return {name: value for line in lines for name, value in json.loads(line).items()}

    call.folder = tmp_path / "run"
    return call
