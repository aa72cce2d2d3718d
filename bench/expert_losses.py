"""Validation loss of a mixture of experts and of a dense model that costs as much a token, at equal steps.

    python bench/expert_losses.py                        # two layers of 32, three seeds
    python bench/expert_losses.py --presets --steps 100 --seeds 0
    python bench/expert_losses.py --failures 0,0.1,0.3,0.5 --steps 800 --plot failures.png   # Learning@home's question

Both are language models over bytes of the default corpus. They see the same batches and differ in their mlps alone.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax
import numpy as np

from experiments import lm
from jaxpar.lm import flops_per_token, num_params
from jaxpar.lm.text.data import Windows, open_corpus
from jaxpar.mesh import MeshSpec, make_mesh, use_mesh


def validation_loss(config: lm.Config, corpus) -> tuple[float, float]:
    """Trains a model, and returns its validation loss in nats a byte and its seconds, compiling included."""
    start, trainer, data = time.perf_counter(), lm.make_trainer(config), config.data
    windows = Windows(corpus.train, data.seq_len, data.batch_size, config.seed, data.pack)
    first, *rest = jax.random.split(jax.random.key(config.seed), config.train.steps + 1)
    state, step = jax.jit(trainer.init)(first), jax.jit(trainer.step, donate_argnums=1)
    for number, key in enumerate(rest):
        state, _ = step(key, state, functools.partial(windows, number)(slice(0, data.batch_size)))
    return lm.make_evaluate(config, corpus)(state)["validation/loss"], time.perf_counter() - start


SMALL = (
    "preset=tiny model.num_layers=2 model.embed_dim=32 "
    "model.attention.num_heads=2 model.attention.num_kv_heads=2 data.seq_len=64"
).split()
"""Two layers; eight experts of half the width, two of them a token."""
MODELS = {
    "dense": [*SMALL, "model.mlp.dim=64"],
    "experts": [
        *SMALL,
        "model.mlp.dim=32",
        "model.experts.num_experts=8",
        "model.experts.experts_per_token=2",
    ],
}
PRESETS = {"dense": ["preset=tiny"], "experts": ["preset=moe_tiny"]}


def by_failures(options: argparse.Namespace, flags: list[str]) -> None:
    """Prints the mixture's losses by the share of its experts that fail in training, and draws them."""
    rows = {}
    model = (PRESETS if options.presets else MODELS)["experts"]
    with (
        use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])),
        tempfile.TemporaryDirectory() as folder,
    ):
        print("| failures | validation loss of each seed, all experts answering |\n|---|---|")
        for rate in options.failures:
            config = lm.compose(*model, *flags, f"model.experts.failures={rate}")
            corpus = open_corpus(config.data, pathlib.Path(folder))
            configs = [dataclasses.replace(config, seed=seed) for seed in options.seeds]
            rows[rate] = [validation_loss(one, corpus)[0] for one in configs]
            print(f"| {rate} | {', '.join(f'{loss:.4f}' for loss in rows[rate])} |", flush=True)
    if options.plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.6, 3.6), layout="constrained")
        axes = figure.subplots()
        losses = np.array(list(rows.values()))
        mean = losses.mean(1)
        axes.errorbar(
            list(rows), mean, [mean - losses.min(1), losses.max(1) - mean], marker="o", capsize=3,
            label=f"mean and range of {len(options.seeds)} seeds" if len(options.seeds) > 1 else "one seed",
        )  # fmt: skip
        axes.set(
            xlabel="share of experts' answers that fail in training",
            ylabel="validation loss, nats a byte",
            title=f"Experts that fail: a mixture after {options.steps} steps, all answering",
        )
        axes.legend()
        figure.savefig(options.plot)


def main() -> None:
    """Prints a row a seed, and the means."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--presets", action="store_true", help="presets tiny and moe_tiny instead")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--failures", type=lambda s: [float(x) for x in s.split(",")], help="of the mixture alone"
    )
    parser.add_argument("--plot", type=pathlib.Path, help="of the losses by the share that fails")
    options = parser.parse_args()
    flags = [f"train.steps={options.steps}", "train.eval_batches=40"]
    if options.failures:
        return by_failures(options, flags)
    models = PRESETS if options.presets else MODELS
    configs = {name: lm.compose(*model, *flags) for name, model in models.items()}
    for name, config in configs.items():
        cost = flops_per_token(config.model, config.data.seq_len) / 1e6
        print(
            f"{name:9} {num_params(config.model):9,} parameters, {cost:.3f} MFLOP a token and step"
        )
    rows = []
    with (
        use_mesh(make_mesh(MeshSpec(), jax.devices()[:1])),
        tempfile.TemporaryDirectory() as folder,
    ):
        corpus = open_corpus(configs["dense"].data, pathlib.Path(folder))
        print("\n| seed | dense | experts | difference | seconds |\n|---|---|---|---|---|")
        for seed in options.seeds:
            found = [
                validation_loss(dataclasses.replace(c, seed=seed), corpus) for c in configs.values()
            ]
            (dense, first), (experts, second) = found
            rows.append((dense, experts))
            print(
                f"| {seed} | {dense:.4f} | {experts:.4f} | {experts - dense:+.4f} | {first:.0f}, {second:.0f} |",
                flush=True,
            )
    dense, experts = np.mean(rows, 0)
    print(f"| mean | {dense:.4f} | {experts:.4f} | {experts - dense:+.4f} | |")


if __name__ == "__main__":
    main()
