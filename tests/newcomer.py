"""Runs what README shows, as somebody would who sees it for the first time, and prints what was slow, silent or red.

    python tests/newcomer.py                                # README, in this environment: half an hour on two cores
    python tests/newcomer.py --short                        # what needs no compiling: ten seconds
    python tests/newcomer.py --fresh python3.12             # in a clone and an environment of its own, with pip
    python tests/newcomer.py docs/quickstart.md             # another page

A line is red if it ends with another code than 0, silent where nothing is printed for over five seconds, slow if it
takes twice what the page says beside it, or five minutes where that says nothing. Ends with 1 if any line is red.
"""

import argparse
import os
import pathlib
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[1]
SILENT_S, SLOW_S = 5.0, 300.0
LONG = "make test"
"""What is not run here, since CI runs it."""
SET_UP = ("pip ", "make ", "git ")
"""Lines that only a fresh environment runs."""
SHORT = ("jaxpar", "jaxpar lm --help")
UNITS = {"s": 1, "second": 1, "minute": 60, "hour": 3600}
NUMBERS = {"a": 1, "an": 1, "half": 0.5, "two": 2, "three": 3, "four": 4, "five": 5, "ten": 10}


class Line(NamedTuple):
    """A line to type, and the seconds that the page states beside it, 0 if none."""

    text: str
    stated_s: float = 0.0


class Seen(NamedTuple):
    """What came of a line: seconds, the longest silence, exit code, the last that was printed."""

    seconds: float
    silence: float
    code: int
    last: str


def lines_of(page: str) -> list[Line]:
    """Returns the lines of a page's bash blocks, each once."""
    found: dict[str, Line] = {}
    for block in re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        for row in block.replace("\\\n", " ").splitlines():
            text, _, comment = row.partition(" #")
            if text.strip() and not text.startswith("#"):
                found.setdefault(text.strip(), Line(text.strip(), seconds_in(comment)))
    return list(found.values())


def seconds_in(comment: str) -> float:
    """Returns the last time that a comment states, such as "about a minute" or "half an hour", in seconds."""
    stated = re.findall(r"\b(half an?|an?|two|three|four|five|ten|[\d.]+) (?:(second|minute|hour)s?|(s))\b", comment)
    times = ((NUMBERS.get(count.split()[0]) or float(count)) * UNITS[long or short] for count, long, short in stated)
    return max(times, default=0.0)


def watch(text: str, folder: pathlib.Path, env: dict[str, str]) -> Seen:
    """Runs a line by bash and hears when it prints."""
    began = last = time.monotonic()
    silence, said = 0.0, b""
    options = dict(cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with subprocess.Popen(["bash", "-c", text], **options) as process:
        while True:
            select.select([process.stdout], [], [])
            got = os.read(process.stdout.fileno(), 2**16)
            now = time.monotonic()
            silence, last = max(silence, now - last), now
            if not got:
                break
            said = (said + got)[-4000:]
    return Seen(time.monotonic() - began, silence, process.returncode, said.decode(errors="replace"))


def verdict(line: Line, seen: Seen) -> list[str]:
    """Returns which of red, silent and slow it was."""
    slow = seen.seconds > (2 * line.stated_s or SLOW_S)
    return [word for word, so in (("RED", seen.code), ("silent", seen.silence > SILENT_S), ("slow", slow)) if so]


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
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = os.pathsep.join([str(folder / "environment" / "bin"), os.environ["PATH"]])
    return kept | {"PATH": path, "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": str(folder / "cache")}


def main(arguments: list[str]) -> int:
    """Returns how many lines were red."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", default=["README.md"], help="whose lines are run (default: README.md)")
    parser.add_argument("--short", action="store_true", help="only what needs no compiling")
    parser.add_argument("--fresh", metavar="PYTHON", help="in a clone and an environment of this interpreter")
    asked = parser.parse_args(arguments)
    folder = pathlib.Path(tempfile.mkdtemp())
    try:
        env = in_a_fresh_one(folder, asked.fresh) if asked.fresh else in_this_environment(folder)
        place = folder / "jaxpar" if asked.fresh else folder
        (place / "prompts.jsonl").write_text('{"prompt": "def "}\n{"prompt": "import "}\n')  # which a line reads
        lines = [line for page in asked.pages for line in lines_of((ROOT / page).read_text())]
        lines = [Line(text) for text in SHORT] if asked.short else lines
        red = []
        for line in lines:
            if line.text.startswith(LONG) or (line.text.startswith(SET_UP) and not asked.fresh):
                print(f"{'left out':30} {line.text}", flush=True)
                continue
            seen = watch(line.text, place, env)
            words = verdict(line, seen)
            times = f"{seen.seconds:6.1f} s, silent {seen.silence:4.1f} s"
            print(f"{times}  {' '.join(words) or 'ok':12} {line.text}", flush=True)
            if "RED" in words:
                red.append(line)
                print("\n".join("    " + row for row in seen.last.splitlines()[-12:]), flush=True)
        print(f"{len(red)} of {len(lines)} lines are red")
        return len(red)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
