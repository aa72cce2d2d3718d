"""Validation loss by PipeDream's delayed gradients, and without the delay, at equal numbers of tokens.

    python bench/pipedream.py                            # two CPU cores, about 12 minutes
    python bench/pipedream.py --stages 8 --rates 0.001

A language model of as many layers as stages over bytes of the default corpus. All see the same microbatches in the same
order: PipeDream over the stages, the same of one stage, whose updates have no delay, and Adam on the gradient of eight
microbatches at once, as any pipeline with a flush has it; what fills no flush of a call is left out. Nothing is timed:
the devices are simulated.
"""

import argparse
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from lm_models import lm_config

from jaxpar.lm import init
from jaxpar.lm.stages import stages
from jaxpar.lm.text.corpus import DataConfig
from jaxpar.lm.text.data import Windows, open_corpus
from jaxpar.mesh import MeshSpec, make_mesh, simulate_devices, use_mesh
from jaxpar.pipeline.asynchronous import PipeDream

ROWS, LENGTH, MICROBATCHES, FLUSH = (
    8,
    64,
    250,
    8,
)  # rows and tokens of a microbatch, how many a call, how many a flush


def microbatches(tokens, number: int, seed: int) -> dict:
    """Returns the microbatches of a call, [m, rows, tokens]."""
    batch = Windows(tokens, LENGTH, ROWS * MICROBATCHES, seed)(
        number, slice(0, ROWS * MICROBATCHES)
    )
    return {
        name: jnp.asarray(batch[name]).reshape(MICROBATCHES, ROWS, LENGTH)
        for name in ("tokens", "targets")
    }


def trained(model, params, data: list, rule, num_stages: int):
    """Returns the parameters after an update a microbatch, each gradient as late as of so many stages."""
    train = PipeDream(rule)
    with use_mesh(make_mesh(MeshSpec(stage=num_stages), jax.devices()[:num_stages])):
        state, run = train.init(model, params), jax.jit(lambda *args: train(model, *args))
        for batch in data:
            params, state, _ = jax.block_until_ready(
                run(params, state, batch)
            )  # simulated devices share few threads
    return params


def with_flush(model, params, data: list, rule):
    """Returns the parameters after an update every few microbatches."""

    def joined(x):
        return x[: MICROBATCHES // FLUSH * FLUSH].reshape(-1, FLUSH * ROWS, LENGTH)

    flushed = [jax.tree.map(joined, batch) for batch in data]
    return trained(model, params, flushed, rule, 1)


def main() -> None:
    """Prints a row a learning rate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--calls", type=int, default=8, help=f"of {MICROBATCHES} microbatches")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0001, 0.0003, 0.001, 0.003])
    options = parser.parse_args()
    simulate_devices(options.stages)
    config = lm_config(
        256,
        num_layers=options.stages,
        embed_dim=64,
        num_heads=4,
        mlp_dim=128,
        dtype="float32",
        tied=False,
    )
    model, params = stages(config), init(jax.random.key(0), config)
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus(DataConfig(), pathlib.Path(folder))
        data = [microbatches(corpus.train, number, 0) for number in range(options.calls)]
        unseen = jax.tree.map(
            lambda x: x.reshape(-1, LENGTH), microbatches(corpus.validation, 0, 1)
        )
    loss = jax.jit(lambda params: model.whole(params, unseen, None, model.total(unseen), 1.0)[0])
    print(
        f"| rate of Adam | {options.stages} stages | one stage | {FLUSH} microbatches an update | seconds |"
    )
    print("|---|---|---|---|---|")
    for rate in options.rates:
        start, rule = time.perf_counter(), optax.adam(rate)
        found = (
            trained(model, params, data, rule, options.stages),
            trained(model, params, data, rule, 1),
            with_flush(model, params, data, rule),
        )
        losses = " | ".join(f"{np.asarray(loss(each)):.3f}" for each in found)
        print(f"| {rate:g} | {losses} | {time.perf_counter() - start:.0f} |", flush=True)


if __name__ == "__main__":
    main()
