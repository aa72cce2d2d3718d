"""The processes of a run: finding each other, refusing what differs, stopping together; programs that they keep."""

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import math
import os
import platform
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpar.types import UsageError

__all__ = [
    "AGREE_EVERY",
    "HEARTBEAT_S",
    "Interruption",
    "check_same_on_all_processes",
    "interruptible",
    "keep_programs",
    "start_processes",
]

AGREE_EVERY = 10
"""Steps between two times that many processes agree whether one of them was told to stop.

So a signal ends the run at most this many steps after it came, and one chunk. A cluster must wait that long, and for
the save, before it kills.
"""

HEARTBEAT_S = 60
"""Seconds without a heartbeat after which a process counts as dead, and JAX ends all others."""


def start_processes(
    coordinator: str = "",
    num_processes: int = 0,
    process_id: int = -1,
    timeout_s: float = 600,
    heartbeat_s: int = HEARTBEAT_S,
) -> bool:
    """Joins this process to the others of the run; must come before any question about devices.

    With `coordinator` ("host:port"), `num_processes` and `process_id` the three are used as given. Without
    them the cluster is detected the way `jax.distributed.initialize` does (Slurm, Open MPI, Cloud TPU,
    Kubernetes, or JAX_COORDINATOR_ADDRESS), and only if the environment has more than one process.

    A process without a heartbeat for `heartbeat_s` seconds, because it or its host died, ends all others: JAX aborts
    them. Where a broken connection is an error of the collective itself, as with Gloo, it comes sooner.

    Returns:
      Whether the run has been joined to a cluster.

    Raises:
      UsageError: If only some of the three are given, or the coordinator could not be reached in `timeout_s`. If it
        is reached but others never come, JAX aborts this process after about that time.
    """
    if coordinator:
        if num_processes < 1 or not 0 <= process_id < num_processes:
            raise UsageError(
                f"coordinator={coordinator} also needs num_processes >= 1 and 0 <= process_id < that; "
                f"got num_processes={num_processes} process_id={process_id}."
            )
        if process_id:
            _reach(coordinator, timeout_s)
        given: dict[str, Any] = dict(
            coordinator_address=coordinator, num_processes=num_processes, process_id=process_id
        )
    elif _environment_has_processes():
        given = {}
    else:
        return False
    try:
        jax.distributed.initialize(
            **given,
            initialization_timeout=math.ceil(timeout_s),
            heartbeat_timeout_seconds=heartbeat_s,
        )
    except Exception as error:
        raise UsageError(
            f"this process could not join the run ({given or 'cluster found in the environment'}): "
            f"{str(error).splitlines()[0]}; check that all processes were started and reach the coordinator."
        ) from error
    return True


def _reach(coordinator: str, timeout_s: float) -> None:
    """Waits until the coordinator listens; JAX would abort this process if it never does."""
    host, colon, port = coordinator.rpartition(":")
    if not colon or not port.isdigit():
        raise UsageError(f"coordinator={coordinator} is not of the form host:port.")
    until = time.monotonic() + timeout_s
    while True:
        try:
            return socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
        except OSError as error:
            if time.monotonic() > until:
                raise UsageError(
                    f"no coordinator answers at {coordinator} ({error.strerror or error}) within {timeout_s} s; check "
                    "that process 0 was started on that host and that its port is open to this one."
                ) from error
            time.sleep(0.1)


