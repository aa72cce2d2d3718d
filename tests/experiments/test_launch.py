"""Several real processes: the run that one process makes, whoever of them is killed and however many go on."""

import contextlib
import itertools
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from test_kill import half_written, losses, rows

from experiments import launch
from experiments.app import interrupts, runner

# Adam divides by |g| + eps: where a gradient is nothing but rounding, the usual eps of 1e-8 would let another order of
# sums move a parameter by a whole learning rate.
SAME = ["optimizer.eps=1e-6", "optimizer.warmup_steps=4"]

needs_children = pytest.mark.skipif(
    not pathlib.Path("/proc/self/task").is_dir(),
    reason="finds the launcher's children where Linux lists them",
)


def arguments(command, processes, devices, *flags):
    sizes = ["--processes", str(processes), "--devices-per-process", str(devices)]
    return [*sizes, "lm", *command.flags, *SAME, *flags]


@pytest.fixture
def launched(command, monkeypatch, capfd):
    """`launched(processes, devices, *flags)` is a `Launched` that ended by itself, without the launcher's own start."""
    for name, value in command.env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(command.cwd)

    def call(*asked):
        capfd.readouterr()
        code = launch.main(arguments(command, *asked))
        return command.said(code, *capfd.readouterr())

    return call


class Launched:
    """`python -m experiments.launch` of as many processes as `devices` has entries, in a folder of its own."""

    def __init__(self, command, processes, devices, *flags):
        line = [
            sys.executable,
            "-m",
            "experiments.launch",
            *arguments(command, processes, devices, *flags),
        ]
        pipes = dict(
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
        )
        self.process = subprocess.Popen(line, cwd=command.cwd, env=command.env, **pipes)
        self.pid, self.count, self._command = self.process.pid, processes, command

    def finish(self):
        return self._command.finish(self.process)

    def children(self):
        """Returns the processes' numbers, in their order."""
        found = []
        while len(found) < self.count and self.process.poll() is None:
            found = pathlib.Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return [int(number) for number in found]

    def wait_for_step(self, step):
        """Waits until metrics.jsonl holds `step`; fails if the launcher ends first."""
        path = self._command.cwd / "run" / "metrics.jsonl"
        while not (path.is_file() and f'"step": {step},' in path.read_text()):
            assert self.process.poll() is None, self.finish()
            time.sleep(0.01)


def ends(numbers, seconds):
    """Tells whether all processes are gone (or mere entries of the table) within the time."""
    until = time.monotonic() + seconds
    while alive := [number for number in numbers if is_alive(number)]:
        if time.monotonic() > until:
            return False, alive
        time.sleep(0.05)
    return True, []


def is_alive(number):
    try:
        state = pathlib.Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# ---------------------------------------------------------------- the same run


@pytest.mark.slow
def test_other_numbers_of_processes_go_on_with_the_same_losses(command):
    flags = [
        "data.batch_size=6",
        "optimizer.decay_steps=9",
        "train.eval_every=3",
        "train.save_every=3",
    ]
    alone = command(
        *SAME,
        *flags,
        "train.steps=9",
        "cpu_devices=4",
        "mesh.data=2",
        "mesh.tensor=2",
        "hydra.run.dir=one",
    )
    assert alone.code == 0, alone
    # a launched start, one process, other launched processes
    both = Launched(command, 2, 2, *flags, "train.steps=3", "mesh.data=2", "mesh.tensor=2").finish()
    assert both.code == 0 and "data=2 tensor=2 on 4 cpu devices" in both.out, both
    assert both.out.count("validation loss") == 1 and "Gloo" not in both.out, (
        "process 0 alone is heard, and no noise"
    )
    three = Launched(command, 3, 1, *flags, "train.steps=9").finish()
    assert (
        three.code == 0 and "(resuming at step 3)" in three.out and "data=3 on 3 cpu" in three.out
    ), three
    got, want = rows(command.cwd / "run"), rows(command.cwd / "one")
    assert [row["step"] for row in got if "train/loss" in row] == list(range(1, 10))
    assert [(row["step"], *row) for row in got] == [(row["step"], *row) for row in want]
    np.testing.assert_allclose(losses(command.cwd / "run"), losses(command.cwd / "one"), rtol=1e-5)
    facts = (command.cwd / "run" / "env.json").read_text()
    assert '"processes": 3' in facts


MOVES = [  # processes (0: without the launcher), devices of each, mesh
    (0, 8, "mesh.data=2 mesh.fsdp=2 mesh.tensor=2"),
    (0, 8, "mesh.data=1 mesh.fsdp=8"),
    (0, 3, "mesh.data=3"),
    (2, 4, "mesh.data=2 mesh.fsdp=2 mesh.tensor=2"),
    (0, 1, "mesh.data=1"),
    (0, 8, "mesh.data=2 mesh.fsdp=2 mesh.tensor=2"),
]


