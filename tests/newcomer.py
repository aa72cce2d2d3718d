"""Runs what README, docs and notebooks show, as somebody who sees it first, and prints what was slow, silent or red.

    python tests/newcomer.py                                # in this environment: an hour and a half on two cores
    python tests/newcomer.py --short                        # what needs no compiling: ten seconds
    python tests/newcomer.py --fresh python3.12             # in a clone and an environment of its own, with pip
    python tests/newcomer.py docs/quickstart.md notebooks/05_neat.py        # these alone

Without names it runs README, the pages to install and of how-to, and each notebook with FAST=1: of
a page first its bash lines, then its Python in one piece. Left out is what needs the reader's own
files or an accelerator. A line is red if it ends with another code than 0 or takes half an hour,
silent where nothing is printed for over five seconds, slow if it takes twice what the page says
beside it, or five minutes where that says nothing, both by the clock and in processor time, which
others' work makes no longer. Ends with 1 if any is red.
"""

import argparse
import os
import pathlib
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
SILENT_S, SLOW_S, LIMIT_S = 5.0, 300.0, 1800.0
PAGES = ["README.md", "docs/install.md", *(f"docs/howto/{path.name}" for path in sorted(ROOT.glob("docs/howto/*.md"))),
         *(f"notebooks/{path.name}" for path in sorted(ROOT.glob("notebooks/*.py")))]  # fmt: skip
PAGES.remove("docs/howto/real_model.md")  # needs a real model, as tests/lm/test_smollm2.py does
LONG = "make test"
"""What is not run here, since CI runs it."""
SET_UP = ("pip ", "make ", "git ")
"""Lines that only a fresh environment runs."""
BROUGHT = re.compile(
    r"\.\.\.|corpus|my_notes|texts/|(?<!\bprompts)(?<!\bout=texts)\.jsonl\b|llama-folder|shakespeare|1a2b3c4d|FOLDER|PYTHON"
    r"|\b(?:srun|gcloud)\b|coordinator=|\.whl|git\+https|preset=(?:llama|gpt2|moe_1b)\w* (?!topology)"
)
"""In lines that need files, programs or chips which the reader has and this machine has not."""
ACCELERATOR = re.compile(
    r"\s*(?:on )?(?:an?|one|two|\d+)?(?: x)? ?(?:H100|H200|A100|GPU|TPU|v5[ep])s?\b"
)
"""How comments of lines begin that are for another machine."""
SHORT = ("jaxpar", "jaxpar lm --help")
UNITS = {"s": 1, "second": 1, "minute": 60, "hour": 3600}
NUMBERS = {"a": 1, "an": 1, "half": 0.5, "two": 2, "three": 3, "four": 4, "five": 5, "ten": 10}


class Line(NamedTuple):
    """A line to type, the seconds that the page states beside it, 0 if none, and what is shown of it if not itself."""

    text: str
    stated_s: float = 0.0
    name: str = ""


class Seen(NamedTuple):
    """What came of a line: seconds, the longest silence, exit code, the last that was printed, processor seconds."""

    seconds: float
    silence: float
    code: int
    last: str
    processor: float = float("inf")


def lines_of(page: str) -> list[Line]:
    """Returns the lines of a page's bash blocks, each once."""
    found: dict[str, Line] = {}
    for block in re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for row in block.replace("\\\n", " ").splitlines():
            text, _, comment = row.partition(" #")
            if text.strip() and not text.startswith("#") and not ACCELERATOR.match(comment):
                found.setdefault(text.strip(), Line(text.strip(), seconds_in(comment)))
    return list(found.values())


def lines_for(name: str, folder: pathlib.Path) -> list[Line]:
    """Returns what is to be typed for a page, whose Python goes into a file of the folder, or for a notebook."""
    if name.endswith(".py"):
        return [Line(f"FAST=1 MPLBACKEND=agg python {ROOT / name}", name=name)]
    page = (ROOT / name).read_text()
    lines, snippets = (
        lines_of(page),
        re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL),
    )
    if snippets:
        script = folder / (name.replace("/", "_") + ".py")
        script.write_text("\n".join(snippets))
        lines.append(Line(f"python {script}", name=f"Python of {name}"))
    return lines


def seconds_in(comment: str) -> float:
    """Returns the last time that a comment states, such as "about a minute" or "half an hour", in seconds."""
    stated = re.findall(
        r"\b(half an?|an?|two|three|four|five|ten|[\d.]+) (?:(second|minute|hour)s?|(s))\b", comment
    )
    times = (
        (NUMBERS.get(count.split()[0]) or float(count)) * UNITS[long or short]
        for count, long, short in stated
    )
    return max(times, default=0.0)


