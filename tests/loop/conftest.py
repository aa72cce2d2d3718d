"""Checkpoints that close themselves, programs compiled once, signal handlers that must return."""

import signal

import pytest
from noisy_walk import Walk

from jaxpar import loop
from jaxpar.io import Checkpoints, storage
from jaxpar.loop import compile_step

_programs = {}  # of `Walk`, by length


@pytest.fixture
def opened():
    """`opened(folder)` is a `Checkpoints`, closed when its folder reopens or the test ends."""
    all_opened = []

    def open_(folder, keep=100):
        for earlier in all_opened:
            if earlier.folder == storage.absolute(folder):
                earlier.close()
        all_opened.append(Checkpoints(folder, keep=keep))
        return all_opened[-1]

    yield open_
    for checkpoints in all_opened:
        checkpoints.close()


@pytest.fixture(autouse=True)
def reused(monkeypatch):
    """Compiles each program of the toy once for all tests."""

    def compile_once(algorithm, state, inputs, *, length, axes):
        if axes is not None or type(algorithm) is not Walk:
            return compile_step(algorithm, state, inputs, length=length, axes=axes)
        if length not in _programs:
            _programs[length] = compile_step(algorithm, state, inputs, length=length)
        return _programs[length]

    monkeypatch.setattr(loop, "compile_step", compile_once)


@pytest.fixture
def sent(monkeypatch, reused):
    """The steps that were made when each program had been sent off."""
    steps, compile_ = [], loop.compile_step

    def compile_and_log(*args, length, **kwargs):
        compiled = compile_(*args, length=length, **kwargs)

        def call(key, step, state, inputs):
            steps.append(int(step) + length)
            return compiled(key, step, state, inputs)

        return call

    monkeypatch.setattr(loop, "compile_step", compile_and_log)
    return steps


@pytest.fixture
def handlers():
    """Fails if the test leaves other signal handlers than it found."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
