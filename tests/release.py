"""Builds wheel and sdist, installs each into a bare environment, and runs one command of every pillar there.

    python tests/release.py python3.12 python3.11         # two cores: three minutes an interpreter and archive

`make release` calls it with every interpreter that it finds; the archives stay in dist/. Commands
run in an empty folder, away from the checkout, so that all they find is what was installed.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
SMALL = (
    "model.num_layers=1 model.embed_dim=32 model.attention.num_heads=2 "
    "model.attention.num_kv_heads=2 model.mlp.dim=64"
)
COMMANDS = (
    f"lm data.path=words.txt data.seq_len=16 data.batch_size=8 train.steps=4 train.eval_batches=1 {SMALL}",
    "rnn data.task=copy train.steps=2",
    "own preset=lm train.steps=2",
    "env env=CartPole-v1 num_envs=64 num_steps=16",
    "rl env=CartPole-v1 num_seeds=1 num_envs=4 num_steps=16 train.steps=128",
    "neat task=xor population=20 train.steps=2",
    "pomdp env=Tiger planner=pomcp episodes=1 max_steps=3",
    "life agents=16 size=16 train.steps=4",
    "estimate preset=tiny topology=h100:8",
    "pipeline",
)
"""The smallest of each pillar, and of what every user meets besides."""


def run(command: list[str], folder: pathlib.Path, say: str) -> bool:
    """Runs a command in a folder, prints how long it took and, where it failed, its last lines; returns whether not."""
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    print(
        f"{'ok ' if done.returncode == 0 else 'RED'} {time.monotonic() - began:6.1f} s  {say}",
        flush=True,
    )
    if done.returncode:
        print("\n".join("      " + line for line in done.stdout.splitlines()[-15:]), flush=True)
    return done.returncode == 0


def build(folder: pathlib.Path) -> list[pathlib.Path]:
    """Returns a wheel, and an sdist, of the files that git knows."""
    for old in folder.glob("jaxpar-*"):
        old.unlink()
    if not run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], ROOT, "build"):
        sys.exit(1)
    return [next(folder.glob("*.whl")), next(folder.glob("*.tar.gz"))]


def try_out(interpreter: str, archive: pathlib.Path, folder: pathlib.Path) -> int:
    """Installs an archive into a new environment of an interpreter; returns how many commands failed there."""
    (folder / "words.txt").write_text("alpha beta gamma delta epsilon\n" * 400)
    programs = folder / "environment" / "bin"
    wanted = f"{archive}[experiments]"
    print(f"\n{archive.name} on {interpreter}", flush=True)
    steps = [
        ([interpreter, "-m", "venv", "environment"], "environment"),
        (
            [str(programs / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt"), wanted],
            "install",
        ),
        (
            [str(programs / "python"), "-c", "from jaxpar import envs; print(envs.make('Tiger'))"],
            "import jaxpar.envs",
        ),
        ([str(programs / "jaxpar")], "jaxpar"),
        *(
            ([str(programs / "jaxpar"), *flags.split()], f"jaxpar {flags[:90]}")
            for flags in COMMANDS
        ),
    ]
    failed = 0
    for number, (command, say) in enumerate(steps):
        ok = run(command, folder, say)
        if not ok and number < 2:
            return len(steps)  # nothing can run there
        failed += not ok
    return failed


def main() -> None:
    """Ends with 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "interpreters", nargs="+", help="python3.12 and others; each gets environments of its own"
    )
    asked = parser.parse_args()
    failed = 0
    for archive in build(ROOT / "dist"):
        for interpreter in asked.interpreters:
            with tempfile.TemporaryDirectory() as folder:
                failed += try_out(interpreter, archive, pathlib.Path(folder))
    print(f"\n{failed} failed" if failed else "\nall run")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
