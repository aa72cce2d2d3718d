"""Kernels as the library calls them, and facts of their machine code of sm_90, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp

HERE = Path(__file__).parent


def recorded(module, monkeypatch):
    """Returns a list of the distinct kernels that a module calls from now on; none of them runs."""
    made = []

    def record(*arrays, out, grid, text, name, num_warps, num_stages, **constants):
        call = dict(
            text=text, name=name, num_warps=num_warps, num_stages=num_stages, constants=constants
        )
        call["dtypes"] = [str(x.dtype) for x in (*arrays, *out)]
        if call not in made:
            made.append(call)
        return [jnp.zeros(x.shape, x.dtype) for x in out]

    monkeypatch.setattr(module, "available", lambda: True)
    monkeypatch.setattr(module, "call_kernel", record)
    return made


def compiled_facts(calls):
    """Yields each of these kernels with the facts of its machine code; they are printed as well."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    script = [sys.executable, HERE / "compile_for_hopper.py"]
    done = subprocess.run(script, input=json.dumps(calls), capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    for call, fact in zip(calls, json.loads(done.stdout), strict=True):
        print(fact)
        yield call, fact


def assert_side_by_side(call, fact, programs):
    """Asserts that a multiprocessor has memory and registers for `programs` of a kernel at once."""
    assert programs * (fact["shared"] + 1024) <= 228 * 1024
    assert programs * 32 * call["num_warps"] * fact["registers"] <= 65536
