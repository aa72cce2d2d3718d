"""Device, clock and timings of the torch peers, and a row that calls one function."""

import statistics
import time
from collections.abc import Callable

import harness
import torch
import torch.distributed as dist

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def wait() -> float:
    """Returns the time at which the device has done all that it was asked."""
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def device_facts() -> dict:
    """Returns what device and which torch this is."""
    name = torch.cuda.get_device_name() if CUDA else "cpu"
    return {"device": name, "version": f"torch {torch.__version__}"}


def begin_peak() -> None:
    """Begins to note the most bytes that are held at a time."""
    if CUDA:
        torch.cuda.reset_peak_memory_stats()


def peak_memory() -> dict:
    """Returns the most bytes that were held at a time, where that is known."""
    return {"peak_bytes": torch.cuda.max_memory_allocated()} if CUDA else {}


def free() -> None:
    """Gives back the memory of arrays that are gone."""
    if CUDA:
        torch.cuda.empty_cache()


def forget() -> None:
    """Drops compiled functions, and gives back memory."""
    torch.compiler.reset()
    free()


def seconds(call: Callable, calls: int) -> float:
    """Returns the seconds of a call, over several that are queued."""
    begin = wait()
    for _ in range(calls):
        call()
    return (wait() - begin) / calls


def medians(call: Callable, spend_s: float) -> dict:
    """Returns the median ms of a call, and how it was timed."""
    return harness.medians(lambda calls: seconds(call, calls), spend_s)


def timed(plan: tuple[int, int], call: Callable, group=None) -> dict:
    """Returns the median ms of a call after one more; processes of a group begin together."""
    calls, timings = plan
    call()
    taken = []
    for _ in range(timings):
        if group is not None:
            dist.barrier(group=group)
        taken.append(seconds(call, calls))
    return {"ms": 1e3 * statistics.median(taken)}


class Call(harness.Row):
    """A row that calls one function, and computes all gradients where they are asked for."""

    def __init__(self, function: Callable, args: list, direction: str, g=None):
        """Takes the function, its arguments and the gradient of its result, drawn if it is None."""
        self.function, self.args, self.g = function, args, g
        self.both = direction == "fwd+bwd"

    def compile(self, spend_s: float):
        """Calls it until it is compiled, and plans its timings; returns the last result."""
        begin = wait()
        begin_peak()
        for _ in range(3):
            self.call()
            start = wait()
            out = self.call()
            once = wait() - start
        self.plan = harness.plan_timing(once, spend_s)
        self.made = {"compile_s": wait() - begin} | peak_memory()
        return out

    def call(self):
        """Computes the result, and all gradients."""
        if not self.both:
            with torch.no_grad():
                return self.function(*self.args)
        for each in self.args:
            each.grad = None
        y = self.function(*self.args)
        self.g = torch.randn_like(y) if self.g is None else self.g
        y.backward(self.g)
        return y

    def round(self) -> dict:
        """Median of several queued calls."""
        return timed(self.plan, self.call)
