"""What a program costs before its first step: equations, kernels, and processor seconds to trace, lower and compile.

    python bench/compile_times.py --purejaxrl PATH --tensorneat PATH       # its folder `purejaxrl`; a checkout
    python bench/compile_times.py --cases planners --rounds 1
    python bench/compile_times.py --cases commands                         # a cold process of a command each

Programs are those of `bench/rl.py` (a whole run of PPO, the same hyper-parameters on both sides), of `bench/neat.py`
(many generations, the same sizes) and of `experiments.pomdp` (32 episodes by its presets of planners). The sides of a
case take turns, round after round, with JAX's caches emptied and none on disk. Seconds are those of all processors
that this process used, for machines that are not idle; medians. Equations are of the jaxpr with all inside of it,
kernels the fusions of the compiled program, each of which XLA's CPU compiler hands to LLVM: neither depends on the
load. `ratio` is to the peer's sum of seconds. PureJaxRL and TensorNEAT (GPL-3: run it, borrow nothing) run as they are.
"""

import argparse
import json
import os
import pathlib
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import neat as neat_bench
import rl
from harness import HERE, Table, chosen, say

from experiments import pomdp
from jaxpar.pomdp import simulate

ROOT = pathlib.Path(__file__).resolve().parents[1]
Program = tuple[Callable[..., Any], tuple[Any, ...]]
PLANNERS = {
    "Tiger, vopp": ("env=Tiger", "planner.leaf=zero", "planner.eta=1"),
    "Tiger, pomcp": ("env=Tiger", "planner=pomcp"),
    "Tiger, despot": ("env=Tiger", "planner=despot"),
    "RockSample-4-4, vopp": ("env=RockSample-4-4",),
    "RockSample-4-4, pomcp": ("env=RockSample-4-4", "planner=pomcp"),
}
COMMANDS = (
    "rl train.steps=5120 num_seeds=1",
    "pomdp env=Tiger planner.leaf=zero planner.eta=1 max_steps=1",
    "pomdp env=RockSample-4-4 max_steps=1",
    "neat task=xor train.steps=1",
)


def ppo(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Callable[[], Program]]]]:
    """Whole runs on CartPole, and on the game of MinAtar, as `bench/rl.py` makes them."""
    usual = dict(anneal=0, prng="env", purejaxrl=args.purejaxrl, num_steps=[128])
    cartpole = dict(env="CartPole-v1", rate=2.5e-4, activation="tanh", num_envs=4, minibatches=4)
    breakout = dict(
        env="Breakout-MinAtar", rate=5e-3, activation="relu", num_envs=64, minibatches=8
    )
    for case in (cartpole, breakout):
        flags = argparse.Namespace(**usual, **case)
        sides = {"jaxpar": rl.ours} | ({"PureJaxRL": rl.theirs} if args.purejaxrl else {})
        yield (
            str(case["env"]),
            {
                side: lambda make=make, flags=flags: (make(flags, 976), (jax.random.key(0),))
                for side, make in sides.items()
            },
        )


def planners(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Callable[[], Program]]]]:
    """What `experiments.pomdp` compiles for these flags."""
    del args

    def program(flags: tuple[str, ...]) -> Program:
        config = pomdp.compose(*flags)
        at = pomdp.make_setting(config)

        def play(keys):
            def one(key):
                return simulate(key, at.env, at.params, at.planner, at.updater, config.max_steps)

            return jax.vmap(one)(keys)

        return play, (jax.random.split(jax.random.key(0), config.at_once),)

    for name, flags in PLANNERS.items():
        yield name, {"jaxpar": lambda flags=flags: program(flags)}


def neat(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Callable[[], Program]]]]:
    """Generations of exclusive or, as `bench/neat.py` makes them."""
    flags = argparse.Namespace(**neat_bench.SIZES, tensorneat=args.tensorneat)
    sides: dict[str, Callable[[], Program]] = {
        f"jaxpar, {mode}": lambda mode=mode: neat_bench.our_run(flags, mode)
        for mode in ("fast", "canonical")
    }

    def peer() -> Program:
        whole, first, _ = neat_bench.tensorneat_run(flags)
        return whole, (first,)

    yield "exclusive or", sides | ({"TensorNEAT": peer} if args.tensorneat else {})


