"""Ctrl-C at any moment of any command: no crash, one true sentence, exit code 130."""

import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import jax.numpy as jnp
import pytest

from experiments import env, launch, module_of
from experiments.app import interrupts, run_folder, runner

ROOT = pathlib.Path(__file__).parents[2]
NOTHING = "interrupted; nothing had been saved yet, and the same command begins anew."
NONE = "interrupted; no checkpoint had been saved since this start."
COMMANDS = [
    "compare",
    "digits",
    "env",
    "estimate",
    "generate",
    "launch",
    "life",
    "lm",
    "moving_digits",
    "neat",
]
COMMANDS += [
    "own",
    "pipeline",
    "pipelined_speculation",
    "pomdp",
    "rl",
    "rnn",
    "step_speculation",
    "verify",
]


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_all_commands_are_here():
    assert sorted([*launch._experiments(), "launch"]) == COMMANDS


# ---------------------------------------------------------------- in this process


class Ended(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture
def ended(monkeypatch, capfd, tmp_path):
    """`ended(execute)` is the exit code, and what is said, of a command that does nothing but `execute(folder)`."""

    def end(code):
        raise Ended(code)

    monkeypatch.setattr(interrupts, "_end", end)
    monkeypatch.setattr(sys, "argv", ["env", f"hydra.run.dir={tmp_path}"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook

    def call(execute):
        capfd.readouterr()
        with pytest.raises(Ended) as ended:
            runner.launch("env", env.Config, lambda config, folder: execute(folder))
        assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before
        return ended.value.args[0], capfd.readouterr().err

    return call


def swallowed(folder):
    try:
        interrupt()
    except KeyboardInterrupt:
        pass


def turned_into(error):
    def execute(folder):
        try:
            interrupt()
        except KeyboardInterrupt:
            raise error from None

    return execute


def twice(folder):
    try:
        interrupt()
    finally:
        try:
            interrupt()
        except KeyboardInterrupt:
            print("a second one waits", file=sys.stderr)


ENDS = {
    "raised": lambda folder: interrupt(),
    "swallowed": swallowed,
    "an error": turned_into(RuntimeError("native code failed")),
    "a mistake": turned_into(runner.UsageError("native code failed")),
    "an exit": turned_into(SystemExit(1)),
    "twice": twice,
}


@pytest.mark.parametrize("how", ENDS)
def test_whatever_becomes_of_the_exception(ended, how):
    assert ended(ENDS[how]) == (130, NONE + "\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_stopped_in_good_order_tells_its_signal(ended, number):
    assert ended(lambda folder: types.SimpleNamespace(interrupted=int(number))) == (
        128 + number,
        NONE + "\n",
    )


@pytest.mark.parametrize("resume", [True, False])
def test_the_sentence_tells_what_there_is_to_go_on_from(ended, tmp_path, resume):
    again = "" if resume else rf" with resume=true hydra\.run\.dir={re.escape(str(tmp_path))}"

    def execute(folder):
        with (
            run_folder.run_folder(folder, True) as folder,
            run_folder.saving(folder, resume) as checkpoints,
        ):
            for step in steps:
                checkpoints.save(step, {"x": jnp.ones(3)}, {}, {})
            interrupt()  # the save of the last one goes on

    steps = []
    assert ended(execute) == (130, NOTHING + "\n")
    steps = [3, 7]
    code, said = ended(execute)
    assert code == 130 and re.fullmatch(
        rf"interrupted; the checkpoint of step 7 is whole, and the same command{again} goes on from it\.\n",
        said,
    )


def test_a_half_written_checkpoint_is_not_told_of(tmp_path, monkeypatch):
    """A second Ctrl-C comes while step 7 is written."""
    said, gate = [], threading.Event()
    with run_folder.saving(tmp_path, True) as checkpoints:
        checkpoints.save(3, {"x": jnp.ones(3)}, {}, {})
        checkpoints.wait()
        manager, save = checkpoints._manager, checkpoints._manager.save
        monkeypatch.setattr(
            manager, "save", lambda *args, **kwargs: gate.wait(60) and save(*args, **kwargs)
        )
        checkpoints.save(7, {"x": jnp.ones(3)}, {}, {})
        (tmp_path / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()
        said.append(interrupts.answer.sentence())
        gate.set()
    said.append(interrupts.answer.sentence())
    steps = [re.search(r"checkpoint of step (\d+) is whole", text)[1] for text in said]
    assert steps == ["3", "7"]


def test_outside_the_main_thread_ctrl_c_is_left_alone():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with interrupts.answering():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


TINY = {
    "compare": "mixers=[min_gru]",
    "digits": "",
    "env": "env=CartPole-v1 num_envs=8 num_steps=8 gif=false",
    "life": "agents=8 robots=2 size=4 hidden=4 window=1 births=4 gif=false",
    "lm": "",
    "moving_digits": "",
    "neat": "population=16",
    "own": "task=maml width=4",
    "estimate": "",
    "pipeline": "schedules=[gpipe]",
    "pipelined_speculation": "tokens=9",
    "pomdp": "env=Tiger episodes=2 max_steps=2 gif=false",
    "rl": "num_seeds=1 num_envs=8 num_steps=8 train.steps=64 train.chunk=1 gif=false",
    "rnn": "data.task=selective_copy",
    "step_speculation": "",
    "verify": "layouts=[data8] topology=none dtypes=[float32]",
}
FIRST = {  # what a command does first that takes long
    "digits": "jaxpar.loop._first_state",
    "life": "jaxpar.loop._first_state",
    "lm": "jaxpar.loop._Driver.compile",
    "moving_digits": "jaxpar.loop._first_state",
    "neat": "jaxpar.loop._first_state",
    "own": "jaxpar.loop._first_state",
    "rl": "jaxpar.loop._first_state",
    "rnn": "jaxpar.loop._first_state",
    "compare": "experiments.compare.measure",
    "env": "experiments.env.PolicyRun.compiled",
    "estimate": "jaxpar.aot.estimate",
    "pipeline": "experiments.pipeline.run",
    "pipelined_speculation": "experiments.papers.pipelined_speculation.run",
    "pomdp": "experiments.pomdp.batched",
    "step_speculation": "jaxpar.loop._first_state",
    "verify": "experiments.verify.verify_lm",
}


@pytest.mark.parametrize("name", TINY)
def test_ctrl_c_while_a_command_compiles(main, monkeypatch, tmp_path, name):
    def compile_(*args, **kwargs):
        interrupt()
        raise AssertionError("it went on")

    monkeypatch.setattr(FIRST[name], compile_)
    flags = [] if name in ("estimate", "verify") else ["cpu_devices=8", "hydra.run.dir=run"]
    said = main(*TINY[name].split(), *flags, of=name)
    sentence = NOTHING if FIRST[name].startswith("jaxpar.loop") else NONE
    assert (said.code, said.err.splitlines()[-1]) == (130, sentence), said
    assert said.err.count("interrupted") == 1 and "Traceback" not in said.err


# ---------------------------------------------------------------- real processes

STAND_IN = "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    pass\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_while_all_is_imported(tmp_path, name):
    """Something else is imported in place of JAX, which sends the signal and would swallow an exception."""
    (tmp_path / "jax.py").write_text(STAND_IN)
    line, environment = (
        [sys.executable, "-m", f"experiments.{module_of(name)}"],
        os.environ | {"PYTHONPATH": str(ROOT)},
    )
    said = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (said.returncode, said.stdout, said.stderr) == (
        130,
        "",
        "interrupted before anything began.\n",
    )


PROGRAM = """
import atexit, os, signal, sys
sys.argv[0] = "-m"
from experiments.app import interrupts

class Interrupt:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

with interrupts.answering():
    {inside}
{after}
"""


@pytest.mark.parametrize(
    "inside, after, code, sentence",
    [
        ("pass", "pass", 0, ""),
        (
            "Interrupt()",
            "pass",
            130,
            NONE + "\n",
        ),  # Python prints the exceptions of __del__, and goes on
        ("pass", "Interrupt()", 130, "interrupted when all was done.\n"),
        (
            "pass",
            "atexit.register(Interrupt); interrupts.finish(0)",
            130,
            "interrupted when all was done.\n",
        ),
        # Nothing of Python's own end, in which a signal is lost, is left to come.
        (
            "pass",
            "atexit.register(sys.stderr.write, 'bye'); kept = Interrupt(); interrupts.finish(3)",
            3,
            "bye",
        ),
    ],
    ids=["never", "while an object is deleted", "after the experiment", "at exit", "the very end"],
)
def test_where_no_exception_would_come_through(inside, after, code, sentence):
    program = PROGRAM.format(inside=inside, after=after)
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (said.returncode, said.stdout, said.stderr) == (code, "", sentence)


BUSY = """
import sys, threading
sys.argv[0] = "-m"
import jax, jax.numpy as jnp
from experiments.app import interrupts

interrupts.PATIENCE_S = 0.3
loop = jax.jit(lambda x: jax.lax.while_loop(lambda x: x >= 0, lambda x: (x + 1) % 7, x)).lower(0).compile()
with interrupts.answering():
    print("runs", flush=True)
    loop(jnp.int32(0)).block_until_ready()
"""


def test_ctrl_c_is_heard_while_a_program_runs_that_does_not_end():
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen([sys.executable, "-c", BUSY], cwd=ROOT, **pipes) as process:
        try:
            assert process.stdout.readline() == "runs\n"
            time.sleep(0.5)  # its loop has begun
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == interrupts.HEARD + "\n"
            process.send_signal(signal.SIGINT)
            assert (process.stderr.read(), process.wait(20)) == (NONE + "\n", 130)
        finally:
            process.kill()


def test_ctrl_c_ignored_by_the_shell_stays_ignored():
    lines = "import sys; sys.argv[0] = '-m'; import experiments, os, signal; os.kill(os.getpid(), signal.SIGINT)"
    shell = ["sh", "-c", 'trap "" INT; exec "$0" "$@"', sys.executable, "-c", lines]
    assert subprocess.run(shell, cwd=ROOT).returncode == 0


def start(name, flags, cwd, environment):
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace")
    line = [sys.executable, "-m", f"experiments.{module_of(name)}", *flags]
    return subprocess.Popen(line, cwd=cwd, env=environment | {"PYTHONUNBUFFERED": "1"}, **pipes)


def check(code, err):
    """Asserts that a process was interrupted, with one sentence."""
    sentences = [line for line in err.splitlines() if line.startswith("interrupted")]
    assert code == 130 and len(sentences) == 1 and "Traceback" not in err, (code, err)
    return sentences[0]


def test_ctrl_c_while_xla_compiles_is_no_crash(command, tmp_path):
    """The runtime must not be taken apart under a compilation that goes on: jaxlib 0.10 crashed, three of three."""
    environment = command.env | {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "XLA_FLAGS": "",
    }
    process = start(
        "rl", "train.steps=20000 num_seeds=1 hydra.run.dir=run".split(), tmp_path, environment
    )
    for line in process.stdout:
        if line.startswith("updates"):
            break
    time.sleep(0.8)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert check(process.returncode, err) == NOTHING


SWEPT = TINY | {
    "rl": "num_seeds=1 num_envs=8 num_steps=8 train.steps=6400 train.chunk=1 train.save_every=1 gif=false anneal=false",
    "life": f"{TINY['life']} train.steps=400 train.chunk=1 train.save_every=1",
    "neat": "population=64 train.steps=60 train.chunk=1 train.save_every=1 task=multiplexer",
    "launch": "--processes 2 --devices-per-process 1 lm",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_ctrl_c_at_random_moments_of_every_command(command, tmp_path, name):
    """Once or twice, from a start's first imports to its end; each start goes on from what the one before has left."""
    shuffle, counts, run = random.Random(name), {}, tmp_path / "run"
    flags = SWEPT[name].split() + (
        command.flags if name in ("lm", "launch") else ["hydra.run.dir=run"]
    )
    for trial in range(int(os.environ.get("INTERRUPTS", "20"))):
        began = time.time()
        process = start(name, flags, tmp_path, command.env)
        time.sleep(1 + shuffle.uniform(0, 10))  # of the first second much is the interpreter's own
        while trial % 2 and process.poll() is None and not touched(run / "metrics.jsonl", began):
            time.sleep(0.05)  # every other time it shall be on its way
        time.sleep(shuffle.uniform(0, 4) if trial % 2 else 0)
        came = process.poll() is None
        process.send_signal(signal.SIGINT)
        if shuffle.random() < 0.3:
            time.sleep(shuffle.uniform(0, 0.3))
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
        sentence = check(process.returncode, err) if came else "ended before"
        assert came or process.returncode == 0, (out, err)
        assert "refused" not in out + err
        newest = max(
            [int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit()],
            default=0,
        )
        assert (
            f"checkpoint of step {newest} is whole, and" in sentence
            or "is whole, and" not in sentence
        )
        sentence = re.sub(r"\d+", "N", sentence)
        counts[sentence] = counts.get(sentence, 0) + 1
        if not came:
            shutil.rmtree(run)
    print(name, counts)


def touched(path, since):
    return path.exists() and path.stat().st_size and path.stat().st_mtime > since