def watch(text: str, folder: pathlib.Path, env: dict[str, str]) -> Seen:
    """Runs a line by bash and hears when it prints."""
    began = last = time.monotonic()
    before = _processor_s()
    silence, said = 0.0, b""
    options = dict(
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with subprocess.Popen(["bash", "-c", text], start_new_session=True, **options) as process:
        try:
            while True:
                heard, _, _ = select.select(
                    [process.stdout], [], [], max(0, began + LIMIT_S - time.monotonic())
                )
                if not heard:
                    os.killpg(process.pid, signal.SIGKILL)
                got = os.read(process.stdout.fileno(), 2**16)
                now = time.monotonic()
                silence, last = max(silence, now - last), now
                if not got:
                    break
                said = (said + got)[-4000:]
        except BaseException:
            os.killpg(
                process.pid, signal.SIGKILL
            )  # a session of its own, which Ctrl-C does not reach
            raise
    spent = _processor_s() - before
    return Seen(
        time.monotonic() - began, silence, process.returncode, said.decode(errors="replace"), spent
    )


def _processor_s() -> float:
    """Returns the time that processes which this one has waited for, and those that they waited for, have computed."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def verdict(line: Line, seen: Seen) -> list[str]:
    """Returns which of red, silent and slow it was; a page's own Python and a notebook's may be silent."""
    slow = min(seen.seconds, seen.processor) > (2 * line.stated_s or SLOW_S)
    return [
        word
        for word, so in (
            ("RED", seen.code),
            ("silent", seen.silence > SILENT_S and not line.name),
            ("slow", slow),
        )
        if so
    ]


def in_this_environment(folder: pathlib.Path) -> dict[str, str]:
    """Returns the variables under which `python` and `jaxpar` are those of this process and its checkout."""
    programs = folder / "programs"
    programs.mkdir()
    for name, command in (("python", ""), ("jaxpar", "-m experiments ")):
        (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {command}"$@"\n')
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ["PATH"]])
    return os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


def in_a_fresh_one(folder: pathlib.Path, interpreter: str) -> dict[str, str]:
    """Clones the repository into the folder; returns the variables of a new, bare environment."""
    subprocess.run(["git", "clone", "-q", str(ROOT), str(folder / "jaxpar")], check=True)
    subprocess.run([interpreter, "-m", "venv", str(folder / "environment")], check=True)
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    path = os.pathsep.join([str(folder / "environment" / "bin"), os.environ["PATH"]])
    return kept | {"PATH": path, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(folder / "cache")}


def main(arguments: list[str]) -> int:
    """Returns how many lines were red."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "pages", nargs="*", default=PAGES, help="whose lines are run (default: see above)"
    )
    parser.add_argument("--short", action="store_true", help="only what needs no compiling")
    parser.add_argument(
        "--fresh", metavar="PYTHON", help="in a clone and an environment of this interpreter"
    )
    asked = parser.parse_args(arguments)
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        env = in_a_fresh_one(folder, asked.fresh) if asked.fresh else in_this_environment(folder)
        place = folder / "jaxpar" if asked.fresh else folder
        (place / "prompts.jsonl").write_text(
            '{"prompt": "def "}\n{"prompt": "import "}\n'
        )  # which a line reads
        if asked.short:
            lines = [Line(text) for text in SHORT]
        else:
            lines = list(
                {
                    line.text: line for page in asked.pages for line in lines_for(page, folder)
                }.values()
            )
        red = []
        for line in lines:
            is_set_up = line.text.startswith(SET_UP)
            if (
                line.text.startswith(LONG)
                or (is_set_up and not asked.fresh)
                or BROUGHT.search(line.text)
            ):
                print(f"{'left out':30} {line.text}", flush=True)
                continue
            seen = watch(line.text, place, env)
            words = verdict(line, seen)
            times = f"{seen.seconds:6.1f} s, of processors {seen.processor:6.1f} s, silent {seen.silence:4.1f} s"
            print(f"{times}  {' '.join(words) or 'ok':12} {line.name or line.text}", flush=True)
            if "RED" in words:
                red.append(line)
                print("\n".join("    " + row for row in seen.last.splitlines()[-12:]), flush=True)
        print(f"{len(red)} of {len(lines)} lines are red")
        return len(red)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
