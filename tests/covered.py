"""Lines and branches of the library that the tests execute, and which tests execute which line.

Each file of tests runs in a process of its own, several at a time, under coverage.py.
`tests/mutants.py --lines` reads what this writes: to look for a mutant, only the tests that execute
its line need to run.

    python tests/covered.py lines.json                     # every test that `make test` may run
    python tests/covered.py lines.json tests/solve --jobs 2
"""

import concurrent.futures
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from closure import described_parser

ROOT = Path(__file__).parents[1]
SETTINGS = """
[run]
branch = true
source = {root}/jaxpar
parallel = true
patch = subprocess
sigterm = true
data_file = {folder}/data
disable_warnings = no-data-collected, module-not-measured
"""


def run(test, root, folder):
    """Runs one file of tests; returns its seconds and the tests that failed."""
    folder.mkdir(parents=True)
    settings = folder / "settings"
    settings.write_text(SETTINGS.format(root=root, folder=folder))
    began = time.monotonic()
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}"]
    command += ["-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", test]
    env = os.environ | {"PYTHONPATH": import_path(root)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    seconds = time.monotonic() - began

    failed = failed_tests(done.stdout)
    if done.returncode not in (0, 1, 5):
        failed.append(test)
    if failed:
        print(done.stdout[-3000:], done.stderr[-1000:], flush=True)
    return seconds, failed


def failed_tests(printed):
    """Returns the tests that pytest names as failed; their names may have spaces."""
    return re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", printed, re.MULTILINE)


def import_path(root):
    """Returns a PYTHONPATH that begins with a checkout."""
    return os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])


def lines_of(folder, root):
    """Returns `{file: lines}` that the processes of one file of tests executed."""
    import coverage

    executed = defaultdict(set)
    for path in folder.glob("data.*"):
        data = coverage.CoverageData(basename=str(path))
        try:
            data.read()
        except coverage.exceptions.DataError as error:  # of a process that was killed as it wrote
            print(f"{path.name} is left out: {error}", flush=True)
            path.unlink()
            continue
        for file in data.measured_files():
            name = Path(file).relative_to(root).as_posix()
            executed[name].update(data.lines(file) or ())
    return executed


def pinned_pool(jobs):
    """Returns a pool of threads, each with cores of its own, which processes started there inherit.

    Otherwise every process makes a pool of threads for all cores, and they wait for each other.
    """
    cores = sorted(os.sched_getaffinity(0))
    shares = queue.SimpleQueue()
    for index in range(jobs):
        shares.put(cores[index::jobs] or [cores[index % len(cores)]])

    def pin():
        os.sched_setaffinity(0, shares.get())

    return concurrent.futures.ThreadPoolExecutor(max_workers=jobs, initializer=pin)


def branches_of(folder, root):
    """Returns the shares of the library's branches and lines that the tests took together."""
    settings = folder / "settings"
    settings.write_text(SETTINGS.format(root=root, folder=folder))
    data = [str(path) for path in sorted(folder.glob("*/data.*"))]
    tool = [sys.executable, "-m", "coverage"]
    report = folder / "report.json"
    combine = [*tool, "combine", f"--rcfile={settings}", "--quiet", "--keep", *data]
    subprocess.run(combine, cwd=root, check=True)
    write = [*tool, "json", f"--rcfile={settings}", "--quiet", "-o", str(report)]
    subprocess.run(write, cwd=root, check=True)
    totals = json.loads(report.read_text())["totals"]
    branches = totals["covered_branches"] / max(1, totals["num_branches"])
    return branches, totals["covered_lines"] / totals["num_statements"]


def main():
    parser = described_parser(__doc__)
    parser.add_argument("output", type=Path, help="the JSON file to write")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files and folders of tests")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files at a time")
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    options = parser.parse_intermixed_args()
    root = options.root.resolve()

    tests = []
    for name in options.tests:
        path = root / name
        found = [path]
        if path.is_dir():
            found = sorted(path.rglob("test_*.py"))
        tests += [each.relative_to(root).as_posix() for each in found]

    # The longest first, by an earlier run: what begins last decides when all is done.
    earlier = {}
    if options.output.exists():
        earlier = json.loads(options.output.read_text())["seconds"]
    tests.sort(key=lambda test: (-earlier.get(test, 60.0), -(root / test).stat().st_size))

    seconds = {}
    failed = []
    lines = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def measure(test):
            own = folder / test.replace("/", ".")
            spent, red = run(test, root, own)
            return test, spent, red, lines_of(own, root)

        with pinned_pool(options.jobs) as pool:
            running = [pool.submit(measure, test) for test in tests]
            for ended in concurrent.futures.as_completed(running):
                test, spent, red, executed = ended.result()
                seconds[test] = spent
                failed += red
                for file, numbers in executed.items():
                    for number in sorted(numbers):
                        lines[file][number].append(test)
                if len(seconds) % 40 == 0:  # what there is, should the rest be cut off
                    partial = {"seconds": seconds, "failed": failed, "lines": lines}
                    options.output.write_text(json.dumps(partial))
                print(f"{len(seconds):4} of {len(tests)} {spent:7.1f} s {test}", flush=True)
        branches, executed_lines = branches_of(folder, root)

    written = {
        "branches": branches,
        "executed_lines": executed_lines,
        "seconds": seconds,
        "failed": failed,
        "lines": lines,
    }
    options.output.write_text(json.dumps(written))
    for test, spent in sorted(seconds.items(), key=lambda row: -row[1])[:20]:
        print(f"{spent:7.1f} s {test}")
    print(f"{len(tests)} files of tests; red: {failed or 'none'}")
    print(f"branches of jaxpar: {100 * branches:.2f} %, lines: {100 * executed_lines:.2f} %")


if __name__ == "__main__":
    main()
