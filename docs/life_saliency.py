"""Draws _static/life_saliency.png, what agents' actions hang on by compute: `python docs/life_saliency.py`."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.experimental.action_saliency import HEARD, action_saliency
from jaxpar.io.figure import COLORS, GRAY, empty_figure, save, tidy
from jaxpar.life import Jitter, Lstm, World
from jaxpar.life.laws import FIRST_LAWS
from jaxpar.loop import run

OUT = pathlib.Path(__file__).resolve().parent / "_static" / "life_saliency.png"
TICKS, SEEDS, STEPS, LOOKS = (1, 4, 16), 3, 2000, 10
# An easier life than by the first laws, and ground that does not evaporate: heat is what inhabitants spend.
LAWS = dataclasses.replace(FIRST_LAWS, evaporation=0.0, aging=1 / 1024, fee=2.0, child=8.0)
PANELS = ("heat a step", "|d action / d ground|", "|d action / d message heard|")


def make(ticks: int) -> World:
    """A small world whose robots make that many operations a step."""
    brain = Lstm(hidden=16, width=16, mutation=Jitter(0.02))
    return World(brain, num_agents=64, num_robots=32, size=32, window=5, ticks=ticks, laws=LAWS)


def sizes(world: World, state) -> jax.Array:
    """Root mean square of the saliency of living agents, by the ground and by messages heard, `[2]`."""
    found, count = action_saliency(world, state), jnp.maximum(jnp.sum(state.agents.alive), 1)
    size = lambda x: jnp.sqrt(jnp.sum(x**2) / (count * x.shape[1]))  # noqa: E731
    return jnp.stack((size(found.ground), size(found.own[:, HEARD])))


@functools.partial(jax.jit, static_argnums=0)
def live(world: World, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Lives once a key; returns [heat, ground, message, alive] of `LOOKS` parts, and the book's largest imbalance."""

    def part(key, state, number):
        size = sizes(world, state)
        state, info = run(world, jax.random.fold_in(key, number), state, None, STEPS // LOOKS)
        told = jnp.stack((jnp.mean(info["heat"]), *size, jnp.mean(info["alive"])))
        return state, (told, jnp.max(jnp.abs(info["imbalance"])))

    def one(key):
        state = world.init(jax.random.fold_in(key, 2**32 - 1))
        return jax.lax.scan(functools.partial(part, key), state, jnp.arange(LOOKS))[1]

    told, wrong = jax.lax.map(one, keys)
    return told, jnp.max(wrong)


def main():
    """Lives in every world, prints a line each, and draws them."""
    rows = []
    for ticks in TICKS:
        told, wrong = map(np.asarray, live(make(ticks), jax.random.split(jax.random.key(0), SEEDS)))
        assert wrong == 0, "the book of energy does not balance"
        first, later = told[:, 0], told[:, LOOKS // 2 :].mean(1)
        shown = {"first part": first, "second half": later}
        print(json.dumps({"ticks": ticks} | {name: np.round(x.astype(float), 4).tolist() for name, x in shown.items()}),
              flush=True)  # fmt: skip
        rows.append((first, later))
    figure = empty_figure(9, 2.9)
    axes = figure.subplots(1, len(PANELS))
    for place, (axis, name) in enumerate(zip(axes, PANELS, strict=True)):
        later = np.array([later[:, place] for _, later in rows])
        for seed in range(SEEDS):
            axis.plot(TICKS, later[:, seed], "o", color=COLORS[seed], label=f"seed {seed}")
        axis.plot(TICKS, later.mean(1), color="black", label="mean")
        if place:
            at_first = float(np.mean([first[:, place] for first, _ in rows]))
            axis.axhline(at_first, color=GRAY, linestyle="--", label="first newcomers")
        axis.set_xscale("log", base=2)
        axis.set(
            xticks=TICKS,
            xticklabels=TICKS,
            xlabel="operations of a robot in a step",
            ylim=(0, None),
        )
        axis.set_title(name, fontsize=10)
        tidy(axis)
    axes[-1].legend(fontsize=7)
    save(figure, OUT, "Seeds differ more than settings")


if __name__ == "__main__":
    main()
