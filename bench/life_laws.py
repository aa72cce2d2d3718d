"""Laws under which a population lasts: how often all were dead, so that newcomers came, by seed.

All worlds of all rows live side by side, as one program; a line of JSON a row.

    python bench/life_laws.py                              # the table of docs/life.md, on a GPU
    python bench/life_laws.py --rows lasting               # its first row: 3 minutes of one H200
    python bench/life_laws.py --small --steps 2000 --seeds 3 --rows first,lasting      # 5 minutes of a busy core
"""

import argparse
import dataclasses
import functools
import json
import pathlib
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.life import Jitter, Laws, Lstm, World
from jaxpar.life.laws import FIRST_LAWS

ROWS = {
    "first": FIRST_LAWS,
    "easier": dataclasses.replace(FIRST_LAWS, aging=1 / 1024, fee=2, child=8),
    "former prices of acting": dataclasses.replace(
        FIRST_LAWS, start=64, child=4, fee=0, upkeep=1 / 8, aging=1 / 2048
    ),
    "fee and faster aging": dataclasses.replace(Laws(), fee=2, aging=1 / 1024, speak=0.25),
    "lasting": Laws(),
}
"""The rows of the table: laws, by name."""


class Lives(NamedTuple):
    """How populations fared: by chunk of steps and world, `[chunks, worlds]`.

    Attributes:
        arrivals: Steps at which newcomers came, since all were dead.
        fewest: Of the agents alive after any step.
        alive: Mean number of them.
        births: Mean number a step.
        age: Mean age, in steps, of the living, over steps.
    """

    arrivals: np.ndarray
    fewest: np.ndarray
    alive: np.ndarray
    births: np.ndarray
    age: np.ndarray


def usual_world() -> World:
    """The world of `python -m experiments.life`."""
    brain = Lstm(64, mutation=Jitter(0.02))
    return World(brain, num_agents=128, num_robots=32, size=64, window=9)


def small_world() -> World:
    """A world that two cores can run, with a slot for 16 cells, where the usual one has 32."""
    brain = Lstm(8, width=8, heads=2, mutation=Jitter(0.02))
    return World(
        brain,
        num_agents=64,
        num_robots=8,
        size=32,
        window=5,
        seen_agents=4,
        max_births=8,
        newcomers=8,
    )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=3)
def _live(world: World, length: int, keys, states, prices, first):
    """Lives `length` steps in every world; returns the states and what `Lives` holds of them."""

    def one(key, state, price):
        def body(carry, step):
            state, sums = carry
            arrivals, fewest, means = sums
            after, info = world.step(jax.random.fold_in(key, step), state, price)
            arrivals = arrivals + (after.lineages > state.lineages)
            fewest = jnp.minimum(fewest, info["alive"])
            means = means + jnp.stack([info["alive"], info["births"], info["age"]]) / length
            return (after, (arrivals, fewest, means)), None

        nothing = (jnp.int32(0), jnp.float32(world.num_agents), jnp.zeros(3))
        return jax.lax.scan(body, (state, nothing), first + jnp.arange(length))[0]

    return jax.vmap(one)(keys, states, prices)


def live(world: World, laws: list[Laws], seeds: list[int], steps: int, chunk: int = 500) -> Lives:
    """Lives `steps` steps, a multiple of `chunk`, under each of `laws` from each of `seeds`.

    Returns:
        `Lives` of all pairs, in the order of `laws`, those of one with each seed in turn.
    """
    pairs = [(each, seed) for each in laws for seed in seeds]
    prices = [each.prices() for each, _ in pairs]
    prices = jax.tree.map(lambda *x: jnp.asarray(x, jnp.int32), *prices)
    keys = jnp.stack([jax.random.key(seed) for _, seed in pairs])
    firsts = jax.vmap(jax.random.fold_in, (0, None))(keys, 2**30)  # no step has that number
    states = jax.jit(jax.vmap(world.init))(firsts, prices)

    parts = []
    for first in range(0, steps, chunk):
        states, (arrivals, fewest, means) = _live(world, chunk, keys, states, prices, first)
        parts.append(jax.device_get((arrivals, fewest, *means.T)))
    return Lives(*map(np.stack, zip(*parts, strict=True)))


def main() -> None:
    """Prints a line of JSON a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--seeds", type=int, default=10, help="how many, from 20")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    world = usual_world()
    if args.small:
        world = small_world()
    names = args.rows.split(",")
    seeds = [20 + number for number in range(args.seeds)]
    found = live(world, [ROWS[name] for name in names], seeds, args.steps)
    for number, name in enumerate(names):
        mine = slice(number * len(seeds), (number + 1) * len(seeds))
        half = len(found.alive) // 2
        row = {
            "device": jax.devices()[0].device_kind,
            "laws": name,
            "steps": args.steps,
            "arrivals": found.arrivals[:, mine].sum(0).tolist(),
            "fewest": found.fewest[:, mine].min(0).astype(int).tolist(),
            "alive_of_second_half": np.round(found.alive[half:, mine].mean(0)).astype(int).tolist(),
            "births_a_step": np.round(found.births[:, mine].astype(float).mean(0), 3).tolist(),
            "age_at_the_end": np.round(found.age[-1, mine]).astype(int).tolist(),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
