"""Programs that tests compiled, kept for the next run, outside of the checkout.

JAX knows a program by its text, its options and the version of jaxlib. Each folder has one value of
what JAX does not know of: the processor's features, the platform, and every flag of the compilers.
`JAXPAR_TEST_CACHE=off` keeps nothing, and a path there is taken in place of the usual folder.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from jaxpar.processes import _kind_of_machine

MAX_BYTES = 3 * 2**30
"""Bound of all folders together: an interpreter's programs take some 300 MB."""
FLAGS = ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "TRITON_INTERPRET", "PJRT_NPROC")


def top_folder():
    """Returns the folder of all kinds of machines, or None where nothing is kept."""
    asked = os.environ.get("JAXPAR_TEST_CACHE", "")
    if asked == "off":
        return None
    if asked:
        return Path(asked)
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "jaxpar" / "tests"


def kind_of_programs():
    """Returns a name for the machine and every flag that a compiled program may depend on."""
    flags = "\n".join(f"{name}={os.environ.get(name, '')}" for name in FLAGS)
    digest = hashlib.sha256(flags.encode()).hexdigest()[:8]
    return f"{_kind_of_machine()}-{digest}"


def begin():
    """Returns the folder of this run's programs, and whether it is to be removed at its end."""
    top = top_folder()
    if top is None:
        return Path(tempfile.mkdtemp(prefix="jaxpar-programs-")), True
    folder = top / kind_of_programs()
    folder.mkdir(parents=True, exist_ok=True)
    return folder, False


def prune(top, max_bytes=MAX_BYTES):
    """Removes the files that were not read for the longest, until the others fit."""
    files = []
    for path in top.rglob("*"):
        if path.is_file() and path.suffix != ".json":
            status = path.stat()
            last_used = max(status.st_atime, status.st_mtime)
            files.append((last_used, status.st_size, path))

    size = sum(file[1] for file in files)
    for _, bytes_, path in sorted(files):
        if size <= max_bytes:
            break
        path.unlink(missing_ok=True)
        size -= bytes_


def read(folder, name):
    """Returns what an earlier run noted under a name, or nothing."""
    try:
        noted = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(noted, dict):
        return {}
    return noted


def note(folder, name, values):
    """Adds to what is noted under a name; a run that is killed leaves it whole."""
    path = folder / f"{name}.json"
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(json.dumps(read(folder, name) | values))
    unfinished.replace(path)


def end(folder, is_temporary):
    """Leaves the folder small, or removes it."""
    if is_temporary:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        prune(folder.parent)
