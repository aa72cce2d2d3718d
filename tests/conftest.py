"""Strict numerics and eight fake CPU devices for every test."""

import collections
import gc
import os
import signal
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if os.environ["JAX_PLATFORMS"] == "cpu":  # read when Triton, where it is installed, is first imported
    os.environ["TRITON_INTERPRET"] = "1"

# Workers keep the memory that compiling frees for the next program, in place of handing it back page by page.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))
os.environ.setdefault("MALLOC_TOP_PAD_", str(2**26))

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

ROOT = Path(__file__).parents[1]

if jax.__version_info__ >= (0, 11):
    # XLA there makes compilers of MLIR anew for every program, at 2.7 times the work of its emitters of before. These
    # fuse more freely: without fused multiply-adds, whose place would depend on it, bits do not.
    FLAGS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_max_isa=AVX"
    # One piece of code a program, not up to 32 that are compiled side by side: a worker has one core.
    FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # LLVM's: tests compile much and run on next to nothing
jax.config.update("jax_traceback_in_locations_limit", 0)  # no line of a program is looked for in its source
gc.set_threshold(100_000, 50, 1000)  # traces allocate by the million; the usual thresholds cost a fifteenth of a run
# What an earlier run compiled is loaded, which takes a tenth of the time; a program is known by all of its text.
if not jax.config.jax_compilation_cache_dir:
    jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler():
    """Leaves few programs, and JAX's cache closed, to the next file.

    They are kept for good otherwise, each in pieces of memory of its own, of which the system allows a process 65,530:
    thousands of programs end in a segmentation fault of the compiler.
    """
    before = jax.config.jax_compilation_cache_dir
    yield
    pieces = Path("/proc/self/maps")
    if not pieces.exists() or pieces.read_bytes().count(b"\n") > 30_000:
        jax.clear_caches()
    if jax.config.jax_compilation_cache_dir != before:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def ctrl_c():
    """Gives Ctrl-C back to pytest: a command that runs in this process ends it where Ctrl-C is a command's own."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def x64():
    """Double precision for one test: what separates rounding from bugs."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def optimised():
    """LLVM's work for one test whose programs run for long."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


seconds = collections.Counter()  # by file, of setting up, running and tearing down its tests, on all workers


def pytest_runtest_logreport(report):
    seconds[report.location[0]] += report.duration


def pytest_terminal_summary(terminalreporter):
    if len(seconds) > 1:
        terminalreporter.section("slowest files")
        for file, spent in seconds.most_common(10):
            terminalreporter.write_line(f"{spent:7.1f}s {file}")