@pytest.mark.slow
def test_two_hundred_steps_that_move_keep_their_losses(command):
    flags = [
        "data.batch_size=24",
        "optimizer.decay_steps=200",
        "train.eval_every=0",
        "train.save_every=10",
    ]
    flags += ["model.num_layers=2", "model.dtype=float32", "optimizer.warmup_steps=20"]
    unmoved = command(
        *SAME, *flags, "train.steps=200", *MOVES[0][2].split(), "hydra.run.dir=unmoved"
    )
    assert unmoved.code == 0, unmoved
    for (processes, devices, mesh), steps in zip(MOVES, (30, 60, 100, 130, 170, 200), strict=True):
        leg = [*flags, f"train.steps={steps}", *mesh.split()]
        if processes:
            said = Launched(command, processes, devices, *leg).finish()
        else:
            said = command(*SAME, *leg, f"cpu_devices={devices}")
        assert said.code == 0, said
    got, want = (np.array(losses(command.cwd / name)) for name in ("run", "unmoved"))
    assert len(got) == 200
    worst = np.abs(got / want - 1).max()
    print(
        f"worst relative difference of a loss: {worst:.2e}; losses from {want[0]:.3f} to {want[-1]:.3f}"
    )
    assert 0 < worst < 1e-5 and want[-1] < 0.6 * want[0]


# ---------------------------------------------------------------- ends


@needs_children
def test_ctrl_c_saves_a_kill_ends_all_and_both_resume(command, launched):
    run = Launched(command, 2, 1, "train.steps=400", "optimizer.decay_steps=400")
    run.wait_for_step(5)
    run.process.send_signal(signal.SIGINT)
    said = run.finish()
    assert said.code == 130 and "Traceback" not in said.err, said
    step = int(re.search(r"interrupted; the checkpoint of step (\d+) is whole", said.err)[1])
    assert (
        said.err.count("interrupted") == 1
        and (command.cwd / "run" / "checkpoints" / str(step)).is_dir()
    )

    run = Launched(command, 2, 1, "train.steps=400", "optimizer.decay_steps=400")
    run.wait_for_step(step + 9)  # past a checkpoint
    children = run.children()
    began = time.monotonic()
    os.kill(children[1], signal.SIGKILL)
    said = run.finish()
    assert time.monotonic() - began < launch.GRACE_S + 10
    assert ends(children, 1)[0]
    assert said.code == 1 and f"(resuming at step {step})" in said.out, said
    assert "error: process 1 was killed by SIGKILL, so the others were stopped; " in said.err
    logs = pathlib.Path(re.search(r"It wrote to (\S+)/process-1.log", said.err)[1])
    assert "Traceback" not in said.err and logs.is_dir()
    shutil.rmtree(logs)

    reached = losses(command.cwd / "run")
    again = launched(2, 1, f"train.steps={step + 12}", "optimizer.decay_steps=400")
    whole = int(re.search(r"\(resuming at step (\d+)\)", again.out)[1])
    assert again.code == 0 and step < whole <= len(reached) and whole >= len(reached) - 8, again
    assert losses(command.cwd / "run")[: len(reached)] == reached[: step + 12]


@needs_children
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_many_kills_of_one_of_several_change_no_bit(command, seed):
    """Half of the kills come within a save, which is asynchronous; victims are any process, and the launcher."""
    reference = Launched(command, 2, 2, "hydra.run.dir=reference").finish()
    assert reference.code == 0, reference
    shuffle, killed, halves = random.Random(seed), 0, 0
    for round_ in itertools.count():
        folder, finished = command.cwd / f"round-{round_}", False
        while not finished and killed < 10:
            began = time.time()
            run = Launched(command, 2, 2, f"hydra.run.dir={folder}")
            children = run.children()
            victim = shuffle.choice([run.pid, *children])
            if killed % 2:
                while run.process.poll() is None and not half_written(folder, began):
                    time.sleep(0.001)
            else:
                time.sleep(shuffle.uniform(0, 20))
            if run.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)
                killed, halves = killed + 1, halves + bool(half_written(folder, began))
            said = run.finish()
            finished = said.code == 0
            gone, left = ends(children, launch.GRACE_S + 10)
            assert gone, left
        last = Launched(command, 2, 2, f"hydra.run.dir={folder}").finish()
        assert last.code == 0, last
        assert rows(folder) == rows(command.cwd / "reference")
        if killed >= 10:
            break
    assert halves >= 2


STUBBORN = """
import signal, sys, time
if sys.argv[1] == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    time.sleep(1)
    sys.exit(int(sys.argv[1]))
time.sleep(60)
"""


