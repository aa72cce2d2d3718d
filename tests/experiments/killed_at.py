"""Runs `python -m experiments.lm` and kills it at a given moment of its n-th save, as a lost machine would.

Run as `killed_at.py MOMENT N FLAGS...`; the moments are the keys of `MOMENTS`.
"""

import os
import runpy
import shutil
import signal
import sys
from pathlib import Path

from jaxpar.io import checkpoint


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def is_step(path):
    return Path(path).name.isdigit()


def at_snapshot(count):
    """When the copy on the devices was sent off, before the thread that writes has it."""
    snapshot = checkpoint.snapshot

    def call(leaves, copy):
        result = snapshot(leaves, copy)
        return die() if copy and next(count) else result

    checkpoint.snapshot = call


def at_commit(count):
    """Just before the folder gets the name that says it is whole."""
    rename = os.rename

    def call(source, target, *args, **kwargs):
        if is_step(target) and next(count):
            die()
        return rename(source, target, *args, **kwargs)

    os.rename = os.replace = call


def after_commit(count):
    """Just after that."""
    rename = os.rename

    def call(source, target, *args, **kwargs):
        rename(source, target, *args, **kwargs)
        if is_step(target) and next(count):
            die()

    os.rename = os.replace = call


def at_deletion(count):
    """When retention has deleted half of the files of an old checkpoint."""
    rmtree = shutil.rmtree

    def call(path, *args, **kwargs):
        if is_step(path) and next(count):
            files = sorted(file for file in Path(path).rglob("*") if file.is_file())
            for file in files[::2]:
                file.unlink()
            die()
        return rmtree(path, *args, **kwargs)

    shutil.rmtree = call


MOMENTS = {
    "snapshot": at_snapshot,
    "before commit": at_commit,
    "after commit": after_commit,
    "deletion": at_deletion,
}


def nth(n):
    """Yields whether this is the n-th time."""
    count = 0
    while True:
        count += 1
        yield count == n


if __name__ == "__main__":
    moment, n, *flags = sys.argv[1:]
    MOMENTS[moment](nth(int(n)))
    sys.argv = ["lm", *flags]
    runpy.run_module("experiments.lm", run_name="__main__", alter_sys=True)