def built(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, float]:
    """Traces, lowers and compiles a function anew; what it took, and how large what came out is."""
    jax.clear_caches()
    now = [time.process_time()]
    traced = jax.jit(function).trace(*args)
    now.append(time.process_time())
    lowered = traced.lower()
    now.append(time.process_time())
    text = lowered.compile().as_text() or ""
    now.append(time.process_time())
    row = {name: now[i + 1] - now[i] for i, name in enumerate(("trace_s", "lower_s", "compile_s"))}
    return row | {
        "sum_s": now[-1] - now[0],
        "equations": equations(traced.jaxpr.jaxpr),
        "instructions": len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", text, re.M)),
        "kernels": text.count(" fusion("),
    }


def equations(jaxpr: Any) -> int:
    """How many equations a jaxpr has, with those inside of loops and calls."""
    inner = (item for eqn in jaxpr.eqns for value in eqn.params.values()
             for item in (value if isinstance(value, tuple | list) else (value,)))  # fmt: skip
    inner = (getattr(item, "jaxpr", item) for item in inner)
    return len(jaxpr.eqns) + sum(equations(item) for item in inner if hasattr(item, "eqns"))


def measure(
    cases: Iterator[tuple[str, dict[str, Callable[[], Program]]]], rounds: int, table: Table
) -> None:
    """Builds the programs of each case by turns, and adds a row a side."""
    for name, makers in cases:
        programs = {side: make() for side, make in makers.items()}
        found: dict[str, list[dict[str, float]]] = {side: [] for side in programs}
        for turn in range(rounds + 1):  # the first loads what is loaded when first used
            for side, program in programs.items():
                row = built(*program)
                found[side] += [row] if turn or not rounds else []
                say(f"{name}, {side}: {row['sum_s']:.1f} s")
        rows = {
            side: {key: statistics.median(row[key] for row in of) for key in of[0]}
            for side, of in found.items()
        }
        for side, row in rows.items():
            is_ours, peer = side.startswith("jaxpar"), list(rows)[-1]
            ratios = {
                "ratio": row["sum_s"] / rows[peer]["sum_s"],
                "of_kernels": row["kernels"] / rows[peer]["kernels"],
            }
            table.add(
                {"case": name, "side": side}
                | row
                | (ratios if is_ours and not peer.startswith("jaxpar") else {})
            )


def commands(table: Table) -> None:
    """Runs commands in processes of their own, without a cache, and adds the processors' seconds of each."""
    for flags in COMMANDS:
        command = [
            sys.executable,
            "-m",
            *f"experiments.{flags}".split(),
            "cache=false",
            "gif=false",
        ]
        with tempfile.TemporaryDirectory() as folder:
            began, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
        busy = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        row = {
            "case": f"`{flags}`",
            "side": "jaxpar",
            "sum_s": busy,
            "wall_s": time.perf_counter() - began,
        }
        table.add(row | ({"failed": done.stderr[-200:]} if done.returncode else {}))


def main() -> None:
    """Measures the cases that the flags ask for."""
    cases = {"ppo": ppo, "planners": planners, "neat": neat, "commands": None}
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", help=f"separated by commas, of {','.join(cases)}; by default all"
    )
    parser.add_argument(
        "--rounds", type=int, default=3, help="after one that warms up; 0 takes that one"
    )
    parser.add_argument("--purejaxrl", type=pathlib.Path, help="its folder `purejaxrl`")
    parser.add_argument("--tensorneat", default="", help="a checkout of TensorNEAT")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results" / "compile_times.json")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    seconds = {
        name: lambda row, key=f"{name}_s": f"{row[key]:.2f}"
        for name in ("trace", "lower", "compile", "sum")
    }
    table = Table({
        "case": lambda row: row["case"], "side": lambda row: row["side"],
        "equations": lambda row: f"{row['equations']:,.0f}", "instructions": lambda row: f"{row['instructions']:,.0f}",
        "kernels": lambda row: f"{row['kernels']:,.0f}", **seconds,
        "ratio": lambda row: f"{row['ratio']:.2f}", "of kernels": lambda row: f"{row['of_kernels']:.2f}",
    }, args.out)  # fmt: skip
    where = {
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    table.head(f"processor seconds; {json.dumps(where | {'jax': jax.__version__})}")
    for name in chosen(args.cases, cases):
        commands(table) if name == "commands" else measure(cases[name](args), args.rounds, table)


if __name__ == "__main__":
    main()
