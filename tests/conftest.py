"""Strict numerics and eight fake CPU devices for every test."""

import collections
import gc
import os
import resource
import signal
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if (
    os.environ["JAX_PLATFORMS"] == "cpu"
):  # read when Triton, where it is installed, is first imported
    os.environ["TRITON_INTERPRET"] = "1"
else:  # tests compare values: the fastest kernel is not worth the minutes of looking for it
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()
    )

# Workers keep the memory that compiling frees for the next program, in place of handing it back page by page.
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(2**31 - 1))
os.environ.setdefault("MALLOC_TOP_PAD_", str(2**26))

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxpar.mesh import simulate_devices

# XLA makes compilers of MLIR anew for every program, at 2.7 times the work of its emitters of before. These
# fuse more freely: without fused multiply-adds, whose place would depend on it, bits do not.
FLAGS = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_max_isa=AVX"
# One piece of code a program, not up to 32 that are compiled side by side: a worker has one core.
FLAGS += " --xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}".strip()
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
):  # as a shell starts what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

simulate_devices(8)
jax.config.update(
    "jax_disable_most_optimizations", True
)  # LLVM's: tests compile much and run on next to nothing
jax.config.update(
    "jax_traceback_in_locations_limit", 0
)  # no line of a program is looked for in its source
gc.set_threshold(
    100_000, 50, 1000
)  # traces allocate by the million; the usual thresholds cost a fifteenth of a run
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")

import kept_programs  # noqa: E402  # it reads the flags that are set above
import tiers  # noqa: E402

MAX_CPU_S = 60
"""Seconds of processor time that one file of tests may take; more is said at the end of a run."""
UNMEASURED_S_PER_KB = 1.0
"""What a file that no run has measured is taken to need, for the order."""


def pytest_addoption(parser):
    parser.addoption(
        "--papers",
        choices=("all", "changed"),
        default="all",
        help="tests of single papers: all, or where an import has changed",
    )


def pytest_configure(config):
    """Opens the folder of compiled programs; workers take what their controller found."""
    for tier, description in tiers.TIERS.items():
        config.addinivalue_line("markers", f"{tier}: {description}")
    config.addinivalue_line("markers", "gpu: needs a card, or shows more there (optional=True)")
    config.addinivalue_line("markers", "slow: long statistics; run by `make test-slow`")

    config.is_worker = hasattr(config, "workerinput")
    if config.is_worker:
        given = config.workerinput
        config.programs = Path(given["programs"])
        config.earlier_seconds = given["earlier_seconds"]
        config.left_out = given["left_out"]
    else:
        config.programs, config.is_temporary = kept_programs.begin()
        config.earlier_seconds = kept_programs.read(config.programs, "seconds")
        config.left_out = []
        if config.option.papers == "changed":
            config.paper_reasons = tiers.reasons(config.programs, tiers.digests_of_papers())
            config.left_out = [test for test, why in config.paper_reasons.items() if not why]

    # A program that an earlier run compiled is loaded in a tenth of the time.
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(config.programs))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Gives a worker what it needs to order and leave out the same tests as the others."""
    node.workerinput["programs"] = str(node.config.programs)
    node.workerinput["earlier_seconds"] = node.config.earlier_seconds
    node.workerinput["left_out"] = node.config.left_out


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Ends the run where a worker died; xdist gives its test to the next, which dies too."""
    session = node.config.pluginmanager.getplugin("dsession")
    if error is None or session.shouldstop:
        return
    work = {}
    if session.sched:
        work = session.sched.assigned_work.get(node, {})
    unfinished = [test for tests in work.values() for test, is_done in tests.items() if not is_done]
    test = next(iter(unfinished), "no test")
    worker = node.gateway.id
    session.shouldstop = f"worker {worker} died while it ran {test}: {error}; run that test alone"


def file_of(item):
    """Returns the path of an item's file from the root of the checkout."""
    return item.nodeid.split("::")[0]


def pytest_collection_modifyitems(config, items):
    """Marks tiers, leaves out what need not run, and puts guards and long files first."""
    left_out = [item for item in items if file_of(item) in config.left_out]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if file_of(item) not in config.left_out]

    no_gpu = pytest.mark.skip(reason="needs a GPU: make test-gpu")
    for item in items:
        item.add_marker(tiers.tier_of(file_of(item)))
        marker = item.get_closest_marker("gpu")
        if marker and not marker.kwargs.get("optional") and os.environ["JAX_PLATFORMS"] == "cpu":
            item.add_marker(no_gpu)

    def rank(item):
        file = file_of(item)
        is_guard = tiers.tier_of(file) == "guards"
        guess = UNMEASURED_S_PER_KB * item.path.stat().st_size / 1000
        return not is_guard, -config.earlier_seconds.get(file, guess), file

    named = [argument.split("::")[0] for argument in config.args]
    if not all(Path(name).is_file() for name in named):  # files that are named keep their order
        items.sort(key=rank)  # tests of one file keep their order


@pytest.fixture(autouse=True, scope="module")
def fresh_compiler():
    """Leaves few programs, and JAX's cache closed, to the next file.

    They are kept for good otherwise, each in pieces of memory of its own, of which the system
    allows a process 65,530: thousands of programs end in a segmentation fault of the compiler.
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


def processor_seconds():
    """Returns what this process and those that it has waited for have computed."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


clock = [processor_seconds()]  # when the last phase of a test ended in this process
seconds = collections.Counter()  # by file, on all workers
outcomes = collections.defaultdict(set)  # by file


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """Writes into each report the processor time since the last one."""
    outcome = yield
    now = processor_seconds()
    outcome.get_result().cpu_s = now - clock[0]
    clock[0] = now


def pytest_runtest_logreport(report):
    file = report.nodeid.split("::")[0]
    seconds[file] += getattr(report, "cpu_s", 0.0)
    outcomes[file].add(report.outcome)


def ran_whole_files(config):
    """Returns true where all fast tests of the files that ran were chosen."""
    chosen = any("::" in argument for argument in config.args) or config.option.keyword
    chosen = chosen or config.option.deselect
    return not chosen and config.option.markexpr == "not slow" and not config.option.maxfail


def pytest_sessionfinish(session, exitstatus):
    """Notes what the next run reads: seconds of files, and papers with green tests."""
    config = session.config
    if config.is_worker:
        return
    is_complete = exitstatus in (0, 1) and ran_whole_files(config)
    if is_complete:
        kept_programs.note(config.programs, "seconds", dict(seconds))
        green = [test for test, results in outcomes.items() if "failed" not in results]
        papers = [test for test in green if tiers.tier_of(test) == "papers"]
        if papers:
            kept_programs.note(
                config.programs, tiers.name_of_record(), tiers.digests_of_papers(papers)
            )


def pytest_unconfigure(config):
    if not getattr(config, "is_worker", True):
        kept_programs.end(config.programs, config.is_temporary)


def pytest_terminal_summary(terminalreporter):
    config = terminalreporter.config
    if config.option.papers == "changed":
        for line in tiers.report(config.paper_reasons):
            terminalreporter.write_line(line)
    if len(seconds) < 2:
        return
    terminalreporter.section("seconds of processor time by file")
    for file, spent in seconds.most_common(10):
        terminalreporter.write_line(f"{spent:7.1f} s {file}")
    terminalreporter.write_line(f"{sum(seconds.values()):7.1f} s in all")
    for file, spent in seconds.items():
        if spent > MAX_CPU_S:
            terminalreporter.write_line(f"{file}: {spent:.0f} s are over {MAX_CPU_S}; split it.")
