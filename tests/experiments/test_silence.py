"""Where a command prints nothing for long, a line says what it does and for how long."""

import ast
import io
import re
import sys
import time

import jax
import jax.numpy as jnp
import pytest

import experiments
from experiments.app import interrupts, silence

TRACE = "/jax/core/compile/jaxpr_trace_duration"
COMPILE = "/jax/core/compile/backend_compile_duration"


class Clocked:
    """A pulse whose seconds are made by hand."""

    def __init__(self):
        self.now, self.out = 0.0, io.StringIO()
        self.pulse = silence.Pulse(self.out, lambda: self.now)

    def wait(self, seconds):
        for _ in range(2 * seconds):
            self.now += 0.5
            self.pulse.tick()

    def compile(self, name, seconds):
        for event, spent in ((TRACE, 1), (COMPILE, seconds)):
            self.pulse.began(event, 0.0, fun_name=name if event == TRACE else f"jit_{name}")
            self.wait(spent)
            self.pulse.ended(event, 0.0, fun_name=name if event == TRACE else f"jit_{name}")

    def said(self):
        return self.out.getvalue()


def test_a_compilation_is_one_line_with_its_seconds():
    clocked = Clocked()
    clocked.compile("play", 12)
    clocked.wait(1)
    assert clocked.said() == "compiling play ... 14 s\n"  # a look later
    clocked.compile("next", 2)
    clocked.compile("<lambda>", 2)
    clocked.pulse.close()
    assert clocked.said().splitlines()[1:] == ["compiling next . 3 s", "compiling a program . 3 s"]


def test_what_is_short_or_speaks_is_left_alone():
    clocked = Clocked()
    clocked.compile("short", 0)
    for seconds in (2, 3, 3, 3):
        clocked.wait(seconds)
        clocked.pulse.printed("step\n")
    assert clocked.said() == ""
    clocked.wait(9)
    clocked.pulse.printed("done\n")
    assert clocked.said() == "running .. 9 s\n", "a line of another's begins a line"


def test_no_gap_is_over_five_seconds():
    clocked, gaps, last = Clocked(), [], 0.0
    for second in range(1, 40):
        before = clocked.said()
        if second == 20:
            clocked.pulse.began(TRACE, 0.0, fun_name="play")
        clocked.wait(1)
        if clocked.said() != before:
            gaps.append(clocked.now - last)
            last = clocked.now
    assert max(gaps) <= 5 and len(gaps) >= 9
    assert re.fullmatch(r"running \.+ 21 s\ncompiling play \.+", clocked.said()), (
        "a compilation is long after two"
    )


def test_many_short_compilations_are_no_silence():
    clocked = Clocked()
    for i in range(9):
        clocked.compile(f"add{i}", 0)
    clocked.compile("play", 4)
    clocked.wait(1)
    assert clocked.said() == "running .. 11 s\ncompiling play . 6 s\n"


def test_a_slow_start_is_told(monkeypatch, capfd):
    monkeypatch.setattr(experiments.Start, "QUIET_S", 0.05)
    start = experiments.Start(True)
    time.sleep(0.4)
    spoke = start.end()
    assert capfd.readouterr().err.count("starting: JAX") >= 2 and time.monotonic() - spoke < 0.3
    time.sleep(0.2)
    still = experiments.Start(False)
    time.sleep(0.2)
    assert capfd.readouterr().err == "" and still.end() < time.monotonic() - 0.15


def test_what_a_command_takes_to_begin_is_counted():
    clocked = Clocked()
    clocked.now = 7.0
    clocked.pulse = silence.Pulse(clocked.out, lambda: clocked.now, began=0.0)
    clocked.wait(1)
    assert clocked.said() == "running ."


def test_programs_inside_of_another_are_that_ones():
    clocked = Clocked()
    clocked.pulse.began(TRACE, 0.0, fun_name="play")
    clocked.wait(3)
    clocked.pulse.began(COMPILE, 0.0, fun_name="jit_add")
    clocked.wait(3)
    clocked.pulse.began(TRACE, 0.0, fun_name="broken")  # which an error leaves open
    clocked.pulse.ended(COMPILE, 0.0, fun_name="jit_add")
    clocked.pulse.ended(TRACE, 0.0, fun_name="play")
    clocked.wait(1)
    assert clocked.said() == "compiling play .. 6 s\n"


def test_a_bar_keeps_its_line():
    clocked = Clocked()
    clocked.pulse.printed("training 3/10")
    clocked.compile("step", 20)
    clocked.wait(20)
    assert clocked.said() == ""


def test_it_hears_jax_and_what_is_printed(monkeypatch, capfd):
    monkeypatch.setattr(silence, "FIRST_S", 0.0)
    monkeypatch.setattr(silence, "BEAT_S", 0.01)

    def slow(x):
        time.sleep(0.1)
        return x + 1

    before, listeners = (sys.stdout, sys.stderr), len(jax._src.monitoring._scalar_listeners)
    with silence.broken(), silence.broken():
        jax.jit(slow)(jnp.ones(3)).block_until_ready()
        print("all done", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert len(jax._src.monitoring._scalar_listeners) == listeners
    assert re.search(r"compiling slow \. 0 s\n(?s:.*)all done\n$", capfd.readouterr().err)


def test_an_interrupt_begins_a_line_of_its_own(monkeypatch, capfd):
    monkeypatch.setattr(interrupts, "_end", sys.exit)
    with silence.broken():
        sys.stderr._pulse._line = "compiling play"
        with pytest.raises(SystemExit):
            interrupts._leave_with(2, "interrupted.")
        sys.stderr._pulse._line = ""
    assert capfd.readouterr().err == "\ninterrupted.\n"


def test_every_command_breaks_its_silences():
    """Each runs inside of `open_devices` to its end, or breaks silences by itself."""
    paths = [*experiments.HERE.glob("[a-z]*.py"), *experiments.HERE.glob("papers/[a-z]*.py")]
    assert len(paths) > 20
    for path in paths:
        body = next((node for node in ast.parse(path.read_text()).body
                     if isinstance(node, ast.FunctionDef) and node.name == "execute"), None)  # fmt: skip
        if body is None or "small_commands" in path.read_text():  # whose runner does
            continue
        by_itself = any("silence" in ast.unparse(each) for each in body.decorator_list)
        within = body.body[-1]
        while isinstance(within, ast.Try):
            within = within.body[-1]
        opened = isinstance(within, ast.With) and "open_devices" in ast.unparse(within.items[0])
        assert by_itself or opened, path.name
