"""Tiers of the tests, and which tests of single papers have to run.

A tier is a marker: `pytest -m guards`. Files are listed here until a folder says the same.

    python tests/tiers.py          # the tier of every file, and why a paper's tests would run
"""

import hashlib
import sys
from collections import Counter
from pathlib import Path

import kept_programs
from closure import Imports

ROOT = Path(__file__).parents[1]
TIERS = {
    "guards": "structure, documents, fields, the repository: seconds each, first",
    "unit": "one piece of the library",
    "programs": "commands, algorithms and layouts as wholes, in the tests' own process",
    "processes": "what only processes of their own can show: launch, kill, start-up, other devices",
    "papers": "systems of one paper: where something that they import has changed",
}
"""The tiers in the order in which they run."""

GUARDS = (
    "test_architecture.py test_claims.py test_fields.py test_howto.py test_notation.py "
    "test_public_names.py test_repository.py"
).split()
PROCESSES = (
    "aot/test_topology.py decode/test_bench.py distributed/test_processes.py "
    "distributed/test_tpu.py experiments/test_interrupts.py experiments/test_kill.py "
    "experiments/test_launch.py "
    "experiments/test_runs_of_older_code.py io/test_many_savers.py "
    "nn/test_linear_attention_tpu.py context/test_context_tpu.py "
    "scan/test_kernels_tpu.py test_notebooks.py test_mutants.py test_packaging.py test_startup.py "
    "test_tiers.py"
).split()
PROGRAMS = ("contracts/", "distributed/", "experiments/", "own/", "test_docs.py", "verify/")
PAPERS = (
    "experimental/",
    "experiments/papers/",
    "pipeline/test_asynchronous.py",
    "rl/test_saliency.py",
)


def tier_of(file):
    """Returns the tier of a file of tests; its path begins with `tests/`."""
    name = file.removeprefix("tests/")
    if name in GUARDS:
        return "guards"
    if name.startswith(PAPERS):
        return "papers"
    if name in PROCESSES:
        return "processes"
    if name.startswith(PROGRAMS):
        return "programs"
    return "unit"


def digest_of(files, root=ROOT):
    """Returns a digest of each file's text, by name; configurations count where a command does."""
    paths = {root / file for file in files}
    if any(file.startswith("experiments/") for file in files):
        paths.update((root / "experiments" / "conf").rglob("*.yaml"))
    paths.update((root / "constraints.txt", root / "pyproject.toml"))
    digests = {}
    for path in sorted(paths):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        digests[path.relative_to(root).as_posix()] = digest[:16]
    return digests


def digests_of_papers(tests=None, root=ROOT):
    """Returns, for each file of a paper's tests, the digests of all that it depends on."""
    imports = Imports(root)
    if tests is None:
        paths = sorted((root / "tests").rglob("test_*.py"))
        files = [path.relative_to(root).as_posix() for path in paths]
        tests = [file for file in files if tier_of(file) == "papers"]
    return {test: digest_of(imports.closure(test), root) for test in tests}


def name_of_record():
    """Returns the name under which this interpreter's green papers are noted."""
    return f"papers-{sys.version_info.major}.{sys.version_info.minor}"


def reasons(folder, digests):
    """Returns why each paper's tests have to run: what changed since they passed here, or nothing.

    Args:
      folder: What `kept_programs.begin` returned: notes of one kind of machine and its versions.
      digests: What `digests_of_papers` returned.
    """
    passed = kept_programs.read(folder, name_of_record())
    found = {}
    for test, now in digests.items():
        before = passed.get(test)
        if before is None:
            found[test] = "they did not pass here yet"
            continue
        files = sorted(now.keys() | before.keys())
        changed = [file for file in files if now.get(file) != before.get(file)]
        found[test] = ""
        if changed:
            found[test] = f"changed: {', '.join(changed[:2])}"
        if len(changed) > 2:
            found[test] += f" and {len(changed) - 2} more"
    return found


def report(why):
    """Returns a line for each paper's tests: whether they run, and why."""
    lines = []
    for test, reason in sorted(why.items()):
        fate = "is left out: unchanged since it passed here"
        if reason:
            fate = f"runs: {reason}"
        lines.append(f"papers: {test} {fate}")
    return lines


def main():
    sys.path.insert(0, str(ROOT))
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    tests = [path.relative_to(ROOT).as_posix() for path in paths]
    for test in tests:
        print(f"{tier_of(test):10} {test}")
    counts = Counter(map(tier_of, tests))
    print(", ".join(f"{tier} {counts[tier]}" for tier in TIERS))
    folder, is_temporary = kept_programs.begin()
    print("\n".join(report(reasons(folder, digests_of_papers()))))
    kept_programs.end(folder, is_temporary)


if __name__ == "__main__":
    main()
