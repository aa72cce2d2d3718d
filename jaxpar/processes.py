"""Start-up of many processes: finding each other, and stopping when one is missing or was started otherwise."""

import hashlib
import importlib.util
import math
import os
import socket
import time
import urllib.request
from typing import Any

import jax
import numpy as np

from jaxpar.types import UsageError

__all__ = ["HEARTBEAT_S", "check_same_on_all_processes", "start_processes"]

HEARTBEAT_S = 60
"""Seconds without a sign of life after which a process counts as dead, and JAX ends all others."""


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
    Kubernetes, or JAX_COORDINATOR_ADDRESS), and only if the environment speaks of more than one process.

    A process that says nothing for `heartbeat_s` seconds, because it or its host died, ends all others: JAX aborts
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
            **given, initialization_timeout=math.ceil(timeout_s), heartbeat_timeout_seconds=heartbeat_s
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
    if "TPU_SKIP_MDS_QUERY" in os.environ or not any(map(os.path.exists, ("/dev/accel0", "/dev/vfio/0"))):
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
        raise UsageError(f"{what} on process {odd[0]} differs from process 0; start all with the same flags and files.")
