"""How processes find each other, and the sentence where they do not."""

import http.server
import importlib.util
import os
import pathlib
import re
import socket
import threading

import jax
import pytest

from jaxpar.processes import keep_programs, start_processes
from jaxpar.types import UsageError


@pytest.fixture
def joined(monkeypatch):
    """What `jax.distributed.initialize` was called with, in an environment that speaks of no other process."""
    for name in (
        "JAX_COORDINATOR_ADDRESS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "TPU_WORKER_HOSTNAMES",
        "TPU_PROCESS_ADDRESSES", "MEGASCALE_COORDINATOR_ADDRESS", "JOB_COMPLETION_INDEX", "TPU_SKIP_MDS_QUERY",
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GCE_METADATA_IP", "127.0.0.1:9")  # nobody listens there
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda **given: calls.append(given))
    return calls


def test_a_lone_process_joins_nothing(joined):
    assert start_processes() is False and not joined


@pytest.mark.parametrize(
    ("name", "alone", "several"),
    [
        ("SLURM_NTASKS", "1", "2"),
        ("OMPI_COMM_WORLD_SIZE", "1", "8"),
        ("TPU_WORKER_HOSTNAMES", "t0", "t0,t1"),
        ("TPU_PROCESS_ADDRESSES", "t0:1", "t0:1,t1:1"),
        ("JAX_COORDINATOR_ADDRESS", None, "t0:1234"),
        ("MEGASCALE_COORDINATOR_ADDRESS", None, "t0"),
        ("JOB_COMPLETION_INDEX", None, "0"),
    ],
)
def test_a_cluster_is_seen_in_the_environment(monkeypatch, joined, name, alone, several):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda spec: spec == "kubernetes" or find(spec)
    )
    if alone is not None:
        monkeypatch.setenv(name, alone)
        assert start_processes() is False
    monkeypatch.setenv(name, several)
    assert start_processes(timeout_s=7, heartbeat_s=5) is True
    assert joined == [dict(initialization_timeout=7, heartbeat_timeout_seconds=5)]


@pytest.mark.parametrize(
    ("endpoints", "several"), [("a:1:10.0.0.1", False), ("a:1:10.0.0.1,b:2:10.0.0.2", True)]
)
def test_a_tpu_pod_is_seen_in_the_metadata(monkeypatch, joined, endpoints, several):
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            known = self.path.endswith("/instance/attributes/worker-network-endpoints")
            assert known and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(endpoints.encode())

        def log_message(self, *_):
            pass

    exists = os.path.exists
    with http.server.HTTPServer(("127.0.0.1", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("GCE_METADATA_IP", f"127.0.0.1:{server.server_port}")
        assert start_processes() is False  # not a machine with TPUs
        monkeypatch.setattr(os.path, "exists", lambda path: path == "/dev/accel0" or exists(path))
        assert start_processes() is several and len(joined) == several
        monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
        assert start_processes() is False
        server.shutdown()


def test_a_coordinator_that_is_not_there_is_named():
    with socket.socket() as bound:  # which does not listen
        bound.bind(("localhost", 0))
        address = f"localhost:{bound.getsockname()[1]}"
        with pytest.raises(
            UsageError,
            match=rf"no coordinator answers at {address} \(.*\) within 0.2 s; check that",
        ):
            start_processes(address, num_processes=2, process_id=1, timeout_s=0.2)
    with pytest.raises(UsageError, match="coordinator=localhost is not of the form host:port."):
        start_processes("localhost", num_processes=2, process_id=1)


@pytest.fixture
def told_nothing(monkeypatch, tmp_path):
    """A home without compiled programs, and a JAX that has not been told where they are."""
    names = "jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs"
    before = [getattr(jax.config, name) for name in names]
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update(names[0], None)
    yield tmp_path / "jaxpar"
    for name, value in zip(names, before, strict=True):
        jax.config.update(name, value)


def test_programs_are_kept_by_versions_and_processor(told_nothing, monkeypatch):
    said = []
    folder = keep_programs(said.append)
    assert folder.parent == told_nothing and said == [f"compiled programs are kept in {folder}"]
    assert folder.name.startswith(f"jax-{jax.__version__}-jaxlib-")
    assert jax.config.jax_compilation_cache_dir == str(folder)
    jax.config.update("jax_compilation_cache_dir", None)
    folder.mkdir(parents=True)
    assert keep_programs(said.append) == folder and len(said) == 1, "its place is said once"

    plain = pathlib.Path.read_text

    def another(path, *args, **kinds):
        return "flags : sse avx512" if str(path) == "/proc/cpuinfo" else plain(path, *args, **kinds)

    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(pathlib.Path, "read_text", another)
    other = keep_programs(said.append)
    assert other.parent == folder.parent and other != folder, (
        "a processor with other features has programs of its own"
    )


def test_programs_are_kept_where_one_says(told_nothing, monkeypatch):
    jax.config.update("jax_compilation_cache_dir", "here")
    assert keep_programs() == pathlib.Path("here")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "there")
    assert (
        keep_programs() == pathlib.Path("there") and jax.config.jax_compilation_cache_dir == "there"
    )


def test_importing_the_library_keeps_no_programs():
    root = pathlib.Path(__file__).parents[1]
    texts = {path: path.read_text() for path in (root / "jaxpar").rglob("*.py")}
    naming = [
        path
        for path, text in texts.items()
        if re.search("compilation_cache_dir|keep_programs", text)
    ]
    assert naming == [root / "jaxpar" / "processes.py"]


def test_half_a_cluster_is_refused():
    with pytest.raises(
        UsageError,
        match="also needs num_processes >= 1 and 0 <= process_id < that; got num_processes=2",
    ):
        start_processes("localhost:1234", num_processes=2, process_id=2)
