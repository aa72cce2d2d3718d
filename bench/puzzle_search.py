"""Learns puzzles by search within a budget of seconds, and says how many fresh levels are solved, a JSON line a puzzle.

    python bench/puzzle_search.py --seconds 420                       # a GPU: the cube at six scrambles, Sokoban 8 x 8
    python bench/puzzle_search.py --small --seconds 30                # two cores, small sizes

The budget is of each puzzle's training, compiling included. Every fifth update is told on stderr. "solved" is the share
of `--levels` fresh levels that the most visited actions solve; "policy" the same by one simulation a move, which is
the network's likeliest action.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

from envs.puzzles.rubiks_cube import RubiksCube, Scramble
from envs.puzzles.sokoban import Sokoban
from envs.puzzles.sokoban_levels import ReversePlay
from jaxpar.rl import AlphaZero, GuidedSearch, Network

BARS = {"cube": 0.9, "sokoban": 0.7}


def learners(small: bool) -> dict[str, tuple]:
    """By puzzle: generators of growing difficulty, the environment with the last, the learner, steps a test has."""
    wide = (64,) if small else (1024, 512)
    network = Network(
        encoder=wide, hidden=(32,) if small else (256,), activation="relu", layer_norm=True
    )
    search = GuidedSearch(8 if small else 64, noise=0.25)
    num_envs = 16 if small else 512
    cubes = [Scramble(2 if small else 3, moves) for moves in range(1, 3 if small else 7)]
    rooms = [ReversePlay(5, 1, 20, 10)] if small else [
        ReversePlay(8, 1, 80, 20), ReversePlay(8, 2, 80, 40), ReversePlay(8, 2, 80, 100)
    ]  # fmt: skip
    board = network if small else dataclasses.replace(network, conv=(64, 64))
    cube = AlphaZero(
        RubiksCube(cubes[-1]), network, search, num_envs=num_envs, num_steps=4 if small else 10
    )
    sokoban = AlphaZero(
        Sokoban(rooms[-1], rewards="dense"),
        board,
        search,
        num_envs=num_envs,
        num_steps=8 if small else 48,
    )
    return {
        "cube": (cubes, cube, 4 if small else 12),
        "sokoban": (rooms, sokoban, 8 if small else 100),
    }


def of_level(learner: AlphaZero, generator) -> AlphaZero:
    """The learner with levels of another generator."""
    env = learner.env
    assert isinstance(env, RubiksCube | Sokoban)
    return dataclasses.replace(learner, env=dataclasses.replace(env, generator=generator))


def trained(name: str, levels: list, learner: AlphaZero, seconds: float, seed: int):
    """Learns from the easiest levels on, the next when nine tenths are solved; returns weights and what was done."""
    key, start, place, updates = jax.random.key(seed), time.perf_counter(), 0, 0
    steps = [jax.jit(of_level(learner, level).step) for level in levels]
    params = learner.env.default_params
    state = learner.init(jax.random.fold_in(key, 0), params)
    info: dict = {}
    while time.perf_counter() - start < seconds:
        updates += 1
        state, info = steps[place](jax.random.fold_in(key, updates), state, params)
        solved = float(info["solved"])
        if updates % 5 == 0:
            told = {k: round(float(v), 4) for k, v in info.items()} | {
                "level": place,
                "update": updates,
            }
            print(name, json.dumps(told), file=sys.stderr, flush=True)
        if solved > 0.9 and place + 1 < len(levels):
            place += 1
    return state.weights, {
        "updates": updates,
        "level": place,
        "seconds": round(time.perf_counter() - start, 1),
    }


def solved_share(
    learner: AlphaZero, weights, steps: int, simulations: int, levels: int, seed: int
) -> dict:
    """Plays fresh levels by the most visited actions; the share solved, and what a second gave."""
    search = dataclasses.replace(learner.search, simulations=simulations, noise=0.0)
    tester = dataclasses.replace(
        learner, search=search, num_envs=levels, num_steps=steps, minibatches=1
    )
    play = jax.jit(
        lambda key: tester.play(key, weights, learner.env.default_params, greedy=True)[1]
    )
    jax.block_until_ready(play(jax.random.key(seed)))
    start = time.perf_counter()
    said = jax.block_until_ready(play(jax.random.key(seed + 1)))
    took = time.perf_counter() - start
    return {"solved": float(said["solved"]), "values/s": round(levels * steps * simulations / took)}


def main() -> None:
    """Trains and tests each puzzle."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=420)
    parser.add_argument("--puzzles", default="cube,sokoban")
    parser.add_argument("--levels", type=int, default=512)
    parser.add_argument(
        "--simulations",
        type=int,
        default=0,
        help="of a test's decision; 0: twice those of training",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    for name in args.puzzles.split(","):
        levels, learner, steps = learners(args.small)[name]
        weights, said = trained(name, levels, learner, args.seconds, args.seed)
        simulations = args.simulations or 2 * learner.search.simulations
        tested = solved_share(learner, weights, steps, simulations, args.levels, args.seed + 1000)
        policy = solved_share(learner, weights, steps, 1, args.levels, args.seed + 1000)
        row = {
            "puzzle": name,
            "device": jax.devices()[0].device_kind,
            "budget_s": args.seconds,
            "bar": BARS[name],
        }
        row |= (
            said
            | tested
            | {"simulations": simulations, "policy": policy["solved"], "levels": args.levels}
        )
        row["finite"] = bool(all(jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves(weights)))
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