@pytest.mark.parametrize("code", [3, 2])
def test_who_does_not_heed_a_signal_is_killed(monkeypatch, tmp_path, code):
    monkeypatch.setattr(launch, "GRACE_S", 0.5)
    began = time.monotonic()
    group = launch.Group(
        [sys.executable, "-c", STUBBORN], [["stubborn"], [str(code)], ["stubborn"]], tmp_path
    )
    ended = group.wait()
    group.close()
    assert ended[0] == (1, code) and sorted(ended[1:]) == [
        (0, -signal.SIGKILL),
        (2, -signal.SIGKILL),
    ]
    assert 1.5 < time.monotonic() - began < 20


@needs_children
def test_no_process_outlives_its_launcher(command):
    run = Launched(command, 2, 1, "train.steps=40000")
    children = run.children()
    run.process.kill()
    gone, left = ends(children, 20)
    for number in left:
        os.kill(number, signal.SIGKILL)
    run.finish()
    assert gone


@needs_children
@pytest.mark.slow
def test_without_a_launcher_the_survivor_ends_with_a_sentence(command):
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    flags = [
        f"processes.coordinator=localhost:{port}",
        "processes.num_processes=2",
        "train.steps=4000",
    ]
    first, second = (command.start(*flags, f"processes.process_id={index}") for index in (0, 1))
    path = command.cwd / "run" / "metrics.jsonl"
    while not (path.is_file() and '"step": 9,' in path.read_text()):
        time.sleep(0.05)
    second.kill()
    began = time.monotonic()
    said = command.finish(first)
    command.finish(second)
    assert time.monotonic() - began < interrupts.SHUTDOWN_S + 20
    errors = [line for line in said.err.splitlines() if line.startswith("error: ")]
    assert said.code in (1, -signal.SIGABRT) and "Traceback" not in said.err, said
    assert (
        len(errors) == 1 and "another process of this run ended or cannot be reached" in errors[0]
    )


@pytest.mark.slow
def test_slurm_tells_the_processes_of_each_other(command):
    job = random.randrange(4096)  # JAX derives the port from it
    running = []
    for index in ("0", "1"):
        env = dict(SLURM_JOB_ID=str(job), SLURM_NTASKS="2", SLURM_PROCID=index, SLURM_LOCALID=index)
        command.env = command.env | env | {"SLURM_STEP_NODELIST": "localhost"}
        running.append(command.start("train.steps=2", "cpu_devices=2"))
    first, second = map(command.finish, running)
    assert (first.code, second.code) == (0, 0), (first, second)
    assert "data=4 on 4 cpu devices" in first.out and not second.out


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            "",
            "no experiment is named; legal are compare, digits, env, estimate, generate, life, lm",
        ),
        (
            "train.steps=3",
            "there is no experiment 'train.steps=3'; legal are compare, digits, env, estimate, generate, life, lm",
        ),
        ("--processes 0 lm", "--processes 0 must be at least 1."),
        (
            "--processes two lm",
            "argument --processes: invalid int value: 'two'; --help shows examples.",
        ),
        ("--devices-per-process 0 lm", "--devices-per-process 0 must be at least 1."),
        ("--proceses 2 lm", "--proceses"),
        ("lm --processes 2", "--processes must stand before lm."),
        (
            "lm cpu_devices=3",
            "cpu_devices=3 is set by the launcher; use --processes and --devices-per-process.",
        ),
        ("lm processes.process_id=1", "processes.process_id=1 is set by the launcher"),
        ("lm -m seed=1,2", "-m sweeps within one process"),
    ],
)
def test_mistakes_of_the_launcher_are_one_sentence(capsys, arguments, sentence):
    assert launch.main(arguments.split()) == 2
    said = capsys.readouterr()
    assert (
        not said.out
        and said.err.startswith("error: ")
        and sentence in said.err
        and said.err.count("\n") == 1
    )


def test_accelerators_are_not_divided(capsys, monkeypatch):
    monkeypatch.setattr(runner, "accelerator", lambda: "cuda")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert launch.main(["lm"]) == 2
    assert "this machine has cuda, which the launcher cannot divide" in capsys.readouterr().err


def test_help_has_examples(capsys):
    with pytest.raises(SystemExit) as end:
        launch.main(["--help"])
    assert (
        end.value.code == 0
        and "--processes 4 --devices-per-process 2 lm train.steps=50" in capsys.readouterr().out
    )


def test_a_mistake_in_the_flags_is_said_once(launched):
    said = launched(2, 1, "mesh.data=3")
    assert (
        said.sentence()
        == "error: mesh data=3 needs 3 devices but 2 are here; the nearest legal choice is data=2."
    )
    said = launched(2, 1, "train.stepz=3")
    assert said.sentence() == "error: unknown flag 'train.stepz'; did you mean train.steps?"