def _environment_has_processes() -> bool:
    """Whether a launcher's variables speak of more than one process."""
    env = os.environ
    counts = (env.get(name, "1") for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
    return (
        "JAX_COORDINATOR_ADDRESS" in env
        or any(count.isdigit() and int(count) > 1 for count in counts)
        or "," in env.get("TPU_PROCESS_ADDRESSES", "") + env.get("TPU_WORKER_HOSTNAMES", "")
        or "MEGASCALE_COORDINATOR_ADDRESS" in env
        or ("JOB_COMPLETION_INDEX" in env and importlib.util.find_spec("kubernetes") is not None)
        or _tpu_hosts() > 1
    )


def _tpu_hosts() -> int:
    """Returns how many hosts this TPU slice has, as a Cloud TPU VM's metadata server says; 1 anywhere else.

    No variable tells on such a machine. Honours what JAX and libtpu do: TPU_SKIP_MDS_QUERY, GCE_METADATA_IP.
    """
    if "TPU_SKIP_MDS_QUERY" in os.environ or not any(
        map(os.path.exists, ("/dev/accel0", "/dev/vfio/0"))
    ):
        return 1
    host = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    address = f"http://{host}/computeMetadata/v1/instance/attributes/worker-network-endpoints"
    question = urllib.request.Request(address, headers={"Metadata-Flavor": "Google"})
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with direct.open(question, timeout=5) as answer:
            return answer.read().count(b",") + 1
    except OSError:
        return 1


def check_same_on_all_processes(text: str, what: str) -> None:
    """Raises `UsageError` on every process if `text` differs on one; free with a single process."""
    if jax.process_count() == 1:
        return
    from jax.experimental import multihost_utils

    digest = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    odd = [i for i, other in enumerate(digests) if (other != digests[0]).any()]
    if odd:
        raise UsageError(
            f"{what} on process {odd[0]} differs from process 0; start all with the same flags and files."
        )


class Interruption:
    """What Ctrl-C and SIGTERM do to a loop, as `interruptible` gives it.

    Attributes:
      number: Of the first signal that came to this process, 0 while none has.
      gentle: Whether the first Ctrl-C only counts as `number`. Otherwise it raises at once, as it must while there is
        no step to save, such as in minutes of compilation. Of many processes none leaves alone, so there it counts.
    """

    def __init__(self):
        self.number = 0
        self.gentle = False
        self._agreed = -1

    def agreed(self, step: int) -> int:
        """Returns the signal to stop for after `step`, 0 for none.

        With many processes the answer is agreed on every `AGREE_EVERY` steps, so that all stop after the same one.
        """
        if jax.process_count() == 1:
            return self.number
        if step // AGREE_EVERY == self._agreed:
            return 0
        self._agreed = step // AGREE_EVERY
        from jax.experimental import multihost_utils

        return int(np.max(multihost_utils.process_allgather(np.int32(self.number))))


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Takes Ctrl-C and SIGTERM over while inside; outside the main thread, where no signal arrives, does nothing.

    A second Ctrl-C goes to the handler that was there before: Python's own raises `KeyboardInterrupt`.
    """
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption
        return

    def handle(number, frame):
        waits = interruption.gentle or jax.process_count() > 1
        if number == signal.SIGINT and (interruption.number or not waits):
            usual = before[number]
            (usual if callable(usual) else signal.default_int_handler)(number, frame)
        interruption.number = interruption.number or number

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, handle)
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def keep_programs(tell: Callable[[str], object] = print) -> Path:
    """Keeps compiled programs on disk from now on, so that each is compiled once on a machine, not once a process.

    Nothing calls it on import: commands do, and notebooks. The folder is that of `JAX_COMPILATION_CACHE_DIR`, or the
    one that JAX has been told, or one of this machine's kind below `$XDG_CACHE_HOME/jaxpar` or `~/.cache/jaxpar`:
    programs of other versions, and of processors with other features, lie in other folders, so that a home that several
    machines share is safe. There programs that took less than a tenth of a second are not kept, unless JAX was told
    otherwise.

    Args:
      tell: Called with a line that names the folder, when it is made.

    Returns:
      The folder.
    """
    asked = os.environ.get("JAX_COMPILATION_CACHE_DIR") or jax.config.jax_compilation_cache_dir
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(asked or caches / "jaxpar" / _kind_of_machine())
    if not asked:
        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        if not folder.exists():
            tell(f"compiled programs are kept in {folder}")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return folder


def _kind_of_machine() -> str:
    """Versions, and eight digits of a hash of what the processor can do."""
    features = f"{platform.machine()} {platform.processor()}"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    able = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()[:8]
    return f"jax-{jax.__version__}-jaxlib-{importlib.metadata.version('jaxlib')}-{able}"
