"""Worlds: steps a second by number of agents, and the memory of a step.

Whole runs as one program, `steps` steps after one such run that is thrown away; the median of `--rounds`. Memory is
what the compiled program of one step takes besides its state (`temp_size_in_bytes`).

    python bench/life.py                              # 128 and 1,024 agents, 256 robots, 256 x 256 cells
    python bench/life.py --agents 128 --size 64 --robots 32
    python bench/life.py --memory 256,512,1024,2048   # bytes against the number of agents, nothing is run
    python bench/life.py --jaxlife FOLDER             # beside JaxLife in that folder, 128 agents and 32 robots

JaxLife has no licence: nothing of it is here. Where a copy is at hand, `jax.tree_map`, which JAX has no longer, is put
back in this process alone, and its own command line gives its configuration.
"""

import argparse
import dataclasses
import importlib
import json
import pathlib
import runpy
import statistics
import sys
import time
import types

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax

from jaxpar.life import Lstm, World
from jaxpar.loop import run


def world_of(agents: int, robots: int, size: int) -> World:
    """The default world of that many."""
    births = max(1, agents // 16)
    return World(
        Lstm(),
        agents,
        num_start=agents,
        num_robots=robots,
        size=size,
        max_births=births,
        newcomers=births,
    )


def speed(world: World, steps: int, rounds: int) -> dict[str, float]:
    """Steps a second, and seconds of compilation."""
    state = jax.jit(world.init)(jax.random.key(0), None)
    begin = time.perf_counter()
    program = (
        jax.jit(lambda key, state: run(world, key, state, None, steps))
        .lower(jax.random.key(1), state)
        .compile()
    )
    compile_s, seconds = time.perf_counter() - begin, []
    for number in range(rounds + 1):
        begin = time.perf_counter()
        state, info = jax.block_until_ready(program(jax.random.key(number), state))
        seconds.append(time.perf_counter() - begin)
    assert not info["imbalance"].any()
    rate = steps / statistics.median(seconds[1:])
    return {
        "steps_per_s": round(rate, 1),
        "compile_s": round(compile_s, 1),
        "alive": int(info["alive"][-1]),
    }


def temporary(world: World) -> int:
    """Bytes that a step takes besides its state."""
    state = jax.eval_shape(world.init, jax.random.key(0))
    key = jax.eval_shape(lambda: jax.random.key(0))
    memory = jax.jit(world.step, donate_argnums=1).lower(key, state).compile().memory_analysis()
    return memory.temp_size_in_bytes


class Found(Exception):
    """The peer's own default configuration, caught before it draws."""


def peer(folder: pathlib.Path, steps: int, rounds: int) -> dict[str, float]:
    """Steps a second of the peer's own world with its own defaults: 128 agents, 32 robots, 128 x 128 cells."""
    jax.tree_map = jax.tree.map

    class Visualizer:
        def __init__(self, config: dict):
            raise Found(config)

    sys.modules["wandb"] = types.ModuleType("wandb")
    sys.modules["visualizer"] = types.ModuleType("visualizer")
    sys.modules["visualizer"].__dict__["Visualizer"] = Visualizer
    sys.path.insert(0, str(folder / "src"))
    before, sys.argv = sys.argv, ["main.py", "--no-render"]
    try:
        runpy.run_path(str(folder / "src" / "main.py"), run_name="__main__")
    except Found as found:
        config = found.args[0] | {"RETURN_WORLD_STATE": False}
    finally:
        sys.argv = before
    world = importlib.import_module("world.world").World(config)
    state, seconds = world.initialize(jax.random.PRNGKey(0)), []
    program = jax.jit(lambda state: jax.lax.scan(world.step, state, None, steps)[0])
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        state = jax.block_until_ready(program(state))
        seconds.append(time.perf_counter() - begin)
    return {"steps_per_s": float(f"{steps / statistics.median(seconds[1:]):.3g}")}


def main() -> None:
    """Prints a line of JSON a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--agents", default="128,1024")
    parser.add_argument("--robots", type=int, default=256)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", default="", help="numbers of agents")
    parser.add_argument("--jaxlife", type=pathlib.Path)
    args = parser.parse_args()
    head = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
    if args.memory:
        for agents in map(int, args.memory.split(",")):
            world = world_of(agents, args.robots, args.size)
            thin = dataclasses.replace(
                world, brain=Lstm(8, 8, 2)
            )  # the brain's own memory hides the world's
            print(json.dumps(head | {"agents": agents, "temp_bytes": temporary(thin)}), flush=True)
        return
    for agents in map(int, args.agents.split(",")):
        row = {"agents": agents, "robots": args.robots, "size": args.size}
        print(
            json.dumps(
                head
                | row
                | speed(world_of(agents, args.robots, args.size), args.steps, args.rounds)
            ),
            flush=True,
        )
    if args.jaxlife:
        ours = speed(world_of(128, 32, 128), args.steps, args.rounds)
        theirs = peer(args.jaxlife, args.steps, args.rounds)
        ratio = float(f"{ours['steps_per_s'] / theirs['steps_per_s']:.3g}")
        print(json.dumps(head | {"ours": ours, "jaxlife": theirs, "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main()
